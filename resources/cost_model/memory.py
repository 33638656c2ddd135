"""Bytes that a training rank needs.

Invariants: more of any parallelism never needs more bytes for weights, gradients and optimizer; the weights of a
distributed optimizer's rank are whole (they are gathered), only its states are divided by the data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import Recompute, TrainStrategy

ADAM_BYTES: Final = 12
"""fp32 master weight, first and second moment of one parameter."""
GRADIENT_BYTES: Final = 4
"""fp32 main gradients."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank of the first pipeline stage, which holds the most activations."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspace


def parameters_of_rank(model: ModelSpec, strategy: TrainStrategy) -> tuple[float, float]:
    """(parameters replicated over ep·dp, expert parameters replicated over dp) of the fullest rank: its layers, and the
    embeddings of the first or last stage (one of the two matrices when there are stages)."""
    layers = model.layers / strategy.pp
    dense = layers * (model.attention_parameters + model.dense_mlp_parameters)
    embeddings = float(model.embedding_parameters)
    if strategy.pp > 1 and not model.tied_embeddings:
        embeddings = embeddings / 2
    experts = layers * model.experts * model.expert_parameters
    return (dense + embeddings) / strategy.tp, experts / (strategy.tp * strategy.ep)


def activation_bytes_per_token(model: ModelSpec, recompute: Recompute) -> float:
    """Of one layer and token, before TP: Korthikanti et al. 2022 (arXiv:2205.05198), Table 2, with the widths of gated
    MLPs and GQA and flash attention (its quadratic part is never stored).

    full: the layer's input, 2·h. selective: input, norms, q/k/v, attention output, MLP input and its three
    intermediates, in 2 bytes each; flash attention recomputes its inside anyway. none: as selective, and the outputs
    of both norms and residuals again in fp32 (mixed precision keeps them).
    """
    hidden = model.hidden_size
    if recompute == "full":
        return 2.0 * hidden
    qkv = (model.query_heads + 2 * model.kv_heads) * model.head_dim
    width = model.intermediate_size
    if model.is_moe:
        width = model.active_experts * model.expert_intermediate_size + model.shared_expert_intermediate_size
    kept = 2.0 * (4 * hidden + qkv + model.attention_width + 3 * width)
    return kept if recompute == "selective" else kept + 4.0 * 2 * hidden


def rank_memory(
    model: ModelSpec, hardware: HardwareSpec, strategy: TrainStrategy, micro_tokens: float, micro_batches: int
) -> RankMemory:
    """Bytes of the fullest rank. ``micro_tokens``: tokens of the largest micro-batch; ``micro_batches``: of a rank.

    The first of p stages keeps min(p, m) micro-batches in flight (1F1B, Narayanan et al. 2021, arXiv:2104.04473,
    §2.2). Under full recompute one layer is rematerialised at a time. Logits: bf16 logits and their fp32 softmax and
    gradient of one micro-batch, on the last stage, divided by TP; chunked to at most 8,192 tokens.
    """
    dense, experts = parameters_of_rank(model, strategy)
    count = dense + experts
    states = ADAM_BYTES * (dense / strategy.replicas + experts / strategy.dp)
    layers = model.layers / strategy.pp
    kept = layers * activation_bytes_per_token(model, strategy.recompute)
    if strategy.recompute == "full":
        kept += activation_bytes_per_token(model, "none")
    in_flight = min(strategy.pp, max(1, micro_batches))
    return RankMemory(
        weights=count * model.bytes_per_parameter,
        gradients=count * GRADIENT_BYTES,
        optimizer=states,
        activations=kept * micro_tokens * in_flight / strategy.tp,
        logits=min(micro_tokens, 8192.0) * model.vocabulary * (2 + 4 + 4) / strategy.tp,
        workspace=hardware.workspace,
    )
