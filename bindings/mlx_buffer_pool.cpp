#include "kvpool/mlx_buffer_pool.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "bindings.h"

namespace kvpool::bindings {

using namespace nb::literals;
namespace mx = mlx::core;

namespace {

mx::Shape to_shape(const std::vector<mx::ShapeElem>& shape) {
  return mx::Shape(shape.begin(), shape.end());
}

using Request = std::tuple<std::size_t, mx::Dtype, std::vector<mx::ShapeElem>>;

}  // namespace

void bind_mlx_buffer_pool(nb::module_& m) {
  nb::exception<StaleBufferError>(m, "StaleBufferError", PyExc_ValueError);

  nb::class_<MlxBuffer>(m, "MlxBuffer",
                        "A handle to a buffer that an MlxBufferPool handed out. Thread-safe.")
      .def_prop_ro("byte_len", &MlxBuffer::byte_len, "Bytes asked for.")
      .def_prop_ro("dtype", &MlxBuffer::dtype, nb::sig("def dtype(self) -> mlx.core.Dtype"))
      .def_prop_ro(
          "shape",
          [](const MlxBuffer& b) {
            nb::list extents;
            for (const mx::ShapeElem extent : b.shape()) extents.append(extent);
            return nb::tuple(extents);
          },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("capacity", &MlxBuffer::capacity, "Bytes held.")
      .def_prop_ro("live", &MlxBuffer::live, "Whether the buffer is still this handle's.")
      .def_prop_ro("array", &MlxBuffer::array, nb::sig("def array(self) -> mlx.core.array"),
                   "An mx.array over the buffer, without a copy. While it or anything computed from "
                   "it lazily is alive, the buffer is not handed out again.\n\n"
                   "Raises StaleBufferError if the buffer was released, or the pool reset.")
      .def("__repr__", [](const MlxBuffer& b) {
        return "MlxBuffer(byte_len=" + std::to_string(b.byte_len()) +
               ", capacity=" + std::to_string(b.capacity()) +
               (b.live() ? ", live)" : ", given back)");
      });

  nb::class_<MlxBufferPool>(
      m, "MlxBufferPool",
      "An arena of MLX buffers by power-of-two size, reused from step to step.\n\n"
      "A request takes the free buffer of its size class that was used last, or of the class above.\n"
      "Fresh memory is zero; a reused buffer shows what was there. Free buffers are kept up to\n"
      "`max_free_bytes`; those unused for longest go first. Thread-safe.")
      .def(nb::init<std::size_t>(), "max_free_bytes"_a = MlxBufferPool::kDefaultMaxFreeBytes)
      .def(
          "alloc",
          [](MlxBufferPool& pool, mx::Device device, std::size_t byte_len, mx::Dtype dtype,
             const std::vector<mx::ShapeElem>& shape) {
            return pool.alloc(device, byte_len, dtype, to_shape(shape));
          },
          "device"_a, "byte_len"_a, "dtype"_a, "shape"_a,
          nb::sig("def alloc(self, device: mlx.core.Device, byte_len: int, dtype: mlx.core.Dtype, "
                  "shape: collections.abc.Sequence[int]) -> MlxBuffer"),
          "A buffer of at least `byte_len` bytes; its array has `shape` and `dtype`.\n\n"
          "Raises ValueError if the shape does not fit `byte_len`.")
      .def(
          "alloc_batch",
          [](MlxBufferPool& pool, mx::Device device, const std::vector<Request>& requests) {
            std::vector<BufferRequest> list;
            list.reserve(requests.size());
            for (const auto& [byte_len, dtype, shape] : requests) {
              list.push_back({byte_len, dtype, to_shape(shape)});
            }
            return pool.alloc_batch(device, list);
          },
          "device"_a, "requests"_a,
          nb::sig("def alloc_batch(self, device: mlx.core.Device, requests: "
                  "collections.abc.Sequence[tuple[int, mlx.core.Dtype, "
                  "collections.abc.Sequence[int]]]) -> list[MlxBuffer]"),
          "alloc() for a whole step's (byte_len, dtype, shape): all buffers, or an exception and "
          "none.")
      .def("release", &MlxBufferPool::release, "buffer"_a,
           "Gives one buffer back; twice is a no-op.\n\n"
           "Raises StaleBufferError if the buffer was handed on since or the pool was reset, "
           "ValueError if it is of another pool.")
      .def("reset", &MlxBufferPool::reset,
           "Gives back all buffers that are out. Their handles are stale from here on.")
      .def("clear", &MlxBufferPool::clear, "Returns the memory of the free buffers to MLX.")
      .def("free_count", &MlxBufferPool::free_count)
      .def("free_bytes", &MlxBufferPool::free_bytes)
      .def("in_use_count", &MlxBufferPool::in_use_count)
      .def("created_bytes", &MlxBufferPool::created_bytes, "Bytes of all buffers ever made.")
      .def_prop_ro("max_free_bytes", &MlxBufferPool::max_free_bytes);
}

}  // namespace kvpool::bindings
