#include "kvpool/mlx_block_storage.h"

#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"
#include "block_pool.h"

namespace kvpool::bindings {

using namespace nb::literals;

void bind_mlx_block_storage(nb::module_& m) {
  nb::class_<MLXBlockStorage>(
      m, "MLXBlockStorage",
      "The memory behind the blocks of a BlockPoolAllocator.\n\n"
      "A block's memory is taken at first use, in the block's format (fp32, fp16, bf16, or codes int1\n"
      "to int8, bit-packed), and does not move while the block lives. Rows that were not written in\n"
      "the block's present life are zero. Reads and writes are lazy and happen in the order asked\n"
      "for. Thread-safe.\n\n"
      "Arrays have a first axis for heads when n_kv_heads > 1. Every call on a block raises\n"
      "ValueError if the block is freed, stale or of another pool, or its format is not one of the\n"
      "above.")
      .def(nb::init<std::shared_ptr<BlockPoolAllocator>, std::int64_t, std::int64_t,
                    std::shared_ptr<MlxBufferPool>>(),
           "pool"_a, "head_dim"_a, "n_kv_heads"_a = 1, "buffers"_a.none() = nb::none())
      .def_prop_ro("pool", &MLXBlockStorage::pool)
      .def_prop_ro("head_dim", &MLXBlockStorage::head_dim)
      .def_prop_ro("n_kv_heads", &MLXBlockStorage::n_kv_heads)
      .def("buffer_for",
           [](MLXBlockStorage& s, const PyBlock& b) { return s.buffer_for(b.block); }, "block"_a,
           nb::sig("def buffer_for(self, block: Block) -> mlx.core.array"),
           "All rows as they lie: (block_size, head_dim) of the float type, or (block_size,\n"
           "ceil(head_dim * bits / 8)) of uint8, packed. A copy, which stays as it is.")
      .def("write",
           [](MLXBlockStorage& s, const PyBlock& b, std::int64_t offset,
              const mlx::core::array& values) { s.write(b.block, offset, values); },
           "block"_a, "offset"_a, "values"_a,
           nb::sig("def write(self, block: Block, offset: int, values: mlx.core.array) -> None"),
           "Writes `values`, (n, head_dim), at slots `offset` to `offset + n`: floats, or integer\n"
           "codes of which the low bits count. Raises ValueError if they do not fit.")
      .def("read", [](MLXBlockStorage& s, const PyBlock& b) { return s.read(b.block); }, "block"_a,
           nb::sig("def read(self, block: Block) -> mlx.core.array"),
           "The slots in use, (block.n_used, head_dim): floats, or codes as uint8.")
      .def("resident_bytes", &MLXBlockStorage::resident_bytes, "Bytes of all segments held.")
      .def("release", [](MLXBlockStorage& s, const PyBlock& b) { s.release(b.block); }, "block"_a,
           "Gives back the memory of a freed block. Does nothing if the id was handed on since.\n\n"
           "Raises ValueError if the block is still held.");
}

}  // namespace kvpool::bindings
