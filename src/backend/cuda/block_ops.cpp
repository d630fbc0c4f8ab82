#include <mlx/allocator.h>
#include <mlx/backend/cuda/device.h>
#include <mlx/ops.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <memory>

#include "backend/cuda/append_work.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_op.h"
#include "backend/cuda/device.h"
#include "sequence/image_layout.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

constexpr int kRoles[] = {0, 1};

/// Runs a list of tasks, as many to a kernel as it takes.
template <int kMost, class Task, class Make>
void run_all(KernelQueue& kernels, const std::vector<Task>& tasks, Make make) {
  for (std::size_t i = 0; i < tasks.size(); i += kMost) {
    const auto n = static_cast<int>(std::min<std::size_t>(kMost, tasks.size() - i));
    kernels.run(make(tasks.data() + i, n));
  }
}
/// Bytes that lie side by side, a stretch a head.
cuda::CopyTask stretch(const std::byte* from, std::byte* to, std::int64_t from_head,
                       std::int64_t to_head, std::size_t bytes, int n_heads) {
  return {.from = from,
          .to = to,
          .from_head = from_head,
          .to_head = to_head,
          .n_heads = static_cast<std::uint32_t>(n_heads),
          .n_rows = 1,
          .from_row = 0,
          .from_element = 1,
          .row_bytes = static_cast<std::uint32_t>(bytes),
          .element_bytes = 1};
}

void run_copies(KernelQueue& kernels, const std::vector<cuda::CopyTask>& tasks) {
  run_all<cuda::kCopyTasks>(kernels, tasks, cuda::copy);
}

class AppendOp final : public CudaOp {
 public:
  AppendOp(mx::Stream stream, std::shared_ptr<const AppendWork> work)
      : CudaOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::Append"; }
  InputGroups given() const override {
    return work_->writes.empty() ? InputGroups{} : InputGroups{{1, 2}};
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    KernelQueue kernels = extend(inputs, outputs);
    if (!work_->claim()) return;
    run_copies(kernels, work_->copies);
    for (const int role : kRoles) {
      run_all<cuda::kSealTasks>(
          kernels, work_->seals[role], [&](const cuda::SealTask* tasks, int n) {
            return cuda::seal(tasks, n, work_->device.raw[role], work_->device.sealed[role],
                              work_->format.n_kv_heads);
          });
    }
    std::vector<cuda::CopyTask> writes;
    for (const AppendWork::Write& write : work_->writes) {
      const cuda::NewRows rows = work_->new_rows(write, inputs[1], inputs[2]);
      for (const int role : kRoles) {
        const cuda::RowLayout layout =
            work_->layout(role, inputs[static_cast<std::size_t>(role) + 1]);
        writes.push_back({.from = rows.from[role],
                          .to = rows.to[role],
                          .from_head = layout.from_head,
                          .to_head = layout.to_head,
                          .n_heads = static_cast<std::uint32_t>(work_->format.n_kv_heads),
                          .n_rows = rows.n_rows,
                          .from_row = layout.from_row,
                          .from_element = layout.from_element,
                          .row_bytes = layout.row_bytes,
                          .element_bytes = layout.element_bytes});
      }
    }
    run_copies(kernels, writes);
  }

 private:
  const std::shared_ptr<const AppendWork> work_;
};

struct GatherWork {
  LayerFormat format;
  DeviceFormat device;
  std::vector<RowBlocks> rows;
  std::int64_t longest = 0;

  void run(KernelQueue& kernels, int role, std::byte* out) const {
    const codec::PartGeometry& raw = format.raw[role];
    const std::size_t part = codec::part_bytes(raw);
    const std::size_t row_bytes = part / static_cast<std::size_t>(raw.block_size);
    const std::int64_t head_stride = longest * static_cast<std::int64_t>(row_bytes);
    std::vector<cuda::CopyTask> copies;
    std::vector<cuda::UnsealTask> unseals;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::byte* const row_out =
          out + static_cast<std::int64_t>(i) * format.n_kv_heads * head_stride;
      for (const TokenBlock& block : *rows[i].blocks) {
        const auto skip =
            static_cast<std::int32_t>(std::max<std::int64_t>(0, rows[i].first - block.position));
        if (skip >= block.n_tokens) continue;
        const std::int64_t to_row = longest - rows[i].length + block.position + skip;
        std::byte* const to = row_out + to_row * static_cast<std::int64_t>(row_bytes);
        const std::byte* const from = on_device(block.bytes[role]).address();
        if (block.format[role].is_raw()) {
          copies.push_back(stretch(from + static_cast<std::size_t>(skip) * row_bytes, to,
                                   static_cast<std::int64_t>(part), head_stride,
                                   static_cast<std::size_t>(block.n_tokens - skip) * row_bytes,
                                   format.n_kv_heads));
        } else {
          unseals.push_back({from, to, skip, block.n_tokens - skip});
        }
      }
    }
    run_copies(kernels, copies);
    run_all<cuda::kUnsealTasks>(kernels, unseals, [&](const cuda::UnsealTask* tasks, int n) {
      return cuda::unseal(tasks, n, device.sealed[role], device.geometry.raw, head_stride,
                          format.n_kv_heads);
    });
  }
};

/// Its inputs are the link and zeros that it writes over.
class GatherOp final : public CudaOp {
 public:
  GatherOp(mx::Stream stream, std::shared_ptr<const GatherWork> work)
      : CudaOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::Gather"; }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    KernelQueue kernels = overwrite(inputs, outputs);
    for (const int role : kRoles) {
      work_->run(kernels, role, device_address(outputs[static_cast<std::size_t>(role)]));
    }
    kernels.hold(work_);
  }

 private:
  const std::shared_ptr<const GatherWork> work_;
};

/// A row's blocks and their image.
struct ImageWork {
  LayerFormat format;
  DeviceFormat device;
  std::vector<TokenBlock> blocks;

  void run(KernelQueue& kernels, int role, std::byte* image, bool to_image) const {
    std::vector<cuda::CopyTask> copies;
    std::vector<cuda::SealTask> relays;
    for (const TokenBlock& block : blocks) {
      const Stretch lies = stretch_of(format, block, role);
      std::byte* const bytes = on_device(block.bytes[role]).address();
      const bool relayed = device.sealed[role].tiled && !block.format[role].is_raw();
      if (relayed && to_image) {
        relays.push_back({bytes, image});
      } else if (relayed) {
        relays.push_back({image, bytes});
      } else {
        const auto in_memory = static_cast<std::int64_t>(lies.in_memory);
        const auto in_image = static_cast<std::int64_t>(lies.in_image);
        copies.push_back(stretch(to_image ? bytes : image, to_image ? image : bytes,
                                 to_image ? in_memory : in_image, to_image ? in_image : in_memory,
                                 lies.in_image, format.n_kv_heads));
      }
      image += lies.in_image * static_cast<std::size_t>(format.n_kv_heads);
    }
    run_copies(kernels, copies);
    const cuda::PartFormat as_image{format.sealed[role], false};
    run_all<cuda::kSealTasks>(kernels, relays, [&](const cuda::SealTask* tasks, int n) {
      return cuda::relay(tasks, n, to_image ? device.sealed[role] : as_image,
                         to_image ? as_image : device.sealed[role], format.n_kv_heads);
    });
  }
};

/// Its inputs are the link and zeros that it writes over.
class ReadImage final : public CudaOp {
 public:
  ReadImage(mx::Stream stream, std::shared_ptr<const ImageWork> work)
      : CudaOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::ReadImage"; }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    KernelQueue kernels = overwrite(inputs, outputs);
    for (const int role : kRoles) {
      work_->run(kernels, role, device_address(outputs[static_cast<std::size_t>(role)]), true);
    }
    kernels.hold(work_);
  }

 private:
  const std::shared_ptr<const ImageWork> work_;
};

class WriteImage final : public CudaOp {
 public:
  WriteImage(mx::Stream stream, std::shared_ptr<const ImageWork> work)
      : CudaOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::WriteImage"; }
  InputGroups given() const override { return {{1, 2}}; }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    KernelQueue kernels = extend(inputs, outputs);
    for (const int role : kRoles) {
      work_->run(kernels, role, device_address(inputs[static_cast<std::size_t>(role) + 1]), false);
    }
  }

 private:
  const std::shared_ptr<const ImageWork> work_;
};

/// The link, two arrays, and what only has to come before the op and to stay until it has run.
std::vector<mx::array> inputs_of(const mx::array& latest, const mx::array& keys,
                                 const mx::array& values, const std::vector<mx::array>& changes) {
  std::vector<mx::array> inputs{latest, keys, values};
  inputs.insert(inputs.end(), changes.begin(), changes.end());
  return inputs;
}

}  // namespace

cuda::RowLayout AppendWork::layout(int role, const mx::array& rows) const {
  const std::size_t part = codec::part_bytes(format.raw[role]);
  const auto element = static_cast<std::int64_t>(rows.itemsize());
  return {.from_head = rows.strides(1) * element,
          .to_head = static_cast<std::int64_t>(part),
          .from_row = rows.strides(2) * element,
          .from_element = rows.strides(3) * element,
          .row_bytes = static_cast<std::uint32_t>(
              part / static_cast<std::size_t>(format.raw[role].block_size)),
          .element_bytes = static_cast<std::uint32_t>(element)};
}

cuda::NewRows AppendWork::new_rows(const Write& write, const mx::array& keys,
                                   const mx::array& values) const {
  cuda::NewRows result{};
  result.n_rows = static_cast<std::uint32_t>(write.n_tokens);
  for (const int role : kRoles) {
    const mx::array& rows = role == 0 ? keys : values;
    result.from[role] = device_address(rows) + (write.batch * rows.strides(0) +
                                                write.first_row * rows.strides(2)) *
                                                   static_cast<std::int64_t>(rows.itemsize());
    result.to[role] =
        write.to[role] + static_cast<std::size_t>(write.slot) * layout(role, rows).row_bytes;
  }
  return result;
}

mx::array CudaBackend::pending() {
  std::vector<mx::array> inputs = take_changes();
  if (!inputs.empty()) {
    extend_chain([&](const mx::array& latest) {
      inputs.insert(inputs.begin(), latest);
      return mx::array(latest.shape(), mx::uint8,
                       std::make_shared<AppendOp>(gpu_stream(), std::make_shared<AppendWork>()),
                       inputs);
    });
  }
  return latest_link();
}

void CudaBackend::append(const LayerFormat& format, const AppendTasks& tasks, const mx::array& keys,
                         const mx::array& values) {
  auto work = std::make_shared<AppendWork>();
  work->format = format;
  work->device = device_format(format);
  for (const CopyTask& task : tasks.copies) {
    work->copies.push_back(
        stretch(on_device(task.from).address(), on_device(task.to).address(), 0, 0, task.bytes, 1));
  }
  for (const SealTask& task : tasks.seals) {
    work->seals[task.role].push_back(
        {on_device(task.from).address(), on_device(task.to).address()});
  }
  for (const WriteTask& task : tasks.writes) {
    work->writes.push_back({{on_device(task.to[0]).address(), on_device(task.to[1]).address()},
                            task.batch,
                            task.first_row,
                            task.slot,
                            task.n_tokens});
  }
  const mx::Stream stream = gpu_stream();
  std::vector<mx::array> inputs = inputs_of(latest_link(), keys, values, take_changes());
  extend_chain([&](const mx::array& latest) {
    inputs.front() = latest;
    return mx::array(latest.shape(), mx::uint8, std::make_shared<AppendOp>(stream, work), inputs);
  });
  constexpr std::size_t kMostRows = 32;
  if (work->only_writes() && work->writes.size() <= kMostRows) {
    last_append_.emplace(PlainAppend{std::move(work), std::move(inputs), stream});
  }
}

Backend::KeysAndValues CudaBackend::gather(const LayerFormat& format, std::vector<RowBlocks> rows,
                                           mx::Dtype dtype) {
  auto work = std::make_shared<GatherWork>();
  work->format = format;
  work->device = device_format(format);
  for (const RowBlocks& row : rows) work->longest = std::max(work->longest, row.length - row.first);
  const mx::Stream stream = gpu_stream();
  const auto zeros = [&](int role) {
    return mx::zeros(
        {static_cast<mx::ShapeElem>(rows.size()), static_cast<mx::ShapeElem>(format.n_kv_heads),
         static_cast<mx::ShapeElem>(work->longest),
         static_cast<mx::ShapeElem>(format.raw[role].head_dim)},
        dtype, stream);
  };
  const mx::array keys = zeros(0);
  const mx::array values = zeros(1);
  work->rows = std::move(rows);
  auto outputs = mx::array::make_arrays(
      {keys.shape(), values.shape()}, {dtype, dtype}, std::make_shared<GatherOp>(stream, work),
      {pending(), keys, values});
  return {outputs[0], outputs[1]};
}

Backend::KeysAndValues CudaBackend::read_image(const LayerFormat& format,
                                               std::vector<TokenBlock> blocks) {
  const mx::Stream stream = gpu_stream();
  const auto zeros = [&](int role) {
    return mx::zeros({static_cast<mx::ShapeElem>(image_bytes(format, blocks, role))}, mx::uint8,
                     stream);
  };
  const mx::array keys = zeros(0);
  const mx::array values = zeros(1);
  auto work =
      std::make_shared<ImageWork>(ImageWork{format, device_format(format), std::move(blocks)});
  auto outputs = mx::array::make_arrays({keys.shape(), values.shape()}, {mx::uint8, mx::uint8},
                                        std::make_shared<ReadImage>(stream, std::move(work)),
                                        {pending(), keys, values});
  return {outputs[0], outputs[1]};
}

void CudaBackend::write_image(const LayerFormat& format, std::span<const TokenBlock> blocks,
                              const mx::array& keys, const mx::array& values) {
  const mx::Stream stream = gpu_stream();
  auto work = std::make_shared<ImageWork>(
      ImageWork{format, device_format(format), {blocks.begin(), blocks.end()}});
  const mx::array k = mx::contiguous(keys, false, stream);
  const mx::array v = mx::contiguous(values, false, stream);
  const std::vector<mx::array> changes = take_changes();
  extend_chain([&](const mx::array& latest) {
    return mx::array(latest.shape(), mx::uint8, std::make_shared<WriteImage>(stream, work),
                     inputs_of(latest, k, v, changes));
  });
}

}  // namespace kvpool::detail
