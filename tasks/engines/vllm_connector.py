"""KV between vLLM and the staging arena of its Dask worker: vLLM's connector seam, filled with `libra.resources.kv`.

A request says which sequence it belongs to and in which arenas KV of it may lie. At its beginning what is staged there
for the longest common prefix is loaded, unless the engine has as much itself; at its end, aborts included, what it
computed is staged in the engine's own arena. Half of this object lives in EngineCore, beside vLLM's scheduler, and
decides; the other half in each rank, and copies its heads.

What is staged is copied beside the steps, by a thread of each rank: vLLM keeps the blocks of an ended request until all
ranks have reported it. What is loaded is copied inside the step that uses it: a load beside the steps would leave its
request in a state (waiting for remote KV) in which vLLM neither resets its cache nor completes a pause, and a change of
weights must find no load under way.

Invariants: KV is found and staged under the version that the own arena says the weights have, so KV computed under two
versions is not staged and KV of another version is not loaded; a pause ends only when all that was being staged is
published or given up (a request with blocks that are being copied is work to EngineCore); a load that failed, or found
the weights changed, is reported to vLLM, which computes those blocks anew; a copy that fails dooms its entry. Whatever
is not loaded or not staged is counted by its reason.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from libra.resources.errors import KVError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry, Refused, Ticket, Writing
from libra.resources.kv.gpu import DeviceCache
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.move import RankCache, load, stage
from libra.tasks.engines.rank_cache import rank_cache
from libra.tasks.engines.vllm_mover import Mover

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)
PATIENCE = 2.0
"""Seconds that a request waits for KV of its sequence that is being staged."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Rows ``first_block`` … of an entry, for the engine's ``blocks``."""

    arena: str
    sequence: str
    version: int
    tokens: NDArray[np.int32]
    first_block: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """An entry that EngineCore has begun, and the blocks that hold its KV."""

    request: str
    ticket: Ticket
    blocks: list[int]


@dataclass
class Failures(KVConnectorWorkerMetadata):
    """What ranks could not stage: errors by request."""

    errors: dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Failures:
        assert isinstance(other, Failures)
        return Failures({**self.errors, **other.errors})


@dataclass
class Jobs(KVConnectorMetadata):
    """What the ranks copy in one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


class ArenaConnector(KVConnectorBase_V1):
    """See the module. ``kv_connector_extra_config``: ``arena``, a path, whose file may come later; ``threads``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._own, self._threads = str(extra["arena"]), int(extra["threads"])
        self._layout = engine_layout(vllm_config)
        self._arenas: dict[str, Arena] = {}
        # EngineCore's half, by request.
        self._jobs = Jobs()
        self._asked: dict[str, float] = {}
        self._found: dict[str, tuple[str, Entry]] = {}
        self._loading: dict[str, LoadJob] = {}
        self._began: dict[str, tuple[Request, float]] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._computed_under: dict[str, int] = {}
        self._writing: dict[str, Writing] = {}
        self._failed = 0
        # A rank's half. Its thread has a mapping of the own arena to itself.
        self._cache: RankCache | None = None
        self._rank = 0
        self._mover: Mover[tuple[SaveJob, torch.cuda.Event | None]] | None = None
        self._written: dict[str, Arena] = {}
        self._errors: dict[str, str] = {}
        self._unloaded: set[int] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Pages of one head lie together, whatever the device."""
        return "LBHNC"

    # -- EngineCore: what is loaded -----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        wish = _wish(request)
        own = self._arena(self._own)
        if wish is None or own is None:
            return 0, False
        # The last token is always computed: its output is what is sampled from.
        tokens = np.fromiter(request.all_token_ids[: request.num_tokens - 1], np.int32)
        best: tuple[str, Entry] | None = None
        told = self._told[request.request_id] = {"refused": []}
        paths = list(dict.fromkeys((self._own, *wish.get("arenas", ()))))
        if self._is_coming(request.request_id, wish["sequence"], own.weight_version, paths[1:]):
            return None, False
        for path in paths:
            arena = self._arena(path)
            if arena is None:
                continue
            beyond = num_computed_tokens if best is None else best[1].matched
            found = arena.find(wish["sequence"], own.weight_version, tokens, self._layout, beyond)
            if isinstance(found, Entry):
                best = path, found
            elif found.reason != "absent" and best is None and found.reason not in told["refused"]:
                told["refused"].append(found.reason)
        if best is None:
            return 0, False
        self._found[request.request_id] = best
        return best[1].matched - num_computed_tokens, False

    def _is_coming(self, identifier: str, sequence: str, version: int, paths: list[str]) -> bool:
        """Whether KV of the sequence is just being staged elsewhere: vLLM then asks again at its next step. A move may
        be faster than the copy; who waits for a dead writer waits `PATIENCE` at most."""
        arenas = [arena for path in paths if (arena := self._arena(path)) is not None]
        if not any(arena.being_written(sequence, version) for arena in arenas):
            return False
        now = time.monotonic()
        return now - self._asked.setdefault(identifier, now) < PATIENCE

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        own = self._arena(self._own)
        if own is None:
            return
        self._computed_under[request.request_id] = own.weight_version
        self._asked.pop(request.request_id, None)
        self._began.setdefault(request.request_id, (request, time.monotonic()))
        found = self._found.pop(request.request_id, None)
        if found is None or num_external_tokens == 0:
            return
        path, entry = found
        size = self._layout.block_size
        first, last = (entry.matched - num_external_tokens) // size, self._layout.blocks(entry.matched)
        ids = list(blocks.get_block_ids()[0][first:last])
        tokens = entry.tokens[: entry.matched]
        job = LoadJob(path, entry.trajectory, entry.version, tokens, first, ids)
        self._jobs.loads.append(job)
        self._loading[request.request_id] = job
        self._told[request.request_id]["loaded"] = num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Jobs:
        jobs, self._jobs = self._jobs, Jobs()
        return jobs

    # -- EngineCore: what is staged -----------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Begin an entry for what the request computed; its blocks are freed once every rank has copied them."""
        identifier, wish, own = request.request_id, _wish(request), self._arena(self._own)
        self._found.pop(identifier, None)
        self._asked.pop(identifier, None)
        self._loading.pop(identifier, None)
        version = self._computed_under.pop(identifier, None)
        self._has_context(identifier)
        told = self._told.pop(identifier, {"refused": []})
        told["refused"] += ["stage_failed"] * self._failed
        self._failed = 0
        # Steps may be under way whose tokens nobody has seen yet.
        count = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        count = min(count, len(block_ids) * self._layout.block_size)
        if wish is None or not wish["stage"] or own is None or version is None or count < 1:
            return False, told
        tokens = np.fromiter(request.all_token_ids[:count], np.int32)
        writing = own.begin(wish["sequence"], version, tokens)
        if isinstance(writing, Refused):
            return False, {**told, "refused": [*told["refused"], f"stage_{writing.reason}"]}
        self._writing[identifier] = writing
        self._jobs.saves.append(SaveJob(identifier, writing.ticket, list(block_ids[: self._layout.blocks(count)])))
        return True, {**told, "staged": count}

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Every rank has copied these: publish them, unless one failed. And what a rank could not load is computed."""
        invalid = connector_output.invalid_block_ids
        for identifier, job in self._loading.items():
            if invalid.intersection(job.blocks) and identifier in self._told:
                told = self._told[identifier]
                told["loaded"] = 0
                told["refused"].append("lost")
        self._loading.clear()
        for identifier, (request, _) in list(self._began.items()):
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self._has_context(identifier)
        failures = connector_output.kv_connector_worker_meta
        for identifier, error in failures.errors.items() if isinstance(failures, Failures) else ():
            writing = self._writing.pop(identifier, None)
            if writing is not None:  # the first rank that failed
                logger.error("KV of request %s was not staged: %s", identifier, error)
                self._failed += 1
                with writing:
                    pass  # given up
        for identifier in connector_output.finished_sending or ():
            writing = self._writing.pop(identifier, None)
            if writing is not None:
                writing.publish()

    def _has_context(self, identifier: str) -> None:
        """The KV of a request's whole context is there: note how long that took since it was first scheduled."""
        _, began = self._began.pop(identifier, (None, None))
        told = self._told.get(identifier)
        if began is not None and told is not None:
            told["kv_seconds"] = time.monotonic() - began

    # -- a rank -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank
        from vllm.model_executor.models.utils import extract_layer_index

        ordered = sorted(kv_caches.items(), key=lambda named: extract_layer_index(named[0]))
        self._rank = get_tensor_model_parallel_rank()
        self._cache = rank_cache([tensor for _, tensor in ordered])
        device = ordered[0][1].device
        self._mover = Mover(self._save, lambda: _own_stream(device))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for job in self._jobs_of_step().loads:
            if not self._load(job):
                self._unloaded.update(job.blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole requests are staged at their end."""

    def wait_for_save(self) -> None:
        for job in self._jobs_of_step().saves:
            assert self._mover is not None
            self._mover.add(job.request, (job, _computed(self._cache)))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = {} if self._mover is None else self._mover.take()
        self._errors = {request: error for request, error in ended.items() if error is not None}
        return set(ended) or None, None

    def build_connector_worker_meta(self) -> Failures | None:
        errors, self._errors = self._errors, {}
        return Failures(errors) if errors else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def shutdown(self) -> None:
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        for arenas in (self._arenas, self._written):
            for arena in arenas.values():
                arena.close()
            arenas.clear()

    def _load(self, job: LoadJob) -> bool:
        arena, own = self._arena(job.arena), self._arena(self._own)
        if arena is None or own is None:
            return False
        assert self._cache is not None
        entry = arena.find(job.sequence, job.version, job.tokens, self._layout, len(job.tokens) - 1)
        if isinstance(entry, Refused):
            return False
        blocks = np.asarray(job.blocks, np.int64)
        whole = load(arena, entry, self._cache, blocks, self._layout, self._rank, job.first_block, self._threads)
        return whole and own.weight_version == job.version

    def _save(self, job_and_step: tuple[SaveJob, torch.cuda.Event | None]) -> None:
        """In the rank's thread, once the step that handed it over is computed."""
        job, computed = job_and_step
        if computed is not None:
            computed.synchronize()
        own = _attached(self._written, self._own, writable=True)
        if own is None:
            raise KVError(f"the arena {self._own} ended before KV of {job.request} was copied into it")
        assert self._cache is not None
        writing = own.join(job.ticket)
        if isinstance(writing, Refused):
            return
        with writing:
            stage(writing, self._cache, np.asarray(job.blocks, np.int64), self._layout, self._rank, self._threads)

    def _jobs_of_step(self) -> Jobs:
        jobs = self._get_connector_metadata()
        assert isinstance(jobs, Jobs)
        return jobs

    def _arena(self, path: str) -> Arena | None:
        """The arena, if it is there: the own one comes once the worker knows the engine's layout."""
        return _attached(self._arenas, path, writable=path == self._own)


def engine_layout(vllm_config: VllmConfig) -> KVLayout:
    """The KV of this engine, as arenas describe it."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    return KVLayout(
        dtype=str(model.dtype).removeprefix("torch."),
        layers=model.get_num_layers(parallel),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        block_size=cache.block_size,
        tp=parallel.tensor_parallel_size,
        page_format=_page_format(vllm_config),
    )


def _attached(arenas: dict[str, Arena], path: str, writable: bool) -> Arena | None:
    """The arena at ``path``, from or into ``arenas``; None if none is there. One that its worker has replaced since is
    let go."""
    if path in arenas and arenas[path].removed:
        arenas.pop(path).close()
    if path not in arenas:
        try:
            arenas[path] = Arena(Path(path), writable)
        except KVError:
            return None
    return arenas[path]


def _own_stream(device: torch.device) -> None:
    """On a GPU, what the calling thread copies comes after a stream of its own, not after what later steps compute."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _computed(cache: RankCache | None) -> torch.cuda.Event | None:
    """An event behind all that the calling rank has put on its GPU; None on a CPU, where that is done already."""
    if not isinstance(cache, DeviceCache):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _page_format(vllm_config: VllmConfig) -> str:
    """On CPUs a page's inside depends on the instruction set that attention uses."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "vllm-gpu"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return f"vllm-cpu-{_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)}"


def _wish(request: Request) -> dict[str, Any] | None:
    wish: dict[str, Any] | None = request.kv_transfer_params
    return wish if wish and "sequence" in wish else None
