#include "backend/ops/vector_parts.h"

#include <mlx/ops.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "backend/ops/blocks.h"
#include "backend/ops/parts.h"
#include "codec/codec.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

using codec::Codebook;
using codec::HeadTransform;
using codec::VectorQuantizer;

/// Distances that nearest() holds at once.
constexpr int kDistances = 1 << 20;

mx::ShapeElem as_extent(std::size_t n) { return static_cast<mx::ShapeElem>(n); }

/// Numbers of each head, as many, that broadcast over its rows.
template <typename T>
mx::array by_head(const std::vector<T>& numbers, std::size_t n_heads) {
  return mx::array(numbers.data(), {as_extent(n_heads), 1, 1, as_extent(numbers.size() / n_heads)});
}

mx::array transform_numbers(const VectorQuantizer& quantizer,
                            std::vector<float> HeadTransform::*part) {
  std::vector<float> numbers;
  for (const HeadTransform& transform : quantizer.transforms) {
    numbers.insert(numbers.end(), (transform.*part).begin(), (transform.*part).end());
  }
  return by_head(numbers, quantizer.transforms.size());
}

mx::array scales(const VectorQuantizer& quantizer) {
  std::vector<float> numbers;
  for (const auto& book : quantizer.codebooks) numbers.push_back(book->scale);
  return by_head(numbers, numbers.size());
}

/// Whether all heads are turned by Hadamard, or none is turned.
bool turn_alike(const VectorQuantizer& quantizer) {
  const bool hadamard = quantizer.transforms.front().hadamard;
  return std::ranges::all_of(quantizer.transforms, [&](const HeadTransform& transform) {
    return transform.rotation.empty() && transform.hadamard == hadamard;
  });
}

/// What turns each head's rows, as a matrix on their right; none if all heads are turned alike.
std::optional<mx::array> rotations(const VectorQuantizer& quantizer) {
  if (turn_alike(quantizer)) return std::nullopt;
  const std::size_t dim = quantizer.transforms.front().smooth.size();
  const int n = static_cast<int>(dim);
  std::vector<float> numbers;
  for (const HeadTransform& transform : quantizer.transforms) {
    std::vector<float> matrix = transform.rotation;
    if (matrix.empty()) {
      matrix.resize(dim * dim);
      for (std::size_t d = 0; d < dim; ++d) matrix[d * dim + d] = 1.0F;
      if (transform.hadamard) codec::hadamard(matrix.data(), n, n);
    }
    numbers.insert(numbers.end(), matrix.begin(), matrix.end());
  }
  return mx::array(numbers.data(), {as_extent(quantizer.transforms.size()), 1, n, n});
}

std::optional<mx::array> transposed(const std::optional<mx::array>& matrices) {
  if (!matrices) return std::nullopt;
  return mx::swapaxes(*matrices, 2, 3);
}

/// The codebooks, once each, and which is a head's.
std::pair<std::vector<const Codebook*>, std::vector<std::uint32_t>> different_books(
    const VectorQuantizer& quantizer) {
  std::vector<const Codebook*> books;
  std::vector<std::uint32_t> of_heads;
  for (const auto& book : quantizer.codebooks) {
    const auto known = std::find(books.begin(), books.end(), book.get());
    of_heads.push_back(static_cast<std::uint32_t>(known - books.begin()));
    if (known == books.end()) books.push_back(book.get());
  }
  return {std::move(books), std::move(of_heads)};
}

mx::array first_centroids(const VectorQuantizer& quantizer) {
  std::vector<std::uint32_t> first = different_books(quantizer).second;
  for (std::uint32_t& number : first) {
    number *= static_cast<std::uint32_t>(quantizer.codebooks.front()->n_codes());
  }
  return by_head(first, first.size());
}

mx::array all_centroids(const VectorQuantizer& quantizer) {
  std::vector<std::int8_t> numbers;
  for (const Codebook* book : different_books(quantizer).first) {
    numbers.insert(numbers.end(), book->centroids.begin(), book->centroids.end());
  }
  const int sub_dim = quantizer.codebooks.front()->sub_dim;
  return mx::array(numbers.data(), {as_extent(numbers.size()) / sub_dim, sub_dim});
}

mx::array number(std::uint32_t n) { return mx::array(n, mx::uint32); }

}  // namespace

VectorParts::VectorParts(const VectorQuantizer& quantizer)
    : sub_dim_(quantizer.codebooks.front()->sub_dim),
      code_bits_(quantizer.codebooks.front()->code_bits),
      head_dim_(static_cast<int>(quantizer.transforms.front().smooth.size())),
      hadamard_(quantizer.transforms.front().hadamard),
      smooth_(transform_numbers(quantizer, &HeadTransform::smooth)),
      mean_(transform_numbers(quantizer, &HeadTransform::mean)),
      scale_(scales(quantizer)),
      rotation_(rotations(quantizer)),
      back_(transposed(rotation_)),
      first_centroid_(first_centroids(quantizer)),
      centroids_(all_centroids(quantizer)) {}

mx::array VectorParts::encode(const mx::array& rows) const {
  const mx::array vectors = mx::multiply(enter_space(rows), mx::reciprocal(scale_));
  const mx::array codes = nearest(mx::reshape(vectors, {rows.shape(0), -1, sub_dim_}));
  return pack(mx::reshape(codes, {rows.shape(0), rows.shape(1), rows.shape(2), -1}));
}

mx::array VectorParts::decode(const mx::array& parts, int block_size) const {
  const mx::array codes = mx::add(unpack(parts, block_size), first_centroid_);
  const mx::array vectors = mx::reshape(mx::take(centroids_, codes, 0),
                                        {parts.shape(0), parts.shape(1), block_size, head_dim_});
  return leave_space(mx::multiply(mx::astype(vectors, mx::float32), scale_));
}

mx::array VectorParts::enter_space(const mx::array& rows) const {
  return turn(mx::divide(mx::subtract(rows, mean_), smooth_));
}

mx::array VectorParts::leave_space(const mx::array& rows) const {
  return mx::add(mx::multiply(turn_back(rows), smooth_), mean_);
}

mx::array VectorParts::turn(const mx::array& rows) const {
  if (rotation_) return mx::matmul(rows, *rotation_);
  return hadamard_ ? hadamard(rows) : rows;
}

mx::array VectorParts::turn_back(const mx::array& rows) const {
  if (back_) return mx::matmul(rows, *back_);
  return hadamard_ ? hadamard(rows) : rows;
}

/// Codes (n_heads, n) of vectors (n_heads, n, sub_dim): of the largest x . c - |c|^2 / 2, as the
/// kernels have it. Not a matrix product, which some devices round to fewer bits.
mx::array VectorParts::nearest(const mx::array& vectors) const {
  const int n_heads = vectors.shape(0);
  const int n = vectors.shape(1);
  const int n_codes = 1 << code_bits_;
  const mx::array codes = mx::reshape(mx::arange(0, n_codes, mx::uint32), {1, n_codes});
  const mx::array books = mx::astype(
      mx::take(centroids_, mx::add(mx::reshape(first_centroid_, {n_heads, 1}), codes), 0),
      mx::float32);
  const mx::array half_squares = mx::multiply(mx::sum(mx::square(books), -1), mx::array(0.5F));
  const mx::array channels = mx::contiguous(mx::swapaxes(books, 1, 2));
  const int step = std::max(1, kDistances / (n_heads * n_codes));
  std::vector<mx::array> found;
  for (int from = 0; from < n; from += step) {
    mx::array some = cut(vectors, 1, from, std::min(n, from + step));
    // One after the other, so that their memory is not held at once.
    if (!found.empty()) some = mx::depends({some}, {found.back()}).front();
    mx::array nearness = mx::negative(mx::expand_dims(half_squares, 1));
    for (int j = 0; j < sub_dim_; ++j) {
      nearness =
          mx::add(nearness, mx::multiply(cut(some, 2, j, j + 1), cut(channels, 1, j, j + 1)));
    }
    found.push_back(mx::argmax(nearness, -1));
  }
  return found.size() == 1 ? found.front() : mx::concatenate(found, 1);
}

/// Codes (n_heads, n, tokens, sub-vectors) as codec.h lays them out: low bytes, then high nibbles.
mx::array VectorParts::pack(const mx::array& codes) const {
  const mx::Shape flat{codes.shape(0), codes.shape(1), -1};
  const mx::array by_vector = mx::swapaxes(codes, 2, 3);
  const mx::array low = mx::reshape(mx::astype(by_vector, mx::uint8), flat);
  if (code_bits_ == 8) return low;
  const mx::array high = mx::right_shift(by_vector, number(8));
  const mx::array even = mx::pad(high, {{0, 0}, {0, 0}, {0, 0}, {0, codes.shape(2) % 2}});
  const mx::array pairs = mx::reshape(even, {codes.shape(0), codes.shape(1), -1, 2});
  const mx::array bytes =
      mx::bitwise_or(cut(pairs, 3, 0, 1), mx::left_shift(cut(pairs, 3, 1, 2), number(4)));
  return mx::concatenate({low, mx::reshape(mx::astype(bytes, mx::uint8), flat)}, 2);
}

mx::array VectorParts::unpack(const mx::array& parts, int block_size) const {
  const int n_subs = head_dim_ / sub_dim_;
  const auto by_vector = [&](const mx::array& bytes, int n_tokens) {
    return mx::reshape(bytes, {parts.shape(0), parts.shape(1), n_subs, n_tokens});
  };
  const int n_low = n_subs * block_size;
  mx::array codes = mx::astype(by_vector(cut(parts, 2, 0, n_low), block_size), mx::uint32);
  if (code_bits_ != 8) {
    const mx::array bytes = mx::astype(cut(parts, 2, n_low, parts.shape(2)), mx::uint32);
    const mx::array pairs =
        mx::stack({mx::bitwise_and(bytes, number(15)), mx::right_shift(bytes, number(4))}, -1);
    const mx::array high = cut(by_vector(pairs, (block_size + 1) / 2 * 2), 3, 0, block_size);
    codes = mx::bitwise_or(codes, mx::left_shift(high, number(8)));
  }
  return mx::swapaxes(codes, 2, 3);
}

}  // namespace kvpool::detail
