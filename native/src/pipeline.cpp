// Time of one pass of micro-batches of unequal cost through pipeline stages (1F1B), and of a batch of sequences that is
// dealt to data-parallel ranks, longest first.
//
// A micro-batch with T tokens and Q = sum of squared lengths costs constant + linear * T + quadratic * Q on a stage.
// All stages but the last are alike; the last one also computes logits.
#include <map>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "interval_costs.hpp"

namespace nb = nanobind;

namespace {

using Vector = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Cost {
  double constant, linear, quadratic;
  double operator()(double tokens, double squares) const { return constant + linear * tokens + quadratic * squares; }
};

struct Stages {
  int count;
  Cost forward, backward, last_forward, last_backward, send;
};

struct MicroBatch {
  double tokens, squares;
};

Stages stages_from(const Vector& v) {
  if (v.shape(0) != 16) throw std::invalid_argument("pipeline: 16 coefficients: stages, then five costs of three");
  const double* c = v.data();
  const auto cost = [&](int i) { return Cost{c[1 + 3 * i], c[2 + 3 * i], c[3 + 3 * i]}; };
  return {static_cast<int>(c[0]), cost(0), cost(1), cost(2), cost(3), cost(4)};
}

// One-forward-one-backward order: stage s runs min(p - s, m) forwards, then alternates, then drains backwards.
// F(s, j) starts when F(s - 1, j) has arrived and the stage is free; B(s, j) when B(s + 1, j) has arrived.
double one_f_one_b(const Stages& st, const std::vector<MicroBatch>& batch) {
  const int p = st.count, m = static_cast<int>(batch.size());
  if (!m) return 0.0;
  if (p == 1) {
    double total = 0.0;
    for (const auto& b : batch) {
      total += st.last_forward(b.tokens, b.squares);
      total += st.last_backward(b.tokens, b.squares);
    }
    return total;
  }
  std::vector<double> forward(static_cast<std::size_t>(p) * m, -1.0), backward(forward), free(p, 0.0);
  std::vector<int> position(p, 0);
  const auto f = [&](int s, int j) -> double& { return forward[static_cast<std::size_t>(s) * m + j]; };
  const auto b = [&](int s, int j) -> double& { return backward[static_cast<std::size_t>(s) * m + j]; };
  // Operation k of stage s: forward (true) or backward, and its micro-batch.
  const auto operation = [&](int s, int k) -> std::pair<bool, int> {
    const int warm = std::min(p - s - 1, m), steady = 2 * (m - warm);
    if (k < warm) return {true, k};
    if (k < warm + steady) {
      const int i = k - warm;
      return i % 2 == 0 ? std::pair{true, warm + i / 2} : std::pair{false, i / 2};
    }
    return {false, (m - warm) + (k - warm - steady)};
  };
  int left = 2 * m * p;
  while (left) {
    bool moved = false;
    for (int s = 0; s < p; ++s) {
      while (position[s] < 2 * m) {
        const auto [is_forward, j] = operation(s, position[s]);
        const MicroBatch& mb = batch[j];
        const bool last = s == p - 1;
        const double send = st.send(mb.tokens, mb.squares);
        if (is_forward) {
          double ready = 0.0;
          if (s) {
            if (f(s - 1, j) < 0) break;
            ready = f(s - 1, j) + send;
          }
          free[s] = std::max(free[s], ready) + (last ? st.last_forward : st.forward)(mb.tokens, mb.squares);
          f(s, j) = free[s];
        } else {
          double ready = 0.0;
          if (!last) {
            if (b(s + 1, j) < 0) break;
            ready = b(s + 1, j) + send;
          }
          free[s] = std::max(free[s], ready) + (last ? st.last_backward : st.backward)(mb.tokens, mb.squares);
          b(s, j) = free[s];
        }
        ++position[s];
        --left;
        moved = true;
      }
    }
    if (!moved) throw std::logic_error("pipeline: the schedule cannot go on");
  }
  return *std::max_element(free.begin(), free.end());
}

double forward_only(const Stages& st, const std::vector<MicroBatch>& batch) {
  std::vector<double> free(st.count, 0.0);
  for (const auto& mb : batch) {
    double ready = 0.0;
    for (int s = 0; s < st.count; ++s) {
      free[s] = std::max(free[s], ready) + (s == st.count - 1 ? st.last_forward : st.forward)(mb.tokens, mb.squares);
      ready = free[s] + st.send(mb.tokens, mb.squares);
    }
  }
  return batch.empty() ? 0.0 : free.back();
}

class TrainBatch {
 public:
  // lengths: tokens of the sequences. quadratic: weight of length^2 against length when ranks are balanced.
  TrainBatch(Vector lengths, double quadratic) : lengths_(lengths.data(), lengths.data() + lengths.shape(0)) {
    if (lengths_.empty()) throw std::invalid_argument("pipeline: a batch needs sequences");
    std::sort(lengths_.begin(), lengths_.end(), std::greater<>());
    for (double length : lengths_) weight_.push_back(length + quadratic * length * length);
  }

  // Seconds of the slowest rank: (1F1B pass, forward-only pass).
  std::tuple<double, double> seconds(int ranks, int micro, Vector coefficients, bool with_forward_only) {
    const Stages st = stages_from(coefficients);
    if (ranks < 1 || micro < 1 || st.count < 1) throw std::invalid_argument("pipeline: degrees must be at least 1");
    nb::gil_scoped_release release;
    const auto& dealt = deal(ranks);
    double train = 0.0, forward = 0.0;
    std::vector<MicroBatch> batch;
    for (const auto& rank : dealt) {
      batch.clear();
      for (std::size_t i = 0; i < rank.size(); i += micro) {
        MicroBatch mb{0.0, 0.0};
        for (std::size_t j = i; j < std::min(rank.size(), i + micro); ++j)
          mb.tokens += rank[j], mb.squares += rank[j] * rank[j];
        batch.push_back(mb);
      }
      train = std::max(train, one_f_one_b(st, batch));
      if (with_forward_only) forward = std::max(forward, forward_only(st, batch));
    }
    return {train, forward};
  }

  // Lengths of each rank, descending.
  std::vector<std::vector<double>> dealt(int ranks) { return deal(ranks); }

 private:
  const std::vector<std::vector<double>>& deal(int ranks) {
    const auto found = cache_.find(ranks);
    if (found != cache_.end()) return found->second;
    if (cache_.size() >= 64) cache_.clear();
    std::vector<std::vector<double>> out(ranks);
    libra::RaisedHeap heap;
    for (int r = 0; r < ranks; ++r) heap.entries.push_back({0.0, r});
    for (auto& rank : out) rank.reserve(2 * lengths_.size() / ranks + 1);
    for (std::size_t i = 0; i < lengths_.size(); ++i) {
      const auto [load, rank] = heap.entries.front();
      out[rank].push_back(lengths_[i]);
      heap.raise_top(load + weight_[i]);
    }
    return cache_.emplace(ranks, std::move(out)).first->second;
  }

  std::vector<double> lengths_, weight_;
  std::map<int, std::vector<std::vector<double>>> cache_;
};

std::vector<MicroBatch> micro_batches(const Vector& tokens, const Vector& squares) {
  if (tokens.shape(0) != squares.shape(0)) throw std::invalid_argument("pipeline: tokens and squares differ in number");
  std::vector<MicroBatch> batch;
  for (std::size_t i = 0; i < tokens.shape(0); ++i) batch.push_back({tokens.data()[i], squares.data()[i]});
  return batch;
}

}  // namespace

void bind_pipeline(nb::module_& m) {
  m.def("one_f_one_b", [](Vector tokens, Vector squares, Vector coefficients) {
    return one_f_one_b(stages_from(coefficients), micro_batches(tokens, squares));
  }, nb::arg("tokens"), nb::arg("squares"), nb::arg("coefficients"));
  m.def("forward_only", [](Vector tokens, Vector squares, Vector coefficients) {
    return forward_only(stages_from(coefficients), micro_batches(tokens, squares));
  }, nb::arg("tokens"), nb::arg("squares"), nb::arg("coefficients"));
  nb::class_<TrainBatch>(m, "TrainBatch")
      .def(nb::init<Vector, double>(), nb::arg("lengths"), nb::arg("quadratic"))
      .def("seconds", &TrainBatch::seconds, nb::arg("ranks"), nb::arg("micro"), nb::arg("coefficients"),
           nb::arg("with_forward_only"))
      .def("dealt", &TrainBatch::dealt, nb::arg("ranks"));
}
