"""Bytes that training ranks need, for many strategies at once.

Invariants: more of any parallelism never needs more bytes for weights, gradients and optimizer; the weights of a
distributed optimizer's rank are whole (they are gathered), only its states are divided by the data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.resources.cost_model.strategies import RECOMPUTE, Strategies
from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import Recompute

ADAM_BYTES: Final = 12
"""fp32 master weight, first and second moment of one parameter."""
GRADIENT_BYTES: Final = 4
"""fp32 main gradients."""
LOGIT_TOKENS: Final = 8192
"""Tokens whose logits exist at once at most (trainers chunk the loss)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RankMemory:
    """Bytes of one rank of the first pipeline stage, which holds the most activations; shape (N,) each."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    workspace: float

    @property
    def total(self) -> Floats:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspace


def parameters_of_rank(model: ModelSpec, s: Strategies) -> tuple[Floats, Floats]:
    """(parameters replicated over ep·dp, expert parameters replicated over dp) of the fullest rank: its layers, and the
    embeddings of the first or last stage (one of the two matrices when there are stages)."""
    dense = model.dense_parameters / s.pp
    halved = (s.pp > 1) & (not model.tied_embeddings)
    embeddings = model.embedding_parameters / np.where(halved, 2, 1)
    experts = model.routed_parameters / s.pp
    return (dense + embeddings) / s.tp, experts / (s.tp * s.ep)


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
    model: ModelSpec, hardware: HardwareSpec, s: Strategies, micro_tokens: Floats, micro_batches: NDArray[Any]
) -> RankMemory:
    """Bytes of the fullest rank. ``micro_tokens``: tokens of the largest micro-batch; ``micro_batches``: of a rank.

    * weights: 2 bytes (bf16) a parameter of the rank, whole: ZeRO stage 1 divides the states alone (Rajbhandari et al.
      2020, arXiv:1910.02054, §5.1).
    * gradients: 4 bytes (fp32, accumulated over micro-batches), whole too; Megatron-LM's default for bf16 training.
    * optimizer: 12 bytes (fp32 master weight and Adam's two moments; arXiv:1910.02054, §3.1, K = 12), divided by the
      ranks that hold the same parameters: ep·dp for dense ones, dp for experts.
    * activations: `activation_bytes_per_token` · layers of the stage · tokens · micro-batches in flight / tp (sequence
      parallelism, arXiv:2205.05198, §4.2). The first of p stages keeps min(p, m) micro-batches in flight (1F1B,
      Narayanan et al. 2021, arXiv:2104.04473, §2.2). Under full recompute one layer is rematerialised at a time.
    * logits: bf16 logits, and their fp32 softmax and gradient (2 + 4 + 4 bytes), of one micro-batch on the last stage,
      divided by TP (vocabulary parallel, arXiv:1909.08053, §3); chunked to at most `LOGIT_TOKENS` tokens.
    * workspace: context, communication buffers and fragmentation; assumed (conf/hardware).

    The first stage's activations and the last stage's logits are added although they lie on different ranks when there
    are stages: the estimate is at or above the fullest rank.
    """
    dense, experts = parameters_of_rank(model, s)
    count = dense + experts
    per_layer = np.array([activation_bytes_per_token(model, policy) for policy in RECOMPUTE])
    rematerialised = np.where(s.recompute == RECOMPUTE.index("full"), per_layer[0], 0.0)
    kept = model.layers / s.pp * per_layer[s.recompute] + rematerialised
    in_flight = np.minimum(s.pp, np.maximum(1, micro_batches))
    return RankMemory(
        weights=count * model.bytes_per_parameter,
        gradients=count * GRADIENT_BYTES,
        optimizer=ADAM_BYTES * (dense / s.replicas + experts / s.dp),
        activations=kept * micro_tokens * in_flight / s.tp,
        logits=np.minimum(micro_tokens, LOGIT_TOKENS) * model.vocabulary * (2 + 4 + 4) / s.tp,
        workspace=hardware.workspace,
    )
