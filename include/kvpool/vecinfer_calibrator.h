#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/vecinfer_codebooks.h"

namespace kvpool {

/// What a calibrator keeps of the tokens that it sees. Plain data.
struct VecInferCalibratorConfig {
  std::int64_t n_layers = 1;
  /// Tokens of a layer that are kept to learn from; of more, an even choice by the seed.
  std::int64_t max_tokens = 16384;
  /// First and newest tokens, which stay raw in a cache: nothing is learnt from the first, nor from
  /// the attention that the newest get.
  std::int64_t sink = 16;
  std::int64_t window = 128;
  std::uint64_t seed = 0;
};

/// How codebooks are trained. Plain data.
struct VecInferTraining {
  /// "vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3" or "vecinfer4".
  std::string format = "vecinfer2";
  /// Codebooks of the keys, and as many of the values: heads share them in the order of layers if
  /// there are fewer, and all layers have the format's own code. 0: one a head; keys and values of
  /// each layer get the code of 1, 2 or 4 bits an element that serves the whole best within the
  /// format's bits, or the format's own if no query was as far from a token as `window`.
  std::int64_t n_codebooks = 0;
  /// Starts of k-means that are tried for each codebook, and steps at most.
  int n_restarts = 3;
  int n_iterations = 20;
};

/// What calibration makes, and the error of coding what it learnt from: a layer's sum of squares of
/// what is off over that of what is coded.
struct VecInferCalibration {
  VecInferStream keys;
  VecInferStream values;
  std::vector<double> key_errors;    ///< (n_layers,)
  std::vector<double> value_errors;  ///< (n_layers,)
};

/// Makes the codebooks of a model from its keys, values and queries of a text. Not thread-safe;
/// works with the threads of the process's pool itself.
///
/// What errors cost is reckoned by what they do to the output of attention, to first order. It says
/// what tokens count, how channels of keys are scaled, and with gradients what layers count. Coded
/// keys are scaled half the way to the energy of the true ones: a nearest centroid is the mean of
/// what it stands for, so scores would vary too little, and sealed tokens would get too small a
/// share against raw ones; at the full energy errors weigh more.
class VecInferCalibrator {
 public:
  /// @throws std::invalid_argument naming what is not allowed.
  explicit VecInferCalibrator(const VecInferCalibratorConfig& config);
  ~VecInferCalibrator();
  VecInferCalibrator(const VecInferCalibrator&) = delete;
  VecInferCalibrator& operator=(const VecInferCalibrator&) = delete;

  /// Learns from one sequence, from its first token on, in one layer. Evaluates the arrays.
  /// @param queries  (B, n_heads, S, head_dim), after RoPE as the keys.
  /// @param keys, values  (B, n_kv_heads, S, head_dim), the same sizes at every call; head_dim a
  ///        multiple of 8.
  /// @param scale  factor of the scores.
  /// @throws std::invalid_argument naming what does not fit, NaN and infinity too: nothing is
  ///         learnt.
  void observe(std::int64_t layer, const mlx::core::array& queries, const mlx::core::array& keys,
               const mlx::core::array& values, float scale);

  /// Learns what errors of a layer's output cost: `gradients` (any shape) are those of the
  /// log-likelihood of drawn tokens by attention's output, of the same text for all layers. Without
  /// any, layers count alike. Evaluates the array.
  /// @throws std::invalid_argument if they are not finite: nothing is learnt.
  void observe_gradients(std::int64_t layer, const mlx::core::array& gradients);

  /// Trains the codebooks of a format. The same observations and seed give the same bits, whatever
  /// the number of threads.
  /// @param progress  told steps done and in all, on the calling thread; what it throws ends
  ///         the training.
  /// @throws std::invalid_argument naming what is not allowed.
  /// @throws std::logic_error if a layer has seen no token past the sink.
  VecInferCalibration train(
      const VecInferTraining& training,
      const std::function<void(std::int64_t, std::int64_t)>& progress = nullptr) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvpool
