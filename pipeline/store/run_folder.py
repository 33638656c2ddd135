"""The folder of a run: what lies where, how it is made, and when it may be resumed.

Layout: ``run.json`` (what makes it a run folder), ``config.yaml`` (resolved), ``lock``, ``journal/``,
``trajectories/step-000012.zarr``, ``checkpoints/step-000012/``, ``tokenizer/``, ``logs/``, ``metrics.jsonl``,
``summary.json``, ``report.html``.

Invariants: a run folder is there whole or not at all; nothing is ever written into a folder that is not one; a run is
resumed with the config it was made with, but for the keys that its caller names.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import yaml

from libra.resources.durable import TEMPORARY, write_file, written_whole
from libra.resources.errors import StoreError

FORMAT = 1
IDENTITY_FILE = "run.json"
_FOLDERS = ("journal", "trajectories", "checkpoints", "tokenizer", "logs")
_SHOWN = 12
"""Differing keys that an error lists at most."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run at ``path``. ``run`` is its id (eight hex digits), ``created`` Unix seconds, ``fingerprint`` that
    of the config it was made with."""

    path: Path
    run: str
    created: float
    fingerprint: str

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> Self:
        """Make a run folder at ``path``, which does not exist or is empty, and store ``config`` (resolved, plain
        values). `StoreError` says what is there otherwise."""
        _check_free(path)
        identity = {
            "format": FORMAT,
            "run": secrets.token_hex(4),
            "created": time.time(),
            "fingerprint": fingerprint(config),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_be_made(path, error) from error
        try:
            with written_whole(path) as temporary:
                for name in _FOLDERS:
                    (temporary / name).mkdir()
                (temporary / "config.yaml").write_bytes(_to_yaml(config))
                (temporary / IDENTITY_FILE).write_text(json.dumps(identity, indent=1))
        except FileExistsError as error:
            raise StoreError(
                f"{path} cannot be made whole: another process has made it just now, or it is a link or a mount point; "
                "give this run a folder of its own"
            ) from error
        except OSError as error:
            raise _cannot_be_made(path, error) from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run folder at ``path``. `StoreError` if there is none."""
        identity_path = path / IDENTITY_FILE
        if not identity_path.is_file():
            what = "is not a run folder" if path.exists() else "does not exist"
            raise StoreError(f"{path} {what} ({IDENTITY_FILE} is missing); name the folder that `libra train` has made")
        try:
            identity = json.loads(identity_path.read_text())
            found = identity["format"]
            if found == FORMAT:
                return cls(path, identity["run"], identity["created"], identity["fingerprint"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{identity_path} is damaged: {error!r}; restore it or start a new run") from error
        raise StoreError(f"{path} has format {found}; this version reads format {FORMAT}, so start a new run")

    @classmethod
    def resume(cls, path: Path, config: Mapping[str, Any], may_differ: Collection[str] = ()) -> Self:
        """The run folder at ``path`` if its config equals ``config``, but for the dotted keys (or whole sections) in
        ``may_differ``. `StoreError` shows the keys that differ with both values."""
        folder = cls.open(path)
        differing = [
            (key, there, here)
            for key, there, here in config_differences(folder.read_config(), config)
            if not any(key == name or key.startswith(f"{name}.") for name in may_differ)
        ]
        if differing:
            lines = [f"  {key}: {there} in the run, {here} now" for key, there, here in differing[:_SHOWN]]
            if len(differing) > _SHOWN:
                lines.append(f"  and {len(differing) - _SHOWN} more")
            raise StoreError(
                f"{path} was made with another config:\n" + "\n".join(lines) + "\n"
                "resume it with its own config, or give this one a folder of its own"
            )
        return folder

    def read_config(self) -> dict[str, Any]:
        """The stored resolved config. `StoreError` if it is missing or damaged."""
        path = self.path / "config.yaml"
        try:
            config = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise StoreError(f"cannot read {path}: {error}; restore it or start a new run") from error
        if not isinstance(config, dict):
            raise StoreError(f"{path} holds {type(config).__name__}, not a config; restore it or start a new run")
        return config

    def store_config(self, config: Mapping[str, Any]) -> None:
        """Replace the stored config (after a resume with keys that may differ), whole or not at all."""
        write_file(self.path / "config.yaml", _to_yaml(config))

    @property
    def journal(self) -> Path:
        """Folder of the journal's segments."""
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        """Folder of the `CheckpointStore`."""
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        """Folder of the committed batches."""
        return self.path / "trajectories"

    def batch(self, step: int) -> Path:
        """The zarr group of the batch that trained version ``step``."""
        return self.trajectories / f"step-{step:06d}.zarr"

    def set_aside_batches(self, first: int) -> list[Path]:
        """Rename committed batches of versions from ``first`` on, which the journal does not know because its end was
        lost: other trajectories will take their places. Their new paths (``step-000012.zarr.aside``, ``….aside2``)."""
        moved = []
        for path in sorted(self.trajectories.glob("step-*.zarr")):
            if int(path.name.removeprefix("step-").removesuffix(".zarr")) >= first:
                names = (path.with_name(f"{path.name}.aside{n if n > 1 else ''}") for n in count(1))
                moved.append(path.rename(next(name for name in names if not name.exists())))
        return moved

    @property
    def tokenizer(self) -> Path:
        """Folder of the run's tokenizer."""
        return self.path / "tokenizer"

    @property
    def logs(self) -> Path:
        """Folder of logs, one file a process."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The run's last word, one JSON object."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The self-contained report."""
        return self.path / "report.html"


def _cannot_be_made(path: Path, error: OSError) -> StoreError:
    named = str(error.filename or path)
    which = "" if TEMPORARY in named else f" ({named})"
    return StoreError(
        f"the run folder {path} cannot be made: {error.strerror}{which}; run_dir=<folder> names another place"
    )


def fingerprint(config: Mapping[str, Any]) -> str:
    """16 hex digits that are equal for equal configs, whatever the order of their keys."""
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()


def config_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """``(dotted key, value there, value here)`` of every leaf that differs, by key; a missing one reads ``unset``."""
    old, new = dict(_leaves(there)), dict(_leaves(here))
    keys = [key for key in sorted(old.keys() | new.keys()) if (key in old) != (key in new) or old[key] != new[key]]
    return [(key, repr(old[key]) if key in old else "unset", repr(new[key]) if key in new else "unset") for key in keys]


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _to_yaml(config: Mapping[str, Any]) -> bytes:
    try:
        return yaml.safe_dump(dict(config), sort_keys=False).encode()
    except yaml.YAMLError as error:
        raise StoreError(f"the config holds a value that YAML cannot store plainly: {error}") from error


def _check_free(path: Path) -> None:
    if (path / IDENTITY_FILE).exists():
        raise StoreError(
            f"{path} holds a run already: resume=True goes on with it (`libra train`: --resume), and "
            "run_dir=<another> gives this run a folder of its own"
        )
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; give the run a folder of its own")
    if path.is_dir() and (names := sorted(entry.name for entry in path.iterdir())):
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise StoreError(f"{path} is not a run folder and holds {shown}; give the run a new or empty folder")
