#pragma once

#include <cstdint>

#include "kernels/cuda/config.cuh"
#include "kernels/cuda/primitives.cuh"

namespace kvpool::cuda {

template <class C>
struct Accumulator {
  float m[C::kSets], l[C::kSets], o[C::kSets][C::kSteps][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      m[n] = kLowest;
      l[n] = 0;
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u)
#pragma unroll
        for (int k = 0; k < 4; ++k) o[n][u][k] = 0;
    }
  }

  /// Takes the mean off the values summed so far and divides by smooth and `unit`. Channel
  /// 64i + 8g + 4j + k is o[.][2i + j][k].
  __device__ __forceinline__ void smooth(const float* smooth, const float* mean, float unit) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      float weight = l[n];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) weight += __shfl_xor_sync(kAllLanes, weight, d);
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        const int at = 64 * (u / 2) + 8 * g + 4 * (u % 2);
        const float4 s = __ldg(reinterpret_cast<const float4*>(smooth + at));
        const float4 z = __ldg(reinterpret_cast<const float4*>(mean + at));
        o[n][u][0] = (o[n][u][0] - weight * z.x) / (s.x * unit);
        o[n][u][1] = (o[n][u][1] - weight * z.y) / (s.y * unit);
        o[n][u][2] = (o[n][u][2] - weight * z.z) / (s.z * unit);
        o[n][u][3] = (o[n][u][3] - weight * z.w) / (s.w * unit);
      }
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n)
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u)
#pragma unroll
        for (int k = 0; k < 4; ++k) o[n][u][k] *= factor;
  }

  /// Transforms the sums (codec::hadamard()), for values that are stored as they are beside others
  /// that are stored transformed.
  __device__ __forceinline__ void turn() {
    const int lane = threadIdx.x & 31;
    constexpr float kUnit = C::kDim == 128 ? 0.088388347648318441F : 0.125F;
    const auto meet = [](float& a, float& b) {
      const float x = a;
      a = x + b;
      b = x - b;
    };
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        meet(o[n][u][0], o[n][u][1]), meet(o[n][u][2], o[n][u][3]);
        meet(o[n][u][0], o[n][u][2]), meet(o[n][u][1], o[n][u][3]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int u = 0; u < C::kSteps; u += 2) meet(o[n][u][k], o[n][u + 1][k]);
        if constexpr (C::kSteps == 4) {
          meet(o[n][0][k], o[n][2][k]), meet(o[n][1][k], o[n][3][k]);
        }
#pragma unroll
        for (int u = 0; u < C::kSteps; ++u) {
          float x = o[n][u][k];
#pragma unroll
          for (int d = 4; d < 32; d *= 2) {
            const float other = __shfl_xor_sync(kAllLanes, x, d);
            x = lane & d ? other - x : x + other;
          }
          o[n][u][k] = kUnit * x;
        }
      }
    }
  }

  /// Scores (in powers of two) of tokens g and g + 8 of each tile to weights in the layout of an
  /// operand.
  template <class P, int kTiles>
  __device__ __forceinline__ void weigh(const float (&s)[kTiles][C::kSets][2],
                                        std::uint32_t (&b)[kTiles][C::kSets][4],
                                        std::uint32_t select0, std::uint32_t select1) {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      float x = fmaxf(s[0][n][0], s[0][n][1]);
#pragma unroll
      for (int t = 1; t < kTiles; ++t) x = fmaxf(x, fmaxf(s[t][n][0], s[t][n][1]));
      if (__any_sync(kAllLanes, x > m[n])) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
        const float next = fmaxf(m[n], x), a = exp2_fast(m[n] - next);
        m[n] = next;
        l[n] *= a;
#pragma unroll
        for (int u = 0; u < C::kSteps; ++u)
#pragma unroll
          for (int k = 0; k < 4; ++k) o[n][u][k] *= a;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float p0 = exp2_fast(s[t][n][0] - m[n]), p1 = exp2_fast(s[t][n][1] - m[n]);
        l[n] += p0 + p1;
        const std::uint32_t t0 = transpose8(pack16<P>(p0, p0)), t1 = transpose8(pack16<P>(p1, p1));
        b[t][n][0] = __byte_perm(t0, 0, select0);
        b[t][n][1] = __byte_perm(t0, 0, select1);
        b[t][n][2] = __byte_perm(t1, 0, select0);
        b[t][n][3] = __byte_perm(t1, 0, select1);
      }
    }
  }

  /// Adds 8 channels of two tokens: a pair of channels a register. `half`: tokens 2c, 2c + 1 of the
  /// tile's first eight, or of its last.
  template <class P>
  __device__ __forceinline__ void add(int i, int half, const std::uint32_t (&a0)[4],
                                      const std::uint32_t (&a1)[4],
                                      const std::uint32_t (&b)[C::kSets][4]) {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      mma16<P>(o[n][2 * i], a0[0], a0[1], a1[0], a1[1], b[n][2 * half], b[n][2 * half + 1]);
      mma16<P>(o[n][2 * i + 1], a0[2], a0[3], a1[2], a1[3], b[n][2 * half], b[n][2 * half + 1]);
    }
  }
};

/// kRows pieces of kN elements, `step` elements apart.
template <int kRows, int kN>
__device__ __forceinline__ void load_elements(const void* base, Element type, std::size_t at,
                                              int step, float (&x)[kRows][kN]) {
  if (type == Element::kFp32) {
    const float* p = static_cast<const float*>(base) + at;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int k = 0; k < kN; k += 4) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(p + r * step + k));
        x[r][k] = v.x, x[r][k + 1] = v.y, x[r][k + 2] = v.z, x[r][k + 3] = v.w;
      }
    return;
  }
  const __half* p = static_cast<const __half*>(base) + at;
  uint2 w[kRows][kN / 4];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < kN / 4; ++k) {
      w[r][k] = __ldg(reinterpret_cast<const uint2*>(p + r * step + 4 * k));
    }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < kN; k += 4) {
      const uint2 v = w[r][k / 4];
      if (type == Element::kFp16) {
        const float2 a = __half22float2(as_half2(v.x)), b = __half22float2(as_half2(v.y));
        x[r][k] = a.x, x[r][k + 1] = a.y, x[r][k + 2] = b.x, x[r][k + 3] = b.y;
      } else {
        x[r][k] = __uint_as_float(v.x << 16), x[r][k + 1] = __uint_as_float(v.x & 0xffff0000U);
        x[r][k + 2] = __uint_as_float(v.y << 16);
        x[r][k + 3] = __uint_as_float(v.y & 0xffff0000U);
      }
    }
}

/// The queries of a sequence and head, as operands of 16-bit products: register [i][k] holds
/// channels 8 (c + 4i) + 2k and the next.
template <class C, class P>
struct Query16 {
  std::uint32_t b[C::kSets][C::kSteps][4];
  static constexpr int kBytes = C::kSets * C::kSteps * 512;

  __device__ __forceinline__ void read(const std::uint32_t* from, int lane) {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n)
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        const uint4 v = reinterpret_cast<const uint4*>(from)[(n * C::kSteps + i) * 32 + lane];
        b[n][i][0] = v.x, b[n][i][1] = v.y, b[n][i][2] = v.z, b[n][i][3] = v.w;
      }
  }
  __device__ __forceinline__ void write(std::uint32_t* to, int lane) const {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n)
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        reinterpret_cast<uint4*>(to)[(n * C::kSteps + i) * 32 + lane] =
            make_uint4(b[n][i][0], b[n][i][1], b[n][i][2], b[n][i][3]);
      }
  }
  __device__ __forceinline__ void load(const void* queries, Element type, std::size_t row,
                                       int n_heads, int lane, float unit = 1.F) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      const int head = 4 * n + (g >> 1);
      float xs[C::kSteps][8];
      load_elements<C::kSteps, 8>(queries, type, (row + min(head, n_heads - 1)) * C::kDim + 8 * c,
                                  32, xs);
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        float(&x)[8] = xs[i];
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = head < n_heads ? x[k] * unit : 0;
        if (g & 1) {
#pragma unroll
          for (int k = 0; k < 8; ++k) x[k] -= round16<P>(x[k]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) b[n][i][k] = pack16<P>(x[2 * k], x[2 * k + 1]);
      }
    }
  }
};

/// The same as bytes: 256 * (even column) + (odd column) is the query over `unit`.
template <class C>
struct Query8 {
  std::uint32_t b[C::kSets][C::kSteps][2];
  /// Of head c, not of the column's.
  float unit[C::kSets];
  float sum[C::kSets][C::kGroups];
  static constexpr int kBytes = C::kSets * (C::kSteps * 2 + 1 + C::kGroups) * 128;

  __device__ __forceinline__ void read(const std::uint32_t* from, int lane) {
    const std::uint32_t* p = from + lane;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h, p += 32) b[n][s][h] = *p;
      unit[n] = __uint_as_float(*p);
      p += 32;
#pragma unroll
      for (int k = 0; k < C::kGroups; ++k, p += 32) sum[n][k] = __uint_as_float(*p);
    }
  }
  __device__ __forceinline__ void write(std::uint32_t* to, int lane) const {
    std::uint32_t* p = to + lane;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h, p += 32) *p = b[n][s][h];
      *p = __float_as_uint(unit[n]);
      p += 32;
#pragma unroll
      for (int k = 0; k < C::kGroups; ++k, p += 32) *p = __float_as_uint(sum[n][k]);
    }
  }
  __device__ __forceinline__ void load(const void* queries, Element type, std::size_t row,
                                       int n_heads, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      const int head = 4 * n + (g >> 1);
      float x[2 * C::kSteps][4];
      float top = 0;
      const std::size_t at = (row + min(head, n_heads - 1)) * C::kDim;
      if constexpr (C::kKeySub == 8) {  // A code's channels are both of a step's operands.
        float wide[C::kSteps][8];
        load_elements<C::kSteps, 8>(queries, type, at + 8 * c, 32, wide);
#pragma unroll
        for (int s = 0; s < 2 * C::kSteps; ++s)
#pragma unroll
          for (int k = 0; k < 4; ++k) x[s][k] = wide[s / 2][s % 2 * 4 + k];
      } else {
        load_elements<2 * C::kSteps, 4>(queries, type, at + 4 * c, 16, x);
      }
#pragma unroll
      for (int s = 0; s < 2 * C::kSteps; ++s)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (head >= n_heads) x[s][k] = 0;
          top = fmaxf(top, fabsf(x[s][k]));
        }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float inverse = top > 0 ? 32512.F / top : 0.F;
      unit[n] = __shfl_sync(kAllLanes, top * (1.F / 32512.F), 8 * c);
      int total[C::kGroups];
#pragma unroll
      for (int k = 0; k < C::kGroups; ++k) total[k] = 0;
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          std::uint32_t word = 0;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int v = __float2int_rn(x[2 * s + h][k] * inverse);
            const int low = static_cast<int>(static_cast<std::int8_t>(v & 255));
            const int part = (g & 1) ? low : (v - low) >> 8;
            word |= (part & 255) << (8 * k);
            total[32 * s / C::kGroup] += v;
          }
          b[n][s][h] = word;
        }
#pragma unroll
      for (int k = 0; k < C::kGroups; ++k) {
        int t = total[k];
        t += __shfl_xor_sync(kAllLanes, t, 1);
        t += __shfl_xor_sync(kAllLanes, t, 2);
        sum[n][k] = static_cast<float>(__shfl_sync(kAllLanes, t, 8 * c));
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void mask(float (&s)[C::kSets][2], int first, int end, int g) {
  if (first > 0 || end < kTileTokens) {
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      if (g < first || g >= end) s[n][0] = -INFINITY;
      if (g + 8 < first || g + 8 >= end) s[n][1] = -INFINITY;
    }
  }
}

}  // namespace kvpool::cuda
