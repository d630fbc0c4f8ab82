#include "kvpool/standalone_kv_cache.h"

#include <mlx/mlx.h>

#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

#include "../storage/testing.h"
#include "codec/codec.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::same;

constexpr int kDim = 64;
constexpr int kBlockSize = 8;

PagedKVCacheConfig config_of(const char* keys, const char* values, std::int64_t window = 0,
                             std::int64_t sink = 0) {
  return {.key_format = keys, .value_format = values, .window = window, .sink = sink};
}

/// fp16 vectors (n, dim), evaluated.
mx::array vectors(int n, int dim = kDim) {
  mx::array rows = mx::astype(mx::random::normal({n, dim}), mx::float16);
  rows.eval();
  return rows;
}
mx::array vector_at(const mx::array& rows, int i) { return mx::take(rows, i, 0); }

void append(StandaloneKVCache& cache, const mx::array& keys, const mx::array& values) {
  for (int i = 0; i < keys.shape(0); ++i) cache.append(vector_at(keys, i), vector_at(values, i));
}

codec::PartGeometry part(const StandaloneKVCache& cache, codec::Role role, int block_size) {
  const bool keys = role == codec::Role::kKeys;
  const std::string& tag = keys ? cache.config().key_format : cache.config().value_format;
  codec::Format format{tag == "raw" ? codec::Code::kFp16 : codec::code_of(tag)};
  const bool by_channel = keys && tag.starts_with("kivi");
  format.hadamard = cache.config().hadamard && tag != "raw" && !by_channel;
  return {format, role, block_size, static_cast<int>(cache.head_dim())};
}

/// Which of `n` tokens are sealed: whole blocks between sink and window of those before the last.
bool is_sealed(const StandaloneKVCache& cache, int token, int n, int block_size) {
  const int first = token / block_size * block_size;
  return first >= cache.config().sink && first + block_size <= n - 1 - cache.config().window;
}

/// The vectors as the codec gives them back, fp32 (n, dim).
mx::array stored(const StandaloneKVCache& cache, codec::Role role, const mx::array& rows,
                 int block_size) {
  const int n = rows.shape(0);
  mx::array fp32 = mx::contiguous(mx::astype(rows, mx::float32));
  fp32.eval();
  std::vector<float> out(fp32.data<float>(), fp32.data<float>() + fp32.size());
  const codec::PartGeometry geometry = part(cache, role, block_size);
  std::vector<std::byte> bytes(codec::part_bytes(geometry));
  for (int first = 0; first + block_size <= n; first += block_size) {
    if (!is_sealed(cache, first, n, block_size)) continue;
    float* block = out.data() + static_cast<std::ptrdiff_t>(first) * rows.shape(1);
    codec::encode(geometry, block, block_size, bytes.data());
    codec::decode(geometry, bytes.data(), 0, block_size, block);
  }
  return mx::array(out.begin(), rows.shape(), mx::float32);
}

mx::array dense_attention(const mx::array& keys, const mx::array& values, const mx::array& q) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(keys.shape(1)));
  const mx::array query = mx::astype(q, mx::float32);
  const mx::array scores = mx::matmul(keys, query) * mx::array(scale);
  return mx::matmul(mx::softmax(scores), values);
}

using Formats = std::tuple<const char*, const char*>;

class StandaloneFormat : public ::testing::TestWithParam<Formats> {
 protected:
  PagedKVCacheConfig config(std::int64_t window = 0, std::int64_t sink = 0) const {
    return config_of(std::get<0>(GetParam()), std::get<1>(GetParam()), window, sink);
  }
  static void expect_attends_as_stored(StandaloneKVCache& cache, const mx::array& keys,
                                       const mx::array& values, int block_size = kBlockSize) {
    const mx::array q = vector_at(vectors(1, keys.shape(1)), 0);
    const mx::array got = cache.attend(q);
    EXPECT_EQ(got.dtype(), mx::float16);
    EXPECT_EQ(got.shape(), q.shape());
    const mx::array wanted =
        dense_attention(stored(cache, codec::Role::kKeys, keys, block_size),
                        stored(cache, codec::Role::kValues, values, block_size), q);
    EXPECT_TRUE(mx::allclose(mx::astype(got, mx::float32), wanted, 4e-3, 4e-3).item<bool>())
        << got << '\n'
        << wanted;
  }
};

TEST_P(StandaloneFormat, AttendsOverWhatItsCodecStores) {
  for (const int n : {1, 7, 8, 9, 16, 17, 100}) {
    StandaloneKVCache cache(kDim, config(), kBlockSize);
    const mx::array keys = vectors(n);
    const mx::array values = vectors(n);
    append(cache, keys, values);
    EXPECT_EQ(cache.size(), n);
    expect_attends_as_stored(cache, keys, values);
  }
}

TEST_P(StandaloneFormat, TakesEveryHeadDimAndBlockSize) {
  for (const auto& [dim, block_size] :
       {std::pair{8, 16}, {40, 8}, {80, 32}, {96, 3}, {128, 32}, {192, 16}, {256, 64}}) {
    StandaloneKVCache cache(dim, config(), block_size);
    const mx::array keys = vectors(70, dim);
    const mx::array values = vectors(70, dim);
    append(cache, keys, values);
    expect_attends_as_stored(cache, keys, values, block_size);
  }
}

TEST_P(StandaloneFormat, KeepsWindowAndSinkRaw) {
  StandaloneKVCache cache(kDim, config(20, 5), kBlockSize);
  const mx::array keys = vectors(90);
  const mx::array values = vectors(90);
  append(cache, keys, values);
  expect_attends_as_stored(cache, keys, values);
}

TEST_P(StandaloneFormat, TakesTheBytesOfItsPackedBlocks) {
  for (const int n : {1, 8, 9, 64, 65, 100}) {
    StandaloneKVCache cache(kDim, config(), kBlockSize);
    append(cache, vectors(n), vectors(n));
    std::size_t wanted = 0;
    for (int first = 0; first < n; first += kBlockSize) {
      for (const codec::Role role : {codec::Role::kKeys, codec::Role::kValues}) {
        wanted += is_sealed(cache, first, n, kBlockSize)
                      ? codec::part_bytes(part(cache, role, kBlockSize))
                      : std::size_t{kBlockSize} * kDim * 2;
      }
    }
    EXPECT_EQ(cache.memory_bytes(), static_cast<std::int64_t>(wanted)) << n;
  }
}

TEST_P(StandaloneFormat, AfterResetIsAsNew) {
  StandaloneKVCache cache(kDim, config(), kBlockSize);
  append(cache, vectors(30), vectors(30));
  cache.append_key(vector_at(vectors(1), 0));
  cache.reset();
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.memory_bytes(), 0);
  EXPECT_FALSE(cache.drop_last_key());
  error_of<std::invalid_argument>([&] { cache.attend(vector_at(vectors(1), 0)); });
  const mx::array keys = vectors(20);
  const mx::array values = vectors(20);
  append(cache, keys, values);
  expect_attends_as_stored(cache, keys, values);
}

TEST_P(StandaloneFormat, CheckedItRefusesWhatItCannotStoreAndGoesOn) {
  PagedKVCacheConfig checking = config();
  checking.check_finite = true;
  StandaloneKVCache cache(kDim, checking, kBlockSize);
  const mx::array keys = vectors(9);
  const mx::array values = vectors(9);
  append(cache, keys, values);
  const std::int64_t bytes = cache.memory_bytes();
  const mx::array bad = mx::full({kDim}, std::numeric_limits<float>::quiet_NaN(), mx::float16);
  const mx::array good = vector_at(keys, 0);
  if (checking.key_format != "raw") {
    EXPECT_NE(
        error_of<std::invalid_argument>([&] { cache.append(bad, good); }).find("keys of row 0"),
        std::string::npos);
  }
  if (checking.value_format != "raw") {
    EXPECT_NE(
        error_of<std::invalid_argument>([&] { cache.append(good, bad); }).find("values of row 0"),
        std::string::npos);
  }
  EXPECT_EQ(cache.size(), 9);
  EXPECT_EQ(cache.memory_bytes(), bytes);
  expect_attends_as_stored(cache, keys, values);
}

INSTANTIATE_TEST_SUITE_P(
    All, StandaloneFormat,
    ::testing::Values(Formats{"raw", "raw"}, Formats{"int8", "int8"}, Formats{"int4", "int4"},
                      Formats{"int2", "int2"}, Formats{"kivi4", "kivi4"}, Formats{"kivi2", "kivi2"},
                      Formats{"int8", "kivi2"}, Formats{"raw", "int4"}, Formats{"kivi4", "raw"}),
    [](const auto& formats) {
      return std::string(std::get<0>(formats.param)) + '_' + std::get<1>(formats.param);
    });

TEST(Standalone, PairsKeysAndValuesInTheOrderTheyCome) {
  StandaloneKVCache cache(kDim, config_of("raw", "raw"), kBlockSize);
  StandaloneKVCache in_pairs(kDim, config_of("raw", "raw"), kBlockSize);
  const mx::array keys = vectors(3);
  const mx::array values = vectors(3);
  const mx::array q = vector_at(vectors(1), 0);
  for (int i = 0; i < 3; ++i) cache.append_key(vector_at(keys, i));
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.memory_bytes(), 3 * kDim * 2);
  for (int i = 0; i < 2; ++i) cache.append_value(vector_at(values, i));
  EXPECT_EQ(cache.size(), 2);
  append(in_pairs, mx::slice(keys, {0, 0}, {2, kDim}), mx::slice(values, {0, 0}, {2, kDim}));
  EXPECT_TRUE(same(cache.attend(q), in_pairs.attend(q))) << "a key without a value takes part";
  EXPECT_EQ(cache.memory_bytes(), in_pairs.memory_bytes() + kDim * 2);
  EXPECT_TRUE(cache.drop_last_key());
  EXPECT_FALSE(cache.drop_last_key());
  EXPECT_EQ(cache.memory_bytes(), in_pairs.memory_bytes());
}

TEST(Standalone, AnAppendWhoseValueFailsTakesItsKeyBack) {
  StandaloneKVCache cache(kDim, config_of("int4", "int4"), kBlockSize);
  const mx::array k = vector_at(vectors(1), 0);
  error_of<std::invalid_argument>([&] { cache.append(k, mx::zeros({kDim + 8})); });
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.memory_bytes(), 0);
  EXPECT_FALSE(cache.drop_last_key());
}

TEST(Standalone, TakesVectorsOfOtherTypesAsFp16) {
  StandaloneKVCache cache(kDim, config_of("raw", "raw"), kBlockSize);
  StandaloneKVCache halves(kDim, config_of("raw", "raw"), kBlockSize);
  const mx::array k = mx::random::normal({kDim});
  const mx::array q = mx::random::normal({kDim});
  cache.append(k, mx::astype(k, mx::bfloat16));
  halves.append(mx::astype(k, mx::float16), mx::astype(mx::astype(k, mx::bfloat16), mx::float16));
  EXPECT_TRUE(same(cache.attend(q), halves.attend(q)));
}

TEST(Standalone, SaysWhatDoesNotFit) {
  StandaloneKVCache cache(kDim, config_of("int4", "int4"), kBlockSize);
  const mx::array good = vector_at(vectors(1), 0);
  EXPECT_EQ(error_of<std::invalid_argument>([&] { cache.append_value(good); }),
            "StandaloneKVCache: v comes before its key");
  EXPECT_EQ(error_of<std::invalid_argument>([&] { cache.attend(good); }),
            "StandaloneKVCache: there is no token to attend to");
  for (const mx::Shape& shape : {mx::Shape{}, {kDim - 1}, {1, kDim}, {0}}) {
    const mx::array bad = mx::zeros(shape);
    for (const auto& [name, call] :
         {std::pair<std::string, std::function<void()>>{"k", [&] { cache.append_key(bad); }},
          {"v", [&] { cache.append_value(bad); }},
          {"q", [&] { cache.attend(bad); }}}) {
      EXPECT_EQ(error_of<std::invalid_argument>(call).find("StandaloneKVCache: " + name +
                                                           " must be (64,), got "),
                0U);
    }
  }
  EXPECT_EQ(cache.memory_bytes(), 0);
}

TEST(Standalone, RefusesWhatCannotBeMade) {
  for (const int dim : {-8, 0, 7, 60, 264}) {
    EXPECT_EQ(
        error_of<std::invalid_argument>([dim] { StandaloneKVCache(dim, config_of("raw", "raw")); }),
        "StandaloneKVCache: head_dim must be a multiple of 8 up to 256, got " +
            std::to_string(dim));
  }
  for (const int block_size : {-1, 0}) {
    error_of<std::invalid_argument>(
        [&] { StandaloneKVCache(kDim, config_of("raw", "raw"), block_size); });
  }
  error_of<std::invalid_argument>([] { StandaloneKVCache(kDim, config_of("fp16", "raw")); });
  error_of<std::invalid_argument>([] { StandaloneKVCache(kDim, config_of("raw", "int3")); });
  error_of<std::invalid_argument>([] { StandaloneKVCache(kDim, config_of("raw", "raw", -1)); });
  error_of<std::invalid_argument>([] { StandaloneKVCache(kDim, config_of("raw", "raw", 0, -1)); });
}

}  // namespace
}  // namespace kvpool
