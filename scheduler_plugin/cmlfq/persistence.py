"""Prefix trees as bytes: checked, merged across runs, decayed on load.

They are a magic word, a CRC-32 and a msgpack map of plain arrays, nodes in an order that has parents first. What they
say is as of the moment they were made. Invariants: `merge` of damaged bytes raises and changes nothing; the mean and
quantiles of a node that no other run knows are those that were saved, whatever the share kept.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import msgpack
import numpy as np

from libra.resources.types import ToolState
from libra.scheduler_plugin.cmlfq.sketch import ACCURACY, MAX_BINS, Sketch
from libra.scheduler_plugin.cmlfq.tree import OTHER, Node, PrefixTree

_MAGIC = b"libra-cmlfq-1\n"


def dumps(tree: PrefixTree) -> bytes:
    """``tree`` as bytes. Two trees that were taught the same give the same bytes."""
    nodes = list(tree.walk())
    index = {id(node): at for at, node in enumerate(nodes)}
    worth = np.exp2([(node.stamp - tree.now) / tree.half_life for node in nodes])
    counts = np.array([len(node.bins) for node in nodes], np.int32)
    weights = np.concatenate([np.asarray(node.weights, np.float64) for node in nodes]) if nodes else np.empty(0)
    content = {
        "accuracy": ACCURACY,
        "states": [[state.type, state.size, state.status] for state in tree.symbols],
        "prompts": list(tree.prompts),
        "parents": np.array([-1 if n.parent is None else index[id(n.parent)] for n in nodes], np.int32).tobytes(),
        "symbols": np.array([n.name if n.parent is not None else -1 for n in nodes], np.int32).tobytes(),
        "totals": (np.array([node.total for node in nodes]) * worth).tobytes(),
        "counts": counts.tobytes(),
        "bins": b"".join(bytes(node.bins) for node in nodes),
        "weights": (weights * np.repeat(worth, counts)).tobytes(),
    }
    body = msgpack.packb(content)
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def merge(tree: PrefixTree, data: bytes, keep: float = 1.0) -> None:
    """Add what `dumps` gave to ``tree``, its evidence worth ``keep`` of what it was. ``ValueError`` if damaged."""
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"the share of the evidence to keep is {keep}; it lies between 0 and 1")
    saved = _Saved(_content(data))
    if keep == 0.0:
        return
    symbols = [OTHER, *(tree.intern(state) for state in saved.states)]
    nodes: list[Node] = []
    roots = 0
    for at, parent in enumerate(saved.parents):
        if parent >= 0:
            node = tree.child(nodes[parent], symbols[saved.symbols[at]])
        elif roots == 0:
            node, roots = tree.everywhere, 1
        else:
            node, roots = tree.own(saved.prompts[roots - 1]), roots + 1
        nodes.append(node)
        tree.add(node, saved.sketch(at), keep)
    tree.trim()


class _Saved:
    """A saved tree, checked: every index in range, parents before children."""

    def __init__(self, content: dict[str, Any]) -> None:
        if content["accuracy"] != ACCURACY:
            raise ValueError(f"its bins have the accuracy {content['accuracy']}, this version's {ACCURACY}")
        self.states = [ToolState(str(kind), int(size), str(status)) for kind, size, status in content["states"]]
        self.prompts = [str(prompt) for prompt in content["prompts"]]
        self.parents: list[int] = np.frombuffer(content["parents"], np.int32).tolist()
        self.symbols: list[int] = np.frombuffer(content["symbols"], np.int32).tolist()
        self.totals: list[float] = np.frombuffer(content["totals"], np.float64).tolist()
        counts = np.frombuffer(content["counts"], np.int32)
        self.ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
        self.bins = bytes(content["bins"])
        self.weights = np.frombuffer(content["weights"], np.float64)
        self._check(counts)

    def _check(self, counts: np.ndarray[Any, Any]) -> None:
        n = len(self.parents)
        if not n == len(self.symbols) == len(self.totals) == len(counts):
            raise ValueError(f"its arrays speak of {n}, {len(self.symbols)}, {len(self.totals)}, {len(counts)} nodes")
        if counts.min(initial=0) < 0 or not self.ends[-1] == len(self.bins) == len(self.weights):
            raise ValueError(f"its nodes count {self.ends[-1]} bins, but it holds {len(self.bins)}")
        roots = sum(parent < 0 for parent in self.parents)
        if roots != len(self.prompts) + 1 or any(parent >= at for at, parent in enumerate(self.parents)):
            raise ValueError(f"it has {roots} roots for {len(self.prompts)} prompts, or a child before its parent")
        if any(not 0 <= s <= len(self.states) for s, p in zip(self.symbols, self.parents, strict=True) if p >= 0):
            raise ValueError("a node is of a tool state that the file does not name")
        if max(self.bins, default=0) >= MAX_BINS or not (np.isfinite(self.weights) & (self.weights >= 0)).all():
            raise ValueError("a bin is out of range, or its weight no weight")
        if not np.isfinite(self.totals).all():
            raise ValueError("a node's total is no number")

    def sketch(self, at: int) -> Sketch:
        """The sketch of node number ``at``."""
        start, end = self.ends[at], self.ends[at + 1]
        found = Sketch()
        found.bins = bytearray(self.bins[start:end])
        found.weights = array("d", self.weights[start:end].tobytes())
        found.weight, found.total = sum(found.weights), self.totals[at]
        return found


def _content(data: bytes) -> dict[str, Any]:
    head = len(_MAGIC) + 4
    if not data.startswith(_MAGIC):
        raise ValueError("it is no C-MLFQ tree of this version")
    body = data[head:]
    if zlib.crc32(body) != int.from_bytes(data[len(_MAGIC) : head], "little"):
        raise ValueError("its checksum does not match what it holds")
    content = msgpack.unpackb(body)
    expected = {"accuracy", "states", "prompts", "parents", "symbols", "totals", "counts", "bins", "weights"}
    if not isinstance(content, dict) or set(content) != expected:
        raise ValueError("its fields are not those of a C-MLFQ tree")
    return content
