// Everything that hides, moves or bounds scores, at each level.

#include <limits>

#include "unit/attention/testing.h"

namespace kvpool::attention {
namespace {

using testing::expect_right;
using testing::Problem;
using enum codec::Code;

constexpr float kHidden = -std::numeric_limits<float>::infinity();

class Masks : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(level()); }
  const std::string& level() const { return std::get<0>(GetParam()); }
  int n_queries() const { return std::get<1>(GetParam()); }

  /// Sequences of 203 and 90 tokens in raw and packed blocks, with a gap between these.
  Problem problem() const {
    Problem result{.sizes = {4, 2, 64, 64}};
    result.n_queries = n_queries();
    for (const int n_raw : {123, 10}) {
      auto& sequence = result.add_sequence();
      sequence.append(80, 16, {kInt4, 32, true}, {kInt8}, 1);
      sequence.skip(40);
      sequence.append(n_raw, 16, {kFp32}, {kFp32}, 2);
    }
    return result;
  }
};

TEST_P(Masks, Causal) {
  Problem p = problem();
  p.causal = true;
  expect_right(p, level(), 1e-3);
}

TEST_P(Masks, Windows) {
  for (const std::int64_t window : {1, 15, 100, 155, 1000}) {
    for (const bool causal : {true, false}) {
      Problem p = problem();
      p.causal = causal;
      p.window = window;
      SCOPED_TRACE(window);
      expect_right(p, level(), 1e-3);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Masks, AWindowPastTheLastKeySeesNothing) {
  Problem p{.sizes = {2, 1, 64, 64}};
  p.n_queries = n_queries();
  auto& sequence = p.add_sequence();
  sequence.append(50, 16, {kFp32}, {kFp32}, 3);
  sequence.skip(500);
  p.causal = true;
  p.window = 100;
  expect_right(p, level(), 0.0);
}

/// Each way in which a mask array may broadcast.
struct Broadcast {
  bool batch, head, query;
};
constexpr Broadcast kBroadcasts[] = {
    {true, true, true}, {false, true, true}, {true, false, false}, {false, false, false}};

Mask strided(Mask::Kind kind, const void* data, const Broadcast& broadcast, int n_heads,
             int n_queries, std::int64_t n_keys) {
  std::int64_t stride = n_keys;
  Mask mask{kind, data, {}, n_keys, 0};
  mask.strides[3] = 1;
  if (!broadcast.query) {
    mask.strides[2] = stride;
    stride *= n_queries;
  }
  if (!broadcast.head) {
    mask.strides[1] = stride;
    stride *= n_heads;
  }
  if (!broadcast.batch) mask.strides[0] = stride;
  return mask;
}

TEST_P(Masks, BooleanArrays) {
  constexpr std::int64_t kKeys = 250;
  const auto n = static_cast<std::size_t>(2 * 4 * n_queries() * kKeys);
  const auto values = std::make_unique<bool[]>(n);
  std::mt19937 random(4);
  for (std::size_t i = 0; i < n; ++i) values[i] = random() % 3 != 0;
  for (const Broadcast& broadcast : kBroadcasts) {
    Problem p = problem();
    p.mask = strided(Mask::Kind::kBool, values.get(), broadcast, 4, n_queries(), kKeys);
    p.mask_function = [&](std::size_t s, int h, int i, std::int64_t at) -> std::optional<float> {
      const auto& strides = p.mask.strides;
      const bool seen = values[static_cast<std::size_t>(static_cast<std::int64_t>(s) * strides[0] +
                                                        h * strides[1] + i * strides[2] + at)];
      return seen ? std::optional(0.0F) : std::nullopt;
    };
    expect_right(p, level(), 1e-3);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Masks, AdditiveArraysOnTopOfCausality) {
  constexpr std::int64_t kKeys = 250;
  std::vector<float> values(static_cast<std::size_t>(2 * 4 * n_queries() * kKeys));
  std::mt19937 random(5);
  for (float& value : values) {
    value = random() % 4 == 0 ? kHidden : static_cast<float>(random() % 1000) * 0.002F - 1.0F;
  }
  for (const Broadcast& broadcast : kBroadcasts) {
    Problem p = problem();
    p.causal = true;
    p.mask = strided(Mask::Kind::kAdditive, values.data(), broadcast, 4, n_queries(), kKeys);
    p.mask_function = [&](std::size_t s, int h, int i, std::int64_t at) {
      const auto& strides = p.mask.strides;
      return std::optional(values[static_cast<std::size_t>(
          static_cast<std::int64_t>(s) * strides[0] + h * strides[1] + i * strides[2] + at)]);
    };
    expect_right(p, level(), 1e-3);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Masks, AnArrayOfKeysOnlyAndOneThatStartsLater) {
  std::vector<float> values(220);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.01F * static_cast<float>(i % 50);
  Problem p{.sizes = {4, 2, 64, 64}};
  p.n_queries = n_queries();
  auto& sequence = p.add_sequence();
  sequence.skip(1000);
  sequence.append(110, 16, {kFp32}, {kFp32}, 6);
  p.mask = {Mask::Kind::kAdditive, values.data(), {0, 0, 0, 2}, 110, 1000};
  p.mask_function = [&](std::size_t, int, int, std::int64_t at) {
    return std::optional(values[static_cast<std::size_t>(2 * (at - 1000))]);
  };
  expect_right(p, level(), 1e-4);
}

TEST_P(Masks, ARowThatHidesAllGivesZeros) {
  const auto hidden = std::make_unique<bool[]>(300);
  Problem p = problem();
  p.mask = {Mask::Kind::kBool, hidden.get(), {0, 0, 0, 1}, 300, 0};
  p.mask_function = [](std::size_t, int, int, std::int64_t) { return std::optional<float>(); };
  p.sinks = {1.0F, 2.0F, 3.0F, 4.0F};
  expect_right(p, level(), 0.0);
}

TEST_P(Masks, SinksTakeTheirShare) {
  Problem p = problem();
  p.causal = true;
  p.sinks = {-1.0F, 30.0F, 0.5F, -200.0F};
  expect_right(p, level(), 1e-3);
}

TEST_P(Masks, SoftCapComesBeforeTheMask) {
  constexpr std::int64_t kKeys = 250;
  std::vector<float> values(kKeys);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i % 3 == 0 ? -3.0F : 2.0F;
  Problem p = problem();
  p.causal = true;
  p.scale = 1.0F;
  p.soft_cap = 4.0F;
  p.mask = {Mask::Kind::kAdditive, values.data(), {0, 0, 0, 1}, kKeys, 0};
  p.mask_function = [&](std::size_t, int, int, std::int64_t at) {
    return std::optional(values[static_cast<std::size_t>(at)]);
  };
  expect_right(p, level(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Levels, Masks,
                         ::testing::Combine(::testing::ValuesIn(testing::level_names()),
                                            ::testing::Values(1, 3, 24)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  std::to_string(std::get<1>(test.param)) + "_queries";
                         });

}  // namespace
}  // namespace kvpool::attention
