// NaN, infinity and what is beyond fp16 in keys and values.

#include <limits>
#include <stdexcept>

#include "kvpool/errors.h"
#include "paged_fixture.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::kBlockSize;
using testing::kDim;
using testing::kHeads;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kBeyondFp16 = 1e6F;

class NotFinite : public testing::PagedCache {
 protected:
  /// `rows` with one element replaced.
  static mx::array with(const mx::array& rows, float value, int token, int head = 0, int row = 0) {
    return mx::slice_update(rows, mx::full({1, 1, 1, 1}, value, rows.dtype()),
                            mx::Shape{row, head, token, 3},
                            mx::Shape{row + 1, head + 1, token + 1, 4});
  }
  static mx::array head(const mx::array& a, int h) {
    return mx::slice(a, {0, h, 0, 0}, {a.shape(0), h + 1, a.shape(2), a.shape(3)});
  }
  static std::string error_of(PagedKVCache& cache, const mx::array& k, const mx::array& v) {
    try {
      cache.append(k, v);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no error";
  }
  static PagedKVCacheConfig checking(std::string keys, std::string values) {
    PagedKVCacheConfig checked = config(std::move(keys), std::move(values));
    checked.check_finite = true;
    return checked;
  }
};

class NotFiniteIn : public NotFinite,
                    public ::testing::WithParamInterface<std::tuple<const char*, float>> {};

TEST_P(NotFiniteIn, SpoilsNoOtherBlockHeadOrRequest) {
  const auto [format, value] = GetParam();
  const mx::array k = rows(16);
  const mx::array v = rows(16);
  const mx::array q = rows(1);
  PagedKVCache spoilt = cache(config(format, format), {1});
  PagedKVCache other = cache(config(format, format), {2});
  PagedKVCache twin = cache(config(format, format), {3});
  spoilt.append(with(k, value, 5), with(v, value, 5));
  for (PagedKVCache* fine : {&other, &twin}) fine->append(k, v);
  const mx::array last = rows(1);
  for (PagedKVCache* cache : {&spoilt, &other, &twin}) cache->append(last, last);

  EXPECT_TRUE(equal(attend(other, q), attend(twin, q)));
  EXPECT_TRUE(equal(head(attend(spoilt, q), 1), head(attend(twin, q), 1)));
  const auto got = spoilt.fetch();
  const auto wanted = twin.fetch();
  for (const auto& [mine, theirs] :
       {std::pair{got.first, wanted.first}, {got.second, wanted.second}}) {
    EXPECT_TRUE(equal(head(mine, 1), head(theirs, 1)));
    EXPECT_TRUE(equal(tokens(mine, 0, 4), tokens(theirs, 0, 4)));
    EXPECT_TRUE(equal(tokens(mine, 8, 17), tokens(theirs, 8, 17)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, NotFiniteIn,
    ::testing::Combine(::testing::Values("raw", "int8", "int4", "int2", "kivi4", "kivi2"),
                       ::testing::Values(kNan, kInfinity, -kInfinity, kBeyondFp16)));

TEST_F(NotFinite, RawFormatsStoreItAsItIs) {
  PagedKVCache one = cache(checking("raw", "raw"));
  const mx::array k = with(with(rows(9), kNan, 2), -kInfinity, 7, 1);
  one.append(k, k);
  one.append(rows(1), rows(1));
  EXPECT_TRUE(mx::array_equal(tokens(one.fetch().first, 0, 9), k, true).item<bool>());
}

TEST_F(NotFinite, CheckedItIsRefusedAndNothingHasChanged) {
  for (const char* format : {"int8", "int4", "int2", "kivi4", "kivi2"}) {
    PagedKVCache batch = cache(checking(format, format), {1, 2});
    const mx::array k = rows(6, 2);
    batch.append(k, k);
    const std::int64_t in_use = pool_->stats().blocks_in_use();
    const std::size_t bytes = storage_->resident_bytes();
    const mx::array more = rows(5, 2);
    for (const float value : {kNan, kInfinity, -kInfinity, kBeyondFp16}) {
      EXPECT_EQ(
          error_of(batch, with(more, value, 4, 1, 1), more),
          std::string("PagedKVCache: keys of row 1, column 4, head 1 must be finite and within "
                      "fp16: ") +
              format + " cannot store them");
      EXPECT_EQ(error_of(batch, more, with(more, value, 0)),
                std::string("PagedKVCache: values of row 0, column 0, head 0 must be finite and "
                            "within fp16: ") +
                    format + " cannot store them");
    }
    EXPECT_EQ(batch.lengths(), (std::vector<std::int64_t>{6, 6}));
    EXPECT_EQ(pool_->stats().blocks_in_use(), in_use);
    EXPECT_EQ(storage_->resident_bytes(), bytes);
    batch.append(more, more);
    EXPECT_EQ(batch.size(), 11);
  }
}

TEST_F(NotFinite, CheckedAFirstAppendThatIsRefusedLeavesNoFormat) {
  PagedKVCache one = cache(checking("int4", "int4"));
  EXPECT_THROW(one.append(with(rows(4), kNan, 0), rows(4)), std::invalid_argument);
  const mx::array k = mx::astype(rows(4, 1, 32), mx::float16);
  one.append(k, k);
  EXPECT_TRUE(equal(one.fetch().first, k));
}

TEST_F(NotFinite, CheckedIsOnlyWhatIsPackedAndTaken) {
  const mx::array bad = with(rows(8, 2), kNan, 6, 0, 1);
  PagedKVCache one = cache(checking("raw", "int4"), {1, 2});
  one.append(bad, rows(8, 2));
  EXPECT_NE(error_of(one, rows(8, 2), bad), "no error");
  using List = std::vector<std::int64_t>;
  one.append(bad, bad, List{0, 0}, List{8, 6});
  one.append(bad, bad, List{0, 7}, List{8, 1});
  EXPECT_THROW(one.append(bad, bad, List{0, 6}, List{8, 1}), std::invalid_argument);
  EXPECT_EQ(one.lengths(), (List{24, 15}));
}

TEST_F(NotFinite, CheckedIsWhatIsStored) {
  // 16 equal channels become 4 times as much in one.
  const mx::array large = mx::full({1, kHeads, 4, kDim}, 20'000.0F);
  PagedKVCache turned = cache(checking("int4", "int4"));
  EXPECT_NE(error_of(turned, large, large), "no error");
  PagedKVCacheConfig plain = checking("int4", "int4");
  plain.hadamard = false;
  EXPECT_EQ(error_of(*std::make_unique<PagedKVCache>(storage_, plain, std::vector<Owner>{1}), large,
                     large),
            "no error");
  // The cache is of fp16, where it is infinite.
  PagedKVCache half = cache(checking("int8", "int8"));
  half.append(mx::astype(rows(4), mx::float16), mx::astype(rows(4), mx::float16));
  EXPECT_NE(error_of(half, mx::full({1, kHeads, 4, kDim}, 66'000.0F), rows(4)), "no error");
}

}  // namespace
}  // namespace kvpool
