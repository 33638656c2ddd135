"""``libra simulate``: policies compared on a scenario, a recorded run replayed, or the published experiments side by
side with simulated ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from libra.pipeline.commands.outputs import check_writable
from libra.resources.errors import ConfigError


@click.command()
@click.argument("scenario")
@click.option("--seeds", type=click.IntRange(min=1), help="Number of seeds; the scenario's own when not given.")
@click.option("--profile", help="A profile (libra profile) that replaces derived costs.")
@click.option("--correct", is_flag=True, help="A run: correct costs by its first half, compare the second.")
@click.option("--quick", is_flag=True, help="'paper': one seed and short runs, some seconds instead of minutes.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write an offline report there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def simulate(
    scenario: str, seeds: int | None, profile: str | None, correct: bool, quick: bool, html: str | None, as_json: bool
) -> None:
    """Simulate SCENARIO: a YAML file or a shipped one (drift, rough, small); the folder of a run: that run, simulated
    step times beside the real ones; 'paper': the published experiments; 'jobs', or a file with jobs: several runs that
    share a cluster."""
    from rich.console import Console

    from libra.pipeline.simulate.jobs import compare_shares, is_shared, load_shared
    from libra.pipeline.simulate.pages import comparison_page, comparison_rows, replay_page, shared_page
    from libra.pipeline.simulate.paper import experiments
    from libra.pipeline.simulate.paper.experiments import QUICK
    from libra.pipeline.simulate.paper.page import paper_page
    from libra.pipeline.simulate.paper.runs import Size
    from libra.pipeline.simulate.replay import is_run, read_recording, replay
    from libra.pipeline.simulate.scenario import load_scenario
    from libra.pipeline.simulate.tables import comparison_table, paper_table, replay_table, shared_table
    from libra.pipeline.simulate.variants import compare, with_seeds
    from libra.resources.calibration import load_profile

    if profile and scenario in ("paper", "jobs"):
        raise ConfigError(f"--profile {profile}: {scenario!r} brings its own costs; leave it out")
    if quick and scenario != "paper":
        raise ConfigError(f"--quick shortens the published experiments; for {scenario!r} give fewer --seeds or steps")
    if html:
        check_writable(Path(html), "--html")
    log = Console(stderr=True, highlight=False)
    console = Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=160)
    if scenario == "paper":
        size = replace(QUICK if quick else Size(), **({"seeds": seeds} if seeds else {}))
        paper = experiments(size, log.print)
        if as_json:
            click.echo(json.dumps([figure.to_plain() for figure in paper.figures]))
        else:
            console.print(paper_table(paper))
        page = paper_page(paper) if html else ""
    elif not is_run(scenario) and is_shared(scenario):
        jobs = load_shared(scenario)
        shared = compare_shares(jobs.model_copy(update={"seeds": tuple(range(seeds))}) if seeds else jobs)
        if as_json:
            click.echo(json.dumps([asdict(each) for each in shared]))
        else:
            console.print(shared_table(shared))
        page = shared_page(shared) if html else ""
    elif is_run(scenario):
        replayed = replay(read_recording(Path(scenario)), load_profile(profile) if profile else None, correct)
        if as_json:
            click.echo(json.dumps(replayed.to_plain()))
        else:
            console.print(replay_table(replayed))
        page = replay_page(replayed) if html else ""
    else:
        loaded = load_scenario(scenario)
        loaded = with_seeds(loaded, seeds) if seeds else loaded
        loaded = loaded.model_copy(update={"profile": profile}) if profile else loaded
        results = compare(loaded, log.print)
        if as_json:
            click.echo(json.dumps(comparison_rows(results)))
        else:
            console.print(comparison_table(loaded, results))
        page = comparison_page(loaded, results) if html else ""
    if html:
        Path(html).write_text(page, encoding="utf-8")
        log.print(html)
