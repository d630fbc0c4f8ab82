// Decode attention on a GPU: checked against a double-precision reference over the decoded
// elements, then timed.
//   decode_bench check            small ragged batches, every format built in
//   decode_bench time [format]    the shapes of the table in docs/gpu.md
//   decode_bench small            a few sequences on five blocks, for compute-sanitizer
//   decode_bench one FORMAT B L   one shape, checked and launched a few times (for profilers)
// Times are of CUDA events around 20 launches, the best of 10. Launches rotate among caches of at
// least 256 MB in all, so that nothing is found in L2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/layout.cuh"

namespace kc = kvpool::cuda;
using kc::Element;
using kc::Geometry;
using kc::Sealed;

#define CHECK(x)                                                              \
  do {                                                                        \
    const cudaError_t e_ = (x);                                               \
    if (e_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); \
      std::exit(1);                                                           \
    }                                                                         \
  } while (0)

namespace {

__host__ __device__ std::uint32_t hash(std::uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdULL, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ULL, x ^= x >> 33;
  return static_cast<std::uint32_t>(x);
}
__host__ __device__ float uniform(std::uint64_t x) { return (hash(x) >> 8) * (1.F / 16777216.F); }
__host__ __device__ float normal(std::uint64_t x) {
  return sqrtf(-2 * logf(uniform(2 * x) + 1e-7F)) * cosf(6.2831853F * uniform(2 * x + 1));
}

__global__ void fill_rows(void* p, Element type, std::size_t n, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n;
       i += std::size_t(gridDim.x) * blockDim.x) {
    const float x = normal(seed + i);
    if (type == Element::kFp16) static_cast<__half*>(p)[i] = __float2half(x);
    if (type == Element::kBf16) static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(x);
    if (type == Element::kFp32) static_cast<float*>(p)[i] = x;
  }
}

__host__ __device__ int key_tile_bytes(const Geometry& g) {
  return kc::key_tile_bytes(g.sealed, g.head_dim, g.group_size, g.key_sub);
}
__host__ __device__ int value_tile_bytes(const Geometry& g) {
  return kc::value_tile_bytes(g.sealed, g.head_dim, g.group_size, g.value_sub);
}

/// Random codes; scales and biases that spread them over about -2 ... 2.
__global__ void fill_parts(std::uint32_t* p, Geometry g, bool keys, std::size_t part,
                           std::size_t n_words, std::uint64_t seed) {
  const int header = keys ? kc::key_header_bytes(g.sealed, g.head_dim) : 0;
  const int tile = keys ? key_tile_bytes(g) : value_tile_bytes(g);
  const int codes = g.sealed == Sealed::kVector ? tile : kc::code_bytes(g.sealed, g.head_dim);
  const float steps = (1 << kc::bits_of(g.sealed)) - 1;
  for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < n_words;
       i += std::size_t(gridDim.x) * blockDim.x) {
    const int at = static_cast<int>(i * 4 % part);
    const float width = 3 + 2 * uniform(seed + 3 * i), middle = uniform(seed + 3 * i + 1) - 0.5F;
    float scale = width / steps, bias = middle - width / 2;
    if (!keys && g.sealed != Sealed::kVector) {
      // Which token and channel a pair is of matters to its exponent.
      const int bits = kc::bits_of(g.sealed), groups = g.head_dim / g.group_size;
      const int k = max(0, at % tile - codes) / 4, token = k / groups;
      int d = 0;
      while (kc::value_scale_index(g.head_dim, g.group_size, token, d) != k && d < g.head_dim) ++d;
      scale = scale * exp2f(static_cast<float>(kc::value_scale_exponent(bits, g.head_dim, token,
                                                                        min(d, g.head_dim - 1))));
      bias = bias * exp2f(static_cast<float>(kc::value_bias_exponent(bits)));
    }
    const __half2 pair = __floats2half2_rn(scale, bias);
    if (at < header) {
      const float w1 = 3 + 2 * uniform(seed + 7 * i + 5), m1 = uniform(seed + 7 * i + 6) - 0.5F;
      const float unit = exp2f(static_cast<float>(
          kc::kivi_scale_exponent(kc::bits_of(g.sealed), at % (header / 2) / 2)));
      const __half2 scales = __floats2half2_rn(width / steps * unit, w1 / steps * unit),
                    biases = __floats2half2_rn(middle - width / 2, m1 - w1 / 2);
      p[i] = at < header / 2 ? *reinterpret_cast<const std::uint32_t*>(&scales)
                             : *reinterpret_cast<const std::uint32_t*>(&biases);
    } else {
      p[i] = (at - header) % tile < codes ? hash(seed + i)
                                          : *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
}

__device__ double raw_element(const void* part, Element type, int dim, int token, int d) {
  const std::size_t i = std::size_t(token) * dim + d;
  return type == Element::kFp16 ? __half2float(static_cast<const __half*>(part)[i])
                                : __bfloat162float(static_cast<const __nv_bfloat16*>(part)[i]);
}
__device__ int code_at(const char* tile, kc::CodePlace p, int bits) {
  return *reinterpret_cast<const std::uint32_t*>(tile + p.offset) >> p.shift & ((1 << bits) - 1);
}
__device__ double sealed_key(const char* part, const Geometry& g, const kc::DecodeParams& p,
                             int head, int token, int d) {
  const int bits = kc::bits_of(g.sealed), t = token % 16;
  const char* tile =
      part + kc::key_header_bytes(g.sealed, g.head_dim) + token / 16 * key_tile_bytes(g);
  if (g.sealed == Sealed::kVector) {
    const int sub = g.key_sub, h = p.codebook_per_head ? head : 0;
    const int code = static_cast<unsigned char>(tile[kc::vector_key(sub, g.head_dim, t, d / sub)]);
    return double(p.key_scale[h]) * p.key_codebook[(h * 256 + code) * sub + d % sub];
  }
  if (kc::is_kivi(g.sealed)) {
    const auto* h = reinterpret_cast<const __half*>(part);
    return double(__half2float(h[d])) * ldexp(1.0, -kc::kivi_scale_exponent(bits, d)) *
               code_at(tile, kc::kivi_key(bits, g.head_dim, t, d), bits) +
           __half2float(h[g.head_dim + d]);
  }
  const auto* pairs = reinterpret_cast<const __half2*>(tile + kc::code_bytes(g.sealed, g.head_dim));
  const float2 f = __half22float2(pairs[kc::key_scale_index(g.head_dim, g.group_size, t, d)]);
  return double(f.x) * code_at(tile, kc::affine_key(bits, g.head_dim, t, d), bits) + f.y;
}
__device__ double sealed_value(const char* part, const Geometry& g, const kc::DecodeParams& p,
                               int head, int token, int d) {
  const int bits = kc::bits_of(g.sealed), t = token % 16;
  const char* tile = part + token / 16 * value_tile_bytes(g);
  if (g.sealed == Sealed::kVector) {
    const int sub = g.value_sub, h = p.codebook_per_head ? head : 0;
    const int code =
        static_cast<unsigned char>(tile[kc::vector_value(sub, g.head_dim, t, d / sub)]);
    return double(p.value_scale[h]) * p.value_codebook[(h * 256 + code) * sub + d % sub];
  }
  const auto* pairs = reinterpret_cast<const __half2*>(tile + kc::code_bytes(g.sealed, g.head_dim));
  const float2 f = __half22float2(pairs[kc::value_scale_index(g.head_dim, g.group_size, t, d)]);
  return ldexp(double(f.x), -kc::value_scale_exponent(bits, g.head_dim, t, d)) *
             code_at(tile, kc::affine_value(bits, g.head_dim, t, d), bits) +
         ldexp(double(f.y), -kc::value_bias_exponent(bits));
}
__device__ double element(const void* p, Element type, std::size_t i) {
  return type == Element::kFp32   ? static_cast<const float*>(p)[i]
         : type == Element::kFp16 ? __half2float(static_cast<const __half*>(p)[i])
                                  : __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

/// One block of threads a sequence and query head.
__global__ void reference(Geometry g, kc::DecodeParams p, double* scores, std::size_t stride,
                          double* out) {
  const int seq = blockIdx.x / g.n_heads, head = blockIdx.x % g.n_heads,
            kv = head / (g.n_heads / g.n_kv_heads);
  const std::size_t row = blockIdx.x;
  double* mine = scores + row * stride;
  const kc::SequenceEntry s = p.sequences[seq];
  const int n_raw = s.n_raw * g.block_size, n = n_raw + s.n_sealed * g.block_size;
  const std::size_t raw_part = std::size_t(g.block_size) * g.head_dim * 2;
  __shared__ double top;
  for (int t = threadIdx.x; t < n; t += blockDim.x) {
    const bool raw = t < n_raw;
    const int u = raw ? t : t - n_raw, token = u % g.block_size;
    const kc::BlockEntry e = p.blocks[(raw ? s.first_raw : s.first_sealed) + u / g.block_size];
    double a = 0;
    if (token < e.first_token || token >= e.end_token) {
      mine[t] = -1e300;
      continue;
    }
    const char* part =
        static_cast<const char*>(e.keys) + std::size_t(kv) * (raw ? raw_part : p.key_stride);
    for (int d = 0; d < g.head_dim; ++d) {
      const double k = raw ? raw_element(part, g.raw, g.head_dim, token, d)
                           : sealed_key(part, g, p, kv, token, d);
      a += k * element(raw ? p.queries : p.sealed_queries, p.query_type, row * g.head_dim + d);
    }
    mine[t] = a * p.scale + (!raw && p.sealed_bias ? p.sealed_bias[row] : 0.F);
  }
  __syncthreads();
  if (threadIdx.x == 0) top = -1e300;
  __syncthreads();
  double m = -1e300;
  for (int t = threadIdx.x; t < n; t += blockDim.x) m = fmax(m, mine[t]);
  for (int d = 16; d > 0; d /= 2) m = fmax(m, __shfl_xor_sync(~0U, m, d));
  for (int w = 0; w < int(blockDim.x / 32); ++w) {
    if (int(threadIdx.x) == w * 32) top = fmax(top, m);
    __syncthreads();
  }
  for (int t = threadIdx.x; t < n; t += blockDim.x) mine[t] = exp(mine[t] - top);
  __syncthreads();
  // Threads (half, channel): 2 x dim at the least.
  const int lanes = blockDim.x / g.head_dim, d = threadIdx.x % g.head_dim,
            part_of = threadIdx.x / g.head_dim;
  double acc = 0, l = 0;
  for (int t = part_of; t < n; t += lanes) {
    if (mine[t] == 0) continue;
    const bool raw = t < n_raw;
    const int u = raw ? t : t - n_raw, token = u % g.block_size;
    const kc::BlockEntry e = p.blocks[(raw ? s.first_raw : s.first_sealed) + u / g.block_size];
    const char* part =
        static_cast<const char*>(e.values) + std::size_t(kv) * (raw ? raw_part : p.value_stride);
    const double v = raw ? raw_element(part, g.raw, g.head_dim, token, d)
                         : sealed_value(part, g, p, kv, token, d);
    acc += mine[t] * v;
    l += mine[t];
  }
  __shared__ double sum[1024], weight[1024];
  sum[threadIdx.x] = acc, weight[threadIdx.x] = l;
  __syncthreads();
  if (part_of == 0) {
    for (int k = 1; k < lanes; ++k) acc += sum[k * g.head_dim + d], l += weight[k * g.head_dim + d];
    out[row * g.head_dim + d] = l > 0 ? acc / l : 0;
  }
}

struct Lengths {
  int raw_tokens = 0;
  int sealed_tokens = 0;
};

template <class T>
T* upload(const std::vector<T>& v) {
  T* p = nullptr;
  CHECK(cudaMalloc(&p, std::max<std::size_t>(1, v.size()) * sizeof(T)));
  CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

/// A cache of random content with its tables.
struct Cache {
  Geometry g;
  kc::DecodeParams p{};
  kc::DecodeLaunch launch;
  std::vector<void*> owned;
  std::size_t bytes = 0;  // Of keys and values that one launch reads.
  int n_sequences = 0;

  template <class T>
  T* keep(T* q) {
    owned.push_back(const_cast<void*>(static_cast<const void*>(q)));
    return q;
  }
  void* take(std::size_t n) {
    void* q = nullptr;
    CHECK(cudaMalloc(&q, std::max<std::size_t>(n, 16)));
    CHECK(cudaMemset(q, 0xff, std::max<std::size_t>(n, 16)));  // NaN, if it were read.
    return keep(q);
  }

  Cache(const Geometry& geometry, const std::vector<Lengths>& lengths, Element query, Element out,
        int n_processors, std::uint64_t seed, bool odd)
      : g(geometry), n_sequences(static_cast<int>(lengths.size())) {
    const int bs = g.block_size;
    std::vector<kc::SequenceEntry> sequences;
    std::vector<std::int32_t> before{0};
    std::vector<kc::BlockEntry> blocks;
    std::size_t n_raw = 0, n_sealed = 0;
    for (const Lengths& l : lengths) {
      n_raw += (l.raw_tokens + bs - 1) / bs;
      n_sealed += (l.sealed_tokens + bs - 1) / bs;
    }
    const std::size_t raw_part = kc::raw_part_bytes(g), raw_block = raw_part * g.n_kv_heads;
    const bool sealed = g.sealed != Sealed::kNone;
    const std::size_t key_part = sealed ? kc::sealed_key_bytes(g) : 0,
                      value_part = sealed ? kc::sealed_value_bytes(g) : 0;
    char* raw_keys = static_cast<char*>(take(n_raw * raw_block));
    char* raw_values = static_cast<char*>(take(n_raw * raw_block));
    char* keys = static_cast<char*>(take(n_sealed * key_part * g.n_kv_heads));
    char* values = static_cast<char*>(take(n_sealed * value_part * g.n_kv_heads));
    if (n_raw > 0) {
      fill_rows<<<2048, 256>>>(raw_keys, g.raw, n_raw * raw_block / 2, seed);
      fill_rows<<<2048, 256>>>(raw_values, g.raw, n_raw * raw_block / 2, seed + (1ULL << 40));
    }
    if (n_sealed > 0) {
      fill_parts<<<2048, 256>>>(reinterpret_cast<std::uint32_t*>(keys), g, true, key_part,
                                n_sealed * key_part * g.n_kv_heads / 4, seed + 77);
      fill_parts<<<2048, 256>>>(reinterpret_cast<std::uint32_t*>(values), g, false, value_part,
                                n_sealed * value_part * g.n_kv_heads / 4, seed + 99);
    }
    std::mt19937 random(static_cast<unsigned>(seed));
    std::vector<std::size_t> raw_order(n_raw), sealed_order(n_sealed);
    std::iota(raw_order.begin(), raw_order.end(), 0);
    std::iota(sealed_order.begin(), sealed_order.end(), 0);
    std::shuffle(raw_order.begin(), raw_order.end(), random);
    std::shuffle(sealed_order.begin(), sealed_order.end(), random);
    std::size_t r = 0, s = 0;
    for (const Lengths& l : lengths) {
      kc::SequenceEntry e;
      e.first_raw = static_cast<int>(blocks.size());
      e.n_raw = (l.raw_tokens + bs - 1) / bs;
      for (int k = 0; k < e.n_raw; ++k, ++r) {
        kc::BlockEntry b{raw_keys + raw_order[r] * raw_block, raw_values + raw_order[r] * raw_block,
                         0, std::min(bs, l.raw_tokens - k * bs)};
        if (odd && k == 0 && e.n_raw > 1) b.first_token = 5;
        if (odd) {  // Rows that nobody wrote.
          for (int h = 0; h < g.n_kv_heads; ++h) {
            for (const void* q : {b.keys, b.values}) {
              char* rows = static_cast<char*>(const_cast<void*>(q)) + h * raw_part;
              CHECK(cudaMemset(rows + b.end_token * g.head_dim * 2, 0xff,
                               (bs - b.end_token) * g.head_dim * 2));
            }
          }
        }
        blocks.push_back(b);
      }
      e.first_sealed = static_cast<int>(blocks.size());
      e.n_sealed = (l.sealed_tokens + bs - 1) / bs;
      for (int k = 0; k < e.n_sealed; ++k, ++s) {
        blocks.push_back({keys + sealed_order[s] * key_part * g.n_kv_heads,
                          values + sealed_order[s] * value_part * g.n_kv_heads, 0,
                          std::min(bs, l.sealed_tokens - k * bs)});
      }
      sequences.push_back(e);
      before.push_back(before.back() + kc::cost(g, e.n_raw, e.n_sealed));
    }
    bytes = 2 * n_raw * raw_block + n_sealed * (key_part + value_part) * g.n_kv_heads;
    const std::size_t q_elements = std::size_t(n_sequences) * g.n_heads * g.head_dim;
    p.blocks = keep(upload(blocks));
    p.sequences = keep(upload(sequences));
    p.cost_before = keep(upload(before));
    void* q = take(q_elements * 4);
    fill_rows<<<64, 256>>>(q, query, q_elements, seed + 5555);
    p.queries = q;
    if (odd && sealed) {
      void* q2 = take(q_elements * 4);
      fill_rows<<<64, 256>>>(q2, query, q_elements, seed + 7777);
      p.sealed_queries = q2;
      std::vector<float> bias(std::size_t(n_sequences) * g.n_heads);
      for (std::size_t k = 0; k < bias.size(); ++k) bias[k] = normal(seed + k);
      p.sealed_bias = keep(upload(bias));
    }
    std::vector<std::int8_t> ck(std::size_t(g.n_kv_heads) * 256 * g.key_sub);
    std::vector<std::int8_t> cv(std::size_t(g.n_kv_heads) * 256 * g.value_sub);
    std::vector<float> scales(g.n_kv_heads);
    const auto centroid = [&](std::size_t k) {
      return static_cast<std::int8_t>(std::clamp(normal(seed + k) * 32, -127.F, 127.F));
    };
    for (std::size_t k = 0; k < ck.size(); ++k) ck[k] = centroid(k);
    for (std::size_t k = 0; k < cv.size(); ++k) cv[k] = centroid(k + 123456);
    for (auto& x : scales) x = 1.F / 32 + 0.001F * (&x - scales.data());
    p.key_codebook = keep(upload(ck));
    p.value_codebook = keep(upload(cv));
    p.key_scale = p.value_scale = keep(upload(scales));
    p.codebook_per_head = 1;
    p.out = take(q_elements * 4);
    const std::size_t w = kc::workspace_bytes(g, n_sequences, n_processors);
    p.workspace = take(w);
    CHECK(cudaMemset(p.workspace, 0, w));
    p.scale = 1.F / std::sqrt(static_cast<float>(g.head_dim));
    p.query_type = query;
    p.out_type = out;
    p.n_sequences = n_sequences;
    CHECK(kc::prepare(g, p, n_processors, &launch));
    CHECK(cudaDeviceSynchronize());
  }
  Cache(const Cache&) = delete;
  ~Cache() {
    for (void* q : owned) cudaFree(q);
  }

  void go() { CHECK(kc::launch(launch, nullptr)); }

  /// The largest error over the largest element of the reference.
  double check() {
    for (int k = 0; k < 2; ++k) go();
    CHECK(cudaDeviceSynchronize());
    const std::size_t n = std::size_t(n_sequences) * g.n_heads * g.head_dim;
    std::size_t longest = 1;
    std::vector<kc::SequenceEntry> seqs(n_sequences);
    CHECK(cudaMemcpy(seqs.data(), p.sequences, seqs.size() * sizeof(seqs[0]),
                     cudaMemcpyDeviceToHost));
    for (const auto& s : seqs) {
      longest = std::max(longest, std::size_t(s.n_raw + s.n_sealed) * g.block_size);
    }
    double *scores = nullptr, *ref = nullptr;
    CHECK(cudaMalloc(&scores, std::size_t(n_sequences) * g.n_heads * longest * 8));
    CHECK(cudaMalloc(&ref, n * 8));
    reference<<<n_sequences * g.n_heads, 512>>>(g, launch.params, scores, longest, ref);
    CHECK(cudaDeviceSynchronize());
    std::vector<double> want(n);
    CHECK(cudaMemcpy(want.data(), ref, n * 8, cudaMemcpyDeviceToHost));
    std::vector<char> raw(n * 4);
    CHECK(cudaMemcpy(raw.data(), p.out, n * 4, cudaMemcpyDeviceToHost));
    double error = 0, top = 0;
    for (std::size_t k = 0; k < n; ++k) {
      double x = 0;
      if (p.out_type == Element::kFp32) x = reinterpret_cast<float*>(raw.data())[k];
      if (p.out_type == Element::kFp16) x = __half2float(reinterpret_cast<__half*>(raw.data())[k]);
      if (p.out_type == Element::kBf16) {
        x = __bfloat162float(reinterpret_cast<__nv_bfloat16*>(raw.data())[k]);
      }
      const double e = std::fabs(x - want[k]);
      error = e <= error ? error : e;  // NaN stays.
      top = std::max(top, std::fabs(want[k]));
    }
    cudaFree(scores), cudaFree(ref);
    return error / top;
  }
};

struct Name {
  const char* name;
  Sealed sealed;
  Element raw;
  int key_sub = 4, value_sub = 4;
};
constexpr Name kNames[] = {{"bf16", Sealed::kNone, Element::kBf16},
                           {"fp16", Sealed::kNone, Element::kFp16},
                           {"int8", Sealed::kInt8, Element::kBf16},
                           {"int4", Sealed::kInt4, Element::kBf16},
                           {"int2", Sealed::kInt2, Element::kBf16},
                           {"kivi4", Sealed::kKivi4, Element::kBf16},
                           {"kivi2", Sealed::kKivi2, Element::kBf16},
                           {"vecinfer2", Sealed::kVector, Element::kBf16},
                           {"vecinfer4", Sealed::kVector, Element::kBf16, 2, 2},
                           {"vecinfer3", Sealed::kVector, Element::kBf16, 2, 4},
                           {"vecinfer1", Sealed::kVector, Element::kBf16, 8, 8},
                           {"vecinfer2/4", Sealed::kVector, Element::kBf16, 4, 2},
                           {"vecinfer1/2", Sealed::kVector, Element::kBf16, 8, 4},
                           {"vecinfer2/1", Sealed::kVector, Element::kBf16, 4, 8},
                           {"vecinfer4/1", Sealed::kVector, Element::kBf16, 2, 8},
                           {"vecinfer1/4", Sealed::kVector, Element::kBf16, 8, 2}};

Geometry geometry(const Name& n, int block) {
  Geometry g;
  g.n_heads = 32, g.n_kv_heads = 8, g.head_dim = 128, g.block_size = block;
  g.sealed = n.sealed, g.raw = n.raw, g.key_sub = n.key_sub, g.value_sub = n.value_sub;
  return g;
}
bool built(const Geometry& g) {
  kc::DecodeLaunch l;
  return kc::prepare(g, {}, 1, &l) == cudaSuccess;
}

int check_all(int n_processors) {
  int bad = 0, run = 0;
  for (const Name& n : kNames) {
    for (const Element raw : {Element::kBf16, Element::kFp16}) {
      if (n.sealed == Sealed::kNone && raw != n.raw) continue;
      for (const int dim : {128, 64}) {
        for (const int group : {32, 64}) {
          for (const int heads : {32, 56, 8, 96}) {
            for (const int block : {16, 32, 64}) {
              Geometry g = geometry(n, block);
              g.raw = raw, g.head_dim = dim, g.group_size = group, g.n_heads = heads;
              // Each block size with one of the head counts only.
              if (heads != 32 && block != 32) continue;
              if (!built(g)) continue;
              const bool s = n.sealed != Sealed::kNone;
              const std::vector<Lengths> lengths =
                  s ? std::vector<Lengths>{{37, 640}, {0, 0},      {0, 1000}, {100, 0},
                                           {1, 64},   {144, 5120}, {9, 128}}
                    : std::vector<Lengths>{{700, 0}, {0, 0}, {1, 0}, {5000, 0}, {65, 0}};
              Cache c(g, lengths, raw, Element::kFp32, n_processors, 1000 + run, true);
              const double e = c.check();
              const double limit =
                  s ? (raw == Element::kBf16 ? 4e-3 : 2e-3) : (raw == Element::kBf16 ? 4e-3 : 1e-3);
              ++run;
              if (!(e <= limit)) {
                ++bad;
                std::printf("WRONG %s raw %d dim %d group %d heads %d block %d: %.2e\n", n.name,
                            int(raw), dim, group, heads, block, e);
              } else if (heads == 32 && block == 32) {
                std::printf("ok %s raw %d dim %d group %d: %.1e\n", n.name, int(raw), dim, group,
                            e);
              }
              if (!s) continue;
              // Sealed blocks alone, of unlike and of like sequences: to their own tolerance.
              for (const std::vector<Lengths>& of :
                   {std::vector<Lengths>{{0, 640}, {0, 3000}, {0, 33}},
                    std::vector<Lengths>(32, {0, 97})}) {
                Cache d(g, of, raw, Element::kFp32, n_processors, 5000 + run, false);
                const double e2 = d.check();
                if (!(e2 <= 1e-3)) {
                  ++bad;
                  std::printf("WRONG sealed %s raw %d dim %d group %d heads %d block %d: %.2e\n",
                              n.name, int(raw), dim, group, heads, block, e2);
                }
              }
            }
          }
        }
      }
    }
  }
  std::printf("%d cases, %d wrong\n", run, bad);
  return bad;
}

void time_one(const Name& n, int batch, int length, int raw_tokens, int n_processors, bool check) {
  const char* size = std::getenv("BLOCK");
  const Geometry g = geometry(n, size ? std::atoi(size) : n.sealed == Sealed::kNone ? 16 : 32);
  if (!built(g)) return;
  const bool sealed = n.sealed != Sealed::kNone;
  const std::vector<Lengths> lengths(
      batch, sealed ? Lengths{raw_tokens, length - raw_tokens} : Lengths{length, 0});
  std::vector<Cache*> caches;
  std::size_t total = 0;
  while (caches.empty() || (total < (256U << 20) && caches.size() < 40)) {
    caches.push_back(new Cache(g, lengths, Element::kBf16, Element::kBf16, n_processors,
                               31 * caches.size(), false));
    total += caches.back()->bytes;
  }
  const double error = check ? caches[0]->check() : 0;
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  constexpr int kLaunches = 20;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int k = 0; k < kLaunches; ++k) CHECK(kc::launch(caches[k % caches.size()]->launch, stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  float best = 1e9F;
  for (int k = 0; k < 11; ++k) {
    CHECK(cudaEventRecord(a, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (k > 0) best = std::min(best, ms / kLaunches);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  const double us = best * 1e3, rate = caches[0]->bytes / us * 1e-6;
  std::printf("%-10s B %2d x %6d raw %3d  %7.1f us  %6.2f TB/s  %5.1f %% of 4.8", n.name, batch,
              length, sealed ? raw_tokens : length, us, rate, rate / 4.8 * 100);
  if (check) std::printf("  error %.1e", error);
  std::printf("\n");
  std::fflush(stdout);
  for (Cache* c : caches) delete c;
}

}  // namespace

int main(int argc, char** argv) {
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  const int n = prop.multiProcessorCount;
  const std::string what = argc > 1 ? argv[1] : "time";
  if (what == "check") return check_all(argc > 2 ? std::atoi(argv[2]) : n);
  if (what == "small") {
    for (const Name& name : kNames) {
      const bool sealed = name.sealed != Sealed::kNone;
      Cache c(geometry(name, 32),
              sealed ? std::vector<Lengths>{{37, 160}, {0, 96}, {0, 0}, {20, 0}}
                     : std::vector<Lengths>{{130, 0}, {0, 0}, {70, 0}},
              name.raw, Element::kFp32, 5, 3, true);
      std::printf("%s: error %.1e\n", name.name, c.check());
    }
    return 0;
  }
  for (const Name& name : kNames) {
    if (argc > 2 && std::string(argv[2]) != name.name) continue;
    if (what == "one") {
      Cache c(geometry(name, name.sealed == Sealed::kNone ? 16 : 32),
              std::vector<Lengths>(std::atoi(argv[3]), name.sealed == Sealed::kNone
                                                           ? Lengths{std::atoi(argv[4]), 0}
                                                           : Lengths{0, std::atoi(argv[4])}),
              Element::kBf16, Element::kBf16, n, 1, false);
      std::printf("error %.1e\n", c.check());
      return 0;
    }
    for (const auto& [batch, length] :
         {std::pair{1, 1024}, {1, 8192}, {1, 65536}, {1, 196608}, {8, 8192}, {32, 8192}}) {
      time_one(name, batch, length, 0, n, true);
    }
    if (name.sealed != Sealed::kNone) {
      for (const auto& [batch, length] : {std::pair{1, 1024}, {1, 8192}, {1, 196608}, {32, 8192}}) {
        time_one(name, batch, length, 144, n, false);
      }
    }
  }
}
