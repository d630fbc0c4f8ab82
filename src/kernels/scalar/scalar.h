#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace kvpool::kernels::scalar {

/// The reference level: plain loops over plain floats, for any CPU.
const KernelTable& table();

KeyKernels raw_keys(Layout layout);
ValueKernels raw_values(Layout layout);
KeyKernels affine_keys(Layout layout);
ValueKernels affine_values(Layout layout);
KeyKernels channel_keys(Layout layout);
KeyKernels vector_keys(Layout layout);
ValueKernels vector_values(Layout layout);
void rotate(const float* matrix, float* rows, int n_rows, int dim);

/// For kernels that use the queries as they come.
std::size_t query_bytes(const PartShape& shape, int n_queries);
void copy_queries(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared);

/// scores() and accumulate() by way of a decode() of each row.
using Decode = void (*)(const PartShape&, const std::byte*, int, int, float*);
template <Decode kDecode>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* queries = reinterpret_cast<const float*>(prepared);
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  float row[codec::kMaxHeadDim];
  std::size_t column = 0;
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    for (int t = 0; t < run.n_tokens[p]; ++t, ++column) {
      kDecode(shape, run.parts[p], t, 1, row);
      for (std::size_t q = 0; q < static_cast<std::size_t>(n_queries); ++q) {
        float sum = 0.0F;
        for (std::size_t d = 0; d < dim; ++d) sum += queries[q * dim + d] * row[d];
        out[q * stride + column] = sum;
      }
    }
  }
}

template <Decode kDecode>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  float row[codec::kMaxHeadDim];
  std::size_t column = 0;
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    for (int t = 0; t < run.n_tokens[p]; ++t, ++column) {
      kDecode(shape, run.parts[p], t, 1, row);
      for (std::size_t q = 0; q < static_cast<std::size_t>(n_queries); ++q) {
        const float weight = weights[q * stride + column];
        for (std::size_t d = 0; d < dim; ++d) out[q * dim + d] += weight * row[d];
      }
    }
  }
}

}  // namespace kvpool::kernels::scalar
