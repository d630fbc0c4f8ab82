#include "llama_model.h"

#include <mlx/fast.h>
#include <mlx/io.h>
#include <mlx/ops.h>
#include <mlx/random.h>

#include <cmath>
#include <stdexcept>
#include <utility>

namespace mx = mlx::core;

namespace llama {

Shape shape_named(std::string_view name) {
  if (name == "tiny") return {2, 128, 256, 4, 2, 64, 512};
  if (name == "smollm2-135m") return {30, 576, 1536, 9, 3, 64, 49152, 1e-5F, 100000.0F};
  if (name == "llama-3.2-1b") return {16, 2048, 8192, 32, 8, 64, 128256, 1e-5F, 500000.0F};
  if (name == "llama-3.1-8b") return {32, 4096, 14336, 32, 8, 128, 128256, 1e-5F, 500000.0F};
  throw std::invalid_argument("shape must be tiny, smollm2-135m, llama-3.2-1b or llama-3.1-8b, got " +
                              std::string(name));
}

Linear::Linear(mx::array weight, mx::array scales, mx::array biases) : weight_(std::move(weight)) {
  constexpr int kGroupSize = 32;  // Of every quantisation that GGUF shares with MLX.
  const int bits = weight_.shape(1) * 32 / (scales.shape(1) * kGroupSize);
  quantized_ = {std::move(scales), std::move(biases), kGroupSize, bits};
}

mx::array Linear::operator()(const mx::array& x) const {
  if (!quantized_) return mx::matmul(x, mx::transpose(weight_));
  return mx::quantized_matmul(x, weight_, quantized_->scales, quantized_->biases, true,
                              quantized_->group_size, quantized_->bits);
}

mx::array Linear::rows(const mx::array& indices) const {
  const mx::array rows = mx::take(weight_, indices, 0);
  if (!quantized_) return rows;
  return mx::dequantize(rows, mx::take(quantized_->scales, indices, 0),
                        mx::take(quantized_->biases, indices, 0), quantized_->group_size,
                        quantized_->bits);
}

void Linear::add_to(std::vector<mx::array>& arrays) const {
  arrays.push_back(weight_);
  if (!quantized_) return;
  arrays.push_back(quantized_->scales);
  arrays.push_back(quantized_->biases);
}

template <typename MakeLinear, typename MakeNorm>
Model::Model(const Shape& shape, mx::Dtype dtype, MakeLinear make_linear, MakeNorm make_norm)
    : shape_(shape),
      dtype_(dtype),
      embedding_(make_linear("token_embd", shape.vocab, shape.hidden)),
      norm_(make_norm("output_norm", shape.hidden)) {
  const int q_rows = shape.n_heads * shape.head_dim;
  const int kv_rows = shape.n_kv_heads * shape.head_dim;
  for (int i = 0; i < shape.n_layers; ++i) {
    const std::string layer = "blk." + std::to_string(i) + ".";
    layers_.push_back({make_norm(layer + "attn_norm", shape.hidden),
                       make_norm(layer + "ffn_norm", shape.hidden),
                       make_linear(layer + "attn_q", q_rows, shape.hidden),
                       make_linear(layer + "attn_k", kv_rows, shape.hidden),
                       make_linear(layer + "attn_v", kv_rows, shape.hidden),
                       make_linear(layer + "attn_output", shape.hidden, q_rows),
                       make_linear(layer + "ffn_gate", shape.intermediate, shape.hidden),
                       make_linear(layer + "ffn_up", shape.intermediate, shape.hidden),
                       make_linear(layer + "ffn_down", shape.hidden, shape.intermediate)});
  }
}

Model Model::random(const Shape& shape, mx::Dtype dtype, std::uint64_t seed) {
  std::uint64_t next = seed;
  return {shape, dtype,
          [&](const std::string&, int out, int in) {
            const float scale = 1.0F / std::sqrt(static_cast<float>(in));
            return Linear(
                mx::random::normal({out, in}, dtype, 0.0F, scale, mx::random::key(next++)));
          },
          [&](const std::string&, int size) { return mx::ones({size}, dtype); }};
}

namespace {

class Gguf {
 public:
  explicit Gguf(const std::string& path) : path_(path), file_(mx::load_gguf(path)) {
    const auto found = file_.second.find("general.architecture");
    const auto* name = found == file_.second.end() ? nullptr : std::get_if<std::string>(&found->second);
    if (name == nullptr || *name != "llama") {
      throw std::invalid_argument(path + ": general.architecture must be llama, got " +
                                  (name == nullptr ? "none" : *name));
    }
  }

  template <typename T>
  T number(const std::string& key) const {
    const auto found = file_.second.find("llama." + key);
    if (found == file_.second.end() || !std::holds_alternative<mx::array>(found->second)) {
      throw std::invalid_argument(path_ + ": metadata key llama." + key + " is missing");
    }
    return mx::astype(std::get<mx::array>(found->second), mx::TypeToDtype<T>()).template item<T>();
  }
  bool has(const std::string& name) const { return file_.first.count(name) > 0; }
  mx::array tensor(const std::string& name) const {
    const auto found = file_.first.find(name);
    if (found == file_.first.end()) {
      throw std::invalid_argument(path_ + ": tensor " + name + " is missing");
    }
    return found->second;
  }
  Linear linear(const std::string& name, mx::Dtype dtype) const {
    const mx::array weight = tensor(name + ".weight");
    if (!has(name + ".scales")) return Linear(mx::astype(weight, dtype));
    return Linear(weight, mx::astype(tensor(name + ".scales"), dtype),
                  mx::astype(tensor(name + ".biases"), dtype));
  }

 private:
  std::string path_;
  mx::GGUFLoad file_;
};

}  // namespace

Model Model::from_gguf(const std::string& path, mx::Dtype dtype) {
  const Gguf file(path);
  Shape shape;
  shape.n_layers = file.number<int>("block_count");
  shape.hidden = file.number<int>("embedding_length");
  shape.intermediate = file.number<int>("feed_forward_length");
  shape.n_heads = file.number<int>("attention.head_count");
  shape.n_kv_heads = file.number<int>("attention.head_count_kv");
  shape.head_dim = file.number<int>("rope.dimension_count");
  shape.vocab = file.tensor("token_embd.weight").shape(0);
  shape.rms_eps = file.number<float>("attention.layer_norm_rms_epsilon");
  shape.rope_theta = file.number<float>("rope.freq_base");
  Model model(
      shape, dtype,
      [&](const std::string& name, int, int) { return file.linear(name, dtype); },
      [&](const std::string& name, int) { return mx::astype(file.tensor(name + ".weight"), dtype); });
  if (file.has("output.weight")) model.head_ = file.linear("output", dtype);
  if (file.has("rope_freqs.weight")) {  // Llama 3's: a factor a frequency.
    const mx::array exponents =
        mx::arange(0, shape.head_dim, 2, mx::float32) / static_cast<float>(shape.head_dim);
    model.rope_periods_ =
        mx::power(mx::array(shape.rope_theta), exponents) * file.tensor("rope_freqs.weight");
  }
  return model;
}

std::vector<mx::array> Model::weights() const {
  std::vector<mx::array> arrays{norm_};
  embedding_.add_to(arrays);
  if (head_) head_->add_to(arrays);
  for (const Layer& layer : layers_) {
    arrays.push_back(layer.attention_norm);
    arrays.push_back(layer.mlp_norm);
    for (const Linear* linear :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      linear->add_to(arrays);
    }
  }
  return arrays;
}

/// llama.cpp stores Q and K for interleaved pairs, which MLX calls traditional.
mx::array Model::rope(const mx::array& x, std::int64_t offset) const {
  const auto base = rope_periods_ ? std::nullopt : std::optional(shape_.rope_theta);
  return mx::fast::rope(x, shape_.head_dim, true, base, 1.0F, static_cast<int>(offset),
                        rope_periods_);
}

mx::array Model::attention(const Layer& layer, const mx::array& x, LayerCache& cache) const {
  const int batch = x.shape(0);
  const int n_tokens = x.shape(1);
  const auto by_heads = [&](const mx::array& rows, int n_heads) {
    return mx::transpose(mx::reshape(rows, {batch, n_tokens, n_heads, shape_.head_dim}),
                         {0, 2, 1, 3});
  };
  const std::int64_t offset = cache.length();
  const mx::array queries = rope(by_heads(layer.q(x), shape_.n_heads), offset);
  cache.append(rope(by_heads(layer.k(x), shape_.n_kv_heads), offset),
               by_heads(layer.v(x), shape_.n_kv_heads));
  const mx::array attended =
      cache.attend(queries, 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)));
  return layer.o(mx::reshape(mx::transpose(attended, {0, 2, 1, 3}), {batch, n_tokens, -1}));
}

mx::array Model::operator()(const mx::array& tokens, Caches& caches) const {
  mx::array x = embedding_.rows(tokens);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    x = x + attention(layer, mx::fast::rms_norm(x, layer.attention_norm, shape_.rms_eps), *caches[i]);
    const mx::array normed = mx::fast::rms_norm(x, layer.mlp_norm, shape_.rms_eps);
    const mx::array gate = layer.gate(normed);
    x = x + layer.down(gate * mx::sigmoid(gate) * layer.up(normed));
  }
  const int last = tokens.shape(1) - 1;
  x = mx::fast::rms_norm(mx::slice(x, {0, last, 0}, {x.shape(0), last + 1, x.shape(2)}), norm_,
                         shape_.rms_eps);
  return mx::squeeze((head_ ? *head_ : embedding_)(x), 1);
}

}  // namespace llama
