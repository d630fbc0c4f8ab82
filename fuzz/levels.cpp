// Any rows, encoded: every level encodes the same bytes, and its scores and sums are near those in
// double.

#include <algorithm>
#include <cmath>
#include <optional>

#include "fuzz/input.h"

namespace kvpool::fuzz {
namespace {

/// Rows of widely different sizes, some flat.
std::vector<float> random_rows(Input& input, const codec::PartGeometry& geometry) {
  std::vector<float> rows(elements(geometry.block_size, geometry.head_dim));
  const auto dim = static_cast<std::size_t>(geometry.head_dim);
  for (std::size_t i = 0; i < rows.size(); i += dim) {
    const float size = std::ldexp(1.0F, input.between(-20, 15));
    const bool flat = input.between(0, 7) == 0;
    const float middle = size * input.fraction();
    for (std::size_t d = 0; d < dim; ++d) {
      rows[i + d] = flat ? middle : 0.5F * (middle + size * input.fraction());
    }
  }
  return rows;
}

double largest_of(std::span<const float> values) {
  double largest = 0.0;
  for (const float value : values) largest = std::max(largest, std::fabs(double{value}));
  return largest;
}

struct Problem {
  codec::PartGeometry geometry;
  std::vector<float> rows;     // Decoded, those after n_tokens too.
  std::vector<float> queries;  // Of keys.
  std::vector<float> weights;  // Of values, `stride` apart.
  int n_queries;
  std::size_t n_tokens;

  std::size_t dim() const { return static_cast<std::size_t>(geometry.head_dim); }
  std::size_t stride() const { return n_tokens + kernels::kColumnSlack; }
};

/// The largest element that codes could stand for: where all decode to 0, scales may still be
/// fp16's least number.
double largest_element(const Problem& p) {
  using enum codec::Code;
  const codec::Code code = p.geometry.format.code;
  if (p.geometry.format.is_raw()) return largest_of(p.rows);
  const double largest_code = code == kInt8 ? 255 : code == kInt4 || code == kKivi4 ? 15 : 3;
  return std::max(largest_of(p.rows), std::ldexp(largest_code, -24));
}

/// Queries may be rounded to 16 bits of the largest in a group.
void require_scores(const Problem& p, const std::vector<float>& scores) {
  const double rounding = largest_of(p.queries) * largest_element(p);
  for (std::size_t q = 0; q < static_cast<std::size_t>(p.n_queries); ++q) {
    for (std::size_t t = 0; t < p.n_tokens; ++t) {
      double expected = 0.0;
      for (std::size_t d = 0; d < p.dim(); ++d) {
        expected += double{p.queries[q * p.dim() + d]} * p.rows[t * p.dim() + d];
      }
      const double bound = 1e-4 * static_cast<double>(p.dim()) * rounding;
      require(std::fabs(scores[q * p.stride() + t] - expected) <= bound);
    }
  }
}

/// Weights may be rounded to 16 bits of the largest product with a scale, of any row of the part.
void require_sums(const Problem& p, const std::vector<float>& sums) {
  const double rounding = largest_of(p.weights) * largest_element(p);
  for (std::size_t q = 0; q < static_cast<std::size_t>(p.n_queries); ++q) {
    for (std::size_t d = 0; d < p.dim(); ++d) {
      double expected = 0.0;
      for (std::size_t t = 0; t < p.n_tokens; ++t) {
        expected += double{p.weights[q * p.stride() + t]} * p.rows[t * p.dim() + d];
      }
      const double bound = 1e-4 * static_cast<double>(p.n_tokens) * rounding;
      require(std::fabs(sums[q * p.dim() + d] - expected) <= bound);
    }
  }
}

void run(Input input) {
  Problem p;
  p.geometry = input.geometry();
  const kernels::PartShape shape = shape_of(p.geometry);
  const kernels::Layout layout = kernels::layout_of(p.geometry.format, p.geometry.role);
  const bool keys = p.geometry.role == codec::Role::kKeys;
  p.n_queries = input.between(1, 9);
  const std::int32_t n_tokens = input.between(1, p.geometry.block_size);
  p.n_tokens = static_cast<std::size_t>(n_tokens);
  const int offset = input.between(0, 63);
  const std::vector<float> rows = random_rows(input, p.geometry);
  p.queries.resize(elements(p.n_queries, p.geometry.head_dim));
  for (float& q : p.queries) q = input.fraction();
  p.weights.resize(static_cast<std::size_t>(p.n_queries) * p.stride());
  for (float& weight : p.weights) weight = std::fabs(input.fraction());

  std::optional<Part> reference;
  for_each_level([&](const kernels::KernelTable& table) {
    Part part(p.geometry, offset);
    const auto encode = keys ? table.of_keys(layout).encode : table.of_values(layout).encode;
    encode(shape, rows.data(), 0, p.geometry.block_size, part.data());
    if (!reference) {
      reference = part;
      p.rows.resize(rows.size());
      const auto decode = keys ? table.of_keys(layout).decode : table.of_values(layout).decode;
      decode(shape, part.data(), 0, p.geometry.block_size, p.rows.data());
    }
    require(std::ranges::equal(reference->bytes(), part.bytes()));

    const std::byte* const data = part.data();
    const kernels::PartRun one{&data, &n_tokens, 1};
    if (keys) {
      std::vector<float> scores(static_cast<std::size_t>(p.n_queries) * p.stride());
      const Prepared prepared(table.of_keys(layout), shape, p.queries, p.n_queries);
      table.of_keys(layout).scores(shape, one, prepared.data(), p.n_queries, scores.data(),
                                   p.stride());
      require_scores(p, scores);
    } else {
      std::vector<float> sums(p.queries.size());
      table.of_values(layout).accumulate(shape, one, p.weights.data(), p.stride(), p.n_queries,
                                         sums.data());
      require_sums(p, sums);
    }
  });
}

}  // namespace
}  // namespace kvpool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpool::fuzz::run(kvpool::fuzz::Input({data, size}));
  return 0;
}
