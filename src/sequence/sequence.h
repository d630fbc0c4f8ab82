#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "codec/codec.h"
#include "kvpool/block_pool.h"
#include "sequence/block_memory.h"

namespace kvpool::detail {

/// How the blocks of one layer are stored, for keys and for values.
struct LayerFormat {
  codec::PartGeometry raw[2];     ///< Of a block that is being filled. [0]: keys, [1]: values.
  codec::PartGeometry sealed[2];  ///< Of a block that is not; as raw if nothing is encoded.
  /// What the formats' quantizers point to.
  std::shared_ptr<const codec::VectorQuantizer> quantizers[2];
  int n_kv_heads = 0;
  std::int64_t window = 0;   ///< Newest tokens that stay raw.
  std::int64_t sink = 0;     ///< First tokens that stay raw.
  std::int64_t sliding = 0;  ///< If not 0: tokens that a query sees, itself among them.

  std::size_t block_bytes(const codec::PartGeometry& part) const noexcept {
    return codec::block_bytes(part, n_kv_heads);
  }
  bool seals(int role) const noexcept { return !(sealed[role].format == raw[role].format); }
  /// How a block in `format`, which is one of the two, is stored.
  const codec::PartGeometry& part(int role, const codec::Format& format) const noexcept {
    return format == raw[role].format ? raw[role] : sealed[role];
  }
};

/// Keys and values of consecutive tokens. [0]: keys, [1]: values.
struct TokenBlock {
  std::int64_t position = 0;  ///< Of the first token.
  std::int32_t n_tokens = 0;
  std::shared_ptr<BlockBytes> bytes[2];
  codec::Format format[2];

  std::int64_t end() const noexcept { return position + n_tokens; }
};

using BlockList = std::vector<TokenBlock>;

/// Buffers that must outlive an op.
using Buffers = std::vector<std::shared_ptr<mlx::core::array::Data>>;

/// Blocks where they lie, and what keeps their memory; of the native backend only.
struct AttendView {
  std::vector<attention::BlockRef> blocks;
  Buffers buffers;
};

/// What an image says of a block.
struct SavedBlock {
  std::int64_t position;
  std::int64_t n_tokens;
  bool sealed[2];
};

/// The blocks that `saved` says, without bytes.
/// @throws std::invalid_argument unless they follow each other and could be of such a layer.
BlockList described_blocks(const LayerFormat& format, std::span<const SavedBlock> saved);

// What an append asks of memory, in this order.

/// The raw block at `from` goes to `to` as it is: an open block that a fork shares.
struct CopyTask {
  std::shared_ptr<BlockBytes> from, to;
  std::size_t bytes;
};
/// The raw block at `from` goes to `to` encoded.
struct SealTask {
  std::shared_ptr<BlockBytes> from, to;
  int role;
};
/// Rows `first_row` ... of the new tokens of batch row `batch` go to slots `slot` ... of a block.
struct WriteTask {
  std::shared_ptr<BlockBytes> to[2];
  std::int64_t batch, first_row;
  std::int32_t slot, n_tokens;
};
struct AppendTasks {
  std::vector<CopyTask> copies;
  std::vector<SealTask> seals;
  std::vector<WriteTask> writes;
};

/// The blocks of one request in one layer, and the request's hold on them in the pool.
///
/// A block is open (raw, being filled), raw and full, or sealed (encoded, immutable). Bytes are
/// shared with forks; an open block that is shared is copied when one side appends to it.
class Sequence {
 public:
  Sequence(std::shared_ptr<BlockPoolAllocator> pool, std::shared_ptr<BlockMemory> memory,
           Owner owner);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  /// An append that is planned: pool blocks and memory are taken, and go back if it is dropped.
  class Plan {
   public:
    Plan(Plan&& other) noexcept = default;
    ~Plan();
    /// Makes it so. Cannot fail.
    void commit() noexcept;

   private:
    friend class Sequence;
    struct Sealed {
      std::size_t block;
      int role;
      std::shared_ptr<BlockBytes> bytes;
      codec::Format format;
    };
    explicit Plan(Sequence& sequence) : sequence_(&sequence) {}

    Sequence* sequence_;
    std::size_t n_dropped_ = 0;
    std::size_t n_settled_ = 0;
    std::vector<Sealed> sealed_;
    std::shared_ptr<BlockBytes> own_copy_[2];  ///< Of the open block, if a fork shares it.
    std::int32_t into_open_ = 0;               ///< Tokens that the open block takes.
    std::vector<TokenBlock> added_;
    std::vector<Block> taken_[2];  ///< Pool blocks for own_copy_, then added_.
  };

  /// Plans `n_tokens` more, which are rows `first_row` ... of batch row `batch`. What has left the
  /// raw window before them is sealed, and what they cannot see is dropped.
  /// @throws BlockPoolExhaustedError: nothing has changed.
  Plan plan_append(const LayerFormat& format, std::int64_t batch, std::int64_t first_row,
                   std::int64_t n_tokens, AppendTasks& tasks);

  std::int64_t length() const noexcept { return length_; }
  /// Whether blocks were dropped, so that earlier states cannot be had back.
  bool slid() const noexcept {
    return held() && !blocks_->empty() && blocks_->front().position > 0;
  }
  /// Shortens to `length` tokens.
  void shorten(std::int64_t length);
  /// Takes over the tokens of `other`, by reference, under this sequence's owner.
  void fork_from(const Sequence& other);
  /// Holds the blocks described (described_blocks()) in place of what it held; their bytes are the
  /// caller's to write.
  /// @throws BlockPoolExhaustedError: nothing has changed.
  void restore(const LayerFormat& format, BlockList described);
  /// Frees everything.
  void clear() noexcept;
  /// Whether the pool still counts these blocks for the owner.
  bool held() const noexcept { return holds_[0].empty() || holds_[0].back().live(); }

  std::span<const TokenBlock> blocks() const noexcept { return *blocks_; }
  /// The blocks as they are now. While it is held, changes go to a copy.
  std::shared_ptr<const BlockList> snapshot() const noexcept { return blocks_; }
  /// The blocks as the native backend's attention takes them.
  std::shared_ptr<const AttendView> view(const LayerFormat& format);
  Owner owner() const noexcept { return owner_; }
  /// The first of the blocks that have changed since this was last called, otherwise than by tokens
  /// added at the end; their number or more if none has. For whoever has the attachment.
  std::size_t take_first_rewritten() noexcept {
    return std::exchange(first_rewritten_, std::numeric_limits<std::size_t>::max());
  }
  /// What the backend keeps with the sequence.
  std::shared_ptr<void>& attachment() noexcept { return attachment_; }

 private:
  /// Blocks from `first` on are no longer what they were.
  void rewritten(std::size_t first) noexcept;
  std::size_t first_needed(const LayerFormat& format) const noexcept;
  bool is_open(const TokenBlock& block, const LayerFormat& format) const noexcept;
  BlockList& own_blocks();

  const std::shared_ptr<BlockPoolAllocator> pool_;
  const std::shared_ptr<BlockMemory> memory_;
  const Owner owner_;
  std::shared_ptr<BlockList> blocks_ = std::make_shared<BlockList>();
  std::vector<Block> holds_[2];  ///< Of blocks_, one each.
  /// Kept from step to step; null when more has changed than that tokens were added.
  std::shared_ptr<AttendView> view_;
  std::shared_ptr<void> attachment_;
  std::size_t first_rewritten_ = std::numeric_limits<std::size_t>::max();
  std::int64_t length_ = 0;
  std::size_t n_settled_ = 0;  ///< Leading blocks that sealing is done with.
};

}  // namespace kvpool::detail
