#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/blocks.h"
#include "kernels/cuda/layout.cuh"
#include "kernels/integer_layout.h"
#include "kernels/vector_layout.h"

/// Elements of parts one at a time, whatever the format and the layout: for what is not in the
/// decode step.
namespace kvpool::cuda {

using codec::Code;
using codec::PartGeometry;
using codec::Role;

__host__ __device__ constexpr bool is_raw(Code code) { return code <= Code::kBf16; }
__host__ __device__ constexpr bool is_vector(Code code) { return code >= Code::kVecInfer1; }
__host__ __device__ constexpr int bits_of(Code code) {
  return code == Code::kInt8 ? 8 : code == Code::kInt4 || code == Code::kKivi4 ? 4 : 2;
}
/// Whether scales are by channel, over the whole block.
__host__ __device__ constexpr bool by_channel(const PartGeometry& g) {
  return g.role == Role::kKeys && (g.format.code == Code::kKivi4 || g.format.code == Code::kKivi2);
}
__host__ __device__ constexpr Sealed sealed_of(Code code) {
  switch (code) {
    case Code::kInt8:
      return Sealed::kInt8;
    case Code::kInt4:
      return Sealed::kInt4;
    case Code::kInt2:
      return Sealed::kInt2;
    case Code::kKivi4:
      return Sealed::kKivi4;
    case Code::kKivi2:
      return Sealed::kKivi2;
    default:
      return Sealed::kNone;
  }
}

/// Where an element's code, scale and bias lie in its part, in bytes. What is stored of a scale is
/// the scale times 2^scale_exponent, likewise of a bias.
struct ElementPlace {
  std::uint32_t code, scale, bias;
  int shift, scale_exponent, bias_exponent;
};

/// The codes of a tile: where they start, and their bytes.
struct TileCodes {
  std::uint32_t start, bytes;
};

__device__ inline TileCodes tile_codes(const PartFormat& part, int tile) {
  const PartGeometry& g = part.geometry;
  const int bits = bits_of(g.format.code);
  const kernels::PartShape shape{g.block_size, g.head_dim, g.format.group_size};
  const int n_tile = kernels::tile_at(shape, tile).n_tokens;
  // Both layouts have as many bytes.
  const auto header = static_cast<std::uint32_t>(by_channel(g) ? kernels::channel_bytes(shape) : 0);
  const auto stride = static_cast<std::uint32_t>(
      by_channel(g) ? kernels::code_bytes(g.role, bits, kTileTokens, g.head_dim)
                    : kernels::affine_tile_bytes(g.role, bits, shape, kTileTokens));
  return {header + tile * stride,
          static_cast<std::uint32_t>(kernels::code_bytes(g.role, bits, n_tile, g.head_dim))};
}

__device__ inline ElementPlace place_of(const PartFormat& part, int token, int d) {
  const PartGeometry& g = part.geometry;
  const int bits = bits_of(g.format.code), dim = g.head_dim, group = g.format.group_size;
  const int tile = token / kTileTokens, t = token % kTileTokens;
  const TileCodes codes = tile_codes(part, tile);
  ElementPlace place{};
  if (!part.tiled) {
    const kernels::PartShape shape{g.block_size, dim, group};
    const int n_tile = kernels::tile_at(shape, tile).n_tokens;
    const kernels::CodePlace at = kernels::code_place(g.role, bits, n_tile, dim, t, d);
    place.code = codes.start + static_cast<std::uint32_t>(at.byte);
    place.shift = at.shift;
    if (by_channel(g)) {
      place.scale = 2 * d;
      place.bias = static_cast<std::uint32_t>(kernels::channel_bytes(shape) / 2) + 2 * d;
    } else {
      place.scale = codes.start + codes.bytes + 2 * (d / group * n_tile + t);
      place.bias =
          place.scale + static_cast<std::uint32_t>(kernels::group_bytes(shape, n_tile) / 2);
    }
    return place;
  }
  CodePlace at{};
  if (by_channel(g)) {
    at = kivi_key(bits, dim, t, d);
    place.scale = 2 * d;
    place.bias = 2 * (dim + d);
    place.scale_exponent = kivi_scale_exponent(bits, d);
  } else if (g.role == Role::kKeys) {
    at = affine_key(bits, dim, t, d);
    place.scale = codes.start + codes.bytes + 4 * key_scale_index(dim, group, t, d);
    place.bias = place.scale + 2;
  } else {
    at = affine_value(bits, dim, t, d);
    place.scale = codes.start + codes.bytes + 4 * value_scale_index(dim, group, t, d);
    place.bias = place.scale + 2;
    place.scale_exponent = value_scale_exponent(bits, dim, t, d);
    place.bias_exponent = value_bias_exponent(bits);
  }
  place.code = codes.start + at.offset + at.shift / 8;
  place.shift = at.shift % 8;
  return place;
}

__device__ inline float power_of_two(int exponent) {
  return __int_as_float((127 + exponent) << 23);
}
__device__ inline float half_at(const std::byte* part, std::uint32_t offset) {
  return __half2float(*reinterpret_cast<const __half*>(part + offset));
}
__device__ inline int code_at(const std::byte* part, const ElementPlace& place, int bits) {
  return static_cast<int>(part[place.code]) >> place.shift & ((1 << bits) - 1);
}

/// Where the low 8 bits of a sub-vector's code lie. Tiled parts have codes of 8 bits only.
__device__ inline std::uint32_t vector_code_at(const PartFormat& part, int token, int sub) {
  const PartGeometry& g = part.geometry;
  if (!part.tiled) return static_cast<std::uint32_t>(sub * g.block_size + token);
  const int tile = token / kTileTokens, t = token % kTileTokens;
  const int dim = part.quantizer.sub_dim;
  return static_cast<std::uint32_t>(tile * kTileTokens * g.head_dim / dim +
                                    (g.role == Role::kKeys ? vector_key(dim, g.head_dim, t, sub)
                                                           : vector_value(dim, g.head_dim, t, sub)));
}
/// Where the high 4 bits of a pair of 12-bit codes lie, those of tokens `token`, which is even, and
/// the next.
__device__ inline std::uint32_t high_codes_at(const PartFormat& part, int token, int sub) {
  const kernels::PartShape shape{part.geometry.block_size, part.geometry.head_dim, 0};
  return static_cast<std::uint32_t>(kernels::low_bytes(part.quantizer.sub_dim, shape) +
                                    sub * kernels::high_row_bytes(shape) + token / 2);
}

__device__ inline float vector_element(const PartFormat& part, int kv_head, const std::byte* bytes,
                                       int token, int d) {
  const Quantizer& q = part.quantizer;
  const int sub = d / q.sub_dim;
  int code = static_cast<int>(bytes[vector_code_at(part, token, sub)]);
  if (q.code_bits > 8) {
    const int pair = static_cast<int>(bytes[high_codes_at(part, token & ~1, sub)]);
    code |= (pair >> token % 2 * 4 & 15) << 8;
  }
  const std::int8_t centroid =
      q.centroids[(static_cast<std::size_t>(kv_head) << q.code_bits | code) * q.sub_dim +
                  d % q.sub_dim];
  return __fmul_rn(q.scales[kv_head], static_cast<float>(centroid));
}

__device__ inline float load_element(const void* rows, Element type, std::size_t at) {
  if (type == Element::kFp32) return static_cast<const float*>(rows)[at];
  if (type == Element::kFp16) return __half2float(static_cast<const __half*>(rows)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(rows)[at]);
}
/// kElements, `stride` apart.
template <int kElements>
__device__ void load_elements(const void* rows, Element type, std::int64_t at, std::int64_t stride,
                              float (&x)[kElements]) {
  if (type == Element::kFp32) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) x[k] = static_cast<const float*>(rows)[at + k * stride];
    return;
  }
  using Word = std::conditional_t<kElements == 4, uint2, std::uint32_t>;
  static_assert(sizeof(Word) == 2 * kElements);
  std::uint16_t bits[kElements];
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(rows) + at;
  if (stride == 1 && reinterpret_cast<std::uintptr_t>(from) % sizeof(Word) == 0) {
    const Word word = *reinterpret_cast<const Word*>(from);
    std::memcpy(bits, &word, sizeof word);
  } else {
#pragma unroll
    for (int k = 0; k < kElements; ++k) bits[k] = from[k * stride];
  }
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    x[k] = type == Element::kFp16 ? __half2float(__ushort_as_half(bits[k]))
                                  : __bfloat162float(__ushort_as_bfloat16(bits[k]));
  }
}
__device__ inline void store_element(void* rows, Element type, std::size_t at, float x) {
  if (type == Element::kFp32) {
    static_cast<float*>(rows)[at] = x;
  } else if (type == Element::kFp16) {
    static_cast<__half*>(rows)[at] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(rows)[at] = __float2bfloat16_rn(x);
  }
}

/// 1, 2 or 4 neighbours, at a multiple of their size.
template <int kFloats>
using Floats =
    std::conditional_t<kFloats == 4, float4, std::conditional_t<kFloats == 2, float2, float>>;
template <int kFloats>
__device__ __forceinline__ void load_floats(const float* from, float (&x)[kFloats]) {
  const auto all = *reinterpret_cast<const Floats<kFloats>*>(from);
  std::memcpy(x, &all, sizeof x);
}
template <int kFloats>
__device__ __forceinline__ void store_floats(float* to, const float (&x)[kFloats]) {
  Floats<kFloats> all;
  std::memcpy(&all, x, sizeof x);
  *reinterpret_cast<Floats<kFloats>*>(to) = all;
}

__host__ __device__ constexpr Element element_of(Code code) {
  return code == Code::kFp32   ? Element::kFp32
         : code == Code::kFp16 ? Element::kFp16
                               : Element::kBf16;
}

/// An element of a head's part as it is stored, in its space. Rounds as the other kernels do.
__device__ inline float stored_element(const PartFormat& part, int kv_head, const std::byte* bytes,
                                       int token, int d) {
  const PartGeometry& g = part.geometry;
  if (is_raw(g.format.code)) {
    return load_element(bytes, element_of(g.format.code),
                        static_cast<std::size_t>(token) * g.head_dim + d);
  }
  if (is_vector(g.format.code)) return vector_element(part, kv_head, bytes, token, d);
  const ElementPlace place = place_of(part, token, d);
  const float scale = half_at(bytes, place.scale) * power_of_two(-place.scale_exponent);
  const float bias = half_at(bytes, place.bias) * power_of_two(-place.bias_exponent);
  const auto code = static_cast<float>(code_at(bytes, place, bits_of(g.format.code)));
  return __fadd_rn(__fmul_rn(scale, code), bias);
}

}  // namespace kvpool::cuda
