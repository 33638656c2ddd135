"""Native page movement: what it refuses, and the same code under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from libra.native.pages import PagedCache, copy_bytes, gather_pages, scatter_pages

ROOT = Path(__file__).parents[2]


def cache(layers: int = 2, blocks: int = 4, heads: int = 2, words: int = 64) -> PagedCache:
    shape = (blocks, heads, words)
    return PagedCache([np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 10_000 * n for n in range(layers)])


def test_pages_of_a_block_and_head_of_all_layers_lie_together() -> None:
    paged, extents = cache(), np.zeros((3, 2 * 64 * 8), np.uint8)
    moved = gather_pages(paged, np.array([3]), extents, np.array([[2, 0]], np.uint32))
    assert moved == 2 * 2 * 64 * 8
    found = extents.view(np.int64).reshape(3, 2, 64)
    for head, extent in enumerate((2, 0)):
        for layer in range(2):
            assert (found[extent, layer] == paged.layers[layer][3, head]).all()
    assert not extents[1].any()


def test_a_torch_tensor_shares_its_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 2, 16, 8), dtype=torch.bfloat16)
    paged = PagedCache([tensor.view(torch.uint8).numpy()])
    scatter_pages(paged, np.array([1]), np.full((2, 256), 0x3F, np.uint8), np.array([[0, 1]], np.uint32))
    assert tensor[1].float().min() > 0 and not tensor[0].any()


@pytest.mark.parametrize(
    ("blocks", "table", "error", "message"),
    [
        ([4], [[0, 1]], IndexError, "block 4 of row 0: the cache has 4"),
        ([-1], [[0, 1]], IndexError, "block -1 of row 0"),
        ([0, 1], [[0, 1], [2, 3]], IndexError, "extent 3: the arena has 3"),
        ([0], [[0, 1], [1, 2]], ValueError, r"a table of shape \(2, 2\) does not fit 1 blocks of 2 heads"),
        ([0], [[0]], ValueError, r"a table of shape \(1, 1\) does not fit 1 blocks of 2 heads"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_a_byte_moves(
    blocks: list[int], table: list[list[int]], error: type[Exception], message: str
) -> None:
    extents = np.zeros((3, 2 * 64 * 8), np.uint8)
    with pytest.raises(error, match=message):
        gather_pages(cache(), np.array(blocks), extents, np.array(table, np.uint32))
    assert not extents.any()


def test_extents_too_small_read_only_or_strided_are_refused() -> None:
    table = np.array([[0, 1]], np.uint32)
    with pytest.raises(ValueError, match="an extent of 1023 B cannot hold 2 pages of 512 B"):
        gather_pages(cache(), np.array([0]), np.zeros((3, 1023), np.uint8), table)
    with pytest.raises(ValueError, match="make it uint32"):
        gather_pages(cache(), np.array([0]), np.zeros((3, 1024), np.uint8), table.astype(np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="C-contiguous"):
        gather_pages(cache(), np.array([0]), np.zeros((3, 4096), np.uint8)[:, ::2], table)
    frozen = np.zeros((3, 1024), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only extents"):
        gather_pages(cache(), np.array([0]), frozen, table)
    assert scatter_pages(cache(), np.array([0]), frozen, table) == 2048


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        ([np.zeros((4, 2, 8)), np.zeros((4, 2, 9))], r"layer 1 has shape \(4, 2, 9\)"),
        (
            [np.zeros((4, 8, 2, 8)).transpose(0, 2, 1, 3)],
            r"are not contiguous: the engine must use its layout \[block, head",
        ),
        ([np.zeros((4, 2))], r"array of \[block, head, …\], got shape \(4, 2\)"),
        ([np.broadcast_to(np.zeros((1, 1, 8)), (4, 2, 8)).copy()[::-1]], "pages overlap"),
    ],
)
def test_tensors_that_are_no_paged_cache_are_refused(layers: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache(layers)


def test_the_interpreter_runs_on_during_a_copy() -> None:
    source, target = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    started, done = threading.Event(), threading.Event()

    def copy() -> None:
        started.set()
        for _ in range(20):
            copy_bytes(target, source, threads=1)
        done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    started.wait(30)
    turns = 0
    while not done.is_set():
        turns += 1
    thread.join()
    assert turns > 1000, "this thread would have had a few turns between the copies only"
    assert target.all()


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_page_movement_is_clean_under_the_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    compiler, flags = os.environ.get("CXX", "c++"), {"address": "address,undefined", "thread": "thread"}[sanitizer]
    (tmp_path / "empty.cpp").write_text("int main() { return 0; }")
    build = [compiler, f"-fsanitize={flags}", "-o", str(tmp_path / "empty"), str(tmp_path / "empty.cpp")]
    # A sanitizer's runtime has to be loaded first, and vLLM has its processes load others.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    for step in (build, build[3:4]) if shutil.which(compiler) else (["false"],):
        if subprocess.run(step, capture_output=True, timeout=60, check=False, env=environment).returncode:
            pytest.skip(f"programs built by {compiler} with -fsanitize={flags} do not run here")
    target = f"build/pages_fuzz_{sanitizer}"
    subprocess.run(["make", "-s", target, f"CXX={compiler}"], cwd=ROOT, timeout=200, check=True)
    command = [ROOT / target, "200", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "200 rounds agree\n"), done.stderr
