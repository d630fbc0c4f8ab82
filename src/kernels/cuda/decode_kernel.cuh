#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/primitives.cuh"

/// The decode kernel, for one sealed format beside raw rows of T.
///
/// *Work.* The grid is persistent, one block a multiprocessor. The tokens of all sequences and heads
/// lie on one line, head by head, and each block takes an equal stretch of it: ragged batches
/// balance, and a codebook is loaded once. Where a stretch ends inside a sequence, a partial result
/// goes to the workspace, and the last of the sequence's blocks to finish merges them.
///
/// *A warp* takes 16 tokens at a time (a tile) for four query heads, or eight in two sets. In all
/// matrix products the 8 columns are (head, parity):
///   scores   tokens x columns; even columns the query's upper part, odd ones what rounding left of
///            it, so that thread (g, c) gets tokens g and g + 8 of head c, twice as exact.
///   output   channels / 2 x columns; the k-dimension is (token, parity), and column (h, e) of the
///            weights is zero where the parity is not e. So two neighbouring channels of a token
///            are one operand register just as they lie, in rows as in codewords, and nothing has
///            to be transposed. Thread (g, c) gets channels 64i + 8g ... + 7 of head c.
/// Tiles come through asynchronous copies into a ring of the warp's own; no barrier of the block
/// stands in the loop.
///
/// *Codebooks* (vecinfer2). Each codeword is one 256-byte row of shared memory, 32 copies of the 4
/// bytes of the key's and 16 of the 8 bytes of the value's, so that lanes never meet in a bank. A
/// code is the second byte of its codeword's offset, which one byte permute makes.
#ifndef KVPOOL_RAW_WARPS
#define KVPOOL_RAW_WARPS 8
#endif
#ifndef KVPOOL_RESIDENT
#define KVPOOL_RESIDENT 2
#endif
namespace kvpool::cuda {

inline constexpr float kLowest = -1e30F;
inline constexpr float kLog2E = 1.44269504088896F;
inline constexpr int kMaxHeads = 8;
inline constexpr int kMaxGrid = 8;  // Blocks launched to a multiprocessor.
inline constexpr int kSlotFloats = kMaxHeads * (256 + 2);

template <Sealed kFormat_, class T_, int kDim_, int kGroup_, int kSets_>
struct Config {
  static constexpr Sealed kFormat = kFormat_;
  using T = T_;
  static constexpr int kDim = kDim_, kGroup = kGroup_, kSets = kSets_;
  static constexpr bool kRawOnly = kFormat == Sealed::kNone, kKivi = is_kivi(kFormat),
                        kVq = kFormat == Sealed::kVecInfer2, kAffine = is_affine(kFormat);
  static constexpr int kBits = kRawOnly ? 16 : bits_of(kFormat);
  static constexpr int kHeads = 4 * kSets;
  static constexpr int kSteps = kDim / 32;  // Of 32 channels.
  static constexpr int kGroups = kDim / kGroup;
  /// Affine values are summed times this, so that the scale times 2^18 fits fp16 for groups as
  /// wide as 48 (2 bits) or 240 (4 bits).
  static constexpr float kValueUnit = kVq || kRawOnly || kBits == 8 ? 1.F : 0x1p-6F;
  /// Tiles to a unit, which is what is copied at a time.
  static constexpr int kUnit = kRawOnly || kBits > 2 && !kKivi ? 1 : 2;
  static constexpr int kCodeBytes = kRawOnly ? 0 : code_bytes(kFormat, kDim);
  static constexpr int kKeyTile =
      kRawOnly ? kTileTokens * kDim * 2 : key_tile_bytes(kFormat, kDim, kGroup);
  static constexpr int kValueTile =
      kRawOnly ? kTileTokens * kDim * 2 : value_tile_bytes(kFormat, kDim, kGroup);
  static constexpr int kHeader = kRawOnly ? 0 : key_header_bytes(kFormat, kDim);
  static constexpr int kValuesAt = kHeader + kUnit * kKeyTile;
  static constexpr int kRangeAt = kValuesAt + kUnit * kValueTile;
  static constexpr int kStage = kRangeAt + 16;
  /// Blocks to a multiprocessor: one's tiles come while the other merges.
  static constexpr int kResident = KVPOOL_RESIDENT;
  static constexpr int kWarps = (kRawOnly ? KVPOOL_RAW_WARPS : 16) / kResident;
  static constexpr int kThreads = kWarps * 32;
  /// Floats from one head to the next in the block's merge.
  static constexpr int kMergeStride = kDim + 20;
  static constexpr int kMergeBytes = kWarps * 4 * kMergeStride * 4 + (kWarps * 3 + 2) * kHeads * 4;
  /// Of the queries' operands, in static memory.
  static constexpr int kQueryBytes =
      kSets * kSteps * 512 + (kKivi ? kSets * kSteps * 512 : kSets * (kSteps * 2 + 1 + kGroups) * 128);
  static constexpr int kTableBytes = kVq ? 256 * 256 : 0;
  static constexpr int kRingBytes = 227 * 1024 / kResident - 1024 - 256 - kQueryBytes - kMergeBytes -
                                    kTableBytes;
  static constexpr int kStages =
      kRingBytes / (kWarps * kStage) > 5 ? 5 : kRingBytes / (kWarps * kStage);
  static_assert(kStages >= 2);
  /// Dynamic memory: the table, the ring, the merge.
  static constexpr int kRingAt = kTableBytes;
  static constexpr int kMergeAt = kRingAt + (kWarps * kStages * kStage + 127) / 128 * 128;
  static constexpr int kSharedBytes = kMergeAt + kMergeBytes;
};

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
      load_elements<2 * C::kSteps, 4>(
          queries, type, (row + min(head, n_heads - 1)) * C::kDim + 4 * c, 16, x);
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

// ---- Raw tiles -------------------------------------------------------------------------------

/// A lane's pieces of a raw tile, 16 bytes each: keys k = 2i + (0: token g, 1: token g + 8), channels
/// 8 (c + 4i) ...; values k = 4i + (tokens 2c, 2c + 1, 2c + 8, 2c + 9), channels 8 (g + 8i) ...
template <class C>
struct RawTile {
  static constexpr int kKeyPieces = 2 * C::kSteps, kValuePieces = 2 * C::kSteps;

  static __device__ __forceinline__ int key_token(int k, int lane) {
    return (lane >> 2) + 8 * (k & 1);
  }
  static __device__ __forceinline__ int key_column(int k, int lane) {
    return (lane & 3) + 4 * (k >> 1);
  }
  static __device__ __forceinline__ int value_token(int k, int lane) {
    return 2 * (lane & 3) + (k & 1) + 4 * (k & 2);
  }
  static __device__ __forceinline__ int value_column(int k, int lane) {
    return (lane >> 2) + 8 * (k >> 2);
  }
  /// Where a piece of a row is in the ring: no eight lanes that read at once meet in a bank.
  static __device__ __forceinline__ int key_at(int token, int column) {
    return token * C::kDim * 2 + (C::kDim == 128 ? column ^ 4 * (token & 1) : column) * 16;
  }
  static __device__ __forceinline__ int value_at(int token, int column) {
    return token * C::kDim * 2 + (column ^ 2 * (token >> 1 & 3)) * 16;
  }

  template <class KeyPiece, class ValuePiece>
  static __device__ __forceinline__ void attend(Accumulator<C>& acc,
                                                const Query16<C, typename C::T>& q, float scale,
                                                int first, int end, int lane, std::uint32_t select0,
                                                std::uint32_t select1, KeyPiece&& key,
                                                ValuePiece&& value) {
    using T = typename C::T;
    float a[C::kSets][4] = {}, b[C::kSets][4] = {};
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      const uint4 x = key(2 * i), y = key(2 * i + 1);
#pragma unroll
      for (int n = 0; n < C::kSets; ++n) {
        mma16<T>(a[n], x.x, y.x, x.y, y.y, q.b[n][i][0], q.b[n][i][1]);
        mma16<T>(b[n], x.z, y.z, x.w, y.w, q.b[n][i][2], q.b[n][i][3]);
      }
    }
    float s[1][C::kSets][2];
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      s[0][n][0] = scale * ((a[n][0] + b[n][0]) + (a[n][1] + b[n][1]));
      s[0][n][1] = scale * ((a[n][2] + b[n][2]) + (a[n][3] + b[n][3]));
    }
    mask<C>(s[0], first, end, lane >> 2);
    std::uint32_t w[1][C::kSets][4];
    acc.template weigh<T>(s, w, select0, select1);
#pragma unroll
    for (int i = 0; i < C::kSteps / 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 x = value(4 * i + 2 * h), y = value(4 * i + 2 * h + 1);
        acc.template add<T>(i, h, {x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}, w[0]);
      }
  }
};

// ---- Sealed tiles ----------------------------------------------------------------------------

/// A lane's code words of a tile.
template <class C>
struct CodeWords {
  static constexpr int kLaneBytes = C::kDim * C::kBits / 16, kWords = kLaneBytes / 4;
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
        const std::uint32_t sw[4] = {s.x, s.y, s.z, s.w}, zw[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            block.b[n][i][k] = as_word(__hmul2(as_half2(sw[k]), as_half2(q.b[n][i][k])));
          }
#pragma unroll
          for (int k = 0; k < 4; k += 2) {
            mma16<__half>(k == 0 ? x[n] : y[n], zw[k], zw[k], zw[k + 1], zw[k + 1], q.b[n][i][k],
                          q.b[n][i][k + 1]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < C::kSets; ++n) {
        block.start[n] = 0x1p8F * ((x[n][0] + y[n][0]) + (x[n][1] + y[n][1]));
      }
    }
  }

  /// Scores of tokens g and g + 8, times `factor`.
  template <class Q>
  static __device__ __forceinline__ void scores(float (&s)[C::kSets][2], const Q& q,
                                                const Block& block, const float (&factor)[C::kSets],
                                                const CodeWords<C>& codes, std::uint32_t at,
                                                int lane, std::uint32_t table, std::uint32_t key_row) {
    const int g = lane >> 2;
    if constexpr (C::kVq) {
      int a[C::kSets][4] = {};
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        const std::uint32_t w = codes.w[i];
        const std::uint32_t x = table32(table + __byte_perm(w, key_row, 0x7604)),
                            y = table32(table + __byte_perm(w, key_row, 0x7614)),
                            z = table32(table + __byte_perm(w, key_row, 0x7624)),
                            v = table32(table + __byte_perm(w, key_row, 0x7634));
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) mma32<true>(a[n], x, y, z, v, q.b[n][i][0], q.b[n][i][1]);
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
        s[n][0] = factor[n] * (0x1p24F * ((a[n][0] + b[n][0]) + (a[n][1] + b[n][1])) +
                               block.start[n]);
        s[n][1] = factor[n] * (0x1p24F * ((a[n][2] + b[n][2]) + (a[n][3] + b[n][3])) +
                               block.start[n]);
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
                                             const CodeWords<C>& codes, std::uint32_t at, int lane,
                                             std::uint32_t table, std::uint32_t value_row) {
    if constexpr (C::kVq) {
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        const uint2 x = table64(table + __byte_perm(codes.w[u], value_row, 0x7604)),
                    y = table64(table + __byte_perm(codes.w[u], value_row, 0x7614)),
                    z = table64(table + __byte_perm(codes.w[u], value_row, 0x7624)),
                    v = table64(table + __byte_perm(codes.w[u], value_row, 0x7634));
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
          mma16<__half>(acc.o[n][u], x.x, x.y, y.x, y.y, w[n][0], w[n][1]);
          mma16<__half>(acc.o[n][u], z.x, z.y, v.x, v.y, w[n][2], w[n][3]);
        }
      }
    } else {
      constexpr int kI = C::kDim / 64;
      const int g = lane >> 2, c = lane & 3;
      const std::uint32_t from =
          at + C::kCodeBytes + (C::kGroup == 32 ? (g >> 2) * kI * 4 : 0);
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
            // Codes of less than 8 bits are subnormal numbers, at bits 6 to 9 (bits 6 or 8).
            const __half2 pair = __hmul2(
                as_half2(pairs[t][i]),
                __floats2half2_rn(C::kBits == 8 ? 1.F : 0x1p18F * C::kValueUnit, C::kValueUnit));
            const __half2 scale = __low2half2(pair), bias = __high2half2(pair);
            const __half2 upper = __hmul2(scale, __float2half2_rn(0.25F));
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
                const int p = C::kDim == 64 ? t % 2 * 4 + k : i * 4 + k;
                const std::uint32_t y = shift(codes.w[C::kDim == 64 ? t / 2 : t], 6 - p / 2 * 4) &
                                        (p % 2 ? 0x03000300U : 0x00c000c0U);
                x[e][k] = as_word(__hfma2(as_half2(y), p % 2 ? upper : scale, bias));
              }
            }
          }
          acc.template add<__half>(i, h, x[0], x[1], w);
        }
    }
  }
};

// ---- The ring --------------------------------------------------------------------------------

template <int kBytes>
__device__ __forceinline__ void copy_all(std::uint32_t to, const char* from, int lane) {
#pragma unroll
  for (int k = 0; k < (kBytes + 511) / 512; ++k) {
    const int at = k * 512 + lane * 16;
    if (kBytes % 512 == 0 || at < kBytes) copy16(to + at, from + at);
  }
}

/// A warp's units of one stretch, every kWarps-th, on their way through its ring.
template <class C>
struct Ring {
  struct Entry {
    ulonglong2 data;
    int2 range;
  };
  std::uint32_t base;
  int lane, next, end, units_log2;  // Units to a block.
  const BlockEntry* blocks;
  unsigned key_head, value_head;
  std::uint32_t fill, drain;
  /// Of unit `next`: loaded a turn before it is used.
  Entry ahead;

  __device__ __forceinline__ Entry entry(int unit) const {
    Entry x{};
    if (unit < end) {
      const BlockEntry* e = blocks + (unit >> units_log2);
      x.data = __ldg(reinterpret_cast<const ulonglong2*>(e));
      x.range = __ldg(reinterpret_cast<const int2*>(&e->first_token));
    }
    return x;
  }

  __device__ __forceinline__ void begin(int first, int end_, const BlockEntry* blocks_,
                                        unsigned key_head_, unsigned value_head_) {
    end = end_;
    blocks = blocks_;
    key_head = key_head_;
    value_head = value_head_;
    fill = drain = base;
    Entry e[C::kStages];
#pragma unroll
    for (int k = 0; k < C::kStages; ++k) e[k] = entry(first + k * C::kWarps);
    next = first;
#pragma unroll
    for (int k = 0; k < C::kStages - 1; ++k) {
      ahead = e[k];
      issue();
    }
    ahead = e[C::kStages - 1];
  }

  __device__ __forceinline__ void issue() {
    if (next < end) {
      const std::uint32_t to = fill;
      const int tile = (next & ((1 << units_log2) - 1)) * C::kUnit;
      const int first = ahead.range.x - tile * kTileTokens, stop = ahead.range.y - tile * kTileTokens;
      const char* keys = reinterpret_cast<const char*>(ahead.data.x) + key_head;
      const char* values = reinterpret_cast<const char*>(ahead.data.y) +
                           (value_head + tile * C::kValueTile);
      if constexpr (C::kRawOnly) {
        keys += tile * C::kKeyTile;
        constexpr int kColumns = C::kDim / 8;
#pragma unroll
        for (int i = 0; i < RawTile<C>::kKeyPieces; ++i) {
          const int piece = i * 32 + lane;
          copy16(to + RawTile<C>::key_at(piece / kColumns, piece % kColumns), keys + piece * 16);
        }
#pragma unroll
        for (int i = 0; i < RawTile<C>::kValuePieces; ++i) {
          const int piece = i * 32 + lane;
          copy16(to + C::kValuesAt + RawTile<C>::value_at(piece / kColumns, piece % kColumns),
                 values + piece * 16, piece / kColumns < stop ? 16 : 0);
        }
      } else {
        if constexpr (C::kKivi) copy_all<C::kHeader>(to, keys, lane);
        copy_all<C::kUnit * C::kKeyTile>(to + C::kHeader, keys + C::kHeader + tile * C::kKeyTile,
                                         lane);
        copy_all<C::kUnit * C::kValueTile>(to + C::kValuesAt, values, lane);
      }
      if (lane == 0) sts64(to + C::kRangeAt, first, stop);
      next += C::kWarps;
    }
    copy_commit();
    fill = fill == base + (C::kStages - 1) * C::kStage ? base : fill + C::kStage;
  }

  /// The oldest unit, once it has come; starts on the next. Whole warps call it.
  __device__ __forceinline__ std::uint32_t take() {
    copy_wait<C::kStages - 2>();
    __syncwarp();
    const std::uint32_t at = drain;
    drain = drain == base + (C::kStages - 1) * C::kStage ? base : drain + C::kStage;
    issue();
    ahead = entry(next);
    return at;
  }
};

// ---- The kernel ------------------------------------------------------------------------------

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

/// Raw tiles beside sealed ones: few, read straight from memory. Not inlined, so that the loop over
/// sealed tiles has the registers to itself.
template <class C>
__device__ __noinline__ void attend_raw(Accumulator<C>* result, const BlockEntry* blocks, int from,
                                        int to, int tiles_log2, std::size_t head_at, float scale,
                                        const std::uint32_t* fragments) {
  using T = typename C::T;
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const std::uint32_t select0 = g & 1 ? 0x1044 : 0x4410, select1 = g & 1 ? 0x3244 : 0x4432;
  Accumulator<C> acc;
  acc.clear();
  Query16<C, T> q;
  q.read(fragments, lane);
  for (int k = from; k < to; k += C::kWarps) {
    const BlockEntry* e = blocks + (k >> tiles_log2);
    const int tile = k & ((1 << tiles_log2) - 1);
    const std::size_t skip = head_at + static_cast<std::size_t>(tile) * kTileTokens * C::kDim * 2;
    const char* keys = static_cast<const char*>(e->keys) + skip;
    const char* values = static_cast<const char*>(e->values) + skip;
    const int first = e->first_token - tile * kTileTokens,
              end = e->end_token - tile * kTileTokens;
    const auto at = [](int token, int column) { return token * C::kDim * 2 + column * 16; };
    RawTile<C>::attend(
        acc, q, scale, first, end, lane, select0, select1,
        [&](int i) {
          return __ldg(reinterpret_cast<const uint4*>(
              keys + at(RawTile<C>::key_token(i, lane), RawTile<C>::key_column(i, lane))));
        },
        [&](int i) {
          const int token = RawTile<C>::value_token(i, lane);
          return token < end ? __ldg(reinterpret_cast<const uint4*>(
                                   values + at(token, RawTile<C>::value_column(i, lane))))
                             : make_uint4(0, 0, 0, 0);
        });
  }
  *result = acc;
}

/// A thread's codewords, one of the keys (x) and one of the values (y, z).
template <class C>
struct Codewords {
  static constexpr int kEach = 256 / C::kThreads;
  static_assert(!C::kVq || 256 % C::kThreads == 0);
  std::uint32_t key[C::kVq ? kEach : 1];
  uint2 value[C::kVq ? kEach : 1];

  __device__ __forceinline__ void load(const DecodeParams& p, int kv_head) {
    if constexpr (C::kVq) {
      const int first = (p.codebook_per_head ? kv_head * 256 : 0) + threadIdx.x;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int code = first + k * C::kThreads;
        key[k] = __ldg(reinterpret_cast<const std::uint32_t*>(p.key_codebook) + code);
        value[k] = __ldg(static_cast<const uint2*>(p.value_codebook) + code);
      }
    }
  }
  __device__ __forceinline__ void fill(std::uint32_t table) const {
    if constexpr (C::kVq) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const std::uint32_t row = table + (threadIdx.x + k * C::kThreads) * 256;
        const std::uint32_t w = key[k];
        const uint2 v = value[k];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t at = row + ((i + threadIdx.x) & 7) * 16;
          sts128(at, make_uint4(w, w, w, w));
          sts128(at + 128, make_uint4(v.x, v.y, v.x, v.y));
        }
      }
    }
  }
};

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

/// The part of a block's stretch that lies in one sequence and head.
struct Segment {
  int head, kv_head, n_heads, seq, row;  // row: of the queries' and of the output's first head.
  /// On the line: where the pair's work starts and ends, and where the segment ends.
  int low, high, stop;
  bool whole;
  int first_raw, raw_from, raw_to;        // Tiles, from entry first_raw on.
  int first_sealed, sealed_from, sealed_to;  // Units, from entry first_sealed on.
};

/// The first segment with work at or after `at`; false if there is none before `end`.
template <class C>
__device__ __forceinline__ bool find_segment(const DecodeParams& p, int at, int end, int lane,
                                             Segment* s) {
  int k = min(lane, p.n_sequences - 1);
  int before = __ldg(p.cost_before + k), after = __ldg(p.cost_before + k + 1);
  int4 mine = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
  const int head_cost = __ldg(p.cost_before + p.n_sequences);
  while (at < end) {
    const int head = at / head_cost, offset = at - head * head_cost;
    int base = 0;
    unsigned vote = __ballot_sync(kAllLanes, after > offset);
    while (vote == 0) {
      base += 32;
      k = min(base + lane, p.n_sequences - 1);
      before = __ldg(p.cost_before + k), after = __ldg(p.cost_before + k + 1);
      mine = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
      vote = __ballot_sync(kAllLanes, after > offset);
    }
    const int from_lane = __ffs(static_cast<int>(vote)) - 1;
    const int start = head * head_cost + __shfl_sync(kAllLanes, before, from_lane);
    s->high = head * head_cost + __shfl_sync(kAllLanes, after, from_lane);
    s->low = start + p.segment_cost;
    s->stop = min(s->high, end);
    const int n_raw = __shfl_sync(kAllLanes, mine.y, from_lane) << p.tiles_log2;
    s->first_raw = __shfl_sync(kAllLanes, mine.x, from_lane);
    s->first_sealed = __shfl_sync(kAllLanes, mine.z, from_lane);
    if (s->stop > s->low) {
      s->head = head;
      s->seq = base + from_lane;
      s->kv_head = head / p.chunks;
      const int first_head = head % p.chunks * p.chunk_heads;
      s->n_heads = min(p.chunk_heads, p.group - first_head);
      s->row = (s->seq * p.n_kv_heads + s->kv_head) * p.group + first_head;
      s->whole = at <= s->low && s->stop == s->high;
      const int from = max(0, at - s->low), to = s->stop - s->low;
      if constexpr (C::kRawOnly) {
        s->raw_from = from;
        s->raw_to = to;
      } else {
        const int raw_cost = n_raw * p.raw_weight;
        s->raw_from = min(n_raw, (from + p.raw_weight - 1) / p.raw_weight);
        s->raw_to = min(n_raw, (to + p.raw_weight - 1) / p.raw_weight);
        s->sealed_from = max(0, from - raw_cost);
        s->sealed_to = max(0, to - raw_cost);
      }
      return true;
    }
    at = s->stop;
    if (base > 0) {  // Back to the first sequences.
      k = min(lane, p.n_sequences - 1);
      before = __ldg(p.cost_before + k), after = __ldg(p.cost_before + k + 1);
      mine = __ldg(reinterpret_cast<const int4*>(p.sequences + k));
    }
  }
  return false;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char shared[];
  using T = typename C::T;
  using SealedQuery = std::conditional_t<C::kKivi, Query16<C, __half>, Query8<C>>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const std::uint32_t select0 = g & 1 ? 0x1044 : 0x4410, select1 = g & 1 ? 0x3244 : 0x4432;
  float* merge_o = reinterpret_cast<float*>(shared + C::kMergeAt);  // [warp][4][kMergeStride]
  float* merge_m = merge_o + C::kWarps * 4 * C::kMergeStride;       // [warp][head]
  float* merge_l = merge_m + C::kWarps * C::kHeads;
  float* merge_f = merge_l + C::kWarps * C::kHeads;  // [head][warp]
  float* merge_total = merge_f + C::kWarps * C::kHeads;  // m, then l, of the block.
  __shared__ int is_last;
  __shared__ __align__(16) std::uint32_t raw_query[Query16<C, T>::kBytes / 4];
  __shared__ __align__(16) std::uint32_t sealed_query[SealedQuery::kBytes / 4];

  // The line, in equal stretches: the first `longer` blocks have one unit more.
  const int all = __ldg(p.cost_before + p.n_sequences) * p.n_kv_heads * p.chunks;
  const int n_blocks = min(static_cast<int>(gridDim.x), (all + C::kWarps - 1) / C::kWarps);
  if (static_cast<int>(blockIdx.x) >= n_blocks) {
    if (n_blocks == 0) zero_empty<C>(p, gridDim.x);
    return;
  }
  const int share = all / n_blocks, longer = all % n_blocks;
  const auto start_of = [&](int b) { return b * share + min(b, longer); };
  const int low = start_of(blockIdx.x), high = start_of(blockIdx.x + 1);
  float* slots = static_cast<float*>(p.workspace);
  int* counters =
      reinterpret_cast<int*>(slots + static_cast<std::size_t>(gridDim.x) * 2 * kSlotFloats);

  Ring<C> ring;
  const std::uint32_t table = shared_address(shared);
  ring.base = table + C::kRingAt + warp * C::kStages * C::kStage;
  ring.lane = lane;
  ring.units_log2 = C::kUnit == 2 ? p.tiles_log2 - 1 : p.tiles_log2;
  // Raw tiles take the warps from the first on, sealed ones go on where those end.
  const auto turn_of = [&](const Segment& s) {
    const int first = C::kRawOnly ? 0 : (s.raw_to - s.raw_from) % C::kWarps;
    return warp >= first ? warp - first : warp - first + C::kWarps;
  };
  const auto begin = [&](const Segment& s) {
    if constexpr (C::kRawOnly) {
      ring.begin(s.raw_from + turn_of(s), s.raw_to, p.blocks + s.first_raw,
                 s.kv_head * p.raw_stride, s.kv_head * p.raw_stride);
    } else {
      ring.begin(s.sealed_from + turn_of(s), s.sealed_to, p.blocks + s.first_sealed,
                 s.kv_head * p.key_stride, s.kv_head * p.value_stride);
    }
  };
  // Two warps make the operands of the queries for all.
  const auto make_queries = [&](const Segment& s) {
    if (warp == C::kWarps - 1 && s.raw_from < s.raw_to) {
      Query16<C, T> q;
      q.load(p.queries, p.query_type, s.row, s.n_heads, lane);
      q.write(raw_query, lane);
    }
    if constexpr (!C::kRawOnly) {
      if (warp == C::kWarps - 2 && s.sealed_from < s.sealed_to) {
        SealedQuery q;
        if constexpr (C::kKivi) {
          q.load(p.sealed_queries, p.query_type, s.row, s.n_heads, lane, 0x1p-8F);
        } else {
          q.load(p.sealed_queries, p.query_type, s.row, s.n_heads, lane);
        }
        q.write(sealed_query, lane);
      }
    }
  };

  Segment now;
  bool more = find_segment<C>(p, low, high, lane, &now);
  if (more) {
    Codewords<C> codewords;
    codewords.load(p, now.kv_head);
    begin(now);
    make_queries(now);
    codewords.fill(table);
    __syncthreads();
  }
  while (more) {
    Accumulator<C> acc;
    acc.clear();
    const float scale = p.scale * kLog2E;
    if constexpr (C::kRawOnly) {
      Query16<C, T> q;
      q.read(raw_query, lane);
      for (int k = now.raw_from + warp; k < now.raw_to; k += C::kWarps) {
        const std::uint32_t tile = ring.take();
        const uint2 range = lds64(tile + C::kRangeAt);
        RawTile<C>::attend(
            acc, q, scale, static_cast<int>(range.x), static_cast<int>(range.y), lane, select0,
            select1,
            [&](int i) {
              return lds128(tile + RawTile<C>::key_at(RawTile<C>::key_token(i, lane),
                                                      RawTile<C>::key_column(i, lane)));
            },
            [&](int i) {
              return lds128(tile + C::kValuesAt +
                            RawTile<C>::value_at(RawTile<C>::value_token(i, lane),
                                                 RawTile<C>::value_column(i, lane)));
            });
      }
    } else {
      if (now.raw_from + warp < now.raw_to) {
        Accumulator<C> raw;
        attend_raw<C>(&raw, p.blocks + now.first_raw, now.raw_from + warp, now.raw_to,
                      p.tiles_log2, static_cast<std::size_t>(now.kv_head) * p.raw_stride, scale,
                      raw_query);
        acc = raw;
        if constexpr (C::kValueUnit != 1.F) {
#pragma unroll
          for (int n = 0; n < C::kSets; ++n)
#pragma unroll
            for (int u = 0; u < C::kSteps; ++u)
#pragma unroll
              for (int k = 0; k < 4; ++k) acc.o[n][u][k] *= C::kValueUnit;
        }
      }
      const int first_unit = now.sealed_from + turn_of(now), end_unit = now.sealed_to;
      if (first_unit < end_unit) {
        SealedQuery q;
        q.read(sealed_query, lane);
        float factor[C::kSets], bias[C::kSets];
#pragma unroll
        for (int n = 0; n < C::kSets; ++n) {
          factor[n] = scale;
          if constexpr (!C::kKivi) factor[n] *= q.unit[n];
          if constexpr (C::kVq) factor[n] *= p.key_scale[p.codebook_per_head ? now.kv_head : 0];
          bias[n] = p.sealed_bias != nullptr && 4 * n + c < now.n_heads
                        ? kLog2E * p.sealed_bias[now.row + 4 * n + c]
                        : 0.F;
        }
        const std::uint32_t key_at_row = lane * 4, value_at_row = 128 + (lane & 15) * 8;
        for (int k = first_unit; k < end_unit; k += C::kWarps) {
          const std::uint32_t unit = ring.take();
          const uint2 range = lds64(unit + C::kRangeAt);
          typename SealedKeys<C>::Block block;
          SealedKeys<C>::begin(block, q, unit, lane);
          const auto key_at = [&](int t) { return unit + C::kHeader + t * C::kKeyTile; };
          const auto value_at = [&](int t) { return unit + C::kValuesAt + t * C::kValueTile; };
          CodeWords<C> keys[C::kUnit], values[C::kUnit];
#pragma unroll
          for (int t = 0; t < C::kUnit; ++t) keys[t].load(key_at(t), lane);
          float s[C::kUnit][C::kSets][2];
#pragma unroll
          for (int t = 0; t < C::kUnit; ++t) {
            SealedKeys<C>::scores(s[t], q, block, factor, keys[t], key_at(t), lane, table,
                                  key_at_row);
#pragma unroll
            for (int n = 0; n < C::kSets; ++n) s[t][n][0] += bias[n], s[t][n][1] += bias[n];
          }
#pragma unroll
          for (int t = 0; t < C::kUnit; ++t) values[t].load(value_at(t), lane);
          const int first = static_cast<int>(range.x), end = static_cast<int>(range.y);
          if (first > 0 || end < C::kUnit * kTileTokens) {
#pragma unroll
            for (int t = 0; t < C::kUnit; ++t) {
              mask<C>(s[t], first - t * kTileTokens, end - t * kTileTokens, g);
            }
          }
          std::uint32_t w[C::kUnit][C::kSets][4];
          acc.template weigh<__half>(s, w, select0, select1);
#pragma unroll
          for (int t = 0; t < C::kUnit; ++t) {
            SealedValues<C>::add(acc, w[t], values[t], value_at(t), lane, table, value_at_row);
          }
        }
      }
    }
    __syncwarp();

    // The next segment's tiles are on their way while this one's results are merged.
    Segment next;
    more = find_segment<C>(p, now.stop, high, lane, &next);
    Codewords<C> codewords;
    const bool new_table = C::kVq && more && p.codebook_per_head && next.kv_head != now.kv_head;
    if (more) {
      begin(next);
      if (new_table) codewords.load(p, next.kv_head);
    }

    // The warps' results to the block's, four heads at a time.
    float* slot = slots + (2 * static_cast<std::size_t>(blockIdx.x) + (now.low <= low ? 0 : 1)) *
                              kSlotFloats;
#pragma unroll
    for (int n = 0; n < C::kSets; ++n) {
      if (n > 0) __syncthreads();
      float l = acc.l[n];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) l += __shfl_xor_sync(kAllLanes, l, d);
      if (g == 0) {
        merge_m[warp * C::kHeads + 4 * n + c] = acc.m[n];
        merge_l[warp * C::kHeads + 4 * n + c] = l;
      }
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        *reinterpret_cast<float4*>(merge_o + (warp * 4 + c) * C::kMergeStride + 64 * (u / 2) +
                                   8 * g + 4 * (u % 2)) =
            make_float4(acc.o[n][u][0], acc.o[n][u][1], acc.o[n][u][2], acc.o[n][u][3]);
      }
      __syncthreads();
      if (n == 0 && more) {
        make_queries(next);
        if (new_table) codewords.fill(table);
      }
      if (warp < 4) {
        const int h = 4 * n + warp;
        const float own = lane < C::kWarps ? merge_m[lane * C::kHeads + h] : kLowest;
        const float m = warp_max(own), f = exp2_fast(own - m);
        const float sum = warp_sum(lane < C::kWarps ? f * merge_l[lane * C::kHeads + h] : 0.F);
        if (lane < C::kWarps) merge_f[h * C::kWarps + lane] = f;
        if (lane == 0) {
          merge_total[h] = m;
          merge_total[C::kHeads + h] = sum;
        }
      }
      __syncthreads();
      for (int k = threadIdx.x; k < (min(now.n_heads, 4 * n + 4) - 4 * n) * C::kDim;
           k += C::kThreads) {
        const int h = 4 * n + k / C::kDim, d = k % C::kDim;
        float x = 0;
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
          x += merge_f[h * C::kWarps + w] * merge_o[(w * 4 + h - 4 * n) * C::kMergeStride + d];
        }
        x *= 1.F / C::kValueUnit;
        if (now.whole) {
          const float sum = merge_total[C::kHeads + h];
          store(p.out, p.out_type, (static_cast<std::size_t>(now.row) + h) * C::kDim + d,
                sum > 0 ? x / sum : 0.F);
        } else {
          slot[h * C::kDim + d] = x;
          if (d == 0) {
            slot[C::kHeads * C::kDim + h] = merge_total[h];
            slot[C::kHeads * C::kDim + C::kHeads + h] = merge_total[C::kHeads + h];
          }
        }
      }
    }
    if (!now.whole) {
      const auto block_of = [&](int x) {
        const int cut = longer * (share + 1);
        return x < cut ? x / (share + 1) : longer + (x - cut) / share;
      };
      const int first = block_of(now.low), last = block_of(now.high - 1);
      __syncthreads();
      if (threadIdx.x == 0) {
        int* counter = counters + static_cast<std::size_t>(now.head) * p.n_sequences + now.seq;
        // Releases what the block wrote, which the barrier ordered before it, and acquires what
        // other blocks did.
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0,[%1],1;"
                     : "=r"(before)
                     : "l"(counter)
                     : "memory");
        const bool mine = before == last - first;
        if (mine) *counter = 0;
        is_last = mine;
      }
      __syncthreads();
      if (is_last) {
        const auto slot_of = [&](int b) {
          return slots +
                 (2 * static_cast<std::size_t>(b) + (now.low <= start_of(b) ? 0 : 1)) * kSlotFloats;
        };
        const int n = last - first + 1;
        float* parts = merge_o;  // A factor a head and block.
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
          const float inverse = l > 0 ? 1.F / l : 0.F;
          for (int b = lane; b < n; b += 32) {
            parts[b * C::kHeads + warp] = inverse * exp2_fast(parts[b * C::kHeads + warp] - top);
          }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < now.n_heads * C::kDim; k += C::kThreads) {
          float x = 0;
#pragma unroll 8
          for (int b = 0; b < n; ++b) {
            x += parts[b * C::kHeads + k / C::kDim] * __ldcg(slot_of(first + b) + k);
          }
          store(p.out, p.out_type, static_cast<std::size_t>(now.row) * C::kDim + k, x);
        }
      }
    }
    __syncthreads();
    now = next;
  }
  zero_empty<C>(p, n_blocks);
}

/// What prepare() asks of each format's file.
struct KernelChoice {
  const void* function = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int resident = 1;
};
template <class C>
KernelChoice choose() {
  return {reinterpret_cast<const void*>(&decode_kernel<C>), C::kThreads, C::kSharedBytes, C::kResident};
}
template <Sealed kFormat, class T, int kGroup>
KernelChoice choose_shape(int dim, int sets) {
  if (dim == 128) {
    if (sets == 1) return choose<Config<kFormat, T, 128, kGroup, 1>>();
#ifndef KVPOOL_CUDA_FEW
    return choose<Config<kFormat, T, 128, kGroup, 2>>();
#endif
  }
#ifndef KVPOOL_CUDA_FEW
  if (dim == 64) {
    return sets == 1 ? choose<Config<kFormat, T, 64, kGroup, 1>>()
                     : choose<Config<kFormat, T, 64, kGroup, 2>>();
  }
#endif
  return {};
}
template <Sealed kFormat>
KernelChoice choose_format(const Geometry& geometry, int sets) {
  const bool wide = is_affine(kFormat) || is_kivi(kFormat) ? geometry.group_size == 64 : false;
#ifdef KVPOOL_CUDA_FEW
  if (wide || geometry.raw == Element::kFp16) return {};
  return choose_shape<kFormat, __nv_bfloat16, 32>(geometry.head_dim, sets);
#else
  if constexpr (is_affine(kFormat) || is_kivi(kFormat)) {
    if (wide) {
      return geometry.raw == Element::kFp16
                 ? choose_shape<kFormat, __half, 64>(geometry.head_dim, sets)
                 : choose_shape<kFormat, __nv_bfloat16, 64>(geometry.head_dim, sets);
    }
  }
  return geometry.raw == Element::kFp16
             ? choose_shape<kFormat, __half, 32>(geometry.head_dim, sets)
             : choose_shape<kFormat, __nv_bfloat16, 32>(geometry.head_dim, sets);
#endif
}

KernelChoice choose_raw(const Geometry&, int sets);
KernelChoice choose_int8(const Geometry&, int sets);
KernelChoice choose_int4(const Geometry&, int sets);
KernelChoice choose_int2(const Geometry&, int sets);
KernelChoice choose_kivi4(const Geometry&, int sets);
KernelChoice choose_kivi2(const Geometry&, int sets);
KernelChoice choose_vecinfer2(const Geometry&, int sets);

}  // namespace kvpool::cuda
