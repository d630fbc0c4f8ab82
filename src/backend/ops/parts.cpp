#include "backend/ops/parts.h"

#include <mlx/ops.h>

#include <cmath>
#include <utility>
#include <vector>

#include "codec/half.h"
#include "kernels/integer_layout.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

using codec::Role;
using kernels::kTileTokens;

constexpr int kWordBits = 32;
constexpr int kWordBytes = 4;

int bits_of(codec::Code code) {
  switch (code) {
    case codec::Code::kInt8:
      return 8;
    case codec::Code::kInt4:
    case codec::Code::kKivi4:
      return 4;
    default:
      return 2;
  }
}

/// Columns `from` to `to` of (n, columns).
mx::array columns(const mx::array& a, std::size_t from, std::size_t to) {
  return mx::slice(a, {0, static_cast<mx::ShapeElem>(from)},
                   {a.shape(0), static_cast<mx::ShapeElem>(to)});
}

mx::array in_bytes(const mx::array& a) {
  return mx::reshape(mx::view(mx::contiguous(a), mx::uint8), {a.shape(0), -1});
}

/// What an integer part's numbers are, and where they lie (codec.h).
class Parts {
 public:
  explicit Parts(const codec::PartGeometry& geometry)
      : role_(geometry.role),
        bits_(bits_of(geometry.format.code)),
        by_channel_(geometry.role == Role::kKeys && geometry.format.code >= codec::Code::kKivi4),
        hadamard_(geometry.format.hadamard),
        shape_{geometry.block_size, geometry.head_dim, geometry.format.group_size},
        dim_(geometry.head_dim) {}

  mx::array encode(const mx::array& rows) const {
    const mx::array turned = hadamard_ ? hadamard(rows) : rows;
    std::vector<mx::array> pieces;
    if (by_channel_) {
      const auto [scale, bias] = fit(mx::min(turned, 1, true), mx::max(turned, 1, true));
      pieces = {in_bytes(scale), in_bytes(bias)};
      const mx::array codes = quantize(turned, scale, bias);
      for (const Tiles& tiles : tiles_of_block()) {
        pieces.push_back(mx::reshape(pack(cut(codes, tiles), tiles), {rows.shape(0), -1}));
      }
    } else {
      for (const Tiles& tiles : tiles_of_block()) {
        pieces.push_back(encode_groups(cut(turned, tiles), tiles));
      }
    }
    return mx::concatenate(pieces, 1);
  }

  mx::array decode(const mx::array& parts) const {
    const int n = parts.shape(0);
    std::vector<mx::array> pieces;
    std::size_t at = by_channel_ ? kernels::channel_bytes(shape_) : 0;
    for (const Tiles& tiles : tiles_of_block()) {
      const std::size_t bytes = tile_bytes(tiles) * kernels::as_size(tiles.n);
      const mx::array tile =
          mx::reshape(columns(parts, at, at + bytes),
                      {n * tiles.n, static_cast<mx::ShapeElem>(tile_bytes(tiles))});
      const mx::array rows =
          by_channel_ ? mx::astype(unpack(tile, tiles), mx::float32) : decode_groups(tile, tiles);
      pieces.push_back(mx::reshape(rows, {n, tiles.n * tiles.n_tokens, dim_}));
      at += bytes;
    }
    mx::array rows = mx::concatenate(pieces, 1);
    if (by_channel_) {
      const std::size_t half = kernels::channel_bytes(shape_) / 2;
      rows = mx::add(mx::multiply(halves(columns(parts, 0, half), {n, 1, dim_}), rows),
                     halves(columns(parts, half, 2 * half), {n, 1, dim_}));
    }
    return hadamard_ ? hadamard(rows) : rows;
  }

 private:
  /// Consecutive tiles of as many tokens.
  struct Tiles {
    int first_token;
    int n;
    int n_tokens;
  };

  /// The full tiles, then the one that is not.
  std::vector<Tiles> tiles_of_block() const {
    std::vector<Tiles> tiles;
    const int n_full = shape_.block_size / kTileTokens;
    const int n_left = shape_.block_size % kTileTokens;
    if (n_full > 0) tiles.push_back({0, n_full, kTileTokens});
    if (n_left > 0) tiles.push_back({n_full * kTileTokens, 1, n_left});
    return tiles;
  }

  std::size_t tile_bytes(const Tiles& tiles) const {
    return by_channel_ ? kernels::code_bytes(role_, bits_, tiles.n_tokens, dim_)
                       : kernels::affine_tile_bytes(role_, bits_, shape_, tiles.n_tokens);
  }

  /// The rows of (n, block_size, dim) in these tiles: (n * tiles, tokens, dim).
  mx::array cut(const mx::array& rows, const Tiles& tiles) const {
    const mx::array cut =
        mx::slice(rows, {0, tiles.first_token, 0},
                  {rows.shape(0), tiles.first_token + tiles.n * tiles.n_tokens, dim_});
    return mx::reshape(cut, {rows.shape(0) * tiles.n, tiles.n_tokens, dim_});
  }

  // Scales and biases, as kernels/affine_fit.h ---------------------------------------------------

  int n_steps() const { return (1 << bits_) - 1; }

  /// codec::half_below().
  static mx::array half_below(const mx::array& value) {
    const mx::array nearest = mx::astype(value, mx::float16);
    const mx::array bits = mx::view(nearest, mx::uint16);
    const auto number = [](int n) { return mx::array(n, mx::uint16); };
    const mx::array is_negative = mx::greater(bits, number(0x7FFF));
    const mx::array next =
        mx::where(is_negative, mx::add(bits, number(1)), mx::subtract(bits, number(1)));
    const mx::array below =
        mx::where(mx::greater(mx::astype(nearest, mx::float32), value), next, bits);
    const mx::array most = mx::array(codec::kHalfMax);
    const mx::array finite =
        mx::where(mx::greater_equal(value, most), number(0x7BFF),
                  mx::where(mx::less_equal(value, mx::negative(most)), number(0xFBFF), below));
    return mx::view(finite, mx::float16);
  }

  /// Scale and bias in fp16.
  std::pair<mx::array, mx::array> fit(const mx::array& low, const mx::array& high) const {
    const mx::array bias = half_below(mx::add(low, mx::array(0.0F)));
    const mx::array range = mx::subtract(high, mx::astype(bias, mx::float32));
    const mx::array step = mx::divide(range, mx::array(static_cast<float>(n_steps())));
    return {mx::negative(half_below(mx::negative(step))), bias};
  }

  mx::array quantize(const mx::array& rows, const mx::array& scale, const mx::array& bias) const {
    const mx::array codes = mx::round(mx::divide(mx::subtract(rows, mx::astype(bias, mx::float32)),
                                                 mx::astype(scale, mx::float32)));
    const mx::array most = mx::array(static_cast<float>(n_steps()));
    return mx::astype(
        mx::where(mx::greater(codes, mx::array(0.0F)), mx::minimum(codes, most), mx::array(0.0F)),
        mx::uint8);
  }

  static mx::array halves(const mx::array& bytes, mx::Shape shape) {
    return mx::reshape(mx::astype(mx::view(mx::contiguous(bytes), mx::float16), mx::float32),
                       std::move(shape));
  }

  // Groups of channels
  // -----------------------------------------------------------------------------

  /// (tiles, tokens, groups, group size); a short last group repeats its last channel.
  mx::array in_groups(const mx::array& rows) const {
    const int n_groups = kernels::n_groups(shape_);
    const int missing = n_groups * shape_.group_size - dim_;
    const mx::array full =
        missing == 0 ? rows : mx::pad(rows, {{0, 0}, {0, 0}, {0, missing}}, mx::array(0), "edge");
    return mx::reshape(full, {rows.shape(0), rows.shape(1), n_groups, shape_.group_size});
  }

  mx::array out_of_groups(const mx::array& groups) const {
    const mx::array rows = mx::reshape(groups, {groups.shape(0), groups.shape(1), -1});
    return mx::slice(rows, {0, 0, 0}, {rows.shape(0), rows.shape(1), dim_});
  }

  /// Tiles (tiles, tokens, dim) as the bytes of (n, all tiles).
  mx::array encode_groups(const mx::array& rows, const Tiles& tiles) const {
    const mx::array groups = in_groups(rows);
    const auto [scale, bias] = fit(mx::min(groups, 3, true), mx::max(groups, 3, true));
    const mx::array codes = out_of_groups(quantize(groups, scale, bias));
    const auto by_group = [](const mx::array& a) {
      return in_bytes(mx::swapaxes(mx::squeeze(a, 3), 1, 2));
    };
    const mx::array bytes =
        mx::concatenate({pack(codes, tiles), by_group(scale), by_group(bias)}, 1);
    return mx::reshape(bytes, {rows.shape(0) / tiles.n, -1});
  }

  mx::array decode_groups(const mx::array& bytes, const Tiles& tiles) const {
    const int n_groups = kernels::n_groups(shape_);
    const std::size_t scales = kernels::code_bytes(role_, bits_, tiles.n_tokens, dim_);
    const std::size_t biases = scales + kernels::group_bytes(shape_, tiles.n_tokens) / 2;
    const auto by_group = [&](std::size_t from, std::size_t to) {
      const mx::array numbers =
          halves(columns(bytes, from, to), {bytes.shape(0), n_groups, tiles.n_tokens, 1});
      return mx::swapaxes(numbers, 1, 2);
    };
    const mx::array codes = in_groups(mx::astype(unpack(bytes, tiles), mx::float32));
    return out_of_groups(mx::add(mx::multiply(by_group(scales, biases), codes),
                                 by_group(biases, tile_bytes(tiles))));
  }

  // Codes
  // ------------------------------------------------------------------------------------------

  int codes_per_byte() const { return 8 / bits_; }
  int codes_per_word() const { return kWordBits / bits_; }

  /// Codes along axis 4 become a byte.
  mx::array fold(const mx::array& codes) const {
    if (bits_ == 8) return mx::squeeze(codes, 4);
    const mx::array shifts = mx::arange(0, 8, bits_, mx::uint8);
    const mx::array placed = mx::left_shift(codes, mx::expand_dims(shifts, 1));
    return mx::astype(mx::sum(placed, 4), mx::uint8);
  }
  mx::array unfold(const mx::array& bytes) const {
    if (bits_ == 8) return mx::expand_dims(bytes, 4);
    const mx::array plain = mx::contiguous(bytes);
    std::vector<mx::array> codes;
    for (int i = 0; i < codes_per_byte(); ++i) {
      const mx::array moved = mx::right_shift(plain, mx::array(i * bits_, mx::uint8));
      codes.push_back(mx::bitwise_and(moved, mx::array(n_steps(), mx::uint8)));
    }
    return mx::stack(codes, 4);
  }

  // Full tiles are words of consecutive channels (keys) or tokens (values), the word's place first:
  // of six axes (tiles, lanes, words, bytes, codes, lanes) one of the two lanes is 1.

  /// Codes (tiles, tokens, dim) as bytes (tiles, bytes).
  mx::array pack(const mx::array& codes, const Tiles& tiles) const {
    const int n = codes.shape(0);
    if (tiles.n_tokens < kTileTokens) {
      const mx::array split = mx::reshape(codes, {n, tiles.n_tokens, -1, 1, codes_per_byte(), 1});
      return mx::reshape(fold(split), {n, -1});
    }
    if (role_ == Role::kValues) {
      const mx::array split = mx::reshape(codes, {n, 1, -1, kWordBytes, codes_per_byte(), dim_});
      return mx::reshape(mx::swapaxes(fold(split), 3, 4), {n, -1});
    }
    const int n_words = static_cast<int>(kernels::key_words(bits_, dim_));
    const int missing = n_words * codes_per_word() - dim_;
    const mx::array full = missing == 0 ? codes : mx::pad(codes, {{0, 0}, {0, 0}, {0, missing}});
    const mx::array split =
        mx::reshape(full, {n, kTileTokens, n_words, kWordBytes, codes_per_byte(), 1});
    return mx::reshape(mx::swapaxes(fold(split), 1, 2), {n, -1});
  }

  /// The codes (tiles, tokens, dim) at the start of tiles (tiles, bytes).
  mx::array unpack(const mx::array& tile, const Tiles& tiles) const {
    const int n = tile.shape(0);
    const mx::array bytes =
        columns(tile, 0, kernels::code_bytes(role_, bits_, tiles.n_tokens, dim_));
    if (tiles.n_tokens < kTileTokens) {
      return mx::reshape(unfold(mx::reshape(bytes, {n, tiles.n_tokens, -1, 1, 1})),
                         {n, tiles.n_tokens, dim_});
    }
    if (role_ == Role::kValues) {
      const mx::array words = mx::swapaxes(mx::reshape(bytes, {n, 1, -1, dim_, kWordBytes}), 3, 4);
      return mx::reshape(unfold(words), {n, kTileTokens, dim_});
    }
    const mx::array words =
        mx::swapaxes(mx::reshape(bytes, {n, -1, kTileTokens, kWordBytes, 1}), 1, 2);
    const mx::array codes = mx::reshape(unfold(words), {n, kTileTokens, -1});
    return mx::slice(codes, {0, 0, 0}, {n, kTileTokens, dim_});
  }

  const Role role_;
  const int bits_;
  const bool by_channel_;
  const bool hadamard_;
  const kernels::PartShape shape_;
  const int dim_;
};

}  // namespace

mx::array hadamard(const mx::array& rows) {
  const int dim = rows.shape(-1);
  const int size = dim & -dim;
  const mx::array blocks = mx::reshape(rows, {-1, dim / size, size});
  return mx::reshape(mx::hadamard_transform(blocks, 1.0F / std::sqrt(static_cast<float>(size))),
                     rows.shape());
}

mx::array encode_parts(const codec::PartGeometry& geometry, const VectorParts* vectors,
                       const mx::array& rows) {
  if (geometry.format.is_vector()) return vectors->encode(rows);
  const mx::array parts = Parts(geometry).encode(mx::flatten(rows, 0, 1));
  return mx::unflatten(parts, 0, {rows.shape(0), rows.shape(1)});
}

mx::array decode_parts(const codec::PartGeometry& geometry, const VectorParts* vectors,
                       const mx::array& parts) {
  if (geometry.format.is_vector()) return vectors->decode(parts, geometry.block_size);
  const mx::array rows = Parts(geometry).decode(mx::flatten(parts, 0, 1));
  return mx::unflatten(rows, 0, {parts.shape(0), parts.shape(1)});
}

}  // namespace kvpool::detail
