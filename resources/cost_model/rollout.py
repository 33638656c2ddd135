"""What rollout instances cost, in seconds, per TP degree.

Between events every running sequence grows by one token a step, so a decode step of B sequences with S resident tokens
takes ``a + b·B + c·S``, and k steps integrate to ``k(a + bB + cS) + cBk²/2``. Prefill of n tokens at context x takes
``d₀ + d₁·n + d₂·n(x + n/2)``.

A set R of requests on one instance ends after

    max( longest request alone,  θ·path + work + rework )
    path   = max(P, Q + w·min(P, Q)),  P = max over R of (a·generated + tool seconds)
    Q      = a · max(Σ kvint / KV capacity, Σ generated / slots)      steps that capacity forces, in seconds
    work   = φ·Σ (b·generated + c·kvint + d₀·turns + d₁·prefill tokens + d₂·prefill pairs)
    rework = d₁·ρ·max(0, Σ context − KV capacity)                     what preemption prefills again

Each term falls or stays when R loses a request. θ, φ, w and ρ (`QueueModel`) are fitted to a discrete-event simulation
of continuous batching; the two-term form without Q and rework is known to be low near the KV limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from libra.native.partition import PartitionSolver
from libra.resources.cost_model.requests import Requests
from libra.resources.errors import ConfigError
from libra.resources.specs import HardwareSpec, ModelSpec

DEGREES = (1, 2, 4, 8)
"""TP degrees that instances may have."""
DEFAULT_SLOTS = 256
"""Sequences of one instance at once, unless an engine says otherwise."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds on one instance of TP degree ``tp``; see the module. ``capacity``: KV tokens; ``slots``: sequences."""

    tp: int
    step: float
    sequence: float
    token: float
    admission: float
    prefill_token: float
    prefill_pair: float
    capacity: float
    slots: int = DEFAULT_SLOTS

    def decode_seconds(self, sequences: float, resident: float, steps: float = 1.0) -> float:
        """``steps`` decode steps that begin with ``resident`` tokens: k(a + bB + cS) + cBk²/2."""
        at = self.step + self.sequence * sequences + self.token * resident
        return steps * at + self.token * sequences * steps * steps / 2

    def scaled(self, factor: float) -> StepCost:
        """The same instance, every time of it multiplied by ``factor``."""
        return replace(
            self, step=self.step * factor, sequence=self.sequence * factor, token=self.token * factor,
            admission=self.admission * factor, prefill_token=self.prefill_token * factor,
            prefill_pair=self.prefill_pair * factor,
        )  # fmt: skip

    def prefill_seconds(self, tokens: float, context: float = 0.0) -> float:
        """One admission that prefills ``tokens`` after ``context`` tokens of reused KV: O(n) + O(n²)."""
        return self.admission + self.prefill_token * tokens + self.prefill_pair * tokens * (context + tokens / 2)


@dataclass(frozen=True, slots=True)
class QueueModel:
    """θ (``path``), φ (``work``), w (``wave``) and ρ (``rework``) of the module's formula.

    ``overlap``: batches in flight at once (α + 1 when rollout runs α steps ahead of training). A request may then take
    that many periods, so path and alone count 1/overlap of themselves towards the period of one batch; work, and what
    capacity forces, do not shrink. At 1 the period is the makespan of one batch.

    Defaults: the least mean relative error on 70 simulated instances (four models, TP 1 to 8, 64 and 256 slots, tool
    times scaled by 0, 1 and 3); held out, on 70 others: 6.9 % mean, 24 % at most, where 1, 1, 0, 0 has 10.4 %. A
    profile's own fit replaces them.
    """

    path: float = 0.9
    work: float = 0.83
    wave: float = 1.0
    rework: float = 0.24
    overlap: float = 1.0


def step_cost(model: ModelSpec, hardware: HardwareSpec, tp: int, slots: int = DEFAULT_SLOTS) -> StepCost:
    """The costs of one TP degree, from first principles. Seconds.

    * step: W/(tp·BW) + host + [tp>1] 2·layers·latency·log₂(tp): weights are streamed once a step; two all-reduces a
      layer (Megatron-LM, arXiv:1909.08053, §3). For a mixture of experts W is the expected bytes read at B sequences,
      fitted linearly over 1…slots, so part of it falls to ``sequence``.
    * sequence: host + [tp>1] 2·layers·2(tp−1)/tp·hidden·bytes/NVLink (ring all-reduce volume).
    * token: KV bytes of one token / (min(tp, KV heads)·BW): heads are divided, then replicated; a latent vector (MLA)
      is on every rank.
    * prefill: 2·active parameters·n + 4·layers·(heads·head size)·pairs FLOPs (Kaplan et al., arXiv:2001.08361, §2.1,
      and QKᵀ and PV of causal attention) at the reached share of the peak, plus the all-reduces.
    * capacity: (tp·(share·memory − workspace) − W) / KV bytes, less what replicated heads take.
    """
    if model.query_heads % tp and tp > 1:
        raise ConfigError(f"{model.name} has {model.query_heads} query heads, which TP {tp} does not divide")
    over, nodes_ok = hardware.overhead, tp <= hardware.gpus_per_node
    if not nodes_ok:
        raise ConfigError(f"TP {tp} does not fit a node of {hardware.gpus_per_node} {hardware.name}")
    split = min(tp, model.kv_parts)
    fixed_bytes, sequence_bytes = _weight_bytes_line(model, slots)
    latency = over.all_reduce_us * 1e-6 * log2(tp)
    volume = 2 * (tp - 1) / tp * model.hidden_size * model.bytes_per_parameter / hardware.nvlink
    compute = tp * hardware.flops * hardware.efficiency.compute_prefill
    kv_bytes = model.kv_bytes_per_token
    free = tp * (hardware.memory_share * hardware.memory - hardware.workspace) - model.weight_bytes
    return StepCost(
        tp=tp,
        step=fixed_bytes / (tp * hardware.hbm) + over.step_ms * 1e-3 + 2 * model.layers * latency,
        sequence=sequence_bytes / (tp * hardware.hbm) + over.sequence_us * 1e-6 + 2 * model.layers * volume,
        token=kv_bytes / (split * hardware.hbm),
        admission=over.prefill_ms * 1e-3 + 2 * model.layers * latency,
        prefill_token=2 * model.active_parameters / compute + 2 * model.layers * volume,
        prefill_pair=4 * model.layers * model.attention_width / compute,
        capacity=max(0.0, free / kv_bytes * split / tp),
        slots=slots,
    )


def _weight_bytes_line(model: ModelSpec, slots: int) -> tuple[float, float]:
    """Bytes of weights that a step of B sequences reads, as constant + slope·B: least squares over B = 1, 2, 4, … slots
    (dense models: slope 0)."""
    if not model.is_moe:
        return model.decode_weight_bytes(1), 0.0
    batch = 2.0 ** np.arange(0, int(log2(max(slots, 2))) + 1)
    read = np.array([model.decode_weight_bytes(b) for b in batch])
    slope, constant = np.polyfit(batch, read, 1)
    return float(constant), float(max(slope, 0.0))


@dataclass(frozen=True, slots=True)
class RolloutCosts:
    """Costs of every TP degree that the model and the hardware allow, ascending, and how queueing is priced.
    ``provenance`` says where the figures come from."""

    steps: tuple[StepCost, ...]
    queue: QueueModel
    provenance: str

    @classmethod
    def from_specs(
        cls,
        model: ModelSpec,
        hardware: HardwareSpec,
        slots: int = DEFAULT_SLOTS,
        degrees: Sequence[int] = DEGREES,
        queue: QueueModel | None = None,
    ) -> RolloutCosts:
        """From first principles. Degrees that do not divide the heads, exceed a node or cannot hold the weights are
        left out; `ConfigError` when none is left."""
        steps, refused = [], []
        for tp in degrees:
            try:
                step = step_cost(model, hardware, tp, slots)
            except ConfigError as error:
                refused.append(str(error))
                continue
            if step.capacity < 1:
                refused.append(f"TP {tp} on {hardware.name} has no memory left for KV")
                continue
            steps.append(step)
        if not steps:
            raise ConfigError(f"{model.name} cannot roll out on {hardware.name}: {'; '.join(refused)}")
        return cls(tuple(steps), queue or QueueModel(), f"derived from the specs of {hardware.name} and {model.name}")

    def of(self, tp: int) -> StepCost:
        """The costs of one degree; `ConfigError` names those there are."""
        for step in self.steps:
            if step.tp == tp:
                return step
        raise ConfigError(f"no rollout cost for TP {tp}; there is TP {', '.join(str(s.tp) for s in self.steps)}")


def request_columns(requests: Requests, step: StepCost, queue: QueueModel) -> tuple[Floats, Floats, Floats]:
    """``work``, ``path`` and ``alone`` of each request on one degree, in seconds, shape (N,).

    alone = (a + b)·generated + c·kvint + prefill + tool seconds: nothing beside it, nothing queued. Path and alone are
    divided by the overlap.
    """
    prefill = (
        step.admission * requests.turns
        + step.prefill_token * requests.prefill_tokens
        + step.prefill_pair * requests.prefill_pairs
    )
    shared = step.sequence * requests.generated + step.token * requests.kvint + prefill
    path = step.step * requests.generated + requests.tool_seconds
    return queue.work * shared, path / queue.overlap, (path + shared) / queue.overlap


def partition_solver(requests: Requests, costs: RolloutCosts) -> PartitionSolver:
    """The solver for these requests; its levels are ``costs.steps``."""
    columns = [request_columns(requests, step, costs.queue) for step in costs.steps]
    work, path, alone = (np.ascontiguousarray([c[i] for c in columns]) for i in range(3))
    levels = np.array(
        [
            (s.tp, s.step, 1 / s.capacity, s.capacity, 1 / s.slots, costs.queue.rework * s.prefill_token)
            for s in costs.steps
        ]
    )
    return PartitionSolver(
        requests.context, requests.kvint, requests.generated, work, path, alone, levels,
        costs.queue.wave, costs.queue.path,
    )  # fmt: skip


def set_seconds(requests: Requests, step: StepCost, queue: QueueModel) -> float:
    """The module's formula for one instance that serves all of ``requests``, in plain Python; infinite when its KV
    cannot hold the longest one. The reference that the native evaluator is tested against."""
    if not len(requests):
        return 0.0
    if requests.context.max() > step.capacity:
        return float("inf")
    work, path, alone = request_columns(requests, step, queue)
    critical = float(path.max())
    forced = step.step * max(requests.kvint.sum() / step.capacity, requests.generated.sum() / step.slots)
    stretched = max(critical, forced + queue.wave * min(critical, forced))
    rework = queue.rework * step.prefill_token * max(0.0, requests.context.sum() - step.capacity)
    return float(max(alone.max(), queue.path * stretched + work.sum() + rework))
