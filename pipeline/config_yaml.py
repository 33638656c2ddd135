"""YAML in and out of configs.

Invariants: numbers are read as YAML 1.2 reads them (``1e-3`` is a number), a key given twice is an error, and what
`dump` writes reads back as an equal config.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from libra.resources.config import parse_bytes, parse_seconds
from libra.resources.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 numbers, only true and false as booleans, and no repeated keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":float", ":bool", ":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what `_Loader` would read as a number or a boolean."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def parse_value(text: str) -> Any:
    """One YAML value, as an override gives it. Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """A YAML document that is a mapping with text keys. Raises `ConfigError` with the line, or for an empty one."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line} is no valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is no valid YAML: {error}") from None
    if data is None:
        raise ConfigError(f"{source} is empty; a config is a mapping such as 'steps: 40'")
    if not isinstance(data, dict):
        raise ConfigError(f"{source} holds a {type(data).__name__}; a config is a mapping such as 'steps: 40'")
    return data


def dump(config: BaseModel) -> str:
    """YAML of a config: keys in the order of their definition, durations and sizes with units."""
    return yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def plain(value: Any) -> Any:
    """Configs as plain dicts and lists of YAML's own types, durations and sizes as text with a unit."""
    if isinstance(value, BaseModel):
        own = {
            name: _quantity(getattr(value, name), field) if _parser(field) else plain(getattr(value, name))
            for name, field in type(value).model_fields.items()
        }
        return own | plain(value.model_extra or {})
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _parser(field: FieldInfo) -> Any:
    """`parse_seconds`, `parse_bytes` or None: what reads this field."""
    parsers = (item.func for item in field.metadata if isinstance(item, BeforeValidator))
    return next((parser for parser in parsers if parser in (parse_seconds, parse_bytes)), None)


_SECONDS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
_BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def _quantity(value: Any, field: FieldInfo) -> Any:
    """``15 min``, ``1 GiB``: the largest unit that leaves a whole number and reads back as the same value."""
    parser = _parser(field)
    for unit, size in _SECONDS if parser is parse_seconds else _BYTES:
        number = round(value / size)
        text = f"{number} {unit}"
        if number >= 1 and parser(text) == value:
            return text
    return value
