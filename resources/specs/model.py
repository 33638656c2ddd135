"""What one model costs: sizes of a decoder-only transformer, and what follows from them.

Invariants: ``head_dim`` is the model's own (it is not hidden size / heads for many models); KV bytes count KV heads
(GQA), not query heads; a mixture of experts has fewer active parameters than parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from libra.resources.config import Config
from libra.resources.errors import ConfigError
from libra.resources.specs import files

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "gemma", "phi3")
_MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")


class ModelSpec(Config):
    """Sizes of one model; see conf/models, or `model_from_hf` for any checkpoint's ``config.json``."""

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
    max_context: int | None = Field(default=None, ge=1)
    """Positions that the model was made for; None: unknown."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads {self.query_heads} is no multiple of kv_heads {self.kv_heads}")
        if self.experts and not (0 < self.active_experts <= self.experts and self.expert_intermediate_size):
            raise ValueError(
                f"with experts {self.experts}, active_experts must be 1 to {self.experts} (got {self.active_experts}) "
                f"and expert_intermediate_size above 0 (got {self.expert_intermediate_size})"
            )
        return self

    @property
    def is_moe(self) -> bool:
        """Whether layers choose among experts."""
        return self.experts > 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections and the norms of the layer."""
        kv = 2 * self.hidden_size * self.kv_heads * self.head_dim
        q = 2 * self.hidden_size * self.query_heads * self.head_dim
        head_norms = 2 * self.head_dim if self.architecture.startswith("qwen3") else 0
        biases = (self.query_heads + 2 * self.kv_heads) * self.head_dim if self.architecture.startswith("qwen2") else 0
        return q + kv + head_norms + biases + 2 * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer (gated MLP: three matrices)."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def dense_mlp_parameters(self) -> int:
        """Of one layer: the MLP that every token passes (the router and shared expert of a mixture)."""
        if not self.is_moe:
            return 3 * self.hidden_size * self.intermediate_size
        shared = 3 * self.hidden_size * self.shared_expert_intermediate_size
        return self.hidden_size * self.experts + shared + (self.hidden_size if shared else 0)

    @property
    def embedding_parameters(self) -> int:
        """Input and output embeddings and the last norm."""
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2) + self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Of one layer, every expert included."""
        return self.attention_parameters + self.dense_mlp_parameters + self.experts * self.expert_parameters

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token passes, the output embedding included and the input embedding (a lookup) not."""
        per_layer = self.attention_parameters + self.dense_mlp_parameters + self.active_experts * self.expert_parameters
        return self.layers * per_layer + self.vocabulary * self.hidden_size

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
        dense = self.layers * (self.attention_parameters + self.dense_mlp_parameters)
        routed = self.layers * self.experts_touched(sequences) * self.expert_parameters
        return (dense + routed + self.vocabulary * self.hidden_size) * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, on all devices together without replication."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_parameter

    @property
    def attention_width(self) -> int:
        """Query heads × head size: what the quadratic term of attention scales with."""
        return self.query_heads * self.head_dim


def model_from_hf(path: str | Path) -> ModelSpec:
    """The spec of a Hugging Face checkpoint: ``path`` is its ``config.json`` or the directory that holds it.

    Raises `ConfigError` for a missing file, a missing key, or an architecture that this cost model does not describe.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read a model config from {file}: {error}") from None
    config = config.get("text_config", config)
    kind = str(config.get("model_type", ""))
    if kind not in _DENSE + _MOE:
        raise ConfigError(
            f"{file}: model_type {kind!r} is not described by the cost model; it knows {', '.join(_DENSE + _MOE)}. "
            "Write a spec by hand (see conf/models) if its layers are those of one of them"
        )
    name = file.parent.name or kind
    data = _translate(config, str(file), name, kind)
    return files.parse(ModelSpec, data, str(file))


def _translate(config: dict[str, Any], source: str, name: str, kind: str) -> dict[str, Any]:
    def need(*keys: str) -> Any:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        raise ConfigError(f"{source} has no {keys[0]!r}; a {kind} model's config must say it")

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    data = {
        "name": name,
        "architecture": kind,
        "hidden_size": hidden,
        "layers": need("num_hidden_layers"),
        "query_heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "intermediate_size": need("intermediate_size"),
        "vocabulary": need("vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bytes_per_parameter": 4 if str(config.get("dtype", config.get("torch_dtype"))) == "float32" else 2,
        "max_context": config.get("max_position_embeddings"),
    }
    if kind in _MOE:
        data |= {
            "experts": need("num_experts", "num_local_experts"),
            "active_experts": need("num_experts_per_tok"),
            "expert_intermediate_size": need("moe_intermediate_size", "intermediate_size"),
            "shared_expert_intermediate_size": config.get("shared_expert_intermediate_size") or 0,
        }
    return data


def load_model(name: str | Path) -> ModelSpec:
    """A shipped spec by name, a spec file (YAML), or a checkpoint (directory or ``config.json``). `ConfigError`."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return model_from_hf(path)
    source, data = files.read(name, "models", "model spec")
    return files.parse(ModelSpec, data, source)
