#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kvpool::cuda {

enum class Element : std::uint8_t { kFp32, kFp16, kBf16 };

/// How sealed blocks are stored (layout.cuh). Raw blocks are fp16 or bf16 rows.
enum class Sealed : std::uint8_t { kNone, kInt8, kInt4, kInt2, kKivi4, kKivi2, kVector };

/// Tokens to a tile: what a warp takes at a time. Block sizes are multiples of it.
inline constexpr int kTileTokens = 16;

/// One block of the table, where it lies. In device memory.
///
/// Raw: `keys` and `values` are (n_kv_heads, block_size, head_dim). Sealed: n_kv_heads parts, laid
/// out as layout.cuh says. Both at multiples of 16 bytes.
struct alignas(32) BlockEntry {
  const void* keys = nullptr;
  const void* values = nullptr;
  /// Tokens first_token ... end_token - 1 of the block are seen; raw rows from end_token on are not
  /// read.
  std::int32_t first_token = 0;
  std::int32_t end_token = 0;
  // What decode attention does not ask: the position of token 0, and which of the two is sealed.
  std::int32_t position = 0;
  std::uint8_t keys_sealed = 0;
  std::uint8_t values_sealed = 0;
  bool operator==(const BlockEntry&) const = default;
};

/// One sequence: a run of raw and a run of sealed entries. Scores have no order, so that sinks,
/// window and open block are one run however they lie in time.
struct SequenceEntry {
  std::int32_t first_raw = 0;
  std::int32_t n_raw = 0;
  std::int32_t first_sealed = 0;
  std::int32_t n_sealed = 0;
};

struct Geometry {
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 128;   // 64 or 128.
  int block_size = 16;  // 16, 32 or 64; 32 or 64 for int2, kivi and codes of 2 bits or less only.
  Sealed sealed = Sealed::kNone;
  int group_size = 32;  // 32 or 64, of the affine codes.
  int key_sub = 4;      // Channels to a code of 8 bits: 2, 4 or 8; of kVector, likewise of values.
  int value_sub = 4;
  Element raw = Element::kBf16;
};

/// Whether there is a kernel for the geometry. The number of query heads does not matter.
bool decodes(const Geometry& geometry) noexcept;

/// Bytes of one KV head's part of a block.
std::size_t raw_part_bytes(const Geometry& geometry) noexcept;
std::size_t sealed_key_bytes(const Geometry& geometry) noexcept;
std::size_t sealed_value_bytes(const Geometry& geometry) noexcept;

/// The work of a sequence, in units that the grid is split by.
int cost(const Geometry& geometry, int n_raw_blocks, int n_sealed_blocks) noexcept;

/// Everything the kernel reads, by value in its launch; pointers are to device memory.
struct DecodeParams {
  const BlockEntry* blocks;
  const SequenceEntry* sequences;
  /// (n_sequences + 1): the sum of cost() over the sequences before.
  const std::int32_t* cost_before;
  /// (n_sequences, n_heads, head_dim).
  const void* queries;
  /// The same in the space of the sealed keys (transformed, smoothed), or `queries`.
  const void* sealed_queries;
  /// (n_sequences, n_heads), added to the scaled scores of sealed blocks; null for none.
  const float* sealed_bias;
  /// kVector: (256, key_sub) and (256, value_sub) int8, times the scale. One a layer, or one a KV
  /// head: (n_kv_heads, 256, ...), scales (n_kv_heads).
  const std::int8_t* key_codebook;
  const float* key_scale;
  const std::int8_t* value_codebook;
  const float* value_scale;
  int codebook_per_head;
  /// The space of sealed values, which sums are brought back from.
  /// kVector: as HeadTransform has it, but never rotated, (n_kv_heads, head_dim) and whether there
  /// is a Hadamard transform, (n_kv_heads); all null: none.
  const float* value_smooth;
  const float* value_mean;
  const std::uint8_t* value_hadamard;
  /// Others: whether they are stored after codec::hadamard().
  int turned_values;
  /// (n_sequences, n_heads, head_dim).
  void* out;
  /// workspace_bytes(), zero at first use; each launch leaves it fit for the next of the same
  /// Geometry. Launches that may overlap need one each.
  void* workspace;

  float scale;
  Element query_type;
  Element out_type;
  int n_sequences;

  // Filled by prepare().
  int n_kv_heads, group, chunks, chunk_heads;
  int tiles_log2, raw_weight, segment_cost;
  int whole_blocks;  // That take part where the sequences are alike; 0: all.
  unsigned raw_stride, key_stride, value_stride;
};

/// A kernel and how to launch it; `params` is its one argument.
struct DecodeLaunch {
  const void* function = nullptr;
  unsigned grid = 0;
  unsigned block = 0;
  unsigned shared_bytes = 0;
  DecodeParams params{};
};

/// Decode attention, one query a sequence: softmax(scale * q . k) . v over the sequences' blocks,
/// in fp32, rounded once. A sequence without tokens gives zeros. One kernel, no host
/// synchronisation, no allocation: fit for capture, where tables, lengths and queries may change
/// between replays.
///
/// @param n_processors multiprocessors to use, as workspace_bytes() was asked with.
/// @return cudaErrorNotSupported where there is no kernel for the geometry.
cudaError_t prepare(const Geometry& geometry, const DecodeParams& params, int n_processors,
                    DecodeLaunch* launch);
cudaError_t launch(const DecodeLaunch& launch, cudaStream_t stream);

/// For any number of sequences up to max_sequences.
std::size_t workspace_bytes(const Geometry& geometry, int max_sequences, int n_processors) noexcept;

}  // namespace kvpool::cuda
