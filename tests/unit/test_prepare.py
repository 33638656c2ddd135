"""What is looked at before a run costs anything, and in which words it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import libra
import libra.pipeline.run.prepare as prepare_module
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.run.prepare import TOKENIZER, check_arenas, check_config, check_model, prepare
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


@pytest.mark.parametrize(
    ("changed", "buckets", "words"),
    [
        ({}, "[{tp: 8}]", "buckets.0.tp = 8, but the 4 attention heads of the model in .* use a degree that divides"),
        ({"head_dim": 48}, "[{tp: 2}]", "the model has head_dim 48, which vLLM's attention on CPUs does not know"),
        ({"head_dim": 32}, "[{tp: 2}]", ""),
    ],
)
def test_a_checkpoint_that_vllm_cannot_serve_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, int], buckets: str, words: str
) -> None:
    monkeypatch.setattr(prepare_module, "gpus_here", lambda environment: ())
    model = {
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "dtype":
        "float32", **changed,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "model.safetensors").touch()
    config = load_config("vllm_cpu", [f"trainer.model={tmp_path}", f"buckets={buckets}"])
    if not words:
        check_model(config)
        return
    with pytest.raises(ConfigError, match=words):
        check_model(config)


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
