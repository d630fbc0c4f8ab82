#pragma once

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/random.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kvpool/paged_kv_cache.h"

namespace kvpool::testing {

namespace mx = mlx::core;

inline constexpr int kBlockSize = 4;
inline constexpr int kHeads = 2;
inline constexpr int kDim = 16;

class PagedCache : public ::testing::Test {
 protected:
  std::shared_ptr<BlockPoolAllocator> pool_ =
      std::make_shared<BlockPoolAllocator>(PoolConfig{.block_size = kBlockSize, .n_blocks = 64});
  std::shared_ptr<PagedStorage> storage_ = std::make_shared<PagedStorage>(pool_);

  PagedKVCache cache(PagedKVCacheConfig config = {}, std::vector<Owner> owners = {1}) {
    return PagedKVCache(storage_, std::move(config), owners);
  }
  static mx::array rows(int n_tokens, int batch = 1, int dim = kDim) {
    mx::array rows = mx::random::normal({batch, kHeads, n_tokens, dim});
    rows.eval();
    return rows;
  }
  static PagedKVCacheConfig config(std::string keys, std::string values, std::int64_t window = 0,
                                   std::int64_t sink = 0, std::int64_t sliding = 0) {
    PagedKVCacheConfig config;
    config.key_format = std::move(keys);
    config.value_format = std::move(values);
    config.window = window;
    config.sink = sink;
    config.sliding_window = sliding;
    return config;
  }
  static mx::array attend(PagedKVCache& cache, const mx::array& queries) {
    AttentionMask mask;
    mask.causal = true;
    return cache.attend(queries, 0.25F, mask);
  }
  static bool equal(const mx::array& a, const mx::array& b) {
    return mx::array_equal(a, b).item<bool>();
  }
  static mx::array tokens(const mx::array& a, int from, int to, int row = 0) {
    return mx::slice(a, {row, 0, from, 0}, {row + 1, a.shape(1), to, a.shape(3)});
  }
  /// Which tokens of `got` are no longer bit for bit `exact`.
  static std::vector<int> changed(const mx::array& got, const mx::array& exact) {
    std::vector<int> positions;
    for (int t = 0; t < got.shape(2); ++t) {
      if (!equal(tokens(got, t, t + 1), tokens(exact, t, t + 1))) positions.push_back(t);
    }
    return positions;
  }
  static std::vector<int> range(int from, int to) {
    std::vector<int> numbers(static_cast<std::size_t>(to - from));
    std::iota(numbers.begin(), numbers.end(), from);
    return numbers;
  }
};

}  // namespace kvpool::testing
