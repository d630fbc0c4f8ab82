// The CUDA backend beside the CPU's kernels: the same calls on both, the same results.
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "kvpool/paged_kv_cache.h"
#include "unit/cache/codebooks.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

constexpr int kKvHeads = 2;

struct Case {
  std::string keys, values;
  mx::Dtype dtype;
  int head_dim, value_dim;
  int block_size;
  int group_size = 32;
  int n_heads = 8;
  bool hadamard = true;
  /// Formats whose codes the layer has, as one of a set whose layers differ; empty: the format's
  /// own.
  std::string key_code = {}, value_code = {};
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << c.keys << "/" << c.values << " " << c.dtype << " D" << c.head_dim << "/" << c.value_dim
      << " block " << c.block_size << " group " << c.group_size << " heads " << c.n_heads
      << (c.hadamard ? "" : " plain");
  if (!c.key_code.empty()) out << " codes of " << c.key_code << "/" << c.value_code;
  return out;
}

class OnDevice {
 public:
  explicit OnDevice(mx::Device device) : before_(mx::default_device()) {
    mx::set_default_device(device);
  }
  ~OnDevice() { mx::set_default_device(before_); }

 private:
  mx::Device before_;
};

/// Rotated keys, and values so, too, but for shapes that the decode kernel takes.
std::shared_ptr<const VecInferCodebooks> codebooks(const std::string& format, const Case& c) {
  using enum codec::Role;
  const auto stream = [&](codec::Role role, const std::string& of_layer) {
    const codec::VectorCode own = codec::vector_code(codec::code_of(format), role);
    if (of_layer.empty()) return testing::codebook_stream(own, 2, kKvHeads, c.head_dim);
    const codec::Code fewest = codec::code_of("vecinfer1");
    return testing::codebook_stream(
        {codec::vector_code(fewest, role), codec::vector_code(codec::code_of(of_layer), role)},
        kKvHeads, c.head_dim);
  };
  VecInferStream keys = stream(kKeys, c.key_code);
  VecInferStream values = stream(kValues, c.value_code);
  if (c.block_size % 32 == 0) values.rotation.reset();
  if (!c.hadamard) keys.rotation.reset();
  values.hadamard = c.hadamard;
  return std::make_shared<const VecInferCodebooks>(format, keys, values);
}

/// One cache on each device.
class Pair {
 public:
  explicit Pair(const Case& c, std::int64_t sliding = 0, int n_rows = 2) {
    PagedKVCacheConfig config;
    config.key_format = c.keys;
    config.value_format = c.values;
    config.group_size = c.group_size;
    config.hadamard = c.hadamard;
    config.window = 40;
    config.sink = 16;
    config.sliding_window = sliding;
    for (const std::string& format : {c.keys, c.values}) {
      if (!format.starts_with("vecinfer")) continue;
      const OnDevice device(mx::Device::cpu);
      mx::random::seed(1);
      config.codebooks = codebooks(format, c);
      config.layer = 1;
    }
    std::vector<Owner> owners;
    for (int i = 0; i < n_rows; ++i) owners.push_back(static_cast<Owner>(i + 1));
    for (int i = 0; i < 2; ++i) {
      const OnDevice device(kDevices[i]);
      PoolConfig pool;
      pool.block_size = c.block_size;
      pool.grow_on_exhaustion = true;
      storages_[i] = std::make_shared<PagedStorage>(std::make_shared<BlockPoolAllocator>(pool));
      caches_[i] = std::make_unique<PagedKVCache>(storages_[i], config, owners);
    }
    EXPECT_EQ(storages_[1]->level(), "cuda");
    EXPECT_NE(storages_[0]->level(), "cuda");
  }

  /// Does the same on both.
  template <typename Do>
  void both(Do act) {
    for (int i = 0; i < 2; ++i) {
      const OnDevice device(kDevices[i]);
      act(*caches_[i]);
    }
  }
  PagedKVCache& cpu() { return *caches_[0]; }
  PagedKVCache& gpu() { return *caches_[1]; }

  inline static const mx::Device kDevices[] = {mx::Device::cpu, mx::Device::gpu};

 private:
  std::shared_ptr<PagedStorage> storages_[2];
  std::unique_ptr<PagedKVCache> caches_[2];
};

struct See {
  std::int64_t window = 0;
  float soft_cap = 0.0F;
  std::optional<mx::array> sinks = {}, mask = {};
};

constexpr float kScale = 0.02F;

double epsilon(mx::Dtype dtype) {
  return dtype == mx::float32 ? 1e-5 : dtype == mx::float16 ? 1.0 / 1024 : 1.0 / 128;
}

mx::array random(const mx::Shape& shape, mx::Dtype dtype, int seed) {
  const OnDevice device(mx::Device::cpu);
  // Channels of different size, and a few large ones, as keys have.
  const mx::array scale =
      mx::exp(0.5F * mx::random::normal({shape.back()}, mx::float32, 0.0F, 1.0F,
                                        mx::random::key(static_cast<std::uint64_t>(seed))));
  mx::array rows =
      mx::astype(scale * mx::random::normal(shape, mx::float32, 0.0F, 1.0F,
                                            mx::random::key(static_cast<std::uint64_t>(seed) + 1)),
                 dtype);
  rows.eval();
  return rows;
}

class Cuda : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!mx::is_available(mx::Device::gpu)) GTEST_SKIP() << "no GPU here";
  }

  std::pair<mx::array, mx::array> rows(int n_rows, int n_tokens, int seed) const {
    const Case& c = GetParam();
    return {random({n_rows, kKvHeads, n_tokens, c.head_dim}, c.dtype, seed),
            random({n_rows, kKvHeads, n_tokens, c.value_dim}, c.dtype, seed + 50)};
  }
  mx::array queries(int n_rows, int n, int seed) const {
    const Case& c = GetParam();
    return random({n_rows, c.n_heads, n, c.head_dim}, c.dtype, seed);
  }
  void append(Pair& pair, int n_rows, int n_tokens, int seed, std::vector<std::int64_t> first = {},
              std::vector<std::int64_t> count = {}) const {
    const auto [k, v] = rows(n_rows, n_tokens, seed);
    pair.both([&, k = k, v = v](PagedKVCache& cache) { cache.append(k, v, first, count); });
  }

  static void near(const mx::array& cpu, const mx::array& gpu, double tolerance, const char* what) {
    mx::eval(cpu, gpu);
    const OnDevice device(mx::Device::cpu);
    ASSERT_EQ(cpu.shape(), gpu.shape());
    const mx::array a = mx::astype(cpu, mx::float32);
    const mx::array b = mx::astype(gpu, mx::float32);
    const float largest = mx::max(mx::abs(a)).item<float>();
    const float off = mx::max(mx::abs(a - b)).item<float>();
    EXPECT_TRUE(off <= tolerance * largest) << what << ": " << off << " of " << largest;
  }
  /// Rows as they decode: equal but for the rounding to the type, and biases near zero.
  void same_rows(Pair& pair) const {
    std::vector<mx::array> keys, values;
    pair.both([&](PagedKVCache& cache) {
      const auto [k, v] = cache.fetch();
      mx::eval(k, v);
      keys.push_back(k);
      values.push_back(v);
    });
    near(keys[0], keys[1], epsilon(GetParam().dtype), "keys");
    near(values[0], values[1], epsilon(GetParam().dtype), "values");
  }
  /// What attention over the rows as the CPU decodes them gives, in fp32.
  mx::array expected(PagedKVCache& cache, const mx::array& queries, const See& see,
                     const std::vector<std::int64_t>& positions) const {
    const OnDevice device(mx::Device::cpu);
    const auto [all_keys, all_values] = cache.fetch();
    const int group = queries.shape(1) / kKvHeads;
    const int n = queries.shape(2);
    std::vector<mx::array> results;
    for (int row = 0; row < queries.shape(0); ++row) {
      const auto length = static_cast<int>(cache.lengths()[static_cast<std::size_t>(row)]);
      const int longest = all_keys.shape(2);
      const auto tokens = [&](const mx::array& a) {
        const mx::array own = mx::slice(a, {row, 0, longest - std::min(length, longest), 0},
                                        {row + 1, kKvHeads, longest, a.shape(3)});
        return mx::repeat(mx::astype(own, mx::float32), group, 1);
      };
      const mx::array keys = tokens(all_keys);
      const mx::array q = mx::astype(
          mx::slice(queries, {row, 0, 0, 0}, {row + 1, queries.shape(1), n, queries.shape(3)}),
          mx::float32);
      mx::array scores = kScale * mx::matmul(q, mx::swapaxes(keys, 2, 3));
      if (see.soft_cap > 0) scores = see.soft_cap * mx::tanh(scores / see.soft_cap);
      const int first = length - keys.shape(2);
      const mx::array key_at = mx::reshape(mx::arange(first, length), {1, -1});
      const auto position = static_cast<int>(positions[static_cast<std::size_t>(row)]);
      const mx::array query_at = mx::reshape(mx::arange(position, position + n), {-1, 1});
      const mx::array never(-std::numeric_limits<float>::infinity());
      if (see.mask) {
        const mx::array mask = mx::slice(*see.mask, {row, 0, 0, 0}, {row + 1, 1, n, length});
        scores = mask.dtype() == mx::bool_ ? mx::where(mask, scores, never) : scores + mask;
      } else {
        scores = mx::where(mx::less_equal(key_at, query_at), scores, never);
      }
      if (see.window > 0) {
        scores =
            mx::where(mx::greater(key_at, query_at - static_cast<int>(see.window)), scores, never);
      }
      if (see.sinks) {
        const mx::array sinks =
            mx::broadcast_to(mx::reshape(*see.sinks, {1, -1, 1, 1}), {1, queries.shape(1), n, 1});
        scores = mx::concatenate({scores, sinks}, 3);
      }
      mx::array weights = mx::softmax(scores, -1, true);
      weights = mx::where(mx::isnan(weights), mx::array(0.0F), weights);  // Sees nothing.
      weights = mx::slice(weights, {0, 0, 0, 0}, {1, queries.shape(1), n, keys.shape(2)});
      results.push_back(mx::matmul(weights, tokens(all_values)));
    }
    mx::array result = mx::concatenate(results, 0);
    result.eval();
    return result;
  }
  /// Attention of the tokens appended last, which stand at `positions` on, or at each row's end.
  void right_attention(Pair& pair, int n_rows, int n, int seed, const See& see = {},
                       std::vector<std::int64_t> positions = {}) const {
    const mx::array q = queries(n_rows, n, seed);
    if (positions.empty()) {
      positions = pair.cpu().lengths();
      for (std::int64_t& position : positions) position -= n;
    }
    std::optional<mx::array> got;
    {
      const OnDevice device(mx::Device::gpu);
      got =
          pair.gpu().attend(q, kScale, {!see.mask, see.mask}, see.sinks, see.window, see.soft_cap);
      got->eval();
    }
    near(expected(pair.cpu(), q, see, positions), *got,
         2 * (GetParam().dtype == mx::float32 ? 1e-5 : epsilon(GetParam().dtype)),
         n == 1 ? "decode" : "prefill");
  }
};

TEST_P(Cuda, PromptsThenTokens) {
  Pair pair(GetParam());
  append(pair, 2, 150, 1);
  right_attention(pair, 2, 150, 7);
  append(pair, 2, 100, 2, {0, 60}, {100, 40});
  right_attention(pair, 2, 100, 8, {}, {150, 90});
  for (int step = 0; step < 70; ++step) {
    append(pair, 2, 1, 100 + step);
    if (step % 23 == 0 || step > 66) right_attention(pair, 2, 1, 300 + step);
  }
  same_rows(pair);
}

TEST_P(Cuda, ForksAndTrims) {
  Pair pair(GetParam(), 0, 1);
  append(pair, 1, 117, 1);
  pair.both([](PagedKVCache& cache) { EXPECT_EQ(cache.trim(9), 9); });
  append(pair, 1, 3, 2);
  right_attention(pair, 1, 3, 3);
  // Two forks write over what they share, unseen by each other.
  const auto [k, v] = rows(1, 5, 4);
  const auto [k2, v2] = rows(1, 80, 5);
  pair.both([&, k = k, v = v, k2 = k2, v2 = v2](PagedKVCache& cache) {
    PagedKVCache other(cache.storage(), cache.config(), {});
    other.fork_rows(cache, std::vector<std::int64_t>{0}, std::vector<Owner>{9});
    other.append(k2, v2);
    cache.append(k, v);
    mx::eval(other.fetch().first);
  });
  same_rows(pair);
  right_attention(pair, 1, 5, 6);
}

/// Attention writes the rows that were appended just before, unless a fetch needs them first.
TEST_P(Cuda, RowsAreThereWhoeverIsEvaluatedFirst) {
  for (const bool fetched_first : {true, false}) {
    for (const bool together : {true, false}) {
      Pair pair(GetParam());
      append(pair, 2, 37, 1);
      append(pair, 2, 1, 2);
      std::optional<mx::array> keys, values, attended;
      const mx::array q = queries(2, 1, 3);
      {
        const OnDevice device(mx::Device::gpu);
        std::tie(keys, values) = pair.gpu().fetch();
        attended = pair.gpu().attend(q, kScale, {true, {}});
        std::vector<mx::array> first{*attended}, second{*keys, *values};
        if (fetched_first) std::swap(first, second);
        if (together) first.insert(first.end(), second.begin(), second.end());
        mx::eval(first);
        mx::eval(second);
      }
      const OnDevice device(mx::Device::cpu);
      const auto [cpu_keys, cpu_values] = pair.cpu().fetch();
      near(cpu_keys, *keys, epsilon(GetParam().dtype), "keys");
      near(cpu_values, *values, epsilon(GetParam().dtype), "values");
      append(pair, 2, 1, 4);
      right_attention(pair, 2, 1, 5);
      same_rows(pair);
    }
  }
}

TEST_P(Cuda, AttentionWritesWhatWasAppendedOnAnotherStream) {
  Pair pair(GetParam());
  append(pair, 2, 37, 1);
  const mx::Stream other = mx::new_stream(mx::Device::gpu);
  for (int step = 0; step < 3; ++step) {
    const auto [k, v] = rows(2, 1, 10 + step);
    pair.cpu().append(k, v);
    {
      const OnDevice device(mx::Device::gpu);
      const mx::StreamContext context(other);
      pair.gpu().append(k, v);
    }
    right_attention(pair, 2, 1, 20 + step);
  }
  same_rows(pair);
}

TEST_P(Cuda, ATableIsSentThoughNoQueryIsAsked) {
  Pair pair(GetParam());
  append(pair, 2, 0, 1);
  append(pair, 2, 33, 2);
  pair.both([&](PagedKVCache& cache) {
    cache.attend(queries(2, 0, 3), kScale, {true, {}}).eval();
  });
  append(pair, 2, 1, 4);
  right_attention(pair, 2, 1, 5);
}

TEST_P(Cuda, AnImageOfOneDeviceIsOneOfTheOther) {
  Pair pair(GetParam(), 0, 1);
  append(pair, 1, 171, 1);
  append(pair, 1, 1, 2);
  for (const bool from_gpu : {true, false}) {
    PagedKVCache& from = from_gpu ? pair.gpu() : pair.cpu();
    PagedKVCache& to = from_gpu ? pair.cpu() : pair.gpu();
    std::optional<PagedRowImage> image;
    {
      const OnDevice device(from_gpu ? mx::Device::gpu : mx::Device::cpu);
      image = from.save_row(0);
      mx::eval(image->keys, image->values);
    }
    {
      const OnDevice device(from_gpu ? mx::Device::cpu : mx::Device::gpu);
      to.load_rows(std::vector{image}, std::vector<Owner>{from_gpu ? 7 : 8});
    }
    same_rows(pair);
    append(pair, 1, 1, 3);
    right_attention(pair, 1, 1, 3);
  }
}

TEST_P(Cuda, WindowsCapsSinksAndMasks) {
  const Case& c = GetParam();
  const mx::array sinks = random({c.n_heads}, mx::float32, 90);
  Pair pair(c);
  append(pair, 2, 130, 1);
  for (const int n : {1, 37}) {
    pair.both([n](PagedKVCache& cache) { cache.trim(n); });
    append(pair, 2, n, 8);
    right_attention(pair, 2, n, 3, {.window = 33});
    right_attention(pair, 2, n, 4, {.soft_cap = 2.0F, .sinks = sinks});
    const mx::array scores = random({2, 1, n, 130}, mx::float32, 91);
    right_attention(pair, 2, n, 5, {.mask = scores});
    mx::array seen = mx::greater(scores, mx::array(0.0F), mx::Device::cpu);
    seen.eval();
    right_attention(pair, 2, n, 6, {.mask = seen});
  }
  Pair sliding(c, 50);
  append(sliding, 2, 130, 1);
  for (int step = 0; step < 20; ++step) {
    append(sliding, 2, 1, 20 + step);
    right_attention(sliding, 2, 1, 60 + step, {.window = 50});
  }
}

/// Tables that get too large for their places, with blocks sealed and trimmed.
class CudaTables : public Cuda {};

TEST_P(CudaTables, MoveAndShrink) {
  const int block = GetParam().block_size;
  Pair pair(GetParam(), 0, 3);
  append(pair, 3, 15 * block, 1, {0, 0, block}, {15 * block, 15 * block - 3, 14 * block});
  for (int step = 0; step < 5 * block; ++step) {
    append(pair, 3, 1, 100 + step);
    if (step % (block - 1) == 0 || step % block < 2) right_attention(pair, 3, 1, 500 + step);
    if (step % (2 * block) == block) {
      pair.both([&](PagedKVCache& cache) { EXPECT_EQ(cache.trim(block / 2 + 3), block / 2 + 3); });
    }
  }
  append(pair, 3, 18 * block, 2);
  append(pair, 3, 1, 3);
  right_attention(pair, 3, 1, 4);
  same_rows(pair);
}

/// Steps of as many requests as a launch has room for, of fewer and of more.
TEST_P(CudaTables, StepsOfManyRequests) {
  const int longest = 3 * GetParam().block_size;
  for (const int n_rows : {11, 32, 35}) {
    Pair pair(GetParam(), 0, n_rows);
    std::vector<std::int64_t> first(static_cast<std::size_t>(n_rows), 0), count;
    for (int row = 0; row < n_rows; ++row) count.push_back(row * 7 % longest + 1);
    append(pair, n_rows, longest, 1, first, count);
    for (int step = 0; step < 3; ++step) {
      append(pair, n_rows, 1, 10 + step);
      right_attention(pair, n_rows, 1, 50 + step);
    }
    same_rows(pair);
  }
}

/// Where requests are alike, blocks of threads may take whole ones; before and after, they are not.
TEST_P(CudaTables, StepsOfEqualRequests) {
  constexpr int kRows = 128;  // Two heads of each are as many as an H200 has room for.
  const int longest = 3 * GetParam().block_size;
  Pair pair(GetParam(), 0, kRows);
  const auto step = [&](int seed, const std::vector<std::int64_t>& first,
                        const std::vector<std::int64_t>& count) {
    append(pair, kRows, longest, seed, first, count);
    append(pair, kRows, 1, seed + 1);
    right_attention(pair, kRows, 1, seed + 2);
  };
  std::vector<std::int64_t> first(kRows, 0), count, rest;
  for (int row = 0; row < kRows; ++row) {
    count.push_back(row * 7 % longest + 1);
    rest.push_back(longest - count.back());
  }
  step(1, first, count);
  step(10, first, rest);
  step(20, first, std::vector<std::int64_t>(kRows, longest));
  step(30, first, count);
  same_rows(pair);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string format : {"raw", "int8", "int4", "int2", "kivi4", "kivi2", "vecinfer4",
                                   "vecinfer3", "vecinfer2", "vecinfer1.5", "vecinfer1"}) {
    const int value_dim = format.starts_with("vecinfer") ? 96 : 40;  // Codebooks have one dim.
    all.push_back({format, format, mx::bfloat16, 128, 128, 32});
    all.push_back({format, format, mx::float16, 64, 64, 32, 64, 6});
    all.push_back({format, format, mx::bfloat16, 128, 128, 64, 64, 14, false});
    all.push_back({format, format, mx::float32, 128, 128, 16});
    all.push_back({format, format, mx::float16, 80, 80, 16});
    all.push_back({format, format, mx::bfloat16, 256, 256, 24, 64, 2});
    all.push_back({format, format, mx::float16, 96, value_dim, 32});
  }
  for (const std::string keys : {"vecinfer4", "vecinfer2", "vecinfer1"}) {
    for (const std::string values : {"vecinfer4", "vecinfer2", "vecinfer1"}) {
      const Case mix{.keys = "vecinfer3",
                     .values = "vecinfer3",
                     .dtype = mx::bfloat16,
                     .head_dim = 128,
                     .value_dim = 128,
                     .block_size = 32,
                     .key_code = keys,
                     .value_code = values};
      all.push_back(mix);
      all.push_back(mix);
      all.back().dtype = mx::float16;
      all.back().head_dim = all.back().value_dim = 64;
      all.back().block_size = 64;
      all.back().n_heads = 6;
    }
  }
  all.push_back({"int8", "int4", mx::bfloat16, 128, 128, 32});
  all.push_back({"kivi2", "raw", mx::float16, 64, 64, 32});
  all.push_back({"raw", "int4", mx::bfloat16, 128, 128, 16});
  all.push_back({"vecinfer2", "raw", mx::bfloat16, 128, 128, 32});
  all.push_back({"int8", "vecinfer2", mx::float16, 64, 64, 32});
  all.push_back({"vecinfer4", "int4", mx::float16, 128, 128, 32});
  all.push_back({"vecinfer1.5", "vecinfer1.5", mx::float16, 64, 64, 15});
  return all;
}
std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  std::ostringstream text;
  text << info.param;
  std::string name = text.str();
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Formats, Cuda, ::testing::ValuesIn(cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Formats, CudaTables,
                         ::testing::Values(Case{"raw", "raw", mx::float16, 64, 64, 16},
                                           Case{"int4", "int4", mx::bfloat16, 128, 128, 16},
                                           Case{"vecinfer2", "vecinfer2", mx::bfloat16, 64, 64, 32},
                                           Case{"kivi2", "raw", mx::float32, 64, 64, 16}),
                         name_of);

}  // namespace
}  // namespace kvpool
