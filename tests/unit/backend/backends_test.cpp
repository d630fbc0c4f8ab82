// PagedKVCache on each backend.

#include <gtest/gtest.h>
#include <mlx/memory.h>
#include <mlx/ops.h>
#include <mlx/random.h>
#include <mlx/transforms.h>

#include <limits>
#include <optional>

#include "unit/backend/testing.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

using testing::expect_right;
using testing::Formats;
using testing::kKvHeads;
using testing::kPacked;
using testing::kRaw;
using testing::native_level;
using testing::Question;
using testing::random_rows;
using testing::storage_on;

std::vector<Formats> all_formats() {
  std::vector<Formats> formats{{"raw", "raw"},   {"int8", "kivi2"},    {"raw", "int4"},
                               {"kivi4", "raw"}, {"vecinfer1", "raw"}, {"int4", "vecinfer2"}};
  for (const std::string code : {"int8", "int4", "int2", "kivi4", "kivi2"}) {
    for (const int group_size : {32, 64}) {
      formats.push_back({code, code, group_size, true});
      if (code.starts_with("int")) formats.push_back({code, code, group_size, false});
    }
  }
  for (const std::string code :
       {"vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4"}) {
    formats.push_back({code, code});
  }
  return formats;
}

class Backends : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { mx::random::seed(11); }

  std::string level() const { return GetParam() == "native" ? native_level() : GetParam(); }
  PagedKVCache cache(const PagedKVCacheConfig& config, std::vector<Owner> owners = {1},
                     std::int64_t block_size = 16) const {
    return PagedKVCache(storage_on(level(), block_size), config, owners);
  }
};

TEST_P(Backends, AStorageSaysWhatRuns) {
  EXPECT_EQ(storage_on(level(), 16)->level(), level());
  EXPECT_THROW(storage_on("quick", 16), std::invalid_argument);
}

/// cross_product_test.cpp has the other head dims.
TEST_P(Backends, KeysAndValuesOfDifferentFormatsAndDims) {
  for (const Formats& formats : all_formats()) {
    for (const int dim : {8, 64}) {
      SCOPED_TRACE(::testing::Message() << formats.keys << "/" << formats.values << " g"
                                        << formats.group_size << " dim " << dim);
      PagedKVCache one = cache(formats.config(8, 4, dim));
      const int value_dim = dim == 64 && formats.vecinfer().empty() ? 40 : dim;
      one.append(random_rows({1, kKvHeads, 83, dim}), random_rows({1, kKvHeads, 83, value_dim}));
      one.append(random_rows({1, kKvHeads, 3, dim}), random_rows({1, kKvHeads, 3, value_dim}));
      Question question;
      question.scale = 1.0F / std::sqrt(static_cast<float>(dim));
      question.mask.causal = true;
      expect_right(one, random_rows({1, 6, 3, dim}), {83}, question, formats.tolerance());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Backends, EachLengthAroundTheEdgesOfBlocks) {
  for (const Formats& formats : all_formats()) {
    for (const int block_size : {1, 16, 20, 32}) {
      PagedKVCache one = cache(formats.config(0, 0), {1}, block_size);
      std::int64_t length = 0;
      for (const int n : {1, 14, 1, 1, 2, 1, 11, 1, 2, 30, 1}) {
        SCOPED_TRACE(::testing::Message() << formats.keys << "/" << formats.values << " block "
                                          << block_size << " at " << length << " + " << n);
        one.append(random_rows({1, kKvHeads, n, 64}), random_rows({1, kKvHeads, n, 64}));
        Question question;
        question.mask.causal = true;
        expect_right(one, random_rows({1, 4, n, 64}), {length}, question, formats.tolerance());
        if (HasFatalFailure()) return;
        length += n;
      }
      EXPECT_EQ(one.trim(9), 9);
      one.append(random_rows({1, kKvHeads, 5, 64}), random_rows({1, kKvHeads, 5, 64}));
      Question question;
      question.mask.causal = true;
      expect_right(one, random_rows({1, 4, 5, 64}), {length - 9}, question, formats.tolerance());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Backends, EachMaskSoftCapAndSink) {
  constexpr int kTokens = 53;
  for (const int S : {1, 7}) {
    const mx::array below = mx::random::uniform({1, 1, S, kTokens});
    const mx::array hidden = mx::array(-std::numeric_limits<float>::infinity());
    // The first query of the last head sees nothing.
    const mx::array blind =
        mx::logical_and(mx::equal(mx::reshape(mx::arange(4), {1, 4, 1, 1}), mx::array(3)),
                        mx::equal(mx::reshape(mx::arange(S), {1, 1, S, 1}), mx::array(0)));
    const mx::array mixed =
        mx::where(blind, hidden, mx::where(mx::less(below, mx::array(0.3F)), hidden, below));
    std::vector<std::optional<mx::array>> masks{
        std::nullopt,
        mx::greater(below, mx::array(0.5F)),
        mx::reshape(
            mx::greater(mx::slice(below, {0, 0, 0, 0}, {1, 1, 1, kTokens}), mx::array(0.2F)),
            {kTokens}),
        mx::logical_and(mx::greater(below, mx::array(0.5F)), mx::logical_not(blind)),
        below,
        mixed,
        mx::astype(mixed, mx::float16),
        mx::zeros({1, 1, 1, 1}),
    };
    for (std::size_t m = 0; m < masks.size(); ++m) {
      for (const bool causal : {false, true}) {
        for (const std::int64_t window : {0, 1, 20, 52, 60}) {
          for (const float soft_cap : {0.0F, 2.0F}) {
            for (const bool sinks : {false, true}) {
              SCOPED_TRACE(::testing::Message()
                           << "S " << S << " mask " << m << " causal " << causal << " window "
                           << window << " cap " << soft_cap << " sinks " << sinks);
              PagedKVCache one = cache(Formats{"int8", "int8"}.config(16, 4));
              const int before = kTokens - S;
              one.append(random_rows({1, kKvHeads, before, 64}),
                         random_rows({1, kKvHeads, before, 64}));
              one.append(random_rows({1, kKvHeads, S, 64}), random_rows({1, kKvHeads, S, 64}));
              Question question;
              question.mask = {causal || window > 0, masks[m]};
              question.window = window;
              question.soft_cap = soft_cap;
              if (sinks) question.sinks = random_rows({4});
              expect_right(one, random_rows({1, 4, S, 64}), {before}, question, kPacked);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST_P(Backends, RaggedBatches) {
  using List = std::vector<std::int64_t>;
  for (const Formats& formats :
       {Formats{"raw", "raw"}, {"int4", "kivi2"}, {"vecinfer2", "vecinfer2"}}) {
    for (const std::int64_t window : {0, 6}) {
      PagedKVCache batch = cache(formats.config(8, 4), {1, 2, 3, 4});
      const auto append = [&](int S, const List& first, const List& count) {
        List position = batch.lengths();
        for (std::size_t i = 0; i < position.size(); ++i) position[i] -= first[i];
        batch.append(random_rows({4, kKvHeads, S, 64}), random_rows({4, kKvHeads, S, 64}), first,
                     count);
        Question question;
        question.mask.causal = true;
        question.window = window;
        if (S == 1) question.soft_cap = 5.0F;
        expect_right(batch, random_rows({4, 4, S, 64}), position, question, formats.tolerance());
      };
      append(40, {0, 39, 17, 40}, {40, 1, 23, 0});  // padded to the left, one row empty
      append(9, {0, 0, 0, 2}, {9, 0, 3, 4});        // to the right, and both
      for (int t = 0; t < 20; ++t) append(1, {0, 0, 0, 0}, {1, 1, 1, 1});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Backends, EachTypeOfTokensAndQueries) {
  for (const mx::Dtype stored : {mx::float32, mx::float16, mx::bfloat16}) {
    for (const mx::Dtype asked : {mx::float32, mx::float16, mx::bfloat16}) {
      for (const int n_heads : {2, 6}) {
        PagedKVCache one = cache({});
        one.append(random_rows({1, kKvHeads, 45, 64}, stored),
                   random_rows({1, kKvHeads, 45, 64}, stored));
        Question question;
        question.sinks = random_rows({n_heads}, asked);
        const mx::array queries = random_rows({1, n_heads, 2, 64}, asked);
        EXPECT_EQ(one.attend(queries, 1.0F, {}).dtype(), asked);
        expect_right(one, queries, {0}, question, kRaw);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Backends, AnImageOfOneLoadsInEach) {
  for (const Formats& formats : all_formats()) {
    const int key_dim = formats.vecinfer().empty() ? 24 : 40;
    const PagedKVCacheConfig config = formats.config(8, 4, key_dim);
    PagedKVCache one = cache(config, {1}, 20);
    const mx::array k = random_rows({1, kKvHeads, 107, key_dim}, mx::float16);
    const mx::array v = random_rows({1, kKvHeads, 107, 40}, mx::float16);
    one.append(k, v);
    one.append(mx::slice(k, {0, 0, 0, 0}, {1, kKvHeads, 3, key_dim}),
               mx::slice(v, {0, 0, 0, 0}, {1, kKvHeads, 3, 40}));
    one.trim(14);
    const std::optional<PagedRowImage> image = one.save_row(0);
    ASSERT_TRUE(image);
    for (const std::string& other : {std::string("ops"), native_level()}) {
      PagedKVCache two(storage_on(other, 20), config, std::vector<Owner>{1});
      two.load_rows({&image, 1}, two.owners());
      const auto wanted = one.fetch();
      const auto got = two.fetch();
      // Both round what they decode to fp16.
      EXPECT_TRUE(mx::allclose(got.first, wanted.first, 1e-3, 1e-3).item<bool>());
      EXPECT_TRUE(mx::allclose(got.second, wanted.second, 1e-3, 1e-3).item<bool>());
      const std::optional<PagedRowImage> back = two.save_row(0);
      EXPECT_EQ(back->blocks, image->blocks);
      EXPECT_TRUE(mx::array_equal(back->keys, image->keys).item<bool>());
      EXPECT_TRUE(mx::array_equal(back->values, image->values).item<bool>());
    }
  }
}

TEST_P(Backends, AStepCopiesNoBlocksThatItDoesNotWrite) {
  for (const Formats& formats : {Formats{"raw", "raw"}, {"int4", "int4"}}) {
    PagedKVCache one = cache(formats.config(128, 16), {1}, 32);
    const auto append = [&](int n) {
      one.append(random_rows({1, kKvHeads, n, 64}), random_rows({1, kKvHeads, n, 64}));
      one.pending().eval();
      mx::synchronize();
    };
    for (int i = 0; i < 16; ++i) append(1024);
    append(1);
    append(1);
    const std::size_t before = mx::get_active_memory();
    mx::reset_peak_memory();
    // Within one block: what is sealed or grown is copied, once in many steps.
    for (int t = 0; t < 20; ++t) append(1);
    EXPECT_LT(mx::get_peak_memory() - before, one.nbytes() / 8) << formats.keys;
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Backends, ::testing::Values("native", "ops"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace kvpool
