#include <mlx/allocator.h>
#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "attention/thread_pool.h"
#include "backend/native.h"
#include "storage/cpu_op.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// AppendTasks as addresses. The places may have other takers by the time this runs is over, but
/// their ops come later in the chain; the buffers stay for as long as this does.
struct AppendWork {
  struct Copy {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
  };
  struct Seal {
    const std::byte* from;
    std::byte* to;
    int role;
  };
  struct Write {
    std::byte* to[2];
    std::int64_t batch, first_row;
    std::int32_t slot, n_tokens;
  };
  LayerFormat format;
  std::vector<Copy> copies;
  std::vector<Seal> seals;
  std::vector<Write> writes;
  Buffers buffers;

  void seal(std::size_t item) const {
    const auto n_heads = static_cast<std::size_t>(format.n_kv_heads);
    const Seal& task = seals[item / n_heads];
    const std::size_t head = item % n_heads;
    const codec::PartGeometry& raw = format.raw[task.role];
    codec::PartGeometry sealed = format.sealed[task.role];
    sealed.kv_head = static_cast<int>(head);
    thread_local std::vector<float> rows;
    rows.resize(static_cast<std::size_t>(raw.block_size) * static_cast<std::size_t>(raw.head_dim));
    codec::decode(raw, task.from + head * codec::part_bytes(raw), 0, raw.block_size, rows.data());
    codec::encode(sealed, rows.data(), raw.block_size,
                  task.to + head * codec::part_bytes(sealed));
  }

  void write(const Write& task, int role, const std::byte* rows, std::int64_t n_rows) const {
    const codec::PartGeometry& raw = format.raw[role];
    const std::size_t part = codec::part_bytes(raw);
    const std::size_t row = part / static_cast<std::size_t>(raw.block_size);
    for (int head = 0; head < format.n_kv_heads; ++head) {
      const std::int64_t first =
          (task.batch * format.n_kv_heads + head) * n_rows + task.first_row;
      std::memcpy(task.to[role] + static_cast<std::size_t>(head) * part +
                      static_cast<std::size_t>(task.slot) * row,
                  rows + static_cast<std::size_t>(first) * row,
                  static_cast<std::size_t>(task.n_tokens) * row);
    }
  }

  void run(const std::byte* keys, const std::byte* values, std::int64_t n_rows) const {
    for (const Copy& task : copies) std::memcpy(task.to, task.from, task.bytes);
    attention::ThreadPool::shared().for_each(
        seals.size() * static_cast<std::size_t>(format.n_kv_heads),
        [this](std::size_t item) { seal(item); });
    for (const Write& task : writes) {
      write(task, 0, keys, n_rows);
      write(task, 1, values, n_rows);
    }
  }
};

class AppendOp final : public CpuOp {
 public:
  AppendOp(mx::Stream stream, std::shared_ptr<const AppendWork> work)
      : CpuOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::Append"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    outputs[0].copy_shared_buffer(inputs[0]);
    for (const mx::array& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch([work = work_, keys = inputs[1].data<std::byte>(),
                      values = inputs[2].data<std::byte>(), n_rows = inputs[1].shape(2)] {
      work->run(keys, values, n_rows);
    });
  }

 private:
  const std::shared_ptr<const AppendWork> work_;
};

struct GatherWork {
  LayerFormat format;
  std::vector<RowBlocks> rows;
  std::int64_t longest = 0;

  void run(int role, std::byte* out) const {
    const codec::PartGeometry to{{format.raw[role].format}, codec::Role::kKeys, 1,
                                 format.raw[role].head_dim};
    const std::size_t row_bytes = codec::part_bytes(to);
    const auto n_heads = static_cast<std::size_t>(format.n_kv_heads);
    std::memset(out, 0, rows.size() * n_heads * static_cast<std::size_t>(longest) * row_bytes);
    attention::ThreadPool::shared().for_each(rows.size() * n_heads, [&](std::size_t item) {
      const RowBlocks& row = rows[item / n_heads];
      std::byte* head_out = out + item * static_cast<std::size_t>(longest) * row_bytes;
      for (const TokenBlock& block : *row.blocks) {
        gather_block(role, block, item % n_heads,
                     std::max<std::int64_t>(0, row.first - block.position), head_out,
                     longest - row.length + block.position, row_bytes);
      }
    });
  }

  /// Writes the block's tokens from slot `skip` on; slot 0 would be row `to_row` of `out`.
  void gather_block(int role, const TokenBlock& block, std::size_t head, std::int64_t skip,
                    std::byte* out, std::int64_t to_row, std::size_t row_bytes) const {
    if (skip >= block.n_tokens) return;
    std::byte* to = out + static_cast<std::size_t>(to_row + skip) * row_bytes;
    codec::PartGeometry part = format.part(role, block.format[role]);
    part.kv_head = static_cast<int>(head);
    const std::byte* from = native(block.bytes[role]).address() + head * codec::part_bytes(part);
    const int first = static_cast<int>(skip);
    const int n_tokens = block.n_tokens - first;
    const auto n = static_cast<std::size_t>(n_tokens);
    if (part.format.is_raw()) {
      std::memcpy(to, from + static_cast<std::size_t>(first) * row_bytes, n * row_bytes);
      return;
    }
    thread_local std::vector<float> rows_fp32;
    rows_fp32.resize(n * static_cast<std::size_t>(part.head_dim));
    codec::decode(part, from, first, n_tokens, rows_fp32.data());
    codec::PartGeometry raw = format.raw[role];
    raw.block_size = n_tokens;
    codec::encode(raw, rows_fp32.data(), n_tokens, to);
  }
};

class GatherOp final : public CpuOp {
 public:
  GatherOp(mx::Stream stream, std::shared_ptr<const GatherWork> work)
      : CpuOp(stream), work_(std::move(work)) {}
  const char* name() const override { return "kvpool::Gather"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(inputs[0]);
    std::byte* out[2];
    for (std::size_t role = 0; role < 2; ++role) {
      outputs[role].set_data(mx::allocator::malloc(outputs[role].nbytes()));
      encoder.set_output_array(outputs[role]);
      out[role] = outputs[role].data<std::byte>();
    }
    encoder.dispatch([work = work_, keys = out[0], values = out[1]] {
      work->run(0, keys);
      work->run(1, values);
    });
  }

 private:
  const std::shared_ptr<const GatherWork> work_;
};

}  // namespace

void NativeBackend::append(const LayerFormat& format, const AppendTasks& tasks,
                           const mx::array& keys, const mx::array& values) {
  auto work = std::make_shared<AppendWork>();
  work->format = format;
  for (const CopyTask& task : tasks.copies) {
    work->copies.push_back({native(task.from).address(), native(task.to).address(), task.bytes});
    keep(work->buffers, task.from);
    keep(work->buffers, task.to);
  }
  for (const SealTask& task : tasks.seals) {
    work->seals.push_back({native(task.from).address(), native(task.to).address(), task.role});
    keep(work->buffers, task.from);
    keep(work->buffers, task.to);
  }
  for (const WriteTask& task : tasks.writes) {
    work->writes.push_back({{native(task.to[0]).address(), native(task.to[1]).address()},
                            task.batch,
                            task.first_row,
                            task.slot,
                            task.n_tokens});
    keep(work->buffers, task.to[0]);
    keep(work->buffers, task.to[1]);
  }
  const mx::Stream stream = cpu_stream();
  const mx::array k = mx::contiguous(keys, false, stream);
  const mx::array v = mx::contiguous(values, false, stream);
  extend_chain([&](const mx::array& latest) {
    return mx::array(latest.shape(), mx::uint8, std::make_shared<AppendOp>(stream, std::move(work)),
                     {latest, k, v});
  });
}

NativeBackend::KeysAndValues NativeBackend::gather(const LayerFormat& format,
                                                   std::vector<RowBlocks> rows, mx::Dtype dtype) {
  auto work = std::make_shared<GatherWork>();
  work->format = format;
  for (const RowBlocks& row : rows) {
    work->longest = std::max(work->longest, row.length - row.first);
  }
  const auto shape = [&](int role) {
    return mx::Shape{static_cast<mx::ShapeElem>(rows.size()),
                     static_cast<mx::ShapeElem>(format.n_kv_heads),
                     static_cast<mx::ShapeElem>(work->longest),
                     static_cast<mx::ShapeElem>(format.raw[role].head_dim)};
  };
  const mx::Shape key_shape = shape(0);
  const mx::Shape value_shape = shape(1);
  work->rows = std::move(rows);
  auto outputs = mx::array::make_arrays({key_shape, value_shape}, {dtype, dtype},
                                        std::make_shared<GatherOp>(cpu_stream(), std::move(work)),
                                        {pending()});
  return {outputs[0], outputs[1]};
}

}  // namespace kvpool::detail
