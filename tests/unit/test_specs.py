"""Specs: shipped ones against what their models' makers state, any HF config, and clear errors."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from libra.resources.cost_model import RolloutCosts
from libra.resources.errors import ConfigError
from libra.resources.specs import ModelSpec, load_cluster, load_hardware, load_model
from libra.resources.specs.files import shipped

# Total (and active) parameters as the models' cards state them.
STATED = {
    "Qwen3-0.6B": (0.596e9, None),
    "Qwen3-1.7B": (1.72e9, None),
    "Qwen3-4B": (4.02e9, None),
    "Qwen3-8B": (8.19e9, None),
    "Qwen3-14B": (14.77e9, None),
    "Qwen3-32B": (32.76e9, None),
    "Qwen3-30B-A3B": (30.53e9, 3.35e9),
    "SmolLM2-135M": (134.5e6, None),
    "quickstart": (454.4e3, None),
}


SOURCES = ("datasheet", "assumed", "published", "measured")

# config.json of checkpoints on the Hugging Face hub, what sizes do not depend on left out; and the parameters, in
# billions, that their makers state: in all, and for one token (None: dense).
HUB: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "Llama-3-8B": (
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16"},
        8.03, None,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
         "num_experts_per_tok": 2, "sliding_window": None, "torch_dtype": "bfloat16"},
        46.7, 12.9,
    ),
    "gemma-2-9b": (
        {"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
         "sliding_window": 4096, "torch_dtype": "float32"},
        9.24, None,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936,
         "decoder_sparse_step": 1, "use_sliding_window": False, "sliding_window": 32768, "torch_dtype": "bfloat16"},
        14.3, 2.7,
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "vocab_size": 102400, "torch_dtype": "bfloat16"},
        15.7, 2.4,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
         "num_experts_per_tok": 4, "experts_per_token": 4, "vocab_size": 201088, "tie_word_embeddings": False,
         "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
         "quantization_config": {"quant_method": "mxfp4"}},
        20.9, 3.6,
    ),
    "Phi-3-mini-4k": (
        {"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "tie_word_embeddings": False,
         "sliding_window": 2047, "torch_dtype": "bfloat16"},
        3.82, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_a_checkpoints_config_gives_the_parameters_that_its_maker_states(name: str, tmp_path: Path) -> None:
    config, total, active = HUB[name]
    model = from_config(tmp_path, config)
    assert model.parameters == pytest.approx(total * 1e9, rel=0.02)
    if active is None:
        assert not model.is_moe
    else:
        # Makers count none, one or both of the embeddings among the active parameters.
        embedding = model.vocabulary * model.hidden_size
        assert 0.98 * (model.active_parameters - embedding) <= active * 1e9
        assert active * 1e9 <= 1.02 * (model.active_parameters + embedding)
    assert not any("not one that was checked" in remark for remark in model.remarks)


def from_config(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)


def test_latent_kv_is_one_vector_that_every_rank_holds(tmp_path: Path) -> None:
    model = from_config(tmp_path, HUB["DeepSeek-V2-Lite"][0])
    assert model.kv_bytes_per_token == 27 * (512 + 64) * 2
    assert model.dense_layers == 1
    costs = RolloutCosts.from_specs(model, load_hardware("h100"))
    free = 0.9 * load_hardware("h100").memory - load_hardware("h100").workspace
    for tp in (1, 2, 4, 8):
        assert costs.of(tp).capacity == pytest.approx((tp * free - model.weight_bytes) / tp / model.kv_bytes_per_token)
    assert costs.of(8).token == costs.of(1).token


def test_what_is_priced_otherwise_is_said(tmp_path: Path) -> None:
    oss = from_config(tmp_path, HUB["gpt-oss-20b"][0])
    assert any("window of 128" in remark for remark in oss.remarks)
    assert any("mxfp4 are priced unquantized" in remark for remark in oss.remarks)
    llama = HUB["Llama-3-8B"][0]
    unknown = from_config(tmp_path, llama | {"model_type": "brandnew"})
    assert any("'brandnew' is not one that was checked" in remark for remark in unknown.remarks)
    assert unknown.parameters == from_config(tmp_path, llama).parameters
    nested = from_config(tmp_path, {"model_type": "vision", "tie_word_embeddings": True, "text_config": llama})
    assert nested.parameters == unknown.parameters  # what the text model says itself goes before
    assert any("only the text model" in remark for remark in nested.remarks)


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [1]}, 1),
        ({"first_k_dense_replace": 3}, 3),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 3),
    ],
)
def test_layers_with_a_dense_mlp_are_counted(keys: dict[str, Any], dense: int, tmp_path: Path) -> None:
    config = HUB["Qwen1.5-MoE-A2.7B"][0] | {"num_hidden_layers": 4}
    assert from_config(tmp_path, config | keys).dense_layers == dense


@pytest.mark.parametrize("name", STATED)
def test_parameters_follow_from_the_architecture(name: str) -> None:
    model = load_model(name)
    total, active = STATED[name]
    assert model.parameters == pytest.approx(total, rel=0.005)
    if active:
        assert model.active_parameters == pytest.approx(active, rel=0.1)
        assert model.active_parameters < model.parameters
    else:
        assert model.active_parameters <= model.parameters


def test_kv_counts_kv_heads_of_true_size() -> None:
    assert load_model("Qwen3-14B").kv_bytes_per_token == 163_840
    assert load_model("Qwen3-32B").kv_bytes_per_token == 262_144
    assert load_model("Qwen3-4B").head_dim == 128  # not 2560 / 32
    assert load_model("Qwen3-30B-A3B").head_dim == 128  # not 2048 / 32


def test_a_decode_step_of_a_mixture_reads_more_weights_in_larger_batches() -> None:
    moe, dense = load_model("Qwen3-30B-A3B"), load_model("Qwen3-14B")
    assert moe.decode_weight_bytes(1) < 0.2 * moe.weight_bytes
    assert moe.decode_weight_bytes(1) < moe.decode_weight_bytes(64) <= moe.weight_bytes
    assert dense.decode_weight_bytes(1) == dense.decode_weight_bytes(64)


@pytest.mark.parametrize("name", shipped("hardware"))
def test_shipped_hardware_is_valid_and_says_its_source(name: str) -> None:
    spec = load_hardware(name)
    assert spec.name == name
    assert spec.hbm < spec.hbm_gb_per_s * 1e9
    lines = (resources.files("libra.conf") / "hardware" / f"{name}.yaml").read_text("utf-8").splitlines()
    covered, in_block = False, False
    for line in lines:
        comment = line.startswith("#")
        if comment:  # a block of comments covers the figures down to the next one
            covered = any(word in line.lower() for word in SOURCES) or (covered and in_block)
        elif re.search(r":\s+[\d.]+", line):
            assert covered or "#" in line, f"{name}.yaml: no source for {line!r}"
        in_block = comment


def test_network_is_in_bits() -> None:
    spec = load_hardware("a800_80g")
    assert spec.network == pytest.approx(25e9 * spec.efficiency.network)


def test_every_shipped_cluster_loads() -> None:
    assert [load_cluster(name).name for name in shipped("cluster")] == shipped("cluster")


def test_any_hf_config(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
    }  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert model.name == "mine"
    assert model.parameters == load_model("Qwen3-4B").parameters
    assert model.max_context == 40960


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba", "state_size": 16}, "'mamba' model has layers that are no attention"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "has an encoder"),
        ({"kv_lora_rank": 32}, "has no 'qk_nope_head_dim'"),
        ({"num_local_experts": 4}, "has no 'num_experts_per_tok' or 'experts_per_token'"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1]}, "only a mixture has some"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_key_value_heads": 5}, "no multiple of kv_heads"),
    ],
)
def test_a_wrong_hf_config_says_what_is_wrong(tmp_path: Path, change: dict[str, object], says: str) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=says):
        load_model(tmp_path)


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(ConfigError, match="did you mean h100"):
        load_hardware("h1000")
    with pytest.raises(ConfigError, match="no model spec 'Qwen9'"):
        load_model("Qwen9")
