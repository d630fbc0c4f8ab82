// Encoding and decoding at each level: error bounds, and the same bits as the reference.

#include "codec/half.h"
#include "unit/kernels/testing.h"

namespace kvpool::kernels {
namespace {

using codec::Code;
using codec::Format;
using codec::PartGeometry;
using codec::Role;
using testing::decoded;
using testing::encoded;
using testing::random_rows;

constexpr int kBlockSizes[] = {1, 7, 16, 21, 32, 256};

int n_steps(Code code) {
  switch (code) {
    case Code::kInt8:
      return 255;
    case Code::kInt4:
    case Code::kKivi4:
      return 15;
    default:
      return 3;
  }
}

struct Range {
  float low;
  float high;
};

/// The range that the element shares a scale with.
Range range_of(const PartGeometry& geometry, const std::vector<float>& rows, int token,
               int channel) {
  const Layout layout = layout_of(geometry.format, geometry.role);
  const bool by_channel = layout == Layout::kChannel4 || layout == Layout::kChannel2;
  const int group = geometry.format.group_size;
  const int first_channel = by_channel ? channel : channel / group * group;
  const int end_channel =
      by_channel ? channel + 1 : std::min(geometry.head_dim, first_channel + group);
  const int first_token = by_channel ? 0 : token;
  const int end_token = by_channel ? geometry.block_size : token + 1;
  Range range{rows[static_cast<std::size_t>(first_token * geometry.head_dim + first_channel)], 0};
  range.high = range.low;
  for (int t = first_token; t < end_token; ++t) {
    for (int d = first_channel; d < end_channel; ++d) {
      const float value = rows[static_cast<std::size_t>(t * geometry.head_dim + d)];
      range.low = std::min(range.low, value);
      range.high = std::max(range.high, value);
    }
  }
  return range;
}

void expect_within_half_a_step(const PartGeometry& geometry, const std::vector<float>& rows,
                               const std::vector<float>& back) {
  for (int t = 0; t < geometry.block_size; ++t) {
    for (int d = 0; d < geometry.head_dim; ++d) {
      const auto i = static_cast<std::size_t>(t * geometry.head_dim + d);
      const Range range = range_of(geometry, rows, t, d);
      const double ulp = std::max(std::fabs(double{range.low}) * 0x1p-10, 0x1p-24);
      const double step = (double{range.high} - range.low + ulp) / n_steps(geometry.format.code);
      const double bound = 0.5 * (step * (1.0 + 0x1p-10) + 0x1p-24) +
                           1e-6 * (std::fabs(range.low) + std::fabs(range.high));
      ASSERT_LE(std::fabs(back[i] - rows[i]), bound)
          << "token " << t << " channel " << d << " range " << range.low << " " << range.high;
    }
  }
}

void expect_nearest(const PartGeometry& geometry, const std::vector<float>& rows,
                    const std::vector<float>& back) {
  const codec::Codebook& book = *shape_of(geometry).codebook;
  const auto dim = static_cast<std::size_t>(book.sub_dim);
  for (std::size_t i = 0; i < rows.size(); i += dim) {
    double least = INFINITY;
    for (std::size_t code = 0; code < book.n_codes(); ++code) {
      double squares = 0.0;
      for (std::size_t j = 0; j < dim; ++j) {
        const double error = double{rows[i + j]} - book.scale * book.centroids[code * dim + j];
        squares += error * error;
      }
      least = std::min(least, squares);
    }
    double squares = 0.0;
    for (std::size_t j = 0; j < dim; ++j) {
      squares += (double{rows[i + j]} - back[i + j]) * (double{rows[i + j]} - back[i + j]);
    }
    ASSERT_NEAR(squares, least, 1e-5 * (1.0 + least)) << "from element " << i;
  }
}

bool is_affine(const Format& format) { return !format.is_raw() && !format.is_vector(); }

class Coding : public ::testing::TestWithParam<std::tuple<std::string, Format>> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(std::get<0>(GetParam())); }
  const KernelTable& table() const { return table_named(std::get<0>(GetParam())); }
  const Format& format() const { return std::get<1>(GetParam()); }

  template <typename Check>
  void for_each_geometry(const Check& check) const {
    for (const Role role : {Role::kKeys, Role::kValues}) {
      for (const int head_dim : testing::kHeadDims) {
        for (const int block_size : kBlockSizes) {
          if (format().is_vector() && block_size * head_dim > 4096) continue;  // Slow to search.
          SCOPED_TRACE(::testing::Message() << (role == Role::kKeys ? "keys" : "values") << " dim "
                                            << head_dim << " block " << block_size);
          check(testing::geometry_of(format(), role, block_size, head_dim));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
};

TEST_P(Coding, IsOffByHalfAStepAtMostOrIsTheNearestCentroid) {
  for_each_geometry([this](const PartGeometry& geometry) {
    const std::vector<float> rows = random_rows(geometry.block_size, geometry.head_dim, 3);
    const std::vector<float> back = decoded(table(), geometry, encoded(table(), geometry, rows));
    if (geometry.format.is_vector()) return expect_nearest(geometry, rows, back);
    if (is_affine(geometry.format)) return expect_within_half_a_step(geometry, rows, back);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const float stored = geometry.format.code == Code::kFp32 ? rows[i]
                           : geometry.format.code == Code::kFp16
                               ? codec::half_to_float(codec::float_to_half(rows[i]))
                               : codec::bf16_to_float(codec::float_to_bf16(rows[i]));
      ASSERT_EQ(back[i], stored);
    }
  });
}

TEST_P(Coding, GivesTheBitsOfTheReference) {
  const KernelTable& scalar = table_named("scalar");
  for_each_geometry([&](const PartGeometry& geometry) {
    const std::vector<float> rows = random_rows(geometry.block_size, geometry.head_dim, 4);
    const std::vector<std::byte> part = encoded(table(), geometry, rows);
    ASSERT_EQ(part, encoded(scalar, geometry, rows));
    ASSERT_EQ(decoded(table(), geometry, part), decoded(scalar, geometry, part));
  });
}

TEST_P(Coding, ReadsAnyRowsOfAPart) {
  for_each_geometry([this](const PartGeometry& geometry) {
    const std::vector<float> rows = random_rows(geometry.block_size, geometry.head_dim, 5);
    const std::vector<std::byte> part = encoded(table(), geometry, rows);
    const std::vector<float> all = decoded(table(), geometry, part);
    const auto dim = static_cast<std::size_t>(geometry.head_dim);
    for (const int first : {0, geometry.block_size / 3, geometry.block_size - 1}) {
      const int n = std::min(geometry.block_size - first, geometry.block_size / 2 + 1);
      std::vector<float> some(static_cast<std::size_t>(n) * dim + 1, 77.0F);
      testing::decoder(table(), geometry)(testing::shape_of(geometry), part.data(), first, n,
                                          some.data());
      ASSERT_EQ(some.back(), 77.0F);
      some.pop_back();
      const auto begin = all.begin() + first * geometry.head_dim;
      ASSERT_EQ(some, std::vector<float>(begin, begin + n * geometry.head_dim));
    }
  });
}

TEST_P(Coding, WritesNoByteAfterThePart) {
  for_each_geometry([this](const PartGeometry& geometry) {
    const std::vector<float> rows = random_rows(geometry.block_size, geometry.head_dim, 6);
    std::vector<std::byte> part(codec::part_bytes(geometry) + 64, std::byte{0xA5});
    testing::encoder(table(), geometry)(testing::shape_of(geometry), rows.data(), 0,
                                        geometry.block_size, part.data());
    for (std::size_t i = part.size() - 64; i < part.size(); ++i) {
      ASSERT_EQ(part[i], std::byte{0xA5});
    }
  });
}

// P9 (openvinotoolkit/openvino #37095): a flat group has no range to divide by.
TEST_P(Coding, FlatGroupsDecodeToTheirConstant) {
  for (const float constant : {0.0F, 0.5F, -3.0F, 0.1F, 1e-7F, -65504.0F, 65504.0F}) {
    for_each_geometry([&](const PartGeometry& geometry) {
      if (geometry.format.code == Code::kBf16 || geometry.format.is_vector()) return;
      const auto n = static_cast<std::size_t>(geometry.block_size * geometry.head_dim);
      const std::vector<float> rows(n, constant);
      for (const float value : decoded(table(), geometry, encoded(table(), geometry, rows))) {
        ASSERT_NEAR(value, constant, std::max(std::fabs(constant) * 0x1p-11F, 0x1p-25F));
      }
    });
  }
}

TEST_P(Coding, OneFlatGroupBesideNormalOnes) {
  for_each_geometry([this](const PartGeometry& geometry) {
    if (!is_affine(geometry.format)) return;
    std::vector<float> rows = random_rows(geometry.block_size, geometry.head_dim, 7);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i % static_cast<std::size_t>(geometry.head_dim) < 32) rows[i] = 0.5F;
    }
    const auto back = decoded(table(), geometry, encoded(table(), geometry, rows));
    expect_within_half_a_step(geometry, rows, back);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i % static_cast<std::size_t>(geometry.head_dim) < 32 &&
          geometry.format.group_size == 32) {
        ASSERT_EQ(back[i], 0.5F);
      }
    }
  });
}

TEST_P(Coding, RangesAtTheEndsOfFp16StayBounded) {
  for (const float size : {1e-9F, 3e-7F, 1e-6F, 1e-4F, 1e3F, 65504.0F}) {
    for_each_geometry([&](const PartGeometry& geometry) {
      if (!is_affine(geometry.format)) return;
      std::vector<float> rows = random_rows(geometry.block_size, geometry.head_dim, 8);
      float largest = 0.0F;
      for (const float value : rows) largest = std::max(largest, std::fabs(value));
      for (float& value : rows) value *= size / largest;
      expect_within_half_a_step(geometry, rows,
                                decoded(table(), geometry, encoded(table(), geometry, rows)));
    });
  }
}

std::vector<Format> stored_formats() {
  std::vector<Format> formats;
  for (const Format& format : testing::all_formats()) {
    if (!format.hadamard) formats.push_back(format);
  }
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Levels, Coding,
                         ::testing::Combine(::testing::ValuesIn(testing::level_names()),
                                            ::testing::ValuesIn(stored_formats())),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  testing::label(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace kvpool::kernels
