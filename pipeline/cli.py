"""The command line: ``libra`` and ``dask libra``.

Invariants: help needs neither torch nor distributed (commands import what they run when they run); an error, whatever
its kind, is one message on standard error without a traceback or a control character (unless ``--debug``), with exit
code 2 for a wrong config or command line, 1 for everything else and 130 for Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from libra.pipeline.commands.plan import plan
from libra.pipeline.commands.profile import profile
from libra.pipeline.commands.simulate import simulate
from libra.resources.errors import ConfigError, LibraError

EXIT_ERROR, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
_DEBUG = "libra.debug"


class _Commands(click.Group):
    """A group whose commands end with one message instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LibraError as error:
            _end(ctx, str(error), EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR)
        except KeyboardInterrupt:
            _end(ctx, "interrupted; what had finished is kept, and --resume goes on from there", EXIT_INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever reads our output has gone: click ends in silence
            from libra.pipeline.view.text import explained

            _end(ctx, explained(error), EXIT_ERROR)


def _end(ctx: click.Context, message: str, code: int) -> None:
    """Leave with ``code``. With ``--debug`` the error that is being handled goes on instead, traceback and all."""
    from libra.pipeline.view.text import visible

    if ctx.meta.get(_DEBUG):
        raise
    click.echo(f"libra: {visible(message)}", err=True)
    ctx.exit(code)


def _debug(command: Callable[..., Any]) -> Callable[..., Any]:
    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_DEBUG] = True

    text = "Show tracebacks and debug logs."
    return click.option("--debug", is_flag=True, expose_value=False, callback=remember, help=text)(command)


@click.group(name="libra", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dask-libra", prog_name="libra")
@_debug
def main() -> None:
    """Train LLM agents with reinforcement learning on a Dask cluster.

    A CONFIG is a YAML file or the name of a shipped one (quickstart, scripted); OVERRIDES are dotted keys with values,
    as in algorithm.lr=1e-3. Import paths in it (my.module:Env) are also looked for in this folder.
    """
    _import_from_here()


def _import_from_here() -> None:
    """Let import paths name modules in the working directory, as ``python -m`` does (Dask's processes are started so);
    last, so that a file there takes the place of nothing."""
    with contextlib.suppress(FileNotFoundError):  # the working directory is gone
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)


@main.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--resume", is_flag=True, help="Go on with the run in the run folder.")
@click.option("--fresh", is_flag=True, help="Start anew; a run in the folder is moved aside to FOLDER.1, .2, …")
@click.option("--dry-run", is_flag=True, help="Check everything that can be checked without running.")
@click.option("--scheduler", metavar="ADDRESS", help="Use the running cluster at tcp://host:port.")
@_debug
def train(
    config: str, overrides: tuple[str, ...], resume: bool, fresh: bool, dry_run: bool, scheduler: str | None
) -> None:
    """Train the policy that CONFIG describes."""
    if resume and fresh:
        raise click.UsageError("--resume goes on with a run and --fresh starts anew: give one of them")
    if scheduler:
        overrides = (*overrides, f"cluster.scheduler={scheduler}")
    if dry_run:
        from libra.pipeline.commands.dry_run import dry_run as check

        check(config, overrides, resume=resume, fresh=fresh)
        return
    from libra.pipeline.commands.train import train as run

    run(config, overrides, resume=resume, fresh=fresh)


@main.group(name="config")
def config_group() -> None:
    """Look at configs."""


@config_group.command(name="show")
@click.argument("config")
@click.argument("overrides", nargs=-1)
@_debug
def config_show(config: str, overrides: tuple[str, ...]) -> None:
    """Print the resolved CONFIG: every key, defaults included."""
    from libra.pipeline.config import load_config, to_yaml

    click.echo(to_yaml(load_config(config, overrides)), nl=False)


@main.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False))
@_debug
def report(run: str) -> None:
    """Build report.html of the run folder RUN from its files alone, finished or not."""
    from libra.pipeline.report import write_report

    click.echo(write_report(Path(run)))


@main.command()
@_debug
def doctor() -> None:
    """Say what this machine lacks, and the command that mends it. Exits 0 if the quick start will run."""
    from libra.pipeline.commands.doctor import doctor as examine

    examine()


main.add_command(plan)
main.add_command(profile)
main.add_command(simulate)


if __name__ == "__main__":
    main()
