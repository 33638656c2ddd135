"""From the ``kind`` of a config to the class behind it: a shipped kind, or the import path ``pkg.mod:Class``.

Invariants: a kind that ships has one module, which is imported only when the kind is asked for (so that asking for
``scripted`` imports no torch); every error is a `ConfigError` that names the key, the value and what would do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

from libra.resources.errors import ConfigError
from libra.resources.launches import Launches
from libra.tasks.engines.base import Engine
from libra.tasks.envs.base import Environment
from libra.tasks.trainers.base import Trainer

Seam = Literal["engine", "trainer", "environment"]

SHIPPED: dict[Seam, dict[str, str]] = {
    "engine": {
        "torch": "libra.tasks.engines.torch:TorchEngine",
        "vllm": "libra.tasks.engines.vllm:VllmEngine",
        "scripted": "libra.tasks.engines.scripted:ScriptedEngine",
        "random": "libra.tasks.engines.random:RandomEngine",
    },
    "trainer": {
        "torch": "libra.tasks.trainers.torch:TorchTrainer",
        "scripted": "libra.tasks.trainers.scripted:ScriptedTrainer",
    },
    "environment": {
        "hop": "libra.tasks.envs.hop:HopEnvironment",
    },
}
"""The kinds that ship, and where each lives."""
LAUNCHES: dict[str, Launches] = {"torch": Launches(), "scripted": Launches()}
"""What the shipped kinds of trainers can launch (`Trainer.launches`, known without importing them): one rank."""
STAGING = ("vllm",)
"""The shipped kinds of engines that can stage KV."""


def kinds(seam: Seam) -> tuple[str, ...]:
    """The kinds of a seam that ship."""
    return tuple(SHIPPED[seam])


def engine_class(kind: str) -> type[Engine]:
    """The engine called ``kind``. `ConfigError` if there is none."""
    return _class("engine", kind, Engine)


def trainer_class(kind: str) -> type[Trainer]:
    """The trainer called ``kind``. `ConfigError` if there is none."""
    return _class("trainer", kind, Trainer)


def launches_of(kind: str) -> Launches:
    """What the trainer called ``kind`` can launch. `ConfigError` if there is none."""
    return LAUNCHES[kind] if kind in LAUNCHES else trainer_class(kind).launches


def environment_class(kind: str) -> type[Environment]:
    """The environment called ``kind``. `ConfigError` if there is none."""
    return _class("environment", kind, Environment)


def load_object(path: str, key: str) -> Any:
    """What the import path ``pkg.mod:name`` names. ``key`` is the config key that holds it, for `ConfigError`."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key} = {path!r} is no import path; one reads like 'my.module:Name'")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key} = {path!r}: cannot import {module_name!r} ({error}); "
            "install it where the workers run, start them in its folder, or name that in PYTHONPATH (PYTHONPATH=.)"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{key} = {path!r}: {module_name!r} has no {name!r}{_hint(name, vars(module))}")
    return vars(module)[name] if name in vars(module) else getattr(module, name)


def _class(seam: Seam, kind: str, base: type) -> Any:
    key = f"{seam}.kind"
    if ":" not in kind and kind not in SHIPPED[seam]:
        raise ConfigError(
            f"{key} = {kind!r} is none of the shipped kinds ({', '.join(kinds(seam))}) and no import path such as "
            f"'my.module:{base.__name__}'{_hint(kind, kinds(seam))}"
        )
    found = load_object(SHIPPED[seam].get(kind, kind), key)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{key} = {kind!r} names {found!r}, which is no subclass of {base.__module__}.{base.__name__}"
        )
    return found


def _hint(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, [name for name in known if not name.startswith("_")], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
