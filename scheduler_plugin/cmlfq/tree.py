"""The prefix tree: one root a prompt and one root for all prompts, then a child a tool state, in order.

A node counts the *remaining* lengths (final context - context at that return, in tokens) of the finished trajectories
that passed through it. Time is the number of trajectories learned.

Invariants: there are at most ``max_nodes`` nodes between calls, at most ``max_states`` distinct tool states and no path
longer than ``max_depth``; only leaves are evicted, the one worth least among a fixed number of drawn ones, so learning
costs O(depth) whatever the size; evidence never grows along a path; the same sequence of calls gives the same tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from libra.resources.types import ToolState
from libra.scheduler_plugin.cmlfq.sketch import Sketch

OTHER = 0
"""The symbol of every state beyond ``max_states``."""
INNER, GONE = -1, -2
UNSEEN = -1
"""Stands for a state that has no symbol."""
_DRAWN = 16
# Measured with tracemalloc on CPython 3.11 (a test compares): a node with its two empty arrays and its entry in the
# parent's dict, and one bin (a byte and a double, with the arrays' spare room).
_NODE_BYTES = 640
_BIN_BYTES = 10


class Node(Sketch):
    """A tool return (or a root) and the remaining lengths seen there. ``leaf``: its place among the leaves, `INNER`, or
    `GONE` (evicted: whoever still holds it must let it go)."""

    __slots__ = ("children", "leaf", "name", "parent")

    def __init__(self, parent: Node | None, name: int | str, stamp: float) -> None:
        super().__init__(stamp)
        self.parent = parent
        self.name = name
        self.children: dict[int, Node] | None = None
        self.leaf = INNER


class PrefixTree:
    """What finished trajectories taught, by prompt and over all prompts."""

    def __init__(self, *, max_nodes: int, max_depth: int, max_states: int, half_life: float) -> None:
        """``half_life`` in trajectories learned."""
        if max_nodes < 2:
            raise ValueError(f"max_nodes is {max_nodes}; a prefix tree needs room for two nodes at least")
        self.max_nodes, self.max_depth, self.max_states = max_nodes, max_depth, max_states
        self.half_life = half_life
        self.now = 0
        """Trajectories learned."""
        self.evicted = 0
        self.everywhere = Node(None, "", 0)
        self.prompts: dict[str, Node] = {}
        self.symbols: dict[ToolState, int] = {}
        self._leaves: list[Node] = []
        self._nodes = 1
        self._bins = 0
        self._draw = 0x9E3779B97F4A7C15

    def __len__(self) -> int:
        """Nodes, the two kinds of root among them."""
        return self._nodes

    @property
    def nbytes(self) -> int:
        """Memory in bytes, estimated from the counts of nodes and bins without walking them."""
        return self._nodes * _NODE_BYTES + self._bins * _BIN_BYTES

    def learn(self, prompt: str, states: Sequence[ToolState], contexts: Sequence[int | None], final: int) -> None:
        """A trajectory has ended with ``final`` tokens; ``contexts[i]`` was its context at the i-th tool return (at
        the prompt for 0). What follows a context that nobody knows (None) is not learned."""
        known: list[int] = []
        for context in contexts:
            if context is None:
                break
            known.append(context)
        if not known:
            return
        self.now += 1
        path = [self.intern(state) for state in states[: self.max_depth]]
        for root in (self.own(prompt), self.everywhere):
            node = root
            self._count(node, known[0], final)
            for symbol, context in zip(path, known[1:], strict=False):
                node = self.child(node, symbol)
                self._count(node, context, final)
        self.trim()

    def follow(self, path: list[Node], root: Node | None, names: Sequence[int]) -> None:
        """Make ``path`` the nodes from ``root`` along ``names`` as far as they were seen; empty without a root. What it
        holds already are the first nodes of that path as they were seen at some time: only the rest is walked."""
        while path and path[-1].leaf == GONE:
            path.pop()
        if not path:
            if root is None:
                return
            path.append(root)
        node = path[-1]
        for name in names[len(path) - 1 :]:
            below = None if node.children is None else node.children.get(name)
            if below is None:
                return
            path.append(below)
            node = below

    def names(self, states: Iterable[ToolState]) -> list[int]:
        """The symbols of ``states``, for `follow`; `UNSEEN` for a state never seen, which ends every path."""
        unseen = OTHER if len(self.symbols) >= self.max_states - 1 else UNSEEN
        symbols = self.symbols
        return [symbols.get(state, unseen) for state in states]

    def child(self, node: Node, symbol: int) -> Node:
        """The child of ``node`` by ``symbol``, made if missing."""
        if node.children is None:
            node.children = {}
            if node.leaf >= 0:
                self._unlist(node)
        found = node.children.get(symbol)
        if found is None:
            found = node.children[symbol] = self._grow(node, symbol)
        return found

    def own(self, prompt: str) -> Node:
        """The root of ``prompt``, made if missing."""
        found = self.prompts.get(prompt)
        if found is None:
            found = self.prompts[prompt] = self._grow(None, prompt)
        return found

    def add(self, node: Node, other: Sketch, share: float) -> None:
        """Add to ``node`` what ``other`` counted as of its own stamp, times ``share``, as if it were of now."""
        before = len(node.bins)
        node.settle(self.now, self.half_life)
        node.merge(other, share)
        self._bins += len(node.bins) - before

    def trim(self) -> None:
        """Evict down to ``max_nodes``."""
        while self._nodes > self.max_nodes:
            self._evict()

    def walk(self) -> Iterator[Node]:
        """Every node, parents before children, in an order that depends on the calls alone."""
        pending = [self.everywhere, *self.prompts.values()]
        for node in pending:
            yield node
            if node.children:
                pending.extend(node.children.values())

    def intern(self, state: ToolState) -> int:
        """The symbol of ``state``, given now if it has none and there is room, else `OTHER`."""
        found = self.symbols.get(state)
        if found is None:
            if len(self.symbols) >= self.max_states - 1:
                return OTHER
            found = self.symbols[state] = len(self.symbols) + 1
        return found

    def _count(self, node: Node, context: int, final: int) -> None:
        before = len(node.bins)
        node.add(max(0, final - context), self.now, self.half_life)
        self._bins += len(node.bins) - before

    def _grow(self, parent: Node | None, name: int | str) -> Node:
        node = Node(parent, name, self.now)
        node.leaf = len(self._leaves)
        self._leaves.append(node)
        self._nodes += 1
        return node

    def _evict(self) -> None:
        victim = min((self._drawn_leaf() for _ in range(_DRAWN)), key=self._worth)
        self._unlist(victim)
        parent = victim.parent
        if parent is None:
            del self.prompts[str(victim.name)]
        elif parent.children is not None:
            del parent.children[int(victim.name)]
            if not parent.children:
                parent.children = None
                if parent is not self.everywhere:
                    parent.leaf = len(self._leaves)
                    self._leaves.append(parent)
        victim.leaf = GONE
        self._nodes -= 1
        self._bins -= len(victim.bins)
        self.evicted += 1

    def _worth(self, node: Node) -> float:
        return node.evidence(self.now, self.half_life)

    def _drawn_leaf(self) -> Node:
        # A linear congruential generator (Knuth's MMIX): eviction must not depend on anything but the calls.
        self._draw = (self._draw * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return self._leaves[(self._draw >> 33) % len(self._leaves)]

    def _unlist(self, node: Node) -> None:
        last = self._leaves.pop()
        if last is not node:
            self._leaves[node.leaf] = last
            last.leaf = node.leaf
        node.leaf = INNER
