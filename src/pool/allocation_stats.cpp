#include "kvpool/allocation_stats.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <set>
#include <stdexcept>

namespace kvpool {

namespace {

struct Metric {
  const char* name;
  const char* type;
  const char* help;
  double (*value)(const AllocationStats&);
};

double as_double(std::int64_t count) { return static_cast<double>(count); }

constexpr std::array kMetrics{
    Metric{"blocks_in_use", "gauge", "Blocks that some owner holds; a shared block counts once.",
           [](const AllocationStats& s) { return as_double(s.blocks_in_use()); }},
    Metric{"blocks_total", "gauge", "Blocks that the pool manages.",
           [](const AllocationStats& s) { return as_double(s.n_blocks); }},
    Metric{"fragmentation", "gauge", "Fraction of the managed blocks in use and not full.",
           [](const AllocationStats& s) { return s.fragmentation(); }},
    Metric{"peak_blocks_in_use", "gauge", "Most blocks ever in use at once.",
           [](const AllocationStats& s) { return as_double(s.peak_blocks_in_use); }},
    Metric{"allocations_total", "counter", "Blocks handed out.",
           [](const AllocationStats& s) { return as_double(s.n_allocations); }},
    Metric{"frees_total", "counter", "Blocks given back.",
           [](const AllocationStats& s) { return as_double(s.n_frees); }},
    Metric{"reused_total", "counter", "Allocations of a block that had been handed out before.",
           [](const AllocationStats& s) { return as_double(s.n_reused); }},
    Metric{"exhausted_total", "counter", "Allocate calls that found too few free blocks.",
           [](const AllocationStats& s) { return as_double(s.n_exhausted); }},
    Metric{"grown_total", "counter", "Blocks added by growth.",
           [](const AllocationStats& s) { return as_double(s.n_grown); }},
    Metric{"retired_total", "counter", "Blocks retired by shrink.",
           [](const AllocationStats& s) { return as_double(s.n_retired); }},
};

/// [a-zA-Z_:][a-zA-Z0-9_:]*, the grammar of metric names.
void require_metric_name(std::string_view prefix) {
  const auto fits = [](unsigned char c, bool first) {
    return c < 128 && (std::isalpha(c) || c == '_' || c == ':' || (!first && std::isdigit(c)));
  };
  bool valid = !prefix.empty() && fits(static_cast<unsigned char>(prefix.front()), true);
  for (const char c : prefix) valid = valid && fits(static_cast<unsigned char>(c), false);
  if (valid) return;
  throw std::invalid_argument("to_prometheus: prefix must match [a-zA-Z_:][a-zA-Z0-9_:]*, got '" +
                              std::string(prefix) + "'");
}

std::string escape_label(std::string_view value) {
  std::string escaped;
  for (const char c : value) {
    switch (c) {
      case '\\':
        escaped += "\\\\";
        break;
      case '"':
        escaped += "\\\"";
        break;
      case '\n':
        escaped += "\\n";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

/// With a decimal point in every locale.
std::string number(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.begin(), text.end(), value, std::chars_format::general, 15);
  return {text.data(), end.ptr};
}

using Labelled = std::pair<std::string, const AllocationStats*>;

std::string render(const std::vector<Labelled>& pools, std::string_view prefix) {
  require_metric_name(prefix);
  std::string page;
  for (const Metric& metric : kMetrics) {
    const std::string name = std::string(prefix) + "_" + metric.name;
    page += "# HELP " + name + " " + metric.help + "\n";
    page += "# TYPE " + name + " " + metric.type + "\n";
    for (const auto& [labels, stats] : pools) {
      page += name + labels + " " + number(metric.value(*stats)) + "\n";
    }
  }
  return page;
}

}  // namespace

double AllocationStats::fragmentation() const noexcept {
  return n_blocks == 0 ? 0.0 : as_double(fragmented_count) / as_double(n_blocks);
}

std::string AllocationStats::to_prometheus(std::string_view prefix) const {
  return render({{"", this}}, prefix);
}

std::string render_prometheus(const std::vector<std::pair<std::string, AllocationStats>>& pools,
                              std::string_view prefix) {
  std::vector<Labelled> labelled;
  std::set<std::string_view> names;
  for (const auto& [name, stats] : pools) {
    if (!names.insert(name).second) {
      throw std::invalid_argument("render_prometheus: two pools are named '" + name + "'");
    }
    labelled.emplace_back("{pool=\"" + escape_label(name) + "\"}", &stats);
  }
  return render(labelled, prefix);
}

}  // namespace kvpool
