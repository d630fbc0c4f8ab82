// Level ops: each format x head dim x group size x kind of mask x length around block edges x one
// query and several, in ragged batches; attention/cross_product_test.cpp has the levels of kernels.
// Of 4096 tokens there are pairs: each format has one head dim, and with it all kinds of mask.
// A mask array needs rows of one length, so that each is alone then.

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/random.h>

#include <iterator>
#include <limits>
#include <numeric>
#include <span>

#include "unit/backend/testing.h"
#include "unit/kernels/testing.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

using testing::expect_right;
using testing::Formats;
using testing::kKvHeads;
using testing::Question;
using testing::random_rows;

constexpr int kHeads = 6;
constexpr int kBlockSize = 16;
constexpr int kNQueries[] = {1, 6};

struct Stored {
  Formats formats;
  mx::Dtype dtype;
  std::string label;
  int long_dim;  ///< Of the rows of 4096 tokens.
};

std::vector<Stored> all_stored() {
  std::vector<Stored> all;
  for (const codec::Format& format : testing::all_formats()) {
    const std::string tag(codec::name(format.code));
    const std::string stored = format.is_raw() ? "raw" : tag;
    all.push_back({{stored, stored, format.group_size, format.hadamard},
                   tag == "fp16"   ? mx::float16
                   : tag == "bf16" ? mx::bfloat16
                                   : mx::float32,
                   testing::label(format),
                   testing::kHeadDims[all.size() % std::size(testing::kHeadDims)]});
  }
  return all;
}

/// What hides or moves scores, other than mask arrays.
std::vector<Question> plain_questions() {
  std::vector<Question> questions(5);
  questions[1].mask.causal = true;
  questions[2].mask.causal = true;
  questions[2].window = 7;
  questions[3].sinks = mx::array({0.5F, -1.0F, 2.0F, 0.0F, -30.0F, 4.0F});
  questions[4].soft_cap = 1.5F;
  return questions;
}

/// A boolean and an additive array that hide every third key on average, to each query others.
std::vector<Question> array_questions(int n_queries, std::int64_t n_keys) {
  const mx::Shape shape{1, kHeads, n_queries, static_cast<mx::ShapeElem>(n_keys)};
  const mx::array seen = mx::less(mx::random::uniform(shape), mx::array(0.67F));
  const mx::array hidden = mx::array(-std::numeric_limits<float>::infinity());
  std::vector<Question> questions(2);
  questions[0].mask.array = seen;
  questions[1].mask.array = mx::where(seen, mx::random::normal(shape), hidden);
  return questions;
}

class OpsCrossProduct : public ::testing::TestWithParam<Stored> {
 protected:
  void SetUp() override { mx::random::seed(13); }

  /// (batch, kKvHeads, n, dim), each row's tokens one further on in the same numbers.
  mx::array tokens(std::size_t batch, int n, int dim) const {
    const auto n_rows = static_cast<int>(batch);
    const mx::array numbers = random_rows({1, kKvHeads, n + n_rows, dim}, GetParam().dtype);
    std::vector<mx::array> rows;
    for (int i = 0; i < n_rows; ++i) {
      rows.push_back(mx::slice(numbers, {0, 0, i, 0}, {1, kKvHeads, i + n, dim}));
    }
    return mx::concatenate(rows, 0);
  }

  PagedKVCache cache(int dim, std::size_t n_rows) const {
    std::vector<Owner> owners(n_rows);
    std::iota(owners.begin(), owners.end(), 1);
    return PagedKVCache(testing::storage_on("ops", kBlockSize),
                        GetParam().formats.config(0, 0, dim), owners);
  }

  /// Appends each row's last token anew, as the last of n_queries columns. All full blocks before
  /// it are sealed then.
  /// @return the positions of the first column.
  std::vector<std::int64_t> append_last(PagedKVCache& cache, std::span<const std::int64_t> lengths,
                                        int n_queries, int dim) const {
    cache.trim(1);
    std::vector<std::int64_t> first, count, positions;
    for (const std::int64_t length : lengths) {
      count.push_back(length > 0 ? 1 : 0);
      first.push_back(n_queries - count.back());
      positions.push_back(length - n_queries);
    }
    cache.append(tokens(lengths.size(), n_queries, dim), tokens(lengths.size(), n_queries, dim),
                 first, count);
    return positions;
  }

  void ask(PagedKVCache& cache, const std::vector<std::int64_t>& positions, int n_queries, int dim,
           std::vector<Question> questions) const {
    const mx::array queries =
        random_rows({static_cast<int>(positions.size()), kHeads, n_queries, dim});
    for (std::size_t i = 0; i < questions.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "question " << i);
      questions[i].scale = 1.0F / std::sqrt(static_cast<float>(dim));
      expect_right(cache, queries, positions, questions[i], GetParam().formats.tolerance());
      if (HasFatalFailure()) return;
    }
  }

  /// Asks everything of rows of these lengths, together or, with mask arrays, of each alone.
  void ask_all(int dim, const std::vector<std::int64_t>& lengths,
               std::span<const int> n_queries) const {
    PagedKVCache batch = cache(dim, lengths.size());
    const int longest = static_cast<int>(std::ranges::max(lengths));
    batch.append(tokens(lengths.size(), longest, dim), tokens(lengths.size(), longest, dim),
                 std::vector<std::int64_t>(lengths.size()), lengths);
    for (const int n : n_queries) {
      SCOPED_TRACE(::testing::Message() << "dim " << dim << ", " << n << " queries");
      ask(batch, append_last(batch, lengths, n, dim), n, dim, plain_questions());
      if (HasFatalFailure()) return;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] == 0) continue;
        SCOPED_TRACE(::testing::Message() << "arrays for " << lengths[i] << " tokens");
        PagedKVCache alone(batch.storage(), batch.config(), {});
        alone.fork_rows(batch, std::vector{static_cast<std::int64_t>(i)}, std::vector<Owner>{99});
        ask(alone, append_last(alone, std::span(lengths).subspan(i, 1), n, dim), n, dim,
            array_questions(n, lengths[i]));
        if (HasFatalFailure()) return;
      }
    }
  }
};

TEST_P(OpsCrossProduct, RaggedRowsOfEachHeadDim) {
  for (const int dim : testing::kHeadDims) {
    ask_all(dim, {0, 1, 15, 16, 17, 255}, kNQueries);
    if (HasFatalFailure()) return;
  }
}

TEST_P(OpsCrossProduct, LongRows) { ask_all(GetParam().long_dim, {4096, 40}, {kNQueries, 1}); }

INSTANTIATE_TEST_SUITE_P(Formats, OpsCrossProduct, ::testing::ValuesIn(all_stored()),
                         [](const auto& test) { return test.param.label; });

}  // namespace
}  // namespace kvpool
