#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/thread_pool.h"
#include "codec/codec.h"
#include "kernels/kernels.h"

namespace kvpool::attention {

/// A block's keys and values where they lie. The caller keeps them alive and unchanged.
struct BlockRef {
  /// Blocks of n_kv_heads parts each (codec::PartGeometry).
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  /// Absolute position of the first token.
  std::int64_t position = 0;
  /// Tokens that count, 1 to block_size; those after them are not read from raw blocks.
  std::int32_t n_tokens = 0;
  /// Tokens the block has room for, which sets the distance between heads.
  std::int32_t block_size = 0;
  codec::Format key_format;
  codec::Format value_format;
};

/// One member of a batch.
struct SequenceRef {
  /// By ascending position, without overlap; gaps are fine. Empty: the output is zero.
  std::span<const BlockRef> blocks;
  /// Absolute position of the first query; the i-th is at query_position + i.
  std::int64_t query_position = 0;
};

enum class DType : std::uint8_t { kFp32, kFp16, kBf16 };

/// Strides in elements of a (batch, head, query, dim) array whose last axis is contiguous.
struct Strides {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t query = 0;
};
/// Of a contiguous (batch, n_heads, n_queries, dim) array.
Strides contiguous(int n_heads, int n_queries, int dim) noexcept;

/// A (batch, head, query, key) array; a stride of 0 broadcasts. Its column 0 stands for the key at
/// absolute position `first_position`.
struct Mask {
  enum class Kind : std::uint8_t { kNone, kBool, kAdditive };
  Kind kind = Kind::kNone;
  /// bool (true: attend) or float (added to the scaled, capped score).
  const void* data = nullptr;
  std::array<std::int64_t, 4> strides{};
  std::int64_t n_keys = 0;
  std::int64_t first_position = 0;
};

struct Arguments {
  int n_heads = 0;
  /// Divides n_heads; heads h * n_heads / n_kv_heads ... share KV head h.
  int n_kv_heads = 0;
  int head_dim = 0;
  int value_dim = 0;
  /// Queries of each sequence.
  int n_queries = 1;
  float scale = 1.0F;
  DType dtype = DType::kFp32;
  /// (batch, n_heads, n_queries, head_dim) and (batch, n_heads, n_queries, value_dim), both dtype.
  const void* queries = nullptr;
  Strides query_strides;
  void* out = nullptr;
  Strides out_strides;
  std::span<const SequenceRef> sequences;

  /// The query at position p sees keys at positions <= p.
  bool causal = false;
  /// If not 0: it sees keys at positions > p - window, too.
  std::int64_t window = 0;
  Mask mask;
  /// One logit a head that takes part in the softmax and has no value; null for none.
  const float* sinks = nullptr;
  /// If not 0: scores become soft_cap * tanh(score / soft_cap).
  float soft_cap = 0.0F;
};

/// @throws std::invalid_argument naming what does not fit; for use before any work is queued.
void validate(const Arguments& arguments);

/// softmax(scale * queries . keys + mask) . values over each sequence's blocks, in fp32 whatever
/// the dtype; the result is rounded once. A query that sees no key gets zeros.
///
/// Each part is read once for all query heads of its group and, while they are few, all queries.
/// Work is split over sequences, KV heads, queries and, for few of these, over tokens; partial
/// results merge by their log-sum-exp. Results depend on the number of threads in rounding only.
/// Allocates scratch that the threads keep and that does not grow with the sequences.
/// Thread-safe. `arguments` must validate().
void attend(const Arguments& arguments, ThreadPool& pool = ThreadPool::shared(),
            const kernels::KernelTable& kernels = kernels::active());

}  // namespace kvpool::attention
