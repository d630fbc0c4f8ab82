// Paged caches with vecinfer formats: sealed, attended, shortened, forked, saved.

#include <gtest/gtest.h>
#include <mlx/fast.h>
#include <mlx/ops.h>
#include <mlx/random.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <memory>

#include "kvpool/kv_cache_builder.h"
#include "kvpool/paged_kv_cache.h"
#include "unit/cache/codebooks.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

constexpr int kBlockSize = 8;
constexpr int kHeads = 2;
constexpr int kDim = 64;

struct Formats {
  const char* keys;
  const char* values;
};

class VecInferCache : public ::testing::TestWithParam<Formats> {
 protected:
  std::shared_ptr<PagedStorage> storage_ = std::make_shared<PagedStorage>(
      std::make_shared<BlockPoolAllocator>(PoolConfig{.block_size = kBlockSize, .n_blocks = 512}));

  static bool is_vecinfer(const std::string& tag) { return tag.starts_with("vecinfer"); }
  /// The same for a pair of formats in all of a test.
  PagedKVCacheConfig config() {
    if (codebooks_ == nullptr) {
      const std::string keys = GetParam().keys;
      codebooks_ =
          testing::make_codebooks(is_vecinfer(keys) ? keys : GetParam().values, 3, kHeads, kDim);
    }
    PagedKVCacheConfig config;
    config.key_format = GetParam().keys;
    config.value_format = GetParam().values;
    config.window = 12;
    config.sink = 3;
    config.codebooks = codebooks_;
    config.layer = 2;
    return config;
  }
  PagedKVCache cache(std::vector<Owner> owners = {1}) {
    return PagedKVCache(storage_, config(), owners);
  }
  static mx::array rows(int n_tokens, int batch = 1) {
    mx::array rows = mx::random::normal({batch, kHeads, n_tokens, kDim});
    rows.eval();
    return rows;
  }
  static double largest_difference(const mx::array& a, const mx::array& b) {
    return mx::max(mx::abs(a - b)).item<float>();
  }
  static bool equal(const mx::array& a, const mx::array& b) {
    return mx::array_equal(a, b).item<bool>();
  }
  static mx::array attend(PagedKVCache& cache, const mx::array& queries, std::int64_t window = 0) {
    AttentionMask mask;
    mask.causal = true;
    return cache.attend(queries, 0.125F, mask, std::nullopt, window);
  }
  /// What attention over the decoded cache gives.
  static mx::array reference(const PagedKVCache& cache, const mx::array& queries,
                             std::int64_t window = 0) {
    const auto [keys, values] = cache.fetch();
    const int n = keys.shape(2);
    const int n_queries = queries.shape(2);
    const mx::array key = mx::arange(0, n, mx::int32);
    const mx::array query = mx::reshape(mx::arange(n - n_queries, n, mx::int32), {n_queries, 1});
    mx::array seen = mx::less_equal(key, query);
    if (window > 0) {
      seen = mx::logical_and(seen, mx::greater(key, query - mx::array(static_cast<int>(window))));
    }
    return mx::fast::scaled_dot_product_attention(queries, keys, values, 0.125F, "", seen);
  }

  std::shared_ptr<const VecInferCodebooks> codebooks_;
};

TEST_P(VecInferCache, AttentionIsThatOverTheDecodedCache) {
  for (const int n_tokens : {1, 7, 8, 20, 21, 100, 512}) {
    PagedKVCache one = cache();
    one.append(rows(n_tokens), rows(n_tokens));
    for (const int n_queries : {1, 2, 7, 33, 512}) {
      one.append(rows(n_queries), rows(n_queries));
      const mx::array queries = mx::random::normal({1, 3 * kHeads, n_queries, kDim});
      for (const int window : {0, 64}) {
        EXPECT_LT(largest_difference(attend(one, queries, window), reference(one, queries, window)),
                  1e-3)
            << n_tokens << " tokens, " << n_queries << " queries, window " << window;
      }
    }
  }
}

TEST_P(VecInferCache, RowsOfABatchHaveLengthsOfTheirOwn) {
  PagedKVCache batch = cache({1, 2, 3});
  const std::vector<std::int64_t> first{0, 30, 47};
  const std::vector<std::int64_t> count{60, 30, 13};
  batch.append(rows(60, 3), rows(60, 3), first, count);
  batch.append(rows(2, 3), rows(2, 3));
  const mx::array queries = mx::random::normal({3, 4 * kHeads, 2, kDim});
  const mx::array together = attend(batch, queries);
  for (int row = 0; row < 3; ++row) {
    PagedKVCache alone = cache({});
    alone.fork_rows(batch, std::vector<std::int64_t>{row}, std::vector<Owner>{10 + row});
    const mx::array query = mx::slice(queries, {row, 0, 0, 0}, {row + 1, 4 * kHeads, 2, kDim});
    const mx::array got = mx::slice(together, {row, 0, 0, 0}, {row + 1, 4 * kHeads, 2, kDim});
    EXPECT_LT(largest_difference(got, reference(alone, query)), 1e-3) << row;
  }
}

TEST_P(VecInferCache, SealedBlocksTakeTheBytesOfTheirCodes) {
  PagedKVCache one = cache();
  one.append(rows(64), rows(64));
  one.append(rows(1), rows(1));
  const auto bits = [](const std::string& tag) {
    return tag == "vecinfer1"     ? 1.0
           : tag == "vecinfer1.5" ? 1.5
           : tag == "vecinfer2"   ? 2.0
           : tag == "vecinfer3"   ? 4.0
           : tag == "vecinfer4"   ? 4.0
                                  : 0.0;
  };
  const std::string keys = GetParam().keys;
  const std::string values = GetParam().values;
  if (!is_vecinfer(keys) || !is_vecinfer(values)) return;
  // Blocks 1 to 5 have left the window of 12; block 0 holds the sink.
  const double value_bits = values == "vecinfer3" ? 2.0 : bits(values);
  const double per_block = kBlockSize * kHeads * kDim / 8.0 * (bits(keys) + value_bits);
  const double raw = 4.0 * kBlockSize * kHeads * kDim * 2 * 4;
  EXPECT_EQ(static_cast<double>(one.nbytes()), 5 * per_block + raw);
}

TEST_P(VecInferCache, WhatRemainsAfterATrimIsWhatAFreshCacheHas) {
  const mx::array k = rows(50);
  const mx::array v = rows(50);
  const mx::array other_k = rows(30);
  const mx::array other_v = rows(30);
  PagedKVCache trimmed = cache();
  trimmed.append(k, v);
  trimmed.append(rows(10), rows(10));
  trimmed.trim(10);
  trimmed.append(other_k, other_v);
  PagedKVCache fresh = cache();
  fresh.append(k, v);
  fresh.append(rows(1), rows(1));
  fresh.trim(1);
  fresh.append(other_k, other_v);
  const auto [tk, tv] = trimmed.fetch();
  const auto [fk, fv] = fresh.fetch();
  EXPECT_TRUE(equal(tk, fk));
  EXPECT_TRUE(equal(tv, fv));
}

TEST_P(VecInferCache, AForkDivergesWithoutTouchingItsParent) {
  PagedKVCache parent = cache();
  parent.append(rows(45), rows(45));
  parent.append(rows(2), rows(2));
  const auto [before_k, before_v] = parent.fetch();
  mx::eval(before_k, before_v);
  PagedKVCache fork = cache({});
  fork.fork_rows(parent, std::vector<std::int64_t>{0}, std::vector<Owner>{2});
  fork.append(rows(40), rows(40));
  const mx::array queries = mx::random::normal({1, kHeads, 40, kDim});
  EXPECT_LT(largest_difference(attend(fork, queries), reference(fork, queries)), 1e-3);
  const auto [k, v] = parent.fetch();
  EXPECT_TRUE(equal(k, before_k));
  EXPECT_TRUE(equal(v, before_v));
}

TEST_P(VecInferCache, ImagesComeBackAndOnlyUnderTheSameCodebooks) {
  PagedKVCache one = cache();
  one.append(rows(45), rows(45));
  one.append(rows(2), rows(2));
  const PagedRowImage image = *one.save_row(0);
  EXPECT_EQ(image.codebooks, codebooks_->identity());
  PagedKVCache back = cache({5});
  back.load_rows(std::vector{std::optional(image)}, back.owners());
  EXPECT_TRUE(equal(back.fetch().first, one.fetch().first));
  EXPECT_TRUE(equal(back.fetch().second, one.fetch().second));

  PagedKVCacheConfig other = config();
  other.codebooks = testing::make_codebooks(codebooks_->format(), 3, kHeads, kDim);
  PagedKVCache foreign(storage_, other, std::vector<Owner>{6});
  EXPECT_THROW(foreign.load_rows(std::vector{std::optional(image)}, foreign.owners()),
               std::invalid_argument);
  PagedRowImage unsigned_image = image;
  unsigned_image.codebooks = 0;
  EXPECT_THROW(back.load_rows(std::vector{std::optional(unsigned_image)}, back.owners()),
               std::invalid_argument);
}

TEST_P(VecInferCache, RowsDoNotMoveToACacheWithOtherCodebooks) {
  PagedKVCache one = cache();
  one.append(rows(5), rows(5));
  PagedKVCacheConfig other = config();
  other.codebooks = testing::make_codebooks(codebooks_->format(), 3, kHeads, kDim);
  PagedKVCache foreign(storage_, other, std::vector<Owner>{});
  EXPECT_THROW(foreign.take_rows(one), std::invalid_argument);
}

TEST_P(VecInferCache, CodebooksThatDoNotFitAreRefused) {
  const auto refusal = [&](const PagedKVCacheConfig& config) -> std::string {
    try {
      PagedKVCache one(storage_, config, std::vector<Owner>{9});
      one.append(rows(1), rows(1));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(config()), "");
  PagedKVCacheConfig none = config();
  none.codebooks = nullptr;
  EXPECT_NE(refusal(none).find("kvpool calibrate"), std::string::npos);
  PagedKVCacheConfig layer = config();
  layer.layer = 3;
  EXPECT_NE(refusal(layer).find("layer must be 0 to 2"), std::string::npos);
  PagedKVCacheConfig format = config();
  format.codebooks = testing::make_codebooks(
      codebooks_->format() == "vecinfer2" ? "vecinfer1" : "vecinfer2", 3, kHeads, kDim);
  EXPECT_NE(refusal(format).find("needs codebooks of that format"), std::string::npos);
  PagedKVCacheConfig heads = config();
  heads.codebooks = testing::make_codebooks(codebooks_->format(), 3, kHeads + 1, kDim);
  EXPECT_NE(refusal(heads).find("the codebooks are for 3 KV heads"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(
    Formats, VecInferCache,
    ::testing::Values(Formats{"vecinfer1", "vecinfer1"}, Formats{"vecinfer1.5", "vecinfer1.5"},
                      Formats{"vecinfer2", "vecinfer2"}, Formats{"vecinfer3", "vecinfer3"},
                      Formats{"vecinfer4", "vecinfer4"}, Formats{"vecinfer2", "int4"},
                      Formats{"kivi4", "vecinfer1"}, Formats{"raw", "vecinfer4"}),
    [](const auto& test) {
      std::string name = std::string(test.param.keys) + "_" + test.param.values;
      std::replace(name.begin(), name.end(), '.', '_');
      return name;
    });

TEST(StandaloneVecInfer, NeedsCodebooksAndTakesRandomOnesByName) {
  for (const char* method : {"vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4"}) {
    KVCacheBuilder builder;
    builder.with_method(method).with_head_dim(32).with_block_size(8).with_window(8);
    EXPECT_THROW(builder.build(), std::invalid_argument);
    builder.with_random_codebooks(3);
    const auto cache = builder.build();
    for (int t = 0; t < 64; ++t) cache->append(mx::random::normal({32}), mx::random::normal({32}));
    const mx::array out = mx::astype(cache->attend(mx::random::normal({32})), mx::float32);
    EXPECT_LT(mx::max(mx::abs(out)).item<float>(), 4.0F);
    EXPECT_LT(cache->memory_bytes(), 64 * 32 * 2 * 2 * 2 / 3);

    const auto books = testing::make_codebooks(method, 1, 1, 32);
    EXPECT_EQ(KVCacheBuilder().with_method(method).with_codebooks(books).config().codebooks, books);
    EXPECT_NO_THROW(
        KVCacheBuilder().with_method(method).with_codebooks(books).with_head_dim(32).build());
  }
}

}  // namespace
}  // namespace kvpool
