"""``libra profile``: measure an engine and a trainer, and keep the result as a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from libra.pipeline.commands.outputs import check_writable
from libra.resources.errors import ConfigError


def _numbers(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``1,4,16`` as a tuple, ascending."""
    if value is None:
        return None
    try:
        numbers = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        raise click.BadParameter(f"{value!r}: give whole numbers with commas between, as in 1,4,16") from None
    least = 0 if parameter.name == "reused" else 1
    if numbers[0] < least:
        raise click.BadParameter(f"{numbers[0]} is below {least}")
    return numbers


def _dimension(name: str, text: str) -> Any:
    """An option that replaces one dimension of the grid."""
    return click.option(f"--{name}", metavar="N,N,…", callback=_numbers, help=text)


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--out", type=click.Path(dir_okay=False), help="The profile; NAME.yaml when not given.")
@click.option("--name", help="Of the profile; HARDWARE_MODEL when not given.")
@click.option("--hardware", default="cpu", show_default=True, help="Kind of device that this machine has.")
@click.option("--model", "model", help="What the model is called; the config's name when not given.")
@_dimension("tp", "TP degrees.")
@_dimension("batch", "Sequences of a decode step.")
@_dimension("context", "Tokens before a decode step.")
@_dimension("prefill", "Tokens of a prefill.")
@_dimension("reused", "Tokens before a prefill whose KV is reused.")
@_dimension("length", "Tokens of a training sequence.")
@_dimension("rows", "Sequences of a training batch.")
@_dimension("micro-batch-tokens", "Padded tokens of a micro-batch.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Samples a point.")
def profile(
    config: str, overrides: tuple[str, ...], out: str | None, name: str | None, hardware: str, model: str | None,
    repeats: int, **grid: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """Measure the engine and the trainer that CONFIG describes, in their own processes, over a grid.

    The profile replaces derived costs: libra plan --profile FILE, libra simulate SCENARIO --profile FILE.
    """
    import asyncio
    import tempfile

    from rich.console import Console

    from libra.pipeline.config import load_config
    from libra.pipeline.profile.measure import Subject, default_grid, measure
    from libra.resources.calibration import save_profile
    from libra.resources.specs import load_hardware

    log = Console(stderr=True, highlight=False)
    run = load_config(config, overrides)
    spec = load_hardware(hardware)
    model = model or run.name
    name = name or f"{spec.name}_{model}"
    target = Path(out or f"{name}.yaml")
    if target.exists():
        raise ConfigError(f"{target} exists already; name another file by --out, or remove it")
    check_writable(target, "--out")
    chosen = default_grid(run, **{key: value for key, value in grid.items() if value})
    chosen = chosen.model_copy(update={"repeats": repeats})
    with tempfile.TemporaryDirectory(prefix="libra-profile-") as folder:
        found = asyncio.run(measure(Subject(run, spec, Path(folder)), chosen, name, model, log.print))
    save_profile(found, target)
    for fit, error in found.provenance.residuals.items():
        click.echo(f"{fit}: {error:.1%}")
    click.echo(str(target))
