"""What one training iteration costs under a strategy, in seconds.

    T = log-prob pass + 1F1B pass + gradient exchange + optimizer step + weight publish

Micro-batches are of unequal length, so the pipeline is simulated stage by stage (start and end recurrences), not taken
from a mean length: the bubbles that long micro-batches make are part of the time. The slowest data-parallel rank
counts. Invariants: all terms are at or above zero; the time is at or above total work / ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import NDArray

from libra.native.pipeline import PassCost, StageCosts, TrainBatch
from libra.resources.cost_model.communication import (
    all_reduce,
    all_to_all,
    gradient_exchange,
    latency,
    neighbour_bandwidth,
)
from libra.resources.cost_model.memory import ADAM_BYTES, RankMemory, parameters_of_rank, rank_memory
from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import TrainStrategy

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainingFactors:
    """Multipliers that a profile fits (1: as derived), and what is assumed of the trainer.

    ``linear``, ``quadratic``: on compute that grows with length and with its square. ``constant``: on the cost of a
    micro-batch. ``fixed_seconds``: a iteration's cost that depends on nothing. ``exposed``: share of the gradient
    exchange that backward does not hide (assumed). ``logprob_pass``: whether old log-probs are computed again.
    """

    linear: float = 1.0
    quadratic: float = 1.0
    constant: float = 1.0
    fixed_seconds: float = 0.0
    exposed: float = 0.5
    logprob_pass: bool = True


@dataclass(frozen=True, slots=True)
class TrainPrediction:
    """Seconds of one iteration, by part."""

    logprobs: float
    passes: float
    exchange: float
    optimizer: float
    publish: float
    fixed: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.logprobs + self.passes + self.exchange + self.optimizer + self.publish + self.fixed


@dataclass(frozen=True, eq=False)
class TrainingCosts:
    """Costs of training ``model`` on ``hardware`` on a batch of sequences of ``lengths`` tokens (shape (N,))."""

    model: ModelSpec
    hardware: HardwareSpec
    lengths: Floats
    factors: TrainingFactors = TrainingFactors()
    provenance: str = "derived from specs"
    _stages: dict[tuple[int, int, int, str], StageCosts] = field(default_factory=dict, repr=False)
    _passes: dict[tuple[int, int, int, int, int, str], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def batch(self) -> TrainBatch:
        """The batch; ranks are balanced by the model's FLOPs."""
        linear = 2 * self.model.active_parameters
        return TrainBatch(self.lengths, 2 * self.model.layers * self.model.attention_width / linear)

    @cached_property
    def _sums(self) -> tuple[float, float, Floats]:
        descending = np.sort(self.lengths)[::-1]
        return float(self.lengths.sum()), float((self.lengths**2).sum()), descending

    def stage_costs(self, strategy: TrainStrategy) -> StageCosts:
        """Seconds of a micro-batch on a stage.

        Compute, FLOPs of a layer and token: 2·active parameters forward, twice that backward, one more forward under
        full recompute, the attention core's alone under selective; attention 4·heads·head size per causal token pair
        (L²/2 pairs); arXiv:2104.04473, appendix. TP: two all-reduces of the activations a layer, forward and again
        backward. EP: two all-to-alls of k copies of each token a layer, forward and again backward. Logits
        (2·vocabulary·hidden) on the last stage. A send passes the activations on, divided by TP.
        """
        key = (strategy.tp, strategy.ep, strategy.pp, strategy.recompute)
        if key not in self._stages:
            self._stages[key] = self._stage_costs(strategy)
        return self._stages[key]

    def _stage_costs(self, strategy: TrainStrategy) -> StageCosts:
        model, hw, tp, ep = self.model, self.hardware, strategy.tp, strategy.ep
        layers = model.layers / strategy.pp
        compute = tp * hw.flops * hw.efficiency.compute_train
        active = (
            model.attention_parameters + model.dense_mlp_parameters + model.active_experts * model.expert_parameters
        )
        linear = self.factors.linear * layers * 2 * active / compute
        quadratic = self.factors.quadratic * layers * 2 * model.attention_width / compute
        logits = self.factors.linear * 2 * model.vocabulary * model.hidden_size / compute
        token = model.hidden_size * model.bytes_per_parameter
        reduce = 2 * (all_reduce(token, tp, hw) - latency(tp, hw))
        routed = 2 * (all_to_all(token * model.active_experts / tp, ep, hw) - latency(ep, hw)) if model.is_moe else 0.0
        moved = layers * (reduce + routed)
        wait = layers * 2 * (latency(tp, hw) + (latency(ep, hw) if model.is_moe else 0.0))
        host = self.factors.constant * (hw.overhead.micro_batch_ms * 1e-3 + wait)
        again = 1.0 if strategy.recompute == "full" else 0.0
        core_again = 0.0 if strategy.recompute == "none" else 1.0
        forward = PassCost(host, linear + moved, quadratic)
        backward = PassCost(
            host * (1 + again), (2 + again) * linear + (1 + again) * moved, (2 + core_again) * quadratic
        )
        last_forward = PassCost(host, forward.linear + logits, quadratic)
        last_backward = PassCost(backward.constant, backward.linear + 2 * logits, backward.quadratic)
        bandwidth = neighbour_bandwidth(tp * ep, strategy.pp, hw)
        send = PassCost(hw.overhead.all_reduce_us * 1e-6, token / tp / bandwidth)
        return StageCosts(strategy.pp, forward, backward, last_forward, last_backward, send)

    def micro_batches(self, strategy: TrainStrategy) -> int:
        """Of the rank that has the most."""
        return ceil(ceil(len(self.lengths) / strategy.replicas) / strategy.micro_batch)

    def memory(self, strategy: TrainStrategy) -> RankMemory:
        """Bytes of the fullest rank, its largest micro-batch made of the longest sequences it could hold."""
        largest = float(self._sums[2][: strategy.micro_batch].sum())
        return rank_memory(self.model, self.hardware, strategy, largest, self.micro_batches(strategy))

    def fits(self, strategy: TrainStrategy) -> bool:
        """Whether the fullest rank's bytes fit the device."""
        return self.memory(strategy).total <= self.hardware.memory

    def predict(self, strategy: TrainStrategy) -> TrainPrediction:
        """Seconds of one iteration, by part; the pipeline passes are simulated and remembered."""
        key = (strategy.tp, strategy.ep, strategy.pp, strategy.replicas, strategy.micro_batch, strategy.recompute)
        if key not in self._passes:
            self._passes[key] = self.batch.seconds(
                strategy.replicas, strategy.micro_batch, self.stage_costs(strategy), self.factors.logprob_pass
            )
        passes, logprobs = self._passes[key]
        exchange, optimizer, publish = self.fixed_parts(strategy)
        return TrainPrediction(logprobs, passes, exchange, optimizer, publish, self.factors.fixed_seconds)

    def seconds(self, strategy: TrainStrategy) -> float:
        """Seconds of one iteration."""
        return self.predict(strategy).seconds

    def fixed_parts(self, strategy: TrainStrategy) -> tuple[float, float, float]:
        """(gradient exchange, optimizer step, weight publish) in seconds.

        Exchange: bf16 gradients reduced and weights gathered, dense parameters among ep·dp and expert ones among dp,
        times the exposed share. Optimizer: Adam reads and writes its states and the gradient once,
        (2·12 + 4 + 2) bytes a parameter of the rank's shard at HBM rate. Publish: the ranks of one replica write the
        weights to the host, and an engine reads them over the network of one node or, if slower, from the host.
        """
        model, hw = self.model, self.hardware
        dense, experts = parameters_of_rank(model, strategy)
        size = model.bytes_per_parameter
        exchange = gradient_exchange(dense * size, strategy.replicas, strategy.tp, hw)
        if experts:
            exchange += gradient_exchange(experts * size, strategy.dp, strategy.tp * strategy.ep, hw)
        shard = dense / strategy.replicas + experts / strategy.dp
        optimizer = shard * (2 * ADAM_BYTES + 4 + size) / hw.hbm
        writers = strategy.tp * strategy.pp * strategy.ep
        copy = hw.host_copy_gb_per_s * 1e9
        publish = model.weight_bytes / (writers * copy) + model.weight_bytes / min(hw.network, copy)
        return self.factors.exposed * exchange, optimizer, publish

    def lower_bound(self, strategy: TrainStrategy) -> float:
        """At or below `seconds`, without a simulation.

        The last stage of the most loaded rank works at least the mean over ranks and at least what its longest
        sequence takes; the pass also waits for the first micro-batch to come down the stages and the last to go back
        up, each at least the cost of the shortest sequence. Relative slack 1e-9 for rounding.
        """
        costs, ranks = self.stage_costs(strategy), strategy.replicas
        tokens, squares, descending = self._sums
        count = max(1.0, len(descending) / (ranks * strategy.micro_batch))
        longest = descending[0]
        # Of ranks + 1 sequences two share a rank (pigeonhole).
        pair = descending[ranks - 1 : ranks + 1] if len(descending) > ranks else descending[:1]
        pair_tokens, pair_squares = float(pair.sum()), float((pair**2).sum())
        shortest = float(descending[-1])

        def busiest(*parts: PassCost) -> float:
            constant = sum(p.constant for p in parts)
            linear, quadratic = sum(p.linear for p in parts), sum(p.quadratic for p in parts)
            mean = constant * count + (linear * tokens + quadratic * squares) / ranks
            alone = constant + linear * longest + quadratic * longest**2
            return max(mean, alone, constant + linear * pair_tokens + quadratic * pair_squares)

        fill = (costs.stages - 1) * (
            costs.forward.seconds(shortest, shortest**2) + costs.backward.seconds(shortest, shortest**2)
        )
        bound = busiest(costs.last_forward, costs.last_backward) + fill
        if self.factors.logprob_pass:
            bound += busiest(costs.last_forward)
        return (bound + sum(self.fixed_parts(strategy)) + self.factors.fixed_seconds) * (1 - 1e-9)
