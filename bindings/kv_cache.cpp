#include "kvpool/kv_cache.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "kvpool/kv_cache_builder.h"
#include "kvpool/pooled_kv_cache.h"
#include "kvpool/standalone_kv_cache.h"
#include "kvpool/vecinfer_codebooks.h"

namespace kvpool::bindings {

using namespace nb::literals;
namespace mx = mlx::core;

namespace {

/// A Python object with the methods of a KVCache.
class PythonKVCache final : public KVCache {
 public:
  explicit PythonKVCache(nb::object object) : object_(std::move(object)) {
    for (const char* method : {"append_key", "append_value", "attend", "memory_bytes", "reset"}) {
      if (!nb::hasattr(object_, method)) {
        throw std::invalid_argument(std::string("PooledKVCache: inner must have append_key, "
                                                "append_value, attend, memory_bytes and reset; it "
                                                "has no ") +
                                    method);
      }
    }
  }

  nb::handle object() const { return object_; }
  /// Breaks a cycle of references that nobody can reach any more.
  void let_go() const { std::exchange(object_, nb::none()); }

  void append_key(const mx::array& k) override {
    object_.attr("append_key")(k);
    ++n_keys_;
  }
  void append_value(const mx::array& v) override {
    object_.attr("append_value")(v);
    ++n_values_;
  }
  mx::array attend(const mx::array& q) override {
    return nb::cast<mx::array>(object_.attr("attend")(q));
  }
  std::int64_t memory_bytes() const override {
    return nb::cast<std::int64_t>(object_.attr("memory_bytes")());
  }
  void reset() override {
    object_.attr("reset")();
    n_keys_ = n_values_ = 0;
  }
  std::int64_t size() const override { return n_values_; }
  bool drop_last_key() override {
    if (n_keys_ == n_values_ || !nb::hasattr(object_, "drop_last_key")) return false;
    if (!nb::cast<bool>(object_.attr("drop_last_key")())) return false;
    --n_keys_;
    return true;
  }

 private:
  mutable nb::object object_;
  std::int64_t n_keys_ = 0;
  std::int64_t n_values_ = 0;
};

std::shared_ptr<KVCache> to_cache(nb::object inner) {
  std::shared_ptr<KVCache> cache;
  if (nb::try_cast(inner, cache) && cache != nullptr) return cache;
  return std::make_shared<PythonKVCache>(std::move(inner));
}

void bind_interface(nb::module_& m) {
  nb::class_<KVCache>(m, "KVCache",
                      "The keys and values of one head of one request, one vector at a time.")
      .def("append_key", &KVCache::append_key, "k"_a, "k: (d,)",
           nb::sig("def append_key(self, k: mlx.core.array) -> None"))
      .def("append_value", &KVCache::append_value, "v"_a, "v: (d,)",
           nb::sig("def append_value(self, v: mlx.core.array) -> None"))
      .def("append", &KVCache::append, "k"_a, "v"_a,
           nb::sig("def append(self, k: mlx.core.array, v: mlx.core.array) -> None"),
           "append_key() and append_value(): both or, where the cache can take a key back, neither.")
      .def("attend", &KVCache::attend, "q"_a,
           nb::sig("def attend(self, q: mlx.core.array) -> mlx.core.array"),
           "Attention of one query (d,) over all tokens, with scores divided by sqrt(d): (d,).")
      .def("memory_bytes", &KVCache::memory_bytes, "Bytes that the stored tokens take.")
      .def("drop_last_key", &KVCache::drop_last_key,
           "Takes back the last key, which must have no value yet; False if this cache cannot.")
      .def("reset", &KVCache::reset, "Forgets all tokens.")
      .def("__len__", &KVCache::size);
}

/// Shows Python's collector the object inside, which may refer back to its PooledKVCache.
int traverse_pooled(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const std::shared_ptr<KVCache>& inner = nb::inst_ptr<PooledKVCache>(self)->inner();
  const auto* python = dynamic_cast<const PythonKVCache*>(inner.get());
  Py_VISIT(python != nullptr ? python->object().ptr() : nb::find(inner).ptr());
  return 0;
}

int clear_pooled(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  const auto* python =
      dynamic_cast<const PythonKVCache*>(nb::inst_ptr<PooledKVCache>(self)->inner().get());
  if (python != nullptr) python->let_go();
  return 0;
}

PyType_Slot pooled_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_pooled)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear_pooled)},
                              {0, nullptr}};

void bind_pooled(nb::module_& m) {
  nb::class_<PooledKVCache, KVCache>(
      m, "PooledKVCache", nb::type_slots(pooled_slots),
      "A cache whose tokens are accounted for in a pool, whatever the cache inside stores and how.\n\n"
      "`inner` is a KVCache of this package or any object with append_key, append_value, attend,\n"
      "memory_bytes and reset (and drop_last_key() -> bool, if a failed append is to take its key\n"
      "back). A call that fails leaves pool and cache as they were. Blocks go back with release(),\n"
      "reset() or the cache. Not thread-safe; the pool may be shared.")
      .def(
          "__init__",
          [](PooledKVCache* self, nb::object inner, std::shared_ptr<BlockPoolAllocator> pool,
             Owner owner, std::string format) {
            new (self) PooledKVCache(to_cache(std::move(inner)), std::move(pool), owner,
                                     std::move(format));
          },
          "inner"_a, "pool"_a, "owner"_a = -1, "format"_a = "fp16")
      .def("release", &PooledKVCache::release,
           "Gives all blocks of this cache back. Tokens stay.")
      .def("n_blocks_held", &PooledKVCache::n_blocks_held, "Blocks of keys and values together.")
      .def_prop_ro("owner", &PooledKVCache::owner)
      .def_prop_ro(
          "inner",
          [](const PooledKVCache& self) -> nb::object {
            const auto* python = dynamic_cast<const PythonKVCache*>(self.inner().get());
            return python != nullptr ? nb::borrow(python->object()) : nb::cast(self.inner());
          })
      .def("__repr__", [](const PooledKVCache& self) {
        return "PooledKVCache(size=" + std::to_string(self.size()) +
               ", owner=" + std::to_string(self.owner()) +
               ", blocks=" + std::to_string(self.n_blocks_held()) + ")";
      });
}

void bind_standalone(nb::module_& m) {
  nb::class_<StandaloneKVCache, KVCache>(
      m, "StandaloneKVCache",
      "One head's tokens in paged blocks of its own, with any format: packed for real, attended where\n"
      "they lie. Vectors are kept as fp16 until they are encoded. attend() gives fp16.\n\n"
      "Raises ValueError naming the argument and what is allowed.")
      .def(nb::init<std::int64_t, const PagedKVCacheConfig&, std::int64_t>(), "head_dim"_a,
           "config"_a, "block_size"_a = 32)
      .def_prop_ro("head_dim", &StandaloneKVCache::head_dim)
      .def("__repr__", [](const StandaloneKVCache& self) {
        return "StandaloneKVCache(size=" + std::to_string(self.size()) + ", format='" +
               self.config().key_format + "')";
      });
}

void bind_builder(nb::module_& m) {
  nb::class_<KVCacheConfig>(m, "KVCacheConfig", "What KVCacheFactory makes a cache from.")
      .def(
          "__init__",
          [](KVCacheConfig* self, std::string method, std::int64_t head_dim, int bits,
             int group_size, std::int64_t block_size, std::int64_t window, std::int64_t sink,
             bool check_finite, std::shared_ptr<VecInferCodebooks> codebooks,
             std::optional<std::uint64_t> random_codebooks) {
            new (self) KVCacheConfig{std::move(method),    head_dim,         bits,
                                     group_size,           block_size,       window,
                                     sink,                 check_finite,     std::move(codebooks),
                                     random_codebooks};
          },
          "method"_a = "kivi", "head_dim"_a = 128, "bits"_a = 2, "group_size"_a = 32,
          "block_size"_a = 32, "window"_a = 128, "sink"_a = 0, "check_finite"_a = false,
          "codebooks"_a.none() = nb::none(), "random_codebooks"_a.none() = nb::none())
      .def_rw("method", &KVCacheConfig::method,
              "'fp16', 'int8', 'int4', 'int2', 'kivi4', 'kivi2', 'vecinfer1', 'vecinfer1.5', 'vecinfer2',\n"
              "'vecinfer3', 'vecinfer4'; 'int', 'kivi' and 'vecinfer' with `bits`.")
      .def_rw("head_dim", &KVCacheConfig::head_dim)
      .def_rw("bits", &KVCacheConfig::bits)
      .def_rw("group_size", &KVCacheConfig::group_size, "Channels to a scale: 32 or 64.")
      .def_rw("block_size", &KVCacheConfig::block_size,
              "Tokens a block: those that KIVI's keys share a scale with.")
      .def_rw("window", &KVCacheConfig::window, "Newest tokens that stay fp16.")
      .def_rw("sink", &KVCacheConfig::sink, "First tokens that stay fp16.")
      .def_rw("check_finite", &KVCacheConfig::check_finite,
              "Evaluate each token and refuse what the method cannot store.")
      .def_prop_ro(
          "codebooks",
          [](const KVCacheConfig& config) {
            return std::const_pointer_cast<VecInferCodebooks>(config.codebooks);
          },
          "Of vecinfer methods: codebooks of one KV head.")
      .def_rw("random_codebooks", &KVCacheConfig::random_codebooks,
              "If there are no codebooks: the seed of random ones, for tests.")
      .def(nb::self == nb::self, kEqual);
  nb::class_<KVCacheFactory>(m, "KVCacheFactory")
      .def_static("create", &KVCacheFactory::create, "config"_a,
                  "Raises ValueError naming the field, its value and what is allowed.");
  nb::class_<KVCacheBuilder>(m, "KVCacheBuilder",
                             "Sets the fields of a KVCacheConfig by name, then makes the cache.")
      .def(nb::init<>())
      .def("with_method", &KVCacheBuilder::with_method, "method"_a, nb::rv_policy::none)
      .def("with_head_dim", &KVCacheBuilder::with_head_dim, "head_dim"_a, nb::rv_policy::none)
      .def("with_bits", &KVCacheBuilder::with_bits, "bits"_a, nb::rv_policy::none)
      .def("with_group_size", &KVCacheBuilder::with_group_size, "group_size"_a, nb::rv_policy::none)
      .def("with_block_size", &KVCacheBuilder::with_block_size, "block_size"_a, nb::rv_policy::none)
      .def("with_window", &KVCacheBuilder::with_window, "window"_a, nb::rv_policy::none)
      .def("with_sink", &KVCacheBuilder::with_sink, "sink"_a, nb::rv_policy::none)
      .def("with_check_finite", &KVCacheBuilder::with_check_finite, "check_finite"_a,
           nb::rv_policy::none)
      .def(
          "with_codebooks",
          [](KVCacheBuilder& builder, std::shared_ptr<VecInferCodebooks> codebooks)
              -> KVCacheBuilder& { return builder.with_codebooks(std::move(codebooks)); },
          "codebooks"_a, nb::rv_policy::none, "Of one KV head, for vecinfer methods.")
      .def("with_random_codebooks", &KVCacheBuilder::with_random_codebooks, "seed"_a,
           nb::rv_policy::none, "VecInferCodebooks.random(), for tests.")
      .def_prop_ro("config", &KVCacheBuilder::config, nb::rv_policy::copy)
      .def("build", &KVCacheBuilder::build, "As KVCacheFactory.create().");
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  bind_interface(m);
  bind_pooled(m);
  bind_standalone(m);
  bind_builder(m);
}

}  // namespace kvpool::bindings
