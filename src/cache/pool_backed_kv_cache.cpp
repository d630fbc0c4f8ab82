#include "kvpool/pool_backed_kv_cache.h"

#include <mlx/ops.h>

#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>

#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

std::string message(const auto&... parts) {
  return detail::concat("PoolBackedKVCache: ", parts...);
}

std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return n / by + (n % by != 0); }

mx::array first_tokens(const mx::array& buffer, std::int64_t n) {
  if (n == buffer.shape(2)) return buffer;
  mx::Shape stop = buffer.shape();
  stop[2] = static_cast<mx::ShapeElem>(n);
  return mx::slice(buffer, mx::Shape(4, 0), std::move(stop));
}

mx::array write_at(const mx::array& buffer, std::int64_t at, const mx::array& tokens) {
  mx::Shape start(4, 0);
  mx::Shape stop = buffer.shape();
  start[2] = static_cast<mx::ShapeElem>(at);
  stop[2] = static_cast<mx::ShapeElem>(at + tokens.shape(2));
  return mx::slice_update(buffer, mx::astype(tokens, buffer.dtype()), std::move(start),
                          std::move(stop));
}

/// The first `n` tokens of `buffer`, then room up to `capacity` tokens.
mx::array grown(const mx::array& buffer, std::int64_t n, std::int64_t capacity) {
  mx::Shape room = buffer.shape();
  room[2] = static_cast<mx::ShapeElem>(capacity - n);
  return mx::concatenate({first_tokens(buffer, n), mx::zeros(room, buffer.dtype())}, 2);
}

mx::array fresh(const mx::array& like, std::int64_t capacity) {
  mx::Shape shape = like.shape();
  shape[2] = static_cast<mx::ShapeElem>(capacity);
  return mx::zeros(shape, like.dtype());
}

bool same_row_shape(const mx::array& a, const mx::array& b) {
  return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1) && a.shape(3) == b.shape(3);
}

void require_pair(const mx::array& keys, const mx::array& values) {
  if (keys.ndim() == 4 && values.ndim() == 4 && keys.shape(0) == values.shape(0) &&
      keys.shape(2) == values.shape(2)) {
    return;
  }
  throw std::invalid_argument(
      message("keys and values must be (B, n_kv_heads, S, head_dim) with equal B and S, got ",
              detail::shape_text(keys.shape()), " and ", detail::shape_text(values.shape())));
}

}  // namespace

PoolBackedKVCache::PoolBackedKVCache(std::shared_ptr<BlockPoolAllocator> pool, Owner owner,
                                     std::optional<std::int64_t> step)
    : pool_(std::move(pool)),
      owner_(owner),
      step_(0),
      group_(std::make_shared<Group>(Group{this})) {
  if (pool_ == nullptr) throw std::invalid_argument(message("pool must not be null"));
  step_ = step.value_or(std::max(pool_->config().block_size, kStockStep));
  if (step_ < 1) throw std::invalid_argument(message("step must be >= 1, got ", step_));
}

PoolBackedKVCache::~PoolBackedKVCache() {
  forget();
  std::erase(*group_, this);
}

/// Tokens may take no block: an update may have none.
bool PoolBackedKVCache::held() const noexcept {
  return buffers_.has_value() && (blocks_.keys.empty() || blocks_.keys.front().live());
}

void PoolBackedKVCache::forget() noexcept {
  pool_->release(blocks_.keys);
  pool_->release(blocks_.values);
  blocks_ = {};
  buffers_.reset();
  shared_ = false;
  offset_ = 0;
}

std::int64_t PoolBackedKVCache::capacity() const noexcept {
  return held() ? buffers_->first.shape(2) : 0;
}

std::int64_t PoolBackedKVCache::offset() const noexcept { return held() ? offset_ : 0; }

std::int64_t PoolBackedKVCache::n_blocks(std::int64_t n_tokens,
                                         std::int64_t n_rows) const noexcept {
  return ceil_div(n_tokens * n_rows, pool_->config().block_size);
}

PoolBackedKVCache::Blocks PoolBackedKVCache::allocate(std::int64_t n_blocks) const {
  if (n_blocks <= 0) return {};
  auto [keys, values] = pool_->allocate_kv(n_blocks * pool_->config().block_size, owner_);
  return {std::move(keys), std::move(values)};
}

/// Says how full the blocks of the tokens from `low` to `high` are when a row has `end` tokens.
void PoolBackedKVCache::mark_used(std::int64_t low, std::int64_t high, std::int64_t end) {
  const std::int64_t block_size = pool_->config().block_size;
  const std::int64_t n_rows = buffers_->first.shape(0);
  const auto first = static_cast<std::size_t>(low * n_rows / block_size);
  const auto count = static_cast<std::size_t>(n_blocks(high, n_rows)) - first;
  const std::int64_t n_used = end * n_rows - static_cast<std::int64_t>(first) * block_size;
  for (const std::vector<Block>* blocks : {&blocks_.keys, &blocks_.values}) {
    pool_->mark_used(std::span(*blocks).subspan(first, count), n_used);
  }
}

PoolBackedKVCache::KeysAndValues PoolBackedKVCache::update_and_fetch(const mx::array& keys,
                                                                     const mx::array& values) {
  require_pair(keys, values);
  if (!held()) forget();
  if (buffers_ && !(same_row_shape(buffers_->first, keys) &&
                    same_row_shape(buffers_->second, values))) {
    throw std::invalid_argument(
        message("the cache holds keys ", detail::shape_text(buffers_->first.shape()),
                " and values ", detail::shape_text(buffers_->second.shape()),
                "; only S may differ from them, got ", detail::shape_text(keys.shape()), " and ",
                detail::shape_text(values.shape())));
  }
  const std::int64_t end = offset_ + keys.shape(2);
  if (end > std::numeric_limits<mx::ShapeElem>::max() - step_) {
    throw std::invalid_argument(message(end, " tokens are more than an array can hold"));
  }
  const std::int64_t new_capacity = std::max(capacity(), ceil_div(end, step_) * step_);

  KeysAndValues buffers = buffers_.value_or(KeysAndValues{keys, values});
  if (!buffers_) {
    buffers = {fresh(keys, new_capacity), fresh(values, new_capacity)};
  } else if (new_capacity > capacity()) {
    buffers = {grown(buffers.first, offset_, new_capacity),
               grown(buffers.second, offset_, new_capacity)};
  }
  if (keys.shape(2) > 0) {
    buffers = {write_at(buffers.first, offset_, keys), write_at(buffers.second, offset_, values)};
  }
  KeysAndValues fetched{first_tokens(buffers.first, end), first_tokens(buffers.second, end)};

  const bool grows = new_capacity > capacity();
  const bool was_shared = own_blocks(n_blocks(new_capacity, keys.shape(0)));
  buffers_ = std::move(buffers);
  mark_used(was_shared ? 0 : offset_, was_shared || grows ? new_capacity : end, end);
  offset_ = end;
  return fetched;
}

/// Holds `n` blocks of each stream from here on, and shares none. All or nothing.
/// @return whether a fork held them too, so that none is marked as this cache's tokens fill it.
bool PoolBackedKVCache::own_blocks(std::int64_t n) {
  const bool were_shared = shared_;
  const bool shared =
      were_shared && !blocks_.keys.empty() && pool_->ref_count(blocks_.keys.front()) > 1;
  const std::int64_t n_owned = shared ? 0 : static_cast<std::int64_t>(blocks_.keys.size());
  const Blocks added = allocate(n - n_owned);
  const auto n_kept = static_cast<std::size_t>(std::min(n, n_owned));
  for (auto [held, taken] : {std::pair{&blocks_.keys, &added.keys}, {&blocks_.values, &added.values}}) {
    pool_->release(std::span(*held).subspan(n_kept));
    held->erase(held->begin() + static_cast<std::ptrdiff_t>(n_kept), held->end());
    held->insert(held->end(), taken->begin(), taken->end());
  }
  shared_ = false;
  return were_shared;
}

void PoolBackedKVCache::release() {
  pool_->free_all(owner_);
  for (PoolBackedKVCache* cache : *group_) cache->forget();
}

std::int64_t PoolBackedKVCache::trim(std::int64_t n) {
  const std::int64_t n_trimmed = std::clamp<std::int64_t>(n, 0, offset());
  if (n_trimmed == 0) return 0;
  if (!shared_) mark_used(offset_ - n_trimmed, offset_, offset_ - n_trimmed);
  offset_ -= n_trimmed;
  return n_trimmed;
}

std::optional<PoolBackedKVCache::KeysAndValues> PoolBackedKVCache::state() const {
  if (!held()) return std::nullopt;
  return KeysAndValues{first_tokens(buffers_->first, offset_),
                       first_tokens(buffers_->second, offset_)};
}

void PoolBackedKVCache::set_state(const std::optional<KeysAndValues>& state) {
  if (!state) {
    forget();
    return;
  }
  require_pair(state->first, state->second);
  const std::int64_t length = state->first.shape(2);
  if (!held()) forget();
  own_blocks(n_blocks(length, state->first.shape(0)));
  buffers_ = state;
  mark_used(0, length, length);
  offset_ = length;
}

std::size_t PoolBackedKVCache::nbytes() const noexcept {
  return held() ? buffers_->first.nbytes() + buffers_->second.nbytes() : 0;
}

void PoolBackedKVCache::fork_from(PoolBackedKVCache& other) {
  if (other.pool_ != pool_) throw std::invalid_argument(message("a fork stays in its pool"));
  if (other.owner_ == owner_) {
    throw std::invalid_argument(message("a fork needs an owner of its own, got ", owner_));
  }
  Blocks blocks;
  if (other.held()) {
    blocks.keys = pool_->share(other.blocks_.keys, owner_);
    try {
      blocks.values = pool_->share(other.blocks_.values, owner_);
    } catch (...) {
      pool_->release(blocks.keys);
      throw;
    }
  }
  forget();
  if (!other.held()) return;
  blocks_ = std::move(blocks);
  buffers_ = other.buffers_;
  offset_ = other.offset_;
  shared_ = other.shared_ = true;
}

void PoolBackedKVCache::link(PoolBackedKVCache& other) {
  if (group_ == other.group_) return;
  const std::shared_ptr<Group> joined = other.group_;
  for (PoolBackedKVCache* cache : *joined) {
    group_->push_back(cache);
    cache->group_ = group_;
  }
}

}  // namespace kvpool
