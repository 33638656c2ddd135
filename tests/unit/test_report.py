"""The report: built from files alone, whole or broken; and whatever models and tools wrote stays text."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from synthetic_run import make_run

from libra.pipeline.report import write_report
from libra.pipeline.report.charts import Axis, Series, bars, histogram, line_chart, shares
from libra.pipeline.report.svg import Scale, nice_step
from libra.resources.errors import StoreError
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\x1b[31mred\x07\u202egnp.exe"


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "synthetic"
    make_run(path, steps=6)
    return path


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def report(path: Path) -> Page:
    return Page(write_report(path).read_text("utf-8"))


def test_the_report_shows_the_whole_run(run_dir: Path) -> None:
    page = report(run_dir)
    for words in (
        "synthetic", "finished", "0.400 → 0.840", "6 / 6", "held-out", "p50", "p99", "the longest 10 % hold",
        "Where the time went", "busy", "admission", "staleness of trained trajectories", "entropy", "|Δlogp|",
        "gradient norm", "share of tokens clipped", "infra retried", "best reward", "longest", "lowest reward",
        '"name": "get"', "tool_response", "size class", "version 5", "batch_groups: 4",
        "by the way of the KV", "MB in",
    ):  # fmt: skip
        assert words in page.text, words
    assert "What this report lacks" not in page.text
    assert page.tags.count("svg") >= 9


def test_the_report_loads_nothing_from_anywhere(run_dir: Path) -> None:
    page = report(run_dir)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href", "srcset", "data", "action"} & {name for name, _ in page.attributes}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    html = (run_dir / "report.html").read_text("utf-8")
    assert "url(" not in html
    assert "@import" not in html
    assert "http:" not in html
    assert "https:" not in html


def test_the_report_is_built_from_files_alone_and_says_the_same_again(copy: Path) -> None:
    first = write_report(copy).read_bytes()
    (copy / "report.html").unlink()
    assert write_report(copy).read_bytes() == first


@pytest.mark.parametrize("finish", [True, False])
def test_text_of_models_and_tools_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: bool) -> None:
    folder = make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=finish)
    monkeypatch.setattr(HopEnvironment, "render", lambda self, tokens: f"{HOSTILE}{tokens.tolist()}")
    config = folder.read_config()
    config["environment"]["options"] = {}
    config["name"] = HOSTILE
    (folder.path / "config.yaml").write_text(yaml.safe_dump(config))
    if finish:
        summary = (folder.path / "summary.json").read_text().replace('"error": ""', '"error": "<b>boom</b>"')
        (folder.path / "summary.json").write_text(summary)
    page = report(folder.path)
    assert not {"script", "img", "b onerror"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert('x')</script><img src=x onerror=alert(1)>␛[31mred␇\\u202egnp.exe" in page.text
    html = (folder.path / "report.html").read_text("utf-8")
    assert not {"\x1b", "\x07", "\u202e"} & set(html)


def test_a_worker_that_was_lost_is_named_with_its_reason_and_when_it_was_back(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text())
    outage = {"worker": "rollout-0", "role": "rollout", "at": 61.2, "reason": f"vLLM is dead: {HOSTILE}"}
    summary |= {"restarts": 2, "outages": [outage | {"seconds": 33.4}, outage | {"seconds": None}]}
    (copy / "summary.json").write_text(json.dumps(summary))
    page = report(copy)
    assert "workers that lost their role" in page.text
    for words in ("rollout-0", "61 s", "33.4 s", "never", "vLLM is dead: <script>"):
        assert words in page.text
    assert "script" not in page.tags


def test_an_unfinished_run_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, finish=False)
    page = report(folder.path)
    assert "unfinished" in page.text
    assert "0.400 → –" in page.text
    assert "3 / 3" in page.text
    assert "admission" in page.text


def test_a_run_that_has_not_begun_has_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=False)
    (folder.path / "metrics.jsonl").unlink()
    shutil.rmtree(folder.trajectories)
    page = report(folder.path)
    assert "unfinished" in page.text
    assert "nothing recorded" in page.text
    assert "no batch has been committed" in page.text


def test_evaluations_whose_tasks_all_failed_are_shown_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=False)
    evaluation = {"kind": "eval", "time": 0.0, "version": 0, "when": "before", "reward": None, "tasks": 0,
                  "failures": 2, "seconds": 1.0}  # fmt: skip
    with folder.metrics.open("a") as file:
        file.write(json.dumps(evaluation) + "\n")
    assert "all 2 tasks failed at step 0" in report(folder.path).text


def test_a_transcript_that_cannot_be_rendered_says_why(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("no \x1b[31mpixels")

    monkeypatch.setattr(HopEnvironment, "render", broken)
    page = report(copy)
    assert "cannot be rendered: RuntimeError: no ␛[31mpixels" in page.text
    assert "best reward" in page.text


def test_damaged_files_are_named_and_the_rest_is_shown(copy: Path) -> None:
    (copy / "trajectories" / "step-000002.zarr" / "zarr.json").write_text("{")
    chunk = next((copy / "trajectories" / "step-000005.zarr" / "tokens").glob("c*"))
    chunk.write_bytes(b"\x00" * chunk.stat().st_size)
    (copy / "tokenizer" / "tokenizer.json").unlink()
    (copy / "summary.json").write_text("not json")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    page = report(copy)
    for words in ("What this report lacks", "step-000002.zarr", "step-000005.zarr", "tokenizer.json", "token ids",
                  "1 lines of metrics.jsonl", "6 / 6"):  # fmt: skip
        assert words in page.text, words


def test_without_its_environment_trajectories_are_decoded_by_the_tokenizer(copy: Path) -> None:
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["environment"]["kind"] = "gone.away:Env"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    page = report(copy)
    assert "the environment cannot be made here" in page.text
    assert '"name": "get"' in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rendering_does_not_depend_on_the_environments_options(run_dir: Path) -> None:
    tokenizer = run_dir / "tokenizer" / "tokenizer.json"
    environment = HopEnvironment(EnvironmentConfig(), str(tokenizer), 0)
    text = environment.render(environment.reset(environment.task("train", 0)))
    assert text.splitlines()[1] in report(run_dir).text or "find" in report(run_dir).text


# -- charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rough", "step"), [(0.3, 0.5), (1.0, 1.0), (1.01, 2.0), (3.0, 5.0), (7.0, 10.0), (0.02, 0.02), (6e-7, 1e-6)]
)
def test_steps_of_axes_are_round(rough: float, step: float) -> None:
    assert nice_step(rough) == pytest.approx(step)


def test_scales_map_their_ends_to_their_ends() -> None:
    for scale in (Scale(2.0, 8.0, 10.0, 100.0), Scale(1.0, 1000.0, 0.0, 300.0, log=True)):
        assert scale(scale.low) == pytest.approx(scale.start)
        assert scale(scale.high) == pytest.approx(scale.end)
        assert all(scale.low <= tick <= scale.high for tick in scale.ticks(5))
    assert Scale(1.0, 1000.0, 0.0, 300.0, log=True)(10.0) == pytest.approx(100.0)


@pytest.mark.parametrize("values", [[], [0.0], [5.0, 5.0], [float("nan"), 1.0], [1e-9, 2e-9], [-1e6, 1e6]])
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    for y in (Axis("y"), Axis("y", low=0.0), Axis("y", low=0.0, high=1.0)):
        page = Page(
            line_chart([Series("one", points, 1), Series("two", points, 2, "dots")], Axis("step", whole=True), y)
        )
        assert "svg" in page.tags or "nothing recorded" in page.text
        numbers = [value for name, value in page.attributes if name in ("x", "y", "cx", "cy", "points")]
        assert not any("nan" in str(value) or "inf" in str(value) for value in numbers)


def test_histograms_bars_and_shares_say_when_they_are_empty() -> None:
    assert "nothing recorded" in histogram([1.0, 2.0], [0], Axis("x", log=True), Axis("y"))
    assert "nothing recorded" in bars({}, "x", Axis("y"))
    assert "nothing recorded" in shares({}, {})


def test_histograms_mark_the_tail() -> None:
    edges = np.geomspace(1, 100, 6).tolist()
    page = Page(histogram(edges, [5, 4, 3, 2, 1], Axis("x", log=True), Axis("y"), tail_from=edges[3]))
    styles = [value for name, value in page.attributes if name == "class"]
    assert styles.count("f1") == 3
    assert styles.count("f2") == 2


def test_labels_are_escaped() -> None:
    series: Any = [Series(HOSTILE, [(0, 1), (1, 2)], 1, "dots"), Series("b", [(0, 1)], 2)]
    parts = [
        line_chart(series, Axis(HOSTILE), Axis(HOSTILE)),
        shares({HOSTILE: {HOSTILE: 1.0}}, {HOSTILE: 1}),
        bars({HOSTILE: 1.0}, HOSTILE, Axis(HOSTILE)),
    ]
    assert not {"script", "img"} & set(Page("".join(parts)).tags)
