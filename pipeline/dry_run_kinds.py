"""Builds a run's engine and trainer as their processes would: ``python -m libra.pipeline.dry_run_kinds``.

A process of its own, because engines and trainers import torch. Reads the arguments as JSON from standard input and
writes ``{"engine": error or null, "trainer": error or null}``. Nothing is trained, loaded or written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from libra.resources.errors import LibraError
from libra.tasks.child.trainer_host import build
from libra.tasks.engines.base import EngineConfig
from libra.tasks.registry import engine_class


def main() -> None:
    """Build both, say what went wrong."""
    config = json.load(sys.stdin)
    found = {"engine": _error(lambda: _engine(config)), "trainer": _error(lambda: build(config).close())}
    sys.stdout.write(json.dumps(found))


def _engine(config: dict[str, Any]) -> None:
    settings = EngineConfig(**config["engine"])
    kind = engine_class(settings.kind)
    kind(settings, tokenizer_path=config["tokenizer"], deterministic=config["deterministic"]).close()


def _error(action: Callable[[], None]) -> str | None:
    try:
        action()
    except LibraError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a user's kind may raise anything; the dry run shows it
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()
