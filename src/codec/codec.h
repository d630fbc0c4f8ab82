#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvpool::codec {

struct VectorQuantizer;

/// How the elements of a block are coded. Append only: the values are written to files.
/// A new one is a line here, a line in codec.cpp, and its kernels (kernels/kernels.h).
enum class Code : std::uint8_t {
  kFp32,
  kFp16,
  kBf16,
  kInt8,
  kInt4,
  kInt2,
  kKivi4,
  kKivi2,
  kVecInfer1,
  kVecInfer1_5,
  kVecInfer2,
  kVecInfer3,
  kVecInfer4,
};

/// A block holds keys or values; some formats store the two differently.
enum class Role : std::uint8_t { kKeys, kValues };

/// How one block is stored. Keys and values of a layer may have different ones.
///
/// `int8`, `int4`, `int2`: affine by groups of `group_size` channels of one token; x is near
/// scale * code + bias, as in mx.quantize, with scale and bias in fp16 and scale >= 0.
/// `kivi4`, `kivi2`: keys affine by channel over all tokens of the block, values as int4 and int2.
/// `vecinfer1` to `vecinfer4`: sub-vectors of a few channels, each the nearest of a codebook's
/// centroids; no scales of their own. codec/vector_quantizer.h has the codebooks and the transform.
/// The last group of a head may be short: its range is of its own channels only.
struct Format {
  Code code = Code::kFp32;
  /// Channels to a scale: 32 or 64. Raw formats and keys of kivi have no use for it.
  std::uint8_t group_size = 32;
  /// The rows are stored after hadamard(); of integer formats only.
  bool hadamard = false;
  /// Of vecinfer formats, null for others. Whoever keeps the format keeps this alive.
  const VectorQuantizer* quantizer = nullptr;

  bool is_raw() const noexcept { return code <= Code::kBf16; }
  bool is_vector() const noexcept { return code >= Code::kVecInfer1; }
  bool operator==(const Format&) const = default;
};

/// The codebooks that a vecinfer format asks for: channels to a code, and its bits.
struct VectorCode {
  int sub_dim;
  int code_bits;

  /// Bits an element.
  double bits() const noexcept { return static_cast<double>(code_bits) / sub_dim; }
  bool operator==(const VectorCode&) const = default;
};
/// `code` must be a vecinfer one.
VectorCode vector_code(Code code, Role role) noexcept;
/// Bits an element of a vecinfer format, keys and values together.
double vector_bits(Code code) noexcept;
/// @throws std::invalid_argument unless a vecinfer format has this code.
void validate(VectorCode code);
/// Of the vecinfer formats with one code for keys and values, the one that has this.
Code code_of(VectorCode code) noexcept;

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxBlockSize = 65536;

/// One KV head of one block: the unit of encode(), decode() and of the kernels. The parts of a
/// block's heads lie one behind the other.
///
/// Raw: [token][channel]. Others, for each tile of 16 tokens: codes, then scale[group][token], then
/// bias[group][token] (kivi keys: scale[channel], bias[channel] before the first tile). The codes
/// of a full tile are 32-bit words, lowest bits first, of consecutive channels for keys,
/// [word][token], and of consecutive tokens for values, [word][channel]. The codes of a last tile
/// of less than 16 tokens are [token][channel], each row starting at a byte.
/// Vecinfer: the codes as bytes, [sub-vector][token]; of 12-bit codes the low 8 bits so, then the
/// high 4 bits [sub-vector][token / 2], those of an even token lowest.
/// No alignment is asked of a part.
struct PartGeometry {
  Format format;
  Role role = Role::kKeys;
  /// Tokens the block has room for.
  int block_size = 16;
  int head_dim = 64;
  /// Which head this is the part of; matters to vecinfer formats only.
  int kv_head = 0;
};

/// @throws std::invalid_argument unless head_dim is a multiple of 8 up to kMaxHeadDim,
///         1 <= block_size <= kMaxBlockSize, the format's group_size and hadamard are allowed, and a
///         vecinfer format, and no other, has a quantizer with fitting codebooks for kv_head.
void validate(const PartGeometry& geometry);

/// Bytes of one head's part, and of the block with all its heads. `geometry` must validate.
std::size_t part_bytes(const PartGeometry& geometry) noexcept;
std::size_t block_bytes(const PartGeometry& geometry, int n_kv_heads) noexcept;

/// Writes fp32 rows (n_tokens, head_dim) as one head's part. Raw formats take any rows
/// `first_token` ... of the block and leave the others as they are; the others take all at once:
/// first_token = 0 and n_tokens = block_size, every row encodable() (if one is not, what is stored
/// is unspecified but decodes without harm to other parts). An element is then off by at
/// most half the stored scale, which is at most ((max - min) + ulp16(min)) / (2^bits - 1) rounded
/// up in fp16: a flat group decodes to its constant within fp16 rounding.
/// Thread-safe on distinct parts. Allocates nothing for raw formats.
void encode(const PartGeometry& geometry, const float* rows, int n_tokens, std::byte* part,
            int first_token = 0);

/// Reads rows `first_token` ... of a part as fp32 (n_tokens, head_dim), any transform undone.
/// Thread-safe.
void decode(const PartGeometry& geometry, const std::byte* part, int first_token, int n_tokens,
            float* rows);

/// Whether encode() can code a row of head_dim elements: raw formats take any; for the others all
/// elements must be finite and fit fp16, after the transform if there is one.
bool encodable(const PartGeometry& geometry, const float* row);

/// Multiplies each row of (n_rows, dim) by the orthonormal Walsh-Hadamard matrix of the largest
/// power of two that divides `dim`, a multiple of 8, block by block along the row. Its own inverse.
/// The same bits at every level.
void hadamard(float* rows, int n_rows, int dim);

/// "fp32", "int4", "kivi2", "vecinfer1.5", ...
std::string_view name(Code code) noexcept;
/// @throws std::invalid_argument naming the tag and what is allowed.
Code code_of(std::string_view tag);

}  // namespace kvpool::codec
