"""The cold start: a small model learns an environment's protocol from imperfect demonstrations.

First the drill alone forms the copying circuit, then traces and drills together; the learning rate stays constant
until copying works (the *gate*), then falls linearly to its end. Muon trains the matrices, AdamW the rest. Invariants:
the result is a function of the config, the environment and the seed (and of threads, through rounding); a model whose
copying did not reach ``required_copy`` is never returned.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from transformers import PreTrainedModel, Qwen3Config

from libra.resources import rng
from libra.resources.config import Config
from libra.resources.errors import LibraError
from libra.tasks.algorithms.supervised import token_loss
from libra.tasks.envs.base import Demonstration, Demonstrator
from libra.tasks.models import build_model
from libra.tasks.trainers.base import Progress
from libra.tasks.trainers.micro_batches import Row, loss_logits, micro_batches


class ColdStartConfig(Config):
    """``trainer.options.cold_start``: a Qwen3 model's size, and how it is taught."""

    hidden_size: int = Field(default=128, ge=8)
    intermediate_size: int = Field(default=384, ge=8)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=2)
    max_positions: int = Field(default=2048, ge=16)
    initializer_range: float = Field(default=0.06, gt=0)
    batch: int = Field(default=48, ge=3)
    """Rows of one step."""
    micro_batch_tokens: int = Field(default=768, ge=1)
    """Padded tokens of one micro-batch."""
    drill_steps: int = Field(default=60, ge=0)
    """Steps of drill alone."""
    mixed_steps: int = Field(default=50, ge=1)
    """Steps of traces and drills (2:1) before the gate may open, and again when the result does not copy well."""
    decay_steps: int = Field(default=60, ge=1)
    """Steps over which the learning rates fall, once the gate is open."""
    max_steps: int = Field(default=500, ge=1)
    """No more attempts after these."""
    gate: float = Field(default=0.9, gt=0, lt=1)
    """Copy probability (running mean over 10 steps) that opens the gate."""
    required_copy: float = Field(default=0.95, gt=0, lt=1)
    """Copy probability that the finished model must have."""
    muon_lr: float = Field(default=0.03, gt=0)
    adam_lr: float = Field(default=0.01, gt=0)
    threads: int | None = Field(default=None, ge=1)
    """Threads of the cold start alone, while no engine runs; None: those of the trainer."""
    seed: int | None = None
    """None: the run's seed."""


@dataclass(frozen=True, slots=True)
class ColdStarted:
    """The model and how it got there: steps, tokens seen, and the final copy probability."""

    model: PreTrainedModel
    steps: int
    tokens: int
    copy_p: float


def cold_start(
    config: ColdStartConfig, demonstrator: Demonstrator, vocabulary: int, seed: int, progress: Progress
) -> ColdStarted:
    """Teach a new model. `LibraError` when it does not learn to copy."""
    torch.manual_seed(rng.stream(seed, "cold start", "weights") % 2**63)
    lessons = _Lessons(config, demonstrator, rng.generator(seed, "cold start", "lessons"))
    model = build_model(_model_config(config, vocabulary)).train()
    optimizers = _optimizers(config, model)
    copied, tokens, step = 0.0, 0, 0
    earliest, decay_from = config.drill_steps + config.mixed_steps, None
    while True:
        _set_rates(optimizers, _rate(step, decay_from, config))
        measures = _teach(model, optimizers, lessons.at(step), config.micro_batch_tokens)
        step, tokens = step + 1, tokens + measures.tokens
        copied += (1 - 0.9) * (measures.copy_p - copied)
        if step % 10 == 0:
            progress({"phase": "cold start", "step": step, "loss": measures.loss, "copy_p": copied, "tokens": tokens})
        if decay_from is None:
            if step >= earliest and copied > config.gate:
                decay_from = step
            elif step >= config.max_steps:
                raise _no_copying(copied, config.gate, step, seed)
        elif step == decay_from + config.decay_steps:
            if copied >= config.required_copy:
                return ColdStarted(model.eval(), step, tokens, copied)
            if step >= config.max_steps:
                raise _no_copying(copied, config.required_copy, step, seed)
            # Not there yet: once more at the full rate, and down again.
            earliest, decay_from = step + config.mixed_steps, None


@dataclass(frozen=True, slots=True)
class _Measures:
    loss: float
    copy_p: float
    tokens: int


class _Lessons:
    """Which demonstrations a step sees."""

    def __init__(self, config: ColdStartConfig, demonstrator: Demonstrator, source: random.Random) -> None:
        self._config, self._demonstrator, self._source = config, demonstrator, source

    def at(self, step: int) -> list[Demonstration]:
        """The rows of a step."""
        drills_only = step < self._config.drill_steps
        return [self._row(drills_only, line) for line in range(self._config.batch)]

    def _row(self, drills_only: bool, line: int) -> Demonstration:
        if drills_only:
            return self._demonstrator.drill(self._source, 6)
        if line % 3 == 0:
            return self._demonstrator.drill(self._source, self._source.choice((6, 6, 12)))
        return self._demonstrator.trace(self._source)


def _teach(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], lessons: list[Demonstration], max_tokens: int
) -> _Measures:
    """One optimizer step, and the mean probability of the tokens to be copied before it."""
    rows = [Row(demonstration.tokens, demonstration.mask) for demonstration in lessons]
    loss_tokens = sum(int(row.mask[1:].sum()) for row in rows)
    total, copied, copies = 0.0, 0.0, 0
    for batch in micro_batches(rows, max_tokens):
        logprobs = -torch.nn.functional.cross_entropy(loss_logits(model, batch), batch.targets(), reduction="none")
        loss = token_loss(logprobs, loss_tokens=loss_tokens)
        torch.autograd.backward(loss)
        total += loss.item()
        flags = [lessons[place].copies[lessons[place].mask == 1] for place in batch.rows]
        places = torch.from_numpy(np.concatenate(flags) == 1)
        copied += logprobs.detach()[places].exp().sum().item()
        copies += int(places.sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return _Measures(total, copied / max(1, copies), sum(len(row.tokens) for row in rows))


def _model_config(config: ColdStartConfig, vocabulary: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=-8 * (-vocabulary // 8),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def _optimizers(config: ColdStartConfig, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in embeddings]
    return [
        torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _rate(step: int, decay_from: int | None, config: ColdStartConfig) -> float:
    """Share of the full learning rates: ten steps up, constant, then linear down to 5 %."""
    up = min(1.0, (step + 1) / 10)
    return up if decay_from is None else up * max(0.05, 1 - (step - decay_from) / config.decay_steps)


def _set_rates(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def _no_copying(copied: float, needed: float, step: int, seed: int) -> LibraError:
    return LibraError(
        f"the cold start (seed {seed}) copies with probability {copied:.3f} after {step} steps and needs {needed}; set "
        "trainer.options.cold_start.seed to another number or raise its max_steps"
    )
