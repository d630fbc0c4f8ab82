#include "kvpool/pool_config.h"

#include <limits>
#include <stdexcept>

#include "util/concat.h"

namespace kvpool {

namespace {

/// Block tables hold 32-bit indices.
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

void require_in_range(const char* field, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= kMost) return;
  throw std::invalid_argument(
      detail::concat("PoolConfig: ", field, " must be ", least, " to ", kMost, ", got ", value));
}

}  // namespace

void PoolConfig::validate() const {
  require_in_range("block_size", block_size, 1);
  require_in_range("n_blocks", n_blocks, 1);
  if (max_blocks && *max_blocks < n_blocks) {
    throw std::invalid_argument(detail::concat("PoolConfig: max_blocks must be at least n_blocks (",
                                               n_blocks, "), got ", *max_blocks));
  }
}

}  // namespace kvpool
