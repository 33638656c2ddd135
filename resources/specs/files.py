"""Reading spec files: a path, or the name of a shipped one.

Invariant: every failure is one `ConfigError` that names the file, the key and what would do.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import resources as package_data
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from libra.resources.config import Config
from libra.resources.errors import ConfigError

Spec = TypeVar("Spec", bound=Config)


def shipped(folder: str) -> list[str]:
    """Names of the specs in ``conf/<folder>`` that come with the package."""
    files = (package_data.files("libra.conf") / folder).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read(name: str | Path, folder: str, noun: str) -> tuple[str, dict[str, Any]]:
    """What to call the spec in messages, and its mapping: the file ``name``, else the shipped spec of that name.

    Names match without regard to case, ``-``, ``_`` and ``.`` (``Qwen3-0.6B`` is ``qwen3_0_6b``).
    """
    path = Path(name)
    if path.is_file():
        try:
            return str(path), _mapping(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the {noun} {path}: {error}") from None
    known = {_plain(each): each for each in shipped(folder)}
    found = known.get(_plain(path.name.removesuffix(".yaml")))
    if found is None:
        close = get_close_matches(_plain(str(name)), list(known), n=1)
        hint = f"; did you mean {known[close[0]]}?" if close else ""
        raise ConfigError(
            f"there is no {noun} {str(name)!r}; give the path of a YAML file, or one of "
            f"{', '.join(shipped(folder))}{hint}"
        )
    text = (package_data.files("libra.conf") / folder / f"{found}.yaml").read_text(encoding="utf-8")
    return f"{folder}/{found}.yaml (shipped)", _mapping(text, found)


def parse(spec: type[Spec], data: dict[str, Any], source: str) -> Spec:
    """Validate a mapping as ``spec``; `ConfigError` lists every wrong key."""
    try:
        return spec.model_validate(data)
    except ValidationError as error:
        lines = []
        for each in error.errors():
            said = each["msg"].removeprefix("Value error, ")
            at = ".".join(map(str, each["loc"]))
            # What a whole mapping is wrong in is said by its message, which names keys and values.
            lines.append(f"{at}: {said} (got {each['input']!r})" if at else said)
        raise ConfigError(f"{source} is no valid {spec.__name__}:\n  " + "\n  ".join(lines)) from None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _mapping(text: str, source: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is no YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source} holds {type(data).__name__}, not a mapping of keys to values")
    return data
