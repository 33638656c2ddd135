"""``libra doctor``: what this machine lacks, in a table."""

from __future__ import annotations

import click
from rich.console import Console

from libra.pipeline.checks import passed, show
from libra.pipeline.doctor import examine
from libra.resources.errors import LibraError


def doctor() -> None:
    """Examine the machine and show what was found. Raises `LibraError` if the quick start would not run."""
    checks = examine()
    show(checks, Console())
    if not passed(checks):
        raise LibraError("the quick start will not run here: see what is missing above")
    click.echo("\nthe quick start will run")
