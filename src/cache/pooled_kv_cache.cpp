#include "kvpool/pooled_kv_cache.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>

namespace mx = mlx::core;

namespace kvpool {

void KVCache::append(const mx::array& k, const mx::array& v) {
  append_key(k);
  try {
    append_value(v);
  } catch (...) {
    drop_last_key();
    throw;
  }
}

PooledKVCache::PooledKVCache(std::shared_ptr<KVCache> inner,
                             std::shared_ptr<BlockPoolAllocator> pool, Owner owner,
                             std::string format)
    : inner_(std::move(inner)), pool_(std::move(pool)), owner_(owner), format_(std::move(format)) {
  if (inner_ == nullptr) throw std::invalid_argument("PooledKVCache: inner must not be null");
  if (pool_ == nullptr) throw std::invalid_argument("PooledKVCache: pool must not be null");
}

PooledKVCache::~PooledKVCache() { release(); }

std::int64_t PooledKVCache::tokens_to_check_out(Lane& lane) {
  if (!lane.blocks.empty() && !lane.blocks.back().live()) {
    pool_->release(lane.blocks);
    lane.blocks.clear();
  }
  const std::int64_t first_without_slot =
      static_cast<std::int64_t>(lane.blocks.size()) * pool_->config().block_size;
  return std::max<std::int64_t>(0, lane.n_tokens + 1 - first_without_slot);
}

void PooledKVCache::advance(Lane& lane, std::span<const Block> blocks) noexcept {
  lane.blocks.insert(lane.blocks.end(), blocks.begin(), blocks.end());
  ++lane.n_tokens;
  mark_last(lane);
}

/// Another thread may have freed the blocks; then there is nothing to say.
void PooledKVCache::mark_last(const Lane& lane) noexcept {
  const auto n_before = static_cast<std::int64_t>(lane.blocks.size()) - 1;
  try {
    pool_->mark_used(lane.blocks.back(), lane.n_tokens - n_before * pool_->config().block_size);
  } catch (const std::invalid_argument&) {
  }
}

void PooledKVCache::append_to(Lane& lane, auto append_inner) {
  std::vector<Block> blocks;
  if (const std::int64_t n = tokens_to_check_out(lane); n > 0) {
    blocks = pool_->allocate(lane.stream, n, owner_, format_);
  }
  try {
    lane.blocks.reserve(lane.blocks.size() + blocks.size());
    append_inner();
  } catch (...) {
    pool_->release(blocks);
    throw;
  }
  advance(lane, blocks);
}

void PooledKVCache::append_key(const mx::array& k) {
  append_to(keys_, [&] { inner_->append_key(k); });
}

void PooledKVCache::append_value(const mx::array& v) {
  append_to(values_, [&] { inner_->append_value(v); });
}

void PooledKVCache::append(const mx::array& k, const mx::array& v) {
  const std::int64_t n = tokens_to_check_out(keys_);
  if (n != tokens_to_check_out(values_) || n == 0) {
    KVCache::append(k, v);
    return;
  }
  auto [k_blocks, v_blocks] = pool_->allocate_kv(n, owner_, format_);
  bool has_key = false;
  try {
    keys_.blocks.reserve(keys_.blocks.size() + k_blocks.size());
    values_.blocks.reserve(values_.blocks.size() + v_blocks.size());
    inner_->append_key(k);
    advance(keys_, k_blocks);
    has_key = true;
    inner_->append_value(v);
  } catch (...) {
    pool_->release(v_blocks);
    if (has_key) {
      drop_last_key();
    } else {
      pool_->release(k_blocks);
    }
    throw;
  }
  advance(values_, v_blocks);
}

mx::array PooledKVCache::attend(const mx::array& q) { return inner_->attend(q); }

std::int64_t PooledKVCache::memory_bytes() const { return inner_->memory_bytes(); }

bool PooledKVCache::drop_last_key() {
  if (keys_.n_tokens <= values_.n_tokens || !inner_->drop_last_key()) return false;
  --keys_.n_tokens;
  if (keys_.blocks.empty()) return true;
  const auto n_before = static_cast<std::int64_t>(keys_.blocks.size()) - 1;
  if (keys_.n_tokens > n_before * pool_->config().block_size) {
    mark_last(keys_);
  } else {
    pool_->release({&keys_.blocks.back(), 1});
    keys_.blocks.pop_back();
  }
  return true;
}

void PooledKVCache::release() noexcept {
  for (Lane* lane : {&keys_, &values_}) {
    pool_->release(lane->blocks);
    lane->blocks.clear();
  }
}

void PooledKVCache::reset() {
  inner_->reset();
  release();
  keys_.n_tokens = 0;
  values_.n_tokens = 0;
}

std::int64_t PooledKVCache::n_blocks_held() const noexcept {
  return std::ranges::count_if(keys_.blocks, &Block::live) +
         std::ranges::count_if(values_.blocks, &Block::live);
}

}  // namespace kvpool
