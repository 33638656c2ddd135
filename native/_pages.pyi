import numpy as np
from numpy.typing import NDArray

def move_pages(
    layers: NDArray[np.uint64],
    n_blocks: int,
    n_heads: int,
    block_stride: int,
    head_stride: int,
    page_bytes: int,
    extents: int,
    n_extents: int,
    extent_bytes: int,
    blocks: NDArray[np.int64],
    table: NDArray[np.uint32],
    gather: bool,
    threads: int,
    streaming: bool,
) -> int: ...
def copy_bytes(to: NDArray[np.uint8], from_: NDArray[np.uint8], threads: int, streaming: bool) -> None: ...
def fence() -> None: ...
