#include "codec/vector_quantizer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "util/concat.h"

namespace kvpool::codec {
namespace {

/// A row that keeps no more than this part of its square, once cleared of others, depends on them:
/// what is left of more is exact to a float's digits.
constexpr double kLeastLeft = 1e-16;

}  // namespace

std::shared_ptr<const Codebook> make_codebook(int sub_dim, int code_bits, float scale,
                                              std::vector<std::int8_t> centroids) {
  const auto refuse = [](const auto&... parts) {
    throw std::invalid_argument(detail::concat("codebook: ", parts...));
  };
  validate(VectorCode{sub_dim, code_bits});
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

void set_rotation(HeadTransform& transform, std::span<const std::int8_t> rows) {
  const std::size_t dim = transform.smooth.size();
  if (rows.size() != dim * dim) {
    throw std::invalid_argument(
        detail::concat("rotation: must be ", dim * dim, " numbers, got ", rows.size()));
  }
  std::vector<double> turned(rows.begin(), rows.end());
  const auto product = [&](std::size_t a, std::size_t b) {
    double sum = 0.0;
    for (std::size_t d = 0; d < dim; ++d) sum += turned[a * dim + d] * turned[b * dim + d];
    return sum;
  };
  for (std::size_t i = 0; i < dim; ++i) {
    const double whole = product(i, i);
    for (std::size_t j = 0; j < i; ++j) {
      const double share = product(i, j);
      for (std::size_t d = 0; d < dim; ++d) turned[i * dim + d] -= share * turned[j * dim + d];
    }
    const double left = product(i, i);
    if (!(left > kLeastLeft * whole)) {
      throw std::invalid_argument(
          detail::concat("rotation: row ", i, " depends on those before it"));
    }
    const double scale = 1.0 / std::sqrt(left);
    for (std::size_t d = 0; d < dim; ++d) turned[i * dim + d] *= scale;
  }
  transform.back.assign(turned.begin(), turned.end());
  transform.rotation.resize(dim * dim);
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t d = 0; d < dim; ++d) transform.rotation[d * dim + i] = transform.back[i * dim + d];
  }
}

}  // namespace kvpool::codec
