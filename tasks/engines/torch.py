"""The embedded engine: a Hugging Face model with continuous batching over a dense slot cache.

Each step is one forward: the token sampled last of every decoding sequence and a bounded number of prompt tokens of the
prefilling ones, as one flat row. Invariants: those of the seam; a running sequence is never evicted; in a deterministic
run every sequence has forwards of its own and prefills its whole context, so its tokens depend, bit for bit, on the
weights, the context and the stream alone.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from libra.resources.errors import WeightError
from libra.resources.types import Finish, KVRoom, WeightVersion
from libra.resources.weights import load_weights
from libra.tasks.engines.base import (
    ALONE,
    Engine,
    EngineConfig,
    EngineStats,
    Generated,
    GenerateRequest,
    Place,
    check_ids,
)
from libra.tasks.engines.sampling import sample
from libra.tasks.engines.slot_cache import ATTENTION, ForwardPlan, SlotCache, plan_forward
from libra.tasks.engines.slot_table import Resident, Running, SlotTable
from libra.tasks.models import build_model, copy_tensors, read_served_config


class TorchEngine(Engine):
    """Runs any Qwen3 or Llama checkpoint in float32; the model comes with the first `load`."""

    def __init__(
        self, config: EngineConfig, *, tokenizer_path: str | None, deterministic: bool, place: Place = ALONE
    ) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self.version = -1
        self._tokenizer_path = tokenizer_path
        self._deterministic = deterministic
        self._model: PreTrainedModel | None = None
        self._cache: SlotCache | None = None
        self._table = SlotTable(config.slots, config.max_context, self._swap)
        self._waiting: deque[Running] = deque()
        self._requests: dict[str, tuple[Running, Resident | None]] = {}
        self._ended: list[Generated] = []
        self._sampled = self._prefilled = self._reused = self._steps = 0

    # -- the seam -------------------------------------------------------------------------------------------------

    def load(self, weights: WeightVersion) -> None:
        if weights.version == self.version:
            return
        tensors = load_weights(weights)
        model, cache = (self._model, self._cache) if self._model is not None else self._build(weights)
        copy_tensors(model, tensors, weights.path)
        self._model, self._cache, self.version = model, cache, weights.version
        self._table.forget_all()

    def submit(self, request: GenerateRequest) -> None:
        if self._model is None:
            raise WeightError(f"request {request.id} came before any weights; load a version first")
        if request.max_new < 1 or not 0 < len(request.tokens) < self.config.max_context:
            raise ValueError(
                f"request {request.id} has {len(request.tokens)} tokens of context and asks for {request.max_new} new "
                f"ones; the engine holds {self.config.max_context} tokens a sequence (engine.max_context)"
            )
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is running already; an id names one request")
        check_ids(request, self._model.config.vocab_size)
        work = Running(request)
        self._waiting.append(work)
        self._requests[request.id] = work, None

    def abort(self, request: str) -> None:
        if request not in self._requests:
            return
        work, resident = self._requests[request]
        if resident is None:
            self._waiting.remove(work)
            work.queued = perf_counter() - work.submitted
        else:
            self._table.finish(resident, keep=False)
        self._end(work, "abort")

    def release(self, sequence: str) -> None:
        resident = self._table.find(sequence)
        if resident is None:
            return
        if resident.work is None:
            self._table.drop(resident)
        else:
            resident.released = True

    def step(self) -> list[Generated]:
        self._admit()
        if self._table.running:
            self._steps += 1
            decoders, prefillers = self._table.decoders(), self._table.prefillers()
            if self._deterministic:
                for resident in decoders + prefillers:
                    self._advance([[resident]])
            else:
                self._advance([decoders, self._fit(prefillers)])
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> EngineStats:
        residents = self._table.residents()
        return EngineStats(
            running=self._table.running,
            waiting=len(self._waiting),
            resident_sequences=len(residents),
            resident_tokens=sum(r.cached for r in residents),
            sampled=self._sampled,
            prefilled=self._prefilled,
            reused=self._reused,
            steps=self._steps,
        )

    @property
    def busy(self) -> bool:
        return bool(self._table.running or self._waiting or self._ended)

    # -- one step -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests slots: first those whose KV is there, so that nobody evicts it just before, then the
        others in order."""
        for work in sorted(self._waiting, key=lambda work: self._table.find(work.request.sequence) is None):
            if self._table.running == self.config.slots:
                return
            resident = self._table.admit(work, reuse=not self._deterministic)
            if resident is None:  # an earlier request of the same sequence is still running
                continue
            self._waiting.remove(work)
            self._requests[work.request.id] = work, resident
            work.queued = perf_counter() - work.submitted
            self._reused += work.cached

    def _fit(self, prefillers: list[Resident]) -> list[Resident]:
        """The first prefilling sequences whose padded new tokens fit in a step; the first always does, in part."""
        widest = 0
        for count, resident in enumerate(prefillers):
            widest = max(widest, self._new_tokens(resident))
            if count and (count + 1) * widest > self.config.max_prefill_tokens:
                return prefillers[:count]
        return prefillers

    def _new_tokens(self, resident: Resident) -> int:
        return min(resident.pending, self.config.max_prefill_tokens)

    @torch.inference_mode()
    def _advance(self, groups: list[list[Resident]]) -> None:
        """One forward over groups of neighbouring rows; a token for every row whose context is then complete."""
        assert self._model is not None and self._cache is not None
        groups = [group for group in groups if group]
        rows = [resident for group in groups for resident in group]
        new = [self._new_tokens(resident) for resident in rows]
        for resident, count in zip(rows, new, strict=True):
            if resident.slot >= self._table.decoding:
                self._prefilled += count
        self._cache.plan = _plan(groups, new)
        ids = np.concatenate([r.tokens[r.cached : r.cached + n] for r, n in zip(rows, new, strict=True)])
        hidden = self._model.base_model(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None],
            position_ids=self._cache.plan.positions[None],
            past_key_values=self._cache,
            use_cache=True,
            slot_cache=self._cache,
        ).last_hidden_state[0]
        ends = np.cumsum(new) - 1
        for resident, count in zip(rows, new, strict=True):
            resident.cached += count
        complete = [i for i, resident in enumerate(rows) if not resident.pending]
        if complete:
            logits = self._model.get_output_embeddings()(hidden[torch.from_numpy(ends[complete])])
            self._sample([rows[i] for i in complete], logits)

    def _sample(self, rows: list[Resident], logits: torch.Tensor) -> None:
        requests = [_work(resident).request for resident in rows]
        tokens, logprobs = sample(
            logits,
            np.array([r.temperature for r in requests], np.float32),
            np.array([r.stream for r in requests], np.uint64),
            np.array([resident.length for resident in rows], np.int64),
        )
        self._sampled += len(rows)
        for resident, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            self._append(resident, token, logprob)

    def _append(self, resident: Resident, token: int, logprob: float) -> None:
        work = _work(resident)
        work.tokens.append(token)
        work.logprobs.append(logprob)
        work.versions.append(self.version)
        resident.tokens[resident.length] = token
        resident.length += 1
        if token in work.request.stop:
            finish: Finish = "stop"
        elif len(work.tokens) == work.request.max_new or resident.length == self.config.max_context:
            finish = "length"
        else:
            if resident.slot >= self._table.decoding:
                self._table.start_decoding(resident)
            return
        self._table.finish(resident, keep=not self._deterministic)
        self._end(work, finish)

    def _end(self, work: Running, finish: Finish) -> None:
        request = work.request
        del self._requests[request.id]
        self._ended.append(
            Generated(
                id=request.id,
                sequence=request.sequence,
                tokens=np.array(work.tokens, np.int32),
                logprobs=np.array(work.logprobs, np.float32),
                versions=np.array(work.versions, np.int32),
                finish=finish,
                cached=work.cached,
                queued=work.queued,
            )
        )

    # -- the model ------------------------------------------------------------------------------------------------

    def _build(self, weights: WeightVersion) -> tuple[PreTrainedModel, SlotCache]:
        config = read_served_config(Path(weights.path), self.config.max_context, self._tokenizer_path)
        model = build_model(config, attention=ATTENTION)
        _lay_out_for_few_rows(model)
        cache = SlotCache(config, self.config.slots, self.config.max_context)
        self.kv_room = KVRoom(self.config.slots * self.config.max_context, cache.bytes_per_token)
        return model, cache

    def _swap(self, a: int, b: int, length: int) -> None:
        assert self._cache is not None
        self._cache.swap(a, b, length)


def _lay_out_for_few_rows(model: PreTrainedModel) -> None:
    """Keep the projections' weights input-major in memory (their shapes stay): a product with few rows, which is what
    decoding does, then needs no repacking of the weight."""
    for layer in model.base_model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()


def _work(resident: Resident) -> Running:
    assert resident.work is not None, f"{resident.sequence} is idle"
    return resident.work


def _plan(groups: list[list[Resident]], new: list[int]) -> ForwardPlan:
    described, begin = [], 0
    for group in groups:
        counts: NDArray[np.int64] = np.array(new[begin : begin + len(group)], np.int64)
        described.append((group[0].slot, np.array([r.cached for r in group], np.int64), counts))
        begin += len(group)
    return plan_forward(described)
