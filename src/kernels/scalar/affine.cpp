#include <algorithm>
#include <cstring>

#include "kernels/affine_fit.h"
#include "kernels/scalar/codes.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::scalar {
namespace {

using codec::Role;

template <int kBits, Role kRole>
void encode(const PartShape& shape, const float* rows, int /*first_token*/, int /*n_tokens*/,
            std::byte* part) {
  constexpr int kSteps = (1 << kBits) - 1;
  const int dim = shape.head_dim;
  for (int i = 0; i < n_tiles(shape.block_size); ++i) {
    const Tile tile = tile_at(shape, i);
    const std::size_t n_code_bytes = code_bytes(kRole, kBits, tile.n_tokens, dim);
    std::byte* const scales = part + n_code_bytes;
    std::byte* const biases = scales + group_bytes(shape, tile.n_tokens) / 2;
    std::memset(part, 0, n_code_bytes);
    for (int t = 0; t < tile.n_tokens; ++t, rows += dim) {
      for (int g = 0; g < n_groups(shape); ++g) {
        const int first = g * shape.group_size;
        const int last = std::min(dim, first + shape.group_size);
        const auto [low, high] = std::minmax_element(rows + first, rows + last);
        const Affine affine = fit(*low, *high, kSteps);
        const std::size_t at = as_size(g * tile.n_tokens + t);
        write_half(scales, at, affine.scale);
        write_half(biases, at, affine.bias);
        const float scale = codec::half_to_float(affine.scale);
        const float bias = codec::half_to_float(affine.bias);
        for (int d = first; d < last; ++d) {
          write_code(part, code_place(kRole, kBits, tile.n_tokens, dim, t, d),
                     quantize(rows[d], scale, bias, kSteps));
        }
      }
    }
    part = biases + group_bytes(shape, tile.n_tokens) / 2;
  }
}

template <int kBits, Role kRole>
void decode(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  const int dim = shape.head_dim;
  const std::size_t full_tile_bytes = affine_tile_bytes(kRole, kBits, shape, kTileTokens);
  for (int token = first_token; token < first_token + n_tokens; ++token, rows += dim) {
    const Tile tile = tile_at(shape, token / kTileTokens);
    const int t = token % kTileTokens;
    const std::byte* const codes = part + as_size(tile.index) * full_tile_bytes;
    const std::byte* const scales = codes + code_bytes(kRole, kBits, tile.n_tokens, dim);
    const std::byte* const biases = scales + group_bytes(shape, tile.n_tokens) / 2;
    for (int d = 0; d < dim; ++d) {
      const std::size_t at = as_size(d / shape.group_size * tile.n_tokens + t);
      const float code =
          read_code<kBits>(codes, code_place(kRole, kBits, tile.n_tokens, dim, t, d));
      rows[d] = codec::half_to_float(read_half(scales, at)) * code +
                codec::half_to_float(read_half(biases, at));
    }
  }
}

template <int kBits>
constexpr KeyKernels kKeys = {encode<kBits, Role::kKeys>, decode<kBits, Role::kKeys>, query_bytes,
                              copy_queries, scores<decode<kBits, Role::kKeys>>};
template <int kBits>
constexpr ValueKernels kValues = {encode<kBits, Role::kValues>, decode<kBits, Role::kValues>,
                                  accumulate<decode<kBits, Role::kValues>>};

}  // namespace

KeyKernels affine_keys(Layout layout) {
  if (layout == Layout::kAffine8) return kKeys<8>;
  return layout == Layout::kAffine4 ? kKeys<4> : kKeys<2>;
}

ValueKernels affine_values(Layout layout) {
  if (layout == Layout::kAffine8) return kValues<8>;
  return layout == Layout::kAffine4 ? kValues<4> : kValues<2>;
}

}  // namespace kvpool::kernels::scalar
