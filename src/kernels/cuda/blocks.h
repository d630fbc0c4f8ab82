#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"
#include "kernels/cuda/decode.h"

/// What moves and recodes the bytes of blocks, on the device. Each function says how to launch one
/// kernel; its one argument is `params`, by value, so that no list has to be brought to the device.
/// Tasks of one launch must not overlap.
namespace kvpool::cuda {

/// Whether the kernels were built for the device in use.
bool run_here() noexcept;

template <class Params>
struct Launch {
  const void* function = nullptr;
  dim3 grid;
  unsigned block = 0;
  unsigned shared_bytes = 0;
  Params params{};
};

/// What turns a head's rows, once they are smooth.
enum class Turn : std::uint8_t { kNone, kHadamard, kRotation };

/// A codec::VectorQuantizer in device memory, by KV head.
struct Quantizer {
  std::int32_t sub_dim = 0, code_bits = 0;  ///< Of all codebooks; 0: there is none.
  const std::int8_t* centroids = nullptr;   ///< (n_kv_heads, 2^code_bits, sub_dim)
  const float* scales = nullptr;            ///< (n_kv_heads,)
  const float* smooth = nullptr;            ///< (n_kv_heads, head_dim), as the mean.
  const float* mean = nullptr;
  const Turn* turns = nullptr;  ///< (n_kv_heads,)
  /// (n_kv_heads, head_dim, head_dim): HeadTransform's rotation and its transpose; null if no head has
  /// one.
  const float* rotation = nullptr;
  const float* back = nullptr;
};

/// How a part lies: as codec.h says or, if `tiled`, as layout.cuh says, which is as long.
struct PartFormat {
  codec::PartGeometry geometry;
  bool tiled = false;
  Quantizer quantizer = {};  ///< Of vecinfer formats.

  /// Whether rows are stored in a space that is not the model's own (space.cuh).
  bool has_space() const noexcept {
    return geometry.format.hadamard || quantizer.centroids != nullptr;
  }
};

/// Rows from one place to another, so many a head. All strides are in bytes; what is written lies
/// row behind row.
struct CopyTask {
  const std::byte* from;
  std::byte* to;
  std::int64_t from_head, to_head;  ///< From one head to the next.
  std::uint32_t n_heads, n_rows;
  std::int64_t from_row;
  std::int64_t from_element;
  std::uint32_t row_bytes;
  std::uint32_t element_bytes;  ///< 1, 2 or 4.
};
inline constexpr int kCopyTasks = 32;
struct CopyParams {
  CopyTask tasks[kCopyTasks];
};
/// `tasks`: 1 to kCopyTasks.
Launch<CopyParams> copy(const CopyTask* tasks, int n_tasks);

/// A block of raw rows, encoded whole.
struct SealTask {
  const std::byte* from;
  std::byte* to;
};
inline constexpr int kSealTasks = 128;
struct SealParams {
  SealTask tasks[kSealTasks];
  PartFormat raw, sealed;
  std::uint32_t raw_bytes, sealed_bytes;  ///< Of a part.
};
Launch<SealParams> seal(const SealTask* tasks, int n_tasks, const PartFormat& raw,
                        const PartFormat& sealed, int n_kv_heads);

/// Tokens first_token ... of a sealed block, decoded to raw rows; `to` is of head 0's first of
/// them.
struct UnsealTask {
  const std::byte* from;
  std::byte* to;
  std::int32_t first_token, n_tokens;
};
inline constexpr int kUnsealTasks = 96;
struct UnsealParams {
  UnsealTask tasks[kUnsealTasks];
  PartFormat sealed;
  Element row_type;
  std::uint32_t sealed_bytes;
  std::int64_t head_stride;  ///< Bytes from a head's rows to the next's, in what is written.
};
Launch<UnsealParams> unseal(const UnsealTask* tasks, int n_tasks, const PartFormat& sealed,
                            Element row_type, std::int64_t head_stride, int n_kv_heads);

/// Sealed blocks from one layout to the other, code by code: they decode alike.
struct RelayParams {
  SealTask tasks[kSealTasks];
  PartFormat from, to;
  std::uint32_t part_bytes;
};
Launch<RelayParams> relay(const SealTask* tasks, int n_tasks, const PartFormat& from,
                          const PartFormat& to, int n_kv_heads);

/// Rows of new tokens, keys and values, for one block. How they lie is the launch's.
struct NewRows {
  const std::byte* from[2];  ///< Of head 0.
  std::byte* to[2];
  std::uint32_t n_rows;
};
/// As CopyTask has it, for keys or for values.
struct RowLayout {
  std::int64_t from_head, to_head, from_row, from_element;
  std::uint32_t row_bytes, element_bytes;
};

/// How many of each a launch of prepare_tables() carries, whose bytes are part of what it costs the
/// host.
template <int kGrown_, int kEntries_, int kSequences_, int kPositions_, int kRows_>
struct PrepareSizes {
  static constexpr int kGrown = kGrown_, kEntries = kEntries_, kSequences = kSequences_,
                       kPositions = kPositions_, kRows = kRows_;
};
/// One request's step, that of a few and of many, and what else there is.
using OneStep = PrepareSizes<2, 2, 1, 1, 1>;
using Step = PrepareSizes<8, 2, 8, 1, 8>;
using BatchStep = PrepareSizes<32, 2, 32, 1, 32>;
using Tables = PrepareSizes<16, 32, 16, 16, 16>;

/// Writes to the tables that attention reads, prepares queries, and copies the rows that attention
/// is to see.
///
/// Entry k goes to blocks[places[k]], sequence k to sequences[first_sequence + k], likewise
/// cost_before and query_positions; blocks[grown_places[k]] gets another end.
template <class Sizes>
struct PrepareParams {
  BlockEntry entries[Sizes::kEntries];
  SequenceEntry sequences[Sizes::kSequences];
  NewRows rows[Sizes::kRows];
  RowLayout layouts[2];
  std::int64_t query_positions[Sizes::kPositions];
  std::int32_t places[Sizes::kEntries];
  std::int32_t grown_places[Sizes::kGrown], grown_ends[Sizes::kGrown];
  std::int32_t cost_before[Sizes::kSequences + 1];
  std::int32_t n_grown, n_entries, n_sequences, first_sequence, n_new_rows;
  BlockEntry* to_blocks;
  SequenceEntry* to_sequences;
  std::int32_t* to_cost_before;
  std::int64_t* to_query_positions;  ///< Null: nobody asks for them.
  /// (sequences, heads, head_dim) of query_type, head_dim 64 or 128, or null: nothing to prepare.
  /// Strides in elements.
  const void* queries;
  Element query_type;
  std::int32_t n_rows, n_heads, n_kv_heads, head_dim;
  std::int64_t query_strides[3];
  /// fp32: the queries as they are and, if not null, as they meet `sealed_keys`, with what is to be
  /// added to their scores, which are `scale` times the products.
  float* to_queries;
  float* to_sealed;
  float* to_bias;
  PartFormat sealed_keys;
  float scale;

  // Filled by prepare_tables().
  std::int32_t group, head_rows;      ///< Query heads and rows of queries to a KV head.
  std::int32_t columns, slices_log2;  ///< Channels to a lane, and blocks to the same queries.
  std::int32_t query_blocks;          ///< To a KV head.
  std::int32_t threads_a_copy;        ///< Of a block's new rows of a head, keys or values.
};
template <class Sizes>
Launch<PrepareParams<Sizes>> prepare_tables(const PrepareParams<Sizes>& params);

/// Attention of any kind over blocks of any format: slower than decode.h's.
struct AttendParams {
  const BlockEntry* blocks;
  const SequenceEntry* sequences;
  const std::int64_t* query_positions;
  const void* queries;  ///< (n_sequences, n_heads, n_queries, head_dim)
  void* out;            ///< (n_sequences, n_heads, n_queries, value_dim)
  Element type;
  PartFormat raw[2], sealed[2];
  std::uint32_t raw_bytes[2], sealed_bytes[2];  ///< Of a part.
  std::int32_t n_sequences, n_heads, n_kv_heads, n_queries, head_dim, value_dim;
  float scale, soft_cap;
  bool causal;
  std::int64_t window;
  /// Null, or (sequence, head, query, key) with these strides: bool or fp32, by position.
  const void* mask;
  bool mask_is_bool;
  std::int64_t mask_strides[4];
  const float* sinks;  ///< (n_heads,) or null.
  /// partial_floats() of them if n_splits > 1.
  float* partials;
  std::int32_t n_splits;
};
/// Splits of the sequence that keep `n_processors` busy with `n_blocks` to a sequence.
int attend_splits(const AttendParams& params, int n_blocks, int n_processors);
std::size_t partial_floats(const AttendParams& params);
Launch<AttendParams> attend(const AttendParams& params);
/// After attend(), if n_splits > 1.
Launch<AttendParams> merge(const AttendParams& params);

}  // namespace kvpool::cuda
