// The codecs composed of MLX's ops beside those of the kernels, byte by byte.

#include "backend/ops/parts.h"

#include <gtest/gtest.h>
#include <mlx/ops.h>

#include <cstring>

#include "unit/kernels/testing.h"

namespace mx = mlx::core;

namespace kvpool::detail {
namespace {

using codec::PartGeometry;

constexpr int kParts = 3;
constexpr int kBlockSizes[] = {1, 4, 16, 21, 32, 48};

std::size_t rows_size(const PartGeometry& geometry) {
  return static_cast<std::size_t>(geometry.block_size) *
         static_cast<std::size_t>(geometry.head_dim);
}

std::vector<std::byte> bytes_of(const mx::array& a) {
  mx::array plain = mx::contiguous(a);
  plain.eval();
  std::vector<std::byte> bytes(plain.nbytes());
  std::memcpy(bytes.data(), plain.data<std::byte>(), bytes.size());
  return bytes;
}

std::vector<float> floats_of(const mx::array& a) {
  const std::vector<std::byte> bytes = bytes_of(a);
  std::vector<float> floats(bytes.size() / 4);
  std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

std::vector<std::byte> encoded(const PartGeometry& geometry, const std::vector<float>& rows) {
  const std::size_t part = codec::part_bytes(geometry);
  std::vector<std::byte> bytes(part * (rows.size() / rows_size(geometry)));
  for (std::size_t i = 0; i * part < bytes.size(); ++i) {
    codec::encode(geometry, rows.data() + i * rows_size(geometry), geometry.block_size,
                  bytes.data() + i * part);
  }
  return bytes;
}

std::vector<float> decoded(const PartGeometry& geometry, const std::vector<std::byte>& bytes) {
  const std::size_t part = codec::part_bytes(geometry);
  std::vector<float> rows(bytes.size() / part * rows_size(geometry));
  for (std::size_t i = 0; i * part < bytes.size(); ++i) {
    codec::decode(geometry, bytes.data() + i * part, 0, geometry.block_size,
                  rows.data() + i * rows_size(geometry));
  }
  return rows;
}

mx::array rows_array(const PartGeometry& geometry, const std::vector<float>& rows) {
  return mx::array(rows.data(), {static_cast<int>(rows.size() / rows_size(geometry)),
                                 geometry.block_size, geometry.head_dim});
}

mx::array parts_array(const PartGeometry& geometry, const std::vector<std::byte>& bytes) {
  const auto part = static_cast<int>(codec::part_bytes(geometry));
  return mx::array(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                   {static_cast<int>(bytes.size()) / part, part}, mx::uint8);
}

class OpsParts : public ::testing::TestWithParam<codec::Format> {
 protected:
  template <typename Check>
  void each_geometry(Check check) const {
    for (const codec::Role role : {codec::Role::kKeys, codec::Role::kValues}) {
      for (const int dim : {8, 24, 40, 64, 80, 96, 112, 128, 192, 256}) {
        for (const int block_size : kBlockSizes) {
          SCOPED_TRACE(::testing::Message() << (role == codec::Role::kKeys ? "keys" : "values")
                                            << " dim " << dim << " block " << block_size);
          check(PartGeometry{GetParam(), role, block_size, dim});
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  void expect_same_bytes(const PartGeometry& geometry, const std::vector<float>& rows) const {
    const std::vector<std::byte> expected = encoded(geometry, rows);
    const std::vector<std::byte> got = bytes_of(encode_parts(geometry, rows_array(geometry, rows)));
    ASSERT_EQ(got.size(), expected.size());
    EXPECT_TRUE(got == expected);
  }
};

TEST_P(OpsParts, EncodesTheSameBytes) {
  each_geometry([this](const PartGeometry& geometry) {
    expect_same_bytes(geometry,
                      testing::random_rows(kParts * geometry.block_size, geometry.head_dim, 1));
  });
}

/// Without the transform, whose sums of such rows round as they are ordered.
class OpsPartsAsTheyAre : public OpsParts {};

TEST_P(OpsPartsAsTheyAre, EncodesFlatTinyAndLargeRowsTheSame) {
  each_geometry([this](const PartGeometry& geometry) {
    std::vector<float> rows;
    for (const float number : {0.0F, -0.0F, 0.5F, -3.0F, 1e-7F, -1e-9F, 65504.0F, -65504.0F}) {
      rows.insert(rows.end(), rows_size(geometry), number);
      rows.back() *= 0.25F;  // One that is off, and whose difference may be too small for fp16.
    }
    expect_same_bytes(geometry, rows);
  });
}

TEST_P(OpsParts, DecodesWhatTheKernelsEncode) {
  each_geometry([](const PartGeometry& geometry) {
    const std::vector<std::byte> bytes =
        encoded(geometry, testing::random_rows(kParts * geometry.block_size, geometry.head_dim, 2));
    const std::vector<float> expected = decoded(geometry, bytes);
    const std::vector<float> got = floats_of(decode_parts(geometry, parts_array(geometry, bytes)));
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-5) << i;
  });
}

std::vector<codec::Format> packed_formats() {
  std::vector<codec::Format> formats = testing::all_formats();
  // The ops level has no vecinfer: PagedKVCache refuses it there.
  std::erase_if(formats,
                [](const codec::Format& format) { return format.is_raw() || format.is_vector(); });
  return formats;
}

std::vector<codec::Format> formats_without_transform() {
  std::vector<codec::Format> formats = packed_formats();
  std::erase_if(formats, [](const codec::Format& format) { return format.hadamard; });
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Formats, OpsPartsAsTheyAre,
                         ::testing::ValuesIn(formats_without_transform()),
                         [](const auto& test) { return testing::label(test.param); });
INSTANTIATE_TEST_SUITE_P(Formats, OpsParts, ::testing::ValuesIn(packed_formats()),
                         [](const auto& test) { return testing::label(test.param); });

}  // namespace
}  // namespace kvpool::detail
