"""Pages moved by a GPU, as far as a machine without one can tell: the kernels compile for real architectures, what they
do, run thread by thread on the CPU, is what the CPU's own code does, and whatever is missing is named."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_cuda import Kernels, Runtime
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.native.pages import KERNELS, PagedCache, gather_pages, scatter_pages
from libra.resources.errors import KVError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Writing
from libra.resources.kv.gpu import BLOCK, GRID, DeviceCache, compile_kernels, unavailable
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.move import stage
from libra.resources.kv.page_job import PageJob
from libra.resources.kv.segment import format_segment
from libra.tasks.engines.rank_cache import rank_cache

TESTS = Path(__file__).parents[1]


class Described:
    """An array as a GPU's is described, in host memory; ``strided``: as torch describes one that is not contiguous."""

    def __init__(self, array: np.ndarray, strided: bool = True) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, not array.flags.writeable),
            "strides": array.strides if strided else None,
            "version": 3,
        }


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(KERNELS)


def child(*command: str, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=TESTS, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernels(arch: str) -> None:
    code = bytes(compile_kernels(arch).code)
    assert code[:4] == b"\x7fELF"
    assert b".text.move_16\0" in code
    assert b".text.move_1\0" in code


def test_what_nvrtc_refuses_is_said_in_its_words() -> None:
    with pytest.raises(KVError, match=r"NVRTC does not compile .*pages\.cu for sm_12: (.|\n)*gpu-architecture"):
        compile_kernels("sm_12")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_each_way_moves_what_the_cpu_moves(kernels: Kernels, data: st.DataObject) -> None:
    """The kernel thread by thread, in any launch, and the list of copies; pages of whole words and others."""
    import ctypes

    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    layers, pool, heads, gap = pick(1, 3), pick(1, 8), pick(1, 3), pick(0, 1)
    page, rows = data.draw(st.sampled_from([1, 16, 48, 1000, 2048, 2064, 6160])), pick(0, pool)
    rng = np.random.default_rng(pick(0, 2**32))
    whole = [aligned(rng, (pool, heads + gap, page + 16 * gap)) for _ in range(layers)]
    extents = aligned(rng, (rows * heads + pick(1, 3), layers * page + data.draw(st.sampled_from([0, 1, 16]))))
    blocks = rng.permutation(pool)[:rows]
    table = rng.permutation(len(extents))[: rows * heads].reshape(rows, heads).astype(np.uint32)
    gather = data.draw(st.booleans())
    expected, expected_whole = extents.copy(), [array.copy() for array in whole]
    by_cpu = PagedCache([array[:, :heads, :page] for array in expected_whole])
    moved = (gather_pages if gather else scatter_pages)(by_cpu, blocks, expected, table)

    cache = DeviceCache([Described(array[:, :heads, :page]) for array in whole])
    job = PageJob.checked(cache.grid, cache.addresses, blocks, extents, table, gather)
    if data.draw(st.booleans()):
        words, name = job.words(), f"move_{job.word_bytes(job.extents)}"
        assert name == "move_1" or page % 16 == 0
        grid, block = data.draw(st.sampled_from([(1, 32), (3, 64), (GRID, BLOCK)]))
        kernels.launch(name, grid, block, words.ctypes.data, job.extents, int(gather))
    else:
        for target, source in zip(*(addresses.tolist() for addresses in job.copies()), strict=True):
            ctypes.memmove(target, source, page)

    assert job.nbytes == moved
    assert (extents == expected).all()
    assert all((left == right).all() for left, right in zip(whole, expected_whole, strict=True))


def aligned(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes that begin at a multiple of 256, as CUDA's allocations do."""
    size = int(np.prod(shape))
    memory = np.zeros(size + 256, np.uint8)
    first = -memory.ctypes.data % 256
    memory[first : first + size] = rng.integers(0, 256, size, np.uint8)
    return memory[first : first + size].reshape(shape)


def test_pages_that_are_whole_words_move_in_words() -> None:
    """Real pages do; else a GPU would move single bytes, sixteen times slower, and nobody would notice."""
    layout = KVLayout("bfloat16", layers=4, kv_heads=2, head_dim=64, block_size=16, tp=1, page_format="test")
    rng = np.random.default_rng(0)
    cache = DeviceCache([Described(aligned(rng, (3, 2, layout.page_bytes)), strided=False) for _ in range(4)])
    extents, table = aligned(rng, (4, layout.extent_bytes)), np.array([[0, 1]], np.uint32)
    job = PageJob.checked(cache.grid, cache.addresses, np.array([1]), extents, table, True)
    assert job.word_bytes(job.extents) == 16
    assert job.word_bytes(job.extents + 8) == 1


@pytest.mark.parametrize(
    ("blocks", "table", "error", "message"),
    [
        ([4], [[0, 1]], IndexError, "block 4 of row 0: the cache has 4"),
        ([0, -1], [[0, 1], [2, 0]], IndexError, "block -1 of row 1"),
        ([0], [[0, 3]], IndexError, "extent 3: the arena has 3"),
        ([0], [[0]], ValueError, r"a table of shape \(1, 1\) does not fit 1 blocks of 2 heads"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_a_gpu_is_looked_for(
    blocks: list[int], table: list[list[int]], error: type[Exception], message: str
) -> None:
    """In the words that the CPU's code has for it."""
    tensors = [np.zeros((4, 2, 512), np.uint8) for _ in range(2)]
    extents, numbers = np.zeros((3, 1024), np.uint8), np.array(table, np.uint32)
    for cache in (PagedCache(tensors), DeviceCache([Described(tensor) for tensor in tensors])):
        with pytest.raises(error, match=message):
            cache.gather(np.array(blocks), extents, numbers, 1)
        with pytest.raises(ValueError, match="an extent of 1023 B cannot hold 2 pages of 512 B"):
            cache.scatter(np.array([0]), extents[:, :1023].copy(), np.array([[0, 1]], np.uint32), 1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([np.zeros((4, 2, 8)), np.zeros((4, 2, 9))], r"layer 1 has shape \(4, 2, 9\)"),
        ([np.zeros((4, 8, 2, 8)).transpose(0, 2, 1, 3)], "are not contiguous"),
        ([np.frombuffer(bytes(64), np.uint8).reshape(4, 2, 8)], "is read-only"),
    ],
)
def test_tensors_on_a_gpu_are_held_to_the_same_shape(tensors: Sequence[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceCache([Described(tensor) for tensor in tensors])


def test_a_move_without_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    if unavailable() is None:
        pytest.skip("this machine has a GPU")
    layout = KVLayout("float32", layers=2, kv_heads=2, head_dim=4, block_size=4, tp=1, page_format="test")
    format_segment(tmp_path / "arena", layout, 3 << 20, slots=4)
    cache = DeviceCache([Described(np.zeros((4, 2, layout.page_bytes), np.uint8)) for _ in range(2)])
    with Arena(tmp_path / "arena", writable=True) as arena:
        writing = arena.begin("g0m0", 0, np.arange(4, dtype=np.int32))
        assert isinstance(writing, Writing)
        with pytest.raises(KVError, match=r"KV on GPU 0 cannot be moved: no GPU \("), writing:
            stage(writing, cache, np.array([0]), layout, 0)


@pytest.mark.parametrize("missing", ["cuda", "cuda.core"])
def test_missing_packages_are_named_with_the_extra_that_has_them(missing: str) -> None:
    done = child(
        "-c",
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from libra.resources.kv import gpu\n"
        "print(gpu.unavailable())\n"
        "try:\n    gpu.compile_kernels('sm_90')\nexcept gpu.KVError as error:\n    print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert "cuda-core" in line and missing in line
        assert line.endswith("pip install 'dask-libra[gpu]'")
    assert len(done.stdout.splitlines()) == 2


def test_the_cache_of_torch_tensors_shares_their_memory() -> None:
    import torch

    layers = [torch.randn(4, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3)]
    cache = rank_cache(layers)
    extents = np.zeros((2, 3 * 256), np.uint8)
    assert cache.gather(np.array([3]), extents, np.array([[1, 0]], np.uint32), 1) == 2 * 3 * 256
    for layer, tensor in enumerate(layers):
        page = extents[0, layer * 256 : (layer + 1) * 256]
        assert (page == tensor[3, 1].contiguous().view(torch.uint8).numpy().reshape(-1)).all()
    cache.scatter(np.array([0]), np.zeros_like(extents), np.array([[1, 0]], np.uint32), 1)
    assert not layers[2][0].any()


def test_torch_tensors_that_cannot_be_shared_are_refused_not_copied() -> None:
    import torch

    token_major = torch.zeros(4, 8, 2, 16).transpose(1, 2)
    with pytest.raises(KVError, match=r"shape \(4, 2, 8, 16\) and strides .*not contiguous"):
        rank_cache([token_major])
    with pytest.raises(KVError, match="KV tensors on meta: all must lie on one CPU or one CUDA GPU"):
        rank_cache([torch.zeros(4, 2, 8, 16, device="meta")])
    with pytest.raises(KVError, match="KV tensors on no device"):
        rank_cache([])


# -- gpu-check ------------------------------------------------------------------------------------


def test_gpu_check_passes_or_says_why_it_skips() -> None:
    why_not = unavailable()
    done = child("-m", "gpu_check", *([] if why_not else ["--megabytes", "64"]), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (f"gpu-check skipped: {why_not}" if why_not else "all checks passed")


def test_gpu_check_finds_every_move_right_on_an_emulated_gpu() -> None:
    done = child("-m", "emulated_cuda", "gpu_check", "--megabytes", "1", timeout=200)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all checks passed"), done.stdout + done.stderr
    assert done.stdout.count("\nok ") >= 20


def test_gpu_check_fails_where_a_kernel_is_wrong(tmp_path: Path) -> None:
    """The last word of each page left out."""
    for source in KERNELS.parent.glob("page*.*"):
        text = source.read_text("utf-8")
        (tmp_path / source.name).write_text(
            text.replace("at.page_bytes / sizeof(Word),", "at.page_bytes / sizeof(Word) - 1,")
        )
    code = (
        "import emulated_cuda, pathlib, sys\nemulated_cuda.install()\n"
        "import gpu_check\nfrom libra.resources.kv import gpu\n"
        f"gpu.KERNELS = pathlib.Path({str(tmp_path / KERNELS.name)!r})\n"
        "sys.exit(gpu_check.main(['--megabytes', '1']))\n"
    )
    done = child("-c", code, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  Qwen3-14B, blocks of 16: kernel" in done.stdout
    assert "a gathered page is wrong" in done.stdout


def test_the_emulated_runtime_has_nothing_that_the_real_one_lacks() -> None:
    """Each function takes as many arguments, each constant has the same value."""
    real = pytest.importorskip("cuda.bindings.runtime")
    for name, value in vars(Runtime).items():
        if name.startswith("_") or name == "cudaMemcpyAttributes":
            continue
        there: Any = getattr(real, name)
        if inspect.isfunction(value):
            assert len(inspect.signature(value).parameters) - 1 == len(inspect.signature(there).parameters), name
        elif isinstance(value, type) and issubclass(value, IntEnum):
            for member in value:
                assert int(getattr(there, member.name)) == member, member
        else:
            assert int(there) == value, name
