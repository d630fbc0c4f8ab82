#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::scalar {
namespace {

float max(const float* values, std::size_t n) {
  float result = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < n; ++i) result = std::max(result, values[i]);
  return result;
}

float exp_sum(float* values, std::size_t n, float shift) {
  float sum = 0.0F;
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = std::exp(values[i] - shift);
    sum += values[i];
  }
  return sum;
}

void soft_cap(float* values, std::size_t n, float cap) {
  for (std::size_t i = 0; i < n; ++i) values[i] = cap * std::tanh(values[i] / cap);
}

void scale(float* values, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i) values[i] *= factor;
}

void hadamard(float* rows, int n_rows, int dim) {
  const int size = dim & -dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(size));
  const std::size_t n_blocks =
      static_cast<std::size_t>(n_rows) * static_cast<std::size_t>(dim / size);
  for (std::size_t block = 0; block < n_blocks; ++block, rows += size) {
    for (int half = 1; half < size; half *= 2) {
      for (int i = 0; i < size; i += 2 * half) {
        for (int j = i; j < i + half; ++j) {
          const float a = rows[j];
          const float b = rows[j + half];
          rows[j] = a + b;
          rows[j + half] = a - b;
        }
      }
    }
    for (int i = 0; i < size; ++i) rows[i] *= scale;
  }
}

}  // namespace

std::size_t query_bytes(const PartShape& shape, int n_queries) {
  return static_cast<std::size_t>(n_queries) * static_cast<std::size_t>(shape.head_dim) *
         sizeof(float);
}

void copy_queries(const PartShape& shape, const float* queries, int n_queries,
                  std::byte* prepared) {
  std::memcpy(prepared, queries, query_bytes(shape, n_queries));
}

const KernelTable& table() {
  using enum Layout;
  static const KernelTable kTable = {
      .name = "scalar",
      .keys = {raw_keys(kFp32), raw_keys(kFp16), raw_keys(kBf16), affine_keys(kAffine8),
               affine_keys(kAffine4), affine_keys(kAffine2), channel_keys(kChannel4),
               channel_keys(kChannel2), vector_keys(kVector2), vector_keys(kVector4),
               vector_keys(kVector8), vector_keys(kVector8Wide)},
      .values = {raw_values(kFp32),
                 raw_values(kFp16),
                 raw_values(kBf16),
                 affine_values(kAffine8),
                 affine_values(kAffine4),
                 affine_values(kAffine2),
                 {},
                 {},
                 vector_values(kVector2),
                 vector_values(kVector4),
                 vector_values(kVector8),
                 vector_values(kVector8Wide)},
      .max = max,
      .exp_sum = exp_sum,
      .soft_cap = soft_cap,
      .scale = scale,
      .hadamard = hadamard,
      .rotate = rotate,
  };
  return kTable;
}

}  // namespace kvpool::kernels::scalar
