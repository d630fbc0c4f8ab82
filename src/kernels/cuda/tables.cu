#include "kernels/cuda/blocks.h"
#include "kernels/cuda/copy.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/space.cuh"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kSlice = 32;

/// Blocks to a row of queries. Rotating one reads a matrix, which is split among them.
template <class Params>
__host__ __device__ int slices_of(const Params& p) {
  return p.to_sealed != nullptr && p.sealed_keys.quantizer.rotation != nullptr
             ? p.head_dim / kSlice
             : 1;
}

/// Block 0 writes the tables, the others prepare channels of a row of queries or copy one head's
/// new rows each.
template <class Sizes>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ PrepareParams<Sizes> p) {
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.n_entries; i += kThreads)
      p.to_blocks[p.places[i]] = p.entries[i];
    for (int i = threadIdx.x; i < p.n_grown; i += kThreads)
      p.to_blocks[p.grown_places[i]].end_token = p.grown_ends[i];
    for (int i = threadIdx.x; i < p.n_sequences; i += kThreads) {
      p.to_sequences[p.first_sequence + i] = p.sequences[i];
      if (p.to_query_positions == nullptr) continue;
      p.to_query_positions[p.first_sequence + i] = p.query_positions[i];
    }
    for (int i = threadIdx.x; i <= p.n_sequences && p.n_sequences > 0; i += kThreads) {
      p.to_cost_before[p.first_sequence + i] = p.cost_before[i];
    }
    return;
  }
  const int slices = slices_of(p), n_query_blocks = p.queries != nullptr ? p.n_rows * slices : 0;
  const int block = static_cast<int>(blockIdx.x) - 1;
  if (block >= n_query_blocks) {
    const int part = block - n_query_blocks, head = part % p.n_kv_heads;
    const int role = part / p.n_kv_heads % 2;
    const NewRows& rows = p.rows[part / p.n_kv_heads / 2];
    const RowLayout& layout = p.layouts[role];
    copy_head({.from = rows.from[role],
               .to = rows.to[role],
               .from_head = layout.from_head,
               .to_head = layout.to_head,
               .n_heads = static_cast<std::uint32_t>(p.n_kv_heads),
               .n_rows = rows.n_rows,
               .from_row = layout.from_row,
               .from_element = layout.from_element,
               .row_bytes = layout.row_bytes,
               .element_bytes = layout.element_bytes},
              static_cast<std::uint32_t>(head));
    return;
  }
  const int query = block / slices, slice = block % slices;
  const std::int64_t from =
      query / p.n_heads * p.query_strides[0] + query % p.n_heads * p.query_strides[1];
  const std::size_t at = static_cast<std::size_t>(query) * p.head_dim;
  const int d = static_cast<int>(threadIdx.x);
  float x = 0.F;
  if (d < p.head_dim) {
    x = load_element(p.queries, p.query_type,
                     static_cast<std::size_t>(from + d * p.query_strides[2]));
    if (slice == 0) p.to_queries[at + d] = x;
  }
  if (p.to_sealed == nullptr) return;
  const int kv_head = query % p.n_heads / (p.n_heads / p.n_kv_heads);
  const float offset = Space(p.sealed_keys, kv_head)
                           .enter_query<kThreads, kSlice>(
                               x, p.head_dim, slice,
                               [&](int channel, float y) { p.to_sealed[at + channel] = y; });
  if (slice == 0 && d == 0) p.to_bias[query] = p.scale * offset;
}

}  // namespace

template <class Sizes>
Launch<PrepareParams<Sizes>> prepare_tables(const PrepareParams<Sizes>& params) {
  Launch<PrepareParams<Sizes>> launch;
  launch.function = reinterpret_cast<const void*>(&prepare_kernel<Sizes>);
  const int n_query_blocks = params.queries != nullptr ? params.n_rows * slices_of(params) : 0;
  launch.grid = dim3(
      static_cast<unsigned>(1 + n_query_blocks + 2 * params.n_new_rows * params.n_kv_heads));
  launch.block = kThreads;
  launch.params = params;
  return launch;
}

template Launch<PrepareParams<OneStep>> prepare_tables(const PrepareParams<OneStep>&);
template Launch<PrepareParams<Step>> prepare_tables(const PrepareParams<Step>&);
template Launch<PrepareParams<BatchStep>> prepare_tables(const PrepareParams<BatchStep>&);
template Launch<PrepareParams<Tables>> prepare_tables(const PrepareParams<Tables>&);

}  // namespace kvpool::cuda
