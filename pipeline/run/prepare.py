"""What can be known to be wrong with a run before it costs anything: with its config before its folder is made, with
its tokenizer and environment before its cluster is started.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from libra.pipeline.config import RunConfig
from libra.resources.cluster.devices import gpus_here
from libra.resources.durable import write_file
from libra.resources.errors import ConfigError
from libra.resources.kv.ownership import SHARED_MEMORY
from libra.resources.specs.hf import model_from_hf
from libra.scheduler_plugin.learned import POLICY_FILE, learn
from libra.scheduler_plugin.policy import load_policy
from libra.tasks.engines.vllm_options import HEAD_DIMS, head_dim_problem
from libra.tasks.envs import calls
from libra.tasks.envs.base import Environment
from libra.tasks.registry import environment_class

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The run's environment in the driver, and the tokenizer that every process of the run reads."""

    environment: Environment
    tokenizer: Path


def check_config(config: RunConfig) -> None:
    """Look at what ``config`` names, without writing anything. `ConfigError` says what is missing or damaged."""
    environment_class(config.environment.kind)
    check_policy(config)
    check_model(config)
    check_arenas(config)
    if (source := tokenizer_source(config)) is not None:
        check_tokenizer(source, _key(config))


def check_policy(config: RunConfig) -> None:
    """`ConfigError` unless the bucket policy can be made and learn from what ``policy.learn_from`` names (which a run
    that has learned itself does not read, and a scheduler elsewhere reads there)."""
    policy = load_policy(config.policy.options())
    if config.cluster.scheduler is None and not (config.run_dir / POLICY_FILE).exists():
        learn(policy, config.policy.learn_from, config.policy.learn_keep)


def check_arenas(config: RunConfig, shared: Path = SHARED_MEMORY) -> None:
    """`ConfigError` unless the KV arenas of a local cluster's instances fit together in ``shared``."""
    each, arenas = config.engine.kv_arena, len(config.degrees)
    if not each or config.cluster.scheduler is not None:
        return
    free = shutil.disk_usage(shared).free
    if each * arenas > free:
        raise ConfigError(
            f"engine.kv_arena = {each} bytes for each of {arenas} instances (buckets.*.instances) do not fit in "
            f"{shared}, which has {free} bytes free: use engine.kv_arena = {free // (2 * arenas)} or less, or enlarge "
            f"it (mount -o remount,size=… {shared}; docker: --shm-size=…)"
        )


def check_model(config: RunConfig) -> None:
    """`ConfigError` unless ``trainer.model`` is None or looks like a Hugging Face checkpoint directory."""
    if config.trainer.model is None:
        return
    folder, mend = Path(config.trainer.model), "name a Hugging Face checkpoint directory in trainer.model"
    if not folder.is_dir():
        raise ConfigError(f"the directory {folder} does not exist: {mend}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json: {mend}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no *.safetensors: {mend}")
    if config.engine.kind == "vllm":
        _check_served_by_vllm(config, folder)


def _check_served_by_vllm(config: RunConfig, folder: Path) -> None:
    """`ConfigError` unless vLLM can deal the heads of the model in ``folder`` to the ranks of every bucket, and, where
    its attention is that of CPUs, knows their size."""
    model = model_from_hf(folder)
    for index, bucket in enumerate(config.buckets):
        if model.query_heads % bucket.tp:
            raise ConfigError(
                f"buckets.{index}.tp = {bucket.tp}, but the {model.query_heads} attention heads of the model in "
                f"{folder} (trainer.model) cannot be dealt to {bucket.tp} ranks: use a degree that divides them"
            )
    on_cpus = config.cluster.scheduler is None and not gpus_here(os.environ)
    if on_cpus and model.head_dim not in HEAD_DIMS:
        raise ConfigError(f"{head_dim_problem(model.head_dim)} ({folder}, trainer.model)")


def tokenizer_source(config: RunConfig) -> Path | None:
    """The tokenizer file that ``config`` names, there or not; None: the environment has its own."""
    if config.tokenizer is not None:
        return config.tokenizer
    return None if config.trainer.model is None else Path(config.trainer.model) / TOKENIZER


def check_tokenizer(path: Path, key: str) -> int:
    """How many tokens the tokenizer at ``path`` has. `ConfigError` names the file and ``key`` if it cannot be read."""
    # Imported here: it takes a while, and help needs none.
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ConfigError(f"{key}: there is no tokenizer at {path}; name a tokenizer.json, or a directory that has one")
    try:
        return int(Tokenizer.from_file(str(path)).get_vocab_size())
    except Exception as error:  # tokenizers raises bare Exception on a damaged file
        said = " ".join(str(error).split())
        raise ConfigError(f"{key}: {path} is no tokenizer.json ({said}); name one, or leave the key out") from error


def prepare(config: RunConfig, folder: Path) -> Prepared:
    """The tokenizer under ``folder`` (made if need be) and the environment, whose first prompts are tried.

    `ConfigError` or `BrokenEnvironmentError` says what is wrong with them.
    """
    tokenizer = make_tokenizer_file(config, folder)
    check_tokenizer(tokenizer, _key(config))
    environment = calls.make_environment(config.environment, str(tokenizer), config.seed)
    check_inline(config, environment)
    calls.prompts(environment, "train")
    calls.opening(environment, "train", 0)
    if config.eval.tasks:
        calls.prompts(environment, "heldout")
        calls.opening(environment, "heldout", 0)
    return Prepared(environment, tokenizer)


def check_inline(config: RunConfig, environment: Environment) -> None:
    """`ConfigError` if the tools of ``environment`` shall run inline but its sessions cannot move with a trajectory."""
    if config.environment.inline and not environment.replayable:
        raise ConfigError(
            f"environment.inline = true but {type(environment).__name__} is not replayable: a session on a rollout "
            "worker is rebuilt wherever its trajectory goes on; use environment.inline = false"
        )


def make_tokenizer_file(config: RunConfig, folder: Path) -> Path:
    """The run's ``tokenizer.json`` under ``folder``: the configured one, the one beside ``trainer.model``, or the
    environment's own. `ConfigError` if a named one is missing."""
    target = folder / TOKENIZER
    if target.exists():
        return target
    source = tokenizer_source(config)
    if source is None:
        text = calls.own_tokenizer(config.environment)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(target, text.encode())
        return target
    check_tokenizer(source, _key(config))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


def _key(config: RunConfig) -> str:
    """The config key that decides the tokenizer, for errors."""
    if config.tokenizer is not None:
        return "tokenizer"
    return "environment.kind" if config.trainer.model is None else "trainer.model"
