"""``libra train``: run a config on a cluster, and say where its report lies."""

from __future__ import annotations

from collections.abc import Sequence

import click

from libra.pipeline.api import Run
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.report import write_report
from libra.pipeline.run_folders import make_way
from libra.pipeline.view.text import visible
from libra.pipeline.view.view import terminal


def train(path: str, overrides: Sequence[str], *, resume: bool, fresh: bool) -> None:
    """Train the config at ``path`` until its last step. Raises `LibraError`s; ``KeyboardInterrupt`` ends the run."""
    config = load_config(path, overrides)
    moved = make_way(config.run_dir, resume=resume, fresh=fresh)
    if moved:
        click.echo(f"the earlier run in {config.run_dir} is now in {moved}")
    try:
        with Run(config, resume=resume, display=terminal()) as run:
            run.fit()
    finally:
        _report(config)


def _report(config: RunConfig) -> None:
    if config.run_dir.is_dir():
        click.echo(f"report: {visible(str(write_report(config.run_dir)))}")
