#include "kvpool/vecinfer_calibrator.h"

#include <mlx/ops.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>

#include "attention/thread_pool.h"
#include "calibration/attention_mass.h"
#include "calibration/k_means.h"
#include "calibration/smoothing.h"
#include "calibration/token_sample.h"
#include "codec/codec.h"
#include "codec/half.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

/// Points of a codebook, at most: more change no digit of a result.
constexpr std::size_t kMaxPoints = std::size_t{1} << 17;
/// Codebooks of 12-bit codes that a set has unless more are asked for, so that it stays under 1 MB.
constexpr std::int64_t kSharedCodebooks = 12;

[[noreturn]] void refuse(const auto&... parts) {
  throw std::invalid_argument(detail::concat("VecInferCalibrator: ", parts...));
}

mx::array fp32(const mx::array& array) {
  mx::array plain =
      mx::contiguous(mx::astype(array, mx::float32, mx::Device::cpu), false, mx::Device::cpu);
  plain.eval();
  return plain;
}

void at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse(name, " must be at least ", least, ", got ", value);
}

/// A normalised error that is taken for no larger, so that keys are scaled by 1.5 at most.
constexpr double kMostError = 0.75;
/// A token that gets no attention counts as one that gets this part of the mean.
constexpr double kLeastMass = 1e-3;

/// Keys or values: how they are coded, and where their rows stand in a token's.
struct Stream {
  codec::Role role;
  codec::VectorCode code;
  std::size_t first_row;
};

/// The codebooks of one stream while they are trained. Heads are counted over all layers.
struct Progress {
  std::vector<codec::HeadTransform> transforms;
  std::vector<std::int32_t> codebook_of;
  std::vector<calibration::Centroids> codebooks;
  std::vector<double> errors;  // Of each head.
};

/// The roots of what tokens get, those that get nothing not forgotten.
std::vector<float> weights_of(std::vector<float> mass) {
  const double mean =
      std::accumulate(mass.begin(), mass.end(), 0.0) / static_cast<double>(mass.size());
  for (float& m : mass) {
    const double share = mean > 0.0 ? static_cast<double>(m) / mean : 1.0;
    m = static_cast<float>(std::sqrt(share + kLeastMass));
  }
  return mass;
}

}  // namespace

struct VecInferCalibrator::State {
  explicit State(const VecInferCalibratorConfig& settings) : config(settings) {}

  VecInferCalibratorConfig config;
  std::int64_t n_heads = 0;
  std::int64_t n_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::vector<calibration::TokenSample> samples;  // One a layer.

  std::size_t heads() const noexcept { return static_cast<std::size_t>(n_kv_heads); }
  std::size_t dim() const noexcept { return static_cast<std::size_t>(head_dim); }
  std::size_t all_heads() const noexcept { return samples.size() * heads(); }

  void check(std::int64_t layer, const mx::array& queries, const mx::array& keys,
             const mx::array& values) const;
  void begin(const mx::array& queries, const mx::array& keys);
  Progress plan(const VecInferTraining& training, codec::VectorCode code) const;
  void train_codebook(const VecInferTraining& training, const Stream& stream, std::size_t index,
                      Progress& progress) const;
  void train_all(const VecInferTraining& training, const Stream& stream, Progress& progress,
                 const std::function<void(std::int64_t)>& advance) const;
  VecInferStream result(const Stream& stream, const Progress& progress) const;
  std::vector<double> layer_errors(const Progress& progress) const;
};

void VecInferCalibrator::State::check(std::int64_t layer, const mx::array& queries,
                                      const mx::array& keys, const mx::array& values) const {
  if (layer < 0 || layer >= config.n_layers) {
    refuse("layer must be 0 to ", config.n_layers - 1, ", got ", layer);
  }
  if (keys.ndim() != 4 || keys.shape(1) < 1 || keys.shape(3) < 8 || keys.shape(3) % 8 != 0 ||
      keys.shape(3) > codec::kMaxHeadDim) {
    refuse("keys must be (B, n_kv_heads, S, a multiple of 8 up to ", codec::kMaxHeadDim, "), got ",
           detail::shape_text(keys.shape()));
  }
  if (values.shape() != keys.shape()) {
    refuse("values must be of the keys' shape ", detail::shape_text(keys.shape()), ", got ",
           detail::shape_text(values.shape()));
  }
  if (queries.ndim() != 4 || queries.shape(0) != keys.shape(0) ||
      queries.shape(2) != keys.shape(2) || queries.shape(3) != keys.shape(3) ||
      queries.shape(1) < 1 || queries.shape(1) % keys.shape(1) != 0) {
    refuse("queries must be (B, a multiple of ", keys.shape(1), ", S, head_dim) of the keys ",
           detail::shape_text(keys.shape()), ", got ", detail::shape_text(queries.shape()));
  }
  if (n_heads != 0 &&
      (queries.shape(1) != n_heads || keys.shape(1) != n_kv_heads || keys.shape(3) != head_dim)) {
    refuse("all calls must have ", n_heads, " heads and ", n_kv_heads, " KV heads of ", head_dim,
           " channels, got ", queries.shape(1), " and ", keys.shape(1), " of ", keys.shape(3));
  }
}

void VecInferCalibrator::State::begin(const mx::array& queries, const mx::array& keys) {
  if (n_heads != 0) return;
  n_heads = queries.shape(1);
  n_kv_heads = keys.shape(1);
  head_dim = keys.shape(3);
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
    samples.emplace_back(2 * heads(), dim(), heads(), static_cast<std::size_t>(config.max_tokens),
                         config.seed + static_cast<std::uint64_t>(layer));
  }
}

/// Which heads share a codebook.
Progress VecInferCalibrator::State::plan(const VecInferTraining& training,
                                         codec::VectorCode code) const {
  const auto n_heads_in_all = static_cast<std::int64_t>(all_heads());
  std::int64_t n_books = training.n_codebooks;
  if (n_books == 0) n_books = code.code_bits == 8 ? n_heads_in_all : kSharedCodebooks;
  Progress progress;
  progress.transforms.resize(all_heads());
  progress.errors.resize(all_heads());
  progress.codebooks.resize(static_cast<std::size_t>(std::min(n_books, n_heads_in_all)));
  for (std::size_t head = 0; head < all_heads(); ++head) {
    progress.codebook_of.push_back(
        static_cast<std::int32_t>(head * progress.codebooks.size() / all_heads()));
  }
  return progress;
}

void VecInferCalibrator::State::train_codebook(const VecInferTraining& training,
                                               const Stream& stream, std::size_t index,
                                               Progress& progress) const {
  std::vector<std::size_t> members;
  for (std::size_t head = 0; head < all_heads(); ++head) {
    if (progress.codebook_of[head] == static_cast<std::int32_t>(index)) members.push_back(head);
  }
  const int sub_dim = stream.code.sub_dim;
  const std::size_t n_subs = dim() / static_cast<std::size_t>(sub_dim);
  const std::size_t most = std::max<std::size_t>(1, kMaxPoints / n_subs / members.size());
  std::vector<float> points;
  std::vector<float> weights;
  std::vector<std::size_t> ends;
  for (const std::size_t head : members) {
    const calibration::TokenSample& sample = samples[head / heads()];
    const std::size_t row = stream.first_row + head % heads();
    const std::size_t n = sample.n_tokens();
    const std::vector<float> all_weights = weights_of(sample.weights(head % heads(), n));
    std::vector<float> rows = sample.rows(row, n);
    progress.transforms[head] = calibration::fit_transform(stream.role, rows, all_weights);
    const std::size_t n_taken = std::min(n, most);
    if (n_taken < n) rows = sample.rows(row, n_taken);
    calibration::transform_rows(progress.transforms[head], rows);
    points.insert(points.end(), rows.begin(), rows.end());
    for (std::size_t i = 0; i < n_taken; ++i) {
      weights.insert(weights.end(), n_subs, all_weights[i * n / n_taken]);
    }
    ends.push_back(weights.size());
  }
  calibration::Centroids centroids = calibration::train_centroids(
      {points, weights, sub_dim}, 1 << stream.code.code_bits,
      {training.n_restarts, training.n_iterations, config.seed + index});
  std::size_t begin = 0;
  for (std::size_t m = 0; m < members.size(); begin = ends[m++]) {
    const std::size_t n = ends[m] - begin;
    const auto width = static_cast<std::size_t>(sub_dim);
    progress.errors[members[m]] =
        calibration::normalised_error({std::span(points).subspan(begin * width, n * width),
                                       std::span(weights).subspan(begin, n), sub_dim},
                                      centroids);
  }
  if (stream.role == codec::Role::kKeys) {
    const double error = calibration::normalised_error({points, weights, sub_dim}, centroids);
    centroids.scale *= static_cast<float>(std::pow(1.0 - std::min(error, kMostError), -0.25));
  }
  progress.codebooks[index] = std::move(centroids);
}

void VecInferCalibrator::State::train_all(const VecInferTraining& training, const Stream& stream,
                                          Progress& progress,
                                          const std::function<void(std::int64_t)>& advance) const {
  attention::ThreadPool& pool = attention::ThreadPool::shared();
  const std::size_t n_books = progress.codebooks.size();
  const auto batch = 2 * static_cast<std::size_t>(pool.n_threads());
  std::vector<std::exception_ptr> failures(n_books);
  for (std::size_t first = 0; first < n_books; first += batch) {
    const std::size_t n = std::min(batch, n_books - first);
    pool.for_each(n, [&](std::size_t i) {
      try {
        train_codebook(training, stream, first + i, progress);
      } catch (...) {
        failures[first + i] = std::current_exception();
      }
    });
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
    advance(static_cast<std::int64_t>(n));
  }
}

VecInferStream VecInferCalibrator::State::result(const Stream& stream,
                                                 const Progress& progress) const {
  std::vector<std::int8_t> centroids;
  std::vector<float> scales;
  for (const calibration::Centroids& book : progress.codebooks) {
    centroids.insert(centroids.end(), book.centroids.begin(), book.centroids.end());
    scales.push_back(book.scale);
  }
  std::vector<float> smooth;
  std::vector<float> mean;
  for (const codec::HeadTransform& transform : progress.transforms) {
    smooth.insert(smooth.end(), transform.smooth.begin(), transform.smooth.end());
    mean.insert(mean.end(), transform.mean.begin(), transform.mean.end());
  }
  const auto n_books = static_cast<mx::ShapeElem>(scales.size());
  const mx::Shape of_heads{static_cast<mx::ShapeElem>(samples.size()),
                           static_cast<mx::ShapeElem>(n_kv_heads)};
  const mx::Shape of_channels{of_heads[0], of_heads[1], static_cast<mx::ShapeElem>(head_dim)};
  const auto [sub_dim, code_bits] = stream.code;
  return {sub_dim,
          code_bits,
          mx::array(centroids.data(), {n_books, 1 << code_bits, sub_dim}, mx::int8),
          mx::array(scales.data(), {n_books}, mx::float32),
          mx::array(progress.codebook_of.data(), of_heads, mx::int32),
          mx::array(smooth.data(), of_channels, mx::float32),
          mx::array(mean.data(), of_channels, mx::float32)};
}

std::vector<double> VecInferCalibrator::State::layer_errors(const Progress& progress) const {
  std::vector<double> errors(samples.size());
  for (std::size_t head = 0; head < progress.errors.size(); ++head) {
    errors[head / heads()] += progress.errors[head] / static_cast<double>(heads());
  }
  return errors;
}

VecInferCalibrator::VecInferCalibrator(const VecInferCalibratorConfig& config) {
  at_least("n_layers", config.n_layers, 1);
  at_least("max_tokens", config.max_tokens, 1);
  at_least("sink", config.sink, 0);
  at_least("window", config.window, 0);
  state_ = std::make_unique<State>(config);
}

VecInferCalibrator::~VecInferCalibrator() = default;

void VecInferCalibrator::observe(std::int64_t layer, const mx::array& queries,
                                 const mx::array& keys, const mx::array& values, float scale) {
  state_->check(layer, queries, keys, values);
  if (!std::isfinite(scale)) refuse("scale must be finite, got ", scale);
  const mx::array k = fp32(keys);
  const mx::array v = fp32(values);
  const mx::array q = fp32(queries);
  for (const mx::array* array : {&q, &k, &v}) {
    const std::span<const float> elements(array->data<float>(), array->size());
    if (!std::all_of(elements.begin(), elements.end(),
                     [](float x) { return std::abs(x) <= codec::kHalfMax; })) {
      refuse("queries, keys and values must be finite and fit fp16; those of layer ", layer,
             " do not");
    }
  }
  const mx::array mass = fp32(calibration::attention_mass(q, k, scale, state_->config.window));
  state_->begin(queries, keys);

  const std::size_t heads = state_->heads();
  const std::size_t dim = state_->dim();
  const auto length = static_cast<std::size_t>(keys.shape(2));
  calibration::TokenSample& sample = state_->samples[static_cast<std::size_t>(layer)];
  std::vector<const float*> rows(2 * heads);
  std::vector<float> weights(heads);
  for (std::size_t b = 0; b < static_cast<std::size_t>(keys.shape(0)); ++b) {
    for (auto t = static_cast<std::size_t>(state_->config.sink); t < length; ++t) {
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t token = (b * heads + h) * length + t;
        rows[h] = k.data<float>() + token * dim;
        rows[heads + h] = v.data<float>() + token * dim;
        weights[h] = mass.data<float>()[token];
      }
      sample.offer(rows, weights);
    }
  }
}

VecInferCalibration VecInferCalibrator::train(
    const VecInferTraining& training,
    const std::function<void(std::int64_t, std::int64_t)>& progress) const {
  if (!training.format.starts_with("vecinfer")) {
    refuse("format must be vecinfer1, vecinfer1.5, vecinfer2, vecinfer3 or vecinfer4, got '",
           training.format, "'");
  }
  const codec::Code code = codec::code_of(training.format);
  at_least("n_codebooks", training.n_codebooks, 0);
  at_least("n_restarts", training.n_restarts, 1);
  at_least("n_iterations", training.n_iterations, 1);
  const State& state = *state_;
  const auto unseen = std::find_if(state.samples.begin(), state.samples.end(),
                                   [](const auto& sample) { return sample.n_tokens() == 0; });
  if (state.samples.empty() || unseen != state.samples.end()) {
    throw std::logic_error(detail::concat(
        "VecInferCalibrator: layer ", unseen - state.samples.begin(),
        " has seen no token past the first ", state.config.sink, ", which stay raw"));
  }
  const Stream keys{codec::Role::kKeys, codec::vector_code(code, codec::Role::kKeys), 0};
  const Stream values{codec::Role::kValues, codec::vector_code(code, codec::Role::kValues),
                      state.heads()};
  Progress of_keys = state.plan(training, keys.code);
  Progress of_values = state.plan(training, values.code);
  const auto total =
      static_cast<std::int64_t>(of_keys.codebooks.size() + of_values.codebooks.size());
  std::int64_t done = 0;
  const auto advance = [&](std::int64_t n) {
    done += n;
    if (progress) progress(done, total);
  };
  state.train_all(training, keys, of_keys, advance);
  state.train_all(training, values, of_values, advance);
  return {state.result(keys, of_keys), state.result(values, of_values), state.layer_errors(of_keys),
          state.layer_errors(of_values)};
}

}  // namespace kvpool
