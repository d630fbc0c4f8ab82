#include "kvpool/vecinfer_kv_cache.h"

#include <nanobind/stl/string.h>

#include "bindings.h"

namespace kvpool::bindings {

using namespace nb::literals;

void bind_vecinfer_kv_cache(nb::module_& m) {
  nb::class_<VecInferBytes>(m, "VecInferBytes",
                            "What VecInfer's codes of a cache's tokens come to, by arithmetic.")
      .def_ro("compressed_key", &VecInferBytes::compressed_key)
      .def_ro("fp16_key", &VecInferBytes::fp16_key)
      .def_ro("compressed_value", &VecInferBytes::compressed_value)
      .def_ro("fp16_value", &VecInferBytes::fp16_value)
      .def_ro("codebooks", &VecInferBytes::codebooks)
      .def_prop_ro("assigned_avg_bits", &VecInferBytes::assigned_avg_bits);
  m.def("vecinfer_bytes", &vecinfer_bytes, "cache"_a,
        "Raises ValueError if the cache's formats are not vecinfer ones.");
  m.def("vecinfer_cache_config", &vecinfer_cache_config, "config"_a, "n_kv_heads"_a, "layer"_a = 0,
        "The formats, window, sink and codebooks of a KVCacheConfig as a paged cache takes them.");
}

}  // namespace kvpool::bindings
