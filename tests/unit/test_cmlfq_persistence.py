import os
import signal
import subprocess
import sys
import zlib

import msgpack
import pytest

from libra.resources.durable import write_file
from libra.resources.types import ToolState
from libra.scheduler_plugin.cmlfq.persistence import dumps, merge
from libra.scheduler_plugin.cmlfq.tree import Node, PrefixTree

STATES = [ToolState("tool", size, status) for size in range(3) for status in ("ok", "failure")]


def make_tree(taught: int = 0, offset: int = 0, max_nodes: int = 10_000) -> PrefixTree:
    tree = PrefixTree(max_nodes=max_nodes, max_depth=16, max_states=64, half_life=100.0)
    for number in range(offset, offset + taught):
        path = [STATES[(number * step) % len(STATES)] for step in range(1, 5)]
        tree.learn(f"p{number % 5}", path, [100, 300, 700, 900, 1_300], 1_500 + 100 * (number % 13))
    return tree


def said(tree: PrefixTree) -> dict[tuple[object, ...], tuple[float, float, float]]:
    """Evidence, mean and P90 by path."""
    found = {}
    states = {symbol: state for state, symbol in tree.symbols.items()}

    def path(node: Node) -> tuple[object, ...]:
        return (node.name,) if node.parent is None else (*path(node.parent), states[int(node.name)])

    for node in tree.walk():
        found[path(node)] = (node.evidence(tree.now, tree.half_life), node.mean(), node.quantile(0.9))
    return found


def test_what_is_merged_says_what_was_dumped():
    tree, other = make_tree(taught=200), make_tree()
    merge(other, dumps(tree))
    assert said(other).keys() == said(tree).keys()
    for path, values in said(tree).items():
        assert said(other)[path] == pytest.approx(values)


def test_decay_lessens_evidence_and_nothing_else():
    tree, other = make_tree(taught=200), make_tree()
    merge(other, dumps(tree), keep=0.25)
    for path, (evidence, mean, p90) in said(tree).items():
        assert said(other)[path] == pytest.approx((evidence / 4, mean, p90))


def test_runs_merge_into_the_sum_of_what_they_learned():
    first, second, both = make_tree(taught=150), make_tree(taught=150, offset=1_000), make_tree()
    merge(both, dumps(first))
    merge(both, dumps(second))
    whole, a, b = said(both), said(first), said(second)
    assert whole.keys() == a.keys() | b.keys()
    for path, (evidence, mean, _) in whole.items():
        (n, x, _), (m, y, _) = a.get(path, (0.0, 0.0, 0.0)), b.get(path, (0.0, 0.0, 0.0))
        assert evidence == pytest.approx(n + m)
        assert mean == pytest.approx((n * x + m * y) / (n + m))


def test_a_merge_keeps_to_the_cap():
    small = make_tree(max_nodes=20)
    merge(small, dumps(make_tree(taught=300)))
    assert len(small) <= 20
    assert sum(1 for _ in small.walk()) == len(small)


def test_damaged_bytes_are_refused_and_change_nothing():
    tree = make_tree(taught=50)
    before = dumps(tree)
    for data in damaged(before).values():
        with pytest.raises(ValueError, match=r"\bit|its|bin|node"):
            merge(tree, data)
    with pytest.raises(ValueError, match=r"keep is 2"):
        merge(tree, before, keep=2)
    assert dumps(tree) == before


def damaged(good: bytes) -> dict[str, bytes]:
    """Files that are no tree, each in another way."""
    head = good.index(b"\n") + 5
    content = msgpack.unpackb(good[head:])

    def sealed(**changes: object) -> bytes:
        body = msgpack.packb(content | changes)
        return good[: head - 4] + zlib.crc32(body).to_bytes(4, "little") + body

    return {
        "empty": b"",
        "foreign": b"PK" + good,
        "short": good[:-1],
        "flipped": good[:100] + bytes([good[100] ^ 1]) + good[101:],
        "coarser": sealed(accuracy=0.1),
        "headless": sealed(prompts=content["prompts"][1:]),
        "orphaned": sealed(parents=content["parents"][::-1]),
        "stateless": sealed(states=content["states"][:1]),
        "overflowing": sealed(bins=b"\xff" * len(content["bins"])),
        "truncated": sealed(weights=content["weights"][:-8]),
    }


def test_a_killed_writer_leaves_the_old_tree_or_the_new_one(tmp_path):
    path = tmp_path / "tree"
    write_file(path, dumps(make_tree(taught=50)))
    code = (
        "import sys; from pathlib import Path\n"
        "from libra.resources.durable import write_file\n"
        "from libra.resources.types import ToolState\n"
        "from libra.scheduler_plugin.cmlfq.persistence import dumps\n"
        "from libra.scheduler_plugin.cmlfq.tree import PrefixTree\n"
        "tree = PrefixTree(max_nodes=9999, max_depth=9, max_states=9, half_life=99.0)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    tree.learn('p', [ToolState('t', 0, 'ok')] * 5, [1, 2, 3, 4, 5, 6], 9)\n"
        "    write_file(Path(sys.argv[1]), dumps(tree))\n"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        first = path.stat().st_ino
        while path.stat().st_ino == first:
            os.sched_yield()
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
        merge(make_tree(), path.read_bytes())
