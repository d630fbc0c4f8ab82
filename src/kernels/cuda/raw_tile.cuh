#pragma once

#include <cstdint>

#include "kernels/cuda/operands.cuh"

namespace kvpool::cuda {

/// A lane's pieces of a raw tile, 16 bytes each: keys k = 2i + (0: token g, 1: token g + 8),
/// channels 8 (c + 4i) ...; values k = 4i + (tokens 2c, 2c + 1, 2c + 8, 2c + 9), channels 8 (g +
/// 8i) ...
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
    return token * C::kDim * 2 + (column ^ 4 * (token & 1)) * 16;
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

}  // namespace kvpool::cuda
