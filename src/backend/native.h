#pragma once

#include <mlx/array.h>

#include <mutex>

#include "backend/backend.h"
#include "storage/segments.h"

namespace kvpool::detail {

class NativeBackend;

/// Bytes that stay where they are until the last reference goes; then the place is the next
/// taker's, whose ops come later in the chain than all that read this block.
class NativeBytes final : public BlockBytes {
 public:
  NativeBytes(std::shared_ptr<NativeBackend> backend, Place place) noexcept;
  ~NativeBytes() override;

  std::byte* address() const noexcept { return address_; }
  /// Keeps the segment from being freed or handed on.
  const std::shared_ptr<mlx::core::array::Data>& buffer() const noexcept {
    return place_.segment->version.data_shared_ptr();
  }

 private:
  const std::shared_ptr<NativeBackend> backend_;
  const Place place_;
  std::byte* const address_;
};

/// Of a block of this backend.
inline const NativeBytes& native(const std::shared_ptr<BlockBytes>& bytes) noexcept {
  return static_cast<const NativeBytes&>(*bytes);
}

/// Adds the buffer that `bytes` lies in, if it is not there yet.
void keep(Buffers& buffers, const std::shared_ptr<BlockBytes>& bytes);

/// Kernels on addresses, on CPU streams. Thread-safe places, in segments that never move.
///
/// The ops are one chain of one-byte arrays: an op on blocks takes the latest as its first input
/// and leaves the next as its first output, so that MLX runs them one after the other, however late
/// and on whichever stream. gather() and read_image() are no links: they hold their blocks instead,
/// so that nobody writes over them.
class NativeBackend final : public Backend,
                            public BlockMemory,
                            public std::enable_shared_from_this<NativeBackend> {
 public:
  explicit NativeBackend(std::shared_ptr<MlxBufferPool> buffers);

  std::string_view level() const override;
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

  /// Puts `make_op(latest)` in the place of the latest link, with no other op coming between.
  template <typename MakeOp>
  void extend_chain(MakeOp make_op) {
    const std::lock_guard guard(chain_mutex_);
    chain_ = make_op(chain_);
  }

 private:
  friend class NativeBytes;
  void give_back(const Place& place) noexcept;

  mutable std::mutex places_mutex_;
  SegmentList places_;
  mutable std::mutex chain_mutex_;
  mlx::core::array chain_;
};

}  // namespace kvpool::detail
