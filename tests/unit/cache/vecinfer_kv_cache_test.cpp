#include "kvpool/vecinfer_kv_cache.h"

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/random.h>

#include <cmath>
#include <stdexcept>
#include <string>

namespace mx = mlx::core;

namespace kvpool {
namespace {

constexpr int kHeads = 2;
constexpr int kDim = 64;

KVCacheConfig config_of(const std::string& method) {
  KVCacheConfig config;
  config.method = method;
  config.head_dim = kDim;
  config.window = 16;
  config.random_codebooks = 7;
  return config;
}

mx::array rows(int n) { return mx::random::normal({1, kHeads, n, kDim}); }

TEST(VecInferKVCache, AttendsWhatItDecodesTo) {
  for (const char* method : {"vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4"}) {
    VecInferKVCache cache(config_of(method), kHeads);
    EXPECT_TRUE(cache.empty());
    cache.update_and_fetch(rows(150), rows(150));
    const auto [k, v] = cache.update_and_fetch(rows(1), rows(1));
    EXPECT_EQ(cache.size(), 151);
    const mx::array q = mx::random::normal({1, kHeads, 1, kDim});
    const float scale = 1.0F / std::sqrt(static_cast<float>(kDim));
    const mx::array weights =
        mx::softmax(mx::matmul(mx::multiply(q, mx::array(scale)), mx::swapaxes(k, -1, -2)), -1);
    mx::array difference =
        mx::max(mx::abs(mx::subtract(cache.fused_sdpa(q, scale), mx::matmul(weights, v))));
    EXPECT_LT(difference.item<float>(), 1e-3F) << method;
  }
}

TEST(VecInferKVCache, CountsItsCodes) {
  VecInferKVCache cache(config_of("vecinfer3"), kHeads);
  EXPECT_EQ(cache.bytes().assigned_avg_bits(), 0.0);
  cache.update_and_fetch(rows(100), rows(100));
  const VecInferBytes bytes = cache.bytes();
  EXPECT_EQ(bytes.fp16_key, 100 * kHeads * kDim * 2);
  EXPECT_EQ(bytes.compressed_key, 100 * kHeads * kDim * 4 / 8);
  EXPECT_EQ(bytes.compressed_value, 100 * kHeads * kDim * 2 / 8);
  EXPECT_EQ(bytes.assigned_avg_bits(), 3.0);
  EXPECT_EQ(cache.trim(60), 60);
  EXPECT_EQ(cache.bytes().compressed_key, 40 * kHeads * kDim * 4 / 8);
  EXPECT_GT(cache.nbytes(), 0U);
}

TEST(VecInferKVCache, WantsCodebooks) {
  KVCacheConfig config = config_of("vecinfer2");
  config.random_codebooks.reset();
  try {
    VecInferKVCache cache(config, kHeads);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("kvpool calibrate"), std::string::npos);
  }
  EXPECT_THROW(VecInferKVCache(config_of("kivi2"), kHeads), std::invalid_argument);
  EXPECT_THROW(VecInferKVCache(config_of("vecinfer2"), kHeads, 0, 0), std::invalid_argument);
}

}  // namespace
}  // namespace kvpool
