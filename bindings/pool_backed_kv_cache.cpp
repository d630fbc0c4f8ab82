#include "kvpool/pool_backed_kv_cache.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"

namespace kvpool::bindings {

using namespace nb::literals;

void bind_pool_backed_kv_cache(nb::module_& m) {
  nb::class_<PoolBackedKVCache>(
      m, "PoolBackedKVCacheCore",
      "What kvpool.PoolBackedKVCache keeps. Not thread-safe; the pool may be shared.")
      .def(nb::init<std::shared_ptr<BlockPoolAllocator>, Owner, std::optional<std::int64_t>>(),
           "pool"_a, "owner"_a = -1, "step"_a = nb::none())
      .def_prop_ro("pool", &PoolBackedKVCache::pool)
      .def_prop_ro("owner", &PoolBackedKVCache::owner)
      .def_prop_ro("step", &PoolBackedKVCache::step, "Tokens by which the buffers grow.")
      .def_prop_ro("offset", &PoolBackedKVCache::offset, "Tokens a row.")
      .def("update_and_fetch", &PoolBackedKVCache::update_and_fetch, "keys"_a, "values"_a,
           nb::sig("def update_and_fetch(self, keys: mlx.core.array, values: mlx.core.array) -> "
                   "tuple[mlx.core.array, mlx.core.array]"),
           "Appends S tokens to each row and returns all: keys and values, (B, n_kv_heads, S,\n"
           "head_dim) to (B, n_kv_heads, offset, head_dim). Raises BlockPoolExhaustedError or\n"
           "ValueError and changes nothing, keys nor values.")
      .def("release", &PoolBackedKVCache::release,
           "Frees every block of the owner, and the memory of this cache and its siblings.")
      .def("size", &PoolBackedKVCache::size, "Tokens a row.")
      .def("empty", &PoolBackedKVCache::empty)
      .def("trim", &PoolBackedKVCache::trim, "n"_a,
           "Forgets up to `n` of the last tokens; returns how many, 0 for a negative `n`.")
      .def("_state", &PoolBackedKVCache::state)
      .def("_set_state", &PoolBackedKVCache::set_state, "state"_a.none())
      .def("_fork_from", &PoolBackedKVCache::fork_from, "other"_a)
      .def("_link", &PoolBackedKVCache::link, "other"_a)
      .def_prop_ro("nbytes", &PoolBackedKVCache::nbytes, "Bytes of both buffers, at capacity.");
}

}  // namespace kvpool::bindings
