"""Configs: what is read, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic_run import SCRIPTED, config_of

from libra.pipeline.config import load_config, parse, shipped, to_plain, to_yaml
from libra.pipeline.config_yaml import parse_mapping, parse_value
from libra.resources.config_errors import dotted_keys
from libra.resources.errors import ConfigError


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    """The scripted config with ``changes`` on top, sections merged."""
    result: dict[str, Any] = dict(SCRIPTED)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def refused(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse(merged(changes), "test.yaml")
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        # Unknown keys: in the same section, in another section, at the top.
        ({"algorithm": {"lrr": 1}}, ["algorithm.lrr = 1", "did you mean algorithm.lr?"]),
        ({"lr": 1}, ["lr = 1", "did you mean algorithm.lr?"]),
        ({"nmae": "x"}, ["nmae = 'x'", "did you mean name?"]),
        ({"cluster": {"workers": {"rolout": 2}}}, ["cluster.workers.rolout", "did you mean cluster.workers.rollout?"]),
        ({"store": {"zzz": 1}}, ["store.zzz = 1", "store has: journal_sync, buffer, checkpoint_every, keep"]),
        ({"engine": {"kind": "scriptd"}}, ["engine.kind = 'scriptd'", "did you mean 'scripted'?", "my.module:Name"]),
        # Units and types.
        ({"staleness": {"deadline": "3 parsecs"}}, ["staleness.deadline = '3 parsecs'", "'parsecs'", "'30 s'"]),
        ({"store": {"buffer": "1 gb"}}, ["store.buffer = '1 gb'", "GiB"]),
        ({"deadlines": {"train": "soon"}}, ["deadlines.train = 'soon'", "a number and a unit"]),
        ({"deadlines": {"train": 0}}, ["deadlines.train", "must be above 0"]),
        ({"deadlines": {"train": float("inf")}}, ["deadlines.train", "finite"]),
        ({"steps": "ten"}, ["steps = 'ten'", "must be a whole number"]),
        ({"steps": 0}, ["steps = 0", "must be at least 1"]),
        ({"deterministic": "perhaps"}, ["deterministic = 'perhaps'", "true or false"]),
        ({"buckets": [{"tp": 3}]}, ["buckets.0.tp = 3", "must be 1, 2, 4 or 8"]),
        ({"engine": 3}, ["engine = 3", "must be a mapping"]),
        ({"name": "a/b"}, ["name = 'a/b'", "letters, digits"]),
        # Between keys: both keys and both values.
        (
            {"environment": {"max_turn_tokens": 2000}},
            ["environment.max_turn_tokens = 2000", "engine.max_context = 1024"],
        ),
        (
            {"engine": {"kind": "my.module:Staging", "kv_arena": "1 MiB"}},
            ["engine.kv_arena = 1048576 bytes", "tables alone take 2097152", "or 0"],
        ),
        ({"trainer": {"micro_batch_tokens": 5}}, ["trainer.micro_batch_tokens = 5", "engine.max_context = 1024"]),
        ({"algorithm": {"min_usable": 9}}, ["min_usable is 9", "8 members"]),
        ({"eval": {"every": 50}}, ["eval.every = 50", "steps = 12"]),
        ({"eval": {"every": 2, "tasks": 0}}, ["eval.every = 2", "eval.tasks = 0"]),
        ({"deterministic": True}, ["deterministic = true", "staleness.alpha = 1"]),
        (
            {"deterministic": True, "staleness": {"alpha": 0}, "buckets": [{"instances": 2}],
             "cluster": {"workers": {"rollout": 2}}},
            ["deterministic = true", "buckets.*.instances sum to 2"],
        ),
        (
            {"cluster": {"workers": {"tool": 0}}},
            ["cluster.workers.tool = 0", "environment.inline = false", "environment.inline = true if"],
        ),
        ({"buckets": [{"instances": 2}]}, ["buckets.*.instances sum to 2", "cluster.workers.rollout = 1"]),
        (
            {"batch_groups": 5, "cluster": {"workers": {"train": 3}}},
            ["5 × 8 = 40", "cluster.workers.train = 3", "40 = 13 × 3 + 1"],
        ),
        ({"store": {"buffer": "1 kB"}}, ["store.buffer = 1000", "engine.max_context = 1024"]),
        ({"driver": {"max_inflight": 3}}, ["driver.max_inflight = 3", "algorithm.group_size = 8"]),
        ({"trainer": {"model": "m"}}, ["trainer.model = 'm'", "trainer.kind = 'scripted'"]),
        ({"engine": {"kind": "torch", "options": {}}}, ["engine.kind = 'torch'", "trainer.kind = 'scripted'"]),
        # Buckets.
        (
            {"buckets": [{"tp": 1, "max_context": 512}, {"tp": 1}], "cluster": {"workers": {"rollout": 2}}},
            ["buckets.0.tp and buckets.1.tp are both 1"],
        ),
        (
            {"buckets": [{"tp": 1, "max_context": 512}, {"tp": 2, "max_context": 256}, {"tp": 4}],
             "cluster": {"workers": {"rollout": 3}}},
            ["buckets.1.max_context = 256", "buckets.0.max_context = 512", "ascending"],
        ),
        (
            {"buckets": [{"tp": 1}, {"tp": 2}], "cluster": {"workers": {"rollout": 2}}},
            ["buckets.0.max_context is not given", "buckets.1 follows"],
        ),
        ({"buckets": [{"max_context": 2048}]}, ["buckets.0.max_context = 2048", "engine.max_context = 1024"]),
        ({"buckets": [{"max_context": 100}]}, ["buckets.0.max_context = 100", "no bucket would serve"]),
        ({"buckets": []}, ["buckets", "at least 1"]),
    ],
)  # fmt: skip
def test_an_error_names_the_key_the_value_and_what_would_do(changes: dict[str, Any], fragments: list[str]) -> None:
    message = refused(changes)
    assert message.startswith("the config test.yaml has 1 error:"), message
    for fragment in fragments:
        assert fragment in message, message


def test_all_errors_are_reported_at_once() -> None:
    message = refused({"steps": 0, "nmae": 1, "algorithm": {"lr": -1}, "deadlines": {"bind": "x"}})
    assert "has 4 errors" in message
    for key in ("steps = 0", "nmae = 1", "algorithm.lr = -1", "deadlines.bind = 'x'"):
        assert key in message


def test_durations_and_sizes_are_read_with_units_and_printed_with_units() -> None:
    config = parse(merged({"deadlines": {"train": "90 s", "bind": "250 ms"}, "store": {"buffer": "2 GiB"}}), "test")
    assert (config.deadlines.train, config.deadlines.bind, config.store.buffer) == (90.0, 0.25, 2 * 2**30)
    text = to_yaml(config)
    assert "train: 90 s" in text
    assert "bind: 250 ms" in text
    assert "buffer: 2 GiB" in text


@pytest.mark.parametrize("name", shipped())
def test_a_resolved_config_reads_back_as_itself(name: str) -> None:
    config = load_config(name)
    assert parse(parse_mapping(to_yaml(config), "again"), "again") == config
    assert parse(to_plain(config), "again") == config


def test_a_resolved_config_reads_back_with_text_that_looks_like_numbers(tmp_path: Path) -> None:
    config = config_of(tmp_path, name="1e3", engine={"kind": "scripted", "options": {"script": "1e-3", "x": "true"}})
    assert parse(parse_mapping(to_yaml(config), "again"), "again") == config


def test_the_run_folder_is_named_after_the_run() -> None:
    assert parse({**SCRIPTED, "name": "mine"}, "test").run_dir == Path("runs/mine")
    assert parse({**SCRIPTED, "run_dir": "/elsewhere"}, "test").run_dir == Path("/elsewhere")


def test_shipped_configs_are_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart") == load_config("conf/quickstart.yaml") == load_config("quickstart.yaml")
    with pytest.raises(ConfigError, match=r"there is no config 'quikstart'.*did you mean 'quickstart'\?"):
        load_config("quikstart")
    with pytest.raises(ConfigError, match=r"there is no config 'elsewhere/quickstart\.yaml'"):
        load_config("elsewhere/quickstart.yaml")


def test_a_file_comes_before_a_shipped_config_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripted").write_text("name: mine\nengine: {kind: random}\ntrainer: {kind: scripted}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("scripted").name == "mine"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1.5", 1.5), (".5", 0.5), ("-2E4", -2e4), ("12", 12), ("true", True), ("False", False),
        ("null", None), ("on", "on"), ("30 s", "30 s"), ("1e", "1e"), ("2024-01-02", "2024-01-02"), ("[1, 2]", [1, 2]),
        ("", None), ("'1'", "1"), ("{a: 1}", {"a": 1}),
    ],
)  # fmt: skip
def test_yaml_values_are_read_as_yaml_1_2_reads_them(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("steps: 1\nsteps: 2\n", ["line 2", "'steps' is given twice"]),
        ("steps: [1\n", ["is no valid YAML"]),
        ("- 1\n", ["holds a list"]),
        ("# nothing yet\n", ["is empty; a config is a mapping such as 'steps: 40'"]),
        ("a: !!python/object/apply:os.system [ls]\n", ["is no valid YAML"]),
    ],
)
def test_a_broken_file_is_refused_with_its_line(text: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_mapping(text, "mine.yaml")
    for fragment in ["mine.yaml", *fragments]:
        assert fragment in str(error.value)


def test_overrides_set_dotted_keys_and_the_last_one_wins() -> None:
    changes = ["algorithm.lr=1e-3", "algorithm.lr=2e-3", "buckets=[{tp: 2}]", "buckets.0.instances=1", "name=other"]
    config = load_config("scripted", [*changes, "deadlines.bind=5 s", "engine.options.step_seconds=1 ms"])
    assert config.algorithm.lr == 2e-3
    assert config.buckets[0].tp == 2
    assert config.run_dir == Path("runs/other")
    assert config.deadlines.bind == 5
    assert config.engine.options["step_seconds"] == "1 ms"
    assert config.engine.options["script"], "the other options stay"


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("lr", "a dotted key, '=' and a value"),
        ("=3", "a dotted key, '=' and a value"),
        ("a..b=3", "a dotted key, '=' and a value"),
        ("steps=[1", "no YAML value"),
        ("steps.more=1", "steps is 5 in the config, which has no keys below it"),
        ("algorithm.lrr=3", "algorithm.lrr = 3 (set on the command line)"),
        ("a.b=1", "(set on the command line)"),
    ],
)
def test_a_bad_override_is_refused_by_name(override: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("scripted", [override])
    assert fragment in str(error.value)


def test_list_overrides_check_their_index() -> None:
    with pytest.raises(ConfigError, match="buckets is a list of 1: '7' must be a number from 0 to 0"):
        load_config("scripted", ["buckets=[{tp: 1}]", "buckets.7.tp=2"])


def test_policies_keep_their_own_options() -> None:
    config = load_config("scripted", ["policy.kind=my.module:Policy", "policy.margin=0.25"])
    assert config.policy.options() == {"kind": "my.module:Policy", "margin": 0.25}
    assert parse(to_plain(config), "again") == config


def test_every_key_of_the_config_is_known_by_its_dotted_name(tmp_path: Path) -> None:
    known = set(dotted_keys(type(config_of(tmp_path))))
    assert {"algorithm.lr", "buckets.0.tp", "cluster.workers.rollout", "run_dir"} <= known


def test_inline_tools_need_no_tool_worker() -> None:
    assert config_of(Path("run")).workers == {"rollout": 1, "tool": 1, "reward": 1, "train": 1}
    for tool in (0, 3):
        config = config_of(Path("run"), environment={"inline": True}, cluster={"workers": {"tool": tool}})
        assert config.workers == {"rollout": 1, "tool": 0, "reward": 1, "train": 1}
