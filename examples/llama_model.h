#pragma once

#include <mlx/array.h>
#include <mlx/dtype.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layer_cache.h"

namespace llama {

struct Shape {
  int n_layers = 0;
  int hidden = 0;
  int intermediate = 0;
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  int vocab = 0;
  float rms_eps = 1e-5F;
  float rope_theta = 10000.0F;
};

/// "tiny", "smollm2-135m", "llama-3.2-1b" or "llama-3.1-8b".
/// @throws std::invalid_argument naming what is allowed.
Shape shape_named(std::string_view name);

/// A matrix (out, in), plain or in MLX's affine quantisation.
class Linear {
 public:
  explicit Linear(mlx::core::array weight) : weight_(std::move(weight)) {}
  Linear(mlx::core::array weight, mlx::core::array scales, mlx::core::array biases);

  /// x (..., in) times the transposed matrix.
  mlx::core::array operator()(const mlx::core::array& x) const;
  /// The matrix's rows `indices`, as an embedding's.
  mlx::core::array rows(const mlx::core::array& indices) const;
  void add_to(std::vector<mlx::core::array>& arrays) const;

 private:
  struct Scales {
    mlx::core::array scales, biases;
    int group_size, bits;
  };
  mlx::core::array weight_;
  std::optional<Scales> quantized_;
};

/// A Llama-family decoder. Its attention is the caches' affair.
class Model {
 public:
  /// Reads a GGUF of llama.cpp's "llama" architecture. Activations are of `dtype`.
  /// @throws std::runtime_error, std::invalid_argument naming what is missing or not supported.
  static Model from_gguf(const std::string& path, mlx::core::Dtype dtype);
  /// Weights drawn at random.
  static Model random(const Shape& shape, mlx::core::Dtype dtype, std::uint64_t seed);

  /// Logits (B, vocab) after the last of `tokens` (B, S), which the caches take in.
  mlx::core::array operator()(const mlx::core::array& tokens, Caches& caches) const;

  const Shape& shape() const noexcept { return shape_; }
  mlx::core::Dtype dtype() const noexcept { return dtype_; }
  std::vector<mlx::core::array> weights() const;

 private:
  struct Layer {
    mlx::core::array attention_norm, mlp_norm;
    Linear q, k, v, o, gate, up, down;
  };
  template <typename MakeLinear, typename MakeNorm>
  Model(const Shape& shape, mlx::core::Dtype dtype, MakeLinear make_linear, MakeNorm make_norm);

  mlx::core::array attention(const Layer& layer, const mlx::core::array& x, LayerCache& cache) const;
  mlx::core::array rope(const mlx::core::array& x, std::int64_t offset) const;

  Shape shape_;
  mlx::core::Dtype dtype_;
  Linear embedding_;
  mlx::core::array norm_;
  std::vector<Layer> layers_;
  std::optional<Linear> head_;  ///< None: the embedding's matrix.
  std::optional<mlx::core::array> rope_periods_;
};

}  // namespace llama
