"""One vLLM engine, AsyncLLM, as an object of one thread.

AsyncLLM is a coroutine's API to an EngineCore process, which runs by itself. Its event loop is this object's, and runs
only inside the calls below; what EngineCore says meanwhile waits in a socket. Invariants: every request ends once, as
one `Generated`; weights are replaced while nothing is computed, and no KV computed under others is left afterwards;
whatever breaks EngineCore is raised by `Core.check` in the words of the process that broke.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from libra.resources import rng
from libra.resources.errors import InfraError, WeightError
from libra.resources.kv.arena import Arena
from libra.resources.kv.layout import KVLayout
from libra.resources.types import Finish, KVRoom, WeightVersion
from libra.resources.weights import check_weights
from libra.tasks.engines.base import EngineConfig, Generated, GenerateRequest, Place, nothing_sampled
from libra.tasks.engines.vllm_options import VllmOptions
from libra.tasks.engines.vllm_scratch import Scratch
from libra.tasks.engines.vllm_setup import engine_arguments, restore_environment, set_environment
from libra.tasks.models import read_served_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

ABORT_SECONDS = 0.05
"""How long an abort may take before it is asked for again: the request may just be on its way in."""
CHECK_SECONDS = 0.2
"""How often a wait for EngineCore looks whether it lives."""
SHUTDOWN_SECONDS = 2.0
WARM_UP_TOKENS = 64
_TITLE = "VLLM::"
"""How vLLM calls its processes."""

Result = TypeVar("Result")


@dataclass(slots=True)
class Meter:
    """What EngineCore has reported since the start: steps that did something, and tokens sampled in them."""

    steps: int = 0
    sampled: int = 0


class Core:
    """AsyncLLM, its event loop and its scratch folder. Imports vLLM; the engine is built by the first `load`."""

    def __init__(self, config: EngineConfig, options: VllmOptions, tokenizer_path: str | None, place: Place) -> None:
        self._config, self._options, self._place = config, options, place
        self._tokenizer_path = tokenizer_path
        self._scratch = Scratch()
        self._outside = set_environment(self._scratch, config.threads)
        # Only now: vLLM reads its environment, and writes its log, from the first import on.
        import_module("vllm")
        self._loop = asyncio.new_event_loop()
        self._moved = asyncio.Event()
        self._engine: AsyncLLM | None = None
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._ended: list[Generated] = []
        self._broken: str | None = None
        self._parts: dict[int, str] = {}
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.meter = Meter()
        self.kv_layout: KVLayout | None = None
        self.kv_room: KVRoom | None = None
        self.vocabulary = 0
        """Token ids of the model; vLLM does not look at them, and would die of others."""

    # -- weights --------------------------------------------------------------------------------------------------

    def load(self, weights: WeightVersion) -> None:
        """Take these weights, whose checksums are looked at first. `WeightError` or `ConfigError`: nothing has changed.
        Any other error: the engine is of no use any more."""
        tensors = check_weights(weights)
        if self._engine is None:
            self._build(weights)
            self._tensors = tensors
            return
        if different := sorted(name for name, _ in tensors.items() ^ self._tensors.items()):
            here, there = self._tensors.get(different[0], "absent"), tensors.get(different[0], "absent")
            raise WeightError(
                f"weights at {weights.path} are of another model than the engine's: {different[0]!r} is {there}, and "
                f"{here} there"
            )
        self._run(self._replace(self._engine, weights))

    def _build(self, weights: WeightVersion) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        model = read_served_config(Path(weights.path), self._config.max_context, self._tokenizer_path)
        self.vocabulary = model.vocab_size
        arguments = engine_arguments(weights.path, model, self._config, self._options, self._place)
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        try:
            self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger()])
            self._scratch.note_segments()
        except Exception as error:
            # vLLM's own error says "see above" when one of its processes has failed.
            self._broken = self._scratch.first_error() or f"{type(error).__name__}: {error}"
            raise InfraError(f"vLLM did not start: {self._broken}") from error
        self._watch(others)
        self.kv_room = _kv_room(self._engine.vllm_config)
        if self._place.arena is not None:
            from libra.tasks.engines.vllm_connector import engine_layout

            self.kv_layout = engine_layout(self._engine.vllm_config)
        self._run(self._warm_up(self._engine, weights))

    def _watch(self, others: set[int]) -> None:
        """Look after EngineCore and its ranks ourselves: vLLM takes up to half a minute to end over a dead rank.
        ``others``: processes of this one that were there before the engine."""
        for process in psutil.Process().children(recursive=True):
            if process.pid in others:
                continue
            try:
                title = " ".join(" ".join(process.cmdline()).split())  # a title set later is padded
            except psutil.NoSuchProcess:
                continue  # it has ended meanwhile; those of the engine answered just now
            if title.startswith(_TITLE):
                self._parts[os.pidfd_open(process.pid)] = f"{title} ({process.pid})"

    async def _warm_up(self, engine: AsyncLLM, weights: WeightVersion) -> None:
        """The first requests compile kernels: nobody shall wait for that."""
        await engine.update_weight_version(str(weights.version))
        length = min(WARM_UP_TOKENS, self._config.max_context - 2)
        tokens = np.zeros(length, np.int32)
        await self._generate(engine, GenerateRequest("warm-up", "", tokens, 2, (), 1.0, 0))
        (ended,) = self._take()
        if ended.error is not None:
            self._broken = f"the warm-up failed: {ended.error}"
            raise InfraError(self._broken)
        self.meter.steps = self.meter.sampled = 0
        await self._forget(engine)

    async def _replace(self, engine: AsyncLLM, weights: WeightVersion) -> None:
        try:
            # What is being staged is published or given up before the pause is complete: a request whose blocks are
            # being copied still counts as work.
            await engine.pause_generation(mode="keep", clear_cache=True)
            self._announce(weights.version)
            await engine.collective_rpc("libra_load", kwargs=asdict(weights))
            await self._forget(engine)
            await engine.update_weight_version(str(weights.version))
            await engine.resume_generation()
        except Exception as error:
            # Some ranks may have the new weights, others not.
            self._broken = self._scratch.first_error() or f"{type(error).__name__}: {error}"
            raise InfraError(f"version {weights.version} did not load: {self._broken}") from error

    def _announce(self, version: int) -> None:
        """Tell the arena of the weights' version: what it holds of another is freed. It may not be there yet: whoever
        makes it sets its version."""
        if self._place.arena is not None and Path(self._place.arena).exists():
            with Arena(Path(self._place.arena), writable=True) as arena:
                arena.set_weight_version(version)

    async def _forget(self, engine: AsyncLLM) -> None:
        """Drop all KV, that of running requests too (they are prefilled again)."""
        if not await engine.reset_prefix_cache(reset_running_requests=True):
            raise InfraError("vLLM kept KV of the weights before")

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Begin a request; `take` returns its end."""
        assert self._engine is not None
        task = self._loop.create_task(self._generate(self._engine, request))
        self._requests[request.id] = task
        task.add_done_callback(lambda _: self._requests.pop(request.id, None))

    def abort(self, request: str) -> None:
        """End a running request; its end is there when this returns."""
        assert self._engine is not None
        self._run(self._abort(self._engine, request))

    def wait(self, seconds: float) -> None:
        """Wait until EngineCore has made a step or a request has ended, up to ``seconds``."""
        self._loop.run_until_complete(self._wait(seconds))
        self.check()

    def take(self) -> list[Generated]:
        """The requests that have ended since the last call."""
        return self._take()

    @property
    def has_ended(self) -> bool:
        """Whether `take` would return any."""
        return bool(self._ended)

    def check(self) -> None:
        """`InfraError` if the engine is dead, with what its processes said last."""
        ended, _, _ = select.select(list(self._parts), [], [], 0)
        if self._broken is None and ended:
            self._broken = f"its process {self._parts[ended[0]]} ended without a word (killed?)"
        if self._broken is None and self._engine is not None and self._engine.errored:
            self._broken = "its EngineCore has given up"
        if self._broken is not None:
            raise InfraError(f"vLLM is dead: {self._scratch.first_error() or self._broken}")

    def close(self) -> None:
        """End the engine's processes and clear away what they had."""
        if self._engine is not None:
            self._engine.shutdown(timeout=0 if self._broken else SHUTDOWN_SECONDS)
            self._loop.run_until_complete(self._settle())
            self._engine = None
        for part in self._parts:
            os.close(part)
        self._parts.clear()
        self._loop.close()
        self._scratch.close()
        restore_environment(self._outside)

    async def _generate(self, engine: AsyncLLM, request: GenerateRequest) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        last = None
        try:
            sampling = SamplingParams(
                temperature=request.temperature,
                seed=rng.stream(request.stream, "vllm", len(request.tokens)) >> 1,
                max_tokens=request.max_new,
                stop_token_ids=list(request.stop),
                ignore_eos=True,
                extra_args=self._kv_wish(request),
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": request.tokens.tolist()}
            async for output in engine.generate(prompt, sampling, request.id):
                last = output
        except EngineDeadError:
            self._moved.set()  # `check` says why
            return
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one request is that request's end
            cause = error.__cause__ or error
            self._end(nothing_sampled(request, error=f"{type(cause).__name__}: {cause}"))
            return
        assert last is not None, f"vLLM ended {request.id} without an output"
        ended = _generated(request, last.outputs[0], last.num_cached_tokens or 0)
        self._end(_with_kv(ended, last.kv_transfer_params or {}))

    def _kv_wish(self, request: GenerateRequest) -> dict[str, Any] | None:
        """What the connector is told of a request."""
        if self._place.arena is None:
            return None
        wish = {"sequence": request.sequence, "stage": request.stage, "arenas": list(request.arenas)}
        return {"kv_transfer_params": wish}

    def _end(self, generated: Generated) -> None:
        self._ended.append(generated)
        self._moved.set()

    async def _abort(self, engine: AsyncLLM, request: str) -> None:
        while (task := self._requests.get(request)) is not None and not task.done():
            await engine.abort(request)
            await asyncio.wait([task], timeout=ABORT_SECONDS)

    async def _wait(self, seconds: float) -> None:
        self._moved.clear()
        if not self._ended and self._broken is None:
            try:
                async with asyncio.timeout(seconds):
                    await self._moved.wait()
            except TimeoutError:
                return

    async def _settle(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _take(self) -> list[Generated]:
        ended, self._ended = self._ended, []
        return ended

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(self._while_alive(work))

    async def _while_alive(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What ``work`` comes to. vLLM never answers a call that a dying EngineCore has swallowed."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=CHECK_SECONDS))[0]:
                self.check()
        finally:
            task.cancel()
        return task.result()

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        core = self

        class StatLogger(StatLoggerBase):
            """Counts what EngineCore reports after each step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                # While KV is copied beside them, EngineCore makes steps without any request.
                if iteration_stats is not None or (scheduler_stats is not None and scheduler_stats.num_running_reqs):
                    core.meter.steps += 1
                if iteration_stats is not None:
                    core.meter.sampled += iteration_stats.num_generation_tokens
                core._moved.set()

            def log_engine_initialized(self) -> None:
                pass

        return StatLogger


def _generated(request: GenerateRequest, output: CompletionOutput, cached: int) -> Generated:
    """What vLLM says of a request's end."""
    tokens = np.asarray(output.token_ids, np.int32)
    rows = output.logprobs or []
    logprobs = np.array([row[token].logprob for row, token in zip(rows, output.token_ids, strict=True)], np.float32)
    finish: Finish = "length"
    if output.finish_reason == "abort":
        finish = "abort"
    elif len(tokens) and int(tokens[-1]) in request.stop:
        finish = "stop"
    return Generated(
        request.id, request.sequence, tokens, logprobs, _versions(output, len(tokens)), finish, cached, 0.0
    )


def _with_kv(generated: Generated, told: dict[str, Any]) -> Generated:
    """``generated`` with what the connector has said of its KV."""
    figures = {name: told[name] for name in ("loaded", "staged", "kv_seconds") if name in told}
    return replace(generated, refused=tuple(told.get("refused", ())), **figures)


def _versions(output: CompletionOutput, count: int) -> NDArray[np.int32]:
    """The weight version of each token, from the spans that EngineCore keeps."""
    versions = np.full(count, -1, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    return versions


def _kv_room(vllm_config: VllmConfig) -> KVRoom:
    """What the KV cache of an engine that has started holds."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    assert cache.num_gpu_blocks is not None, "EngineCore tells it as it starts"
    elements = (
        model.get_num_layers(vllm_config.parallel_config) * model.get_total_num_kv_heads() * model.get_head_size()
    )
    return KVRoom(cache.num_gpu_blocks * cache.block_size, 2 * elements * model.dtype.itemsize)
