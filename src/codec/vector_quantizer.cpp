#include "codec/vector_quantizer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "util/concat.h"

namespace kvpool::codec {

std::shared_ptr<const Codebook> make_codebook(int sub_dim, int code_bits, float scale,
                                              std::vector<std::int8_t> centroids) {
  const auto refuse = [](const auto&... parts) {
    throw std::invalid_argument(detail::concat("codebook: ", parts...));
  };
  const bool known = code_bits == 8 ? sub_dim == 2 || sub_dim == 4 || sub_dim == 8
                                    : code_bits == 12 && sub_dim == 8;
  if (!known) {
    refuse("codes must be 8 bits of 2, 4 or 8 channels, or 12 bits of 8, got ", code_bits,
           " bits of ", sub_dim);
  }
  if (!std::isfinite(scale) || !(scale > 0.0F)) {
    refuse("scale must be finite and above 0, got ", scale);
  }
  const auto dim = static_cast<std::size_t>(sub_dim);
  const std::size_t n_codes = std::size_t{1} << code_bits;
  if (centroids.size() != n_codes * dim) {
    refuse("centroids must be ", n_codes * dim, " numbers, got ", centroids.size());
  }
  if (std::find(centroids.begin(), centroids.end(), std::int8_t{-128}) != centroids.end()) {
    refuse("centroids must be -127 to 127, got -128");
  }
  Codebook book{sub_dim, code_bits, scale, std::move(centroids), {}};
  if (code_bits != 8) return std::make_shared<const Codebook>(std::move(book));
  book.planes.resize(n_codes * dim);
  for (std::size_t code = 0; code < n_codes; ++code) {
    for (std::size_t j = 0; j < dim; ++j) {
      book.planes[j * n_codes + code] = book.centroids[code * dim + j];
    }
  }
  return std::make_shared<const Codebook>(std::move(book));
}

}  // namespace kvpool::codec
