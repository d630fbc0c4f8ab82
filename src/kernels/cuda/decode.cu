#include <algorithm>
#include <set>
#include <utility>

#include "kernels/cuda/config.cuh"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_choice.h"

namespace kvpool::cuda {
namespace {

KernelChoice choose_kernel(const Geometry& g, int sets) {
  switch (g.sealed) {
    case Sealed::kNone:
      return choose_raw(g, sets);
    case Sealed::kInt8:
      return choose_int8(g, sets);
    case Sealed::kInt4:
      return choose_int4(g, sets);
    case Sealed::kInt2:
      return choose_int2(g, sets);
    case Sealed::kKivi4:
      return choose_kivi4(g, sets);
    case Sealed::kKivi2:
      return choose_kivi2(g, sets);
    case Sealed::kVector:
      return g.key_sub == 2   ? choose_vector_keys2(g, sets)
             : g.key_sub == 4 ? choose_vector_keys4(g, sets)
             : g.key_sub == 8 ? choose_vector_keys8(g, sets)
                              : KernelChoice{};
  }
  return {};
}

int unit_tiles(const Geometry& g) {
  if (g.sealed == Sealed::kVector) return g.key_sub == 2 || g.value_sub == 2 ? 1 : 2;
  return is_kivi(g.sealed) || g.sealed == Sealed::kInt2 ? 2 : 1;
}

/// Asks the driver once for each kernel and device.
cudaError_t make_ready(const KernelChoice& kernel, bool has_table) {
  thread_local std::set<std::pair<const void*, int>> ready;
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (ready.contains({kernel.function, device})) return cudaSuccess;
  int reserved = 0;
  if (has_table && (cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock,
                                           device) != cudaSuccess ||
                    reserved != static_cast<int>(kTable))) {
    return cudaErrorNotSupported;
  }
  const cudaError_t e = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  if (e == cudaSuccess) ready.insert({kernel.function, device});
  return e;
}

int key_tile_bytes(const Geometry& g) {
  return key_tile_bytes(g.sealed, g.head_dim, g.group_size, g.key_sub);
}
int value_tile_bytes(const Geometry& g) {
  return value_tile_bytes(g.sealed, g.head_dim, g.group_size, g.value_sub);
}

/// What a raw tile costs beside a sealed unit.
int raw_weight(const Geometry& g) {
  if (g.sealed == Sealed::kNone) return 1;
  const int sealed = unit_tiles(g) * (key_tile_bytes(g) + value_tile_bytes(g)) +
                     key_header_bytes(g.sealed, g.head_dim);
  const int raw = kTileTokens * g.head_dim * 4;
  return raw > sealed ? (raw + sealed / 2) / sealed : 1;
}

/// What it costs a block to take up another sequence or head, in sealed units.
int segment_cost(const Geometry& g) {
  switch (g.sealed) {
    case Sealed::kInt8:
    case Sealed::kKivi4:
      return 20;
    case Sealed::kNone:
      return 50;
    default:
      return 30;
  }
}

/// Of `grid` blocks, as many as can share pairs of sequence and head out whole where sequences are
/// alike, if that leaves only a few without work, else 0.
int whole_blocks(int n_pairs, int grid) {
  if (n_pairs == 0) return 0;
  const int turns = (n_pairs + grid - 1) / grid;
  return n_pairs % turns == 0 && n_pairs / turns >= grid - grid / 16 ? n_pairs / turns : 0;
}

bool supported(const Geometry& g) {
  const bool blocks = g.block_size == 16 || g.block_size == 32 || g.block_size == 64;
  return (g.head_dim == 64 || g.head_dim == 128) && blocks &&
         !(unit_tiles(g) == 2 && g.block_size == 16) && g.n_kv_heads > 0 &&
         g.n_heads % g.n_kv_heads == 0 && (g.group_size == 32 || g.group_size == 64) &&
         g.raw != Element::kFp32;
}

}  // namespace

bool decodes(const Geometry& g) noexcept {
  return supported(g) && choose_kernel(g, 1).function != nullptr;
}

std::size_t raw_part_bytes(const Geometry& g) noexcept {
  return static_cast<std::size_t>(g.block_size) * g.head_dim * 2;
}
std::size_t sealed_key_bytes(const Geometry& g) noexcept {
  return key_header_bytes(g.sealed, g.head_dim) +
         static_cast<std::size_t>(g.block_size / kTileTokens) * key_tile_bytes(g);
}
std::size_t sealed_value_bytes(const Geometry& g) noexcept {
  return static_cast<std::size_t>(g.block_size / kTileTokens) * value_tile_bytes(g);
}

int cost(const Geometry& g, int n_raw_blocks, int n_sealed_blocks) noexcept {
  const int tiles = g.block_size / kTileTokens;
  if (n_raw_blocks + n_sealed_blocks == 0) return 0;
  return segment_cost(g) + n_raw_blocks * tiles * raw_weight(g) +
         n_sealed_blocks * tiles / unit_tiles(g);
}

std::size_t workspace_bytes(const Geometry& g, int max_sequences, int n_processors) noexcept {
  const int group = g.n_heads / g.n_kv_heads;
  const std::size_t heads = static_cast<std::size_t>(g.n_kv_heads) * ((group + 7) / 8);
  return static_cast<std::size_t>(n_processors) * 2 * 2 * kSlotFloats * sizeof(float) +
         heads * max_sequences * sizeof(int);
}

cudaError_t prepare(const Geometry& g, const DecodeParams& params, int n_processors,
                    DecodeLaunch* launch) {
  if (!supported(g)) return cudaErrorNotSupported;
  const int group = g.n_heads / g.n_kv_heads;
  const int chunks = (group + 7) / 8, chunk_heads = (group + chunks - 1) / chunks;
  const KernelChoice kernel = choose_kernel(g, chunk_heads > 4 ? 2 : 1);
  if (kernel.function == nullptr) return cudaErrorNotSupported;
  if (const cudaError_t e = make_ready(kernel, g.sealed == Sealed::kVector); e != cudaSuccess) {
    return e;
  }

  launch->function = kernel.function;
  launch->grid =
      static_cast<unsigned>(std::min(n_processors * kernel.resident, kernel.most_blocks));
  launch->block = static_cast<unsigned>(kernel.threads);
  launch->shared_bytes = static_cast<unsigned>(kernel.shared_bytes);
  DecodeParams& p = launch->params;
  p = params;
  if (p.sealed_queries == nullptr) p.sealed_queries = p.queries;
  p.n_kv_heads = g.n_kv_heads;
  p.group = group;
  p.chunks = chunks;
  p.chunk_heads = chunk_heads;
  p.tiles_log2 = g.block_size == 16 ? 0 : g.block_size == 32 ? 1 : 2;
  p.raw_weight = raw_weight(g);
  p.segment_cost = segment_cost(g);
  // A block that rests leaves its share of the multiprocessor to another, if there is one.
  const int n_pairs = p.n_sequences * g.n_kv_heads * chunks;
  p.whole_blocks = kernel.resident > 1 ? whole_blocks(n_pairs, static_cast<int>(launch->grid)) : 0;
  p.raw_stride = static_cast<unsigned>(raw_part_bytes(g));
  if (g.sealed != Sealed::kNone) {
    p.key_stride = static_cast<unsigned>(sealed_key_bytes(g));
    p.value_stride = static_cast<unsigned>(sealed_value_bytes(g));
  }
  return cudaSuccess;
}

cudaError_t launch(const DecodeLaunch& l, cudaStream_t stream) {
  DecodeParams params = l.params;
  void* arguments[] = {&params};
  return cudaLaunchKernel(l.function, dim3(l.grid), dim3(l.block), arguments, l.shared_bytes,
                          stream);
}

}  // namespace kvpool::cuda
