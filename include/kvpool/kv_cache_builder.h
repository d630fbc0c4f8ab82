#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kvpool/kv_cache.h"

namespace kvpool {

/// What KVCacheFactory makes a standalone cache from. Plain data.
struct KVCacheConfig {
  /// "kivi".
  std::string method = "kivi";
  std::int64_t head_dim = 128;
  int bits = 2;
  int group_size = 32;
  /// Newest tokens that stay in fp16.
  std::int64_t residual = 128;

  bool operator==(const KVCacheConfig&) const = default;
};

struct KVCacheFactory {
  /// @throws std::invalid_argument naming the field, its value and what is allowed.
  static std::shared_ptr<KVCache> create(const KVCacheConfig& config);
};

/// Sets the fields of a KVCacheConfig by name, then makes the cache.
class KVCacheBuilder {
 public:
  KVCacheBuilder& with_method(std::string method);
  KVCacheBuilder& with_head_dim(std::int64_t head_dim);
  KVCacheBuilder& with_bits(int bits);
  KVCacheBuilder& with_group_size(int group_size);
  KVCacheBuilder& with_residual(std::int64_t residual);

  const KVCacheConfig& config() const noexcept { return config_; }
  /// As KVCacheFactory::create().
  std::shared_ptr<KVCache> build() const;

 private:
  KVCacheConfig config_;
};

}  // namespace kvpool
