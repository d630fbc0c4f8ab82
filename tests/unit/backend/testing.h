#pragma once

// PagedKVCache on a backend beside attention in double over the rows that fetch() decodes.

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/random.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kvpool/paged_kv_cache.h"
#include "unit/cache/codebooks.h"

namespace kvpool::testing {

namespace mx = mlx::core;

inline constexpr int kKvHeads = 2;
inline constexpr double kRaw = 1e-4;
inline constexpr double kPacked = 1e-3;

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

inline std::shared_ptr<PagedStorage> storage_on(const std::string& level, std::int64_t block_size) {
  const Forced forced(level);
  return std::make_shared<PagedStorage>(std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = block_size, .n_blocks = 64, .grow_on_exhaustion = true}));
}

inline std::string native_level() { return std::string(kernels::active().name); }

inline mx::array random_rows(const mx::Shape& shape, mx::Dtype dtype = mx::float32) {
  mx::array rows = mx::astype(mx::random::normal(shape), dtype);
  rows.eval();
  return rows;
}

inline std::vector<float> floats_of(const mx::array& a) {
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

struct Expected {
  std::vector<double> out;
  std::vector<double> sizes;  ///< The same sums of the values' absolute numbers.
};

/// Attention of queries (B, n_heads, S, dim), of which the first of row b is at first[b], over what
/// fetch() gives; row b has lengths[b] tokens, the last of them to the right.
inline Expected reference(const PagedKVCache& cache, const mx::array& queries,
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
  Expected expected;
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
        std::vector<double> size(sum.size());
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
            for (std::size_t d = 0; d < sum.size(); ++d) {
              sum[d] += weight * double{value[d]};
              size[d] += weight * std::fabs(double{value[d]});
            }
          }
          for (double& s : sum) s /= total;
          for (double& s : size) s /= total;
        }
        expected.out.insert(expected.out.end(), sum.begin(), sum.end());
        expected.sizes.insert(expected.sizes.end(), size.begin(), size.end());
      }
    }
  }
  return expected;
}

inline void expect_right(PagedKVCache& cache, const mx::array& queries,
                         const std::vector<std::int64_t>& first, const Question& question,
                         double tolerance) {
  const std::vector<float> got = floats_of(cache.attend(
      queries, question.scale, question.mask, question.sinks, question.window, question.soft_cap));
  const auto [expected, sizes] = reference(cache, queries, first, question);
  // The output is rounded once.
  const double relative = queries.dtype() == mx::float32   ? 0.0
                          : queries.dtype() == mx::float16 ? 0x1p-11
                                                           : 0x1p-8;
  // On a GPU MLX's own attention rounds the weights, too.
  const bool rounds_weights =
      cache.storage()->level() == kernels::kOps && mx::default_device() == mx::Device::gpu;
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double rounded = std::fabs(expected[i]) + (rounds_weights ? sizes[i] : 0.0);
    ASSERT_NEAR(got[i], expected[i], tolerance + relative * rounded) << i;
  }
}

/// Codebooks of one layer, drawn once.
inline std::shared_ptr<const VecInferCodebooks> codebooks_of(const std::string& format,
                                                             int head_dim) {
  static std::map<std::pair<std::string, int>, std::shared_ptr<const VecInferCodebooks>> known;
  auto& books = known[{format, head_dim}];
  if (books == nullptr) books = make_codebooks(format, 1, kKvHeads, head_dim);
  return books;
}

struct Formats {
  std::string keys, values;
  int group_size = 32;
  bool hadamard = true;

  bool packed() const { return keys != "raw" || values != "raw"; }
  /// One that needs codebooks; "" if there is none.
  std::string vecinfer() const {
    if (keys.starts_with("vecinfer")) return keys;
    return values.starts_with("vecinfer") ? values : "";
  }
  double tolerance() const { return packed() ? kPacked : kRaw; }
  PagedKVCacheConfig config(std::int64_t window, std::int64_t sink, int head_dim = 64) const {
    PagedKVCacheConfig config;
    config.key_format = keys;
    config.value_format = values;
    config.group_size = group_size;
    config.hadamard = hadamard;
    config.window = window;
    config.sink = sink;
    if (!vecinfer().empty()) config.codebooks = codebooks_of(vecinfer(), head_dim);
    return config;
  }
};

}  // namespace kvpool::testing
