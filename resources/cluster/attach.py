"""Attaching to a Dask cluster that runs already.

Invariant: a client that came through `check` talks to a scheduler with the plugin, of the same versions as this
process; what is wrong otherwise is one `ClusterError` that names both sides and what mends it.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import distributed
from distributed import Client

from libra.resources import wire
from libra.resources.cluster.local import PRELOAD
from libra.resources.errors import ClusterError


@asynccontextmanager
async def attached(address: str, seconds: float = 10.0) -> AsyncIterator[Client]:
    """An asynchronous client of the scheduler at ``address`` (``tcp://host:port``), checked, and closed at the end.

    Raises `ClusterError` when nobody answers there within ``seconds``, and what `check` raises.
    """
    try:
        client = await Client(address, asynchronous=True, timeout=seconds, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"no Dask scheduler answers at {address} within {seconds:g} s ({error}); check the address, start one with "
            f"`dask scheduler --preload {PRELOAD}`, or leave cluster.scheduler out to start a local cluster"
        ) from None
    try:
        await check(client)
        yield client
    finally:
        await client.close()


async def check(client: Client) -> dict[str, Any]:
    """What the scheduler's plugin says of itself (`wire.STATUS` without a token).

    Raises `ClusterError` when it has no plugin, or another version of Python, distributed or dask-libra.
    """
    address = client.scheduler.address
    status: dict[str, Any] | None = await getattr(client.scheduler, wire.STATUS)()
    if not status:  # an unknown request is answered with nothing
        raise ClusterError(
            f"the scheduler at {address} runs without the dask-libra plugin; start it with "
            f"`dask scheduler --preload {PRELOAD}`"
        )
    here = {"dask-libra": version("dask-libra"), "distributed": distributed.__version__}
    here["python"] = platform.python_version()
    differing = [
        f"{name} {mine} here, {there} there"
        for name, mine in here.items()
        if _counts(name, mine) != _counts(name, there := str(status["versions"].get(name)))
    ]
    if differing:
        raise ClusterError(
            f"the scheduler at {address} has other versions: {'; '.join(differing)}. Tasks are pickled between them: "
            "install the same in both"
        )
    return status


def _counts(name: str, text: str) -> str:
    """What of a version must be equal: major and minor for Python."""
    return ".".join(text.split(".")[:2]) if name == "python" else text
