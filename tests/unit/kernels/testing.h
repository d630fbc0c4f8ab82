#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "codec/codec.h"
#include "codec/vector_quantizer.h"
#include "kernels/kernels.h"

namespace kvpool::testing {

/// Levels by name, so that a build's list stands in the test names.
inline std::vector<std::string> level_names() {
  std::vector<std::string> names;
  for (const kernels::Level& level : kernels::levels()) names.emplace_back(level.name);
  return names;
}

inline bool has_level(const std::string& name) {
  const auto levels = kernels::levels();
  return std::any_of(levels.begin(), levels.end(), [&](const kernels::Level& level) {
    return level.name == name && level.table != nullptr;
  });
}

#define KVPOOL_REQUIRE_LEVEL(name) \
  if (!::kvpool::testing::has_level(name)) GTEST_SKIP() << "this CPU lacks " << (name)

inline constexpr int kHeadDims[] = {40, 64, 80, 96, 112, 128, 192, 256};

inline std::vector<codec::Format> all_formats() {
  using enum codec::Code;
  std::vector<codec::Format> formats = {{kFp32}, {kFp16}, {kBf16}};
  for (const codec::Code code : {kInt8, kInt4, kInt2, kKivi4, kKivi2}) {
    for (const std::uint8_t group_size : {std::uint8_t{32}, std::uint8_t{64}}) {
      for (const bool hadamard : {false, true}) formats.push_back({code, group_size, hadamard});
    }
  }
  for (const codec::Code code : {kVecInfer1, kVecInfer1_5, kVecInfer2, kVecInfer3, kVecInfer4}) {
    formats.push_back({code});
  }
  return formats;
}

inline std::string label(const codec::Format& format) {
  std::string text(codec::name(format.code));
  std::replace(text.begin(), text.end(), '.', '_');
  if (format.is_vector()) return text;
  if (!format.is_raw()) text += "_g" + std::to_string(format.group_size);
  return format.hadamard ? text + "_hadamard" : text;
}

/// Normal deviates with a mean and a width a channel, as keys have; of mean square 1.
inline std::vector<float> random_rows(int n_rows, int dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> mean(static_cast<std::size_t>(dim));
  std::vector<float> width(mean.size());
  for (float& m : mean) m = 0.5F * normal(random);
  for (float& w : width) w = std::exp(0.5F * normal(random));
  std::vector<float> rows(static_cast<std::size_t>(n_rows) * mean.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = mean[i % mean.size()] + width[i % mean.size()] * normal(random);
  }
  double squares = 0.0;
  for (const float x : rows) squares += x * x;
  const auto size = static_cast<float>(std::sqrt(squares / static_cast<double>(rows.size())));
  for (float& x : rows) x /= size;
  return rows;
}

using kernels::shape_of;

/// A quantizer of up to 4 heads, each with centroids, a mean and scales of its own; odd ones are
/// rotated.
inline std::shared_ptr<const codec::VectorQuantizer> make_quantizer(codec::VectorCode code,
                                                                    int head_dim) {
  std::mt19937 random(77);
  std::mt19937 of_rotations(78);
  std::normal_distribution<float> normal;
  auto quantizer = std::make_shared<codec::VectorQuantizer>();
  for (int head = 0; head < 4; ++head) {
    std::vector<std::int8_t> centroids((std::size_t{1} << code.code_bits) *
                                       static_cast<std::size_t>(code.sub_dim));
    for (std::int8_t& x : centroids) {
      x = static_cast<std::int8_t>(std::clamp(40.0F * normal(random), -127.0F, 127.0F));
    }
    quantizer->codebooks.push_back(codec::make_codebook(
        code.sub_dim, code.code_bits, 0.025F + 0.001F * static_cast<float>(head), centroids));
    codec::HeadTransform& transform = quantizer->transforms.emplace_back();
    for (int d = 0; d < head_dim; ++d) {
      transform.smooth.push_back(std::exp(0.3F * normal(random)));
      transform.mean.push_back(0.3F * normal(random));
    }
    if (head % 2 == 0) continue;
    std::vector<std::int8_t> rotation(static_cast<std::size_t>(head_dim * head_dim));
    for (std::int8_t& x : rotation) {
      x = static_cast<std::int8_t>(std::clamp(40.0F * normal(of_rotations), -127.0F, 127.0F));
    }
    codec::set_rotation(transform, rotation);
  }
  return quantizer;
}

/// The format with a quantizer, if it is one that needs it.
inline codec::Format complete(codec::Format format, codec::Role role, int head_dim) {
  if (!format.is_vector()) return format;
  static std::map<std::tuple<codec::Code, codec::Role, int>,
                  std::shared_ptr<const codec::VectorQuantizer>>
      known;
  auto& quantizer = known[{format.code, role, head_dim}];
  if (quantizer == nullptr) {
    quantizer = make_quantizer(codec::vector_code(format.code, role), head_dim);
  }
  format.quantizer = quantizer.get();
  return format;
}

inline codec::PartGeometry geometry_of(const codec::Format& format, codec::Role role,
                                       int block_size, int head_dim) {
  return {complete(format, role, head_dim), role, block_size, head_dim};
}

inline auto encoder(const kernels::KernelTable& table, const codec::PartGeometry& geometry) {
  const auto layout = kernels::layout_of(geometry.format, geometry.role);
  return geometry.role == codec::Role::kKeys ? table.of_keys(layout).encode
                                             : table.of_values(layout).encode;
}

inline auto decoder(const kernels::KernelTable& table, const codec::PartGeometry& geometry) {
  const auto layout = kernels::layout_of(geometry.format, geometry.role);
  return geometry.role == codec::Role::kKeys ? table.of_keys(layout).decode
                                             : table.of_values(layout).decode;
}

/// A part of all the rows, as `table` encodes them, untransformed.
inline std::vector<std::byte> encoded(const kernels::KernelTable& table,
                                      const codec::PartGeometry& geometry,
                                      const std::vector<float>& rows) {
  std::vector<std::byte> part(codec::part_bytes(geometry));
  encoder(table, geometry)(shape_of(geometry), rows.data(), 0, geometry.block_size, part.data());
  return part;
}

/// A part of random codes of a vecinfer format, which are codes all: to look for the nearest takes
/// most of a test's time.
inline std::vector<std::byte> random_codes(const codec::PartGeometry& geometry, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> part(codec::part_bytes(geometry));
  for (std::byte& code : part) code = static_cast<std::byte>(random());
  return part;
}

inline std::vector<float> decoded(const kernels::KernelTable& table,
                                  const codec::PartGeometry& geometry,
                                  const std::vector<std::byte>& part) {
  std::vector<float> rows(static_cast<std::size_t>(geometry.block_size) *
                          static_cast<std::size_t>(geometry.head_dim));
  decoder(table, geometry)(shape_of(geometry), part.data(), 0, geometry.block_size, rows.data());
  return rows;
}

}  // namespace kvpool::testing
