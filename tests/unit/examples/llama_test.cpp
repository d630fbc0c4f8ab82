#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <stdexcept>
#include <string>

#include "llama_model.h"

namespace mx = mlx::core;

namespace {

constexpr int kBatch = 2;
constexpr int kPrompt = 40;
constexpr int kSteps = 20;

/// Logits of a prompt in two chunks, then of a token at a time.
mx::array logits(const llama::Model& model, const std::string& format) {
  llama::Caches caches = llama::make_caches(format, model.shape(), kBatch, 16);
  const mx::array tokens = mx::random::randint(0, model.shape().vocab, {kBatch, kPrompt + kSteps},
                                               mx::int32, mx::random::key(3));
  const auto columns = [&](int first, int end) {
    return mx::slice(tokens, {0, first}, {kBatch, end});
  };
  std::vector<mx::array> all{model(columns(0, 24), caches), model(columns(24, kPrompt), caches)};
  for (int i = 0; i < kSteps; ++i) {
    all.push_back(model(columns(kPrompt + i, kPrompt + i + 1), caches));
  }
  EXPECT_EQ(caches[0]->length(), kPrompt + kSteps);
  return mx::stack(all);
}

TEST(LlamaExample, EveryRawCacheGivesTheLogitsOfTheContiguousOne) {
  const auto model = llama::Model::random(llama::shape_named("tiny"), mx::float32, 1);
  const mx::array stock = logits(model, "stock");
  EXPECT_GT(mx::std(stock).item<float>(), 0.1F);
  const mx::array paged = logits(model, "raw");
  EXPECT_LT(mx::max(mx::abs(stock - paged)).item<float>(), 1e-4F);
}

TEST(LlamaExample, TokensBeforeCount) {
  const auto model = llama::Model::random(llama::shape_named("tiny"), mx::float32, 1);
  llama::Caches full = llama::make_caches("raw", model.shape(), 1, 16);
  llama::Caches shorter = llama::make_caches("raw", model.shape(), 1, 16);
  const mx::array with = model(mx::array({5, 6, 7}, {1, 3}), full);
  const mx::array without = model(mx::array({6, 7}, {1, 2}), shorter);
  EXPECT_GT(mx::max(mx::abs(with - without)).item<float>(), 1e-2F);
}

TEST(LlamaExample, AnUnknownShapeIsNamed) {
  try {
    llama::shape_named("llama-9");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("llama-9"), std::string::npos);
  }
}

}  // namespace
