"""Cold-started models on disk, found again by what made them.

Invariants: an entry's name is a hash of the source text of every module of this package that takes part, the config,
the seed and torch's version, so changed code never meets an old model; an entry appears whole (written aside, then
renamed), and of two runs that make the same one at once, the first to finish names it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def cache_key(roots: Iterable[object], settings: dict[str, Any]) -> str:
    """Twenty hex digits from ``settings`` (plain values) and the sources of the modules that define ``roots`` (classes,
    functions, or objects of such classes) and of those that they build on, see `modules_of`."""
    modules = modules_of(roots)
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=10)
    for name in sorted(modules):
        digest.update(f"\0{name}\0{inspect.getsource(modules[name])}".encode())
    return digest.hexdigest()


def modules_of(roots: Iterable[object]) -> dict[str, ModuleType]:
    """The modules that define ``roots`` and those of the same top-level packages that they take classes, functions or
    modules from, transitively, by name."""
    waiting = [_module_of(root) for root in roots]
    packages = {module.__name__.split(".")[0] for module in waiting}
    found: dict[str, ModuleType] = {}
    while waiting:
        module = waiting.pop()
        if module.__name__ in found or module.__name__.split(".")[0] not in packages:
            continue
        found[module.__name__] = module
        for value in vars(module).values():
            if isinstance(value, ModuleType):
                waiting.append(value)
            elif inspect.isclass(value) or inspect.isfunction(value):
                waiting.append(_module_of(value))
    return found


def find(cache: Path, key: str) -> Path | None:
    """The entry's directory, or None."""
    entry = cache / key
    return entry if entry.is_dir() else None


def keep(cache: Path, key: str, built: Path) -> Path:
    """Move the finished directory ``built`` (inside ``cache``, see `workspace`) to its name; an entry that came first
    stays. Returns the entry's directory."""
    entry = cache / key
    try:
        built.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
        shutil.rmtree(built)
    return entry


def workspace(cache: Path, key: str) -> Path:
    """A new directory beside the entries to build one in. Those that a killed run left are removed. ``OSError`` if
    nothing can be written there: ask before there is something to keep."""
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob(".*-*"):
        process = left.name.rsplit("-", 2)[-2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".{key}-{os.getpid()}-", dir=cache))


def _module_of(thing: object) -> ModuleType:
    """Where a class or function, or an object's class, is defined."""
    named = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)
    return sys.modules[named.__module__]
