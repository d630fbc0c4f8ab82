// What a decode step's attention costs through MLX: append one token a request, then attend, for as
// many layers as a model has; the usual cache beside ours, in turns. Keys and values are random.
//   paged_bench [FORMATS] [SHAPES]     stock,raw,int4,kivi2   1x8192,1x65536,32x8192
#include <mlx/mlx.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "llama_model.h"

namespace mx = mlx::core;

namespace {

constexpr int kLayers = 32, kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr int kSteps = 24;
constexpr int kChunk = 4096;

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

mx::array rows(int batch, int heads, int n) {
  return mx::random::normal({batch, heads, n, kDim}, mx::bfloat16);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void time_one(const std::string& format, int batch, int length) {
  mx::clear_cache();
  mx::reset_peak_memory();
  const std::size_t before = mx::get_active_memory();
  const llama::Shape shape{.n_layers = kLayers, .n_kv_heads = kKvHeads, .head_dim = kDim};
  llama::Caches caches = llama::make_caches(format, shape, batch, 32);
  for (auto& cache : caches) {
    for (int done = 0; done < length; done += kChunk) {
      const int n = std::min(kChunk, length - done);
      cache->append(rows(batch, kKvHeads, n), rows(batch, kKvHeads, n));
      mx::eval(cache->state());
    }
  }
  std::vector<double> built, done;
  for (int step = 0; step < kSteps; ++step) {
    const mx::array k = rows(batch, kKvHeads, 1), v = rows(batch, kKvHeads, 1);
    mx::array q = rows(batch, kHeads, 1);
    mx::eval(k, v, q);
    mx::synchronize();
    const double start = now_us();
    for (auto& cache : caches) {
      cache->append(k, v);
      q = cache->attend(q + mx::array(0.0F, mx::bfloat16), 0.088F);
    }
    const double ready = now_us();
    mx::eval(q);
    built.push_back((ready - start) / kLayers);
    done.push_back((now_us() - start) / kLayers);
  }
  const double bytes = 4.0 * batch * static_cast<double>(length) * kKvHeads * kDim;
  std::printf(
      "%-11s %3d x %6d  %8.1f us a layer (%.1f building)  bf16 bytes at %.2f TB/s  held %.0f MB\n",
      format.c_str(), batch, length, median(done), median(built), bytes / median(done) * 1e-6,
      static_cast<double>(mx::get_active_memory() - before) * 1e-6);
  std::fflush(stdout);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> items;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) items.push_back(item);
  return items;
}

}  // namespace

int main(int argc, char** argv) {
  const auto formats = split(argc > 1 ? argv[1] : "stock,raw,int4,kivi2");
  const auto shapes = split(argc > 2 ? argv[2] : "1x8192,1x65536,8x8192");
  for (const std::string& shape : shapes) {
    const auto x = shape.find('x');
    for (const std::string& format : formats) {
      time_one(format, std::stoi(shape.substr(0, x)), std::stoi(shape.substr(x + 1)));
    }
  }
}
