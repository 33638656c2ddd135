"""The training rank that runs in one process: GRPO on a Hugging Face model in float32.

Invariants: those of the seam; advantages are taken within a trajectory's group over the members in the batch; the loss
is divided once by the batch's loss tokens; the order of the batch's rows decides the order of sums, nothing else does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from libra.resources.batches import BatchReader
from libra.resources.config import Config
from libra.resources.config_errors import checked_options
from libra.resources.errors import ConfigError, StoreError
from libra.resources.types import Trajectory, WeightVersion
from libra.resources.weights import publish_weights
from libra.tasks.algorithms.base import AlgorithmConfig, group_advantages
from libra.tasks.algorithms.grpo import TokenLoss, token_loss
from libra.tasks.envs.base import Environment
from libra.tasks.models import (
    CONFIG_FILE,
    check_vocabulary,
    config_bytes,
    load_checkpoint,
    read_config,
    tensors_of,
)
from libra.tasks.trainers import cold_cache
from libra.tasks.trainers.base import BatchRef, Progress, Trainer, TrainerConfig
from libra.tasks.trainers.cold_start import ColdStartConfig, cold_start
from libra.tasks.trainers.micro_batches import Row, loss_logits, micro_batches

OPTIMIZER_FILE = "optimizer.pt"
MEASURES_FILE = "cold_start.json"


class TorchTrainerOptions(Config):
    """``trainer.options`` of the torch trainer."""

    cold_start: ColdStartConfig = Field(default_factory=ColdStartConfig)


class TorchTrainer(Trainer):
    """One rank; the model is there after `initialise` or `restore`."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        environment: Environment,
        tokenizer_path: str,
        seed: int,
        cache_dir: Path,
        deterministic: bool,
    ) -> None:
        self.options = checked_options(TorchTrainerOptions, "trainer.options", "torch", config.options)
        torch.set_num_threads(config.threads)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        self.version = -1
        self.config, self.algorithm = config, algorithm
        self._environment, self._tokenizer_path = environment, tokenizer_path
        self._seed, self._cache_dir = seed, cache_dir
        self._model: PreTrainedModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model in training."""
        assert self._model is not None, "call initialise or restore first"
        return self._model

    # -- the seam -------------------------------------------------------------------------------------------------

    def initialise(self, progress: Progress) -> dict[str, Any]:
        began = time.monotonic()
        if self.config.model is not None:
            directory = Path(self.config.model)
            self._take(load_checkpoint(directory, read_config(directory)))
            source: dict[str, Any] = {"source": f"checkpoint {directory}"}
        else:
            source = self._cold_start(progress)
        self.version = 0
        return source | {"seconds": time.monotonic() - began}

    def train(self, batch: BatchRef) -> dict[str, float]:
        began = time.monotonic()
        measures = self.update(BatchReader(Path(batch.path)).trajectories(batch.rows))
        return measures | {"seconds": time.monotonic() - began}

    def publish(self, directory: Path) -> WeightVersion:
        files = {CONFIG_FILE: config_bytes(self.model.config)}
        return publish_weights(directory, self.version, tensors_of(self.model), files)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        self._save_tokenizer(directory)
        assert self._optimizer is not None
        state = {"version": self.version, "optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, directory / OPTIMIZER_FILE)

    def restore(self, directory: Path) -> None:
        path = directory / OPTIMIZER_FILE
        if not path.is_file():
            raise StoreError(f"the checkpoint {directory} holds no {OPTIMIZER_FILE}; resume from another checkpoint")
        try:
            model = load_checkpoint(directory, read_config(directory))
        except ConfigError as error:
            raise StoreError(f"the checkpoint {directory} is damaged: {error}") from error
        state = torch.load(path, weights_only=True)
        self._take(model)
        assert self._optimizer is not None
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.version = int(state["version"])

    # -- one step -------------------------------------------------------------------------------------------------

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One optimizer step on ``trajectories``; the measures of `train` but for its seconds."""
        assert self._optimizer is not None
        measures = self.accumulate(trajectories)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.algorithm.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        return measures | {"grad_norm": float(norm)}

    def accumulate(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Add the batch's gradient to the parameters', and measure it."""
        if any(t.mask[0] for t in trajectories):
            raise ValueError("a trajectory's first token is sampled; it has no context to be sampled from")
        advantages = _advantages(trajectories)
        loss_tokens = sum(t.sampled for t in trajectories)
        sums = _Sums()
        for batch in micro_batches([Row(t.tokens, t.mask) for t in trajectories], self.config.micro_batch_tokens):
            sampled = _sampled([trajectories[place] for place in batch.rows])
            weights = np.repeat(advantages[list(batch.rows)], sampled.counts)
            distribution = torch.log_softmax(loss_logits(self.model, batch, self.algorithm.temperature), dim=-1)
            logprobs = distribution.gather(1, batch.targets()[:, None])[:, 0]
            result = token_loss(
                logprobs,
                sampled.logprobs,
                torch.from_numpy(weights.astype(np.float32)),
                clip_low=self.algorithm.clip_low,
                clip_high=self.algorithm.clip_high,
                loss_tokens=loss_tokens,
            )
            torch.autograd.backward(result.loss)
            gaps = (logprobs.detach() - sampled.logprobs).abs()[torch.from_numpy(sampled.versions == self.version)]
            sums.add(result, distribution.detach(), gaps)
        return sums.measures(loss_tokens)

    # -- the model ------------------------------------------------------------------------------------------------

    def _take(self, model: PreTrainedModel) -> None:
        """Train this model from now on."""
        tokens = Tokenizer.from_file(self._tokenizer_path).get_vocab_size()
        check_vocabulary(model.config.vocab_size, self._tokenizer_path, tokens)
        self._model = model.train()
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self.algorithm.lr,
            betas=self.algorithm.betas,
            weight_decay=self.algorithm.weight_decay,
            fused=True,
        )

    def _cold_start(self, progress: Progress) -> dict[str, Any]:
        """The cold-started model, from the cache or made now."""
        options = self.options.cold_start
        seed = self._seed if options.seed is None else options.seed
        threads = options.threads or self.config.threads
        demonstrator = self._environment.demonstrator()
        tokenizer = Tokenizer.from_file(self._tokenizer_path)
        settings = {
            "options": options.model_dump(mode="json"),
            "environment": self._environment.config.model_dump(mode="json"),
            "seeds": [seed, self._seed],
            "threads": threads,
            "tokenizer": tokenizer.to_str(),
            "torch": torch.__version__,
        }
        key = cold_cache.cache_key([cold_start, self._environment, demonstrator], settings)
        found = cold_cache.find(self._cache_dir, key)
        if found is None:
            built = self._workspace(key)
            torch.set_num_threads(threads)
            try:
                made = cold_start(options, demonstrator, tokenizer.get_vocab_size(), seed, progress)
            except BaseException:
                built.rmdir()
                raise
            torch.set_num_threads(self.config.threads)
            made.model.save_pretrained(built)
            measures = {"cold_start_steps": made.steps, "cold_start_tokens": made.tokens, "copy_p": made.copy_p}
            (built / MEASURES_FILE).write_text(json.dumps(measures))
            entry, source = cold_cache.keep(self._cache_dir, key, built), "cold start"
        else:
            entry, source = found, "cold start, cached"
        self._take(load_checkpoint(entry, read_config(entry)))
        return {"source": source, "cache": str(entry)} | json.loads((entry / MEASURES_FILE).read_text())

    def _workspace(self, key: str) -> Path:
        """Where a cold start is kept, asked for before it is made. `ConfigError` if it cannot be."""
        try:
            return cold_cache.workspace(self._cache_dir, key)
        except OSError as error:
            raise ConfigError(
                f"the cold start cannot be kept in {self._cache_dir}: {error.strerror}; name a folder that can be "
                "written in LIBRA_CACHE_DIR"
            ) from error

    def _save_tokenizer(self, directory: Path) -> None:
        """Tokenizer files in Hugging Face's format."""
        if self.config.model is not None:
            AutoTokenizer.from_pretrained(self.config.model, trust_remote_code=False).save_pretrained(directory)
            return
        tokenizer = Tokenizer.from_file(self._tokenizer_path)
        end = tokenizer.id_to_token(self._environment.stop[0])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end).save_pretrained(directory)


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """The loss tokens of some trajectories, flat, and how many each has."""

    logprobs: torch.Tensor
    versions: NDArray[np.int32]
    counts: list[int]


def _sampled(trajectories: Sequence[Trajectory]) -> _Sampled:
    masks = [t.mask == 1 for t in trajectories]
    pairs = list(zip(trajectories, masks, strict=True))
    return _Sampled(
        torch.from_numpy(np.concatenate([t.logprobs[mask] for t, mask in pairs])),
        np.concatenate([t.versions[mask] for t, mask in pairs]),
        [int(mask.sum()) for mask in masks],
    )


def _advantages(trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    """Each trajectory's advantage within its group, shape (n,)."""
    groups: dict[int, list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.id.group, []).append(place)
    advantages = np.zeros(len(trajectories))
    for places in groups.values():
        advantages[places] = group_advantages([_reward(trajectories[place]) for place in places])
    return advantages


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.id} has no reward ({trajectory.failure}); it must not be in a batch")
    return trajectory.reward


@dataclass(slots=True)
class _Sums:
    """Running sums over a batch's loss tokens."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    gap: float = 0.0
    gap_max: float = 0.0
    gap_tokens: int = 0

    @torch.no_grad()
    def add(self, result: TokenLoss, distribution: torch.Tensor, gaps: torch.Tensor) -> None:
        """A micro-batch: its loss, its log-distributions (m, vocabulary), and |Δlogprob| where the trained version
        sampled."""
        self.loss += result.loss.item()
        self.entropy -= (distribution.exp() * distribution).sum().item()
        self.clipped += int(result.clipped.sum())
        self.gap_tokens += len(gaps)
        if len(gaps):
            self.gap += gaps.sum().item()
            self.gap_max = max(self.gap_max, gaps.max().item())

    def measures(self, loss_tokens: int) -> dict[str, float]:
        """The batch's measures."""
        return {
            "loss": self.loss,
            "entropy": self.entropy / loss_tokens,
            "clip_share": self.clipped / loss_tokens,
            "logprob_gap_mean": self.gap / max(1, self.gap_tokens),
            "logprob_gap_max": self.gap_max,
            "logprob_gap_tokens": float(self.gap_tokens),
            "loss_tokens": float(loss_tokens),
        }
