#include "kernels/cuda/blocks.h"
#include "kernels/cuda/parts.cuh"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 128;

/// Block 0 writes the tables, the others prepare a row of queries each.
template <class Params>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Params p) {
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.n_entries; i += kThreads)
      p.to_blocks[p.places[i]] = p.entries[i];
    for (int i = threadIdx.x; i < p.n_sequences; i += kThreads) {
      p.to_sequences[p.first_sequence + i] = p.sequences[i];
      p.to_query_positions[p.first_sequence + i] = p.query_positions[i];
    }
    for (int i = threadIdx.x; i <= p.n_sequences && p.n_sequences > 0; i += kThreads) {
      p.to_cost_before[p.first_sequence + i] = p.cost_before[i];
    }
    return;
  }
  __shared__ float row[codec::kMaxHeadDim];
  const int query = static_cast<int>(blockIdx.x) - 1;
  const std::int64_t from =
      query / p.n_heads * p.query_strides[0] + query % p.n_heads * p.query_strides[1];
  const std::size_t at = static_cast<std::size_t>(query) * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    row[d] = load_element(p.queries, p.query_type,
                          static_cast<std::size_t>(from + d * p.query_strides[2]));
    p.to_queries[at + d] = row[d];
  }
  if (p.to_turned == nullptr) return;
  turn(row, 1, p.head_dim, p.head_dim);
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) p.to_turned[at + d] = row[d];
}

__global__ void __launch_bounds__(kThreads) turn_kernel(const __grid_constant__ TurnParams p) {
  __shared__ float row[codec::kMaxHeadDim];
  const std::size_t at = static_cast<std::size_t>(blockIdx.x) * p.dim;
  for (int d = threadIdx.x; d < p.dim; d += kThreads) row[d] = p.rows[at + d];
  turn(row, 1, p.dim, p.dim);
  for (int d = threadIdx.x; d < p.dim; d += kThreads)
    store_element(p.out, p.out_type, at + d, row[d]);
}

}  // namespace

template <class Params>
Launch<Params> prepare_tables(const Params& params) {
  Launch<Params> launch;
  launch.function = reinterpret_cast<const void*>(&prepare_kernel<Params>);
  launch.grid = dim3(1U + (params.queries != nullptr ? static_cast<unsigned>(params.n_rows) : 0U));
  launch.block = kThreads;
  launch.params = params;
  return launch;
}

template Launch<StepParams> prepare_tables(const StepParams&);
template Launch<PrepareParams> prepare_tables(const PrepareParams&);

Launch<TurnParams> turn_rows(const TurnParams& params) {
  Launch<TurnParams> launch;
  launch.function = reinterpret_cast<const void*>(&turn_kernel);
  launch.grid = dim3(static_cast<unsigned>(params.n_rows));
  launch.block = kThreads;
  launch.params = params;
  return launch;
}

}  // namespace kvpool::cuda
