"""Turns pydantic's errors into one message that a person can act on.

Invariant: every error is named by its dotted key with the value that was given, and says what would do; an unknown key
comes with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from libra.resources.errors import ConfigError

C = TypeVar("C", bound=BaseModel)
_TEXTS = {
    "missing": "must be given",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text; quote it if it is",
    "path_type": "must be a path",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "too_short": "needs at least {min_length} (has {actual_length})",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}


def explain(error: ValidationError, model: type[BaseModel], source: str, overridden: Sequence[str] = ()) -> str:
    """The whole message: ``source``, the number of errors, and each with key, value and what would do."""
    blocks = _all_blocks(error, model, "", overridden)
    count = "1 error" if len(blocks) == 1 else f"{len(blocks)} errors"
    return f"the config {source} has {count}:\n" + "\n".join(blocks)


def checked_options(model: type[C], section: str, kind: str, options: Mapping[str, Any]) -> C:
    """``options``, given at ``section`` of the config (``environment.options``) to ``kind``, as ``model``.

    `ConfigError` as that of a config: each key with its value and what would do.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        blocks = _all_blocks(error, model, f"{section}.", ())
        count = "1 error" if len(blocks) == 1 else f"{len(blocks)} errors"
        raise ConfigError(f"the options of {kind} have {count}:\n" + "\n".join(blocks)) from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'torch'?"`` or nothing."""
    matches = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model, sections included; items of lists stand as ``buckets.0.tp``."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for nested, infix in _nested(field.annotation):
            yield from dotted_keys(nested, f"{prefix}{name}.{infix}")


def _follows(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """Whether pydantic reports a list as too short only because its items are wrong."""
    loc = detail["loc"]
    inner = any(other["loc"][: len(loc)] == loc for other in details if other is not detail)
    return detail["type"] == "too_short" and inner


def _all_blocks(error: ValidationError, model: type[BaseModel], prefix: str, overridden: Sequence[str]) -> list[str]:
    details = error.errors(include_url=False)
    own = [detail for detail in details if not _follows(detail, details)]
    return [block for detail in own for block in _blocks(detail, model, prefix, overridden)]


def _blocks(detail: ErrorDetails, model: type[BaseModel], prefix: str, overridden: Sequence[str]) -> Iterator[str]:
    if detail["type"] == "cross_check":
        for problem in detail["ctx"]["problems"]:
            yield f"  {problem}"
        return
    key = ".".join(str(part) for part in detail["loc"]) or ("(all)" if prefix else "(config)")
    whole_section = detail["type"] in ("value_error", "assertion_error") and isinstance(detail["input"], dict)
    given = "" if detail["type"] == "missing" or whole_section else f" = {_show(detail['input'])}"
    typed = any(name == key or name.startswith(f"{key}.") for name in overridden)
    origin = " (set on the command line)" if typed else ""
    yield f"  {prefix}{key}{given}{origin}\n      {_text(detail, key, model, prefix)}"


def _text(detail: ErrorDetails, key: str, model: type[BaseModel], prefix: str) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key{_nearest_key(key, model, prefix)}"
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if kind in _TEXTS:
        return _TEXTS[kind].format(**context)
    return detail["msg"]


def _nearest_key(key: str, model: type[BaseModel], prefix: str) -> str:
    """The nearest key in the same section, else the same last word in another section, else what the section holds."""
    known = list(dotted_keys(model))
    section, _, last = key.rpartition(".")
    section = ".".join("0" if part.isdigit() else part for part in section.split("."))
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    if near and not elsewhere:
        return f"; did you mean {prefix}{f'{section}.{near[0]}' if section else near[0]}?"
    if elsewhere:
        return f"; did you mean {prefix}{elsewhere[0]}?"
    anywhere = difflib.get_close_matches(last, {name.rpartition(".")[2] for name in known}, n=1, cutoff=0.75)
    if anywhere:
        return f"; did you mean {prefix}{next(name for name in known if name.rpartition('.')[2] == anywhere[0])}?"
    return f"; {f'{prefix}{section}'.rstrip('.') or 'the config'} has: {', '.join(siblings)}"


def _nested(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    for argument in get_args(annotation):
        for nested, infix in _nested(argument):
            yield nested, infix + ("0." if getattr(annotation, "__origin__", None) is tuple else "")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
