"""``libra train``: run a config on a cluster, and say where its report lies."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from types import FrameType

import click

from libra.pipeline.api import Run
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.report import write_report
from libra.pipeline.run.prepare import check_config
from libra.pipeline.run.train import nothing_left
from libra.pipeline.run_folders import has_begun, make_way
from libra.pipeline.store.lock import RunLock
from libra.pipeline.store.run_folder import IDENTITY_FILE
from libra.pipeline.view.text import explained, one_line, visible
from libra.pipeline.view.view import terminal
from libra.resources.cluster.tuning import tune


def train(path: str, overrides: Sequence[str], *, resume: bool, fresh: bool) -> None:
    """Train the config at ``path`` until its last step. Raises `LibraError`s; ``KeyboardInterrupt`` ends the run, and
    so do SIGTERM, which is how batch systems say it, and SIGHUP, which is how a closed terminal does."""
    config = load_config(path, overrides)
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, _interrupt)
    # A lost scheduler is one message of ours; Dask's own words on it are tracebacks of attempts to reconnect.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    tune()
    if resume and config.run_dir.exists() and nothing_left(config) is not None:
        click.echo(f"{config.name} is finished: all its {config.steps} steps are trained; steps=<more> goes on with it")
        return
    if not resume:
        check_config(config)
    earlier = "the earlier run" if has_begun(config.run_dir) else "an earlier try, which never began,"
    moved = make_way(config.run_dir, resume=resume, fresh=fresh)
    if moved:
        click.echo(visible(f"{earlier} in {config.run_dir} is now in {moved}"))
    where = config.cluster.scheduler or "a local cluster"
    click.echo(f"starting {config.name} on {visible(where)}; Ctrl-C ends it, --resume goes on")
    try:
        with Run(config, resume=resume, display=terminal()) as run:
            run.fit()
    finally:
        _report(config)


def _report(config: RunConfig) -> None:
    """Write the report, if the run folder is there and nobody else's. What is wrong with it is a line of warning: it
    never takes the place of what the run itself ended with."""
    path = config.run_dir
    if not (path / IDENTITY_FILE).is_file() or RunLock.holder(path) is not None:
        return
    try:
        click.echo(f"report: {visible(str(write_report(path)))}")
    except Exception as error:  # noqa: BLE001 - a report is made of whatever a run has left behind
        click.echo(f"warning: no report: {one_line(explained(error))}", err=True)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
