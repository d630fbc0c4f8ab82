#include <algorithm>
#include <cstring>

#include "kernels/affine_fit.h"
#include "kernels/scalar/codes.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::scalar {
namespace {

using codec::Role;

template <int kBits>
void encode(const PartShape& shape, const float* rows, int /*first_token*/, int /*n_tokens*/,
            std::byte* part) {
  constexpr int kSteps = (1 << kBits) - 1;
  const int dim = shape.head_dim;
  std::byte* const scales = part;
  std::byte* const biases = part + channel_bytes(shape) / 2;
  std::byte* codes = part + channel_bytes(shape);
  for (int d = 0; d < dim; ++d) {
    float low = rows[d];
    float high = rows[d];
    for (int t = 1; t < shape.block_size; ++t) {
      low = std::min(low, rows[t * dim + d]);
      high = std::max(high, rows[t * dim + d]);
    }
    const Affine affine = fit(low, high, kSteps);
    write_half(scales, as_size(d), affine.scale);
    write_half(biases, as_size(d), affine.bias);
  }
  for (int i = 0; i < n_tiles(shape.block_size); ++i) {
    const Tile tile = tile_at(shape, i);
    const std::size_t n_code_bytes = code_bytes(Role::kKeys, kBits, tile.n_tokens, dim);
    std::memset(codes, 0, n_code_bytes);
    for (int t = 0; t < tile.n_tokens; ++t, rows += dim) {
      for (int d = 0; d < dim; ++d) {
        const float scale = codec::half_to_float(read_half(scales, as_size(d)));
        const float bias = codec::half_to_float(read_half(biases, as_size(d)));
        write_code(codes, code_place(Role::kKeys, kBits, tile.n_tokens, dim, t, d),
                   quantize(rows[d], scale, bias, kSteps));
      }
    }
    codes += n_code_bytes;
  }
}

template <int kBits>
void decode(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
            float* rows) {
  const int dim = shape.head_dim;
  const std::byte* const scales = part;
  const std::byte* const biases = part + channel_bytes(shape) / 2;
  const std::byte* const first_tile = part + channel_bytes(shape);
  const std::size_t full_tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, dim);
  for (int token = first_token; token < first_token + n_tokens; ++token, rows += dim) {
    const Tile tile = tile_at(shape, token / kTileTokens);
    const std::byte* const codes = first_tile + as_size(tile.index) * full_tile_bytes;
    for (int d = 0; d < dim; ++d) {
      const CodePlace place =
          code_place(Role::kKeys, kBits, tile.n_tokens, dim, token % kTileTokens, d);
      const float code = read_code<kBits>(codes, place);
      rows[d] = codec::half_to_float(read_half(scales, as_size(d))) * code +
                codec::half_to_float(read_half(biases, as_size(d)));
    }
  }
}

template <int kBits>
constexpr KeyKernels kKeys = {encode<kBits>, decode<kBits>, query_bytes, copy_queries,
                              scores<decode<kBits>>};

}  // namespace

KeyKernels channel_keys(Layout layout) { return layout == Layout::kChannel4 ? kKeys<4> : kKeys<2>; }

}  // namespace kvpool::kernels::scalar
