// Scores and weighted sums at each level against sums in double over the decoded rows.

#include "unit/kernels/testing.h"

namespace kvpool::kernels {
namespace {

using codec::Format;
using codec::PartGeometry;
using codec::Role;
using testing::random_rows;

struct Parts {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<const std::byte*> pointers;
  std::vector<std::int32_t> n_tokens;
  std::vector<float> rows;  // Those that count, decoded.
  std::size_t n_columns = 0;

  PartRun run() const { return {pointers.data(), n_tokens.data(), pointers.size()}; }
};

double largest_of(const std::vector<float>& values) {
  double largest = 0.0;
  for (const float value : values) largest = std::max(largest, std::fabs(double{value}));
  return largest;
}

/// Parts of which each but the first counts in full, the last at an odd address.
Parts make_parts(const PartGeometry& geometry) {
  const KernelTable& scalar = table_named("scalar");
  Parts parts;
  for (unsigned i = 0; i < 3; ++i) {
    auto part = geometry.format.is_vector()
                    ? testing::random_codes(geometry, 10 + i)
                    : testing::encoded(active(), geometry,
                                       random_rows(geometry.block_size, geometry.head_dim, 10 + i));
    const std::vector<float> back = testing::decoded(scalar, geometry, part);
    const int n = i == 0 ? (geometry.block_size + 1) / 2 : geometry.block_size;
    parts.rows.insert(parts.rows.end(), back.begin(), back.begin() + n * geometry.head_dim);
    parts.n_tokens.push_back(n);
    parts.n_columns += static_cast<std::size_t>(n);
    part.insert(part.begin(), i == 2 ? 1 : 0, std::byte{0});
    parts.bytes.push_back(std::move(part));
    parts.pointers.push_back(parts.bytes.back().data() + (i == 2 ? 1 : 0));
  }
  return parts;
}

class Products : public ::testing::TestWithParam<std::tuple<std::string, Format>> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(std::get<0>(GetParam())); }
  const KernelTable& table() const { return table_named(std::get<0>(GetParam())); }
  const Format& format() const { return std::get<1>(GetParam()); }
};

constexpr int kQueryCounts[] = {1, 2, 3, 4, 5, 8, 9, 33};
constexpr int kBlockSizes[] = {1, 7, 16, 32, 37};

TEST_P(Products, ScoresAreDotProductsWithTheDecodedKeys) {
  const auto& kernels = table().of_keys(layout_of(format(), Role::kKeys));
  for (const int head_dim : testing::kHeadDims) {
    for (const int block_size : kBlockSizes) {
      const PartGeometry geometry =
          testing::geometry_of(format(), Role::kKeys, block_size, head_dim);
      const Parts parts = make_parts(geometry);
      const auto dim = static_cast<std::size_t>(head_dim);
      const double largest = largest_of(parts.rows);
      for (const int n_queries : kQueryCounts) {
        const auto queries = random_rows(n_queries, head_dim, 20);
        const double largest_query = largest_of(queries);
        const PartShape shape = testing::shape_of(geometry);
        struct alignas(64) Line {
          std::byte bytes[64];
        };
        std::vector<Line> prepared(kernels.prepared_bytes(shape, n_queries) / 64 + 1);
        auto* const at = prepared.front().bytes;
        kernels.prepare(shape, queries.data(), n_queries, at);
        const std::size_t stride = parts.n_columns + kColumnSlack;
        std::vector<float> scores(stride * static_cast<std::size_t>(n_queries));
        kernels.scores(shape, parts.run(), at, n_queries, scores.data(), stride);
        for (std::size_t q = 0; q < static_cast<std::size_t>(n_queries); ++q) {
          for (std::size_t c = 0; c < parts.n_columns; ++c) {
            double expected = 0.0;
            double size = 0.0;
            for (std::size_t d = 0; d < dim; ++d) {
              const double product = double{queries[q * dim + d]} * parts.rows[c * dim + d];
              expected += product;
              size += std::fabs(product);
            }
            // An element of a query may be rounded to 15 bits of the largest, and its product with
            // a sub-vector to 14.
            const double rounding = (format().is_vector() ? 1.5e-4 : 5e-5) * largest_query *
                                    largest * std::sqrt(head_dim);
            ASSERT_NEAR(scores[q * stride + c], expected, 1e-5 * size + rounding)
                << "dim " << head_dim << " block " << block_size << " query " << q << " of "
                << n_queries << " column " << c;
          }
        }
      }
    }
  }
}

TEST_P(Products, SumsAreOfTheDecodedValues) {
  const auto& kernels = table().of_values(layout_of(format(), Role::kValues));
  for (const int head_dim : testing::kHeadDims) {
    for (const int block_size : kBlockSizes) {
      const PartGeometry geometry =
          testing::geometry_of(format(), Role::kValues, block_size, head_dim);
      const Parts parts = make_parts(geometry);
      const auto dim = static_cast<std::size_t>(head_dim);
      const double largest = largest_of(parts.rows);
      for (const int n_queries : kQueryCounts) {
        const std::size_t stride = parts.n_columns + kColumnSlack;
        std::mt19937 random(30);
        std::vector<float> weights(stride * static_cast<std::size_t>(n_queries));
        for (float& w : weights) w = std::exp(-10.0F * static_cast<float>(random() % 1000) / 1000);
        for (std::size_t i = 0; i < weights.size(); i += 5) weights[i] = 0.0F;
        std::vector<float> out(static_cast<std::size_t>(n_queries) * dim, 1.0F);
        kernels.accumulate(testing::shape_of(geometry), parts.run(), weights.data(), stride,
                           n_queries, out.data());
        for (std::size_t q = 0; q < static_cast<std::size_t>(n_queries); ++q) {
          for (std::size_t d = 0; d < dim; ++d) {
            double expected = 1.0;
            double size = 0.0;
            for (std::size_t c = 0; c < parts.n_columns; ++c) {
              const double product = double{weights[q * stride + c]} * parts.rows[c * dim + d];
              expected += product;
              size += std::fabs(product);
            }
            // Each token's weight may be rounded to 16 bits of the largest of its tile and group.
            const double rounding = 4e-5 * std::sqrt(parts.n_columns) * largest;
            ASSERT_NEAR(out[q * dim + d], expected, 1e-5 * size + rounding)
                << "dim " << head_dim << " block " << block_size << " query " << q << " of "
                << n_queries << " channel " << d;
          }
        }
      }
    }
  }
}

class RoundedSums : public Products {};

TEST_P(RoundedSums, ManyTokensOfFullOrOfLittleWeightCount) {
  const auto& kernels = table().of_values(layout_of(format(), Role::kValues));
  const PartGeometry geometry = testing::geometry_of(format(), Role::kValues, 256, 64);
  std::vector<float> rows(256 * 64);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = i % 64 < 33 ? -1.0F : 1.0F;
  for (std::size_t i = 0; i < rows.size(); i += 32) rows[i] = -rows[i];
  const auto part = testing::encoded(active(), geometry, rows);
  const std::vector<float> back = testing::decoded(table_named("scalar"), geometry, part);
  const std::byte* const parts[] = {part.data(), part.data(), part.data()};
  const std::int32_t n_tokens[] = {256, 256, 256};
  constexpr std::size_t kColumns = 3 * 256;
  for (const float weight : {1.0F, 1e-3F, 1e-5F, 7e-6F, 1e-6F}) {
    std::vector<float> weights(kColumns + kColumnSlack, weight);
    weights[0] = 1.0F;
    std::vector<float> out(64);
    kernels.accumulate(testing::shape_of(geometry), {parts, n_tokens, 3}, weights.data(), kColumns,
                       1, out.data());
    for (std::size_t d = 0; d < out.size(); ++d) {
      double expected = 0.0;
      for (std::size_t c = 0; c < kColumns; ++c) {
        expected += double{weights[c]} * back[c % 256 * 64 + d];
      }
      const double sum = 1.0 + double{weight} * kColumns;
      ASSERT_NEAR(out[d], expected, 5e-4 * sum) << "channel " << d << " weight " << weight;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Products,
                         ::testing::Combine(::testing::ValuesIn(testing::level_names()),
                                            ::testing::ValuesIn([] {
                                              std::vector<Format> formats;
                                              for (const Format& f : testing::all_formats()) {
                                                if (!f.hadamard) formats.push_back(f);
                                              }
                                              return formats;
                                            }())),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  testing::label(std::get<1>(test.param));
                         });

INSTANTIATE_TEST_SUITE_P(
    Levels, RoundedSums,
    ::testing::Combine(
        ::testing::ValuesIn(testing::level_names()),
        ::testing::Values(Format{codec::Code::kInt8, 32}, Format{codec::Code::kInt4, 64},
                          Format{codec::Code::kInt2, 32}, Format{codec::Code::kKivi4},
                          Format{codec::Code::kKivi2}, Format{codec::Code::kVecInfer1},
                          Format{codec::Code::kVecInfer1_5}, Format{codec::Code::kVecInfer2},
                          Format{codec::Code::kVecInfer4})),
    [](const auto& test) {
      return std::get<0>(test.param) + "_" + testing::label(std::get<1>(test.param));
    });

}  // namespace
}  // namespace kvpool::kernels
