#include "kernels/cuda/blocks.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/space.cuh"
#include "kernels/cuda/vectors.h"

namespace kvpool::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxDim = codec::kMaxHeadDim;
/// The codes of a tile at most, in words.
constexpr int kCodeWords = kTileTokens * kMaxDim / 4;

/// The largest fp16 that is finite and not above x; the smallest that is not below.
__device__ __half below(float x) {
  const __half h = __float2half_rd(x);
  return __hisinf(h) ? __ushort_as_half(x > 0 ? 0x7bff : 0xfbff) : h;
}
__device__ __half above(float x) {
  const __half h = __float2half_ru(x);
  return __hisinf(h) ? __ushort_as_half(x > 0 ? 0x7bff : 0xfbff) : h;
}

struct Affine {
  float scale, bias;
};

/// The grid of kernels/affine_fit.h, written to its place.
__device__ Affine fit(float low, float high, int steps, const ElementPlace& place,
                      std::byte* part) {
  const float bias_unit = power_of_two(place.bias_exponent);
  const float scale_unit = power_of_two(place.scale_exponent);
  const __half bias = below(__half2float(below(low + 0.F)) * bias_unit);
  const float start = __half2float(bias) / bias_unit;
  const __half fitted = above(__fdiv_rn(high - start, static_cast<float>(steps)));
  const __half scale = below(__half2float(fitted) * scale_unit);
  *reinterpret_cast<__half*>(part + place.scale) = scale;
  *reinterpret_cast<__half*>(part + place.bias) = bias;
  return {__half2float(scale) / scale_unit, start};
}

__device__ int quantize(float x, const Affine& grid, int steps) {
  const float code = rintf(__fdiv_rn(x - grid.bias, grid.scale));
  return !(code > 0.F) ? 0 : code < static_cast<float>(steps) ? static_cast<int>(code) : steps;
}

/// Sets a code in a tile's words, which start as zeros.
__device__ void put_code(std::uint32_t* words, std::uint32_t byte, int shift, int code) {
  atomicOr(words + byte / 4, static_cast<std::uint32_t>(code) << (shift + 8 * (byte % 4)));
}
__device__ void clear_words(std::uint32_t* words) {
  for (int i = threadIdx.x; i < kCodeWords; i += kThreads) words[i] = 0;
}
__device__ void write_words(const std::uint32_t* words, std::byte* part, const TileCodes& codes) {
  const auto* bytes = reinterpret_cast<const std::byte*>(words);
  for (std::uint32_t i = threadIdx.x; i < codes.bytes; i += kThreads) {
    part[codes.start + i] = bytes[i];
  }
}

__global__ void __launch_bounds__(kThreads) seal_kernel(const __grid_constant__ SealParams p) {
  __shared__ float rows[kTileTokens][kMaxDim + 1];
  __shared__ std::uint32_t words[kCodeWords];
  __shared__ Affine grids[kMaxDim];
  const PartGeometry& g = p.sealed.geometry;
  const std::byte* from = p.tasks[blockIdx.x].from + std::size_t{blockIdx.y} * p.raw_bytes;
  std::byte* to = p.tasks[blockIdx.x].to + std::size_t{blockIdx.y} * p.sealed_bytes;
  const int dim = g.head_dim, bits = bits_of(g.format.code), steps = (1 << bits) - 1;
  const int group = g.format.group_size, n_groups = (dim + group - 1) / group;

  if (by_channel(g)) {
    for (int d = threadIdx.x; d < dim; d += kThreads) {
      float low = stored_element(p.raw, 0, from, 0, d), high = low;
      for (int t = 1; t < g.block_size; ++t) {
        const float x = stored_element(p.raw, 0, from, t, d);
        low = fminf(low, x), high = fmaxf(high, x);
      }
      grids[d] = fit(low, high, steps, place_of(p.sealed, 0, d), to);
    }
  }
  for (int first = 0; first < g.block_size; first += kTileTokens) {
    const int n = min(kTileTokens, g.block_size - first);
    __syncthreads();
    clear_words(words);
    for (int i = threadIdx.x; i < n * dim; i += kThreads) {
      rows[i / dim][i % dim] = stored_element(p.raw, 0, from, first + i / dim, i % dim);
    }
    Space(p.sealed, 0).enter(rows[0], n, dim, kMaxDim + 1);
    if (!by_channel(g)) {
      for (int i = threadIdx.x; i < n * n_groups; i += kThreads) {
        const int t = i / n_groups, start = i % n_groups * group;
        float low = rows[t][start], high = low;
        for (int d = start + 1; d < min(dim, start + group); ++d) {
          low = fminf(low, rows[t][d]), high = fmaxf(high, rows[t][d]);
        }
        grids[i] = fit(low, high, steps, place_of(p.sealed, first + t, start), to);
      }
      __syncthreads();
    }
    const TileCodes codes = tile_codes(p.sealed, first / kTileTokens);
    for (int i = threadIdx.x; i < n * dim; i += kThreads) {
      const int t = i / dim, d = i % dim;
      const ElementPlace place = place_of(p.sealed, first + t, d);
      const Affine& grid = grids[by_channel(g) ? d : t * n_groups + d / group];
      put_code(words, place.code - codes.start, place.shift, quantize(rows[t][d], grid, steps));
    }
    __syncthreads();
    write_words(words, to, codes);
  }
}

__global__ void __launch_bounds__(kThreads) unseal_kernel(const __grid_constant__ UnsealParams p) {
  __shared__ float rows[kTileTokens][kMaxDim + 1];
  const UnsealTask& task = p.tasks[blockIdx.x];
  const PartGeometry& g = p.sealed.geometry;
  const std::byte* from = task.from + std::size_t{blockIdx.y} * p.sealed_bytes;
  std::byte* to = task.to + blockIdx.y * p.head_stride;
  const int dim = g.head_dim, kv_head = static_cast<int>(blockIdx.y);
  const Space space(p.sealed, kv_head);
  for (int done = 0; done < task.n_tokens; done += kTileTokens) {
    const int n = min(kTileTokens, task.n_tokens - done);
    __syncthreads();
    for (int i = threadIdx.x; i < n * dim; i += kThreads) {
      rows[i / dim][i % dim] =
          stored_element(p.sealed, kv_head, from, task.first_token + done + i / dim, i % dim);
    }
    space.leave(rows[0], n, dim, kMaxDim + 1);
    for (int i = threadIdx.x; i < n * dim; i += kThreads) {
      store_element(to, p.row_type, static_cast<std::size_t>(done) * dim + i,
                    rows[i / dim][i % dim]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) relay_kernel(const __grid_constant__ RelayParams p) {
  __shared__ std::uint32_t words[kCodeWords];
  const PartGeometry& g = p.to.geometry;
  const std::byte* from = p.tasks[blockIdx.x].from + std::size_t{blockIdx.y} * p.part_bytes;
  std::byte* to = p.tasks[blockIdx.x].to + std::size_t{blockIdx.y} * p.part_bytes;
  const int dim = g.head_dim, bits = bits_of(g.format.code), group = g.format.group_size;
  const auto move = [&](const ElementPlace& a, const ElementPlace& b) {
    const auto shift = [&](std::uint32_t offset, std::uint32_t target, int exponent) {
      *reinterpret_cast<__half*>(to + target) =
          __float2half_rn(half_at(from, offset) * power_of_two(exponent));
    };
    shift(a.scale, b.scale, b.scale_exponent - a.scale_exponent);
    shift(a.bias, b.bias, b.bias_exponent - a.bias_exponent);
  };
  if (by_channel(g)) {
    for (int d = threadIdx.x; d < dim; d += kThreads)
      move(place_of(p.from, 0, d), place_of(p.to, 0, d));
  }
  for (int first = 0; first < g.block_size; first += kTileTokens) {
    const int n = min(kTileTokens, g.block_size - first);
    const TileCodes codes = tile_codes(p.to, first / kTileTokens);
    __syncthreads();
    clear_words(words);
    __syncthreads();
    for (int i = threadIdx.x; i < n * dim; i += kThreads) {
      const int token = first + i / dim, d = i % dim;
      const ElementPlace a = place_of(p.from, token, d), b = place_of(p.to, token, d);
      put_code(words, b.code - codes.start, b.shift, code_at(from, a, bits));
      if (!by_channel(g) && d % group == 0) move(a, b);
    }
    __syncthreads();
    write_words(words, to, codes);
  }
}

std::uint32_t part_bytes(const PartFormat& part) {
  return static_cast<std::uint32_t>(codec::part_bytes(part.geometry));
}

template <class Params, class Task>
Launch<Params> launch_of(const void* kernel, const Task* tasks, int n_tasks, int n_kv_heads) {
  Launch<Params> launch;
  launch.function = kernel;
  launch.grid = dim3(static_cast<unsigned>(n_tasks), static_cast<unsigned>(n_kv_heads));
  launch.block = kThreads;
  for (int i = 0; i < n_tasks; ++i) launch.params.tasks[i] = tasks[i];
  return launch;
}

}  // namespace

Launch<SealParams> seal(const SealTask* tasks, int n_tasks, const PartFormat& raw,
                        const PartFormat& sealed, int n_kv_heads) {
  const bool vectors = is_vector(sealed.geometry.format.code);
  auto launch =
      launch_of<SealParams>(vectors ? vector_seal_kernel(sealed.quantizer.sub_dim)
                                    : reinterpret_cast<const void*>(&seal_kernel),
                            tasks, n_tasks, n_kv_heads);
  if (vectors) {
    launch.grid.z = static_cast<unsigned>(kernels::n_tiles(sealed.geometry.block_size));
  }
  launch.params.raw = raw;
  launch.params.sealed = sealed;
  launch.params.raw_bytes = part_bytes(raw);
  launch.params.sealed_bytes = part_bytes(sealed);
  return launch;
}

Launch<UnsealParams> unseal(const UnsealTask* tasks, int n_tasks, const PartFormat& sealed,
                            Element row_type, std::int64_t head_stride, int n_kv_heads) {
  auto launch = launch_of<UnsealParams>(reinterpret_cast<const void*>(&unseal_kernel), tasks,
                                        n_tasks, n_kv_heads);
  launch.params.sealed = sealed;
  launch.params.row_type = row_type;
  launch.params.sealed_bytes = part_bytes(sealed);
  launch.params.head_stride = head_stride;
  return launch;
}

Launch<RelayParams> relay(const SealTask* tasks, int n_tasks, const PartFormat& from,
                          const PartFormat& to, int n_kv_heads) {
  auto launch = launch_of<RelayParams>(is_vector(to.geometry.format.code)
                                           ? vector_relay_kernel()
                                           : reinterpret_cast<const void*>(&relay_kernel),
                                       tasks, n_tasks, n_kv_heads);
  launch.params.from = from;
  launch.params.to = to;
  launch.params.part_bytes = part_bytes(to);
  return launch;
}

}  // namespace kvpool::cuda
