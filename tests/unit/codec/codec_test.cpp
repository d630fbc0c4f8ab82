#include "codec/codec.h"

#include <cstring>
#include <limits>

#include "codec/half.h"
#include "unit/kernels/testing.h"

namespace kvpool::codec {
namespace {

using enum Code;
using enum Role;
using testing::random_rows;

std::size_t bytes(Format format, Role role, int block_size, int head_dim) {
  return part_bytes({format, role, block_size, head_dim});
}

TEST(PartBytes, CountCodesScalesAndBiases) {
  EXPECT_EQ(bytes({kFp32}, kKeys, 16, 64), 16U * 64 * 4);
  EXPECT_EQ(bytes({kBf16}, kValues, 5, 40), 5U * 40 * 2);
  EXPECT_EQ(bytes({kInt8, 64}, kKeys, 16, 64), 16U * (64 + 4));
  EXPECT_EQ(bytes({kInt4, 32}, kKeys, 32, 64), 32U * (32 + 2 * 4));
  EXPECT_EQ(bytes({kInt4, 32}, kValues, 32, 64), 32U * (32 + 2 * 4));
  EXPECT_EQ(bytes({kInt2, 64}, kValues, 256, 128), 256U * (32 + 2 * 4));
  EXPECT_EQ(bytes({kInt2, 32}, kValues, 16, 80), 16U * (20 + 3 * 4));
  EXPECT_EQ(bytes({kInt2, 32}, kValues, 17, 80), 17U * (20 + 3 * 4));
  EXPECT_EQ(bytes({kInt2, 32}, kKeys, 1, 40), 10U + 2 * 4);
  EXPECT_EQ(bytes({kKivi2}, kKeys, 32, 64), 64U * 4 + 32 * 16);
  EXPECT_EQ(bytes({kKivi4}, kKeys, 20, 64), 64U * 4 + 20 * 32);
  EXPECT_EQ(bytes({kKivi2}, kValues, 32, 64), 32U * (16 + 2 * 4));
  EXPECT_EQ(block_bytes({{kInt4, 32}, kKeys, 32, 64}, 3), 3U * 32 * 40);
  EXPECT_EQ(bytes({kVecInfer1}, kKeys, 32, 64), 32U * 8);
  EXPECT_EQ(bytes({kVecInfer1_5}, kValues, 32, 64), 32U * 12);
  EXPECT_EQ(bytes({kVecInfer2}, kKeys, 7, 80), 7U * 20);
  EXPECT_EQ(bytes({kVecInfer3}, kKeys, 32, 64), 32U * 32);
  EXPECT_EQ(bytes({kVecInfer3}, kValues, 32, 64), 32U * 16);
  EXPECT_EQ(bytes({kVecInfer4}, kValues, 32, 64), 32U * 32);
}

/// A row whose codes in `n_steps` steps are its values: each group has 0 and n_steps.
std::vector<float> code_rows(int n_tokens, int dim, int n_steps) {
  std::vector<float> rows;
  for (int t = 0; t < n_tokens; ++t) {
    for (int d = 0; d < dim; ++d) {
      const int in_group = d % 32;
      const int code = in_group == 0 ? 0 : in_group == 1 ? n_steps : (3 * t + 5 * d) % n_steps;
      rows.push_back(static_cast<float>(code));
    }
  }
  return rows;
}

std::uint32_t word_at(const std::vector<std::byte>& part, std::size_t index) {
  std::uint32_t word = 0;
  std::memcpy(&word, part.data() + 4 * index, 4);
  return word;
}

template <int kBits>
void expect_documented_words(Code code) {
  constexpr std::uint32_t kSteps = (1U << kBits) - 1;
  constexpr std::size_t kPerWord = 32 / kBits;
  constexpr std::size_t kDim = 64;
  const std::vector<float> rows = code_rows(32, kDim, kSteps);
  std::vector<std::byte> part(bytes({code, 32}, kKeys, 32, kDim));
  ASSERT_EQ(part.size(), bytes({code, 32}, kValues, 32, kDim));
  const std::size_t tile_words = part.size() / 2 / 4;

  encode({{code, 32}, kKeys, 32, kDim}, rows.data(), 32, part.data());
  for (std::size_t t = 0; t < 32; ++t) {
    for (std::size_t d = 0; d < kDim; ++d) {
      const std::uint32_t word = word_at(part, t / 16 * tile_words + d / kPerWord * 16 + t % 16);
      ASSERT_EQ(static_cast<float>(word >> (d % kPerWord * kBits) & kSteps), rows[t * kDim + d]);
    }
  }
  encode({{code, 32}, kValues, 32, kDim}, rows.data(), 32, part.data());
  for (std::size_t t = 0; t < 32; ++t) {
    for (std::size_t d = 0; d < kDim; ++d) {
      const std::size_t in_tile = t % 16;
      const std::uint32_t word = word_at(part, t / 16 * tile_words + in_tile / kPerWord * kDim + d);
      ASSERT_EQ(static_cast<float>(word >> (in_tile % kPerWord * kBits) & kSteps),
                rows[t * kDim + d]);
    }
  }
}

TEST(Encode, PutsCodesWhereTheHeaderSays) {
  expect_documented_words<8>(kInt8);
  expect_documented_words<4>(kInt4);
  expect_documented_words<2>(kInt2);
}

TEST(Encode, PutsScalesAndBiasesBehindTheCodes) {
  std::vector<float> rows(16 * 64, 0.0F);
  rows[3 * 64 + 40] = 30.0F;  // Token 3, group 1: scale 2.
  rows[5 * 64 + 2] = -15.0F;  // Token 5, group 0: scale 1, bias -15.
  std::vector<std::byte> part(bytes({kInt4, 32}, kKeys, 16, 64));
  encode({{kInt4, 32}, kKeys, 16, 64}, rows.data(), 16, part.data());
  std::uint16_t halves[64];
  std::memcpy(halves, part.data() + 16 * 32, sizeof(halves));
  EXPECT_EQ(half_to_float(halves[16 + 3]), 2.0F);
  EXPECT_EQ(half_to_float(halves[5]), 1.0F);
  EXPECT_EQ(half_to_float(halves[32 + 5]), -15.0F);
  EXPECT_EQ(half_to_float(halves[32 + 16 + 3]), 0.0F);
}

TEST(Encode, OfRawRowsLeavesTheOthersAsTheyAre) {
  for (const Code code : {kFp32, kFp16, kBf16}) {
    const PartGeometry geometry{{code}, kKeys, 16, 40};
    const std::vector<float> ones(16 * 40, 1.0F);
    const std::vector<float> twos(2 * 40, 2.0F);
    std::vector<std::byte> part(part_bytes(geometry));
    encode(geometry, ones.data(), 16, part.data());
    encode(geometry, twos.data(), 2, part.data(), 7);
    std::vector<float> rows(16 * 40);
    decode(geometry, part.data(), 0, 16, rows.data());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i], i / 40 == 7 || i / 40 == 8 ? 2.0F : 1.0F);
    }
  }
}

TEST(Codec, WithHadamardGivesBackTheRowsThatWerePutIn) {
  for (const int dim : testing::kHeadDims) {
    for (const Role role : {kKeys, kValues}) {
      const PartGeometry geometry{{kInt8, 32, true}, role, 16, dim};
      const std::vector<float> rows = random_rows(16, dim, 5);
      std::vector<std::byte> part(part_bytes(geometry));
      encode(geometry, rows.data(), 16, part.data());
      std::vector<float> back(rows.size());
      decode(geometry, part.data(), 0, 16, back.data());
      double error = 0.0;
      double size = 0.0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        error += (back[i] - rows[i]) * (back[i] - rows[i]);
        size += rows[i] * rows[i];
      }
      EXPECT_LT(std::sqrt(error / size), 0.01) << dim;
      EXPECT_GT(error, 0.0);
    }
  }
}

TEST(Codec, KiviIsExactForRowsThatDifferByOneStep) {
  std::vector<float> rows;
  for (int t = 0; t < 32; ++t) {
    for (int d = 0; d < 64; ++d) rows.push_back(static_cast<float>(100 * d + t % 4));
  }
  const PartGeometry geometry{{kKivi2}, kKeys, 32, 64};
  std::vector<std::byte> part(part_bytes(geometry));
  encode(geometry, rows.data(), 32, part.data());
  std::vector<float> back(rows.size());
  decode(geometry, part.data(), 0, 32, back.data());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] > 2047.0F) continue;  // fp16 holds those below.
    EXPECT_EQ(back[i], rows[i]) << i;
  }
}

TEST(Encodable, IsWhatIsFiniteAndFitsFp16) {
  for (const Format& format : testing::all_formats()) {
    const PartGeometry geometry{format, kKeys, 16, 64};
    std::vector<float> row(64, 1.0F);
    row[42] = 60000.0F;
    EXPECT_TRUE(encodable(geometry, row.data()));
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity(), 1e20F}) {
      row[63] = bad;
      EXPECT_EQ(encodable(geometry, row.data()), format.is_raw()) << name(format.code) << bad;
    }
  }
  const PartGeometry plain{{kInt4}, kKeys, 16, 64};
  for (const float edge : {65504.0F, -65504.0F}) {
    std::vector<float> row(64, edge);
    EXPECT_TRUE(encodable(plain, row.data()));
    row[0] *= 1.0001F;
    EXPECT_FALSE(encodable(plain, row.data()));
  }
}

TEST(Encodable, IsJudgedAfterTheTransform) {
  const std::vector<float> flat(64, 10000.0F);  // 8 times as much in one channel
  EXPECT_FALSE(encodable({{kInt4, 32, true}, kKeys, 16, 64}, flat.data()));
  EXPECT_TRUE(encodable({{kInt4, 32, false}, kKeys, 16, 64}, flat.data()));
}

TEST(Names, GoThereAndBack) {
  for (const Code code : {kFp32, kFp16, kBf16, kInt8, kInt4, kInt2, kKivi4, kKivi2, kVecInfer1,
                          kVecInfer1_5, kVecInfer2, kVecInfer3, kVecInfer4}) {
    EXPECT_EQ(code_of(name(code)), code);
  }
  EXPECT_EQ(name(kKivi2), "kivi2");
  try {
    code_of("int3");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "codec: unknown format 'int3'; allowed: fp32, fp16, bf16, int8, int4, int2, "
                 "kivi4, kivi2, vecinfer1, vecinfer1.5, vecinfer2, vecinfer3, vecinfer4");
  }
}

TEST(Codec, RefusesWhatNoKernelTakes) {
  for (const int dim : testing::kHeadDims) {
    for (const Format& format : testing::all_formats()) {
      EXPECT_NO_THROW(validate(testing::geometry_of(format, kKeys, 16, dim)));
    }
  }
  EXPECT_THROW(validate({{kFp32}, kKeys, 16, 0}), std::invalid_argument);
  EXPECT_THROW(validate({{kFp32}, kKeys, 16, 60}), std::invalid_argument);
  EXPECT_THROW(validate({{kFp32}, kKeys, 16, 264}), std::invalid_argument);
  EXPECT_THROW(validate({{kFp32}, kKeys, 0, 64}), std::invalid_argument);
  EXPECT_THROW(validate({{kInt4, 48}, kKeys, 16, 64}), std::invalid_argument);
  EXPECT_THROW(validate({{kFp16, 32, true}, kKeys, 16, 64}), std::invalid_argument);
}

}  // namespace
}  // namespace kvpool::codec
