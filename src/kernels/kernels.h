#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "codec/codec.h"
#include "codec/vector_quantizer.h"

namespace kvpool::kernels {

/// What a part's bytes look like to a kernel: a Format and a Role resolve to one.
enum class Layout : std::uint8_t {
  kFp32,
  kFp16,
  kBf16,
  kAffine8,  // Scale and bias by groups of channels.
  kAffine4,
  kAffine2,
  kChannel4,  // Scale and bias by channel; keys only.
  kChannel2,
  kVector2,  // Codes of 8 bits for 2, 4 or 8 channels; of 12 bits for 8.
  kVector4,
  kVector8,
  kVector8Wide,
};
inline constexpr std::size_t kNLayouts = 12;

Layout layout_of(codec::Format format, codec::Role role) noexcept;

/// The sizes of a part, common to the parts of a run.
struct PartShape {
  int block_size;
  int head_dim;
  int group_size;
  /// Of vector layouts only.
  const codec::Codebook* codebook = nullptr;

  bool operator==(const PartShape&) const = default;
};
PartShape shape_of(const codec::PartGeometry& geometry) noexcept;

/// Parts of one head in consecutive blocks that share a format; the kernels take them in one call.
/// Tokens are counted over the run: column c is the c-th token.
struct PartRun {
  const std::byte* const* parts;
  /// Of each part, its first n_tokens count: 1 to block_size.
  const std::int32_t* n_tokens;
  std::size_t n_parts;
  /// What is read next, as parts of ahead_bytes: a kernel may fetch it into cache meanwhile.
  const std::byte* const* ahead = nullptr;
  std::size_t n_ahead = 0;
  std::size_t ahead_bytes = 0;
};

/// Scores and weights may be read, and scores overwritten, up to this many columns after the last.
inline constexpr int kColumnSlack = 16;

/// Kernels of one layout for keys. None knows of transforms: rows and queries are as stored.
struct KeyKernels {
  /// Rows (n_tokens, head_dim) to and from a part, as codec::encode() and codec::decode() do.
  void (*encode)(const PartShape&, const float* rows, int first_token, int n_tokens,
                 std::byte* part);
  void (*decode)(const PartShape&, const std::byte* part, int first_token, int n_tokens,
                 float* rows);
  /// What scores() wants to know of (n_queries, head_dim) queries, in prepared_bytes() bytes at an
  /// address that is a multiple of 64. Good for any block_size.
  std::size_t (*prepared_bytes)(const PartShape&, int n_queries);
  void (*prepare)(const PartShape&, const float* queries, int n_queries, std::byte* prepared);
  /// scores[q * stride + c] = queries[q] . key[c]
  void (*scores)(const PartShape&, const PartRun&, const std::byte* prepared, int n_queries,
                 float* scores, std::size_t stride);
};

struct ValueKernels {
  void (*encode)(const PartShape&, const float* rows, int first_token, int n_tokens,
                 std::byte* part);
  void (*decode)(const PartShape&, const std::byte* part, int first_token, int n_tokens,
                 float* rows);
  /// out[q * head_dim + d] += sum over c of weights[q * stride + c] * value[c][d], weights in 0..1.
  /// Integer and vector layouts may round weights to 16 bits of the largest product with a scale nearby.
  void (*accumulate)(const PartShape&, const PartRun&, const float* weights, std::size_t stride,
                     int n_queries, float* out);
};

/// All kernels of one instruction set. Every level decodes and encodes the same bits; scores and
/// sums differ in rounding.
struct KernelTable {
  std::string_view name;
  std::array<KeyKernels, kNLayouts> keys;
  std::array<ValueKernels, kNLayouts> values;
  /// The largest of n values, NaN among them passed over; -infinity if n is 0.
  float (*max)(const float* values, std::size_t n);
  /// Each value becomes exp(value - shift), 0 for -infinity, NaN for NaN. Returns their sum.
  float (*exp_sum)(float* values, std::size_t n, float shift);
  /// Each value becomes cap * tanh(value / cap).
  void (*soft_cap)(float* values, std::size_t n, float cap);
  void (*scale)(float* values, std::size_t n, float factor);
  /// codec::hadamard(), in the same order of additions at every level.
  void (*hadamard)(float* rows, int n_rows, int dim);
  /// Each row of (n_rows, dim) becomes row * matrix (dim, dim), with the same bits at every level.
  void (*rotate)(const float* matrix, float* rows, int n_rows, int dim);

  const KeyKernels& of_keys(Layout layout) const noexcept {
    return keys[static_cast<std::size_t>(layout)];
  }
  const ValueKernels& of_values(Layout layout) const noexcept {
    return values[static_cast<std::size_t>(layout)];
  }
};

/// Levels this library was built with, best last.
struct Level {
  std::string_view name;
  const KernelTable* table;  // Null if this CPU does not run them.
};
std::span<const Level> levels();  // In levels_<architecture>.cpp.

/// @throws std::invalid_argument if no level is so named or this CPU lacks it, listing those
///         allowed.
const KernelTable& table_named(std::string_view name);

/// The level that has no kernels: paged caches run on MLX's own ops, on any device.
inline constexpr std::string_view kOps = "ops";

/// The level of NVIDIA GPUs, where it was built; it has no table.
inline constexpr std::string_view kCuda = "cuda";

/// The environment's KVPOOL_KERNELS; empty if it is not set.
std::string forced_level();

/// The level in use: forced_level() if it has kernels, else the best available. Chosen at the first
/// call.
/// @throws std::invalid_argument as table_named(), at every call until the variable is mended.
const KernelTable& active();

}  // namespace kvpool::kernels
