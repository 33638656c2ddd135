"""dask-libra: resource-managed post-training of LLM agents with reinforcement learning, on Dask.

The public names are loaded on first use (PEP 562), so that ``import libra`` needs neither torch nor distributed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libra.pipeline.api import BatchHandle, LibraLocalCluster, Run, RunResult, load_config

__version__ = "0.1.0"
__all__ = ["BatchHandle", "LibraLocalCluster", "Run", "RunResult", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("libra.pipeline.api"), name)
    raise AttributeError(f"module 'libra' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
