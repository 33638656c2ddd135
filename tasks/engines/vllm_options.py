"""Options of the kind ``vllm``, and what about a run they rule out. Imports no vLLM.

Invariant: sampling that would make a token's logprob another than that of the distribution that the trainer computes —
the whole vocabulary at the request's temperature — cannot be configured; who tries is told which key and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from libra.resources.config import Bytes, Config
from libra.resources.errors import ConfigError
from libra.tasks.engines.base import EngineConfig, parse_options

CUTTING = ("top_p", "top_k", "min_p", "typical_p", "allowed_token_ids", "bad_words", "logits_processors", "min_tokens")
SHIFTING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
ELSEWHERE = {
    "temperature": "algorithm.temperature and eval.temperature",
    "logprobs_mode": "nothing: logprobs are always those of the sampled distribution",
    "seed": "seed",
    "stop": "the environment",
    "max_tokens": "environment.max_turn_tokens",
    "max_model_len": "engine.max_context",
    "max_num_seqs": "engine.slots",
    "max_num_batched_tokens": "engine.max_prefill_tokens",
    "tensor_parallel_size": "buckets.*.tp",
    "model": "the trainer's published weights",
}
"""Options of vLLM that another key of the run decides."""
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that vLLM's attention on CPUs knows."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones above 0 to this."""


class VllmOptions(Config):
    """``engine.options`` of the kind ``vllm``; all else follows from the run."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and KV in the engine. Logprobs differ from a float32 trainer's by its rounding."""
    block_size: int = Field(default=32, ge=8, multiple_of=8)
    """Tokens of a KV block; prefixes are reused in whole blocks. On CPUs a multiple of 32."""
    kv_cache: Bytes | None = Field(default=None, gt=0)
    """Bytes of KV on each rank; None: on CPUs what ``engine.slots`` contexts of ``engine.max_context`` tokens take, on
    GPUs what ``gpu_memory`` leaves."""
    gpu_memory: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory for weights and KV."""
    enforce_eager: bool = True
    """False: compile the model and capture CUDA graphs; starts take minutes longer."""

    @model_validator(mode="before")
    @classmethod
    def _only_the_whole_distribution(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, dict) else ():
            if key in CUTTING or key in SHIFTING:
                how = "cuts tokens out of" if key in CUTTING else "shifts"
                raise ValueError(
                    f"engine.options.{key} = {value!r} {how} the distribution that is sampled, and the trainer's "
                    "logprobs are of the whole one: leave it out"
                )
            if key in ELSEWHERE:
                raise ValueError(f"engine.options.{key} = {value!r} is decided by {ELSEWHERE[key]}: leave it out")
        return data


def vllm_problems(
    config: EngineConfig, *, deterministic: bool, temperatures: Mapping[str, float], head_dim: int | None
) -> list[str]:
    """What keeps this engine from a run: one line each, naming the key. ``temperatures``: by the key that sets them;
    ``head_dim``: of the model, if it is known (on CPUs only some can be run)."""
    problems = []
    try:
        parse_options(VllmOptions, config)
    except ConfigError as error:
        problems.append(str(error))
    if deterministic:
        problems.append(
            "deterministic = true but engine.kind = 'vllm', whose results depend, in their last bits, on what runs "
            "beside them: use engine.kind = 'torch'"
        )
    problems += [problem for key, value in temperatures.items() if (problem := temperature_problem(key, value))]
    if head_dim is not None and head_dim not in HEAD_DIMS:
        problems.append(head_dim_problem(head_dim))
    return problems


def temperature_problem(key: str, value: float) -> str | None:
    """Why vLLM does not sample at this temperature, which ``key`` sets; None if it does."""
    if not 0 < value < LEAST_TEMPERATURE:
        return None
    return (
        f"{key} = {value} but engine.kind = 'vllm', which samples at no temperature between 0 and "
        f"{LEAST_TEMPERATURE}: use 0 (greedy) or at least {LEAST_TEMPERATURE}"
    )


def head_dim_problem(head_dim: int) -> str:
    """Why a model with this head dimension runs on no vLLM engine here."""
    known = ", ".join(map(str, HEAD_DIMS))
    return (
        f"the model has head_dim {head_dim}, which vLLM's attention on CPUs does not know ({known} it does): use a "
        "model with one of these, or engine.kind = 'torch'"
    )
