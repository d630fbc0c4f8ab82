#include "kvpool/kv_cache_builder.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "kvpool/standalone_kv_cache.h"
#include "kvpool/vecinfer_codebooks.h"
#include "util/concat.h"

namespace kvpool {

namespace {

constexpr std::array<std::string_view, 11> kMethods{
    "fp16",      "int8",        "int4",      "int2",      "kivi4",    "kivi2",
    "vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4"};

}  // namespace

std::shared_ptr<KVCache> KVCacheFactory::create(const KVCacheConfig& config) {
  const bool has_bits =
      config.method == "int" || config.method == "kivi" || config.method == "vecinfer";
  const std::string method =
      has_bits ? detail::concat(config.method, config.bits) : config.method;
  if (std::find(kMethods.begin(), kMethods.end(), method) == kMethods.end()) {
    throw std::invalid_argument(detail::concat(
        "KVCacheConfig: method must be fp16, int8, int4, int2, kivi4, kivi2, vecinfer1, "
        "vecinfer1.5, vecinfer2, vecinfer3 or vecinfer4, or int, kivi or vecinfer with such bits; "
        "got '",
        config.method, "'", has_bits ? detail::concat(" with bits ", config.bits) : ""));
  }
  const std::string format = method == "fp16" ? "raw" : method;
  auto codebooks = config.codebooks;
  if (codebooks == nullptr && config.random_codebooks && method.starts_with("vecinfer")) {
    codebooks = std::make_shared<const VecInferCodebooks>(
        VecInferCodebooks::random(method, 1, 1, config.head_dim, *config.random_codebooks));
  }
  return std::make_shared<StandaloneKVCache>(
      config.head_dim,
      PagedKVCacheConfig{.key_format = format,
                         .value_format = format,
                         .group_size = config.group_size,
                         .hadamard = !method.starts_with("kivi"),
                         .window = config.window,
                         .sink = config.sink,
                         .check_finite = config.check_finite,
                         .codebooks = std::move(codebooks)},
      config.block_size);
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

KVCacheBuilder& KVCacheBuilder::with_block_size(std::int64_t block_size) {
  config_.block_size = block_size;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_window(std::int64_t window) {
  config_.window = window;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_sink(std::int64_t sink) {
  config_.sink = sink;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_check_finite(bool check_finite) {
  config_.check_finite = check_finite;
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_codebooks(std::shared_ptr<const VecInferCodebooks> codebooks) {
  config_.codebooks = std::move(codebooks);
  return *this;
}

KVCacheBuilder& KVCacheBuilder::with_random_codebooks(std::uint64_t seed) {
  config_.random_codebooks = seed;
  return *this;
}

std::shared_ptr<KVCache> KVCacheBuilder::build() const { return KVCacheFactory::create(config_); }

}  // namespace kvpool
