#pragma once

#include <cstddef>

#include "kernels/cuda/config.cuh"
#include "kernels/cuda/primitives.cuh"
#include "kernels/cuda/segment.cuh"

namespace kvpool::cuda {

__device__ __forceinline__ void store(void* out, Element type, std::size_t at, float x) {
  if (type == Element::kFp32) {
    static_cast<float*>(out)[at] = x;
  } else if (type == Element::kFp16) {
    static_cast<__half*>(out)[at] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(x);
  }
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}

/// Whether results are summed in a space that is not the model's own.
template <class C>
__device__ __forceinline__ bool has_value_space(const DecodeParams& p) {
  if constexpr (C::kRawOnly) return false;
  return C::kVq ? p.value_smooth != nullptr : p.turned_values != 0;
}

/// Brings near what leaving the space of sealed values takes.
template <class C>
__device__ __forceinline__ void touch_space(const DecodeParams& p, int kv_head, int lane) {
  if constexpr (C::kVq) {
    if (p.value_smooth == nullptr) return;
    const int at = kv_head * C::kDim + lane * (C::kDim / 32);
    touch(p.value_smooth + at);
    touch(p.value_mean + at);
    touch(p.value_hadamard + kv_head);
  }
}

/// Brings one head's result back from the space of sealed values; x[u] is of channel 32u + lane.
template <class C>
__device__ __forceinline__ void leave_space(const DecodeParams& p, int kv_head, int lane,
                                            float (&x)[C::kSteps]) {
  if (!C::kVq || p.value_hadamard[kv_head]) {
    constexpr float kUnit = C::kDim == 128 ? 0.088388347648318441F : 0.125F;
#pragma unroll
    for (int u = 0; u < C::kSteps; ++u) {
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_xor_sync(kAllLanes, x[u], d);
        x[u] = lane & d ? other - x[u] : x[u] + other;
      }
    }
#pragma unroll
    for (int half = 1; half < C::kSteps; half *= 2) {
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        if (u & half) continue;
        const float a = x[u], b = x[u | half];
        x[u] = a + b;
        x[u | half] = a - b;
      }
    }
#pragma unroll
    for (int u = 0; u < C::kSteps; ++u) x[u] *= kUnit;
  }
  if constexpr (C::kVq) {
#pragma unroll
    for (int u = 0; u < C::kSteps; ++u) {
      const int at = kv_head * C::kDim + 32 * u + lane;
      x[u] = x[u] * __ldg(p.value_smooth + at) + __ldg(p.value_mean + at);
    }
  }
}

/// Zeros for sequences without tokens, shared out among the blocks.
template <class C>
__device__ __noinline__ void zero_empty(const DecodeParams& p, int n_blocks) {
  for (int s = blockIdx.x; s < p.n_sequences; s += n_blocks) {
    if (p.cost_before[s + 1] != p.cost_before[s]) continue;
    const int row = p.n_kv_heads * p.group * C::kDim;
    for (int k = threadIdx.x; k < row; k += C::kThreads) {
      store(p.out, p.out_type, static_cast<std::size_t>(s) * row + k, 0.F);
    }
  }
}

/// Adds up the partial results of n blocks from `first` on.
template <class C>
__device__ __forceinline__ void merge_blocks(const DecodeParams& p, const Segment& now, int first,
                                             int n, int share, int longer, const float* slots,
                                             float* merge_o) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto start_of = [&](int b) { return b * share + min(b, longer); };
  const auto slot_of = [&](int b) {
    return slots +
           (2 * static_cast<std::size_t>(b) + (now.low <= start_of(b) ? 0 : 1)) * kSlotFloats;
  };
  // Each thread sums four channels over every kSharers-th block. The first loads go out
  // before the factors are known.
  constexpr int kFours = C::kHeads * C::kDim / 4;
  constexpr int kSharers = C::kThreads > kFours ? C::kThreads / kFours : 1;
  constexpr int kFirst = C::kRawOnly ? 8 : 4;  // Others have no registers left.
  float4* sums = reinterpret_cast<float4*>(merge_o);
  float* parts = merge_o + C::kThreads * 4;  // A factor a head and block.
  const int four = threadIdx.x % kFours, sharer = threadIdx.x / kFours;
  const int head = four * 4 / C::kDim;
  const auto load = [&](int b) {
    return __ldcg(reinterpret_cast<const float4*>(slot_of(first + b)) + four);
  };
  float4 early[kFirst];
#pragma unroll
  for (int k = 0; k < kFirst; ++k) {
    if (sharer + k * kSharers < n) early[k] = load(sharer + k * kSharers);
  }
  touch_space<C>(p, now.kv_head, lane);
  if (warp < now.n_heads) {
    float m = kLowest, l = 0;
    for (int b = lane; b < n; b += 32) {
      const float* s = slot_of(first + b) + C::kHeads * C::kDim + warp;
      const float own = __ldcg(s), add = __ldcg(s + C::kHeads), top = fmaxf(m, own);
      l = l * exp2_fast(m - top) + add * exp2_fast(own - top);
      m = top;
      parts[b * C::kHeads + warp] = own;
    }
    const float top = warp_max(m);
    l = warp_sum(l * exp2_fast(m - top));
    const float inverse = l == 0.F ? 0.F : 1.F / l;  // What is NaN stays so.
    for (int b = lane; b < n; b += 32) {
      parts[b * C::kHeads + warp] = inverse * exp2_fast(parts[b * C::kHeads + warp] - top);
    }
  }
  __syncthreads();
  float4 x = make_float4(0, 0, 0, 0);
  const auto add = [&](int b, const float4& v) {
    const float f = parts[b * C::kHeads + head];
    x.x += f * v.x, x.y += f * v.y, x.z += f * v.z, x.w += f * v.w;
  };
  if (head < now.n_heads) {
#pragma unroll
    for (int k = 0; k < kFirst; ++k) {
      if (sharer + k * kSharers < n) add(sharer + k * kSharers, early[k]);
    }
#pragma unroll kFirst
    for (int b = sharer + kFirst * kSharers; b < n; b += kSharers) add(b, load(b));
  }
  sums[threadIdx.x] = x;
  __syncthreads();
  for (int h = warp; h < now.n_heads; h += C::kWarps) {
    float sum[C::kSteps] = {};
#pragma unroll
    for (int u = 0; u < C::kSteps; ++u) {
#pragma unroll
      for (int j = 0; j < kSharers; ++j) {
        sum[u] += merge_o[j * kFours * 4 + h * C::kDim + 32 * u + lane];
      }
    }
    if (has_value_space<C>(p)) leave_space<C>(p, now.kv_head, lane, sum);
#pragma unroll
    for (int u = 0; u < C::kSteps; ++u) {
      store(p.out, p.out_type, (static_cast<std::size_t>(now.row) + h) * C::kDim + 32 * u + lane,
            sum[u]);
    }
  }
}

}  // namespace kvpool::cuda
