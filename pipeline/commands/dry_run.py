"""``libra train --dry-run``: what would stop the run, in a table."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from libra.pipeline.checks import passed, show
from libra.pipeline.config import load_config
from libra.pipeline.dry_run import examine_run
from libra.resources.errors import LibraError


def dry_run(path: str, overrides: Sequence[str], *, resume: bool, fresh: bool) -> None:
    """Check the config at ``path`` and show what was found. Raises `LibraError` if the run would not start."""
    config = load_config(path, overrides)
    checks = examine_run(config, resume=resume, fresh=fresh)
    show(checks, Console())
    if not passed(checks):
        raise LibraError("the run would not start: see what is missing above")
    click.echo(f"\nthe run {config.name} would start in {config.run_dir}")
