#include "kvpool/vecinfer_calibrator.h"

#include <mlx/ops.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>

#include "attention/thread_pool.h"
#include "calibration/bit_allocation.h"
#include "calibration/k_means.h"
#include "calibration/sensitivity.h"
#include "calibration/token_sample.h"
#include "calibration/transform_fit.h"
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
/// A token whose errors cost nothing counts as one whose errors cost this part of the mean.
constexpr double kLeastCost = 1e-3;
/// Codes that a layer's bits are chosen from. What they would cost is estimated from so many tokens
/// of a layer, after so many steps of k-means.
constexpr codec::VectorCode kChoices[] = {{8, 8}, {4, 8}, {2, 8}};
constexpr std::size_t kTrialTokens = 2048;
constexpr calibration::KMeansOptions kTrial{.n_restarts = 1, .n_iterations = 5};

/// Keys or values, and where their rows and costs stand in a token's.
struct Stream {
  codec::Role role;
  std::size_t first_row;
};

/// The codebooks of one stream while they are trained. Heads are counted over all layers.
struct Progress {
  std::vector<codec::VectorCode> codes;  // Of each layer.
  std::vector<calibration::FittedTransform> transforms;
  std::vector<std::int32_t> codebook_of;
  std::vector<calibration::Centroids> codebooks;
  std::vector<double> errors;  // Of each head.
};

/// What tokens count: what their errors cost, by a mean of 1, those that cost nothing not
/// forgotten.
std::vector<float> weights_of(std::vector<float> costs) {
  const double mean =
      std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(costs.size());
  for (float& cost : costs) {
    const double share = mean > 0.0 ? static_cast<double>(cost) / mean : 1.0;
    cost = static_cast<float>(share + kLeastCost);
  }
  return costs;
}

/// do_one(0) to do_one(n - 1) on the pool's threads; advance() is told how many more are done.
void for_each(std::size_t n, const std::function<void(std::int64_t)>& advance,
              const std::function<void(std::size_t)>& do_one) {
  attention::ThreadPool& pool = attention::ThreadPool::shared();
  const auto batch = 2 * static_cast<std::size_t>(pool.n_threads());
  std::vector<std::exception_ptr> failures(n);
  for (std::size_t first = 0; first < n; first += batch) {
    const std::size_t n_now = std::min(batch, n - first);
    pool.for_each(n_now, [&](std::size_t i) {
      try {
        do_one(first + i);
      } catch (...) {
        failures[first + i] = std::current_exception();
      }
    });
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
    advance(static_cast<std::int64_t>(n_now));
  }
}

}  // namespace

struct VecInferCalibrator::State {
  explicit State(const VecInferCalibratorConfig& settings)
      : config(settings), squared_gradients(static_cast<std::size_t>(settings.n_layers)) {}

  VecInferCalibratorConfig config;
  std::int64_t n_heads = 0;
  std::int64_t n_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::vector<calibration::TokenSample> samples;   // One a layer.
  std::vector<std::vector<double>> channel_costs;  // A layer: of keys, (heads, dim).
  std::vector<std::vector<double>> token_costs;    // A layer: of values, summed, (heads,).
  std::vector<double> squared_gradients;           // A layer: what errors of the output cost.
  /// Of each head of keys, then of values, what each of kChoices would cost; empty until they are
  /// tried, and after what was learnt since.
  mutable std::vector<double> trial_costs;

  std::size_t heads() const noexcept { return static_cast<std::size_t>(n_kv_heads); }
  std::size_t dim() const noexcept { return static_cast<std::size_t>(head_dim); }
  std::size_t all_heads() const noexcept { return samples.size() * heads(); }

  /// What a layer's errors count beside those of others: all alike if no gradients were seen.
  double gradient_weight(std::size_t layer) const {
    const bool seen = std::any_of(squared_gradients.begin(), squared_gradients.end(),
                                  [](double squares) { return squares > 0.0; });
    return seen ? squared_gradients[layer] : 1.0;
  }

  void check_layer(std::int64_t layer) const {
    if (layer >= 0 && layer < config.n_layers) return;
    refuse("layer must be 0 to ", config.n_layers - 1, ", got ", layer);
  }
  void check(std::int64_t layer, const mx::array& queries, const mx::array& keys,
             const mx::array& values) const;
  void begin(const mx::array& queries, const mx::array& keys);
  calibration::FittedTransform fit(const Stream& stream, std::size_t head, codec::VectorCode code,
                                   std::span<const float> rows,
                                   std::span<const float> weights) const;
  double trial_cost(const Stream& stream, std::size_t head, codec::VectorCode code) const;
  void try_codes(std::span<const Stream> streams,
                 const std::function<void(std::int64_t)>& advance) const;
  std::vector<std::size_t> choose_codes(double bits) const;
  Progress plan(const VecInferTraining& training, std::vector<codec::VectorCode> codes) const;
  void train_codebook(const VecInferTraining& training, const Stream& stream, std::size_t index,
                      Progress& progress) const;
  void train_all(const VecInferTraining& training, const Stream& stream, Progress& progress,
                 const std::function<void(std::int64_t)>& advance) const;
  VecInferStream result(const Stream& stream, const Progress& progress) const;
  std::vector<double> layer_errors(const Progress& progress) const;
};

void VecInferCalibrator::State::check(std::int64_t layer, const mx::array& queries,
                                      const mx::array& keys, const mx::array& values) const {
  check_layer(layer);
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
    samples.emplace_back(2 * heads(), dim(), 2 * heads(),
                         static_cast<std::size_t>(config.max_tokens),
                         config.seed + static_cast<std::uint64_t>(layer));
    channel_costs.emplace_back(heads() * dim());
    token_costs.emplace_back(heads());
  }
}

calibration::FittedTransform VecInferCalibrator::State::fit(const Stream& stream, std::size_t head,
                                                            codec::VectorCode code,
                                                            std::span<const float> rows,
                                                            std::span<const float> weights) const {
  if (stream.role == codec::Role::kValues) return calibration::fit_values(rows, weights);
  const auto costs =
      std::span(channel_costs[head / heads()]).subspan(head % heads() * dim(), dim());
  return calibration::fit_keys(rows, weights, costs, code.sub_dim);
}

/// What errors of a head's codes would cost in its layer's output.
double VecInferCalibrator::State::trial_cost(const Stream& stream, std::size_t head,
                                             codec::VectorCode code) const {
  const std::size_t layer = head / heads();
  const std::size_t row = stream.first_row + head % heads();
  const std::size_t n = std::min(samples[layer].n_tokens(), kTrialTokens);
  const std::vector<float> weights = weights_of(samples[layer].weights(row, n));
  std::vector<float> rows = samples[layer].rows(row, n);
  const calibration::FittedTransform fitted = fit(stream, head, code, rows, weights);
  calibration::transform_rows(fitted.transform, rows);
  std::vector<float> of_points;
  for (const float weight : weights) {
    of_points.insert(of_points.end(), dim() / static_cast<std::size_t>(code.sub_dim), weight);
  }
  const calibration::WeightedPoints points{rows, of_points, code.sub_dim};
  calibration::KMeansOptions options = kTrial;
  options.seed = config.seed + head;
  const double error = calibration::normalised_error(
      points, calibration::train_centroids(points, 1 << code.code_bits, options));
  const double of_tokens =
      stream.role == codec::Role::kKeys ? 1.0 : token_costs[layer][head % heads()];
  return of_tokens * fitted.cost * error;
}

void VecInferCalibrator::State::try_codes(std::span<const Stream> streams,
                                          const std::function<void(std::int64_t)>& advance) const {
  std::vector<double> costs(streams.size() * all_heads() * std::size(kChoices));
  for_each(costs.size(), advance, [&](std::size_t i) {
    const std::size_t head = i / std::size(kChoices);
    costs[i] = trial_cost(streams[head / all_heads()], head % all_heads(),
                          kChoices[i % std::size(kChoices)]);
  });
  trial_costs = std::move(costs);
}

/// For each layer of the keys, then of the values, which of kChoices it gets, `bits` at most on
/// average.
std::vector<std::size_t> VecInferCalibrator::State::choose_codes(double bits) const {
  constexpr std::size_t kNChoices = std::size(kChoices);
  std::vector<double> costs(trial_costs.size() / heads());
  for (std::size_t i = 0; i < trial_costs.size(); ++i) {
    const std::size_t layer = i / kNChoices / heads();
    costs[layer * kNChoices + i % kNChoices] +=
        trial_costs[i] * gradient_weight(layer % samples.size());
  }
  std::vector<double> choices;
  for (const codec::VectorCode& code : kChoices) choices.push_back(code.bits());
  return calibration::allocate_bits(costs, choices, bits);
}

/// Which heads share a codebook. Those of layers with different codes must not.
Progress VecInferCalibrator::State::plan(const VecInferTraining& training,
                                         std::vector<codec::VectorCode> codes) const {
  const auto n_heads_in_all = static_cast<std::int64_t>(all_heads());
  std::int64_t n_books = training.n_codebooks;
  if (n_books == 0) n_books = codes[0].code_bits == 8 ? n_heads_in_all : kSharedCodebooks;
  Progress progress;
  progress.codes = std::move(codes);
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
  const codec::VectorCode code = progress.codes[members[0] / heads()];
  const int sub_dim = code.sub_dim;
  const std::size_t n_subs = dim() / static_cast<std::size_t>(sub_dim);
  const std::size_t most = std::max<std::size_t>(1, kMaxPoints / n_subs / members.size());
  std::vector<float> points;
  std::vector<float> weights;
  std::vector<std::size_t> ends;
  for (const std::size_t head : members) {
    const calibration::TokenSample& sample = samples[head / heads()];
    const std::size_t row = stream.first_row + head % heads();
    const std::size_t n = sample.n_tokens();
    const std::vector<float> all_weights = weights_of(sample.weights(row, n));
    std::vector<float> rows = sample.rows(row, n);
    progress.transforms[head] = fit(stream, head, code, rows, all_weights);
    const std::size_t n_taken = std::min(n, most);
    if (n_taken < n) rows = sample.rows(row, n_taken);
    calibration::transform_rows(progress.transforms[head].transform, rows);
    points.insert(points.end(), rows.begin(), rows.end());
    for (std::size_t i = 0; i < n_taken; ++i) {
      weights.insert(weights.end(), n_subs, all_weights[i * n / n_taken]);
    }
    ends.push_back(weights.size());
  }
  calibration::Centroids centroids = calibration::train_centroids(
      {points, weights, sub_dim}, 1 << code.code_bits,
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
  for_each(progress.codebooks.size(), advance,
           [&](std::size_t i) { train_codebook(training, stream, i, progress); });
}

VecInferStream VecInferCalibrator::State::result(const Stream& stream,
                                                 const Progress& progress) const {
  std::vector<std::int8_t> centroids;
  std::vector<float> scales;
  for (const calibration::Centroids& book : progress.codebooks) {
    centroids.insert(centroids.end(), book.centroids.begin(), book.centroids.end());
    scales.push_back(book.scale);
  }
  std::vector<std::int32_t> codes(2 * progress.codebooks.size());
  for (std::size_t head = 0; head < all_heads(); ++head) {
    const codec::VectorCode code = progress.codes[head / heads()];
    const auto book = static_cast<std::size_t>(progress.codebook_of[head]);
    codes[2 * book] = code.sub_dim;
    codes[2 * book + 1] = code.code_bits;
  }
  std::vector<float> smooth;
  std::vector<float> mean;
  std::vector<std::int8_t> rotation;
  for (const calibration::FittedTransform& fitted : progress.transforms) {
    const codec::HeadTransform& transform = fitted.transform;
    smooth.insert(smooth.end(), transform.smooth.begin(), transform.smooth.end());
    mean.insert(mean.end(), transform.mean.begin(), transform.mean.end());
    rotation.insert(rotation.end(), fitted.rotation.begin(), fitted.rotation.end());
  }
  const auto n_books = static_cast<mx::ShapeElem>(scales.size());
  const mx::Shape of_heads{static_cast<mx::ShapeElem>(samples.size()),
                           static_cast<mx::ShapeElem>(n_kv_heads)};
  const mx::Shape of_channels{of_heads[0], of_heads[1], static_cast<mx::ShapeElem>(head_dim)};
  VecInferStream made{
      mx::array(codes.data(), {n_books, 2}, mx::int32),
      mx::array(centroids.data(), {static_cast<mx::ShapeElem>(centroids.size())}, mx::int8),
      mx::array(scales.data(), {n_books}, mx::float32),
      mx::array(progress.codebook_of.data(), of_heads, mx::int32),
      mx::array(smooth.data(), of_channels, mx::float32),
      mx::array(mean.data(), of_channels, mx::float32)};
  if (stream.role == codec::Role::kKeys) {
    made.rotation =
        mx::array(rotation.data(), {of_channels[0], of_channels[1], of_channels[2], of_channels[2]},
                  mx::int8);
  }
  return made;
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
  const calibration::Sensitivity costs =
      calibration::sensitivity(q, k, v, scale, state_->config.window);
  const mx::array key_costs = fp32(costs.keys);
  const mx::array value_costs = fp32(costs.values);
  const mx::array channel_costs = fp32(costs.channels);
  state_->begin(queries, keys);
  state_->trial_costs.clear();

  const std::size_t heads = state_->heads();
  const std::size_t dim = state_->dim();
  const auto length = static_cast<std::size_t>(keys.shape(2));
  calibration::TokenSample& sample = state_->samples[static_cast<std::size_t>(layer)];
  std::vector<const float*> rows(2 * heads);
  std::vector<float> weights(2 * heads);
  const auto at = static_cast<std::size_t>(layer);
  for (std::size_t i = 0; i < heads * dim; ++i) {
    state_->channel_costs[at][i] += static_cast<double>(channel_costs.data<float>()[i]);
  }
  for (std::size_t b = 0; b < static_cast<std::size_t>(keys.shape(0)); ++b) {
    for (auto t = static_cast<std::size_t>(state_->config.sink); t < length; ++t) {
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t token = (b * heads + h) * length + t;
        rows[h] = k.data<float>() + token * dim;
        rows[heads + h] = v.data<float>() + token * dim;
        weights[h] = key_costs.data<float>()[token];
        weights[heads + h] = value_costs.data<float>()[token];
      }
      for (std::size_t h = 0; h < heads; ++h) {
        state_->token_costs[at][h] += static_cast<double>(weights[heads + h]);
      }
      sample.offer(rows, weights);
    }
  }
}

void VecInferCalibrator::observe_gradients(std::int64_t layer, const mx::array& gradients) {
  state_->check_layer(layer);
  const mx::array numbers = fp32(gradients);
  double squares = 0.0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double g = numbers.data<float>()[i];
    squares += g * g;
  }
  if (!std::isfinite(squares))
    refuse("gradients must be finite; those of layer ", layer, " are not");
  state_->squared_gradients[static_cast<std::size_t>(layer)] += squares;
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
  const Stream streams[] = {{codec::Role::kKeys, 0}, {codec::Role::kValues, state.heads()}};
  const auto& [keys, values] = streams;
  const std::size_t n_layers = state.samples.size();
  std::vector<codec::VectorCode> codes[2];
  for (const std::size_t i : {0U, 1U}) {
    codes[i].assign(n_layers, codec::vector_code(code, streams[i].role));
  }
  std::int64_t done = 0;
  std::int64_t total = 0;
  const auto advance = [&](std::int64_t n) {
    done += n;
    if (progress) progress(done, total);
  };
  const double bits = codec::vector_bits(code);
  const bool chooses = training.n_codebooks == 0 && bits > kChoices[0].bits() &&
                       bits < std::rbegin(kChoices)->bits();
  const bool tries = chooses && state.trial_costs.empty();
  const auto n_trials =
      static_cast<std::int64_t>(tries ? 2 * state.all_heads() * std::size(kChoices) : 0);
  const auto books_at_most = static_cast<std::int64_t>(2 * state.all_heads());
  if (tries) {
    total = n_trials + books_at_most;
    state.try_codes(streams, advance);
  }
  // Nothing costs anything if no query was seen that is far enough from a token.
  if (chooses && *std::max_element(state.trial_costs.begin(), state.trial_costs.end()) > 0.0) {
    const std::vector<std::size_t> chosen = state.choose_codes(bits);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      codes[i / n_layers][i % n_layers] = kChoices[chosen[i]];
    }
  }
  Progress of_keys = state.plan(training, std::move(codes[0]));
  Progress of_values = state.plan(training, std::move(codes[1]));
  total =
      n_trials + static_cast<std::int64_t>(of_keys.codebooks.size() + of_values.codebooks.size());
  state.train_all(training, keys, of_keys, advance);
  state.train_all(training, values, of_values, advance);
  return {state.result(keys, of_keys), state.result(values, of_values), state.layer_errors(of_keys),
          state.layer_errors(of_values)};
}

}  // namespace kvpool
