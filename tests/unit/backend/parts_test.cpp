// The codecs composed of MLX's ops beside those of the kernels, byte by byte.

#include "backend/ops/parts.h"

#include <gtest/gtest.h>
#include <mlx/ops.h>

#include <cstring>
#include <memory>

#include "codec/space.h"
#include "unit/kernels/testing.h"

namespace mx = mlx::core;

namespace kvpool::detail {
namespace {

using codec::PartGeometry;

constexpr int kHeads = 4;
constexpr int kParts = 2;  ///< Of each head, which come one behind the other.

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

/// Calls code(geometry of its head, i) for each of n parts.
void each_part(PartGeometry geometry, std::size_t n, const auto& code) {
  for (std::size_t i = 0; i < n; ++i) {
    geometry.kv_head = static_cast<int>(i / (n / kHeads));
    code(geometry, i);
  }
}

std::vector<std::byte> encoded(const PartGeometry& geometry, const std::vector<float>& rows) {
  const std::size_t part = codec::part_bytes(geometry);
  const std::size_t n = rows.size() / rows_size(geometry);
  std::vector<std::byte> bytes(part * n);
  each_part(geometry, n, [&](const PartGeometry& own, std::size_t i) {
    codec::encode(own, rows.data() + i * rows_size(own), own.block_size, bytes.data() + i * part);
  });
  return bytes;
}

std::vector<float> decoded(const PartGeometry& geometry, const std::vector<std::byte>& bytes) {
  const std::size_t part = codec::part_bytes(geometry);
  const std::size_t n = bytes.size() / part;
  std::vector<float> rows(n * rows_size(geometry));
  each_part(geometry, n, [&](const PartGeometry& own, std::size_t i) {
    codec::decode(own, bytes.data() + i * part, 0, own.block_size,
                  rows.data() + i * rows_size(own));
  });
  return rows;
}

std::unique_ptr<VectorParts> vectors_of(const PartGeometry& geometry) {
  if (!geometry.format.is_vector()) return nullptr;
  return std::make_unique<VectorParts>(*geometry.format.quantizer);
}

std::vector<std::byte> encoded_by_ops(const PartGeometry& geometry,
                                      const std::vector<float>& rows) {
  const auto n = static_cast<int>(rows.size() / rows_size(geometry));
  const mx::array array(rows.data(), {kHeads, n / kHeads, geometry.block_size, geometry.head_dim});
  return bytes_of(encode_parts(geometry, vectors_of(geometry).get(), array));
}

std::vector<float> decoded_by_ops(const PartGeometry& geometry,
                                  const std::vector<std::byte>& bytes) {
  const auto part = static_cast<int>(codec::part_bytes(geometry));
  const mx::array array(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                        {kHeads, static_cast<int>(bytes.size()) / part / kHeads, part}, mx::uint8);
  return floats_of(decode_parts(geometry, vectors_of(geometry).get(), array));
}

std::vector<float> random_parts(const PartGeometry& geometry, unsigned seed) {
  return testing::random_rows(kHeads * kParts * geometry.block_size, geometry.head_dim, seed);
}

class OpsParts : public ::testing::TestWithParam<codec::Format> {
 protected:
  template <typename Check>
  void each_geometry(Check check) const {
    for (const codec::Role role : {codec::Role::kKeys, codec::Role::kValues}) {
      for (const int dim : {8, 24, 40, 64, 80, 96, 112, 128, 192, 256}) {
        for (const int block_size : block_sizes()) {
          SCOPED_TRACE(::testing::Message() << (role == codec::Role::kKeys ? "keys" : "values")
                                            << " dim " << dim << " block " << block_size);
          check(testing::geometry_of(GetParam(), role, block_size, dim));
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  /// Integers come in tiles of 16 tokens; vectors, which take long, do not.
  static std::vector<int> block_sizes() {
    return GetParam().is_vector() ? std::vector{1, 6, 21} : std::vector{1, 4, 16, 21, 32, 48};
  }

  static void expect_same_bytes(const PartGeometry& geometry, const std::vector<float>& rows) {
    const std::vector<std::byte> expected = encoded(geometry, rows);
    const std::vector<std::byte> got = encoded_by_ops(geometry, rows);
    ASSERT_EQ(got.size(), expected.size());
    EXPECT_TRUE(got == expected);
  }
};

class OpsIntegerParts : public OpsParts {};

TEST_P(OpsIntegerParts, EncodesTheSameBytes) {
  each_geometry(
      [](const PartGeometry& geometry) { expect_same_bytes(geometry, random_parts(geometry, 1)); });
}

/// Without the transform, whose sums of such rows round as they are ordered.
class OpsPartsAsTheyAre : public OpsParts {};

TEST_P(OpsPartsAsTheyAre, EncodesFlatTinyAndLargeRowsTheSame) {
  each_geometry([](const PartGeometry& geometry) {
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
    const std::vector<std::byte> bytes = encoded(geometry, random_parts(geometry, 2));
    const std::vector<float> expected = decoded(geometry, bytes);
    const std::vector<float> got = decoded_by_ops(geometry, bytes);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-5) << i;
  });
}

class OpsVectorParts : public OpsParts {};

/// Squared distances of rows, in their space, from the centroids that stand for them.
std::vector<double> distances(const PartGeometry& geometry, const std::vector<float>& rows,
                              const std::vector<std::byte>& bytes) {
  const int sub_dim = geometry.format.quantizer->codebooks.front()->sub_dim;
  const std::size_t part = codec::part_bytes(geometry);
  const std::size_t size = rows_size(geometry);
  std::vector<double> result(rows.size() / static_cast<std::size_t>(sub_dim));
  each_part(geometry, rows.size() / size, [&](const PartGeometry& own, std::size_t i) {
    const auto first = rows.begin() + static_cast<std::ptrdiff_t>(i * size);
    std::vector<float> stored(first, first + static_cast<std::ptrdiff_t>(size));
    codec::Space(own.format, own.kv_head).enter(stored.data(), own.block_size, own.head_dim);
    const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(i * part);
    const std::vector<float> centroids =
        testing::decoded(kernels::active(), own, {from, from + static_cast<std::ptrdiff_t>(part)});
    for (std::size_t d = 0; d < size; ++d) {
      const double difference = double{stored[d]} - double{centroids[d]};
      result[(i * size + d) / static_cast<std::size_t>(sub_dim)] += difference * difference;
    }
  });
  return result;
}

/// Which of two centroids that are as near is a matter of rounding.
TEST_P(OpsVectorParts, EncodesTheSameCodesButForTies) {
  std::size_t n_vectors = 0;
  std::size_t n_different = 0;
  each_geometry([&](const PartGeometry& geometry) {
    const std::vector<float> rows = random_parts(geometry, 1);
    const std::vector<std::byte> expected = encoded(geometry, rows);
    const std::vector<std::byte> got = encoded_by_ops(geometry, rows);
    ASSERT_EQ(got.size(), expected.size());
    const std::vector<double> least = distances(geometry, rows, expected);
    const std::vector<double> distance = distances(geometry, rows, got);
    for (std::size_t i = 0; i < least.size(); ++i) {
      ASSERT_NEAR(distance[i], least[i], 1e-5 * (1.0 + least[i])) << i;
      if (distance[i] != least[i]) ++n_different;
    }
    n_vectors += least.size();
  });
  EXPECT_LT(n_different, n_vectors / 1000);
}

std::vector<codec::Format> formats(const auto& wanted) {
  std::vector<codec::Format> formats = testing::all_formats();
  std::erase_if(formats, [&](const codec::Format& format) { return !wanted(format); });
  return formats;
}
bool is_packed(const codec::Format& format) { return !format.is_raw(); }
bool is_integer(const codec::Format& format) { return is_packed(format) && !format.is_vector(); }
bool is_untransformed(const codec::Format& format) {
  return is_integer(format) && !format.hadamard;
}
bool is_vector(const codec::Format& format) { return format.is_vector(); }

INSTANTIATE_TEST_SUITE_P(Formats, OpsPartsAsTheyAre, ::testing::ValuesIn(formats(is_untransformed)),
                         [](const auto& test) { return testing::label(test.param); });
INSTANTIATE_TEST_SUITE_P(Formats, OpsIntegerParts, ::testing::ValuesIn(formats(is_integer)),
                         [](const auto& test) { return testing::label(test.param); });
INSTANTIATE_TEST_SUITE_P(Formats, OpsVectorParts, ::testing::ValuesIn(formats(is_vector)),
                         [](const auto& test) { return testing::label(test.param); });
INSTANTIATE_TEST_SUITE_P(Formats, OpsParts, ::testing::ValuesIn(formats(is_packed)),
                         [](const auto& test) { return testing::label(test.param); });

}  // namespace
}  // namespace kvpool::detail
