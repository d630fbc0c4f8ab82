#include "block_pool.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>

#include "bindings.h"

namespace kvpool::bindings {

using namespace nb::literals;

namespace {

using PoolHandle = nb::handle_t<BlockPoolAllocator>;

/// Above this many blocks a call takes long enough that other threads should run meanwhile.
constexpr std::int64_t kLongCall = 4096;

class ReleaseGilIf {
 public:
  explicit ReleaseGilIf(bool pays) {
    if (pays) released_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> released_;
};

/// The counters of a pool as they are now, or those it was made with.
struct StatsView {
  nb::object pool;
  AllocationStats own;

  AllocationStats now() const {
    return pool.is_valid() ? nb::cast<BlockPoolAllocator&>(pool).stats() : own;
  }
};

BlockPoolAllocator& pool_of(PoolHandle handle) {
  if (!nb::inst_ready(handle)) throw nb::type_error("BlockPoolAllocator: __init__ was not called");
  return *nb::inst_ptr<BlockPoolAllocator>(handle);
}

/// What `object` holds; a TypeError saying `expected` if it is no T.
template <typename T>
T& require(nb::handle object, const char* expected) {
  T* held = nullptr;
  if (nb::try_cast(object, held) && held != nullptr) return *held;
  throw nb::type_error((std::string(expected) + ", got " + nb::inst_name(object).c_str()).c_str());
}

nb::list to_list(const std::vector<Block>& blocks, PoolHandle pool) {
  nb::list list;
  for (const Block& block : blocks) list.append(PyBlock{block, nb::borrow(pool)});
  return list;
}

Stream to_stream(const BlockPoolAllocator& pool, std::string_view name) {
  return pool.config().separate_kv ? stream_from_string(name) : Stream::kKeyValue;
}

std::string repr(const AllocationStats& s) {
  return "AllocationStats(in_use=" + std::to_string(s.blocks_in_use()) + "/" +
         std::to_string(s.n_blocks) + ", allocations=" + std::to_string(s.n_allocations) +
         ", frees=" + std::to_string(s.n_frees) + ", reused=" + std::to_string(s.n_reused) +
         ", exhausted=" + std::to_string(s.n_exhausted) + ", grown=" + std::to_string(s.n_grown) +
         ", retired=" + std::to_string(s.n_retired) +
         ", peak=" + std::to_string(s.peak_blocks_in_use) +
         ", fragmentation=" + std::to_string(s.fragmentation()) + ")";
}

template <auto field, typename View>
std::int64_t counter(const View& view) {
  return view.now().*field;
}

void bind_stats(nb::module_& m) {
  nb::class_<StatsView>(m, "AllocationStats",
                        "Counters of a pool since it was made, in blocks unless noted. `pool.stats` "
                        "is live; those of snapshot() and `pool.history` stay. Thread-safe.")
      .def(
          "__init__",
          [](StatsView* self, std::int64_t n_blocks, std::int64_t n_allocations,
             std::int64_t n_frees, std::int64_t n_reused, std::int64_t n_exhausted,
             std::int64_t n_grown, std::int64_t n_retired, std::int64_t peak_blocks_in_use,
             std::int64_t fragmented_count) {
            new (self) StatsView{{},
                                 {n_blocks, n_allocations, n_frees, n_reused, n_exhausted, n_grown,
                                  n_retired, peak_blocks_in_use, fragmented_count}};
          },
          "n_blocks"_a, "n_allocations"_a = 0, "n_frees"_a = 0, "n_reused"_a = 0,
          "n_exhausted"_a = 0, "n_grown"_a = 0, "n_retired"_a = 0, "peak_blocks_in_use"_a = 0,
          "_fragmented_count"_a = 0)
      .def_prop_ro("n_blocks", &counter<&AllocationStats::n_blocks, StatsView>,
                   "Blocks that the pool manages.")
      .def_prop_ro("n_allocations", &counter<&AllocationStats::n_allocations, StatsView>)
      .def_prop_ro("n_frees", &counter<&AllocationStats::n_frees, StatsView>,
                   "Blocks that went back to a free list.")
      .def_prop_ro("n_reused", &counter<&AllocationStats::n_reused, StatsView>,
                   "Allocations of a block that had been handed out before.")
      .def_prop_ro("n_exhausted", &counter<&AllocationStats::n_exhausted, StatsView>,
                   "Failed allocate() calls.")
      .def_prop_ro("n_grown", &counter<&AllocationStats::n_grown, StatsView>)
      .def_prop_ro("n_retired", &counter<&AllocationStats::n_retired, StatsView>)
      .def_prop_ro("peak_blocks_in_use", &counter<&AllocationStats::peak_blocks_in_use, StatsView>)
      .def_prop_ro("_fragmented_count", &counter<&AllocationStats::fragmented_count, StatsView>)
      .def("blocks_in_use", [](const StatsView& s) { return s.now().blocks_in_use(); },
           "Blocks that some owner holds; a shared block counts once.")
      .def("fragmentation", [](const StatsView& s) { return s.now().fragmentation(); },
           "Fraction of the managed blocks that are in use and not full; 0.0 for a pool of none.")
      .def("snapshot", [](const StatsView& s) { return StatsView{{}, s.now()}; },
           "An independent copy.")
      .def("to_prometheus",
           [](const StatsView& s, std::string_view prefix) { return s.now().to_prometheus(prefix); },
           "prefix"_a = "veloxquant_block_pool",
           "Prometheus text exposition format 0.0.4, newline-terminated.\n\n"
           "Raises ValueError if `prefix` is no metric name.")
      .def("__eq__", [](const StatsView& a, const StatsView& b) { return a.now() == b.now(); },
           nb::is_operator(), kEqual)
      .def("__repr__", [](const StatsView& s) { return repr(s.now()); });

  m.def(
      "render_prometheus",
      [](nb::dict pools, std::string_view prefix) {
        std::vector<std::pair<std::string, AllocationStats>> named;
        for (auto [key, stats] : pools) {
          std::string name;
          if (!nb::try_cast(key, name)) {
            throw nb::type_error("render_prometheus: names in pools must be text");
          }
          named.emplace_back(
              std::move(name),
              require<StatsView>(stats, "render_prometheus: pools must name AllocationStats").now());
        }
        return render_prometheus(named, prefix);
      },
      "pools"_a, "prefix"_a = "kvpool_block_pool",
      nb::sig("def render_prometheus(pools: dict[str, AllocationStats], prefix: str = "
              "'kvpool_block_pool') -> str"),
      "One page for several pools: each metric has one HELP and TYPE, and a sample a pool with the\n"
      "pool's name, escaped, as the label `pool`.");
}

void bind_config(nb::module_& m) {
  nb::class_<PoolConfig>(m, "PoolConfig",
                         "Size and behaviour of a BlockPoolAllocator.\n\n"
                         "Raises ValueError naming the field, its value and what is allowed.")
      .def(
          "__init__",
          [](PoolConfig* self, std::int64_t block_size, std::int64_t n_blocks, bool separate_kv,
             bool grow_on_exhaustion, std::optional<std::int64_t> max_blocks) {
            const PoolConfig config{block_size, n_blocks, separate_kv, grow_on_exhaustion,
                                    max_blocks};
            config.validate();
            new (self) PoolConfig(config);
          },
          "block_size"_a = 16, "n_blocks"_a = 1024, "separate_kv"_a = true,
          "grow_on_exhaustion"_a = false, "max_blocks"_a = nb::none())
      .def_rw("block_size", &PoolConfig::block_size, "Token slots in one block.")
      .def_rw("n_blocks", &PoolConfig::n_blocks, "Blocks at the start, over all streams.")
      .def_rw("separate_kv", &PoolConfig::separate_kv,
              "Whether keys and values draw from free lists of their own.")
      .def_rw("grow_on_exhaustion", &PoolConfig::grow_on_exhaustion,
              "Whether a stream without enough free blocks grows instead of raising.")
      .def_rw("max_blocks", &PoolConfig::max_blocks, nb::arg().none(),
              "Blocks over all streams that growth may reach; None: no bound.")
      .def(nb::self == nb::self, kEqual)
      .def("__repr__", [](const PoolConfig& c) {
        const auto text = [](bool b) { return b ? "True" : "False"; };
        return "PoolConfig(block_size=" + std::to_string(c.block_size) +
               ", n_blocks=" + std::to_string(c.n_blocks) + ", separate_kv=" + text(c.separate_kv) +
               ", grow_on_exhaustion=" + text(c.grow_on_exhaustion) + ", max_blocks=" +
               (c.max_blocks ? std::to_string(*c.max_blocks) : std::string("None")) + ")";
      });
}

bool shows_the_same(const Block& a, const Block& b) {
  return a.stream() == b.stream() && a.format() == b.format() && a.n_used() == b.n_used() &&
         a.owner() == b.owner() && a.ever_allocated() == b.ever_allocated();
}

void bind_block(nb::module_& m) {
  nb::class_<PyBlock>(m, "Block",
                      "A handle to one block: who holds it is asked from the pool, live.\n\n"
                      "It names the block and this holding of it; once freed it shows owner None and "
                      "n_used 0, whoever got the block next. Keeps its pool alive. Thread-safe.")
      .def(
          "__init__",
          [](PyBlock* self, std::int64_t block_id, std::string_view stream, std::string_view format,
             std::int64_t n_used, std::optional<Owner> owner, bool ever_allocated) {
            new (self) PyBlock{
                Block(block_id, stream_from_string(stream), format, n_used, owner, ever_allocated),
                {}};
          },
          "block_id"_a, "stream"_a = "kv", "format"_a = "fp16", "n_used"_a = 0,
          "owner"_a = nb::none(), "ever_allocated"_a = false,
          "A handle that belongs to no pool, and equals another that shows the same.")
      .def_prop_ro("block_id", [](const PyBlock& b) { return b.block.block_id(); })
      .def_prop_ro("stream", [](const PyBlock& b) { return to_string(b.block.stream()); },
                   "'k', 'v', or 'kv' in a pool that does not separate them.")
      .def_prop_ro("format", [](const PyBlock& b) { return b.block.format(); })
      .def_prop_ro("n_used", [](const PyBlock& b) { return b.block.n_used(); },
                   "Token slots in use; 0 once freed.")
      .def_prop_ro("owner", [](const PyBlock& b) { return b.block.owner(); },
                   "Who holds the block through this handle; None once freed.")
      .def_prop_ro("ever_allocated", [](const PyBlock& b) { return b.block.ever_allocated(); })
      .def_prop_ro("generation", [](const PyBlock& b) { return b.block.generation(); },
                   "Differs between any two holdings of a pool.")
      .def_prop_ro("live", [](const PyBlock& b) { return b.block.live(); },
                   "Whether this handle still holds its block.")
      .def("__eq__",
           [](const PyBlock& a, const PyBlock& b) {
             return a.pool.is(b.pool) && a.block.block_id() == b.block.block_id() &&
                    a.block.generation() == b.block.generation() &&
                    (a.pool.is_valid() || shows_the_same(a.block, b.block));
           },
           nb::is_operator(), kEqual)
      .def("__hash__",
           [](const PyBlock& b) {
             return std::hash<std::uint64_t>{}(b.block.generation()) ^
                    std::hash<std::int64_t>{}(b.block.block_id());
           })
      .def("__repr__", [](const PyBlock& b) {
        const std::optional<Owner> owner = b.block.owner();
        return "Block(block_id=" + std::to_string(b.block.block_id()) + ", stream='" +
               std::string(to_string(b.block.stream())) + "', format='" + b.block.format() +
               "', n_used=" + std::to_string(b.block.n_used()) +
               ", owner=" + (owner ? std::to_string(*owner) : std::string("None")) + ")";
      });
}

void bind_allocator(nb::module_& m) {
  nb::exception<BlockPoolExhaustedError>(m, "BlockPoolExhaustedError", PyExc_RuntimeError);
  nb::exception<OwnerAlreadyActiveError>(m, "OwnerAlreadyActiveError", PyExc_ValueError);

  nb::class_<BlockPoolAllocator>(
      m, "BlockPoolAllocator",
      "Hands out fixed-size blocks of token slots to owners (requests) and takes them back.\n\n"
      "Every call either does all it says or raises and changes nothing but `n_exhausted`. A block\n"
      "can have several owners; it is free when the last one lets go. Free lists are LIFO.\n"
      "Thread-safe, every member. Holds no memory: see MLXBlockStorage.")
      .def(
          "__init__",
          [](BlockPoolAllocator* self, const PoolConfig* config) {
            new (self) BlockPoolAllocator(config != nullptr ? *config : PoolConfig{});
          },
          "config"_a.none() = nb::none())
      .def_prop_ro("config", &BlockPoolAllocator::config, nb::rv_policy::copy)
      .def_prop_ro("stats", [](PoolHandle self) { return StatsView{nb::borrow(self), {}}; },
                   nb::sig("def stats(self) -> AllocationStats"),
                   "Counters, live: they change with the pool.")
      .def_prop_ro(
          "history",
          [](const BlockPoolAllocator& pool) {
            nb::list snapshots;
            for (const AllocationStats& s : pool.history()) snapshots.append(StatsView{{}, s});
            return nb::module_::import_("collections")
                .attr("deque")(snapshots, BlockPoolAllocator::kHistorySize);
          },
          nb::sig("def history(self) -> collections.deque[AllocationStats]"),
          "Counters after each of the last 256 calls that changed some, oldest first.")
      .def("register_owner", &BlockPoolAllocator::register_owner, "owner"_a,
           "Marks `owner` active.\n\n"
           "Raises OwnerAlreadyActiveError if it is registered or holds blocks.")
      .def("release_owner", &BlockPoolAllocator::release_owner, "owner"_a,
           "Undoes register_owner(). Frees nothing: an owner that holds blocks stays active.")
      .def("new_owner", &BlockPoolAllocator::new_owner,
           "An owner id that is not active and that no earlier call returned.")
      .def(
          "allocate",
          [](PoolHandle self, std::string_view stream, std::int64_t n_tokens, Owner owner,
             std::string_view format) {
            BlockPoolAllocator& pool = pool_of(self);
            const Stream resolved = to_stream(pool, stream);
            std::vector<Block> blocks;
            {
              const ReleaseGilIf released(n_tokens / pool.config().block_size > kLongCall);
              blocks = pool.allocate(resolved, n_tokens, owner, format);
            }
            return to_list(blocks, self);
          },
          "stream"_a, "n_tokens"_a, "owner"_a, "format"_a = "fp16",
          nb::sig("def allocate(self, stream: str, n_tokens: int, owner: int, format: str = 'fp16') "
                  "-> list[Block]"),
          "Takes blocks for `n_tokens` slots, all or none; registers `owner` if it is new.\n\n"
          "`stream` is 'k' or 'v', and ignored by a pool that does not separate them. Raises\n"
          "BlockPoolExhaustedError when too few blocks are free and growth cannot help, ValueError\n"
          "for `n_tokens` < 1 or another stream.")
      .def(
          "allocate_kv",
          [](PoolHandle self, std::int64_t n_tokens, Owner owner, std::string_view format) {
            BlockPoolAllocator& pool = pool_of(self);
            std::pair<std::vector<Block>, std::vector<Block>> blocks;
            {
              const ReleaseGilIf released(n_tokens / pool.config().block_size > kLongCall);
              blocks = pool.allocate_kv(n_tokens, owner, format);
            }
            return nb::make_tuple(to_list(blocks.first, self), to_list(blocks.second, self));
          },
          "n_tokens"_a, "owner"_a, "format"_a = "fp16",
          nb::sig("def allocate_kv(self, n_tokens: int, owner: int, format: str = 'fp16') -> "
                  "tuple[list[Block], list[Block]]"),
          "allocate() for keys and for values in one step: both or neither.")
      .def(
          "share",
          [](PoolHandle self, nb::iterable blocks, Owner owner) {
            return to_list(pool_of(self).share(to_blocks(blocks), owner), self);
          },
          "blocks"_a, "owner"_a,
          nb::sig("def share(self, blocks: collections.abc.Iterable[Block], owner: int) -> "
                  "list[Block]"),
          "Adds `owner` to the owners of live blocks; returns the handles through which it holds "
          "them.\n\nRaises ValueError if a handle is freed, stale or of another pool.")
      .def(
          "free",
          [](BlockPoolAllocator& pool, nb::iterable blocks) {
            const std::vector<Block> handles = to_blocks(blocks);
            const ReleaseGilIf released(static_cast<std::int64_t>(handles.size()) > kLongCall);
            pool.free(handles);
          },
          "blocks"_a,
          nb::sig("def free(self, blocks: collections.abc.Iterable[Block]) -> None"),
          "Lets go of what these handles hold. What a handle has freed already counts nothing.\n\n"
          "Raises ValueError, freeing nothing, if a handle's block is held by others since, or is of "
          "another pool.")
      .def("free_all", &BlockPoolAllocator::free_all, "owner"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Lets go of all that `owner` holds, and of the owner; an unknown owner is a no-op.")
      .def(
          "blocks_for",
          [](PoolHandle self, Owner owner) {
            return to_list(pool_of(self).blocks_for(owner), self);
          },
          "owner"_a, nb::sig("def blocks_for(self, owner: int) -> list[Block]"),
          "What `owner` holds, in the order in which it got it.")
      .def("ref_count",
           [](const BlockPoolAllocator& pool, const PyBlock& b) { return pool.ref_count(b.block); },
           "block"_a, "Owners of the handle's block; 0 if the handle is freed.")
      .def("n_free",
           [](const BlockPoolAllocator& pool, std::string_view stream) {
             return pool.n_free(to_stream(pool, stream));
           },
           "stream"_a = "k", "Free blocks of `stream`.")
      .def("shrink",
           [](BlockPoolAllocator& pool, std::string_view stream, std::int64_t target_free) {
             return pool.shrink(to_stream(pool, stream), target_free);
           },
           "stream"_a, "target_free"_a,
           "Retires free blocks of `stream` for good until `target_free` are left; returns how "
           "many.\n\nRaises ValueError if `target_free` < 0.")
      .def("mark_used",
           [](BlockPoolAllocator& pool, const PyBlock& b, std::int64_t n_used) {
             pool.mark_used(b.block, n_used);
           },
           "block"_a, "n_used"_a,
           "Says how many slots of a block are in use. A freed handle is passed over.\n\n"
           "Raises ValueError if `n_used` is not in 0..block_size, or as free() does.")
      .def("__repr__", [](const BlockPoolAllocator& pool) {
        return "BlockPoolAllocator(" + repr(pool.stats()) + ")";
      });
}

}  // namespace

std::vector<Block> to_blocks(nb::iterable blocks) {
  std::vector<Block> handles;
  for (nb::handle block : blocks) {
    handles.push_back(require<PyBlock>(block, "blocks must be of type Block").block);
  }
  return handles;
}

void bind_block_pool(nb::module_& m) {
  bind_config(m);
  bind_stats(m);
  bind_block(m);
  bind_allocator(m);
}

}  // namespace kvpool::bindings
