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
#include <utility>
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

// Range maximum: prefix and suffix maxima within blocks of 16, a sparse table over whole blocks. O(1) but for ranges
// within one block, which are scanned; O(N) to build, so that building costs less than the searches that use it.
class RangeMax {
 public:
  RangeMax() = default;
  RangeMax(const double* values, std::size_t n) : values_(values, values + n), prefix_(n), suffix_(n) {
    const std::size_t blocks = (n + kBlock - 1) / kBlock;
    std::vector<double> whole(blocks);
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t first = block * kBlock, last = std::min(n, first + kBlock);
      prefix_[first] = values[first];
      for (std::size_t i = first + 1; i < last; ++i) prefix_[i] = std::max(prefix_[i - 1], values[i]);
      suffix_[last - 1] = values[last - 1];
      for (std::size_t i = last - 1; i-- > first;) suffix_[i] = std::max(suffix_[i + 1], values[i]);
      whole[block] = prefix_[last - 1];
    }
    rows_.push_back(std::move(whole));
    for (std::size_t width = 2; width <= blocks; width *= 2) {
      const auto& half = rows_.back();
      std::vector<double> row(blocks - width + 1);
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = std::max(half[i], half[i + width / 2]);
      rows_.push_back(std::move(row));
    }
  }
  double operator()(std::size_t first, std::size_t last) const {  // half open, not empty
    const std::size_t left = first / kBlock, right = (last - 1) / kBlock;
    if (left == right) {
      double most = values_[first];
      for (std::size_t i = first + 1; i < last; ++i) most = std::max(most, values_[i]);
      return most;
    }
    double most = std::max(suffix_[first], prefix_[last - 1]);
    if (right - left > 1) {
      const std::size_t width = right - left - 1;
      const unsigned row = 63u - static_cast<unsigned>(__builtin_clzll(width));
      most = std::max(most, std::max(rows_[row][left + 1], rows_[row][right - (std::size_t{1} << row)]));
    }
    return most;
  }

 private:
  static constexpr std::size_t kBlock = 16;
  std::vector<double> values_, prefix_, suffix_;
  std::vector<std::vector<double>> rows_;
};

// Min-heap of (seconds, number) whose least entry is only ever raised.
struct RaisedHeap {
  std::vector<std::pair<double, int>> entries;
  void raise_top(double seconds) {
    const std::pair<double, int> moved{seconds, entries.front().second};
    std::size_t hole = 0;
    const std::size_t n = entries.size();
    while (true) {
      std::size_t child = 2 * hole + 1;
      if (child >= n) break;
      if (child + 1 < n && entries[child + 1] < entries[child]) ++child;
      if (!(entries[child] < moved)) break;
      entries[hole] = entries[child];
      hole = child;
    }
    entries[hole] = moved;
  }
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
