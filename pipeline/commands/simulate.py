"""``libra simulate``: policies compared on a scenario, or the published experiments side by side with simulated
ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command()
@click.argument("scenario")
@click.option("--seeds", type=click.IntRange(min=1), help="Number of seeds; the scenario's own when not given.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write an offline report there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def simulate(scenario: str, seeds: int | None, html: str | None, as_json: bool) -> None:
    """Simulate SCENARIO: a YAML file or a shipped one (drift, small); 'paper': the published experiments; 'jobs':
    several runs that share a cluster."""
    from rich.console import Console

    from libra.pipeline.simulate.jobs import example
    from libra.pipeline.simulate.pages import comparison_page, comparison_rows, paper_page, shared_page
    from libra.pipeline.simulate.paper import experiments
    from libra.pipeline.simulate.scenario import load_scenario
    from libra.pipeline.simulate.tables import comparison_table, paper_table, shared_table
    from libra.pipeline.simulate.variants import compare, with_seeds

    log = Console(stderr=True, highlight=False)
    console = Console(highlight=False) if Console().is_terminal else Console(highlight=False, width=160)
    if scenario == "paper":
        figures = experiments(seeds or 3, log.print)
        if as_json:
            click.echo(json.dumps([figure.to_plain() for figure in figures]))
        else:
            console.print(paper_table(figures))
        page = paper_page(figures) if html else ""
    elif scenario == "jobs":
        shared = example(seeds or 3)
        if as_json:
            click.echo(json.dumps([asdict(each) for each in shared]))
        else:
            console.print(shared_table(shared))
        page = shared_page(shared) if html else ""
    else:
        loaded = load_scenario(scenario)
        loaded = with_seeds(loaded, seeds) if seeds else loaded
        results = compare(loaded, log.print)
        if as_json:
            click.echo(json.dumps(comparison_rows(results)))
        else:
            console.print(comparison_table(loaded, results))
        page = comparison_page(loaded, results) if html else ""
    if html:
        Path(html).write_text(page, encoding="utf-8")
        log.print(html)
