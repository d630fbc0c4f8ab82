#pragma once

#include <cstdint>

#include "kernels/cuda/operands.cuh"

namespace kvpool::cuda {

/// A lane's code words of a tile.
template <int kDim, int kBits>
struct CodeWords {
  static constexpr int kLaneBytes = kDim * kBits / 16, kWords = kLaneBytes / 4;
  std::uint32_t w[kWords];

  __device__ __forceinline__ void load(std::uint32_t at, int lane) {
    if constexpr (kLaneBytes >= 16) {
#pragma unroll
      for (int k = 0; k < kWords / 4; ++k) {
        const uint4 v = lds128(at + (k * 32 + lane) * 16);
        w[4 * k] = v.x, w[4 * k + 1] = v.y, w[4 * k + 2] = v.z, w[4 * k + 3] = v.w;
      }
    } else {
      const uint2 v = lds64(at + lane * 8);
      w[0] = v.x, w[1] = v.y;
    }
  }
};

template <class C>
using KeyWords = CodeWords<C::kDim, C::kKeyBits>;
template <class C>
using ValueWords = CodeWords<C::kDim, C::kValueBits>;

/// Byte k of the words, as the offset of a codeword's copy.
template <class Words>
__device__ __forceinline__ std::uint32_t entry(const Words& codes, int k, std::uint32_t row) {
  return __byte_perm(codes.w[k / 4], row, 0x7604 | k % 4 << 4);
}

template <class C>
struct SealedKeys {
  /// Kivi: the query times the block's scales, and its product with the block's biases.
  struct Block {
    std::uint32_t b[C::kKivi ? C::kSets : 1][C::kKivi ? C::kSteps : 1][4];
    float start[C::kKivi ? C::kSets : 1];
  };

  template <class Q>
  static __device__ __forceinline__ void begin(Block& block, const Q& q, std::uint32_t header,
                                               int lane) {
    if constexpr (C::kKivi) {
      const int c = lane & 3;
      float x[C::kSets][4] = {}, y[C::kSets][4] = {};
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        const uint4 s = lds128(header + 16 * (c + 4 * i));
        const uint4 z = lds128(header + 2 * C::kDim + 16 * (c + 4 * i));
        const std::uint32_t sw[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            block.b[n][i][k] = as_word(__hmul2(as_half2(sw[k]), as_half2(q.b[n][i][k])));
          }
          // The biases as they lie: of x the first eight rows are good, of y the last.
          mma16<__half>(x[n], z.x, z.y, z.z, z.w, q.b[n][i][0], q.b[n][i][2]);
          mma16<__half>(y[n], z.x, z.y, z.z, z.w, q.b[n][i][1], q.b[n][i][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kSets; ++n) {
        block.start[n] = 0x1p8F * ((x[n][0] + x[n][1]) + (y[n][2] + y[n][3]));
      }
    }
  }

  /// Scores of tokens g and g + 8, times `factor`.
  template <class Q>
  static __device__ __forceinline__ void scores(float (&s)[C::kSets][2], const Q& q,
                                                const Block& block, const float (&factor)[C::kSets],
                                                const KeyWords<C>& codes, std::uint32_t at,
                                                int lane, std::uint32_t key_row) {
    const int g = lane >> 2;
    if constexpr (C::kVq) {
      int a[C::kSets][4] = {};
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        std::uint32_t x, y, z, v;
        if constexpr (C::kKeySub == 2) {
          const auto pair = [&](int k) {
            return __byte_perm(table32(entry(codes, k, key_row)),
                               table32(entry(codes, k + 1, key_row)), 0x5410);
          };
          x = pair(8 * i), y = pair(8 * i + 4), z = pair(8 * i + 2), v = pair(8 * i + 6);
        } else if constexpr (C::kKeySub == 4) {
          x = table32(entry(codes, 4 * i, key_row)), y = table32(entry(codes, 4 * i + 1, key_row));
          z = table32(entry(codes, 4 * i + 2, key_row));
          v = table32(entry(codes, 4 * i + 3, key_row));
        } else {
          const uint2 a0 = table64(entry(codes, 2 * i, key_row)),
                      a1 = table64(entry(codes, 2 * i + 1, key_row));
          x = a0.x, y = a1.x, z = a0.y, v = a1.y;
        }
#pragma unroll
        for (int n = 0; n < C::kSets; ++n)
          mma32<true>(a[n], x, y, z, v, q.b[n][i][0], q.b[n][i][1]);
      }
#pragma unroll
      for (int n = 0; n < C::kSets; ++n) {
        s[n][0] = factor[n] * static_cast<float>(256 * a[n][0] + a[n][1]);
        s[n][1] = factor[n] * static_cast<float>(256 * a[n][2] + a[n][3]);
      }
    } else if constexpr (C::kAffine) {
      float f[C::kSets][2] = {};
      int a[C::kSets][4];
      constexpr int kStepsToGroup = C::kGroup / 32;
      std::uint32_t pairs[2][C::kGroups];
#pragma unroll
      for (int th = 0; th < 2; ++th) {
        const std::uint32_t from = at + C::kCodeBytes + (g + 8 * th) * C::kGroups * 4;
        if constexpr (C::kGroups == 4) {
          const uint4 v = lds128(from);
          pairs[th][0] = v.x, pairs[th][1] = v.y, pairs[th][2] = v.z, pairs[th][3] = v.w;
        } else if constexpr (C::kGroups == 2) {
          const uint2 v = lds64(from);
          pairs[th][0] = v.x, pairs[th][1] = v.y;
        } else {
          pairs[th][0] = lds32(from);
        }
      }
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        std::uint32_t x, y, z, v;
        if constexpr (C::kBits == 8) {
          x = codes.w[4 * i], y = codes.w[4 * i + 1], z = codes.w[4 * i + 2],
          v = codes.w[4 * i + 3];
        } else if constexpr (C::kBits == 4) {
          const std::uint32_t lo = codes.w[2 * i], hi = codes.w[2 * i + 1];
          x = lo & 0x0f0f0f0fU, z = (lo >> 4) & 0x0f0f0f0fU;
          y = hi & 0x0f0f0f0fU, v = (hi >> 4) & 0x0f0f0f0fU;
        } else {
          const std::uint32_t lo = codes.w[i / 2 * 2] >> (4 * (i % 2)),
                              hi = codes.w[i / 2 * 2 + 1] >> (4 * (i % 2));
          x = lo & 0x03030303U, z = (lo >> 2) & 0x03030303U;
          y = hi & 0x03030303U, v = (hi >> 2) & 0x03030303U;
        }
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
          if (i % kStepsToGroup == 0) a[n][0] = a[n][1] = a[n][2] = a[n][3] = 0;
          mma32<false>(a[n], x, y, z, v, q.b[n][i][0], q.b[n][i][1]);
          if (i % kStepsToGroup == kStepsToGroup - 1) {
            const int k = i / kStepsToGroup;
#pragma unroll
            for (int th = 0; th < 2; ++th) {
              const float2 p = __half22float2(as_half2(pairs[th][k]));
              f[n][th] += p.x * static_cast<float>(256 * a[n][2 * th] + a[n][2 * th + 1]) +
                          p.y * q.sum[n][k];
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < C::kSets; ++n) {
        s[n][0] = factor[n] * f[n][0];
        s[n][1] = factor[n] * f[n][1];
      }
    } else {
      constexpr int kPairs = 16 / C::kBits;  // To a word.
      float a[C::kSets][4] = {}, b[C::kSets][4] = {};
#pragma unroll
      for (int step = 0; step < 2 * C::kSteps; ++step) {
        const int word = step / (kPairs / 2) * 2, p = step % (kPairs / 2) * 2;
        const std::uint32_t x0 = field(codes.w[word], p), x1 = field(codes.w[word], p + 1);
        const std::uint32_t y0 = field(codes.w[word + 1], p), y1 = field(codes.w[word + 1], p + 1);
        const int i = step / 2, k = step % 2 * 2;
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
          mma16<__half>(step % 2 ? b[n] : a[n], x0, y0, x1, y1, block.b[n][i][k],
                        block.b[n][i][k + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kSets; ++n) {
        s[n][0] =
            factor[n] * (0x1p24F * ((a[n][0] + b[n][0]) + (a[n][1] + b[n][1])) + block.start[n]);
        s[n][1] =
            factor[n] * (0x1p24F * ((a[n][2] + b[n][2]) + (a[n][3] + b[n][3])) + block.start[n]);
      }
    }
  }

  /// Pair p of a word as subnormal fp16 numbers, near where it lies: the codes times
  /// 2^(kivi_field_shift(p) - 24). A pair that would reach the exponent's bits is moved down first.
  static __device__ __forceinline__ std::uint32_t field(std::uint32_t w, int p) {
    const int at = kivi_field_shift(C::kBits, p);
    return w >> (p * C::kBits - at) & (((1U << C::kBits) - 1) * 0x00010001U << at);
  }
};

template <class C>
struct SealedValues {
  static __device__ __forceinline__ std::uint32_t shift(std::uint32_t w, int left) {
    return left >= 0 ? w << left : w >> -left;
  }
  static __device__ __forceinline__ void add(Accumulator<C>& acc,
                                             const std::uint32_t (&w)[C::kSets][4],
                                             const ValueWords<C>& codes, std::uint32_t at, int lane,
                                             std::uint32_t value_row) {
    if constexpr (C::kVq) {
      // Four channels of the lane's four tokens.
      const auto products = [&](int u, const uint2(&x)[4]) {
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
          mma16<__half>(acc.o[n][u], x[0].x, x[0].y, x[1].x, x[1].y, w[n][0], w[n][1]);
          mma16<__half>(acc.o[n][u], x[2].x, x[2].y, x[3].x, x[3].y, w[n][2], w[n][3]);
        }
      };
      if constexpr (C::kValueSub == 8) {
#pragma unroll
        for (int i = 0; i < C::kSteps / 2; ++i) {
          uint2 low[4], high[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            const uint4 x = table128(entry(codes, 4 * i + t, value_row));
            low[t] = make_uint2(x.x, x.y), high[t] = make_uint2(x.z, x.w);
          }
          products(2 * i, low);
          products(2 * i + 1, high);
        }
      } else {
#pragma unroll
        for (int u = 0; u < C::kSteps; ++u) {
          uint2 x[4];
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            if constexpr (C::kValueSub == 4) {
              x[t] = table64(entry(codes, 4 * u + t, value_row));
            } else {
              x[t] = make_uint2(table32(entry(codes, 8 * u + t, value_row)),
                                table32(entry(codes, 8 * u + 4 + t, value_row)));
            }
          }
          products(u, x);
        }
      }
    } else {
      constexpr int kI = C::kDim / 64;
      const int g = lane >> 2, c = lane & 3;
      const std::uint32_t from = at + C::kCodeBytes + (C::kGroup == 32 ? (g >> 2) * kI * 4 : 0);
      std::uint32_t pairs[4][kI];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const std::uint32_t a = from + (2 * c + (t & 1) + 4 * (t & 2)) * C::kGroups * 4;
        if constexpr (kI == 2) {
          const uint2 v = lds64(a);
          pairs[t][0] = v.x, pairs[t][1] = v.y;
        } else {
          pairs[t][0] = lds32(a);
        }
      }
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          std::uint32_t x[2][4];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int t = 2 * h + e;
            // Codes of less than 8 bits are subnormal numbers, at bits 6 to 9 (bits 6 or 8): the
            // stored scales make up for it.
            const __half2 pair = as_half2(pairs[t][i]);
            const __half2 scale = __low2half2(pair), bias = __high2half2(pair);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if constexpr (C::kBits == 8) {
                std::uint32_t y = __byte_perm(codes.w[(i * 4 + t) * 2 + k / 2], 0x64646464U,
                                              k % 2 ? 0x4342 : 0x4140);
                y = as_word(__hsub2(as_half2(y), __float2half2_rn(1024.F)));
                x[e][k] = as_word(__hfma2(as_half2(y), scale, bias));
              } else if constexpr (C::kBits == 4) {
                const std::uint32_t y = shift(codes.w[i * 4 + t], 6 - 4 * k) & 0x03c003c0U;
                x[e][k] = as_word(__hfma2(as_half2(y), scale, bias));
              } else {
                const bool odd = C::kDim == 64 ? t % 2 : i % 2;
                const std::uint32_t y = shift(codes.w[C::kDim == 64 ? t / 2 : t], 6 - 4 * k) &
                                        (odd ? 0x03000300U : 0x00c000c0U);
                x[e][k] = as_word(__hfma2(as_half2(y), scale, bias));
              }
            }
          }
          acc.template add<__half>(i, h, x[0], x[1], w);
        }
    }
  }
};

}  // namespace kvpool::cuda
