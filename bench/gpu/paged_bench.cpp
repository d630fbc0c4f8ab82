// What a decode step's attention costs through MLX: append one token a request, then attend, for as
// many layers as a model has; the usual cache beside ours. Keys and values are random. Each step is
// built while the last one runs, as in decoding.
//   paged_bench [FORMATS [SHAPES [STEPS]]]     stock,raw,int4,kivi2   1x8192,1x65536,32x8192   24
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
constexpr int kChunk = 4096;
constexpr float kScale = 0.088F;

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

void time_one(const std::string& format, int batch, int length, int n_steps) {
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
  struct Token {
    mx::array q, k, v;
  };
  std::vector<Token> tokens;
  for (int step = 0; step < n_steps; ++step) {
    tokens.push_back({rows(batch, kHeads, 1), rows(batch, kKvHeads, 1), rows(batch, kKvHeads, 1)});
    mx::eval(tokens.back().q, tokens.back().k, tokens.back().v);
  }
  std::vector<double> built, sent, done;
  std::vector<mx::array> results;
  double last = now_us();
  for (const Token& token : tokens) {
    const double start = now_us();
    mx::array q = token.q;
    for (auto& cache : caches) {
      cache->append(token.k, token.v);
      q = cache->attend(q, kScale);
    }
    const double built_at = now_us();
    built.push_back((built_at - start) / kLayers);
    mx::async_eval(q);
    sent.push_back((now_us() - built_at) / kLayers);
    results.push_back(q);
    if (results.size() == 1) continue;
    mx::eval(results[results.size() - 2]);
    const double now = now_us();
    if (results.size() > 2) done.push_back((now - last) / kLayers);
    last = now;
  }
  mx::eval(results.back());
  const double bytes = 4.0 * batch * static_cast<double>(length) * kKvHeads * kDim;
  std::printf(
      "%-11s %3d x %6d  %8.1f us a layer (%.1f building, %.1f sending)  bf16 bytes at %.2f TB/s  "
      "held %.0f MB\n",
      format.c_str(), batch, length, median(done), median(built), median(sent),
      bytes / median(done) * 1e-6, static_cast<double>(mx::get_active_memory() - before) * 1e-6);
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
  const auto shapes = split(argc > 2 ? argv[2] : "1x8192,1x65536,32x8192");
  const int n_steps = argc > 3 ? std::max(3, std::stoi(argv[3])) : 24;
  for (const std::string& shape : shapes) {
    const auto x = shape.find('x');
    for (const std::string& format : formats) {
      time_one(format, std::stoi(shape.substr(0, x)), std::stoi(shape.substr(x + 1)), n_steps);
    }
  }
}
