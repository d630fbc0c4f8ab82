#include "unit/attention/testing.h"

namespace kvpool::attention {
namespace {

using enum codec::Code;

class Validate : public ::testing::Test {
 protected:
  Validate() {
    sequence_.append(40, 16, {kFp32}, {kInt4}, 1);
    refs_.push_back(sequence_.ref(1));
    blocks_.assign(refs_[0].blocks.begin(), refs_[0].blocks.end());
    refs_[0].blocks = blocks_;
    arguments_.n_heads = 2;
    arguments_.n_kv_heads = 1;
    arguments_.head_dim = 64;
    arguments_.value_dim = 64;
    arguments_.queries = memory_;
    arguments_.out = memory_;
    arguments_.sequences = refs_;
  }

  /// What is refused, or "".
  std::string refusal() const {
    try {
      validate(arguments_);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  }

  testing::TestSequence sequence_{testing::Sizes{2, 1, 64, 64}};
  float memory_[128] = {};
  std::vector<BlockRef> blocks_;
  std::vector<SequenceRef> refs_;
  Arguments arguments_;
};

TEST_F(Validate, TakesWhatFits) { EXPECT_EQ(refusal(), ""); }

TEST_F(Validate, RefusesHeadsThatDoNotDivide) {
  arguments_.n_kv_heads = 3;
  EXPECT_EQ(refusal(), "attention: n_heads must be a multiple of n_kv_heads (3), got 2");
}

TEST_F(Validate, RefusesBlocksThatOverlapOrAreOverfull) {
  blocks_[1].position = 15;
  EXPECT_EQ(refusal(),
            "attention: sequence 0 has a block at position 15 after one that ends at 16");
  blocks_[1].position = 16;
  blocks_[2].n_tokens = 17;
  EXPECT_EQ(refusal(), "attention: sequence 0 has a block with 17 tokens of 16");
  blocks_[2].n_tokens = 8;
  blocks_[0].values = nullptr;
  EXPECT_EQ(refusal(), "attention: sequence 0 has a block without memory");
}

TEST_F(Validate, RefusesAMaskThatIsTooShort) {
  arguments_.mask = {Mask::Kind::kAdditive, memory_, {0, 0, 0, 1}, 39, 0};
  EXPECT_EQ(refusal(),
            "attention: the mask covers positions 0 to 39, sequence 0 has a block from 32 to 40");
  arguments_.mask.n_keys = 40;
  EXPECT_EQ(refusal(), "");
  arguments_.mask.first_position = 1;
  EXPECT_NE(refusal(), "");
}

TEST_F(Validate, RefusesAFormatOrHeadDimWithoutKernels) {
  blocks_[1].key_format.group_size = 48;
  EXPECT_EQ(refusal(), "codec: group_size must be 32 or 64, got 48");
  blocks_[1].key_format.group_size = 32;
  arguments_.head_dim = 60;
  EXPECT_NE(refusal(), "");
}

}  // namespace
}  // namespace kvpool::attention
