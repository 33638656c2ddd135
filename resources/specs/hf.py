"""Where model specs come from: spec files, and Hugging Face checkpoints by their ``config.json``.

A config's keys are read by what they mean, not by a list of architectures: a decoder with gated MLPs, grouped or latent
attention, and experts in some layers. Invariants: what the cost model cannot describe is refused by name; what it
prices otherwise than the model is, is a remark of the spec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from libra.resources.errors import ConfigError
from libra.resources.specs import files
from libra.resources.specs.model import ModelSpec

_KNOWN = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "gemma", "gemma2", "gemma3_text", "phi3", "qwen3_moe",
    "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss",
)  # fmt: skip
"""Types whose parameters were compared with what their makers state."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_OTHER_LAYERS = ("ssm_cfg", "mamba_d_state", "state_size", "linear_num_key_heads", "attn_layer_period")
"""Keys of models whose layers are (partly) no attention."""
_FROM_ABOVE = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""What a model of several modalities says outside of its ``text_config``."""


def load_model(name: str | Path) -> ModelSpec:
    """A shipped spec by name, a spec file (YAML), or a checkpoint (directory or ``config.json``). `ConfigError`."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return model_from_hf(path)
    source, data = files.read(name, "models", "model spec")
    return files.parse(ModelSpec, data, source)


def model_from_hf(path: str | Path) -> ModelSpec:
    """The spec of the checkpoint whose ``config.json`` ``path`` is, or the directory that holds it.

    Raises `ConfigError` for a missing file, a missing key, or an architecture that this cost model does not describe.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read a model config from {file}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds {type(config).__name__}, not a model's config")
    reader = _Reader(config, str(file))
    return files.parse(ModelSpec, reader.spec(file.parent.name or reader.kind), str(file))


class _Reader:
    """One config: what its keys say of a `ModelSpec`."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.source, self.remarks = source, list[str]()
        text = config.get("text_config")
        self.config = config
        if isinstance(text, dict):
            self.config = {key: config[key] for key in _FROM_ABOVE if key in config} | text
            self.remarks.append("only the text model is priced, not what encodes other modalities")
        self.kind = str(self.config.get("model_type") or config.get("model_type") or "")

    def spec(self, name: str) -> dict[str, Any]:
        """The mapping of a `ModelSpec`."""
        self._refuse()
        self._remark()
        hidden, heads = self._need("hidden_size"), self._need("num_attention_heads")
        dtype = self.config.get("dtype", self.config.get("torch_dtype"))
        data = {
            "name": name,
            "architecture": self.kind,
            "hidden_size": hidden,
            "layers": self._need("num_hidden_layers"),
            "query_heads": heads,
            "kv_heads": self.config.get("num_key_value_heads") or heads,
            "head_dim": self.config.get("head_dim") or hidden // heads,
            "intermediate_size": self._need("intermediate_size"),
            "vocabulary": self._need("vocab_size"),
            # Configs leave out what is their class's default: only Gemma's and Cohere's classes tie by default.
            "tied_embeddings": bool(self.config.get("tie_word_embeddings", self.kind.startswith(("gemma", "cohere")))),
            "bytes_per_parameter": 4 if str(dtype) == "float32" else 2,
            "max_context": self.config.get("max_position_embeddings"),
        }
        if self.config.get("kv_lora_rank"):
            data |= self._latent(heads)
        if self._first("num_experts", "num_local_experts", "n_routed_experts"):
            data |= self._experts(data["layers"])
        return data | {"remarks": tuple(self.remarks)}

    def _refuse(self) -> None:
        config = self.config
        kinds = sorted(set(config.get("layer_types") or ()) - set(_ATTENTION))
        kinds += [key for key in _OTHER_LAYERS if config.get(key)]
        if kinds:
            raise ConfigError(
                f"{self.source}: a {self.kind!r} model has layers that are no attention ({', '.join(kinds)}), which "
                "the cost model does not describe; write a spec by hand (conf/models) if attention alone is near enough"
            )
        if config.get("is_encoder_decoder"):
            raise ConfigError(
                f"{self.source}: a {self.kind!r} model has an encoder; the cost model describes decoder-only models"
            )

    def _remark(self) -> None:
        config = self.config
        if self.kind not in _KNOWN:
            self.remarks.append(
                f"model_type {self.kind!r} is not one that was checked; taken for a decoder with gated MLPs"
            )
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            self.remarks.append(
                f"layers with a window of {config['sliding_window']:,} tokens are priced as if they kept all KV"
            )
        if quantized := config.get("quantization_config"):
            method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
            self.remarks.append(f"weights quantized by {method} are priced unquantized, as they are trained")

    def _latent(self, heads: int) -> dict[str, Any]:
        plain, rope = self._need("qk_nope_head_dim"), self._need("qk_rope_head_dim")
        latent = {
            "kv_rank": self._need("kv_lora_rank"),
            "rope_dim": rope,
            "plain_dim": plain,
            "value_dim": self._need("v_head_dim"),
            "query_rank": self.config.get("q_lora_rank") or 0,
        }
        return {"latent": latent, "kv_heads": heads, "head_dim": plain + rope}

    def _experts(self, layers: int) -> dict[str, Any]:
        width = self._need("moe_intermediate_size", "intermediate_size")
        shared = self.config.get("shared_expert_intermediate_size") or width * (self._first("n_shared_experts") or 0)
        return {
            "experts": self._need("num_experts", "num_local_experts", "n_routed_experts"),
            "active_experts": self._need("num_experts_per_tok", "experts_per_token"),
            "expert_intermediate_size": width,
            "shared_expert_intermediate_size": shared,
            "dense_layers": sum(not self._has_experts(layer) for layer in range(layers)),
        }

    def _has_experts(self, layer: int) -> bool:
        config = self.config
        if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
            return False
        if layer % (config.get("moe_layer_freq") or 1):
            return False
        return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0

    def _first(self, *keys: str) -> Any:
        return next((self.config[key] for key in keys if self.config.get(key) is not None), None)

    def _need(self, *keys: str) -> Any:
        found = self._first(*keys)
        if found is None:
            raise ConfigError(
                f"{self.source} has no {' or '.join(map(repr, keys))}; a {self.kind!r} model's must say it"
            )
        return found
