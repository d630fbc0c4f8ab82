// PagedKVCache on each backend against attention in double over the rows that fetch() decodes.

#include <gtest/gtest.h>
#include <mlx/memory.h>
#include <mlx/ops.h>
#include <mlx/random.h>
#include <mlx/transforms.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>

#include "backend/backend.h"
#include "kernels/kernels.h"
#include "kvpool/paged_kv_cache.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

constexpr int kKvHeads = 2;
constexpr double kRaw = 1e-4;
constexpr double kPacked = 1e-3;

/// Storages made meanwhile run on this backend.
class Forced {
 public:
  explicit Forced(const std::string& level) {
    if (const char* before = std::getenv(kVariable)) before_ = before;
    setenv(kVariable, level.c_str(), 1);
  }
  ~Forced() {
    if (before_) {
      setenv(kVariable, before_->c_str(), 1);
    } else {
      unsetenv(kVariable);
    }
  }

 private:
  static constexpr const char* kVariable = "KVPOOL_KERNELS";
  std::optional<std::string> before_;
};

std::shared_ptr<PagedStorage> storage_on(const std::string& level, std::int64_t block_size) {
  const Forced forced(level);
  return std::make_shared<PagedStorage>(std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = block_size, .n_blocks = 64, .grow_on_exhaustion = true}));
}

std::string native_level() { return std::string(kernels::active().name); }

mx::array random_rows(const mx::Shape& shape, mx::Dtype dtype = mx::float32) {
  mx::array rows = mx::astype(mx::random::normal(shape), dtype);
  rows.eval();
  return rows;
}

std::vector<float> floats_of(const mx::array& a) {
  mx::array plain = mx::contiguous(mx::astype(a, mx::float32));
  plain.eval();
  return {plain.data<float>(), plain.data<float>() + plain.size()};
}

/// What attend() is asked, beside the queries.
struct Question {
  float scale = 0.125F;
  AttentionMask mask{};
  std::optional<mx::array> sinks{};
  std::int64_t window = 0;
  float soft_cap = 0.0F;
};

/// Attention of queries (B, n_heads, S, dim), of which the first of row b is at first[b], over what
/// fetch() gives; row b has lengths[b] tokens, the last of them to the right.
std::vector<double> reference(const PagedKVCache& cache, const mx::array& queries,
                              const std::vector<std::int64_t>& first, const Question& question) {
  const auto [keys, values] = cache.fetch();
  const std::vector<std::int64_t> lengths = cache.lengths();
  const std::vector<float> q = floats_of(queries);
  const std::vector<float> k = floats_of(keys);
  const std::vector<float> v = floats_of(values);
  const int n_heads = queries.shape(1);
  const int n_queries = queries.shape(2);
  const int dim = queries.shape(3);
  const int value_dim = values.shape(3);
  const int width = keys.shape(2);
  std::optional<std::vector<float>> bias;
  const bool is_bool = question.mask.array && question.mask.array->dtype() == mx::bool_;
  if (question.mask.array) {
    bias = floats_of(mx::broadcast_to(*question.mask.array, {queries.shape(0), n_heads, n_queries,
                                                             static_cast<int>(lengths.front())}));
  }
  const std::vector<float> sinks =
      question.sinks ? floats_of(*question.sinks) : std::vector<float>{};
  std::vector<double> out;
  for (int b = 0; b < queries.shape(0); ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    for (int h = 0; h < n_heads; ++h) {
      const int kv_head = h / (n_heads / kKvHeads);
      for (int i = 0; i < n_queries; ++i) {
        const std::int64_t position = first[static_cast<std::size_t>(b)] + i;
        const auto row = static_cast<std::size_t>((b * n_heads + h) * n_queries + i);
        std::vector<double> scores;
        std::vector<std::size_t> seen;
        for (int t = 0; t < width; ++t) {
          const std::int64_t at = length - width + t;
          if (at < 0 || (question.mask.causal && at > position)) continue;
          if (question.window > 0 && at <= position - question.window) continue;
          const auto token = static_cast<std::size_t>((b * kKvHeads + kv_head) * width + t);
          double score = 0.0;
          for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) {
            score += double{q[row * static_cast<std::size_t>(dim) + d]} *
                     k[token * static_cast<std::size_t>(dim) + d];
          }
          score *= question.scale;
          if (question.soft_cap > 0.0F) {
            score = question.soft_cap * std::tanh(score / question.soft_cap);
          }
          if (bias) {
            const float here =
                (*bias)[row * static_cast<std::size_t>(length) + static_cast<std::size_t>(at)];
            if (is_bool ? here == 0.0F : std::isinf(here)) continue;
            if (!is_bool) score += here;
          }
          scores.push_back(score);
          seen.push_back(token);
        }
        std::vector<double> sum(static_cast<std::size_t>(value_dim));
        if (!scores.empty()) {
          double largest = *std::max_element(scores.begin(), scores.end());
          double total = 0.0;
          if (!sinks.empty()) {
            const double sink = sinks[static_cast<std::size_t>(h)];
            largest = std::max(largest, sink);
            total = std::exp(sink - largest);
          }
          for (std::size_t n = 0; n < scores.size(); ++n) {
            const double weight = std::exp(scores[n] - largest);
            total += weight;
            const float* value = v.data() + seen[n] * sum.size();
            for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += weight * double{value[d]};
          }
          for (double& s : sum) s /= total;
        }
        out.insert(out.end(), sum.begin(), sum.end());
      }
    }
  }
  return out;
}

void expect_right(PagedKVCache& cache, const mx::array& queries,
                  const std::vector<std::int64_t>& first, const Question& question,
                  double tolerance) {
  const std::vector<float> got = floats_of(cache.attend(
      queries, question.scale, question.mask, question.sinks, question.window, question.soft_cap));
  const std::vector<double> expected = reference(cache, queries, first, question);
  // The output is rounded once.
  const double relative = queries.dtype() == mx::float32   ? 0.0
                          : queries.dtype() == mx::float16 ? 0x1p-11
                                                           : 0x1p-8;
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], tolerance + relative * std::fabs(expected[i])) << i;
  }
}

struct Formats {
  std::string keys, values;
  int group_size = 32;
  bool hadamard = true;

  bool packed() const { return keys != "raw" || values != "raw"; }
  double tolerance() const { return packed() ? kPacked : kRaw; }
  PagedKVCacheConfig config(std::int64_t window, std::int64_t sink) const {
    PagedKVCacheConfig config;
    config.key_format = keys;
    config.value_format = values;
    config.group_size = group_size;
    config.hadamard = hadamard;
    config.window = window;
    config.sink = sink;
    return config;
  }
};

std::vector<Formats> all_formats() {
  std::vector<Formats> formats{
      {"raw", "raw"}, {"int8", "kivi2"}, {"raw", "int4"}, {"kivi4", "raw"}};
  for (const std::string code : {"int8", "int4", "int2", "kivi4", "kivi2"}) {
    for (const int group_size : {32, 64}) {
      formats.push_back({code, code, group_size, true});
      if (code.starts_with("int")) formats.push_back({code, code, group_size, false});
    }
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

TEST_P(Backends, EachFormatAndHeadDim) {
  for (const Formats& formats : all_formats()) {
    for (const int dim : {8, 40, 64, 80, 96, 112, 128, 192, 256}) {
      SCOPED_TRACE(::testing::Message() << formats.keys << "/" << formats.values << " g"
                                        << formats.group_size << " dim " << dim);
      PagedKVCache one = cache(formats.config(8, 4));
      const int value_dim = dim == 64 ? 40 : dim;
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
  for (const Formats& formats : {Formats{"raw", "raw"}, {"int4", "kivi2"}}) {
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
    PagedKVCache one = cache(formats.config(8, 4), {1}, 20);
    const mx::array k = random_rows({1, kKvHeads, 107, 24}, mx::float16);
    const mx::array v = random_rows({1, kKvHeads, 107, 40}, mx::float16);
    one.append(k, v);
    one.append(mx::slice(k, {0, 0, 0, 0}, {1, kKvHeads, 3, 24}),
               mx::slice(v, {0, 0, 0, 0}, {1, kKvHeads, 3, 40}));
    one.trim(14);
    const std::optional<PagedRowImage> image = one.save_row(0);
    ASSERT_TRUE(image);
    for (const std::string& other : {std::string("ops"), native_level()}) {
      PagedKVCache two(storage_on(other, 20), formats.config(8, 4), std::vector<Owner>{1});
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
