"""What is set and kept clean in Dask."""

from __future__ import annotations

import dask
from dask.utils import key_split

from libra.resources.dask_settings import SETTINGS, forget_prefixes, inherited


def test_what_a_child_inherits_has_our_settings_and_the_users_own() -> None:
    with dask.config.set({"distributed.comm.timeouts.tcp": "77s"}):
        config = dask.config.deserialize(inherited()["DASK_INTERNAL_INHERIT_CONFIG"])
    assert config["distributed"]["scheduler"]["work-stealing"] is SETTINGS["distributed.scheduler.work-stealing"]
    assert config["distributed"]["comm"]["timeouts"]["tcp"] == "77s"


def test_prefixes_of_keys_are_forgotten_once_there_are_many() -> None:
    key_split.cache_clear()
    for number in range(100):
        key_split(f"rollout-0-run-g{number}m0-0-0")
    forget_prefixes()
    assert key_split.cache_info().currsize == 100  # a guest's few prefixes are worth keeping
    for number in range(100_000):
        key_split(f"rollout-0-run-g{number}m1-0-0")
    forget_prefixes()
    assert key_split.cache_info().currsize == 0
