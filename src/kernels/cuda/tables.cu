#include "kernels/cuda/blocks.h"
#include "kernels/cuda/copy.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/space.cuh"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// Each list by a warp of its own, as a warp reads different constants one after the other.
template <class Sizes>
__device__ void write_tables(const PrepareParams<Sizes>& p) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) {
    for (int i = lane; i < p.n_entries; i += 32) p.to_blocks[p.places[i]] = p.entries[i];
  } else if (warp == 1) {
    for (int i = lane; i < p.n_grown; i += 32) {
      p.to_blocks[p.grown_places[i]].end_token = p.grown_ends[i];
    }
  } else if (warp == 2) {
    for (int i = lane; i < p.n_sequences; i += 32) {
      p.to_sequences[p.first_sequence + i] = p.sequences[i];
    }
  } else if (warp == 3) {
    for (int i = lane; i <= p.n_sequences && p.n_sequences > 0; i += 32) {
      p.to_cost_before[p.first_sequence + i] = p.cost_before[i];
    }
  } else if (warp == 4 && p.to_query_positions != nullptr) {
    for (int i = lane; i < p.n_sequences; i += 32) {
      p.to_query_positions[p.first_sequence + i] = p.query_positions[i];
    }
  }
}

/// A KV head's queries, one to a warp, or where they are rotated 32 * kColumns of their channels.
template <int kDim, int kColumns, class Sizes>
__device__ void prepare_queries(const PrepareParams<Sizes>& p, int kv_head, int block,
                                float* shared) {
  constexpr int kLane = kDim / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int slice = block & ((1 << p.slices_log2) - 1);
  const int first = (block >> p.slices_log2) * kWarps, row = first + warp;
  const int sequence = row / p.group, head = kv_head * p.group + row % p.group;
  const int query = sequence * p.n_heads + head;
  const std::size_t at = static_cast<std::size_t>(query) * kDim;
  const auto load = [&](float(&x)[kLane]) {
    load_elements(p.queries, p.query_type,
                  sequence * p.query_strides[0] + head * p.query_strides[1] +
                      lane * kLane * p.query_strides[2],
                  p.query_strides[2], x);
    if (slice == 0) store_floats(p.to_queries + at + lane * kLane, x);
  };
  const int n = min(kWarps, p.head_rows - first);
  if (p.to_sealed == nullptr) {
    float x[kLane];
    if (warp < n) load(x);
    return;
  }
  const float offset = Space(p.sealed_keys, kv_head)
                           .enter_queries<kDim, kColumns, kWarps>(
                               n, slice, shared, load, [&](int channel, const auto& y) {
                                 store_floats(p.to_sealed + at + channel, y);
                               });
  if (slice == 0 && lane == 0 && warp < n) p.to_bias[query] = p.scale * offset;
}

/// New rows of a head.
template <class Sizes>
__device__ void copy_rows(const PrepareParams<Sizes>& p, int kv_head, int block) {
  const auto thread = threadIdx.x, n_threads = static_cast<unsigned>(p.threads_a_copy);
  const int part = static_cast<int>((block * kThreads + thread) / n_threads), role = part & 1;
  if (part >= 2 * p.n_new_rows) return;
  const NewRows& rows = p.rows[part / 2];
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
            static_cast<std::uint32_t>(kv_head), thread % n_threads, n_threads);
}

/// Block (0, 0) writes the tables. Behind it each KV head has blocks for its queries, then for its
/// new rows.
template <class Sizes>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ PrepareParams<Sizes> p) {
  const int block = static_cast<int>(blockIdx.x) - 1, kv_head = static_cast<int>(blockIdx.y);
  if (block < 0) {
    if (kv_head == 0) write_tables(p);
  } else if (block < p.query_blocks) {
    __shared__ __align__(16) float shared[Space::query_floats(128, 2, kWarps)];
    if (p.head_dim > 64 && p.columns > 1) {
      prepare_queries<128, 2>(p, kv_head, block, shared);
    } else if (p.head_dim > 64) {
      prepare_queries<128, 1>(p, kv_head, block, shared);
    } else if (p.columns > 1) {
      prepare_queries<64, 2>(p, kv_head, block, shared);
    } else {
      prepare_queries<64, 1>(p, kv_head, block, shared);
    }
  } else {
    copy_rows(p, kv_head, block - p.query_blocks);
  }
}

}  // namespace

template <class Sizes>
Launch<PrepareParams<Sizes>> prepare_tables(const PrepareParams<Sizes>& params) {
  Launch<PrepareParams<Sizes>> launch;
  launch.function = reinterpret_cast<const void*>(&prepare_kernel<Sizes>);
  launch.block = kThreads;
  launch.params = params;
  PrepareParams<Sizes>& p = launch.params;

  if (p.queries != nullptr) {
    p.group = p.n_heads / p.n_kv_heads;
    p.head_rows = p.n_rows / p.n_kv_heads;
    const bool rotated = p.to_sealed != nullptr && p.sealed_keys.quantizer.rotation != nullptr;
    // Two channels a lane take fewer instructions, one gives more blocks.
    constexpr int kBlocks = 128;
    for (const int columns : {1, 2}) {
      p.columns = columns;
      const int slices = rotated ? p.head_dim / 32 / columns : 1;
      p.slices_log2 = slices == 4 ? 2 : slices - 1;
      p.query_blocks = (p.head_rows + kWarps - 1) / kWarps * slices;
      if (p.query_blocks * p.n_kv_heads <= kBlocks) break;
    }
  }
  // A warp is enough for a few rows.
  constexpr std::uint32_t kWarpBytes = 1024;
  p.threads_a_copy = 32;
  for (int i = 0; i < p.n_new_rows; ++i) {
    for (const RowLayout& layout : p.layouts) {
      if (p.rows[i].n_rows * layout.row_bytes > kWarpBytes) p.threads_a_copy = kThreads;
    }
  }
  const int copy_blocks = (2 * p.n_new_rows * p.threads_a_copy + kThreads - 1) / kThreads;
  launch.grid = dim3(static_cast<unsigned>(1 + p.query_blocks + copy_blocks),
                     static_cast<unsigned>(p.n_kv_heads));
  return launch;
}

template Launch<PrepareParams<OneStep>> prepare_tables(const PrepareParams<OneStep>&);
template Launch<PrepareParams<Step>> prepare_tables(const PrepareParams<Step>&);
template Launch<PrepareParams<BatchStep>> prepare_tables(const PrepareParams<BatchStep>&);
template Launch<PrepareParams<Tables>> prepare_tables(const PrepareParams<Tables>&);

}  // namespace kvpool::cuda
