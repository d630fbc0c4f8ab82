#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/quantizers.h"
#include "backend/cuda/table_arena.h"
#include "kernels/cuda/blocks.h"
#include "storage/segments.h"

namespace kvpool::detail {

/// The places of a backend's blocks. They outlive the backend for as long as kernels run on them.
class DevicePlaces {
 public:
  /// @param latest  gives the last op on them; nothing once no more will come.
  explicit DevicePlaces(std::function<std::optional<mlx::core::array>()> latest);

  Place take(std::size_t bytes, Stay stay);
  void give_back(const Place& place);
  std::size_t resident_bytes() const;
  /// What the next op must take as inputs.
  std::vector<mlx::core::array> take_changes();

 private:
  const std::function<std::optional<mlx::core::array>()> latest_;
  mutable std::mutex mutex_;
  SegmentList places_;
};

/// Bytes in device memory that stay where they are until the last reference goes; then the place is
/// the next taker's, whose ops come later in the chain than all that read this block.
class DeviceBytes final : public BlockBytes {
 public:
  DeviceBytes(std::shared_ptr<DevicePlaces> places, Place place);
  ~DeviceBytes() override { places_->give_back(place_); }

  std::byte* address() const noexcept { return address_; }

 private:
  const std::shared_ptr<DevicePlaces> places_;
  const Place place_;
  std::byte* const address_;
};

/// Of a block of this backend.
inline const DeviceBytes& on_device(const std::shared_ptr<BlockBytes>& bytes) noexcept {
  return static_cast<const DeviceBytes&>(*bytes);
}

/// How the blocks of a layer lie in device memory: sealed ones as decode attention wants them
/// (kernels/cuda/layout.cuh) where it can take them.
struct DeviceFormat {
  cuda::PartFormat raw[2], sealed[2];
  /// Of decode attention; its n_heads is the caller's to set.
  cuda::Geometry geometry;
  bool decodes = false;
};

struct AppendWork;

/// An append that only writes rows.
struct PlainAppend {
  std::shared_ptr<const AppendWork> work;
  std::vector<mlx::core::array> inputs;  ///< The link before it, keys, values, and the rest.
  mlx::core::Stream stream;
};

/// Our kernels on CUDA streams. The ops are one chain of one-byte arrays, as the native backend's
/// are. The chain's array also keeps the places and the memory that ops use beside them, and every
/// op keeps it until its kernels have run.
class CudaBackend final : public Backend,
                          public BlockMemory,
                          public std::enable_shared_from_this<CudaBackend> {
 public:
  static std::shared_ptr<CudaBackend> make();

  std::string_view level() const override { return "cuda"; }
  std::shared_ptr<BlockMemory> memory_for_cache() override { return shared_from_this(); }
  std::shared_ptr<BlockBytes> take(std::size_t bytes, Stay stay) override;
  std::size_t resident_bytes() const override;
  mlx::core::array pending() override;
  std::int64_t recover() override;

  void append(const LayerFormat& format, const AppendTasks& tasks, const mlx::core::array& keys,
              const mlx::core::array& values) override;
  KeysAndValues gather(const LayerFormat& format, std::vector<RowBlocks> rows,
                       mlx::core::Dtype dtype) override;
  mlx::core::array attend(const LayerFormat& format, std::span<const AttendRow> rows,
                          const mlx::core::array& queries, float scale,
                          const Visibility& visibility) override;
  KeysAndValues read_image(const LayerFormat& format, std::vector<TokenBlock> blocks) override;
  void write_image(const LayerFormat& format, std::span<const TokenBlock> blocks,
                   const mlx::core::array& keys, const mlx::core::array& values) override;

 private:
  DeviceFormat device_format(const LayerFormat& format);
  mlx::core::array latest_link() const;
  explicit CudaBackend(std::shared_ptr<DevicePlaces> places);
  /// What the next op of the chain must take as inputs.
  std::vector<mlx::core::array> take_changes();

  template <typename MakeOp>
  void extend_chain(MakeOp make_op) {
    const std::lock_guard guard(chain_mutex_);
    chain_ = make_op(chain_);
    last_append_.reset();
  }
  void update_tables(std::span<const AttendRow> rows, TableUpdates& updates,
                     std::vector<const BlockTable*>& tables);
  /// Memory for what an op needs while it runs; the next op of the chain has it after.
  std::byte* scratch(std::size_t bytes);
  /// Memory for a result, handed out again when nobody refers to it. MLX gives primitives from
  /// outside only memory that host and device share, which is slow to come by.
  mlx::core::array result_memory(std::size_t bytes);
  void* decode_workspace(const cuda::Geometry& geometry, int n_sequences);

  const std::shared_ptr<DevicePlaces> places_;
  const std::shared_ptr<MemoryChanges> changes_ = std::make_shared<MemoryChanges>();
  mutable std::mutex chain_mutex_;
  mlx::core::array chain_;
  /// If it is the chain's latest op. Attention that comes next writes the rows, too, unless
  /// something that needs them before has the append's own op evaluated first.
  std::optional<PlainAppend> last_append_;
  DeviceQuantizers quantizers_{changes_};
  std::shared_ptr<TableArena> arena_;
  std::optional<OpMemory> scratch_;
  std::map<std::size_t, std::vector<mlx::core::array>> results_;  ///< By their bytes.
  /// By the numbers of the geometry.
  std::map<std::array<int, 9>, OpMemory> workspaces_;
};

/// The GPU stream in use, or the GPU's default one.
mlx::core::Stream gpu_stream();

}  // namespace kvpool::detail
