// Exact rollout partition by parametric search: requests sorted by context, contiguous intervals, TP ascending with
// context, sum of TP <= budget, minimal makespan. Also greedy mixing (longest first, least loaded) for comparison.
//
// Search over the makespan T. cover(T) computes, for every budget g and level l, the most requests that instances of
// levels <= l, in ascending order, serve within T. Feasible: hi becomes the makespan that the packing really has.
// Infeasible: lo becomes the smallest cost that stopped an extension, below which nothing changes. When lo meets hi the
// result is the optimum itself.
#include <string>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "interval_costs.hpp"

namespace nb = nanobind;

namespace {

using libra::kInfinity;
using libra::Level;
using libra::RangeMax;
using libra::Sums;
using Vector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Piece = std::tuple<int, std::size_t, std::size_t>;  // level, first request, past the last

std::vector<double> prefix(const double* v, std::size_t n) {
  std::vector<double> p(n + 1, 0.0);
  for (std::size_t i = 0; i < n; ++i) p[i + 1] = p[i] + v[i];
  return p;
}

class Partition {
 public:
  // context, kv, generated: (N,); work, path, alone: (levels, N); levels: (levels, 6) as in Level; ascending TP.
  Partition(Vector context, Vector kv, Vector generated, Matrix work, Matrix path, Matrix alone, Matrix levels,
            double wave, double path_share)
      : n_(context.shape(0)), wave_(wave), path_share_(path_share), context_(context.data(), context.data() + n_) {
    const std::size_t count = levels.shape(0);
    if (!n_ || !count || kv.shape(0) != n_ || generated.shape(0) != n_ || levels.shape(1) != 6)
      throw std::invalid_argument("partition: arrays disagree in shape, or are empty");
    for (const auto* m : {&work, &path, &alone})
      if (m->shape(0) != count || m->shape(1) != n_) throw std::invalid_argument("partition: a matrix has another shape");
    if (!std::is_sorted(context_.begin(), context_.end()))
      throw std::invalid_argument("partition: requests must be sorted by context");
    kv_values_.assign(kv.data(), kv.data() + n_);
    generated_values_.assign(generated.data(), generated.data() + n_);
    kv_ = prefix(kv.data(), n_);
    generated_ = prefix(generated.data(), n_);
    context_sum_ = prefix(context_.data(), n_);
    for (std::size_t l = 0; l < count; ++l) {
      const double* row = levels.data() + l * 6;
      levels_.push_back({static_cast<int>(row[0]), row[1], row[2], row[3], row[4], row[5]});
      if (l && levels_[l].gpus <= levels_[l - 1].gpus) throw std::invalid_argument("partition: levels must ascend in TP");
      work_values_.emplace_back(work.data() + l * n_, work.data() + (l + 1) * n_);
      path_values_.emplace_back(path.data() + l * n_, path.data() + (l + 1) * n_);
      alone_values_.emplace_back(alone.data() + l * n_, alone.data() + (l + 1) * n_);
      work_.push_back(prefix(work_values_[l].data(), n_));
      path_.emplace_back(path_values_[l].data(), n_);
      alone_.emplace_back(alone_values_[l].data(), n_);
    }
    order_ = by_work();
  }

  double cost(int level, std::size_t k, std::size_t i) const {
    const Level& at = levels_[level];
    if (context_[i - 1] > at.capacity) return kInfinity;
    const Sums sums{work_[level][i] - work_[level][k], kv_[i] - kv_[k], generated_[i] - generated_[k],
                    context_sum_[i] - context_sum_[k], path_[level](k, i), alone_[level](k, i)};
    return libra::instance_seconds(at, wave_, path_share_, sums);
  }

  // Fewest GPUs (up to budget) that serve everything within T, or budget + 1; the packing's own makespan (infinite if
  // none); and the smallest cost above T that stopped an extension.
  std::tuple<int, double, double> probe(double T, int budget) {
    nb::gil_scoped_release release;
    return cover(T, budget);
  }

  // The optimum, its pieces in ascending order of context, and the number of probes.
  std::tuple<double, std::vector<Piece>, int> solve(int budget) {
    nb::gil_scoped_release release;
    double lo = longest_alone();
    double hi = kInfinity;
    std::vector<Piece> best;
    int probes = 0;
    const auto accept = [&](double T) {
      const auto [gpus, realised, next] = cover(T, budget);
      ++probes;
      if (gpus <= budget) {
        if (realised < hi || best.empty()) best = pieces(gpus), hi = realised;
        return true;
      }
      lo = next;
      return false;
    };
    if (lo < kInfinity && accept(lo)) return {hi, best, probes};
    double guess = single_instance(budget);
    while (guess < kInfinity && best.empty() && lo < kInfinity) accept(std::max(guess, lo)), guess *= 2;
    while (lo < hi && lo < kInfinity && hi < kInfinity) {
      if (probes % 8 == 0) {
        if (accept(lo)) break;
      } else {
        accept(hi > 4 * lo ? std::sqrt(lo * hi) : lo + 0.5 * (hi - lo));
      }
    }
    return {hi, best, probes};
  }

  // Longest work first, each to the instance that then ends first. counts: instances of each level.
  // Returns the makespan and, if asked, the instance of each request (numbered level by level).
  std::tuple<double, std::vector<int>> mix(std::vector<int> counts, bool with_instances) const {
    nb::gil_scoped_release release;
    struct Load {
      Sums sums{};
      double seconds = 0.0;
    };
    std::vector<std::vector<Load>> loads;
    std::vector<libra::RaisedHeap> heaps(levels_.size());
    std::vector<int> offset;
    int total = 0;
    for (std::size_t l = 0; l < levels_.size(); ++l) {
      offset.push_back(total);
      const int count = l < counts.size() ? counts[l] : 0;
      loads.emplace_back(count);
      for (int i = 0; i < count; ++i) heaps[l].entries.push_back({0.0, i});
      total += count;
    }
    std::vector<int> where(with_instances ? n_ : 0, -1);
    double makespan = 0.0;
    for (std::size_t r : order_) {
      double best_seconds = kInfinity;
      int best_level = -1;
      Sums best_sums{};
      for (std::size_t l = 0; l < levels_.size(); ++l) {
        if (heaps[l].entries.empty() || context_[r] > levels_[l].capacity) continue;
        Sums sums = loads[l][heaps[l].entries.front().second].sums;
        sums.work += work_values_[l][r];
        sums.kv += kv_values_[r];
        sums.generated += generated_values_[r];
        sums.context += context_[r];
        sums.path = std::max(sums.path, path_values_[l][r]);
        sums.alone = std::max(sums.alone, alone_values_[l][r]);
        const double seconds = libra::instance_seconds(levels_[l], wave_, path_share_, sums);
        if (seconds < best_seconds) best_seconds = seconds, best_level = static_cast<int>(l), best_sums = sums;
      }
      if (best_level < 0) return {kInfinity, {}};
      libra::RaisedHeap& heap = heaps[best_level];
      const int instance = heap.entries.front().second;
      heap.raise_top(best_seconds);
      loads[best_level][instance] = {best_sums, best_seconds};
      if (with_instances) where[r] = offset[best_level] + instance;
      makespan = std::max(makespan, best_seconds);
    }
    return {makespan, where};
  }

  std::size_t size() const { return n_; }

 private:
  // No packing can end before any request alone on the level that suits it best.
  double longest_alone() const {
    double longest = 0.0;
    for (std::size_t i = 0; i < n_; ++i) {
      double best = kInfinity;
      for (std::size_t l = 0; l < levels_.size(); ++l) best = std::min(best, cost(static_cast<int>(l), i, i + 1));
      longest = std::max(longest, best);
    }
    return longest;
  }

  double single_instance(int budget) const {
    double best = kInfinity;
    for (std::size_t l = 0; l < levels_.size(); ++l)
      if (levels_[l].gpus <= budget) best = std::min(best, cost(static_cast<int>(l), 0, n_));
    return best;
  }

  // Past the last request that level serves from `first` on within T; lowers `next` to the cost that stopped it.
  std::size_t extend(int level, std::size_t first, double T, double& next) const {
    std::size_t good = first, step = 1, bad = n_ + 1;
    while (good < n_) {
      const std::size_t trial = std::min(good + step, n_);
      if (cost(level, first, trial) <= T) {
        good = trial, step *= 2;
      } else {
        bad = trial;
        break;
      }
    }
    while (bad <= n_ && bad - good > 1) {
      const std::size_t middle = good + (bad - good) / 2;
      if (cost(level, first, middle) <= T) good = middle;
      else bad = middle;
    }
    if (good < n_) {
      const double stopped = cost(level, first, good + 1);
      if (stopped > T && stopped < next) next = stopped;
    }
    return good;
  }

  std::tuple<int, double, double> cover(double T, int budget) {
    const std::size_t count = levels_.size();
    const std::size_t width = static_cast<std::size_t>(budget) + 1;
    reach_.assign(count * width, 0);
    from_.assign(count * width, 0);
    double next = kInfinity;
    std::vector<std::size_t> last_start(count, n_ + 1), last_end(count, 0);
    for (int g = 1; g <= budget; ++g) {
      for (std::size_t l = 0; l < count; ++l) {
        // from: 0 an unused GPU, 1 the same as one level lower, 2 an instance of this level.
        std::size_t best = reach_[l * width + g - 1];
        char how = 0;
        if (l && reach_[(l - 1) * width + g] > best) best = reach_[(l - 1) * width + g], how = 1;
        if (levels_[l].gpus <= g) {
          const std::size_t start = reach_[l * width + g - levels_[l].gpus];
          if (start < n_) {
            if (last_start[l] != start) last_start[l] = start, last_end[l] = extend(static_cast<int>(l), start, T, next);
            if (last_end[l] > best) best = last_end[l], how = 2;
          }
        }
        reach_[l * width + g] = best;
        from_[l * width + g] = how;
        if (best >= n_) {
          end_level_ = static_cast<int>(l);
          width_ = width;
          return {g, realised(g), next};
        }
      }
    }
    return {budget + 1, kInfinity, next};
  }

  std::vector<Piece> pieces(int gpus) const {
    std::vector<Piece> found;
    int g = gpus, l = end_level_;
    while (g > 0 && l >= 0) {
      const char how = from_[l * width_ + g];
      if (how == 1) {
        --l;
      } else if (how == 0) {
        --g;
      } else {
        const std::size_t end = reach_[l * width_ + g];
        g -= levels_[l].gpus;
        found.emplace_back(l, reach_[l * width_ + g], end);
      }
    }
    std::reverse(found.begin(), found.end());
    return found;
  }

  double realised(int gpus) const {
    double makespan = 0.0;
    for (const auto& [level, first, last] : pieces(gpus)) makespan = std::max(makespan, cost(level, first, last));
    return makespan;
  }

  std::vector<std::size_t> by_work() const {
    std::vector<std::size_t> order(n_);
    for (std::size_t i = 0; i < n_; ++i) order[i] = i;
    std::vector<double> key(n_);
    for (std::size_t i = 0; i < n_; ++i) key[i] = work_values_.front()[i] + path_values_.front()[i];
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key[a] > key[b]; });
    return order;
  }

  std::size_t n_;
  double wave_, path_share_;
  std::vector<double> context_, kv_values_, generated_values_, kv_, generated_, context_sum_;
  std::vector<Level> levels_;
  std::vector<std::vector<double>> work_values_, path_values_, alone_values_, work_;
  std::vector<RangeMax> path_, alone_;
  std::vector<std::size_t> order_, reach_;
  std::vector<char> from_;
  std::size_t width_ = 0;
  int end_level_ = -1;
};

}  // namespace

void bind_partition(nb::module_& m) {
  nb::class_<Partition>(m, "Partition")
      .def(nb::init<Vector, Vector, Vector, Matrix, Matrix, Matrix, Matrix, double, double>(), nb::arg("context"),
           nb::arg("kv"), nb::arg("generated"), nb::arg("work"), nb::arg("path"), nb::arg("alone"), nb::arg("levels"),
           nb::arg("wave"), nb::arg("path_share"))
      .def("cost", &Partition::cost, nb::arg("level"), nb::arg("first"), nb::arg("last"))
      .def("probe", &Partition::probe, nb::arg("seconds"), nb::arg("budget"))
      .def("solve", &Partition::solve, nb::arg("budget"))
      .def("mix", &Partition::mix, nb::arg("counts"), nb::arg("with_instances"))
      .def("__len__", &Partition::size);
}
