"""What is looked at before a run costs anything, and in which words it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import libra
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.run.prepare import TOKENIZER, check_arenas, check_config, prepare
from libra.resources.errors import BrokenEnvironmentError, ConfigError, StoreError
from libra.scheduler_plugin.cmlfq.policy import CMlfq


def scripted(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config("scripted", [f"run_dir={run_dir}", *overrides])


RAISED = r"raised Boom: boom \x1b\[31mred second line; mend it"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Init", rf"__init__\(\) {RAISED}"),
        ("Tokenizer", rf"make_tokenizer\(\) {RAISED}"),
        ("NoText", r"make_tokenizer\(\) returned None; it must return the text of a tokenizer.json"),
        ("Prompts", rf"prompts\(\) {RAISED}"),
        ("Many", r"prompts\(\) returned 'many'; it must return a whole number"),
        ("Task", rf"task\('train', 0\) {RAISED}"),
        ("Opaque", r"task\('train', 0\) returned \{'x': .*it must return plain values \(.* cannot be packed"),
        ("Reset", rf"reset\(\) {RAISED}"),
        ("Nothing", r"reset\(\) returned None; it must return the prompt's token ids"),
        ("Fractions", r"reset\(\) returned an array of shape \(1,\) and dtype float64; it must return the prompt's"),
    ],
)
def test_a_broken_environment_is_named_with_its_method_and_its_own_words(tmp_path: Path, kind: str, words: str) -> None:
    config = scripted(tmp_path / "run", f"environment.kind=broken_environments:{kind}")
    with pytest.raises(BrokenEnvironmentError, match=rf"^environment broken_environments:{kind}: {words}") as error:
        prepare(config, tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "guess.yaml"
    wrong.write_text("name: guess\n")
    with pytest.raises(ConfigError, match=rf"^tokenizer: {wrong} is no tokenizer.json \(.*\)"):
        check_config(scripted(tmp_path / "run", f"tokenizer={wrong}"))
    config = scripted(tmp_path / "run", "environment.kind=broken_environments:Garbled")
    with pytest.raises(ConfigError, match=rf"^environment.kind: {tmp_path / TOKENIZER} is no tokenizer.json"):
        prepare(config, tmp_path)


def test_a_file_that_a_policy_cannot_learn_from_is_named_before_anything_starts(tmp_path: Path) -> None:
    for_another, damaged = tmp_path / "other.bin", tmp_path / "damaged.bin"
    for_another.write_bytes(CMlfq({}).learned())
    damaged.write_bytes(for_another.read_bytes()[:-1])
    for kind, file, words in (
        ("cmlfq", damaged, "its checksum does not match"),
        ("cmlfq", tmp_path / "nowhere.bin", "No such file"),
        ("least_loaded", for_another, "LeastLoaded learns nothing"),
    ):
        config = scripted(tmp_path / "run", f"policy.kind={kind}", f"policy.learn_from=[{file}]")
        with pytest.raises(ConfigError, match=rf"^policy.learn_from names {file}, .*{words}.*; name the policy.bin of"):
            check_config(config)
    check_config(scripted(tmp_path / "run", "policy.kind=cmlfq", f"policy.learn_from=[{for_another}]"))


def test_a_run_that_has_learned_itself_does_not_need_what_it_once_learned_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "policy.bin").write_bytes(CMlfq({}).learned())
    check_config(scripted(run, "policy.kind=cmlfq", "policy.learn_from=[/nowhere/policy.bin]"))


def test_arenas_that_shared_memory_cannot_hold_are_named_before_anything_starts(tmp_path: Path) -> None:
    config = load_config("vllm_cpu", [f"run_dir={tmp_path / 'run'}", "engine.kv_arena=1000 TiB"])
    words = rf"^engine.kv_arena = {1000 * 2**40} bytes for each of 2 instances .* do not fit in {tmp_path}, which has "
    with pytest.raises(ConfigError, match=words + r"\d+ bytes free: use engine.kv_arena = \d+ or less"):
        check_arenas(config, tmp_path)
    check_arenas(load_config("vllm_cpu", [f"run_dir={tmp_path / 'run'}", "engine.kv_arena=3 MiB"]), tmp_path)


def test_a_lost_tokenizer_folder_is_made_again(tmp_path: Path) -> None:
    config = scripted(tmp_path / "run")
    before = prepare(config, tmp_path / "tokenizer").tokenizer.read_bytes()
    shutil.rmtree(tmp_path / "tokenizer")
    assert prepare(config, tmp_path / "tokenizer").tokenizer.read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.kind=no.such:Env"], "cannot import 'no.such'"),
        (["policy.kind=no.such:Policy"], "no.such"),
        (["tokenizer=/nowhere/tokenizer.json"], "there is no tokenizer at /nowhere/tokenizer.json"),
        (["trainer={kind: torch, model: /nowhere/model}"], "the directory /nowhere/model does not exist"),
    ],
)
def test_a_run_whose_config_cannot_work_leaves_no_folder(tmp_path: Path, overrides: list[str], words: str) -> None:
    config = scripted(tmp_path / "run", *overrides)
    with libra.Run(config) as run, pytest.raises(ConfigError, match=words):
        run.fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "{latencyy: 3}",
            r"environment.options.latencyy = 3\n      unknown key; did you mean environment.options",
        ),
        (
            "{max_hops: 0, busyy: 2}",
            r"have 2 errors:\n  environment.options.max_hops = 0\n      must be at least 1",
        ),
        ("{busy: [2.0]}", r"busy holds 2.0; each is a probability"),
    ],
)
def test_wrong_options_read_like_any_wrong_config(tmp_path: Path, options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        prepare(scripted(tmp_path / "run", f"environment.options={options}"), tmp_path)
    assert "pydantic" not in str(error.value)


@pytest.mark.parametrize("place", ["/proc/x", "{file}/x", "{file}/x/y"])
def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path, place: str) -> None:
    file = tmp_path / "file"
    file.touch()
    path = place.format(file=file)
    with libra.Run(scripted(Path(path))) as run, pytest.raises(StoreError, match=rf"{path} cannot be made: .*run_dir="):
        run.fit()
