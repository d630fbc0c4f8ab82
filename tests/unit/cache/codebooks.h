#pragma once

#include <mlx/ops.h>
#include <mlx/random.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "kvpool/vecinfer_codebooks.h"

namespace kvpool::testing {

/// A codebook, a mean, scales and a rotation for each head of each layer; `codes` are of the layers.
inline VecInferStream codebook_stream(const std::vector<codec::VectorCode>& codes, int n_kv_heads,
                                      int head_dim) {
  namespace mx = mlx::core;
  const auto n_layers = static_cast<int>(codes.size());
  const int n_books = n_layers * n_kv_heads;
  const mx::Shape rows{n_layers, n_kv_heads, head_dim};
  std::vector<int> of_books;
  int n_numbers = 0;
  for (const codec::VectorCode& code : codes) {
    for (int head = 0; head < n_kv_heads; ++head) {
      of_books.insert(of_books.end(), {code.sub_dim, code.code_bits});
      n_numbers += code.sub_dim << code.code_bits;
    }
  }
  const auto whole = [](const mx::array& normal) {
    const mx::array rounded =
        mx::clip(mx::round(normal * mx::array(40.0F)), mx::array(-127.0F), mx::array(127.0F));
    return mx::astype(rounded, mx::int8);
  };
  return {mx::array(of_books.data(), {n_books, 2}, mx::int32),
          whole(mx::random::normal({n_numbers})),
          mx::random::uniform(0.02F, 0.03F, {n_books}),
          mx::reshape(mx::arange(0, n_books, mx::int32), {n_layers, n_kv_heads}),
          mx::random::uniform(0.6F, 1.5F, rows),
          mx::random::normal(rows) * mx::array(0.3F),
          whole(mx::random::normal({n_layers, n_kv_heads, head_dim, head_dim}))};
}
inline VecInferStream codebook_stream(codec::VectorCode code, int n_layers, int n_kv_heads,
                                      int head_dim) {
  return codebook_stream(std::vector(static_cast<std::size_t>(n_layers), code), n_kv_heads,
                         head_dim);
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
