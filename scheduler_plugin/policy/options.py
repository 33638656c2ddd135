"""Options of a policy, checked against its config model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from libra.resources.config import Config
from libra.resources.errors import ConfigError

_C = TypeVar("_C", bound=Config)


def parsed(model: type[_C], kind: str, options: Mapping[str, Any]) -> _C:
    """``options`` as ``model``; `ConfigError` names each option that is wrong, its value, and those there are."""
    try:
        return model(**options)
    except ValidationError as error:
        problems = "; ".join(
            f"policy.{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()
        )
        raise ConfigError(f"{problems}; {kind} takes {', '.join(model.model_fields) or 'no options'}") from None
