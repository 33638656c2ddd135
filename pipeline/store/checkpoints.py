"""Checkpoints of a run: directories ``step-000012/`` that are whole or not there.

A checkpoint holds what the trainer wrote (weights, tokenizer, optimizer, RNG), the driver's ``state.msgpack`` and a
``manifest.json`` with the size and CRC-32C of every file. Invariants: whatever instant a process dies at, the newest
committed checkpoint or the one before it can be read; one that fails its manifest is set aside, never used; older ones
are removed only after a newer one is on disk. The run folder's lock makes its holder the only writer.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.native.checksum import crc32c
from libra.resources.codec import pack, unpack
from libra.resources.durable import TEMPORARY, naming, remove_leftovers, sync_path, sync_tree
from libra.resources.errors import StoreError

FORMAT = 1
STATE_FILE = "state.msgpack"
MANIFEST_FILE = "manifest.json"
_REPLACED, _DAMAGED = ".replaced", ".damaged"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: the state before the batch of version ``step`` is trained, in directory ``path``."""

    step: int
    path: Path

    def state(self) -> Any:
        """What the driver gave to `CheckpointStore.commit`."""
        try:
            return unpack((self.path / STATE_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot read {self.path / STATE_FILE}: {error}; resume from an older checkpoint"
            ) from error


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest complete ``checkpoint`` (None: there is none) and a message for everything passed over or removed."""

    checkpoint: Checkpoint | None
    messages: tuple[str, ...]


class CheckpointStore:
    """The checkpoints under ``folder``, of which the ``keep`` newest are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise StoreError(f"keep is {keep}; a run keeps at least 1 checkpoint")
        self.folder, self.keep = folder, keep
        self._begun: dict[int, Path] = {}

    def begin(self, step: int) -> Path:
        """A temporary directory for the checkpoint of ``step``, for the trainer to write into."""
        self.abandon(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{_name(step)}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
        temporary.mkdir()
        self._begun[step] = temporary
        return temporary

    def abandon(self, step: int) -> None:
        """Remove what `begin` has begun; nothing if it has not."""
        temporary = self._begun.pop(step, None)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    def commit(self, step: int, state: Any) -> Checkpoint:
        """Add the driver's ``state`` (what `libra.resources.codec.pack` takes) and the manifest, put everything on
        disk, rename it into place, and remove the checkpoints beyond ``keep``. One of the same step is replaced.

        Reads every file once for its checksum: seconds for gigabytes, so call it off the event loop.
        """
        temporary = self._begun.pop(step, None)
        if temporary is None or not temporary.is_dir():
            raise StoreError(f"no checkpoint of step {step} has been begun in {self.folder}; call begin({step}) first")
        path = self.folder / _name(step)
        with naming(path):
            (temporary / STATE_FILE).write_bytes(pack(state))
            (temporary / MANIFEST_FILE).write_bytes(_manifest(step, temporary))
            sync_tree(temporary)
        if path.exists():
            path.rename(_aside(path, _REPLACED))
        temporary.rename(path)
        sync_path(self.folder)
        self._remove_older()
        return Checkpoint(step, path)

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint (its files not verified), ascending."""
        names = (re.fullmatch(r"step-(\d{6,})", path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in names if match)

    def latest(self) -> Latest:
        """The newest checkpoint whose files all match its manifest. Half-written ones are removed; damaged ones are set
        aside as ``step-000012.damaged`` until the next commit. For the start of a run: not while one is being written.
        """
        messages = [f"{self.folder / name}: half-written, removed" for name in remove_leftovers(self.folder)]
        for replaced in sorted(self.folder.glob(f"*{_REPLACED}")):
            self._finish_replacement(replaced)
        for step in reversed(self.steps()):
            path = self.folder / _name(step)
            damage = _damage(step, path)
            if damage is None:
                return Latest(Checkpoint(step, path), tuple(messages))
            aside = _aside(path, _DAMAGED)
            path.rename(aside)
            messages.append(f"checkpoint {path} is damaged, ignored and set aside as {aside.name}: {damage}")
        return Latest(None, tuple(messages))

    def _finish_replacement(self, replaced: Path) -> None:
        """A crash fell between the two renames of `commit` (the old one comes back) or right after them."""
        path = replaced.with_suffix("")
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)

    def _remove_older(self) -> None:
        doomed = [self.folder / _name(step) for step in self.steps()[: -self.keep]]
        doomed += [*self.folder.glob(f"step-*{_DAMAGED}"), *self.folder.glob(f"step-*{_REPLACED}")]
        for path in doomed:
            # Renamed first: a removal that a crash cuts short must not look like a damaged checkpoint.
            removed = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
            path.rename(removed)
            shutil.rmtree(removed)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _aside(path: Path, suffix: str) -> Path:
    """A free sibling name with ``suffix``."""
    aside = path.with_name(path.name + suffix)
    if aside.exists():
        shutil.rmtree(aside)
    return aside


def _manifest(step: int, directory: Path) -> bytes:
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    body = {
        "format": FORMAT,
        "step": step,
        "files": {
            name: {"bytes": path.stat().st_size, "crc32c": _checksum(path)} for name, path in sorted(files.items())
        },
    }
    return json.dumps({**body, "crc32c": _body_checksum(body)}, indent=1).encode()


def _damage(step: int, directory: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if all match the manifest."""
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
        expected = manifest.pop("crc32c")
        if _body_checksum(manifest) != expected or manifest["step"] != step or manifest["format"] != FORMAT:
            return f"{MANIFEST_FILE} does not match its checksum, step or format"
        files: dict[str, dict[str, Any]] = manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST_FILE} cannot be read: {error}"
    except OSError as error:
        raise StoreError(f"cannot read {directory / MANIFEST_FILE}: {error.strerror}; check the disk") from error
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, written were {entry['bytes']}"
        if (found := _checksum(path)) != entry["crc32c"]:
            return f"{name} has CRC-32C {found}, written as {entry['crc32c']}"
    return None


def _body_checksum(body: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(body, sort_keys=True).encode()):08x}"


def _checksum(path: Path) -> str:
    checksum = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                checksum = crc32c(block, checksum)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; check the disk") from error
    return f"{checksum:08x}"
