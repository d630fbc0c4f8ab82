#include <algorithm>

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/config.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/space.cuh"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 32;    // Queries of one KV head to a block of threads.
constexpr int kTokens = 32;  // Taken at a time.
constexpr int kRowThreads = kThreads / kRows;
constexpr int kMaxDim = codec::kMaxHeadDim;
constexpr int kOwn = kMaxDim / kRowThreads;  // Channels of a row that a thread sums.
constexpr int kScoreStride = kTokens + 1;

/// Shared memory, in floats.
struct Plan {
  int key_stride, value_stride, sealed_queries, keys, values, scores, state, total;
};
__host__ __device__ Plan plan_of(const AttendParams& p) {
  Plan plan{};
  plan.key_stride = p.head_dim + 1;
  plan.value_stride = p.value_dim + 1;
  const int rows = plan.value_stride > plan.key_stride ? plan.value_stride : plan.key_stride;
  plan.sealed_queries = kRows * plan.key_stride;
  plan.keys = plan.sealed_queries + kRows * plan.key_stride;
  plan.values = plan.keys + kTokens * rows;
  plan.scores = plan.values + kTokens * rows;
  plan.state = plan.scores + kRows * kScoreStride;
  plan.total = plan.state + 3 * kRows;
  return plan;
}

/// A row of queries: which head, which of the sequence's queries.
struct Row {
  int head, query;
};
__device__ Row row_of(const AttendParams& p, int row) {
  const int group = p.n_heads / p.n_kv_heads;
  return {static_cast<int>(blockIdx.y) % p.n_kv_heads * group + row / p.n_queries,
          row % p.n_queries};
}

__device__ bool sees(const AttendParams& p, std::int64_t query, std::int64_t key) {
  return !(p.causal && key > query) && !(p.window > 0 && key <= query - p.window);
}

__device__ float masked(const AttendParams& p, int sequence, const Row& row, std::int64_t key,
                        float score) {
  const std::int64_t at = sequence * p.mask_strides[0] + row.head * p.mask_strides[1] +
                          row.query * p.mask_strides[2] + key * p.mask_strides[3];
  if (!p.mask_is_bool) return score + static_cast<const float*>(p.mask)[at];
  return static_cast<const bool*>(p.mask)[at] ? score : -INFINITY;
}

/// A split's sums of a row, in `partials`: largest, sum, values.
__device__ float* partial_of(const AttendParams& p, int sequence, int head, int query, int split) {
  const std::size_t row =
      (static_cast<std::size_t>(sequence) * p.n_heads + head) * p.n_queries + query;
  return p.partials + (row * p.n_splits + split) * (2 + p.value_dim);
}

/// Grid: (splits, tiles of rows x KV heads, sequences).
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ float memory[];
  const Plan plan = plan_of(p);
  float* const queries = memory;
  float* const sealed_queries = memory + plan.sealed_queries;
  float* const keys = memory + plan.keys;
  float* const values = memory + plan.values;
  float* const scores = memory + plan.scores;
  float* const largest = memory + plan.state;
  float* const sums = largest + kRows;
  float* const offsets = sums + kRows;  // Of scores with sealed keys.

  const int sequence = blockIdx.z, split = blockIdx.x, kv_head = blockIdx.y % p.n_kv_heads;
  const int n_all_rows = p.n_heads / p.n_kv_heads * p.n_queries;
  const int first_row = static_cast<int>(blockIdx.y) / p.n_kv_heads * kRows;
  const int n_rows = min(kRows, n_all_rows - first_row);
  const std::int64_t position = p.query_positions[sequence];
  // The queries of the tile: all of them, if it holds more than one head.
  const bool one_head = first_row / p.n_queries == (first_row + n_rows - 1) / p.n_queries;
  const std::int64_t first_query = position + (one_head ? first_row % p.n_queries : 0);
  const std::int64_t last_query =
      position + (one_head ? (first_row + n_rows - 1) % p.n_queries : p.n_queries - 1);

  for (int i = threadIdx.x; i < kRows * p.head_dim; i += kThreads) {
    const int r = i / p.head_dim, d = i % p.head_dim;
    float x = 0.F;
    if (r < n_rows) {
      const Row row = row_of(p, first_row + r);
      const std::size_t at =
          (static_cast<std::size_t>(sequence) * p.n_heads + row.head) * p.n_queries + row.query;
      x = p.scale * load_element(p.queries, p.type, at * p.head_dim + d);
    }
    queries[r * plan.key_stride + d] = sealed_queries[r * plan.key_stride + d] = x;
  }
  Space(p.sealed[0], kv_head)
      .enter_queries(sealed_queries, kRows, p.head_dim, plan.key_stride, offsets);
  for (int r = threadIdx.x; r < kRows; r += kThreads) largest[r] = -INFINITY, sums[r] = 0.F;

  const int own_row = threadIdx.x / kRowThreads, own_d = threadIdx.x % kRowThreads;
  float own[kOwn];
  for (float& x : own) x = 0.F;
  // Values are summed in their space: a block's, and what the sums are in.
  const Space value_space(p.sealed[1], kv_head);
  bool sums_sealed = false;
  const auto move_sums = [&] {
    __syncthreads();
    for (int j = 0; j < kOwn; ++j) {
      const int d = own_d + j * kRowThreads;
      if (d < p.value_dim) keys[own_row * plan.value_stride + d] = own[j];
    }
    const auto weight = [&](int row) { return sums[row]; };
    if (sums_sealed) {
      value_space.leave_sums(keys, kRows, p.value_dim, plan.value_stride, weight);
    } else {
      value_space.enter_sums(keys, kRows, p.value_dim, plan.value_stride, weight);
    }
    sums_sealed = !sums_sealed;
    for (int j = 0; j < kOwn; ++j) {
      const int d = own_d + j * kRowThreads;
      if (d < p.value_dim) own[j] = keys[own_row * plan.value_stride + d];
    }
    __syncthreads();
  };

  const SequenceEntry entry = p.sequences[sequence];
  const int n_blocks = entry.n_raw + entry.n_sealed;
  const int from = static_cast<int>(static_cast<std::int64_t>(n_blocks) * split / p.n_splits);
  const int to = static_cast<int>(static_cast<std::int64_t>(n_blocks) * (split + 1) / p.n_splits);
  for (int k = from; k < to; ++k) {
    const BlockEntry block =
        p.blocks[k < entry.n_raw ? entry.first_raw + k : entry.first_sealed + k - entry.n_raw];
    if (p.causal && block.position > last_query) continue;
    if (p.window > 0 && block.position + block.end_token <= first_query - p.window + 1) continue;
    const PartFormat& key_format = block.keys_sealed ? p.sealed[0] : p.raw[0];
    const PartFormat& value_format = block.values_sealed ? p.sealed[1] : p.raw[1];
    const auto* key_part = static_cast<const std::byte*>(block.keys) +
                           static_cast<std::size_t>(kv_head) *
                               (block.keys_sealed ? p.sealed_bytes[0] : p.raw_bytes[0]);
    const auto* value_part = static_cast<const std::byte*>(block.values) +
                             static_cast<std::size_t>(kv_head) *
                                 (block.values_sealed ? p.sealed_bytes[1] : p.raw_bytes[1]);
    const float* const q = block.keys_sealed ? sealed_queries : queries;
    if ((block.values_sealed != 0) != sums_sealed && !value_space.is_plain()) move_sums();
    for (int first = block.first_token; first < block.end_token; first += kTokens) {
      const int n = min(kTokens, block.end_token - first);
      for (int i = threadIdx.x; i < n * p.head_dim; i += kThreads) {
        const int t = i / p.head_dim, d = i % p.head_dim;
        keys[t * plan.key_stride + d] =
            stored_element(key_format, kv_head, key_part, first + t, d);
      }
      for (int i = threadIdx.x; i < n * p.value_dim; i += kThreads) {
        const int t = i / p.value_dim, d = i % p.value_dim;
        values[t * plan.value_stride + d] =
            stored_element(value_format, kv_head, value_part, first + t, d);
      }
      __syncthreads();
      // Two rows and two tokens a thread.
      const int r0 = threadIdx.x / 16, t0 = threadIdx.x % 16;
      float dots[2][2] = {};
      for (int d = 0; d < p.head_dim; ++d) {
        const float a0 = q[r0 * plan.key_stride + d], a1 = q[(r0 + 16) * plan.key_stride + d];
        const float b0 = keys[t0 * plan.key_stride + d], b1 = keys[(t0 + 16) * plan.key_stride + d];
        dots[0][0] += a0 * b0, dots[0][1] += a0 * b1;
        dots[1][0] += a1 * b0, dots[1][1] += a1 * b1;
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
          const int r = r0 + 16 * i, t = t0 + 16 * j;
          float score = dots[i][j] + (block.keys_sealed ? offsets[r] : 0.F);
          if (p.soft_cap > 0.F) score = p.soft_cap * tanhf(score / p.soft_cap);
          const std::int64_t key = block.position + first + t;
          if (r >= n_rows || t >= n) {
            score = -INFINITY;
          } else {
            const Row row = row_of(p, first_row + r);
            if (p.mask != nullptr) score = masked(p, sequence, row, key, score);
            if (!sees(p, position + row.query, key)) score = -INFINITY;
          }
          scores[r * kScoreStride + t] = score;
        }
      }
      __syncthreads();
      // A row's threads lie side by side in one warp.
      float top = largest[own_row];
      for (int t = own_d; t < kTokens; t += kRowThreads) {
        top = fmaxf(top, scores[own_row * kScoreStride + t]);
      }
      for (int d = 1; d < kRowThreads; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0U, top, d));
      float sum = 0.F;
      for (int t = own_d; t < kTokens; t += kRowThreads) {
        float& score = scores[own_row * kScoreStride + t];
        score = score == -INFINITY ? 0.F : exp2f(kLog2E * (score - top));
        sum += score;
      }
      for (int d = 1; d < kRowThreads; d *= 2) sum += __shfl_xor_sync(~0U, sum, d);
      const float factor = top == -INFINITY ? 1.F : exp2f(kLog2E * (largest[own_row] - top));
      __syncwarp();
      if (own_d == 0) {
        largest[own_row] = top;
        sums[own_row] = sums[own_row] * factor + sum;
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int d = own_d + j * kRowThreads;
        if (d >= p.value_dim) break;
        float x = own[j] * factor;
        for (int t = 0; t < n; ++t) {
          x += scores[own_row * kScoreStride + t] * values[t * plan.value_stride + d];
        }
        own[j] = x;
      }
      __syncthreads();
    }
  }
  if (sums_sealed) move_sums();
  __syncthreads();
  if (own_row >= n_rows) return;
  const Row row = row_of(p, first_row + own_row);
  const float top = largest[own_row];
  if (p.n_splits > 1) {
    float* const partial = partial_of(p, sequence, row.head, row.query, split);
    if (own_d == 0) partial[0] = top, partial[1] = sums[own_row];
    for (int j = 0; j < kOwn; ++j) {
      const int d = own_d + j * kRowThreads;
      if (d < p.value_dim) partial[2 + d] = own[j];
    }
    return;
  }
  float sum = sums[own_row], factor = 1.F;
  if (p.sinks != nullptr && top != -INFINITY) {
    const float all = fmaxf(top, p.sinks[row.head]);
    factor = exp2f(kLog2E * (top - all));
    sum = sum * factor + exp2f(kLog2E * (p.sinks[row.head] - all));
  }
  factor = sum == 0.F ? 0.F : factor / sum;  // A sum that is NaN stays so.
  const std::size_t at =
      (static_cast<std::size_t>(sequence) * p.n_heads + row.head) * p.n_queries + row.query;
  for (int j = 0; j < kOwn; ++j) {
    const int d = own_d + j * kRowThreads;
    if (d < p.value_dim) {
      store_element(p.out, p.type, at * p.value_dim + d, own[j] * factor);
    }
  }
}

constexpr int kMergeThreads = 128;

/// A block of threads a row.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendParams p) {
  const std::size_t at = blockIdx.x;
  const int query = static_cast<int>(at % p.n_queries);
  const int head = static_cast<int>(at / p.n_queries % p.n_heads);
  const int sequence = static_cast<int>(at / p.n_queries / p.n_heads);
  float top = -INFINITY;
  for (int s = 0; s < p.n_splits; ++s) {
    top = fmaxf(top, partial_of(p, sequence, head, query, s)[0]);
  }
  float sum = 0.F;
  if (top != -INFINITY && p.sinks != nullptr) {
    top = fmaxf(top, p.sinks[head]);
    sum = exp2f(kLog2E * (p.sinks[head] - top));
  }
  // Of a split that saw something.
  const auto weight_of = [&](const float* partial) {
    return partial[1] == 0.F ? 0.F : exp2f(kLog2E * (partial[0] - top));
  };
  for (int s = 0; s < p.n_splits; ++s) {
    const float* const partial = partial_of(p, sequence, head, query, s);
    sum += weight_of(partial) * partial[1];
  }
  for (int d = threadIdx.x; d < p.value_dim; d += kMergeThreads) {
    float x = 0.F;
    for (int s = 0; s < p.n_splits; ++s) {
      const float* const partial = partial_of(p, sequence, head, query, s);
      x += weight_of(partial) * partial[2 + d];
    }
    store_element(p.out, p.type, at * p.value_dim + d, sum == 0.F ? 0.F : x / sum);
  }
}

unsigned row_tiles(const AttendParams& p) {
  const int rows = p.n_heads / p.n_kv_heads * p.n_queries;
  return static_cast<unsigned>((rows + kRows - 1) / kRows);
}

}  // namespace

int attend_splits(const AttendParams& p, int n_blocks, int n_processors) {
  const auto tiles = static_cast<int>(row_tiles(p)) * p.n_kv_heads * p.n_sequences;
  return std::clamp(2 * n_processors / std::max(1, tiles), 1, std::max(1, n_blocks / 4));
}

std::size_t partial_floats(const AttendParams& p) {
  return static_cast<std::size_t>(p.n_sequences) * p.n_heads * p.n_queries * p.n_splits *
         (2 + p.value_dim);
}

Launch<AttendParams> attend(const AttendParams& params) {
  Launch<AttendParams> launch;
  launch.function = reinterpret_cast<const void*>(&attend_kernel);
  launch.grid = dim3(static_cast<unsigned>(params.n_splits),
                     row_tiles(params) * static_cast<unsigned>(params.n_kv_heads),
                     static_cast<unsigned>(params.n_sequences));
  launch.block = kThreads;
  launch.shared_bytes = static_cast<unsigned>(plan_of(params).total) * sizeof(float);
  launch.params = params;
  cudaFuncSetAttribute(launch.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(launch.shared_bytes));
  return launch;
}

Launch<AttendParams> merge(const AttendParams& params) {
  Launch<AttendParams> launch;
  launch.function = reinterpret_cast<const void*>(&merge_kernel);
  launch.grid = dim3(static_cast<unsigned>(params.n_sequences * params.n_heads * params.n_queries));
  launch.block = kMergeThreads;
  launch.params = params;
  return launch;
}

}  // namespace kvpool::cuda
