#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvpool {

using BlockId = std::int64_t;
using Owner = std::int64_t;

/// Which tokens' vectors a block holds. A pool with one free list for both uses kKeyValue.
enum class Stream : std::uint8_t { kKey, kValue, kKeyValue };

/// "k", "v" or "kv".
std::string_view to_string(Stream stream) noexcept;

/// @throws std::invalid_argument if `name` is none of "k", "v" and "kv".
Stream stream_from_string(std::string_view name);

namespace detail {
struct BlockRecord;
struct BlockHold;
class PoolState;
}  // namespace detail

/// A handle to one fixed-size block: who holds it is asked from the pool, live.
///
/// The handle names the block *and* this holding of it, so that it is never mistaken for a later
/// holding of the same block: once freed it shows no owner and no used slots, whoever got the block
/// next. A small value, cheap to copy. Reading it is thread-safe. It must not outlive its pool
/// (in Python it keeps its pool alive).
class Block {
 public:
  /// A handle that belongs to no pool and shows what it is given.
  explicit Block(BlockId block_id, Stream stream = Stream::kKeyValue,
                 std::string_view format = "fp16", std::int64_t n_used = 0,
                 std::optional<Owner> owner = std::nullopt, bool ever_allocated = false);

  /// The index that a backing store uses; unique in the pool and never changed.
  BlockId block_id() const noexcept { return id_; }
  Stream stream() const noexcept { return stream_; }
  /// The tag given to allocate(), such as "fp16" or "int4".
  const std::string& format() const noexcept { return *format_; }
  /// Token slots in use; 0 once freed.
  std::int64_t n_used() const noexcept;
  /// Who holds the block through this handle; none once freed.
  std::optional<Owner> owner() const noexcept;
  /// Whether the block was ever handed out.
  bool ever_allocated() const noexcept;
  /// Differs between any two holdings of a pool; 0 for a handle of no pool.
  std::uint64_t generation() const noexcept { return generation_; }
  /// The same for all who share the block until it is free again, and for nobody after that.
  std::uint64_t life() const noexcept { return life_; }
  /// Whether this handle still holds its block.
  bool live() const noexcept;

 private:
  friend class detail::PoolState;
  Block(detail::BlockRecord& record, detail::BlockHold& hold) noexcept;

  detail::BlockRecord* record_ = nullptr;
  detail::BlockHold* hold_ = nullptr;
  std::uint64_t generation_ = 0;
  std::uint64_t life_ = 0;
  BlockId id_;
  Owner owner_ = 0;
  const std::string* format_;
  std::int64_t n_used_ = 0;
  Stream stream_;
  bool has_owner_ = false;
  bool ever_allocated_ = false;
};

}  // namespace kvpool
