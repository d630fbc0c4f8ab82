#include "kvpool/paged_kv_cache.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kvpool/vecinfer_codebooks.h"

namespace kvpool::bindings {

using namespace nb::literals;
namespace mx = mlx::core;

namespace {

/// PagedRowImage as Python has it.
using RowParts = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, mx::Dtype,
                            std::vector<std::int64_t>, mx::array, mx::array, std::uint64_t>;

PagedRowImage image_of(std::int64_t block_size, std::int64_t n_kv_heads, std::int64_t key_dim,
                       std::int64_t value_dim, mx::Dtype dtype, std::vector<std::int64_t> blocks,
                       mx::array keys, mx::array values, std::uint64_t codebooks) {
  return {block_size,        n_kv_heads,      key_dim,           value_dim, dtype,
          std::move(blocks), std::move(keys), std::move(values), codebooks};
}

}  // namespace

void bind_paged_kv_cache(nb::module_& m) {
  nb::class_<PagedStorage>(
      m, "PagedStorage",
      "What the paged caches of all layers and requests share: the pool that counts their blocks and\n"
      "the memory that the blocks lie in. Its caches are used by one thread at a time, and handed over\n"
      "to another after mx.eval(cache.state).")
      .def(nb::init<std::shared_ptr<BlockPoolAllocator>, std::shared_ptr<MlxBufferPool>>(),
           "pool"_a, "buffers"_a.none() = nb::none())
      .def_prop_ro("pool", &PagedStorage::pool)
      .def_prop_ro("level", &PagedStorage::level,
                   "What runs the caches' ops: a level of kernels, or \"ops\", MLX's own on any device.\n"
                   "Chosen for the device in use when this was made; KVPOOL_KERNELS forces one.")
      .def("resident_bytes", &PagedStorage::resident_bytes, "Bytes held for blocks.")
      .def("recover", &PagedStorage::recover,
           "After an evaluation has failed: evaluates all pending work, with NaN in place of\n"
           "keys, values and queries that cannot be computed, so that the other requests can go\n"
           "on. The request that gave them should be released, or trimmed to before them.\n"
           "Returns how many appends, attends and loads were given NaN.");

  nb::class_<PagedKVCacheConfig>(m, "PagedKVCacheConfig", "How a PagedKVCache stores tokens.")
      .def(
          "__init__",
          [](PagedKVCacheConfig* self, std::string key_format, std::string value_format,
             int group_size, bool hadamard, std::int64_t window, std::int64_t sink,
             std::int64_t sliding_window, bool check_finite,
             std::shared_ptr<VecInferCodebooks> codebooks, std::int64_t layer) {
            new (self) PagedKVCacheConfig{std::move(key_format),
                                          std::move(value_format),
                                          group_size,
                                          hadamard,
                                          window,
                                          sink,
                                          sliding_window,
                                          check_finite,
                                          std::move(codebooks),
                                          layer};
          },
          "key_format"_a = "raw", "value_format"_a = "raw", "group_size"_a = 32,
          "hadamard"_a = true, "window"_a = 128, "sink"_a = 16, "sliding_window"_a = 0,
          "check_finite"_a = false, "codebooks"_a.none() = nb::none(), "layer"_a = 0)
      .def_ro("key_format", &PagedKVCacheConfig::key_format)
      .def_ro("value_format", &PagedKVCacheConfig::value_format)
      .def_ro("group_size", &PagedKVCacheConfig::group_size, "Channels to a scale: 32 or 64.")
      .def_ro("hadamard", &PagedKVCacheConfig::hadamard)
      .def_ro("window", &PagedKVCacheConfig::window, "Newest tokens that stay raw.")
      .def_ro("sink", &PagedKVCacheConfig::sink, "First tokens that stay raw.")
      .def_ro("sliding_window", &PagedKVCacheConfig::sliding_window,
              "If not 0: tokens that a query sees, itself among them.")
      .def_ro("check_finite", &PagedKVCacheConfig::check_finite,
              "Evaluate the tokens of each append, and refuse what a format other than raw cannot\n"
              "store: NaN, infinity and what is beyond fp16.")
      .def_prop_ro(
          "codebooks",
          [](const PagedKVCacheConfig& config) {
            return std::const_pointer_cast<VecInferCodebooks>(config.codebooks);
          },
          "What vecinfer formats need: codebooks of that format.")
      .def_ro("layer", &PagedKVCacheConfig::layer, "The layer of the codebooks.")
      .def(nb::self == nb::self, kEqual);

  nb::class_<PagedKVCache>(m, "PagedKVCacheCore", nb::is_weak_referenceable(),
                           "What the paged caches of kvpool keep. Not thread-safe.")
      .def(
          "__init__",
          [](PagedKVCache* self, std::shared_ptr<PagedStorage> storage,
             const PagedKVCacheConfig& config, const std::vector<Owner>& owners) {
            new (self) PagedKVCache(std::move(storage), config, owners);
          },
          "storage"_a, "config"_a, "owners"_a)
      .def(
          "_append",
          [](PagedKVCache& cache, const mx::array& keys, const mx::array& values,
             const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& count) {
            cache.append(keys, values, first, count);
          },
          "keys"_a, "values"_a, "first"_a = std::vector<std::int64_t>{},
          "count"_a = std::vector<std::int64_t>{})
      .def("_fetch", &PagedKVCache::fetch)
      .def(
          "_attend",
          [](PagedKVCache& cache, const mx::array& queries, float scale, bool causal,
             std::optional<mx::array> mask, std::optional<mx::array> sinks, std::int64_t window,
             float soft_cap) {
            return cache.attend(queries, scale, {causal, std::move(mask)}, sinks, window, soft_cap);
          },
          "queries"_a, "scale"_a, "causal"_a, "mask"_a.none(), "sinks"_a.none(), "window"_a,
          "soft_cap"_a)
      .def("_lengths", &PagedKVCache::lengths)
      .def("_trim", &PagedKVCache::trim, "n"_a)
      .def("_release", &PagedKVCache::release)
      .def(
          "_fork_rows",
          [](PagedKVCache& cache, const PagedKVCache& other,
             const std::vector<std::int64_t>& indices, const std::vector<Owner>& owners) {
            cache.fork_rows(other, indices, owners);
          },
          "other"_a, "indices"_a, "owners"_a)
      .def("_take_rows", &PagedKVCache::take_rows, "other"_a)
      .def(
          "_keep_rows",
          [](PagedKVCache& cache, const std::vector<std::int64_t>& indices) {
            cache.keep_rows(indices);
          },
          "indices"_a)
      .def("_save_row",
           [](const PagedKVCache& cache, std::int64_t row) -> nb::object {
             const std::optional<PagedRowImage> image = cache.save_row(row);
             if (!image) return nb::none();
             return nb::make_tuple(image->block_size, image->n_kv_heads, image->key_dim,
                                   image->value_dim, image->dtype, image->blocks, image->keys,
                                   image->values, image->codebooks);
           },
           "row"_a)
      .def(
          "_load_rows",
          [](PagedKVCache& cache, const std::vector<std::optional<RowParts>>& rows,
             const std::vector<Owner>& owners) {
            std::vector<std::optional<PagedRowImage>> images;
            for (const std::optional<RowParts>& row : rows) {
              images.push_back(row ? std::optional(std::apply(image_of, *row)) : std::nullopt);
            }
            cache.load_rows(images, owners);
          },
          "rows"_a, "owners"_a)
      .def("_pending", &PagedKVCache::pending)
      .def("size", &PagedKVCache::size, "Tokens of the longest row.")
      .def("is_trimmable", &PagedKVCache::is_trimmable,
           "Whether no block was given back that slid out of reach.")
      .def_prop_ro("n_rows", &PagedKVCache::n_rows)
      .def_prop_ro("nbytes", &PagedKVCache::nbytes,
                   "Bytes of the blocks held; shared ones count for each holder.")
      .def_prop_ro("storage", &PagedKVCache::storage)
      .def_prop_ro("config", &PagedKVCache::config, nb::rv_policy::copy)
      .def_prop_ro("owners", &PagedKVCache::owners);
}

}  // namespace kvpool::bindings
