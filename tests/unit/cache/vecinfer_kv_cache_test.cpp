#include "kvpool/vecinfer_kv_cache.h"

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/random.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "unit/cache/codebooks.h"

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

TEST(VecInferKVCache, TakesTheCodesOfItsLayer) {
  KVCacheConfig config = config_of("vecinfer3");
  config.codebooks = std::make_shared<const VecInferCodebooks>(
      "vecinfer3", testing::codebook_stream({{8, 8}, {2, 8}}, kHeads, kDim),
      testing::codebook_stream({{4, 8}, {2, 8}}, kHeads, kDim));
  const int bits[2][2] = {{1, 2}, {4, 4}};
  std::size_t held[2];
  for (const int layer : {0, 1}) {
    VecInferKVCache cache(config, kHeads, layer);
    cache.update_and_fetch(rows(200), rows(200));
    const auto [k, v] = cache.update_and_fetch(rows(1), rows(1));
    const VecInferBytes bytes = cache.bytes();
    EXPECT_EQ(bytes.compressed_key, 201 * kHeads * kDim * bits[layer][0] / 8);
    EXPECT_EQ(bytes.compressed_value, 201 * kHeads * kDim * bits[layer][1] / 8);
    EXPECT_EQ(bytes.assigned_avg_bits(), (bits[layer][0] + bits[layer][1]) / 2.0);
    held[layer] = cache.nbytes();
    const mx::array q = mx::random::normal({1, kHeads, 1, kDim});
    const mx::array weights =
        mx::softmax(mx::matmul(mx::multiply(q, mx::array(0.125F)), mx::swapaxes(k, -1, -2)), -1);
    mx::array difference =
        mx::max(mx::abs(mx::subtract(cache.fused_sdpa(q, 0.125F), mx::matmul(weights, v))));
    EXPECT_LT(difference.item<float>(), 1e-3F) << layer;
  }
  EXPECT_LT(held[0], held[1]);
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
