"""Moving a trajectory's KV against prefilling it again, on real vLLM engines of TP 1 and TP 2 on this machine, over
context lengths; and how well a fetch between nodes is foretold.

The model is small (4 layers, 2 KV heads of 64), so that 40 K tokens can be prefilled on two cores at all: the larger
the model, the more a prefill costs beside a move, and on a GPU both costs are others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from distributed.core import ConnectionPool, Server
from numpy.typing import NDArray
from tiny_models import publish, tiny_model
from vllm_instance import Instance

from benchmarks.kv import LAYOUT
from benchmarks.rows import Row, Rows
from libra.resources.kv.entries import Writing
from libra.tasks.arena import WorkerArena
from libra.tasks.kv import Hint, Source, Staging
from libra.tasks.kv_fetch import KVServer

LENGTHS = {"1k": 1024, "4k": 4096, "10k": 10240, "40k": 40960}
SHORT = (64, 128, 256, 512)
"""Lengths below 1 K, to find where the two cross."""
ROUNDS = 3
PAYLOAD = 16
"""Tokens that a tool has added after the KV was staged: both ways compute these."""
VOCABULARY = 512
FETCH_AIM = 30.0
FETCHES = 24
_RUN = "bench-migration"


def run() -> Rows:
    """The rows ``kv.migrate_*`` and ``kv.fetch_*``."""
    return {**_migrate(), **asyncio.run(_fetch())}


def _migrate() -> Rows:
    rows: Rows = {}
    with pair() as (source, target):
        ratios = {}
        for length in (*SHORT, *LENGTHS.values()):
            rounds = ROUNDS if length <= 10_240 else 1
            taken = [_round(source, target, length, number) for number in range(rounds)]
            ratios[length] = median(moved / prefilled for moved, prefilled in taken)
            if (name := next((key for key, value in LENGTHS.items() if value == length), None)) is None:
                continue
            moved, prefilled = (1e3 * median(side) for side in zip(*taken, strict=True))
            nbytes = length * source.arena.layout.bytes_per_token / 2**20
            note = (
                f"first token after a move TP 1 to 2 {moved:.0f} ms, after a prefill {prefilled:.0f} ms; {nbytes:.0f} "
                f"MiB, {rounds} rounds, load {os.getloadavg()[0]:.1f}"
            )
            rows[f"kv.migrate_over_prefill.{name}"] = Row(ratios[length], "× prefill", 1.0, note)
    rows["kv.migrate_crossover"] = _crossover(ratios)
    return rows


@contextmanager
def pair() -> Iterator[tuple[Instance, Instance]]:
    """Engines of TP 1 and TP 2 with arenas that hold the longest context."""
    longest = max(LENGTHS.values()) + 2 * PAYLOAD
    model = tiny_model(
        "qwen3", vocabulary=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=longest + 1,
        initializer_range=0.05,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as folder, ExitStack() as stack:
        weights = publish(model, Path(folder), 0)
        engines = []
        for tp in (1, 2):
            engine = Instance(_RUN, f"tp{tp}", tp, weights, budget=2**30, slots=2, max_context=longest)
            stack.callback(engine.close)
            engines.append(engine)
        yield engines[0], engines[1]


def _round(source: Instance, target: Instance, length: int, number: int) -> tuple[float, float]:
    """Seconds to the first token at ``target`` of a context of ``length``: with its KV from ``source``, and of another
    one without."""
    sequence = f"g{length}m{number}"
    prompt = _ids(length, seed=2 * number)
    first = source.run(sequence, prompt, 1, stage=True)
    source.staged(sequence, 0, prompt)
    payload = _ids(PAYLOAD, seed=7)
    began = time.perf_counter()
    after = target.run(sequence, np.concatenate([prompt, first.tokens, payload]), 1, arenas=(str(source.path),))
    moved = time.perf_counter() - began
    assert after.loaded >= length - 1, (after.loaded, length)
    other = np.concatenate([_ids(length, seed=2 * number + 1), first.tokens, payload])
    began = time.perf_counter()
    without = target.run(f"{sequence}x", other, 1)
    prefilled = time.perf_counter() - began
    assert without.cached == 0
    source.arena.release(sequence)
    return moved, prefilled


def _crossover(ratios: dict[int, float]) -> Row:
    """From which length on moving is the faster, of those measured."""
    slower = [length for length, ratio in ratios.items() if ratio >= 1.0]
    longer = [length for length in ratios if length > max(slower, default=0)]
    measured = ", ".join(f"{length}: {ratio:.2f}" for length, ratio in ratios.items())
    return Row(float(min(longer, default=0)), "tokens", None, f"from here on moving is faster (0: never); {measured}")


async def _fetch() -> Rows:
    """Fetches of random lengths over Dask's RPC between two nodes (here: by loopback): what was foretold before each,
    from those before it, against what it took."""
    logging.getLogger("distributed.libra.kv").setLevel(logging.WARNING)  # a line a fetch otherwise
    rng = np.random.default_rng(0)
    lengths = rng.integers(512, 4096, FETCHES)
    budget = int(1.1 * lengths.max() * LAYOUT.bytes_per_token) + (64 << 20)
    errors, rates = [], []
    async with AsyncExitStack() as stack:
        pool = await ConnectionPool()
        stack.push_async_callback(pool.close)
        a, b = (Staging(WorkerArena(name), _RUN, name, name, budget, pool) for name in "ab")
        for staging in (a, b):
            await staging.open(LAYOUT.to_json(), "bench", 0)
            stack.push_async_callback(staging.lender.end)
        server = Server(KVServer(lambda run: a.arena).handlers())
        await server.listen("tcp://127.0.0.1:0")
        stack.push_async_callback(server.close)
        hint = Hint(True, (Source("a", "a", server.address),))
        for number, length in enumerate(lengths):
            tokens, name = np.arange(length, dtype=np.int32), f"g{number}m0"
            assert a.arena is not None
            writing = a.arena.begin(name, 0, tokens)
            assert isinstance(writing, Writing)
            assert writing.publish()
            nbytes = LAYOUT.blocks(int(length)) * LAYOUT.kv_heads * LAYOUT.extent_bytes
            foretold = b.rates.choose(nbytes, int(length)).fetching
            came = (await b.bring(name, tokens, hint, 120.0)).fetched
            assert came is not None
            rates.append(nbytes / came / 1e9)
            if foretold is not None:
                errors.append(100 * abs(foretold / came - 1))
            for staging in (a, b):
                staging.lender.forget([name])
    note = (
        f"median of {len(errors)} fetches, worst {max(errors):.0f} %; {median(rates):.2f} GB/s by Dask's RPC, loopback"
    )
    return {"kv.fetch_estimate_error": Row(median(errors), "%", FETCH_AIM, note)}


def _ids(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).astype(np.int32)
