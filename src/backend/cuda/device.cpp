#include "backend/cuda/device.h"

#include <mlx/backend/cuda/device.h>
#include <mlx/backend/cuda/utils.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "backend/cuda/cuda_backend.h"
#include "util/concat.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// MLX has a CUDA runtime of its own: between the two, a kernel is known by its driver handle.
CUfunction handle_of(const void* function) {
  static std::mutex mutex;
  static std::unordered_map<const void*, CUfunction> handles;
  const std::lock_guard guard(mutex);
  const auto found = handles.find(function);
  if (found != handles.end()) return found->second;
  cudaFunction_t handle = nullptr;
  if (const cudaError_t error = cudaGetFuncBySymbol(&handle, function); error != cudaSuccess) {
    throw std::runtime_error(
        concat("kvpool's CUDA kernels cannot be loaded: ", cudaGetErrorString(error)));
  }
  return handles[function] = handle;
}

}  // namespace

std::byte* device_address(const mx::array& array) {
  const auto* buffer = static_cast<const mx::cu::CudaBuffer*>(array.buffer().ptr());
  return static_cast<std::byte*>(buffer->data) + array.offset();
}

mx::array device_bytes(std::size_t bytes) {
  constexpr std::size_t kWidth = std::size_t{1} << 16;
  const auto width = static_cast<mx::ShapeElem>(std::min(bytes, kWidth));
  const auto height = static_cast<mx::ShapeElem>((bytes + kWidth - 1) / kWidth);
  mx::array memory = mx::zeros({height, width}, mx::uint8, gpu_stream());
  mx::async_eval(std::vector<mx::array>{memory});
  return memory;
}

void MemoryChanges::add(mx::array memory) {
  const std::lock_guard guard(mutex_);
  changes_.push_back(std::move(memory));
}

std::vector<mx::array> MemoryChanges::take() {
  const std::lock_guard guard(mutex_);
  return std::exchange(changes_, {});
}

namespace {

mx::array to_device(const std::vector<std::uint8_t>& bytes) {
  const mx::array host(bytes.data(), {static_cast<mx::ShapeElem>(bytes.size())}, mx::uint8);
  // Arrays that are joined get new memory, which is the device's.
  const mx::array end = mx::zeros({1}, mx::uint8, gpu_stream());
  mx::array memory = mx::concatenate({host, end}, 0, gpu_stream());
  mx::async_eval(std::vector<mx::array>{memory});
  return memory;
}

}  // namespace

OpMemory::OpMemory(std::shared_ptr<MemoryChanges> changes, mx::array memory)
    : changes_(std::move(changes)),
      memory_(std::move(memory)),
      address_(device_address(memory_)),
      size_(memory_.nbytes()) {
  changes_->add(memory_);
}

OpMemory::OpMemory(std::shared_ptr<MemoryChanges> changes, std::size_t bytes)
    : OpMemory(std::move(changes), device_bytes(bytes)) {}

OpMemory::OpMemory(std::shared_ptr<MemoryChanges> changes, const std::vector<std::uint8_t>& bytes)
    : OpMemory(std::move(changes), to_device(bytes)) {}

OpMemory& OpMemory::operator=(OpMemory&& other) noexcept {
  give_up();
  changes_ = std::move(other.changes_);
  memory_ = std::move(other.memory_);
  address_ = other.address_;
  size_ = other.size_;
  return *this;
}

void OpMemory::give_up() noexcept {
  if (changes_ != nullptr) changes_->add(std::move(memory_));
}

int n_processors() {
  static const int n = [] {
    int device = 0;
    int count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  return n;
}

KernelQueue::KernelQueue(mx::Stream stream, const std::vector<mx::array>& inputs,
                         const std::vector<mx::array>& outputs)
    : stream_(stream), inputs_(inputs), outputs_(outputs) {
  auto& encoder = mx::cu::get_command_encoder(stream_);
  encoder.device().make_current();
  encoder.add_temporary(link());
}

void KernelQueue::run(const cuda::DecodeLaunch& launch) {
  cuda::DecodeParams params = launch.params;
  void* arguments[] = {&params};
  add(launch.function, dim3(launch.grid), launch.block, launch.shared_bytes, arguments);
}

void KernelQueue::add(const void* function, dim3 grid, unsigned block, unsigned shared_bytes,
                      void** arguments) {
  auto& encoder = mx::cu::get_command_encoder(stream_);
  if (first_) {
    for (const mx::array& input : inputs_) encoder.set_input_array(input);
  }
  first_ = false;
  encoder.set_output_array(link());
  for (const mx::array& output : outputs_) {
    if (output.data_shared_ptr() != link().data_shared_ptr()) encoder.set_output_array(output);
  }
  encoder.add_kernel_node_raw(handle_of(function), grid, dim3(block), dim3(), shared_bytes,
                              arguments);
}

void KernelQueue::hold_until_done(std::function<void()> last) {
  mx::cu::get_command_encoder(stream_).add_completed_handler(std::move(last));
}

}  // namespace kvpool::detail
