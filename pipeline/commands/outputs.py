"""Files that a command writes at its end, looked at before its work begins."""

from __future__ import annotations

import os
from pathlib import Path

from libra.resources.errors import ConfigError


def check_writable(file: Path, option: str) -> None:
    """`ConfigError` if the file that ``option`` names could not be written: before minutes of work, not after them."""
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {file} cannot be written: its folder is missing or read-only; name another file")
