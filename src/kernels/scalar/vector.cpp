#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/scalar/scalar.h"
#include "kernels/vector_layout.h"

namespace kvpool::kernels::scalar {
namespace {

/// Half the squared length of each centroid, a whole number or half of one.
std::vector<float> half_squares(const codec::Codebook& book) {
  const auto dim = as_size(book.sub_dim);
  std::vector<float> squares(book.n_codes());
  for (std::size_t i = 0; i < book.centroids.size(); ++i) {
    const auto x = static_cast<float>(book.centroids[i]);
    squares[i / dim] += 0.5F * x * x;
  }
  return squares;
}

/// The centroid c nearest to x is the one of largest x . c - |c|^2 / 2, the first of equal ones.
/// Every level computes that in the same order.
template <int kSubDim, int kBits>
void encode(const PartShape& shape, const float* rows, int /*first_token*/, int /*n_tokens*/,
            std::byte* part) {
  const codec::Codebook& book = *shape.codebook;
  const std::vector<float> squares = half_squares(book);
  const float inverse = 1.0F / book.scale;
  std::memset(part, 0, vector_bytes(kSubDim, kBits, shape));
  for (int token = 0; token < shape.block_size; ++token, rows += shape.head_dim) {
    for (int sub = 0; sub < n_subs(kSubDim, shape.head_dim); ++sub) {
      float largest = -std::numeric_limits<float>::infinity();
      std::uint32_t nearest = 0;
      for (std::uint32_t code = 0; code < book.n_codes(); ++code) {
        float value = -squares[code];
        for (int j = 0; j < kSubDim; ++j) {
          value = std::fma(rows[sub * kSubDim + j] * inverse,
                           static_cast<float>(book.centroids[code * kSubDim + as_size(j)]), value);
        }
        if (value > largest) {
          largest = value;
          nearest = code;
        }
      }
      write_vector_code<kSubDim, kBits>(shape, part, sub, token, nearest);
    }
  }
}

template <int kSubDim, int kBits>
void decode(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  const codec::Codebook& book = *shape.codebook;
  for (int token = first_token; token < first_token + n_tokens; ++token) {
    for (int sub = 0; sub < n_subs(kSubDim, shape.head_dim); ++sub) {
      const std::size_t code = read_vector_code<kSubDim, kBits>(shape, part, sub, token);
      for (std::size_t j = 0; j < kSubDim; ++j) {
        *rows++ = book.scale * static_cast<float>(book.centroids[code * kSubDim + j]);
      }
    }
  }
}

template <int kSubDim, int kBits>
constexpr KeyKernels kKeys = {encode<kSubDim, kBits>, decode<kSubDim, kBits>, query_bytes,
                              copy_queries, scores<decode<kSubDim, kBits>>};
template <int kSubDim, int kBits>
constexpr ValueKernels kValues = {encode<kSubDim, kBits>, decode<kSubDim, kBits>,
                                  accumulate<decode<kSubDim, kBits>>};

}  // namespace

KeyKernels vector_keys(Layout layout) {
  if (layout == Layout::kVector8Wide) return kKeys<8, 12>;
  if (layout == Layout::kVector8) return kKeys<8, 8>;
  return layout == Layout::kVector4 ? kKeys<4, 8> : kKeys<2, 8>;
}

ValueKernels vector_values(Layout layout) {
  if (layout == Layout::kVector8Wide) return kValues<8, 12>;
  if (layout == Layout::kVector8) return kValues<8, 8>;
  return layout == Layout::kVector4 ? kValues<4, 8> : kValues<2, 8>;
}

void rotate(const float* matrix, float* rows, int n_rows, int dim) {
  float row[codec::kMaxHeadDim];
  for (int i = 0; i < n_rows; ++i, rows += dim) {
    std::memcpy(row, rows, as_size(dim) * sizeof(float));
    std::memset(rows, 0, as_size(dim) * sizeof(float));
    const float* from = matrix;
    for (int d = 0; d < dim; ++d, from += dim) {
      for (int j = 0; j < dim; ++j) rows[j] += row[d] * from[j];
    }
  }
}

}  // namespace kvpool::kernels::scalar
