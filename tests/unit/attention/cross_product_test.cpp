// At each level of kernels: each format x head dim x group size x kind of mask x length around
// block edges x one query and several, in ragged batches; backend/cross_product_test.cpp has the
// level ops. Of 4096 tokens there are pairs: each format has one head dim, and with it all kinds of
// mask.

#include <iterator>
#include <limits>
#include <span>

#include "unit/attention/testing.h"

namespace kvpool::attention {
namespace {

using codec::Format;
using testing::expect_right;
using testing::Problem;

constexpr int kHeads = 6;
constexpr int kBlockSize = 16;
constexpr std::int64_t kMostKeys = 4096;
constexpr int kNQueries[] = {1, 6};  ///< More rows than kernels take without decoding.

/// Numbers that a mask makes of (batch, head, query, key).
class MaskNumbers {
 public:
  MaskNumbers() : seen_(new bool[kSize]), biases_(kSize) {
    std::mt19937 random(21);
    for (std::size_t i = 0; i < kSize; ++i) {
      seen_[i] = random() % 3 != 0;
      biases_[i] = seen_[i] ? static_cast<float>(random() % 1000) * 0.002F - 1.0F
                            : -std::numeric_limits<float>::infinity();
    }
  }

  Mask mask(Mask::Kind kind) const {
    const void* const data =
        kind == Mask::Kind::kBool ? static_cast<const void*>(seen_.get()) : biases_.data();
    return {kind, data, {kStrides[0], kStrides[1], kStrides[2], 1}, kMostKeys, 0};
  }
  testing::MaskFunction function(Mask::Kind kind) const {
    return [this, kind](std::size_t s, int h, int i, std::int64_t at) -> std::optional<float> {
      const auto index = static_cast<std::size_t>(static_cast<std::int64_t>(s) * kStrides[0] +
                                                  h * kStrides[1] + i * kStrides[2] + at);
      if (!seen_[index]) return std::nullopt;
      return kind == Mask::Kind::kBool ? 0.0F : biases_[index];
    };
  }

 private:
  // Rows overlap.
  static constexpr std::int64_t kStrides[] = {1009, 263, 31};
  static constexpr std::size_t kSize = kMostKeys + 6 * 1009 + kHeads * 263 + 6 * 31;
  std::unique_ptr<bool[]> seen_;
  std::vector<float> biases_;
};

/// Calls check() with each kind of mask set in `problem`.
void each_mask(Problem& problem, const auto& check) {
  static const MaskNumbers kNumbers;
  const auto with = [&](const char* kind, const auto& set, const auto& reset) {
    if (::testing::Test::HasFatalFailure()) return;
    SCOPED_TRACE(kind);
    set();
    check();
    reset();
  };
  const auto none = [] {};
  with("none", none, none);
  with(
      "causal", [&] { problem.causal = true; }, none);
  with(
      "window", [&] { problem.window = 7; }, [&] { problem.window = 0, problem.causal = false; });
  with(
      "sinks", [&] { problem.sinks = {0.5F, -1.0F, 2.0F, 0.0F, -30.0F, 4.0F}; },
      [&] { problem.sinks.clear(); });
  with(
      "soft cap", [&] { problem.soft_cap = 1.5F; }, [&] { problem.soft_cap = 0.0F; });
  for (const auto kind : {Mask::Kind::kBool, Mask::Kind::kAdditive}) {
    with(
        kind == Mask::Kind::kBool ? "bool array" : "additive array",
        [&] {
          problem.mask = kNumbers.mask(kind);
          problem.mask_function = kNumbers.function(kind);
        },
        [&] {
          problem.mask = {};
          problem.mask_function = nullptr;
        });
  }
}

class CrossProduct : public ::testing::TestWithParam<std::tuple<std::string, Format>> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(level()); }
  const std::string& level() const { return std::get<0>(GetParam()); }
  const Format& format() const { return std::get<1>(GetParam()); }

  void ask_all(int dim, std::span<const int> lengths, std::span<const int> n_queries) const {
    Problem problem{.sizes = {kHeads, 2, dim, dim}};
    problem.scale = 1.0F / std::sqrt(static_cast<float>(dim));
    for (const int length : lengths) {
      problem.add_sequence().append(length, kBlockSize, format(), format(),
                                    static_cast<unsigned>(length));
    }
    for (const int n : n_queries) {
      problem.n_queries = n;
      SCOPED_TRACE(::testing::Message() << "dim " << dim << ", " << n << " queries");
      each_mask(problem, [&] { expect_right(problem, level(), format().is_raw() ? 1e-4 : 1e-3); });
      if (HasFatalFailure()) return;
    }
  }
};

TEST_P(CrossProduct, RaggedRowsOfEachHeadDim) {
  for (const int dim : testing::kHeadDims) {
    ask_all(dim, std::array{0, 1, 15, 16, 17, 255}, kNQueries);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CrossProduct, LongRows) {
  const std::vector<Format> formats = testing::all_formats();
  const auto index = std::find(formats.begin(), formats.end(), format()) - formats.begin();
  const int dim =
      testing::kHeadDims[static_cast<std::size_t>(index) % std::size(testing::kHeadDims)];
  ask_all(dim, std::array{static_cast<int>(kMostKeys), 40}, {kNQueries, 1});
}

INSTANTIATE_TEST_SUITE_P(Levels, CrossProduct,
                         ::testing::Combine(::testing::ValuesIn(testing::level_names()),
                                            ::testing::ValuesIn(testing::all_formats())),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  testing::label(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace kvpool::attention
