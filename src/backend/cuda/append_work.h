#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "kernels/cuda/blocks.h"
#include "sequence/sequence.h"

namespace kvpool::detail {

/// AppendTasks as addresses. The places may have other takers by the time this runs, but their ops
/// come later in the chain.
struct AppendWork {
  struct Write {
    std::byte* to[2];
    std::int64_t batch, first_row;
    std::int32_t slot, n_tokens;
  };
  LayerFormat format;
  DeviceFormat device;
  std::vector<cuda::CopyTask> copies;
  std::vector<cuda::SealTask> seals[2];
  std::vector<Write> writes;

  /// Whether rows are written and no more.
  bool only_writes() const noexcept {
    return copies.empty() && seals[0].empty() && seals[1].empty();
  }
  /// How the rows of keys (role 0) or values lie, and where a write's lie.
  cuda::RowLayout layout(int role, const mlx::core::array& rows) const;
  cuda::NewRows new_rows(const Write& write, const mlx::core::array& keys,
                         const mlx::core::array& values) const;
  /// True for the first op that asks: it does the work.
  bool claim() const noexcept { return !claimed_.test_and_set(); }

 private:
  mutable std::atomic_flag claimed_;
};

}  // namespace kvpool::detail
