#include "kvpool/kv_cache_builder.h"

#include <stdexcept>
#include <utility>

#include "kvpool/kivi_kv_cache.h"
#include "util/concat.h"

namespace kvpool {

std::shared_ptr<KVCache> KVCacheFactory::create(const KVCacheConfig& config) {
  if (config.method == "kivi") {
    return std::make_shared<KiviKVCache>(config.head_dim, config.bits, config.group_size,
                                         config.residual);
  }
  throw std::invalid_argument(
      detail::concat("KVCacheConfig: method must be 'kivi', got '", config.method, "'"));
}

KVCacheBuilder& KVCacheBuilder::with_method(std::string method) {
  config_.method = std::move(method);
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_head_dim(std::int64_t head_dim) {
  config_.head_dim = head_dim;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_bits(int bits) {
  config_.bits = bits;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_group_size(int group_size) {
  config_.group_size = group_size;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_residual(std::int64_t residual) {
  config_.residual = residual;
  return *this;
}

std::shared_ptr<KVCache> KVCacheBuilder::build() const { return KVCacheFactory::create(config_); }

}  // namespace kvpool
