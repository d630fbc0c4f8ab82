// Any bytes as a part: every level reads within it, decodes the same bits, and survives scores and
// sums.

#include <cmath>
#include <optional>

#include "fuzz/input.h"

namespace kvpool::fuzz {
namespace {

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return false;
  }
  return a.size() == b.size();
}

void run(Input input) {
  const codec::PartGeometry geometry = input.geometry();
  const kernels::PartShape shape = shape_of(geometry);
  const kernels::Layout layout = kernels::layout_of(geometry.format, geometry.role);
  const bool keys = geometry.role == codec::Role::kKeys;
  const int first = input.between(0, geometry.block_size - 1);
  const int n_tokens = input.between(1, geometry.block_size - first);
  const int n_queries = input.between(1, 9);
  Part part(geometry, input.between(0, 63));
  for (std::byte& b : part.bytes()) b = std::byte{input.byte()};
  std::vector<float> queries(elements(n_queries, geometry.head_dim));
  for (float& q : queries) q = input.fraction();
  const std::size_t stride = static_cast<std::size_t>(n_tokens) + kernels::kColumnSlack;
  std::vector<float> columns(static_cast<std::size_t>(n_queries) * stride);
  for (float& weight : columns) weight = std::fabs(input.fraction());

  const std::byte* const data = part.data();
  const std::int32_t n = n_tokens;
  const kernels::PartRun one{&data, &n, 1};
  std::optional<std::vector<float>> reference;
  for_each_level([&](const kernels::KernelTable& table) {
    std::vector<float> rows(elements(n_tokens, geometry.head_dim));
    const auto decode = keys ? table.of_keys(layout).decode : table.of_values(layout).decode;
    decode(shape, data, first, n_tokens, rows.data());
    if (!reference) reference = rows;
    require(same(*reference, rows));
    if (keys) {
      const Prepared prepared(table.of_keys(layout), shape, queries, n_queries);
      table.of_keys(layout).scores(shape, one, prepared.data(), n_queries, columns.data(), stride);
    } else {
      std::vector<float> sums(queries.size());
      table.of_values(layout).accumulate(shape, one, columns.data(), stride, n_queries,
                                         sums.data());
    }
  });
  std::vector<float> rows(elements(n_tokens, geometry.head_dim));
  codec::decode(geometry, data, first, n_tokens, rows.data());
}

}  // namespace
}  // namespace kvpool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpool::fuzz::run(kvpool::fuzz::Input({data, size}));
  return 0;
}
