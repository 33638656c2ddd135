"""``libra simulate paper``: every published figure is there, and what is said of each follows one rule.

No test asserts that a simulated figure agrees with a published one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st

from libra.pipeline.commands.simulate import simulate
from libra.pipeline.simulate.paper import PUBLISHED, Figure, Paper, Published, judged
from libra.pipeline.simulate.paper.judged import ROUNDING, TOLERANCE, absent, met
from libra.pipeline.simulate.paper.page import paper_page
from libra.pipeline.simulate.paper.plots import Plot
from libra.resources.errors import ConfigError

VALUES = st.floats(1e-3, 1e6)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], str]:
    """The figures as JSON and the page of one quick run of the command."""
    page = tmp_path_factory.mktemp("paper") / "paper.html"
    result = CliRunner().invoke(simulate, ["paper", "--quick", "--json", "--html", str(page)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), page.read_text()


def test_every_published_figure_is_shown_with_a_value_or_a_reason(shown: tuple[list[dict[str, object]], str]) -> None:
    figures, _ = shown
    keys = [figure["published"]["key"] for figure in figures]  # type: ignore[index]
    assert list(dict.fromkeys(keys)) == [published.key for published in PUBLISHED]
    for figure in figures:
        assert figure["remark"]
        if figure["simulated"] is None:
            assert figure["status"] == "not reproduced"
            assert str(figure["remark"]).startswith("not simulated: ")


def test_statuses_of_the_run_follow_the_rule(shown: tuple[list[dict[str, object]], str]) -> None:
    for figure in shown[0]:
        published = Published(**figure["published"])  # type: ignore[arg-type]
        if figure["status"] != "not reproduced":
            assert met(published, figure["simulated"]), published.key  # type: ignore[arg-type]
        if figure["status"] == "derived":
            assert "Tuned" not in str(figure["remark"])


def test_the_page_is_offline_and_has_the_main_pictures(shown: tuple[list[dict[str, object]], str]) -> None:
    page = shown[1]
    assert not re.search(r"https?://|<script|src=", page)
    for title in ("Ablation", "Throughput by context", "The tail", "Drift", "Planner&#x27;s search", "Time over that"):
        assert title in page
    assert page.count("<svg") == 6


def test_the_table_is_printed_without_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Paper(tuple(absent(published) for published in PUBLISHED if published.missing)[:2], ())
    monkeypatch.setattr("libra.pipeline.simulate.paper.experiments", lambda size, progress: few)
    output = CliRunner().invoke(simulate, ["paper"]).stdout
    assert "2 not reproduced" in output
    assert "not simulated" in output


def test_quick_is_for_the_published_experiments() -> None:
    result = CliRunner().invoke(simulate, ["small", "--quick"])
    assert isinstance(result.exception, ConfigError)
    assert "give fewer --seeds" in str(result.exception)


def test_the_list_has_values_sources_and_distinct_keys() -> None:
    assert len({published.key for published in PUBLISHED}) == len(PUBLISHED)
    for published in PUBLISHED:
        assert published.value > 0
        assert published.source
        assert not published.missing or published.missing.startswith("not simulated: ")


PUBLISHED_STRATEGY = st.builds(
    Published, st.just("k"), st.just("g"), st.just("n"), st.just("s"), VALUES, st.just("the source"),
    st.sampled_from(["=", "<=", ">="]),
)  # fmt: skip


@given(PUBLISHED_STRATEGY, st.lists(VALUES, min_size=1, max_size=5), st.sampled_from(["", "a rate"]))
def test_one_rule_for_every_figure(published: Published, values: list[float], tuned: str) -> None:
    figure = judged(published, values, "the reason", tuned, "agrees")
    ratio = sum(values) / len(values) / published.value
    # Where rounding could decide, either verdict is right.
    edges = (1 - TOLERANCE, 1 + TOLERANCE, 1 - ROUNDING, 1 + ROUNDING)
    assume(all(abs(ratio - edge) > 1e-9 for edge in edges))
    near = {
        "=": 1 - TOLERANCE <= ratio <= 1 + TOLERANCE, "<=": ratio <= 1 + ROUNDING, ">=": ratio >= 1 - ROUNDING,
    }[published.relation]  # fmt: skip
    assert figure.status == (("tuned" if tuned else "derived") if near else "not reproduced")
    assert ("the reason" in figure.remark) != near
    assert (tuned in figure.remark) and (figure.spread == 0 or len(values) > 1)


def test_a_figure_needs_a_reason_and_a_value() -> None:
    with pytest.raises(ValueError, match="must both be given"):
        judged(PUBLISHED[0], [1.0], "")
    with pytest.raises(ValueError, match="must both be given"):
        judged(PUBLISHED[0], [], "why")


def test_text_is_escaped(tmp_path: Path) -> None:
    odd = Published("k", "a <group>", "a <figure>", "s", 1.0, "<source>", missing="not simulated: <why>")
    page = paper_page(Paper((absent(odd),), (Plot("<t>", "x", "y", {"<l>": [(0.0, 1.0), (1.0, 2.0)], "m": []}),)))
    for name in ("group", "figure", "source", "why", "t", "l"):
        assert f"<{name}>" not in page
        assert f"&lt;{name}&gt;" in page or name == "l"
    assert Figure(odd, None, "not reproduced", "").name == "a <figure>"
