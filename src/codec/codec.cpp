#include "codec/codec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec/half.h"
#include "codec/space.h"
#include "codec/vector_quantizer.h"
#include "kernels/integer_layout.h"
#include "kernels/kernels.h"
#include "kernels/vector_layout.h"
#include "util/concat.h"

namespace kvpool::codec {
namespace {

using kernels::as_size;
using kernels::PartShape;

std::size_t raw_bytes(const PartShape& shape, std::size_t element_bytes) {
  return as_size(shape.block_size) * as_size(shape.head_dim) * element_bytes;
}

std::size_t affine_bytes(const PartShape& shape, Role role, int bits) {
  const int n_full = shape.block_size / kernels::kTileTokens;
  const int n_left = shape.block_size % kernels::kTileTokens;
  return as_size(n_full) * kernels::affine_tile_bytes(role, bits, shape, kernels::kTileTokens) +
         kernels::affine_tile_bytes(role, bits, shape, n_left);
}

std::size_t channel_bytes(const PartShape& shape, int bits) {
  const int n_full = shape.block_size / kernels::kTileTokens;
  const int n_left = shape.block_size % kernels::kTileTokens;
  return kernels::channel_bytes(shape) +
         as_size(n_full) *
             kernels::code_bytes(Role::kKeys, bits, kernels::kTileTokens, shape.head_dim) +
         kernels::code_bytes(Role::kKeys, bits, n_left, shape.head_dim);
}

/// By Code, from kVecInfer1 on, and Role.
constexpr VectorCode kVectorCodes[][2] = {
    {{8, 8}, {8, 8}}, {{8, 12}, {8, 12}}, {{4, 8}, {4, 8}}, {{2, 8}, {4, 8}}, {{2, 8}, {2, 8}}};

template <Code kCode>
std::size_t vecinfer_bytes(const PartShape& shape, Role role) {
  const VectorCode code = vector_code(kCode, role);
  return kernels::vector_bytes(code.sub_dim, code.code_bits, shape);
}

struct CodeInfo {
  std::string_view name;
  std::size_t (*part_bytes)(const PartShape&, Role);
};

/// By Code.
constexpr std::array kCodes = {
    CodeInfo{"fp32", [](const PartShape& s, Role) { return raw_bytes(s, 4); }},
    CodeInfo{"fp16", [](const PartShape& s, Role) { return raw_bytes(s, 2); }},
    CodeInfo{"bf16", [](const PartShape& s, Role) { return raw_bytes(s, 2); }},
    CodeInfo{"int8", [](const PartShape& s, Role r) { return affine_bytes(s, r, 8); }},
    CodeInfo{"int4", [](const PartShape& s, Role r) { return affine_bytes(s, r, 4); }},
    CodeInfo{"int2", [](const PartShape& s, Role r) { return affine_bytes(s, r, 2); }},
    CodeInfo{"kivi4",
             [](const PartShape& s, Role r) {
               return r == Role::kKeys ? channel_bytes(s, 4) : affine_bytes(s, r, 4);
             }},
    CodeInfo{"kivi2",
             [](const PartShape& s, Role r) {
               return r == Role::kKeys ? channel_bytes(s, 2) : affine_bytes(s, r, 2);
             }},
    CodeInfo{"vecinfer1", vecinfer_bytes<Code::kVecInfer1>},
    CodeInfo{"vecinfer1.5", vecinfer_bytes<Code::kVecInfer1_5>},
    CodeInfo{"vecinfer2", vecinfer_bytes<Code::kVecInfer2>},
    CodeInfo{"vecinfer3", vecinfer_bytes<Code::kVecInfer3>},
    CodeInfo{"vecinfer4", vecinfer_bytes<Code::kVecInfer4>},
};

const CodeInfo& info(Code code) { return kCodes[static_cast<std::size_t>(code)]; }

/// What of a quantizer does not fit, or nothing.
std::string mismatch(const PartGeometry& geometry) {
  const VectorQuantizer& quantizer = *geometry.format.quantizer;
  const std::size_t n_heads = quantizer.transforms.size();
  if (quantizer.codebooks.size() != n_heads || as_size(geometry.kv_head) >= n_heads) {
    return detail::concat("codebooks of ", n_heads, " KV heads, asked for head ", geometry.kv_head);
  }
  const VectorCode code = vector_code(geometry.format.code, geometry.role);
  const HeadTransform& transform = quantizer.transforms[as_size(geometry.kv_head)];
  const Codebook& book = *quantizer.codebooks[as_size(geometry.kv_head)];
  if (transform.smooth.size() != as_size(geometry.head_dim) ||
      transform.mean.size() != as_size(geometry.head_dim)) {
    return detail::concat("codebooks for a head_dim of ", transform.smooth.size(), ", asked for ",
                          geometry.head_dim);
  }
  if (book.sub_dim != code.sub_dim || book.code_bits != code.code_bits) {
    return detail::concat("a codebook of ", book.code_bits, "-bit codes for ", book.sub_dim,
                          " channels where ", code.code_bits, " bits for ", code.sub_dim,
                          " are wanted");
  }
  return {};
}

}  // namespace

VectorCode vector_code(Code code, Role role) noexcept {
  const auto i = static_cast<std::size_t>(code) - static_cast<std::size_t>(Code::kVecInfer1);
  return kVectorCodes[i][role == Role::kKeys ? 0 : 1];
}

double vector_bits(Code code) noexcept {
  return (vector_code(code, Role::kKeys).bits() + vector_code(code, Role::kValues).bits()) / 2.0;
}

void validate(VectorCode code) {
  const auto [sub_dim, bits] = code;
  const bool known = bits == 8 ? sub_dim == 2 || sub_dim == 4 || sub_dim == 8
                               : bits == 12 && sub_dim == 8;
  if (known) return;
  throw std::invalid_argument(
      detail::concat("codebook: codes must be 8 bits of 2, 4 or 8 channels, or 12 bits of 8, got ",
                     bits, " bits of ", sub_dim));
}

Code code_of(VectorCode code) noexcept {
  if (code.code_bits == 12) return Code::kVecInfer1_5;
  if (code.sub_dim == 8) return Code::kVecInfer1;
  return code.sub_dim == 4 ? Code::kVecInfer2 : Code::kVecInfer4;
}

void validate(const PartGeometry& geometry) {
  const auto refuse = [](const auto&... parts) {
    throw std::invalid_argument(detail::concat("codec: ", parts...));
  };
  const Format& format = geometry.format;
  if (geometry.head_dim < 8 || geometry.head_dim > kMaxHeadDim || geometry.head_dim % 8 != 0) {
    refuse("head_dim must be a multiple of 8 from 8 to ", kMaxHeadDim, ", got ", geometry.head_dim);
  }
  if (geometry.block_size < 1 || geometry.block_size > kMaxBlockSize) {
    refuse("block_size must be 1 to ", kMaxBlockSize, ", got ", geometry.block_size);
  }
  if (static_cast<std::size_t>(format.code) >= kCodes.size()) {
    refuse("unknown code ", static_cast<int>(format.code));
  }
  if (format.group_size != 32 && format.group_size != 64) {
    refuse("group_size must be 32 or 64, got ", static_cast<int>(format.group_size));
  }
  if (format.hadamard && (format.is_raw() || format.is_vector())) {
    refuse("hadamard is for integer formats, not ", info(format.code).name);
  }
  if (!format.is_vector()) {
    if (format.quantizer != nullptr) refuse(info(format.code).name, " has no use for codebooks");
    return;
  }
  if (format.quantizer == nullptr) {
    refuse(info(format.code).name,
           " needs codebooks made for the model; `kvpool calibrate` makes them");
  }
  if (const std::string text = mismatch(geometry); !text.empty()) {
    refuse(info(format.code).name, " has ", text);
  }
}

std::size_t part_bytes(const PartGeometry& geometry) noexcept {
  return info(geometry.format.code)
      .part_bytes({geometry.block_size, geometry.head_dim, geometry.format.group_size},
                  geometry.role);
}

std::size_t block_bytes(const PartGeometry& geometry, int n_kv_heads) noexcept {
  return as_size(n_kv_heads) * part_bytes(geometry);
}

void encode(const PartGeometry& geometry, const float* rows, int n_tokens, std::byte* part,
            int first_token) {
  const auto& kernels = kernels::active();
  const kernels::Layout layout = kernels::layout_of(geometry.format, geometry.role);
  const auto write = geometry.role == Role::kKeys ? kernels.of_keys(layout).encode
                                                  : kernels.of_values(layout).encode;
  const PartShape shape = kernels::shape_of(geometry);
  const Space space(geometry.format, geometry.kv_head);
  if (space.is_plain()) {
    write(shape, rows, first_token, n_tokens, part);
    return;
  }
  std::vector<float> turned(rows, rows + as_size(n_tokens) * as_size(geometry.head_dim));
  space.enter(turned.data(), n_tokens, geometry.head_dim);
  write(shape, turned.data(), first_token, n_tokens, part);
}

void decode(const PartGeometry& geometry, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  const auto& kernels = kernels::active();
  const kernels::Layout layout = kernels::layout_of(geometry.format, geometry.role);
  const auto read = geometry.role == Role::kKeys ? kernels.of_keys(layout).decode
                                                 : kernels.of_values(layout).decode;
  read(kernels::shape_of(geometry), part, first_token, n_tokens, rows);
  Space(geometry.format, geometry.kv_head).leave(rows, n_tokens, geometry.head_dim);
}

bool encodable(const PartGeometry& geometry, const float* row) {
  if (geometry.format.is_raw()) return true;
  std::array<float, kMaxHeadDim> turned;
  const std::span elements(turned.data(), as_size(geometry.head_dim));
  std::copy_n(row, elements.size(), elements.begin());
  if (geometry.format.hadamard) hadamard(elements.data(), 1, geometry.head_dim);
  return std::ranges::all_of(elements, [](float x) { return std::fabs(x) <= kHalfMax; });
}

void hadamard(float* rows, int n_rows, int dim) {
  kernels::active().hadamard(rows, n_rows, dim);
}

std::string_view name(Code code) noexcept { return info(code).name; }

Code code_of(std::string_view tag) {
  std::string allowed;
  for (std::size_t i = 0; i < kCodes.size(); ++i) {
    if (kCodes[i].name == tag) return static_cast<Code>(i);
    if (i > 0) allowed += ", ";
    allowed += kCodes[i].name;
  }
  throw std::invalid_argument(
      detail::concat("codec: unknown format '", tag, "'; allowed: ", allowed));
}

}  // namespace kvpool::codec
