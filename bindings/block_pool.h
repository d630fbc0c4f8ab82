#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "kvpool/block_pool.h"

namespace kvpool::bindings {

namespace nb = nanobind;

/// A Block that keeps its pool alive, as Python expects.
struct PyBlock {
  Block block;
  nb::object pool;
};

/// The handles in a Python iterable of blocks.
std::vector<Block> to_blocks(nb::iterable blocks);

}  // namespace kvpool::bindings
