// Decodes with a Llama-family model on MLX and kvpool alone, with the usual cache or kvpool's.
// The tokens fed are drawn by a seed, the same for every cache, so that logits can be compared.
#include <mlx/mlx.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama_model.h"

namespace mx = mlx::core;

namespace {

constexpr const char* kUsage = R"(usage: llama_decode [--NAME VALUE ...]
  --model FILE       a GGUF of the llama architecture ($KVPOOL_MODEL if neither this nor --shape)
  --shape NAME       random weights: tiny, smollm2-135m, llama-3.2-1b or llama-3.1-8b
  --cache LIST       caches, one after the other: stock, raw, int8, int4, int2, kivi4, kivi2,
                     vecinfer4, 3, 2, 1.5, 1 (random codebooks)                        [stock,raw]
  --fill N           random keys and values put in front of the prompt                        [0]
  --prompt N         tokens of prompt, in chunks of --chunk                                   [64]
  --chunk N                                                                                   [2048]
  --tokens N         tokens decoded                                                           [32]
  --steps N          1: print what each step took, too                                        [0]
  --batch N          requests                                                                 [1]
  --block-size N     tokens to a block                                                        [32]
  --dtype NAME       float32, float16 or bfloat16        [float32 on the CPU, bfloat16 elsewhere]
  --device NAME      cpu or gpu                                         [what MLX was built for]
  --seed N                                                                                    [0]
)";

class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i];
      if (values_.count(name) == 0) throw std::invalid_argument("there is no option " + name);
      if (i + 1 == argc) throw std::invalid_argument(name + " needs a value");
      values_[name] = argv[i + 1];
    }
  }
  const std::string& text(const std::string& name) const { return values_.at(name); }
  int number(const std::string& name, int least) const {
    const std::string& text = values_.at(name);
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least) {
      throw std::invalid_argument(name + " must be a number from " + std::to_string(least) +
                                  " on, got " + text);
    }
    return value;
  }
  std::vector<std::string> list(const std::string& name) const {
    std::vector<std::string> items;
    std::istringstream stream(values_.at(name));
    for (std::string item; std::getline(stream, item, ',');) items.push_back(item);
    return items;
  }

 private:
  std::map<std::string, std::string> values_{
      {"--model", ""},    {"--shape", ""},  {"--cache", "stock,raw"}, {"--fill", "0"},
      {"--prompt", "64"}, {"--chunk", "2048"}, {"--tokens", "32"},    {"--batch", "1"},
      {"--block-size", "32"}, {"--dtype", ""}, {"--device", ""},      {"--seed", "0"},
      {"--steps", "0"}};
};

struct Run {
  int fill, prompt, chunk, n_tokens, batch, block_size;
  std::uint64_t seed;
};

struct Result {
  double prefill_s = 0.0;
  double decode_ms = 0.0;  ///< A token, the median.
  double mean_ms = 0.0;    ///< Likewise the mean.
  double tokens_per_s = 0.0;  ///< By the mean, of all requests.
  double host_ms = 0.0;    ///< Of a token, the median: until all of the step is on its way.
  std::vector<double> steps_ms;  ///< Of each token from the third on.
  std::size_t held = 0;    ///< Bytes that the cache holds at the end.
  std::size_t peak = 0;    ///< Bytes at most, beyond the weights.
  double logits = 0.0;     ///< Root mean square of all decode steps' logits.
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// 0 of none.
double median(std::vector<double> numbers) {
  if (numbers.empty()) return 0.0;
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

mx::Dtype dtype_named(const std::string& name) {
  if (name == "float32") return mx::float32;
  if (name == "float16") return mx::float16;
  if (name == "bfloat16") return mx::bfloat16;
  throw std::invalid_argument("--dtype must be float32, float16 or bfloat16, got " + name);
}

void evaluate(const llama::Caches& caches) {
  std::vector<mx::array> states;
  for (const auto& cache : caches) {
    for (mx::array& state : cache->state()) states.push_back(std::move(state));
  }
  mx::eval(std::move(states));
}

/// Stands for a context that was there before: no model could tell it from a real one by its speed.
void fill(llama::Caches& caches, const llama::Shape& shape, mx::Dtype dtype, const Run& run) {
  for (int done = 0; done < run.fill; done += run.chunk) {
    const mx::Shape rows{run.batch, shape.n_kv_heads, std::min(run.chunk, run.fill - done),
                         shape.head_dim};
    for (std::size_t i = 0; i < caches.size(); ++i) {
      const auto key = mx::random::key(run.seed + 1 + i);
      const auto [k, v] = mx::random::split(key);
      caches[i]->append(mx::random::normal(rows, dtype, k), mx::random::normal(rows, dtype, v));
    }
    evaluate(caches);
  }
}

Result decode(const llama::Model& model, const std::string& format, const Run& run) {
  Result result;
  mx::clear_cache();
  mx::reset_peak_memory();
  const std::size_t before = mx::get_active_memory();
  llama::Caches caches = llama::make_caches(format, model.shape(), run.batch, run.block_size);
  const mx::array tokens =
      mx::random::randint(0, model.shape().vocab, {run.batch, run.prompt + run.n_tokens},
                          mx::int32, mx::random::key(run.seed));
  const auto columns = [&](int first, int n) {
    return mx::slice(tokens, {0, first}, {run.batch, first + n});
  };
  fill(caches, model.shape(), model.dtype(), run);

  double start = seconds();
  for (int done = 0; done < run.prompt; done += run.chunk) {
    const int n = std::min(run.chunk, run.prompt - done);
    const mx::array logits = model(columns(done, n), caches);
    if (done + n == run.prompt) mx::eval(logits);
    evaluate(caches);
  }
  result.prefill_s = seconds() - start;

  // The next step is built while the last one runs.
  std::vector<double> times;
  std::vector<double> host_times;
  std::vector<mx::array> logits;
  for (int i = 0; i < run.n_tokens; ++i) {
    const double begun = seconds();
    logits.push_back(model(columns(run.prompt + i, 1), caches));
    mx::async_eval(std::vector<mx::array>{logits.back()});
    if (i == 0) continue;
    const double sent = seconds();
    mx::eval(logits[static_cast<std::size_t>(i) - 1]);
    const double now = seconds();
    if (i > 1) {
      times.push_back(now - start);
      host_times.push_back(sent - begun);
    }
    start = now;
  }
  mx::eval(logits);
  result.mean_ms = times.empty() ? 0.0
                                 : 1e3 * std::accumulate(times.begin(), times.end(), 0.0) /
                                       static_cast<double>(times.size());
  if (!times.empty()) result.tokens_per_s = 1e3 * run.batch / result.mean_ms;
  for (const double time : times) result.steps_ms.push_back(1e3 * time);
  result.decode_ms = 1e3 * median(std::move(times));
  result.host_ms = 1e3 * median(std::move(host_times));
  result.peak = mx::get_peak_memory() - before;
  const mx::array all = mx::astype(mx::stack(logits), mx::float32);
  result.logits = mx::sqrt(mx::mean(mx::square(all))).item<float>();
  logits.clear();
  result.held = mx::get_active_memory() - before;
  return result;
}

/// Whether all caches had the memory they need.
bool run(const Options& options) {
  if (const std::string& device = options.text("--device"); !device.empty()) {
    if (device != "cpu" && device != "gpu") {
      throw std::invalid_argument("--device must be cpu or gpu, got " + device);
    }
    mx::set_default_device(device == "cpu" ? mx::Device::cpu : mx::Device::gpu);
  }
  const bool on_cpu = mx::default_device() == mx::Device::cpu;
  const std::string& dtype_name = options.text("--dtype");
  const mx::Dtype dtype =
      dtype_named(!dtype_name.empty() ? dtype_name : on_cpu ? "float32" : "bfloat16");
  const Run run{options.number("--fill", 0),       options.number("--prompt", 1),
                options.number("--chunk", 1),      options.number("--tokens", 1),
                options.number("--batch", 1),      options.number("--block-size", 1),
                static_cast<std::uint64_t>(options.number("--seed", 0))};

  const std::string& shape = options.text("--shape");
  std::string path = options.text("--model");
  const char* const named = std::getenv("KVPOOL_MODEL");
  if (path.empty() && shape.empty() && named != nullptr) path = named;
  if (path.empty() == shape.empty()) throw std::invalid_argument("name a --model or a --shape");
  const llama::Model model = shape.empty()
                                 ? llama::Model::from_gguf(path, dtype)
                                 : llama::Model::random(llama::shape_named(shape), dtype, run.seed);
  mx::eval(model.weights());

  std::printf("%-11s %9s %14s %8s %9s %12s %12s %12s %14s\n", "cache", "prefill s", "decode ms/tok",
              "mean", "tokens/s", "of the host", "held MB", "peak MB", "logits (rms)");
  bool all = true;
  for (const std::string& format : options.list("--cache")) {
    Result result;
    try {
      result = decode(model, format, run);
    } catch (const std::runtime_error& error) {  // MLX's, where the memory does not suffice.
      std::printf("%-11s failed: %s\n", format.c_str(), error.what());
      std::fflush(stdout);
      all = false;
      continue;
    }
    std::printf("%-11s %9.3f %14.3f %8.3f %9.1f %12.3f %12.1f %12.1f %14.6f\n", format.c_str(),
                result.prefill_s, result.decode_ms, result.mean_ms, result.tokens_per_s,
                result.host_ms, static_cast<double>(result.held) * 1e-6,
                static_cast<double>(result.peak) * 1e-6, result.logits);
    if (options.number("--steps", 0) > 0) {
      for (const double ms : result.steps_ms) std::printf(" %.2f", ms);
      std::printf("\n");
    }
    std::fflush(stdout);
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(Options(argc, argv)) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_decode: %s\n\n%s", error.what(), kUsage);
    return 2;
  }
}
