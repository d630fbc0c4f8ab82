// What an input that cannot be evaluated does to the others of its storage, and how they go on.

#include <mlx/allocator.h>
#include <mlx/primitives.h>

#include <cstring>
#include <stdexcept>

#include "paged_fixture.h"
#include "backend/native.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::kDim;
using testing::kHeads;

/// Throws when it is evaluated, the first `n_failures` times.
class Failing final : public mx::Primitive {
 public:
  Failing(mx::Stream stream, int n_failures) : Primitive(stream), n_failures_(n_failures) {}
  const char* name() const override { return "Failing"; }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    if (n_failures_-- > 0) throw std::runtime_error("no value");
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    std::memset(outputs[0].data<void>(), 0, outputs[0].nbytes());
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    eval_cpu(inputs, outputs);
  }

 private:
  int n_failures_;
};

constexpr int kAlways = 1'000'000;

class Recover : public testing::PagedCache {
 protected:
  void SetUp() override {
    if (storage_->level() == "ops") GTEST_SKIP() << "ops replaces no inputs";
  }

  static mx::array failing(const mx::Shape& shape, mx::Dtype dtype = mx::float32,
                           int n_failures = kAlways) {
    const mx::Stream stream = mx::default_stream(mx::Device::cpu);
    return mx::array(shape, dtype, std::make_shared<Failing>(stream, n_failures), {});
  }
  static mx::array failing_rows(int n_tokens) { return failing({1, kHeads, n_tokens, kDim}); }
  static bool is_nan(const mx::array& a) { return mx::all(mx::isnan(a)).item<bool>(); }

  PagedKVCache good_ = cache({}, {1});
  PagedKVCache bad_ = cache({}, {2});
};

TEST_F(Recover, OtherRequestsGoOnAsIfNothingHadBeen) {
  const mx::array k = rows(9);
  const mx::array q = rows(1);
  good_.append(tokens(k, 0, 6), tokens(k, 0, 6));
  bad_.append(rows(5), rows(5));
  bad_.append(failing_rows(3), failing_rows(3));
  attend(bad_, rows(3));
  good_.append(tokens(k, 6, 9), tokens(k, 6, 9));
  mx::array out = good_.attend(q, 0.25F, {});
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(out.eval(), std::runtime_error);
    EXPECT_THROW(good_.pending().eval(), std::runtime_error);
  }

  EXPECT_EQ(storage_->recover(), 1);
  EXPECT_EQ(storage_->recover(), 0);
  PagedKVCache alone(std::make_shared<PagedStorage>(pool_), {}, std::vector<Owner>{3});
  alone.append(k, k);
  EXPECT_TRUE(equal(out, alone.attend(q, 0.25F, {})));
  EXPECT_TRUE(equal(good_.fetch().first, k));
  good_.append(k, k);
  EXPECT_TRUE(equal(good_.fetch().second, mx::concatenate({k, k}, 2)));
}

TEST_F(Recover, WhatCouldNotBeComputedIsNanAndCanBeTrimmedOff) {
  const mx::array k = rows(5);
  bad_.append(k, k);
  bad_.append(failing_rows(3), rows(3));
  const mx::array out = attend(bad_, rows(3));
  EXPECT_EQ(storage_->recover(), 1);
  EXPECT_TRUE(is_nan(out));
  EXPECT_TRUE(is_nan(tokens(bad_.fetch().first, 5, 8)));
  EXPECT_TRUE(is_nan(tokens(bad_.fetch().second, 5, 8)));
  EXPECT_EQ(bad_.trim(3), 3);
  const mx::array more = rows(4);
  bad_.append(more, more);
  EXPECT_TRUE(equal(bad_.fetch().first, mx::concatenate({k, more}, 2)));
}

TEST_F(Recover, FailingQueriesMasksAndSinksGiveNan) {
  good_.append(rows(5), rows(5));
  AttentionMask mask;
  mask.array = failing({1, 5}, mx::bool_);
  const mx::array outputs[] = {attend(good_, failing_rows(1)), good_.attend(rows(1), 1.0F, mask),
                               good_.attend(rows(1), 1.0F, {}, failing({kHeads}))};
  const mx::array fine = attend(good_, rows(1));
  EXPECT_EQ(storage_->recover(), 3);
  for (const mx::array& out : outputs) EXPECT_TRUE(is_nan(out));
  EXPECT_FALSE(mx::any(mx::isnan(fine)).item<bool>());
}

TEST_F(Recover, AnImageThatCannotBeReadIsNan) {
  for (const char* format : {"raw", "int4", "kivi2"}) {
    PagedKVCache saved = cache(config(format, format));
    saved.append(rows(8), rows(8));
    saved.append(rows(1), rows(1));
    PagedRowImage image = saved.save_row(0).value();
    image.keys = failing(image.keys.shape(), mx::uint8);
    PagedKVCache loaded = cache(config(format, format));
    loaded.load_rows(std::vector{std::optional(image)}, loaded.owners());
    EXPECT_EQ(storage_->recover(), 1);
    EXPECT_TRUE(is_nan(loaded.fetch().first)) << format;
    EXPECT_TRUE(is_nan(loaded.fetch().second)) << format;
  }
}

TEST_F(Recover, WhatFailedForATimeIsComputed) {
  good_.append(failing({1, kHeads, 3, kDim}, mx::float32, 1), rows(3));
  EXPECT_THROW(good_.pending().eval(), std::runtime_error);
  EXPECT_EQ(storage_->recover(), 0);
  EXPECT_TRUE(equal(good_.fetch().first, mx::zeros({1, kHeads, 3, kDim})));
}

TEST_F(Recover, ARequestThatIsGoneLeavesNothingBehind) {
  {
    PagedKVCache gone = cache({}, {9});
    gone.append(failing_rows(7), failing_rows(7));
  }
  const mx::array k = rows(7);
  good_.append(k, k);  // where the other lay
  EXPECT_EQ(storage_->recover(), 1);
  EXPECT_TRUE(equal(good_.fetch().first, k));
  EXPECT_EQ(pool_->stats().blocks_in_use(), 4);
}

TEST_F(Recover, WithNothingWrongItEvaluates) {
  EXPECT_EQ(storage_->recover(), 0);
  good_.append(rows(3), rows(3));
  EXPECT_EQ(storage_->recover(), 0);
  EXPECT_NE(good_.pending().status(), mx::array::Status::unscheduled);
}

TEST_F(Recover, WhatFailsThoughItsInputsDoNotIsThrown) {
  auto* const backend = dynamic_cast<detail::NativeBackend*>(storage_->backend().get());
  if (backend == nullptr) GTEST_SKIP() << "such an op can be put in native's chain only";
  good_.append(rows(3), rows(3));
  backend->extend_chain([](const mx::array& latest) {
    const mx::Stream stream = mx::default_stream(mx::Device::cpu);
    return mx::array(latest.shape(), latest.dtype(), std::make_shared<Failing>(stream, kAlways),
                     {latest});
  });
  EXPECT_THROW(storage_->recover(), std::runtime_error);
}

}  // namespace
}  // namespace kvpool
