"""How an engine's config becomes vLLM's: its arguments, and the environment of its processes.

Invariants: vLLM's logprobs are those of the distribution that is sampled; nothing is fetched or told over the network;
vLLM takes no sampling default from a checkpoint, and no code.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from libra.resources.errors import ConfigError
from libra.tasks.engines.base import EngineConfig, Place
from libra.tasks.engines.vllm_options import HEAD_DIMS, VllmOptions, head_dim_problem
from libra.tasks.engines.vllm_scratch import Scratch
from libra.tasks.models import head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KV_SPARE_BLOCKS = 8
CONNECTOR_MODULE = "libra.tasks.engines.vllm_connector"
"""Where vLLM finds the class ``ArenaConnector``."""


def engine_arguments(
    path: str, model: PreTrainedConfig, config: EngineConfig, options: VllmOptions, place: Place
) -> Any:
    """``AsyncEngineArgs`` for the model whose published weights lie at ``path``. `ConfigError` if it cannot be run."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    _check_model(model, place.tp, on_cpu)
    memory: dict[str, Any] = {} if on_cpu else {"gpu_memory_utilization": options.gpu_memory}
    kv_cache = options.kv_cache or (_kv_bytes(model, config, options, place.tp) if on_cpu else None)
    if kv_cache is not None:
        memory["kv_cache_memory_bytes"] = kv_cache
    return AsyncEngineArgs(
        model=path,
        # Configs that no checkpoint has been saved from name no class, and vLLM would take them for embedders.
        hf_overrides={"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.model_type]]},
        skip_tokenizer_init=True,
        generation_config="vllm",
        trust_remote_code=False,
        dtype=options.dtype,
        seed=0,
        max_model_len=config.max_context,
        max_num_seqs=config.slots,
        max_num_batched_tokens=max(config.max_prefill_tokens, config.slots),
        block_size=options.block_size,
        enable_prefix_caching=True,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=place.tp,
        worker_extension_cls="libra.tasks.engines.vllm_weights.InPlaceWeights",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        kv_transfer_config=_kv_transfer(config, place),
        **memory,
    )


def set_environment(scratch: Scratch, threads: int) -> dict[str, str | None]:
    """What vLLM and its processes are to find; returns what was there before."""
    wanted: dict[str, str | None] = {
        **scratch.environment(),
        "OMP_NUM_THREADS": str(threads),
        # Cores are shared with other processes; pinned threads that wait for each other by spinning would starve.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": None,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    restore_environment(wanted)
    return before


def restore_environment(values: dict[str, str | None]) -> None:
    """Set these variables; None: unset it."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _kv_transfer(config: EngineConfig, place: Place) -> Any:
    """The connector to the worker's arena, if there is to be one."""
    if place.arena is None:
        return None
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="ArenaConnector",
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"arena": place.arena, "threads": config.threads},
    )


def _check_model(model: PreTrainedConfig, tp: int, on_cpu: bool) -> None:
    if on_cpu and head_dim(model) not in HEAD_DIMS:
        raise ConfigError(head_dim_problem(head_dim(model)))
    if model.num_attention_heads % tp:
        raise ConfigError(
            f"a bucket has tp = {tp}, but the model's {model.num_attention_heads} attention heads cannot be dealt to "
            f"{tp} ranks: use a degree that divides them"
        )


def _kv_bytes(model: PreTrainedConfig, config: EngineConfig, options: VllmOptions, tp: int) -> int:
    """Bytes a rank for ``slots`` contexts of ``max_context`` tokens, and a little more: vLLM keeps a block back."""
    size = options.block_size
    blocks = config.slots * -(-config.max_context // size) + _KV_SPARE_BLOCKS
    heads = max(1, model.num_key_value_heads // tp)
    item = 4 if options.dtype == "float32" else 2
    return blocks * size * model.num_hidden_layers * heads * 2 * head_dim(model) * item
