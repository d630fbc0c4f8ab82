#include "codec/vector_quantizer.h"

#include <cmath>
#include <limits>

#include "codec/space.h"
#include "unit/kernels/testing.h"

namespace kvpool::codec {
namespace {

using enum Code;
using enum Role;

std::vector<float> normal_numbers(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(n);
  for (float& x : numbers) x = normal(random);
  return numbers;
}

/// Codebook of N(0, 1) by Lloyd's iterations.
std::shared_ptr<const Codebook> trained(VectorCode code) {
  const auto dim = static_cast<std::size_t>(code.sub_dim);
  const std::size_t n_codes = std::size_t{1} << code.code_bits;
  const std::size_t n_samples = 40 * n_codes;
  const std::vector<float> samples = normal_numbers(n_samples * dim, 1);
  std::vector<float> centroids(samples.begin(),
                               samples.begin() + static_cast<std::ptrdiff_t>(n_codes * dim));
  // The best centroids lie wider than the samples.
  const float width =
      std::sqrt(static_cast<float>(code.sub_dim + 2) / static_cast<float>(code.sub_dim));
  for (float& x : centroids) x *= width;
  for (int iteration = 0; iteration < 12; ++iteration) {
    std::vector<float> sums(n_codes * dim);
    std::vector<int> counts(n_codes);
    for (std::size_t i = 0; i < n_samples; ++i) {
      float least = std::numeric_limits<float>::infinity();
      std::size_t nearest = 0;
      for (std::size_t c = 0; c < n_codes; ++c) {
        float squares = 0.0F;
        for (std::size_t j = 0; j < dim; ++j) {
          const float error = samples[i * dim + j] - centroids[c * dim + j];
          squares += error * error;
        }
        if (squares < least) {
          least = squares;
          nearest = c;
        }
      }
      ++counts[nearest];
      for (std::size_t j = 0; j < dim; ++j) sums[nearest * dim + j] += samples[i * dim + j];
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (counts[i / dim] > 0) centroids[i] = sums[i] / static_cast<float>(counts[i / dim]);
    }
  }
  constexpr float kScale = 5.0F / 127.0F;
  std::vector<std::int8_t> numbers;
  for (const float x : centroids) {
    numbers.push_back(static_cast<std::int8_t>(std::lround(std::clamp(x, -5.0F, 5.0F) / kScale)));
  }
  return make_codebook(code.sub_dim, code.code_bits, kScale, std::move(numbers));
}

/// Mean squared error over mean square of normal rows.
double normalised_error(Code code, Role role) {
  VectorQuantizer quantizer;
  quantizer.codebooks.push_back(trained(vector_code(code, role)));
  quantizer.transforms.push_back(
      {std::vector<float>(64, 1.0F), std::vector<float>(64), true, {}, {}});
  const PartGeometry geometry{{.code = code, .quantizer = &quantizer}, role, 256, 64};
  const std::vector<float> rows = normal_numbers(256 * 64, 2);
  std::vector<std::byte> part(part_bytes(geometry));
  encode(geometry, rows.data(), 256, part.data());
  std::vector<float> back(rows.size());
  decode(geometry, part.data(), 0, 256, back.data());
  double errors = 0.0;
  double squares = 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    errors += (back[i] - rows[i]) * (back[i] - rows[i]);
    squares += rows[i] * rows[i];
  }
  return errors / squares;
}

TEST(VectorQuantizer, LosesWhatItsBitsMustLose) {
  // From the bound of rate-distortion theory to what scalar quantisation loses.
  EXPECT_NEAR(normalised_error(kVecInfer1, kKeys), 0.3067, 0.0567);
  EXPECT_NEAR(normalised_error(kVecInfer2, kKeys), 0.09, 0.0275);
  EXPECT_NEAR(normalised_error(kVecInfer4, kKeys), 0.0067, 0.0028);
  const double both = normalised_error(kVecInfer3, kKeys);
  EXPECT_NEAR(both, 0.0067, 0.0028);
  EXPECT_NEAR(normalised_error(kVecInfer3, kValues), 0.09, 0.0275);
}

TEST(VectorQuantizer, TheTransformKeepsScoresAndSums) {
  for (const int dim : testing::kHeadDims) {
    const auto quantizer = testing::make_quantizer({4, 8}, dim);
    const Format format{.code = kVecInfer2, .quantizer = quantizer.get()};
    const auto n = static_cast<std::size_t>(dim);
    for (int head = 0; head < 4; ++head) {
      const Space space(format, head);
      std::vector<float> keys = normal_numbers(10 * n, 3);
      std::vector<float> queries = normal_numbers(3 * n, 4);
      std::vector<double> scores;
      for (std::size_t q = 0; q < 3; ++q) {
        for (std::size_t k = 0; k < 10; ++k) {
          double score = 0.0;
          for (std::size_t d = 0; d < n; ++d) score += double{queries[q * n + d]} * keys[k * n + d];
          scores.push_back(score);
        }
      }
      const std::vector<float> plain = keys;
      space.enter(keys.data(), 10, dim);
      float offsets[3];
      space.enter_queries(queries.data(), 3, dim, offsets);
      for (std::size_t q = 0; q < 3; ++q) {
        for (std::size_t k = 0; k < 10; ++k) {
          double score = offsets[q];
          for (std::size_t d = 0; d < n; ++d) score += double{queries[q * n + d]} * keys[k * n + d];
          ASSERT_NEAR(score, scores[q * 10 + k], 1e-4);
        }
      }
      std::vector<float> sums(n);
      std::vector<double> expected(n);
      float weights = 0.0F;
      for (std::size_t k = 0; k < 10; ++k) {
        const float weight = 0.1F * static_cast<float>(k);
        weights += weight;
        for (std::size_t d = 0; d < n; ++d) {
          sums[d] += weight * keys[k * n + d];
          expected[d] += weight * plain[k * n + d];
        }
      }
      space.leave_sums(sums.data(), 1, dim, &weights);
      for (std::size_t d = 0; d < n; ++d) ASSERT_NEAR(sums[d], expected[d], 1e-4);
      space.leave(keys.data(), 10, dim);
      for (std::size_t i = 0; i < keys.size(); ++i) ASSERT_NEAR(keys[i], plain[i], 1e-5);
    }
  }
}

TEST(VectorQuantizer, PutsCodesWhereTheHeaderSays) {
  for (const Code code : {kVecInfer1, kVecInfer1_5, kVecInfer2, kVecInfer3, kVecInfer4}) {
    for (const int block_size : {1, 7, 32}) {
      const auto geometry = testing::geometry_of({code}, kKeys, block_size, 40);
      const VectorCode vector = vector_code(code, kKeys);
      const auto n_sub = static_cast<std::size_t>(40 / vector.sub_dim);
      const auto n_tokens = static_cast<std::size_t>(block_size);
      std::vector<std::byte> part(part_bytes(geometry));
      ASSERT_EQ(part.size(),
                n_sub * n_tokens + (vector.code_bits == 12 ? n_sub * ((n_tokens + 1) / 2) : 0U));
      const auto rows = testing::random_rows(block_size, 40, 6);
      encode(geometry, rows.data(), block_size, part.data());
      std::vector<float> back(rows.size());
      decode(geometry, part.data(), 0, block_size, back.data());
      Space(geometry.format, 0).enter(back.data(), block_size, 40);
      const Codebook& book = *geometry.format.quantizer->codebooks[0];
      for (std::size_t sub = 0; sub < n_sub; ++sub) {
        for (std::size_t t = 0; t < n_tokens; ++t) {
          auto at = std::to_integer<std::size_t>(part[sub * n_tokens + t]);
          if (vector.code_bits == 12) {
            const std::byte pair = part[n_sub * n_tokens + sub * ((n_tokens + 1) / 2) + t / 2];
            at += (std::to_integer<std::size_t>(pair) >> (t % 2 * 4) & 15U) * 256;
          }
          for (std::size_t j = 0; j < static_cast<std::size_t>(vector.sub_dim); ++j) {
            const auto d = sub * static_cast<std::size_t>(vector.sub_dim) + j;
            ASSERT_NEAR(
                back[t * 40 + d],
                book.scale * book.centroids[at * static_cast<std::size_t>(vector.sub_dim) + j],
                1e-4);
          }
        }
      }
    }
  }
}

std::string refusal(const PartGeometry& geometry) {
  try {
    validate(geometry);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(VectorQuantizer, ValidateSaysWhatDoesNotFit) {
  auto good = testing::geometry_of({kVecInfer2}, kKeys, 16, 64);
  EXPECT_EQ(refusal(good), "");
  auto bad = good;
  bad.format.quantizer = nullptr;
  EXPECT_NE(refusal(bad).find("kvpool calibrate"), std::string::npos);
  bad = good;
  bad.kv_head = 4;
  EXPECT_EQ(refusal(bad), "codec: vecinfer2 has codebooks of 4 KV heads, asked for head 4");
  bad = good;
  bad.head_dim = 128;
  EXPECT_EQ(refusal(bad), "codec: vecinfer2 has codebooks for a head_dim of 64, asked for 128");
  bad = good;
  bad.format.code = kVecInfer1;
  EXPECT_EQ(refusal(bad),
            "codec: vecinfer1 has a codebook of 8-bit codes for 4 channels where 8 bits for 8 are "
            "wanted");
  bad = good;
  bad.format.code = kInt4;
  EXPECT_EQ(refusal(bad), "codec: int4 has no use for codebooks");
  bad = good;
  bad.format.hadamard = true;
  EXPECT_NE(refusal(bad), "");
}

TEST(MakeCodebook, RefusesWhatNoFormatHas) {
  const std::vector<std::int8_t> numbers(256 * 4);
  EXPECT_NO_THROW(make_codebook(4, 8, 1.0F, numbers));
  EXPECT_THROW(make_codebook(4, 12, 1.0F, numbers), std::invalid_argument);
  EXPECT_THROW(make_codebook(3, 8, 1.0F, numbers), std::invalid_argument);
  EXPECT_THROW(make_codebook(8, 8, 1.0F, numbers), std::invalid_argument);
  EXPECT_THROW(make_codebook(4, 8, 0.0F, numbers), std::invalid_argument);
  EXPECT_THROW(make_codebook(4, 8, NAN, numbers), std::invalid_argument);
}

/// Rows 62 e_i + 80 e_(i+1) leave one direction, of which the last row, of one channel, has 1e-7.
TEST(Rotation, RowsCloseToDependentAreMadeOrthonormal) {
  constexpr std::size_t kDim = 64;
  std::vector<std::int8_t> rows(kDim * kDim, 0);
  for (std::size_t i = 0; i + 1 < kDim; ++i) {
    rows[i * kDim + i] = 62;
    rows[i * kDim + i + 1] = 80;
  }
  rows[kDim * kDim - 1] = 100;
  HeadTransform transform;
  transform.smooth.assign(kDim, 1.0F);
  set_rotation(transform, rows);
  for (std::size_t i = 0; i < kDim; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double product = 0.0;
      for (std::size_t d = 0; d < kDim; ++d) {
        product += double{transform.back[i * kDim + d]} * transform.back[j * kDim + d];
      }
      EXPECT_NEAR(product, i == j ? 1.0 : 0.0, 1e-6);
    }
  }
}

TEST(Rotation, RowsThatDependAreRefused) {
  constexpr std::size_t kDim = 64;
  HeadTransform transform;
  transform.smooth.assign(kDim, 1.0F);
  std::vector<std::int8_t> rows(kDim * kDim);
  std::mt19937 random(3);
  for (std::int8_t& x : rows) x = static_cast<std::int8_t>(static_cast<int>(random() % 81) - 40);
  for (std::size_t d = 0; d < kDim; ++d) {
    rows[63 * kDim + d] = static_cast<std::int8_t>(rows[5 * kDim + d] - rows[40 * kDim + d]);
  }
  EXPECT_THROW(set_rotation(transform, rows), std::invalid_argument);
}

}  // namespace
}  // namespace kvpool::codec
