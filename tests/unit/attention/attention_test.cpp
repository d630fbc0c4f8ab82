// Attention at each level against a dense reference in double over the decoded rows.

#include <limits>

#include "unit/attention/testing.h"

namespace kvpool::attention {
namespace {

using codec::Format;
using testing::expect_right;
using testing::Problem;
using testing::Sizes;
using enum codec::Code;

/// What attention over raw rows may be off by: fp32 rounding of values of some units.
constexpr double kRaw = 1e-4;
constexpr double kPacked = 1e-3;

double tolerance_of(const Format& format) { return format.is_raw() ? kRaw : kPacked; }

class ByFormat : public ::testing::TestWithParam<std::tuple<std::string, Format>> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(level()); }
  const std::string& level() const { return std::get<0>(GetParam()); }
  const Format& format() const { return std::get<1>(GetParam()); }
};

TEST_P(ByFormat, EachHeadDim) {
  for (const int dim : testing::kHeadDims) {
    Problem problem{.sizes = {6, 2, dim, dim}};
    problem.scale = 1.0F / std::sqrt(static_cast<float>(dim));
    problem.add_sequence().append(83, 32, format(), format(), 1);
    SCOPED_TRACE(dim);
    expect_right(problem, level(), tolerance_of(format()));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ByFormat, EachLengthAndBlockSize) {
  for (const int block_size : {1, 16, 32, 256}) {
    for (const int length : {0, 1, 15, 16, 17, 255, 300}) {
      Problem problem{.sizes = {3, 1, 64, 64}};
      problem.add_sequence().append(length, block_size, format(), format(), 2);
      SCOPED_TRACE(::testing::Message() << "block " << block_size << " length " << length);
      expect_right(problem, level(), tolerance_of(format()));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ByFormat, LongContextIsSplitOverThreads) {
  for (const int n_threads : {1, 2}) {
    Problem problem{.sizes = {4, 2, 64, 64}};
    problem.n_threads = n_threads;
    problem.add_sequence().append(4096, 32, format(), format(), 3);
    expect_right(problem, level(), tolerance_of(format()));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ByFormat, PrefillIsCausalAndExact) {
  for (const int n_queries : {2, 5, 17, 70}) {
    Problem problem{.sizes = {6, 2, 64, 64}};
    problem.n_queries = n_queries;
    problem.causal = true;
    problem.add_sequence().append(160, 32, format(), format(), 4);
    SCOPED_TRACE(n_queries);
    expect_right(problem, level(), tolerance_of(format()));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ByFormat, RecentTokensStayRawInOnePass) {
  for (const int n_queries : {1, 40}) {
    Problem problem{.sizes = {8, 2, 64, 64}};
    problem.n_queries = n_queries;
    problem.causal = true;
    auto& sequence = problem.add_sequence();
    sequence.append(16, 16, {kBf16}, {kBf16}, 5);
    sequence.append(320, 32, format(), {kInt4, 64}, 6);
    sequence.append(64, 32, {kInt2, 32, true}, format(), 7);
    sequence.append(40, 40, {kVecInfer2}, {kVecInfer1_5}, 9);
    sequence.append(100, 16, {kBf16}, {kFp32}, 8);
    expect_right(problem, level(), kPacked);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, ByFormat,
                         ::testing::Combine(::testing::ValuesIn(testing::level_names()),
                                            ::testing::ValuesIn(testing::all_formats())),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  testing::label(std::get<1>(test.param));
                         });

TEST_P(ByFormat, WindowsSoftCapsAndManyQueries) {
  for (const int n_queries : {1, 16, 17, 512}) {
    Problem problem{.sizes = {4, 2, 64, 64}};
    problem.n_queries = n_queries;
    problem.causal = true;
    problem.window = 64;
    problem.soft_cap = n_queries % 2 == 0 ? 2.0F : 0.0F;
    problem.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
    problem.add_sequence().append(600, 32, format(), format(), 16);
    problem.add_sequence().append(31, 32, format(), format(), 17);
    SCOPED_TRACE(n_queries);
    expect_right(problem, level(), tolerance_of(format()));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ByFormat, AQueryThatIsNotFiniteSpoilsItsHeadAlone) {
  Problem problem{.sizes = {6, 2, 64, 64}};
  problem.add_sequence().append(300, 32, format(), format(), 18);
  std::vector<float> queries = testing::random_queries(problem);
  const std::vector<float> wanted = testing::attend(problem, level(), queries);
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> spoilt = queries;
    spoilt[64 + 5] = value;
    const std::vector<float> got = testing::attend(problem, level(), spoilt);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (i / 64 == 1) {
        ASSERT_TRUE(std::isnan(got[i])) << value << " channel " << i % 64;
      } else {
        ASSERT_EQ(got[i], wanted[i]) << value << " head " << i / 64 << " channel " << i % 64;
      }
    }
  }
}

class ByLevel : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(GetParam()); }
};

TEST_P(ByLevel, EachGroupOfHeads) {
  for (const Sizes sizes : {Sizes{3, 3, 64, 64},
                            {9, 3, 64, 64},
                            {4, 1, 64, 64},
                            {16, 2, 128, 128},
                            {20, 1, 64, 64},
                            {2, 1, 128, 64},
                            {2, 1, 40, 80}}) {
    for (const Format& format : {Format{kBf16}, Format{kInt8}, Format{kInt2}, Format{kKivi4},
                                 Format{kVecInfer1_5}, Format{kVecInfer3}}) {
      Problem problem{.sizes = sizes};
      problem.add_sequence().append(75, 16, format, format, 9);
      SCOPED_TRACE(::testing::Message()
                   << sizes.n_heads << "/" << sizes.n_kv_heads << " " << testing::label(format));
      expect_right(problem, GetParam(), kPacked);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ByLevel, BatchesAreRaggedAndEmptySequencesGiveZeros) {
  for (const int n_queries : {1, 3, 33}) {
    Problem problem{.sizes = {6, 3, 64, 64}};
    problem.n_queries = n_queries;
    problem.causal = true;
    for (const int length : {0, 1, 1500, 40, 16}) {
      problem.add_sequence().append(length, 16, {kInt4}, {kFp16},
                                    static_cast<unsigned>(10 * length));
    }
    expect_right(problem, GetParam(), kPacked);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ByLevel, EachDtypeOfQueries) {
  for (const DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
    for (const int n_queries : {1, 20}) {
      Problem problem{.sizes = {6, 3, 64, 64}};
      problem.n_queries = n_queries;
      problem.dtype = dtype;
      problem.add_sequence().append(50, 16, {kBf16}, {kBf16}, 11);
      expect_right(problem, GetParam(), kRaw);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ByLevel, EachCountOfQueries) {
  for (int n_queries = 0; n_queries <= 70; ++n_queries) {
    Problem problem{.sizes = {3, 1, 40, 40}};
    problem.n_queries = n_queries;
    problem.causal = true;
    problem.add_sequence().append(77, 16, {kFp16}, {kInt8}, 12);
    SCOPED_TRACE(n_queries);
    expect_right(problem, GetParam(), kPacked);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ByLevel, LargeScoresDoNotOverflow) {
  Problem problem{.sizes = {3, 1, 64, 64}};
  problem.scale = 30.0F;
  problem.add_sequence().append(600, 16, {kFp32}, {kFp32}, 13);
  expect_right(problem, GetParam(), 3e-3);
}

TEST_P(ByLevel, ASealedBlockMayCountInPart) {
  for (const Format& format : testing::all_formats()) {
    for (const int n_queries : {1, 30}) {
      Problem problem{.sizes = {3, 1, 64, 64}};
      problem.n_queries = n_queries;
      auto& sequence = problem.add_sequence();
      sequence.append(21, 32, format, format, 14);
      sequence.append(7, 32, format, format, 15);
      expect_right(problem, GetParam(), kPacked);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, ByLevel, ::testing::ValuesIn(testing::level_names()));

}  // namespace
}  // namespace kvpool::attention
