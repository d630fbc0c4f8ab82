#pragma once

#include <nanobind/nanobind.h>

namespace kvpool::bindings {

namespace nb = nanobind;

/// Type checkers want equality to take any object.
inline const nb::sig kEqual("def __eq__(self, arg: object, /) -> bool");

void bind_block_pool(nb::module_& m);
void bind_mlx_buffer_pool(nb::module_& m);
void bind_mlx_block_storage(nb::module_& m);
void bind_kv_cache(nb::module_& m);
void bind_pool_backed_kv_cache(nb::module_& m);
void bind_paged_kv_cache(nb::module_& m);
void bind_vecinfer_codebooks(nb::module_& m);
void bind_vecinfer_calibrator(nb::module_& m);
void bind_vecinfer_kv_cache(nb::module_& m);

}  // namespace kvpool::bindings
