#pragma once

#include <cstdint>

#include "kernels/cuda/config.cuh"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/primitives.cuh"

namespace kvpool::cuda {

/// Four signed bytes as fp16.
__device__ __forceinline__ uint2 halves_of(std::uint32_t bytes) {
  // The bytes of (0x6400 | x ^ 0x80) are the number 1024 + 128 + x.
  const std::uint32_t biased = bytes ^ 0x80808080U;
  const __half2 bias = __float2half2_rn(1152.F);
  return make_uint2(
      as_word(__hsub2(as_half2(__byte_perm(biased, 0x64646464U, 0x4140)), bias)),
      as_word(__hsub2(as_half2(__byte_perm(biased, 0x64646464U, 0x4342)), bias)));
}

/// kSub of a codebook's bytes.
template <int kSub>
__device__ __forceinline__ uint2 codeword(const std::int8_t* book, int code) {
  if constexpr (kSub == 8) return __ldg(reinterpret_cast<const uint2*>(book) + code);
  if constexpr (kSub == 4) {
    return make_uint2(__ldg(reinterpret_cast<const std::uint32_t*>(book) + code), 0);
  }
  return make_uint2(__ldg(reinterpret_cast<const std::uint16_t*>(book) + code), 0);
}

/// A thread's codewords, one of the keys and one of the values.
template <class C>
struct Codewords {
  static constexpr int kEach = 256 / C::kThreads;
  static_assert(!C::kVq || 256 % C::kThreads == 0);
  uint2 key[C::kVq ? kEach : 1], value[C::kVq ? kEach : 1];

  __device__ __forceinline__ void load(const DecodeParams& p, int kv_head) {
    if constexpr (C::kVq) {
      const int first = (p.codebook_per_head ? kv_head * 256 : 0) + threadIdx.x;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int code = first + k * C::kThreads;
        key[k] = codeword<C::kKeySub>(p.key_codebook, code);
        value[k] = codeword<C::kValueSub>(p.value_codebook, code);
      }
    }
  }
  __device__ __forceinline__ void fill(std::uint32_t table) const {
    if constexpr (C::kVq) {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const std::uint32_t row = table + (threadIdx.x + k * C::kThreads) * 256;
        uint4 keys = make_uint4(key[k].x, key[k].x, key[k].x, key[k].x), values;
        if constexpr (C::kKeySub == 2) {
          keys.x = keys.y = keys.z = keys.w = key[k].x * 0x10001U;
        } else if constexpr (C::kKeySub == 8) {
          keys.y = keys.w = key[k].y;
        }
        const uint2 low = halves_of(value[k].x), high = halves_of(value[k].y);
        if constexpr (C::kValueSub == 2) {
          values = make_uint4(low.x, low.x, low.x, low.x);
        } else if constexpr (C::kValueSub == 4) {
          values = make_uint4(low.x, low.y, low.x, low.y);
        } else {
          values = make_uint4(low.x, low.y, high.x, high.y);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t at = row + ((i + threadIdx.x) & 7) * 16;
          sts128(at, keys);
          sts128(at + 128, values);
        }
      }
    }
  }
};

}  // namespace kvpool::cuda
