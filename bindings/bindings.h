#pragma once

#include <nanobind/nanobind.h>

namespace kvpool::bindings {

namespace nb = nanobind;

void bind_block_pool(nb::module_& m);
void bind_mlx_buffer_pool(nb::module_& m);
void bind_mlx_block_storage(nb::module_& m);
void bind_kv_cache(nb::module_& m);
void bind_pool_backed_kv_cache(nb::module_& m);
void bind_paged_kv_cache(nb::module_& m);

}  // namespace kvpool::bindings
