// The cost of one rollout instance that serves a contiguous interval of requests sorted by context, and of one that
// serves any set. Every operation is monotone in IEEE arithmetic (sums of non-negative terms, differences of prefix
// sums, max, min), so a cost never rises when an interval shrinks: the exact solver relies on it bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

namespace libra {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What one TP degree costs; see libra.resources.cost_model.rollout for units and sources.
struct Level {
  int gpus;            // TP degree
  double step;         // seconds of a decode step, whatever it holds
  double inv_tokens;   // 1 / KV capacity in tokens
  double capacity;     // KV capacity in tokens
  double inv_slots;    // 1 / sequences at once
  double recompute;    // seconds for one token of demand above the KV capacity
};

// Range maximum in O(1) after O(N log N).
class RangeMax {
 public:
  RangeMax() = default;
  explicit RangeMax(const double* values, std::size_t n) {
    rows_.emplace_back(values, values + n);
    for (std::size_t width = 2; width <= n; width *= 2) {
      const auto& half = rows_.back();
      std::vector<double> row(n - width + 1);
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = std::max(half[i], half[i + width / 2]);
      rows_.push_back(std::move(row));
    }
  }
  double operator()(std::size_t first, std::size_t last) const {  // half open, not empty
    const unsigned row = 63u - static_cast<unsigned>(__builtin_clzll(last - first));
    return std::max(rows_[row][first], rows_[row][last - (std::size_t{1} << row)]);
  }

 private:
  std::vector<std::vector<double>> rows_;
};

struct Sums {
  double work, kv, generated, context, path, alone;
};

// The evaluator's last step: seconds of an instance from the sums and maxima over its requests.
inline double instance_seconds(const Level& level, double wave, double path_share, const Sums& s) {
  const double forced = level.step * std::max(s.kv * level.inv_tokens, s.generated * level.inv_slots);
  const double path = std::max(s.path, forced + wave * std::min(s.path, forced));
  const double excess = std::max(0.0, s.context - level.capacity);
  return std::max(s.alone, path_share * path + s.work + level.recompute * excess);
}

}  // namespace libra
