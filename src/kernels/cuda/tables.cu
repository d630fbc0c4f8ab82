#include "kernels/cuda/blocks.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/space.cuh"

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
  __shared__ float offset;
  const int query = static_cast<int>(blockIdx.x) - 1;
  const std::int64_t from =
      query / p.n_heads * p.query_strides[0] + query % p.n_heads * p.query_strides[1];
  const std::size_t at = static_cast<std::size_t>(query) * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    row[d] = load_element(p.queries, p.query_type,
                          static_cast<std::size_t>(from + d * p.query_strides[2]));
    p.to_queries[at + d] = row[d];
  }
  if (p.to_sealed == nullptr) return;
  const int kv_head = query % p.n_heads / (p.n_heads / p.n_kv_heads);
  Space(p.sealed_keys, kv_head).enter_queries(row, 1, p.head_dim, p.head_dim, &offset);
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) p.to_sealed[at + d] = row[d];
  if (threadIdx.x == 0) p.to_bias[query] = p.scale * offset;
}

__global__ void __launch_bounds__(kThreads) leave_kernel(const __grid_constant__ LeaveParams p) {
  __shared__ float row[codec::kMaxHeadDim];
  const int result = static_cast<int>(blockIdx.x);
  const std::size_t at = static_cast<std::size_t>(result) * p.dim;
  for (int d = threadIdx.x; d < p.dim; d += kThreads) row[d] = p.results[at + d];
  const int sequence = result / p.n_heads;
  const float weight = p.cost_before[sequence + 1] != p.cost_before[sequence] ? 1.F : 0.F;
  Space(p.sealed_values, result % p.n_heads / (p.n_heads / p.n_kv_heads))
      .leave_sums(row, 1, p.dim, p.dim, [weight](int) { return weight; });
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

Launch<LeaveParams> leave_space(const LeaveParams& params) {
  Launch<LeaveParams> launch;
  launch.function = reinterpret_cast<const void*>(&leave_kernel);
  launch.grid = dim3(static_cast<unsigned>(params.n_rows));
  launch.block = kThreads;
  launch.params = params;
  return launch;
}

}  // namespace kvpool::cuda
