"""What a KV page is, and which pages a tensor-parallel rank holds.

A *page* is the keys and values of one block of tokens for one KV head in one layer. KV heads are dealt to the ranks in
order; with more ranks than heads each head is replicated on ``tp / kv_heads`` consecutive ranks.

Invariants, for every layout and any two degrees: the heads *staged* by the ranks are every head once; a rank stages
only heads that it holds; every head is held by some rank of any other degree. So an entry indexed by global head
re-shards from any degree to any other by choosing columns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from libra.resources.errors import KVError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Element types of KV tensors → bytes of one element."""
ALIGNMENT = 64
"""Extents begin at multiples of this: a cache line, and what streaming stores need."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of one model on one engine.

    ``layers`` attention layers of ``kv_heads`` heads in all (over the ranks), ``head_dim`` elements each for K and for
    V, of type ``dtype``; ``block_size`` tokens a block; ``tp`` ranks. ``page_format`` names how a page is arranged
    inside: KV moves only between engines that agree on it (a CPU engine's depends on the instruction set it chose).
    `KVError` if the numbers contradict each other.
    """

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    tp: int
    page_format: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise KVError(f"KV of type {self.dtype!r} cannot be staged; it must be one of {', '.join(ITEM_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_size", "tp"):
            if getattr(self, name) < 1:
                raise KVError(f"a KV layout with {name} = {getattr(self, name)} is empty; it must be at least 1")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise KVError(
                f"{self.kv_heads} KV heads cannot be dealt to {self.tp} ranks: one number must divide the other; "
                "use another tensor-parallel degree"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of a block for one head in one layer."""
        return self.block_size * 2 * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent: the pages of one (block, head) of all layers, rounded up to `ALIGNMENT`."""
        return -(-self.layers * self.page_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token adds over all layers and heads."""
        return self.layers * self.kv_heads * 2 * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def replicas(self) -> int:
        """Ranks that hold the same head: 1 unless there are more ranks than heads."""
        return max(1, self.tp // self.kv_heads)

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take, a last one that is not full included."""
        return -(-tokens // self.block_size)

    def held(self, rank: int) -> range:
        """The heads in ``rank``'s tensors, in their order there: what it needs to be loaded."""
        self._check(rank)
        if self.tp > self.kv_heads:
            first = rank // self.replicas
            return range(first, first + 1)
        each = self.kv_heads // self.tp
        return range(rank * each, (rank + 1) * each)

    def staged(self, rank: int) -> range:
        """The heads that ``rank`` writes when an entry is staged: those it holds, or none if another rank holds the
        same and comes first."""
        held = self.held(rank)
        return held if rank % self.replicas == 0 else range(held.start, held.start)

    def at_tp(self, tp: int) -> Self:
        """The same KV dealt to ``tp`` ranks."""
        return replace(self, tp=tp)

    def differs(self, other: KVLayout) -> str | None:
        """Why KV of this layout cannot be loaded into ``other``: the first field that differs, with both values. The
        degrees may differ; None if nothing else does."""
        for field in fields(self):
            here, there = getattr(self, field.name), getattr(other, field.name)
            if field.name != "tp" and here != there:
                return f"{field.name} {here!r} is not {there!r}"
        return None

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `KVLayout(**d)` is the inverse."""
        return asdict(self)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.tp:
            raise KVError(f"rank {rank} of a layout of {self.tp} ranks: ranks count from 0")
