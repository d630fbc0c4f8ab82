#include "kvpool/block.h"

#include <mutex>
#include <stdexcept>
#include <unordered_set>

#include "pool/pool_state.h"

namespace kvpool {

std::string_view to_string(Stream stream) noexcept {
  switch (stream) {
    case Stream::kKey:
      return "k";
    case Stream::kValue:
      return "v";
    case Stream::kKeyValue:
      return "kv";
  }
  return "";
}

Stream stream_from_string(std::string_view name) {
  if (name == "k") return Stream::kKey;
  if (name == "v") return Stream::kValue;
  if (name == "kv") return Stream::kKeyValue;
  throw std::invalid_argument(
      "stream must be 'k' or 'v' ('kv' in a pool that does not separate "
      "them), got '" +
      std::string(name) + "'");
}

namespace {

/// Formats of handles without a pool. A tag lives as long as the program.
const std::string* intern_unpooled(std::string_view format) {
  static std::mutex mutex;
  static std::unordered_set<std::string> formats;
  const std::lock_guard guard(mutex);
  return &*formats.emplace(format).first;
}

}  // namespace

Block::Block(BlockId block_id, Stream stream, std::string_view format, std::int64_t n_used,
             std::optional<Owner> owner, bool ever_allocated)
    : id_(block_id),
      owner_(owner.value_or(0)),
      format_(intern_unpooled(format)),
      n_used_(n_used),
      stream_(stream),
      has_owner_(owner.has_value()),
      ever_allocated_(ever_allocated) {}

bool Block::live() const noexcept { return detail::PoolState::is_live(*this); }

std::int64_t Block::n_used() const noexcept {
  if (record_ == nullptr) return n_used_;
  const std::int64_t n_used = record_->n_used.load(std::memory_order_acquire);
  return live() ? n_used : 0;
}

std::optional<Owner> Block::owner() const noexcept {
  const bool held = record_ == nullptr ? has_owner_ : live();
  return held ? std::optional(owner_) : std::nullopt;
}

bool Block::ever_allocated() const noexcept { return ever_allocated_; }

}  // namespace kvpool
