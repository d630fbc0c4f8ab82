#pragma once

/// The kernels of vecinfer formats behind seal() and relay(), with the same parameters. The first's
/// grid has a third dimension: a tile of tokens each.
namespace kvpool::cuda {

const void* vector_seal_kernel(int sub_dim);
const void* vector_relay_kernel();

}  // namespace kvpool::cuda
