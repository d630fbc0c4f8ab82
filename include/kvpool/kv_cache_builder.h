#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvpool/kv_cache.h"

namespace kvpool {

class VecInferCodebooks;

/// What KVCacheFactory makes a standalone cache from. Plain data.
struct KVCacheConfig {
  /// "fp16", "int8", "int4", "int2", "kivi4", "kivi2", "vecinfer1", "vecinfer1.5", "vecinfer2",
  /// "vecinfer3", "vecinfer4"; "int", "kivi" and "vecinfer" with `bits` of their own.
  /// int methods code after a Hadamard transform; kivi as published (arXiv:2402.02750), without, so
  /// that flat rows stay flat.
  std::string method = "kivi";
  std::int64_t head_dim = 128;
  /// Of methods "int" (8, 4, 2), "kivi" (4, 2) and "vecinfer" (4, 3, 2, 1).
  int bits = 2;
  /// Channels to a scale: 32 or 64.
  int group_size = 32;
  /// Tokens a block: those that KIVI's keys share a scale with.
  std::int64_t block_size = 32;
  /// Newest tokens that stay fp16.
  std::int64_t window = 128;
  /// First tokens that stay fp16.
  std::int64_t sink = 0;
  /// Evaluate each token and refuse what the method cannot store; see PagedKVCacheConfig.
  bool check_finite = false;
  /// Of vecinfer methods: codebooks of one KV head, of which the first layer counts.
  std::shared_ptr<const VecInferCodebooks> codebooks = nullptr;
  /// If there are none: the seed of random ones, for tests.
  std::optional<std::uint64_t> random_codebooks = std::nullopt;

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
  KVCacheBuilder& with_block_size(std::int64_t block_size);
  KVCacheBuilder& with_window(std::int64_t window);
  KVCacheBuilder& with_sink(std::int64_t sink);
  KVCacheBuilder& with_check_finite(bool check_finite);
  KVCacheBuilder& with_codebooks(std::shared_ptr<const VecInferCodebooks> codebooks);
  /// VecInferCodebooks::random(), for tests.
  KVCacheBuilder& with_random_codebooks(std::uint64_t seed);

  const KVCacheConfig& config() const noexcept { return config_; }
  /// As KVCacheFactory::create().
  std::shared_ptr<KVCache> build() const;

 private:
  KVCacheConfig config_;
};

}  // namespace kvpool
