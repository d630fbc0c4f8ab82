#include "bindings.h"

NB_MODULE(_core, m) {
  using namespace kvpool::bindings;
  m.doc() = "kvpool's C++ library.";
  m.attr("__version__") = KVPOOL_VERSION;
  // The types of MLX's arrays must be known before functions that take them are called.
  nb::module_::import_("mlx.core");
  bind_block_pool(m);
  bind_mlx_buffer_pool(m);
  bind_mlx_block_storage(m);
  bind_pool_backed_kv_cache(m);
  bind_vecinfer_codebooks(m);
  bind_vecinfer_calibrator(m);
  bind_paged_kv_cache(m);
  bind_kv_cache(m);
  bind_vecinfer_kv_cache(m);
}
