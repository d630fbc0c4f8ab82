#include "kvpool/vecinfer_calibrator.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings.h"
#include "kvpool/weight_sketch.h"

namespace kvpool::bindings {

using namespace nb::literals;
namespace mx = mlx::core;

void bind_vecinfer_calibrator(nb::module_& m) {
  nb::class_<VecInferCalibration>(
      m, "VecInferCalibration",
      "What calibration makes, and the error of coding what it learnt from: a layer's sum of\n"
      "squares of what is off over that of what is coded.")
      .def_ro("keys", &VecInferCalibration::keys)
      .def_ro("values", &VecInferCalibration::values)
      .def_ro("key_errors", &VecInferCalibration::key_errors, "One a layer.")
      .def_ro("value_errors", &VecInferCalibration::value_errors, "One a layer.");

  nb::class_<VecInferCalibrator>(
      m, "VecInferCalibrator",
      "Makes the codebooks of a model from its keys, values and queries of a text.\n"
      "Not thread-safe.")
      .def(
          "__init__",
          [](VecInferCalibrator* self, std::int64_t n_layers, std::int64_t max_tokens,
             std::int64_t sink, std::int64_t window, std::uint64_t seed) {
            new (self) VecInferCalibrator({n_layers, max_tokens, sink, window, seed});
          },
          "n_layers"_a, "max_tokens"_a = VecInferCalibratorConfig{}.max_tokens,
          "sink"_a = VecInferCalibratorConfig{}.sink,
          "window"_a = VecInferCalibratorConfig{}.window,
          "seed"_a = VecInferCalibratorConfig{}.seed,
          "Args:\n"
          "    n_layers: layers of the model that keep keys and values.\n"
          "    max_tokens: tokens of a layer that are kept to learn from; of more, an even\n"
          "        choice.\n"
          "    sink: first tokens of a sequence, from which nothing is learnt.\n"
          "    window: newest tokens, which stay raw: attention on them does not count.\n"
          "    seed: of every choice.\n\n"
          "Raises ValueError naming what is not allowed.")
      .def(
          "observe",
          [](VecInferCalibrator& self, std::int64_t layer, const mx::array& queries,
             const mx::array& keys, const mx::array& values, float scale) {
            const nb::gil_scoped_release released;
            self.observe(layer, queries, keys, values, scale);
          },
          "layer"_a, "queries"_a, "keys"_a, "values"_a, "scale"_a,
          "Learns from one sequence, from its first token on. Evaluates the arrays.\n\n"
          "Args:\n"
          "    queries: (B, n_heads, S, head_dim), after RoPE as the keys.\n"
          "    keys, values: (B, n_kv_heads, S, head_dim).\n"
          "    scale: factor of the scores.\n\n"
          "Raises ValueError naming what does not fit, NaN and infinity too; nothing is learnt\n"
          "then.")
      .def("observe_gradients", &VecInferCalibrator::observe_gradients, "layer"_a, "gradients"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Learns what errors of a layer's output cost: `gradients` (any shape) are those of the\n"
           "log-likelihood of drawn tokens by attention's output, of the same text for all layers.\n"
           "Without any, layers count alike. Raises ValueError if they are not finite.")
      .def(
          "train",
          [](const VecInferCalibrator& self, std::string format, std::int64_t n_codebooks,
             int n_restarts, int n_iterations,
             const std::optional<std::function<void(std::int64_t, std::int64_t)>>& progress) {
            const nb::gil_scoped_release released;
            return self.train({std::move(format), n_codebooks, n_restarts, n_iterations},
                              progress.value_or(nullptr));
          },
          "format"_a, "n_codebooks"_a = VecInferTraining{}.n_codebooks,
          "n_restarts"_a = VecInferTraining{}.n_restarts,
          "n_iterations"_a = VecInferTraining{}.n_iterations, "progress"_a.none() = nb::none(),
          "Trains the codebooks of a format: the same observations and seed give the same bits.\n\n"
          "Args:\n"
          "    format: \"vecinfer1\", \"vecinfer1.5\", \"vecinfer2\", \"vecinfer3\" or\n"
          "        \"vecinfer4\".\n"
          "    n_codebooks: of the keys, and as many of the values, in all layers of the format's own\n"
          "        code; 0: one a head, of codes of 1, 2 or 4 bits an element as serves the whole\n"
          "        best within the format's bits.\n"
          "    n_restarts: starts of k-means that are tried for each codebook.\n"
          "    n_iterations: steps of k-means, at most.\n"
          "    progress: called with steps done and in all; what it raises ends the\n"
          "        training.\n\n"
          "Raises ValueError naming what is not allowed, RuntimeError if a layer has seen no\n"
          "token past the sink.");

  m.def("weight_sketch", &weight_sketch, "weight"_a, "size"_a,
        "Numbers that stand for a weight (out, in): weights that differ by a part of their length\n"
        "have sketches that differ by about that part of theirs. (size,), float32.");
}

}  // namespace kvpool::bindings
