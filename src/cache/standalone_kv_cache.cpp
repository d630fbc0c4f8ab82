#include "kvpool/standalone_kv_cache.h"

#include <mlx/ops.h>

#include <array>
#include <cmath>
#include <stdexcept>

#include "codec/codec.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {

namespace {

std::string message(const auto&... parts) {
  return detail::concat("StandaloneKVCache: ", parts...);
}

std::shared_ptr<PagedStorage> own_storage(std::int64_t block_size) {
  return std::make_shared<PagedStorage>(std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = block_size, .n_blocks = 2, .grow_on_exhaustion = true}));
}

mx::array as_token(const mx::array& vector) { return mx::reshape(vector, {1, 1, 1, -1}); }

constexpr std::array<Owner, 1> kOwner{1};

}  // namespace

StandaloneKVCache::StandaloneKVCache(std::int64_t head_dim, const PagedKVCacheConfig& config,
                                     std::int64_t block_size)
    : head_dim_(head_dim), cache_(own_storage(block_size), config, kOwner) {
  if (head_dim < 8 || head_dim > codec::kMaxHeadDim || head_dim % 8 != 0) {
    throw std::invalid_argument(message("head_dim must be a multiple of 8 up to ",
                                        codec::kMaxHeadDim, ", got ", head_dim));
  }
}

mx::array StandaloneKVCache::checked(const char* what, const mx::array& vector) const {
  if (vector.ndim() != 1 || vector.shape(0) != head_dim_) {
    throw std::invalid_argument(message(what, " must be (", head_dim_, ",), got ",
                                        detail::shape_text(vector.shape())));
  }
  return mx::astype(vector, mx::float16);
}

void StandaloneKVCache::append_key(const mx::array& k) {
  keys_without_value_.push_back(checked("k", k));
}

void StandaloneKVCache::append_value(const mx::array& v) {
  const mx::array value = checked("v", v);
  if (keys_without_value_.empty()) {
    throw std::invalid_argument(message("v comes before its key"));
  }
  cache_.append(as_token(keys_without_value_.front()), as_token(value));
  keys_without_value_.pop_front();
}

bool StandaloneKVCache::drop_last_key() {
  if (keys_without_value_.empty()) return false;
  keys_without_value_.pop_back();
  return true;
}

mx::array StandaloneKVCache::attend(const mx::array& q) {
  const mx::array query = checked("q", q);
  if (size() == 0) throw std::invalid_argument(message("there is no token to attend to"));
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim_));
  return mx::reshape(cache_.attend(as_token(query), scale, {}), {-1});
}

std::int64_t StandaloneKVCache::memory_bytes() const {
  const std::size_t waiting = keys_without_value_.size() * static_cast<std::size_t>(head_dim_) * 2;
  return static_cast<std::int64_t>(cache_.nbytes() + waiting);
}

void StandaloneKVCache::reset() {
  cache_.release();
  keys_without_value_.clear();
}

}  // namespace kvpool
