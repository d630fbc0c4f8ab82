#pragma once

#include <mlx/ops.h>
#include <mlx/random.h>

#include <memory>
#include <string>

#include "codec/codec.h"
#include "kvpool/vecinfer_codebooks.h"

namespace kvpool::testing {

/// A codebook, a mean and scales for each head of each layer.
inline VecInferStream codebook_stream(codec::VectorCode code, int n_layers, int n_kv_heads,
                                      int head_dim) {
  namespace mx = mlx::core;
  const int n_books = n_layers * n_kv_heads;
  const mx::Shape rows{n_layers, n_kv_heads, head_dim};
  const mx::array normal = mx::random::normal({n_books, 1 << code.code_bits, code.sub_dim});
  const mx::array whole =
      mx::clip(mx::round(normal * mx::array(40.0F)), mx::array(-127.0F), mx::array(127.0F));
  return {code.sub_dim,
          code.code_bits,
          mx::astype(whole, mx::int8),
          mx::random::uniform(0.02F, 0.03F, {n_books}),
          mx::reshape(mx::arange(0, n_books, mx::int32), {n_layers, n_kv_heads}),
          mx::random::uniform(0.6F, 1.5F, rows),
          mx::random::normal(rows) * mx::array(0.3F)};
}

inline std::shared_ptr<const VecInferCodebooks> make_codebooks(const std::string& format,
                                                               int n_layers, int n_kv_heads,
                                                               int head_dim) {
  using enum codec::Role;
  const codec::Code code = codec::code_of(format);
  return std::make_shared<const VecInferCodebooks>(
      format, codebook_stream(codec::vector_code(code, kKeys), n_layers, n_kv_heads, head_dim),
      codebook_stream(codec::vector_code(code, kValues), n_layers, n_kv_heads, head_dim));
}

}  // namespace kvpool::testing
