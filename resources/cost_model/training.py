"""What one training iteration costs under a strategy, in seconds.

    T = log-prob pass + 1F1B pass + gradient exchange + optimizer step + weight publish

Micro-batches are of unequal length, so the pipeline is simulated stage by stage (start and end recurrences), not taken
from a mean length: the bubbles that long micro-batches make are part of the time. The slowest data-parallel rank
counts. Invariants: all terms are at or above zero; the time is at or above total work / ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from libra.native.pipeline import TrainBatch
from libra.resources.cost_model.communication import (
    all_reduce,
    all_to_all,
    gradient_exchange,
    latency,
    neighbour_bandwidth,
)
from libra.resources.cost_model.memory import ADAM_BYTES, RankMemory, parameters_of_rank, rank_memory
from libra.resources.cost_model.strategies import RECOMPUTE, Strategies
from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import TrainStrategy

Floats = NDArray[np.float64]
_SLACK = 1 - 1e-12
"""Keeps a lower bound one in spite of rounding."""


@dataclass(frozen=True, slots=True)
class TrainingFactors:
    """Multipliers that a profile fits (1: as derived), and what is assumed of the trainer.

    ``linear``, ``quadratic``: on compute that grows with length and with its square. ``constant``: on the cost of a
    micro-batch. ``fixed_seconds``: an iteration's cost that depends on nothing. ``exposed``: share of the gradient
    exchange that backward does not hide: assumed, not measured. A bucket's reduce-scatter overlaps with the backward of
    the layers before it (Li et al., PyTorch Distributed, arXiv:2006.15704, §3.2.3), and the gather of weights with the
    next forward only from its second layer on; half is between "all hidden" (0) and "none hidden" (1), and the term is
    small beside the passes wherever a rank has more than a few sequences. ``logprob_pass``: whether old log-probs are
    computed again.
    """

    linear: float = 1.0
    quadratic: float = 1.0
    constant: float = 1.0
    fixed_seconds: float = 0.0
    exposed: float = 0.5
    logprob_pass: bool = True

    def scaled(self, factor: float) -> TrainingFactors:
        """The same trainer, its compute and fixed time multiplied by ``factor``; exchanges and publishing as before."""
        return replace(
            self, linear=self.linear * factor, quadratic=self.quadratic * factor, constant=self.constant * factor,
            fixed_seconds=self.fixed_seconds * factor,
        )  # fmt: skip


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


@dataclass(frozen=True, slots=True, eq=False)
class TrainingColumns:
    """What pricing strategies takes, a row each: ``coefficients`` of shape (N, 16) (see `TrainingCosts.coefficients`);
    ``exchange``, ``optimizer``, ``publish``: seconds of shape (N,) (see `TrainingCosts.fixed_parts`)."""

    coefficients: Floats
    exchange: Floats
    optimizer: Floats
    publish: Floats


@dataclass(frozen=True, eq=False)
class TrainingCosts:
    """Costs of training ``model`` on ``hardware`` on a batch of sequences of ``lengths`` tokens (shape (N,))."""

    model: ModelSpec
    hardware: HardwareSpec
    lengths: Floats
    factors: TrainingFactors = TrainingFactors()
    provenance: str = "derived from specs"

    @cached_property
    def batch(self) -> TrainBatch:
        """The batch; ranks are balanced by the model's FLOPs."""
        linear = 2 * self.model.active_parameters
        return TrainBatch(self.lengths, 2 * self.model.layers * self.model.attention_width / linear)

    @cached_property
    def descending(self) -> Floats:
        """The lengths, longest first."""
        return np.sort(self.lengths)[::-1]

    @cached_property
    def _cumulated(self) -> Floats:
        """Tokens of the k longest sequences, k = 1 … N."""
        return np.cumsum(self.descending)

    @cached_property
    def _squares(self) -> float:
        return float((self.descending**2).sum())

    def coefficients(self, s: Strategies) -> Floats:
        """Seconds of a micro-batch on a stage, as the pipeline takes them: shape (N, 16), see `StageCosts`.

        Compute, FLOPs of a layer and token: 2·active parameters forward, twice that backward, one more forward under
        full recompute, the attention core's alone under selective; attention 4·heads·head size per causal token pair
        (L²/2 pairs); arXiv:2104.04473, appendix. TP: two all-reduces of the activations a layer, forward and again
        backward. EP: two all-to-alls of k copies of each token a layer, forward and again backward. Logits
        (2·vocabulary·hidden) on the last stage. A send passes the activations on, divided by TP.
        """
        model, hw = self.model, self.hardware
        layers = model.layers / s.pp
        compute = s.tp * hw.flops * hw.efficiency.compute_train
        linear = self.factors.linear * layers * 2 * self.model.active_layer_parameters / compute
        quadratic = self.factors.quadratic * layers * 2 * model.attention_width / compute
        logits = self.factors.linear * 2 * model.vocabulary * model.hidden_size / compute
        moved = layers * self.communication_per_layer(s)
        calls = latency(s.tp, hw) + (latency(s.ep, hw) if model.is_moe else 0.0)
        host = self.factors.constant * (hw.overhead.micro_batch_ms * 1e-3 + layers * 2 * calls)
        again = (s.recompute == RECOMPUTE.index("full")) * 1.0
        core_again = (s.recompute != RECOMPUTE.index("none")) * 1.0
        forward, backward = linear + moved, (2 + again) * linear + (1 + again) * moved
        host_backward, core_backward = host * (1 + again), (2 + core_again) * quadratic
        send = np.full(len(s), hw.overhead.all_reduce_us * 1e-6)
        token = model.hidden_size * model.bytes_per_parameter
        passed = token / s.tp / neighbour_bandwidth(s.tp * s.ep, s.pp, hw)
        columns = (
            s.pp, host, forward, quadratic, host_backward, backward, core_backward,
            host, forward + logits, quadratic, host_backward, backward + 2 * logits, core_backward,
            send, passed, np.zeros(len(s)),
        )  # fmt: skip
        return np.ascontiguousarray(np.stack([np.broadcast_to(c, len(s)) for c in columns], axis=1), np.float64)

    def communication_per_layer(self, s: Strategies) -> Floats:
        """Seconds a token and layer, forward: TP's all-reduces and EP's all-to-alls, their volumes alone."""
        token = self.model.hidden_size * self.model.bytes_per_parameter
        moved = 2 * all_reduce(token, s.tp, self.hardware)
        if self.model.is_moe:
            share = self.model.mixture_layers / self.model.layers
            moved = moved + share * 2 * all_to_all(token * self.model.active_experts / s.tp, s.ep, self.hardware)
        return np.asarray(moved)

    def communication_ratio(self, s: Strategies) -> Floats:
        """Communication of TP and EP over compute, forward, for a sequence of the batch's mean length. Both are of the
        same layers, so the ratio does not depend on how many there are."""
        compute = s.tp * self.hardware.flops * self.hardware.efficiency.compute_train
        mean = float(self.lengths.mean())
        linear = self.factors.linear * 2 * self.model.active_layer_parameters
        quadratic = self.factors.quadratic * 2 * self.model.attention_width
        work = linear + quadratic * mean
        if work == 0:  # a trainer that only waits: whatever it sends is all it does
            return np.where(self.communication_per_layer(s) > 0, np.inf, 0.0)
        return self.communication_per_layer(s) / (work / compute)

    def micro_batches(self, s: Strategies) -> NDArray[np.int64]:
        """Of the rank that has the most."""
        of_rank = -(-len(self.lengths) // s.replicas)
        return np.asarray(-(-of_rank // s.micro_batch))

    def memory(self, s: Strategies) -> RankMemory:
        """Bytes of the fullest rank, its largest micro-batch made of the longest sequences it could hold."""
        cumulated = self._cumulated
        largest = cumulated[np.minimum(s.micro_batch, len(cumulated)) - 1]
        return rank_memory(self.model, self.hardware, s, largest, self.micro_batches(s))

    def fixed_parts(self, s: Strategies) -> tuple[Floats, Floats, Floats]:
        """(gradient exchange, optimizer step, weight publish) in seconds, shape (N,) each.

        Exchange: bf16 gradients reduced and weights gathered, dense parameters among ep·dp and expert ones among dp,
        times the exposed share (`TrainingFactors`): the distributed optimizer of ZeRO stage 1 (Rajbhandari et al.,
        arXiv:1910.02054, §5.1), whose volumes `gradient_exchange` has.
        Optimizer: Adam (Kingma & Ba, arXiv:1412.6980, algorithm 1) reads and writes its states and the gradient once,
        (2·12 + 4 + 2) bytes a parameter of the rank's shard at HBM rate: the step is bound by memory (about 10 FLOPs
        for 30 bytes).
        Publish: this system's own path, not published: the ranks of one replica write the weights side by side to host
        memory (W / (tp·pp·ep·copy rate)), and an engine reads all of them over the network of one node or, if slower,
        from host memory (W / min(network, copy rate)). Engines read at the same time; the store is not the limit.
        """
        model, hw = self.model, self.hardware
        dense, experts = parameters_of_rank(model, s)
        size = model.bytes_per_parameter
        exchange = gradient_exchange(dense * size, s.replicas, s.tp, hw)
        if model.is_moe:
            exchange = exchange + gradient_exchange(experts * size, s.dp, s.tp * s.ep, hw)
        shard = dense / s.replicas + experts / s.dp
        optimizer = shard * (2 * ADAM_BYTES + 4 + size) / hw.hbm
        copy = hw.host_copy_gb_per_s * 1e9
        publish = model.weight_bytes / (s.tp * s.pp * s.ep * copy) + model.weight_bytes / min(hw.network, copy)
        return np.asarray(self.factors.exposed * exchange), optimizer, publish

    def columns(self, s: Strategies) -> TrainingColumns:
        """All that pricing these strategies takes."""
        return TrainingColumns(self.coefficients(s), *self.fixed_parts(s))

    def lower_bounds(self, s: Strategies, columns: TrainingColumns) -> Floats:
        """At or below the seconds of each strategy, without a simulation; shape (N,). ``columns``: of ``s``.

        The last stage of the most loaded rank works at least the mean over ranks, at least what the longest sequence
        takes, and at least what two of the ranks + 1 longest take (pigeonhole). Before that the rank's first
        micro-batch comes down the stages: ranks are dealt the longest sequences first, so it is at or above the
        ranks-th longest sequence. After it the last micro-batch goes back up, at or above the shortest sequence. Nor
        does a pass end before the longest sequence has come down all stages and gone back up.
        """
        c, ranks, lengths = columns.coefficients, s.replicas, self.descending
        tokens, squares, sequences = float(self._cumulated[-1]), self._squares, len(lengths)
        count = np.maximum(1.0, sequences / (ranks * s.micro_batch))
        longest, shortest = float(lengths[0]), float(lengths[-1])
        crowded = ranks < sequences
        first = lengths[np.minimum(ranks - 1, sequences - 1)]
        second = np.where(crowded, lengths[np.minimum(ranks, sequences - 1)], 0.0)

        def busiest(constant: Floats, linear: Floats, quadratic: Floats) -> Floats:
            mean = constant * count + (linear * tokens + quadratic * squares) / ranks
            alone = constant + linear * longest + quadratic * longest**2
            pair = constant + linear * (first + second) + quadratic * (first**2 + second**2)
            return np.maximum(np.maximum(mean, alone), pair)

        def stages(costs: Floats, length: Floats | float) -> Floats:
            """A sequence through all stages but the last."""
            at = np.stack(np.broadcast_arrays(np.ones(len(s)), length, np.square(length)), axis=1)
            return np.asarray((s.pp - 1) * (costs * at).sum(axis=1))

        send = c[:, 13:16]
        down, up, last_down, last_up = c[:, 1:4] + send, c[:, 4:7] + send, c[:, 7:10], c[:, 10:13]
        powers = longest ** np.arange(3)
        last = last_down + last_up
        filled = stages(down, first) + busiest(last[:, 0], last[:, 1], last[:, 2]) + stages(up, shortest)
        bound = np.maximum(filled, stages(down + up, longest) + last @ powers)
        if self.factors.logprob_pass:
            filled = stages(down, first) + busiest(last_down[:, 0], last_down[:, 1], last_down[:, 2])
            bound = bound + np.maximum(filled, stages(down, longest) + last_down @ powers)
        fixed = columns.exchange + columns.optimizer + columns.publish + self.factors.fixed_seconds
        return np.asarray((bound + fixed) * _SLACK)

    def predict(self, strategy: TrainStrategy) -> TrainPrediction:
        """Seconds of one iteration, by part; the passes of every rank are simulated."""
        s = Strategies.of([strategy])
        return self.predict_row(s, self.columns(s), 0)

    def predict_row(self, s: Strategies, columns: TrainingColumns, i: int) -> TrainPrediction:
        """`predict` of the i-th of many strategies whose ``columns`` are known: the same figures to the last bit."""
        passes, logprobs = self.batch.seconds(
            int(s.ep[i] * s.dp[i]), int(s.micro_batch[i]), columns.coefficients[i], self.factors.logprob_pass
        )
        fixed = float(columns.exchange[i]), float(columns.optimizer[i]), float(columns.publish[i])
        return TrainPrediction(logprobs, passes, *fixed, self.factors.fixed_seconds)

    def seconds(self, strategy: TrainStrategy) -> float:
        """Seconds of one iteration."""
        return self.predict(strategy).seconds
