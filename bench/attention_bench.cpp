// The CPU rows of the performance table: decode attention over a long context in each format, on
// memory of its own for each layer, against this machine's read bandwidth.
//
//   attention_bench [shape] [n_threads] [n_tokens] [block_size]
//
// Formats take turns in one process. Times are the least of kRounds; "vs bf16" is the median of the
// rounds' ratios, since memory and cores of a shared machine have their good and bad moments.
// Targets are those of the default model's shape with two threads.

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "codec/codec.h"
#include "codec/vector_quantizer.h"

namespace kvpool {
namespace {

using Clock = std::chrono::steady_clock;
using codec::Format;
using enum codec::Code;

constexpr int kRounds = 15;

struct Shape {
  const char* name;
  int n_layers;
  int n_heads;
  int n_kv_heads;
  int head_dim;
};
constexpr Shape kShapes[] = {{"smollm2-135m", 30, 9, 3, 64}, {"llama-8b", 8, 32, 8, 128}};
constexpr int kTargetThreads = 2;

struct Case {
  const char* name;
  Format format;
  /// How much faster than bf16 the target is, if there is one.
  double target = 0.0;
};
constexpr Case kCases[] = {{"fp32", {kFp32}},
                           {"fp16", {kFp16}},
                           {"bf16", {kBf16}},
                           {"int8 g32", {kInt8, 32}},
                           {"int4 g32", {kInt4, 32}, 2.0},
                           {"int4 g64", {kInt4, 64}, 2.0},
                           {"int2 g32", {kInt2, 32}, 2.5},
                           {"kivi4", {kKivi4, 32}, 2.0},
                           {"kivi2", {kKivi2, 32}, 2.5},
                           {"vecinfer1", {kVecInfer1}},
                           {"vecinfer1.5", {kVecInfer1_5}},
                           {"vecinfer2", {kVecInfer2}, 2.5},
                           {"vecinfer3", {kVecInfer3}},
                           {"vecinfer4", {kVecInfer4}, 2.0}};
constexpr std::size_t kBf16Case = 2;
/// The share of the read bandwidth that raw formats are to reach.
constexpr double kRawTarget = 0.7;

/// Codebooks of random centroids and rotations: they cost what trained ones do.
std::shared_ptr<const codec::VectorQuantizer> random_quantizer(const Shape& shape,
                                                               const Format& format,
                                                               codec::Role role) {
  if (!format.is_vector()) return nullptr;
  const codec::VectorCode code = codec::vector_code(format.code, role);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  auto quantizer = std::make_shared<codec::VectorQuantizer>();
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  for (int head = 0; head < shape.n_kv_heads; ++head) {
    std::vector<std::int8_t> centroids((std::size_t{1} << code.code_bits) *
                                       static_cast<std::size_t>(code.sub_dim));
    for (std::int8_t& x : centroids) {
      x = static_cast<std::int8_t>(std::clamp(32.0F * normal(random), -127.0F, 127.0F));
    }
    quantizer->codebooks.push_back(
        codec::make_codebook(code.sub_dim, code.code_bits, 1.0F / 32.0F, std::move(centroids)));
    codec::HeadTransform& transform = quantizer->transforms.emplace_back();
    transform.smooth.assign(dim, 1.0F);
    transform.mean.assign(dim, 0.0F);
    if (role == codec::Role::kKeys) {
      std::vector<std::int8_t> rows(dim * dim);
      for (std::int8_t& x : rows) {
        x = static_cast<std::int8_t>(std::clamp(32.0F * normal(random), -127.0F, 127.0F));
      }
      codec::set_rotation(transform, rows);
    }
  }
  return quantizer;
}

/// Nanoseconds that a token of a head takes to encode, keys and values together.
double encode_ns(const Shape& shape, Format format, int block_size) {
  double best = 0.0;
  for (const codec::Role role : {codec::Role::kKeys, codec::Role::kValues}) {
    const auto quantizer = random_quantizer(shape, format, role);
    format.quantizer = quantizer.get();
    const codec::PartGeometry geometry{format, role, block_size, shape.head_dim};
    std::vector<float> rows(static_cast<std::size_t>(block_size * shape.head_dim));
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (float& x : rows) x = normal(random);
    std::vector<std::byte> part(codec::part_bytes(geometry));
    double least = std::numeric_limits<double>::infinity();
    for (int round = 0; round < 20 * kRounds; ++round) {
      const auto start = Clock::now();
      codec::encode(geometry, rows.data(), block_size, part.data());
      least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
    }
    best += least * 1e9 / block_size;
  }
  return best;
}

struct Unmap {
  std::size_t n;
  void operator()(std::byte* memory) const { munmap(memory, n); }
};
using Memory = std::unique_ptr<std::byte, Unmap>;

Memory map(std::size_t n) {
  void* const memory = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (std::getenv("KVPOOL_BENCH_HUGE") != nullptr) madvise(memory, n, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(memory), Unmap{n}};
}

/// All layers' blocks of one format, keys and values of a block apart as two streams have them.
class Cache {
 public:
  Cache(const Shape& shape, const Format& format, int n_tokens, int block_size)
      : bytes_(0),
        layers_(static_cast<std::size_t>(shape.n_layers)),
        quantizers_{random_quantizer(shape, format, codec::Role::kKeys),
                    random_quantizer(shape, format, codec::Role::kValues)} {
    codec::PartGeometry keys{format, codec::Role::kKeys, block_size, shape.head_dim};
    codec::PartGeometry values{format, codec::Role::kValues, block_size, shape.head_dim};
    keys.format.quantizer = quantizers_[0].get();
    values.format.quantizer = quantizers_[1].get();
    const std::size_t key_bytes = codec::block_bytes(keys, shape.n_kv_heads);
    const std::size_t value_bytes = codec::block_bytes(values, shape.n_kv_heads);
    const auto n_blocks = static_cast<std::size_t>((n_tokens + block_size - 1) / block_size);
    const std::vector<std::byte> key = sample(keys, shape.n_kv_heads);
    const std::vector<std::byte> value = sample(values, shape.n_kv_heads);
    bytes_ = (key_bytes + value_bytes) * n_blocks * layers_.size();
    memory_ = map(bytes_);
    std::byte* at = memory_.get();
    for (auto& blocks : layers_) {
      for (std::size_t i = 0; i < n_blocks; ++i) {
        attention::BlockRef block{};
        block.keys = at + i * key_bytes;
        block.values = at + n_blocks * key_bytes + i * value_bytes;
        block.position = static_cast<std::int64_t>(i) * block_size;
        block.n_tokens = std::min(block_size, n_tokens - static_cast<int>(i) * block_size);
        block.block_size = block_size;
        block.key_format = keys.format;
        block.value_format = values.format;
        std::memcpy(at + i * key_bytes, key.data(), key_bytes);
        std::memcpy(at + n_blocks * key_bytes + i * value_bytes, value.data(), value_bytes);
        blocks.push_back(block);
      }
      at += n_blocks * (key_bytes + value_bytes);
    }
  }

  std::size_t bytes() const { return bytes_; }
  const std::vector<std::vector<attention::BlockRef>>& layers() const { return layers_; }

 private:
  static std::vector<std::byte> sample(codec::PartGeometry geometry, int n_kv_heads) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::byte> block;
    for (int head = 0; head < n_kv_heads; ++head) {
      geometry.kv_head = head;
      std::vector<float> rows(static_cast<std::size_t>(geometry.block_size * geometry.head_dim));
      for (float& x : rows) x = normal(random);
      std::vector<std::byte> part(codec::part_bytes(geometry));
      codec::encode(geometry, rows.data(), geometry.block_size, part.data());
      block.insert(block.end(), part.begin(), part.end());
    }
    return block;
  }

  std::size_t bytes_;
  Memory memory_{nullptr, Unmap{0}};
  std::vector<std::vector<attention::BlockRef>> layers_;
  std::shared_ptr<const codec::VectorQuantizer> quantizers_[2];
};

struct Seconds {
  double wall = std::numeric_limits<double>::infinity();
  double cpu = std::numeric_limits<double>::infinity();
};

double cpu_now() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// What one token's attention takes over all layers.
Seconds decode_seconds(const Shape& shape, const Cache& cache, attention::ThreadPool& pool) {
  const auto n = static_cast<std::size_t>(shape.n_heads * shape.head_dim);
  std::vector<float> queries(n);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& x : queries) x = normal(random);
  std::vector<float> out(n);
  const double cpu_start = cpu_now();
  const auto start = Clock::now();
  for (const auto& blocks : cache.layers()) {
    const attention::SequenceRef sequence{blocks, blocks.back().position};
    attention::Arguments arguments;
    arguments.n_heads = shape.n_heads;
    arguments.n_kv_heads = shape.n_kv_heads;
    arguments.head_dim = arguments.value_dim = shape.head_dim;
    arguments.scale = 1.0F / 8.0F;
    arguments.queries = queries.data();
    arguments.out = out.data();
    arguments.query_strides = arguments.out_strides =
        attention::contiguous(shape.n_heads, 1, shape.head_dim);
    arguments.sequences = {&sequence, 1};
    attention::attend(arguments, pool);
  }
  return {std::chrono::duration<double>(Clock::now() - start).count(), cpu_now() - cpu_start};
}

/// Sums 64-bit words, as the plainest reader does.
__attribute__((target("avx512f"))) std::uint64_t sum(const std::byte* at, std::size_t n) {
  __m512i sums[4] = {};
  for (std::size_t i = 0; i + 256 <= n; i += 256) {
    for (std::size_t j = 0; j < 4; ++j) {
      sums[j] = _mm512_add_epi64(sums[j], _mm512_loadu_si512(at + i + 64 * j));
    }
  }
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]),
                                             _mm512_add_epi64(sums[2], sums[3])));
  return std::accumulate(std::begin(lanes), std::end(lanes), std::uint64_t{0});
}

/// Bytes per second that all threads together read from memory larger than the caches.
double read_bandwidth(attention::ThreadPool& pool, const Memory& memory, std::size_t n) {
  const auto n_threads = static_cast<std::size_t>(pool.n_threads());
  std::vector<std::uint64_t> sums(n_threads);
  const auto start = Clock::now();
  pool.for_each(n_threads, [&](std::size_t i) {
    sums[i] = sum(memory.get() + n / n_threads * i, n / n_threads);
  });
  const std::chrono::duration<double> took = Clock::now() - start;
  if (sums[0] == 42) std::printf(" ");
  return static_cast<double>(n) / took.count();
}

double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  std::ranges::nth_element(ratios, ratios.begin() + std::ssize(ratios) / 2);
  return ratios[ratios.size() / 2];
}

/// The target and whether it is met; empty if there is none.
std::string verdict(const Case& c, double share_of_bandwidth, double times_bf16) {
  char target[32] = "";
  if (c.format.is_raw()) {
    std::snprintf(target, sizeof target, ">= %.0f%%  ", 100 * kRawTarget);
    return target + std::string(share_of_bandwidth >= kRawTarget ? "yes" : "NO");
  }
  if (c.target == 0.0) return "";
  std::snprintf(target, sizeof target, ">= %.1fx  ", c.target);
  return target + std::string(times_bf16 >= c.target ? "yes" : "NO");
}

void run(const Shape& shape, int n_threads, int n_tokens, int block_size) {
  attention::ThreadPool pool(n_threads);
  constexpr std::size_t kBandwidthBytes = std::size_t{256} << 20;
  const Memory bandwidth_memory = map(kBandwidthBytes);
  std::memset(bandwidth_memory.get(), 1, kBandwidthBytes);
  std::vector<Cache> caches;
  for (const Case& c : kCases) caches.emplace_back(shape, c.format, n_tokens, block_size);

  std::vector<Seconds> best(caches.size());
  std::vector<std::vector<double>> times(caches.size());
  double bandwidth = 0.0;
  for (int round = 0; round < kRounds; ++round) {
    bandwidth = std::max(bandwidth, read_bandwidth(pool, bandwidth_memory, kBandwidthBytes));
    for (std::size_t i = 0; i < caches.size(); ++i) {
      const Seconds seconds = decode_seconds(shape, caches[i], pool);
      best[i].wall = std::min(best[i].wall, seconds.wall);
      best[i].cpu = std::min(best[i].cpu, seconds.cpu);
      times[i].push_back(seconds.wall);
    }
  }
  std::printf(
      "\n%s, %d heads, %d KV heads, head_dim %d, %d layers, %d tokens, blocks of %d, "
      "%d thread(s), kernels %s; this machine reads %.1f GB/s\n",
      shape.name, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.n_layers, n_tokens,
      block_size, n_threads, std::string(kernels::active().name).c_str(), bandwidth / 1e9);
  const bool judged = &shape == kShapes && n_threads == kTargetThreads;
  std::printf("%-12s %9s %9s %15s %9s %12s %9s %11s  %s\n", "format", "ms/token", "CPU ms",
              "ns/layer-token", "GB/s", "of bandwidth", "vs bf16", "encode ns",
              judged ? "target" : "");
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const double rate = static_cast<double>(caches[i].bytes()) / best[i].wall;
    const double ratio = median_ratio(times[kBf16Case], times[i]);
    std::printf("%-12s %9.2f %9.2f %15.2f %9.1f %11.0f%% %8.2fx %11.0f  %s\n", kCases[i].name,
                best[i].wall * 1e3, best[i].cpu * 1e3,
                best[i].wall * 1e9 / shape.n_layers / n_tokens, rate / 1e9, 100 * rate / bandwidth,
                ratio, encode_ns(shape, kCases[i].format, block_size),
                judged ? verdict(kCases[i], rate / bandwidth, ratio).c_str() : "");
  }
}

}  // namespace
}  // namespace kvpool

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  const int only_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  const int n_tokens = argc > 3 ? std::atoi(argv[3]) : 8192;
  const int block_size = argc > 4 ? std::atoi(argv[4]) : 32;
  for (const auto& shape : kvpool::kShapes) {
    if (!only.empty() && only != "all" && only != shape.name) continue;
    for (const int n_threads : {1, 2}) {
      if (only_threads > 0 && only_threads != n_threads) continue;
      kvpool::run(shape, n_threads, n_tokens, block_size);
    }
  }
}
