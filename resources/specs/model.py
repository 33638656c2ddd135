"""What one model costs: sizes of a decoder-only transformer, and what follows from them.

Invariants: ``head_dim`` is the model's own (it is not hidden size / heads for many models); KV bytes count KV heads
(GQA), not query heads, or the latent vector (MLA) where keys and values are compressed to one; a mixture of experts has
fewer active parameters than parameters.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from libra.resources.config import Config


class LatentAttention(Config):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1): keys and values of a token and layer are kept
    as one vector of ``kv_rank`` + ``rope_dim``, the same for all heads."""

    kv_rank: int = Field(ge=1)
    rope_dim: int = Field(ge=1)
    """Of a head's query and key, rotated; beside ``plain_dim``, which is not."""
    plain_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    query_rank: int = Field(default=0, ge=0)
    """0: queries are not compressed."""

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer's projections, without norms."""
        head = self.plain_dim + self.rope_dim
        query = self.query_rank * (hidden + heads * head) if self.query_rank else hidden * heads * head
        down = hidden * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * heads * (self.plain_dim + self.value_dim)
        return query + down + up + heads * self.value_dim * hidden


class ModelSpec(Config):
    """Sizes of one model; see conf/models, or `hf.model_from_hf` for any checkpoint's ``config.json``."""

    name: str
    architecture: str
    hidden_size: int = Field(ge=1)
    layers: int = Field(ge=1)
    query_heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    """Width of the dense MLP (of the layers that have one)."""
    vocabulary: int = Field(ge=1)
    tied_embeddings: bool = False
    bytes_per_parameter: int = Field(default=2, ge=1, le=8)
    """Of weights and KV."""
    experts: int = Field(default=0, ge=0)
    active_experts: int = Field(default=0, ge=0)
    expert_intermediate_size: int = Field(default=0, ge=0)
    shared_expert_intermediate_size: int = Field(default=0, ge=0)
    """Of all shared experts of a layer together."""
    dense_layers: int = Field(default=0, ge=0)
    """Layers of a mixture that have a dense MLP instead."""
    latent: LatentAttention | None = None
    """Multi-head latent attention in place of ``kv_heads`` and ``head_dim``."""
    max_context: int | None = Field(default=None, ge=1)
    """Positions that the model was made for; None: unknown."""
    remarks: tuple[str, ...] = ()
    """What of the model is priced otherwise than it is; shown beside plans."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads {self.query_heads} is no multiple of kv_heads {self.kv_heads}")
        if self.experts and not (0 < self.active_experts <= self.experts and self.expert_intermediate_size):
            raise ValueError(
                f"with experts {self.experts}, active_experts must be 1 to {self.experts} (got {self.active_experts}) "
                f"and expert_intermediate_size above 0 (got {self.expert_intermediate_size})"
            )
        if self.dense_layers > (self.layers - 1 if self.experts else 0):
            raise ValueError(
                f"dense_layers {self.dense_layers} of {self.layers} layers: only a mixture has some, and fewer than all"
            )
        return self

    @property
    def is_moe(self) -> bool:
        """Whether layers choose among experts."""
        return self.experts > 0

    @property
    def mixture_layers(self) -> int:
        """Layers that choose among experts."""
        return self.layers - self.dense_layers if self.is_moe else 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections and the norms of the layer."""
        norms = 2 * self.hidden_size
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.query_heads) + norms
        kv = 2 * self.hidden_size * self.kv_heads * self.head_dim
        q = 2 * self.hidden_size * self.query_heads * self.head_dim
        head_norms = 2 * self.head_dim if self.architecture.startswith("qwen3") else 0
        biases = (self.query_heads + 2 * self.kv_heads) * self.head_dim if self.architecture.startswith("qwen2") else 0
        return q + kv + head_norms + biases + norms

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer (gated MLP: three matrices)."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def dense_parameters(self) -> int:
        """Of all layers: what every token passes, that is attention, dense MLPs, routers and shared experts."""
        shared = 3 * self.hidden_size * self.shared_expert_intermediate_size
        router = self.hidden_size * self.experts + shared + (self.hidden_size if shared else 0)
        mlp = 3 * self.hidden_size * self.intermediate_size
        dense = self.layers - self.mixture_layers
        return self.layers * self.attention_parameters + dense * mlp + self.mixture_layers * router

    @property
    def routed_parameters(self) -> int:
        """Of all layers: every expert that tokens are routed to."""
        return self.mixture_layers * self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Input and output embeddings and the last norm."""
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense_parameters + self.routed_parameters + self.embedding_parameters

    @property
    def active_layer_parameters(self) -> float:
        """Of one layer, on average: those that one token passes."""
        routed = self.mixture_layers * self.active_experts * self.expert_parameters
        return (self.dense_parameters + routed) / self.layers

    @property
    def active_parameters(self) -> int:
        """Those that one token passes, the output embedding included and the input embedding (a lookup) not."""
        routed = self.mixture_layers * self.active_experts * self.expert_parameters
        return self.dense_parameters + routed + self.vocabulary * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.bytes_per_parameter

    def experts_touched(self, sequences: float) -> float:
        """Experts of a layer that a decode step of ``sequences`` tokens reads, uniform routing assumed:
        E·(1 − (1 − k/E)^B), the expected number of distinct draws."""
        if not self.is_moe:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.active_experts / self.experts) ** max(sequences, 0.0))

    def decode_weight_bytes(self, sequences: float) -> float:
        """Bytes of weights that one decode step of ``sequences`` tokens reads."""
        routed = self.mixture_layers * self.experts_touched(sequences) * self.expert_parameters
        return (self.dense_parameters + routed + self.vocabulary * self.hidden_size) * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, on all devices together without replication."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim) * self.bytes_per_parameter
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_parameter

    @property
    def kv_parts(self) -> int:
        """Into how many parts KV can be divided among the ranks of an instance; more ranks hold copies. A latent vector
        serves all heads, so that every rank holds it whole."""
        return 1 if self.latent is not None else self.kv_heads

    @property
    def attention_width(self) -> float:
        """Query heads × head size (the mean of a key's and a value's): what the quadratic term of attention scales
        with."""
        if self.latent is not None:
            return self.query_heads * (self.latent.plain_dim + self.latent.rope_dim + self.latent.value_dim) / 2
        return self.query_heads * self.head_dim
