"""Dotted overrides on top of a config: ``algorithm.lr=1e-3``, ``buckets.0.instances=2``.

Invariant: an override sets exactly the key it names; its value is read as YAML. Whether the key exists is for the
config's own check to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from libra.pipeline.config_yaml import parse_value
from libra.resources.errors import ConfigError


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set the overrides in ``data`` in place, later ones winning; returns their dotted keys.

    Raises `ConfigError` naming every override that cannot be read.
    """
    problems, keys = [], []
    for override in overrides:
        try:
            keys.append(_apply(data, override))
        except ValueError as error:
            problems.append(f"  {override}\n      {error}")
    if problems:
        count = "an override" if len(problems) == 1 else f"{len(problems)} overrides"
        raise ConfigError(f"cannot read {count}:\n" + "\n".join(problems))
    return keys


def _apply(data: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise ValueError("an override is a dotted key, '=' and a value, as in algorithm.lr=1e-3")
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is no YAML value ({str(error).splitlines()[0]}); quote it if it is text") from None
    *parents, last = key.split(".")
    node: Any = data
    for depth, part in enumerate(parents):
        node = _descend(node, part, ".".join(parents[:depth]))
    _set(node, last, value, ".".join(parents))
    return key


def _descend(node: Any, part: str, path: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, path)]
    _require_mapping(node, path)
    if node.get(part) is None:
        node[part] = {}
    return node[part]


def _set(node: Any, part: str, value: Any, path: str) -> None:
    if isinstance(node, list):
        node[_index(node, part, path)] = value
    else:
        _require_mapping(node, path)
        node[part] = value


def _index(node: list[Any], part: str, path: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ValueError(f"{path} is a list of {len(node)}: {part!r} must be a number from 0 to {len(node) - 1}")
    return int(part)


def _require_mapping(node: Any, path: str) -> None:
    if not isinstance(node, dict):
        raise ValueError(f"{path} is {node!r} in the config, which has no keys below it")
