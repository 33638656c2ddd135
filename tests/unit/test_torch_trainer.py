"""The torch trainer: gradients against a reference, splits, checkpoints, and the cold start with its cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from libra.pipeline.ledger.draft import Draft
from libra.resources.batches import write_batch
from libra.resources.errors import ConfigError, LibraError, StoreError
from libra.resources.types import Segment, Trajectory, TrajectoryId
from libra.resources.weights import load_weights
from libra.tasks.algorithms.base import AlgorithmConfig, group_advantages
from libra.tasks.engines.base import EngineConfig, GenerateRequest
from libra.tasks.engines.torch import TorchEngine
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, write_tokenizer
from libra.tasks.envs.hop_text import call_text, make_tokenizer, prompt_text
from libra.tasks.models import tensors_of
from libra.tasks.trainers import cold_cache
from libra.tasks.trainers.base import BatchRef, TrainerConfig
from libra.tasks.trainers.cold_start import ColdStartConfig
from libra.tasks.trainers.micro_batches import cut
from libra.tasks.trainers.torch import TorchTrainer

pytestmark = pytest.mark.torch

VOCABULARY = make_tokenizer().get_vocab_size()
SMALL_COLD_START = {
    "hidden_size": 32, "intermediate_size": 48, "heads": 2, "kv_heads": 1, "head_dim": 16, "batch": 6, "drill_steps": 2,
    "mixed_steps": 1, "decay_steps": 2, "gate": 1e-9, "required_copy": 1e-9,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return str(path)


@pytest.fixture(params=["qwen3", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, tokenizer_path: str) -> Path:
    """A HF checkpoint directory with a tokenizer, as a user would name it."""
    directory = tmp_path / "model"
    tiny_model(request.param, vocabulary=VOCABULARY + 3).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(Path(tokenizer_path).read_text())
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def trainer(tokenizer_path: str, cache: Path, model: Path | None = None, seed: int = 0, **changes: Any) -> TorchTrainer:
    algorithm = AlgorithmConfig(**changes.pop("algorithm", {}))
    return TorchTrainer(
        TrainerConfig(model=None if model is None else str(model), **changes),
        algorithm,
        environment=HopEnvironment(EnvironmentConfig(), tokenizer_path, seed),
        tokenizer_path=tokenizer_path,
        seed=seed,
        cache_dir=cache,
        deterministic=False,
    )


def started(tokenizer_path: str, checkpoint: Path, **changes: Any) -> TorchTrainer:
    made = trainer(tokenizer_path, checkpoint.parent / "cache", checkpoint, **changes)
    made.initialise(lambda fields: None)
    return made


def trajectories(groups: int = 3, members: int = 4, seed: int = 0) -> list[Trajectory]:
    """Made-up trajectories of varied lengths, with two turns each and recorded logprobs that are somewhat off."""
    source = np.random.default_rng(seed)
    return [_trajectory(source, g, m) for g in range(groups) for m in range(members)]


def _trajectory(source: np.random.Generator, group: int, member: int) -> Trajectory:
    parts = [(int(source.integers(2, 9)), 0), (int(source.integers(1, 9)), 1), (int(source.integers(1, 30)), 0),
             (int(source.integers(1, 9)), 1)]  # fmt: skip
    mask = np.concatenate([np.full(n, sampled, np.int8) for n, sampled in parts])
    return Trajectory(
        id=TrajectoryId("train", group, member), prompt=group, epoch=0, task={}, prompt_tokens=parts[0][0],
        tokens=source.integers(0, VOCABULARY, len(mask)).astype(np.int32), mask=mask,
        logprobs=np.where(mask == 1, source.normal(-6, 0.3, len(mask)), 0).astype(np.float32),
        versions=np.where(mask == 1, 0, -1).astype(np.int32), tools=(), turns=2, end="answer",
        reward=float(member % 2 if group else source.normal()),
    )  # fmt: skip


def gradient(made: TorchTrainer, batch: list[Trajectory]) -> torch.Tensor:
    made.model.zero_grad()
    made.accumulate(batch)
    found = torch.cat([p.grad.reshape(-1) for p in made.model.parameters() if p.grad is not None])
    made.model.zero_grad()
    return found


def reference_gradient(model: PreTrainedModel, batch: list[Trajectory], algorithm: AlgorithmConfig) -> torch.Tensor:
    """One trajectory at a time, token by token."""
    tokens = sum(int(t.mask.sum()) for t in batch)
    for t in batch:
        group = [other for other in batch if other.id.group == t.id.group]
        advantage = float(group_advantages([o.reward or 0.0 for o in group])[group.index(t)])
        ids = torch.from_numpy(t.tokens.astype(np.int64))
        new = torch.log_softmax(model(input_ids=ids[None]).logits[0] / algorithm.temperature, -1)
        for position in np.flatnonzero(t.mask):
            ratio = torch.exp(new[position - 1, ids[position]] - float(t.logprobs[position]))
            kept = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            (-torch.minimum(ratio * advantage, kept * advantage) / tokens).backward(retain_graph=True)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_equals_the_reference(tokenizer_path: str, checkpoint: Path, temperature: float) -> None:
    made = started(tokenizer_path, checkpoint, algorithm={"temperature": temperature})
    batch = trajectories()
    found = gradient(made, batch)
    assert relative(found, reference_gradient(made.model, batch, made.algorithm)) <= 1e-4


def test_the_gradient_does_not_depend_on_micro_batches(tokenizer_path: str, checkpoint: Path) -> None:
    batch = trajectories(members=8)
    whole = gradient(started(tokenizer_path, checkpoint, micro_batch_tokens=10**6), batch)
    for tokens in (1, 64, 200):
        parts = gradient(started(tokenizer_path, checkpoint, micro_batch_tokens=tokens), batch)
        assert 0 < relative(parts, whole) <= 1e-5


def test_the_gradient_does_not_depend_on_the_split_into_segments(tokenizer_path: str, checkpoint: Path) -> None:
    """A turn that was drained and went on elsewhere has two segments; the same tokens give the same gradient."""
    batch = trajectories()
    split = [_regrown(t, pieces=2) for t in batch]
    whole = [_regrown(t, pieces=1) for t in batch]
    made = started(tokenizer_path, checkpoint)
    assert relative(gradient(made, split), gradient(made, whole)) <= 1e-5


def _regrown(t: Trajectory, pieces: int) -> Trajectory:
    """The trajectory's first turn, sampled in as many segments as given."""
    end = t.prompt_tokens + int(np.argmin(t.mask[t.prompt_tokens :]))
    draft = Draft(t.id, t.prompt, 0, {}, t.tokens[: t.prompt_tokens], 0, 9, 0.0)
    for part in np.array_split(np.arange(t.prompt_tokens, end), pieces):
        segment = Segment(t.tokens[part], t.logprobs[part], t.versions[part], "stop", draft.length, 0, "i", 0.0, 0.0)
        draft.grow(None, segment, {"kind": "final", "end": "answer"})
    return draft.finish(t.reward, None, {}, 0.0)


def test_members_that_failed_are_not_in_the_normalisation(tokenizer_path: str, checkpoint: Path) -> None:
    made = started(tokenizer_path, checkpoint)
    three = trajectories(groups=1, members=3)
    assert relative(gradient(made, three), reference_gradient(made.model, three, made.algorithm)) <= 1e-4
    with pytest.raises(ValueError, match="has no reward"):
        made.update([replace(three[0], reward=None), *three[1:]])


@pytest.mark.parametrize(("lengths", "most"), [([5, 3, 9, 2], 10), ([50], 10), ([], 10), ([1] * 7, 3)])
def test_micro_batches_hold_every_row_once(lengths: list[int], most: int) -> None:
    batches = cut(lengths, most)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[p] for p in batch) <= most for batch in batches)


def test_engine_and_trainer_agree_on_logprobs(tokenizer_path: str, checkpoint: Path) -> None:
    made = started(tokenizer_path, checkpoint)
    engine = TorchEngine(EngineConfig(slots=3, max_context=200), tokenizer_path=tokenizer_path, deterministic=False)
    engine.load(made.publish(checkpoint.parent / "weights"))
    prompt = np.array(make_tokenizer().encode(prompt_text("ash-bay")).ids, np.int32)
    for n in range(8):
        engine.submit(GenerateRequest(f"r{n}", f"s{n}", prompt, 5 + 4 * n, (), 1.0, n))
    played = []
    while engine.busy:
        for end in engine.step():
            segment = Segment(end.tokens, end.logprobs, end.versions, "length", len(prompt), 0, "i", 0.0, 0.0)
            draft = Draft(TrajectoryId("train", 0, len(played)), 0, 0, {}, prompt, 0, 9, 0.0)
            draft.grow(None, segment, {"kind": "final", "end": "malformed"})
            played.append(draft.finish(float(len(played) % 2), None, {}, 0.0))
    measures = made.update(played)
    assert measures["logprob_gap_tokens"] == measures["loss_tokens"] == sum(5 + 4 * n for n in range(8))
    assert 0 < measures["logprob_gap_max"] <= 1e-4 and measures["clip_share"] == 0
    later = made.update(played)
    assert later["logprob_gap_tokens"] == 0 and made.version == 2


def test_training_follows_the_reward(tokenizer_path: str, checkpoint: Path) -> None:
    made = started(tokenizer_path, checkpoint, algorithm={"lr": 3e-3})
    batch = [replace(t, logprobs=np.where(t.mask == 1, -6, 0).astype(np.float32)) for t in trajectories(1, 8)]
    measures = [made.update(batch) for _ in range(5)]
    assert all(np.isfinite(list(m.values())).all() and m["grad_norm"] > 0 for m in measures)
    assert measures[-1]["loss"] < measures[0]["loss"]


def test_train_reads_a_committed_batch(tokenizer_path: str, checkpoint: Path) -> None:
    batch = trajectories()
    write_batch(checkpoint.parent / "batch", batch, {})
    twins = [started(tokenizer_path, checkpoint) for _ in range(2)]
    measures = twins[0].train(BatchRef(str(checkpoint.parent / "batch"), tuple(range(len(batch)))))
    assert measures.pop("seconds") > 0 and measures == twins[1].update(batch)
    assert_equal(twins[0], twins[1])


def assert_equal(one: TorchTrainer, other: TorchTrainer) -> None:
    assert one.version == other.version
    a, b = tensors_of(one.model), tensors_of(other.model)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_restored_trainer_goes_on_bit_for_bit(tokenizer_path: str, checkpoint: Path, tmp_path: Path) -> None:
    made = started(tokenizer_path, checkpoint)
    made.update(trajectories(seed=1))
    made.save(tmp_path / "saved")
    made.update(trajectories(seed=2))
    again = trainer(tokenizer_path, tmp_path / "cache", checkpoint)
    again.restore(tmp_path / "saved")
    assert again.version == 1
    again.update(trajectories(seed=2))
    assert_equal(made, again)


def test_a_checkpoint_is_an_hf_checkpoint(tokenizer_path: str, checkpoint: Path, tmp_path: Path) -> None:
    made = started(tokenizer_path, checkpoint)
    made.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), made.model.parameters(), strict=True))
    text = call_text("ash-bay")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.encode(text, add_special_tokens=False) == make_tokenizer().encode(text).ids


def test_publishing_twice_writes_the_same(tokenizer_path: str, checkpoint: Path, tmp_path: Path) -> None:
    made = started(tokenizer_path, checkpoint)
    first = made.publish(tmp_path / "weights")
    assert made.publish(tmp_path / "weights") == first
    made.update(trajectories())
    second = made.publish(tmp_path / "weights")
    assert second.version == 1 and second.digest != first.digest
    assert all(np.array_equal(a, tensors_of(made.model)[name]) for name, a in load_weights(second).items())


def test_what_is_wrong_with_a_model_directory_is_said(tokenizer_path: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        started(tokenizer_path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        started(tokenizer_path, tmp_path / "empty")
    (checkpoint / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="'mamba'; one of qwen3, llama would do"):
        started(tokenizer_path, checkpoint)
    tiny_model("qwen3").save_pretrained(tmp_path / "narrow")
    with pytest.raises(ConfigError, match="embedding has 50 rows"):
        started(tokenizer_path, tmp_path / "narrow")
    (tmp_path / "narrow" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        started(tokenizer_path, tmp_path / "narrow")


def test_a_half_checkpoint_is_refused(tokenizer_path: str, checkpoint: Path) -> None:
    made = started(tokenizer_path, checkpoint)
    with pytest.raises(StoreError, match=r"holds no optimizer\.pt"):
        made.restore(checkpoint)
    (checkpoint / "optimizer.pt").touch()
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(StoreError, match="is damaged"):
        made.restore(checkpoint)


def test_unknown_options_are_refused(tokenizer_path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cold_start\.drill_step\b"):
        trainer(tokenizer_path, tmp_path, options={"cold_start": {"drill_step": 3}})


# -- the cold start ---------------------------------------------------------------------------------------------------


def cold(tokenizer_path: str, cache: Path, seed: int = 0, **changes: Any) -> tuple[TorchTrainer, dict[str, Any], int]:
    """A cold-started trainer, what it says of that, and how often it reported progress."""
    reports: list[dict[str, Any]] = []
    made = trainer(tokenizer_path, cache, seed=seed, options={"cold_start": SMALL_COLD_START | changes})
    return made, made.initialise(reports.append), len(reports)


def test_a_cold_start_is_made_once(tokenizer_path: str, tmp_path: Path) -> None:
    made, said, _ = cold(tokenizer_path, tmp_path)
    again, cached, _ = cold(tokenizer_path, tmp_path)
    assert (said["source"], cached["source"]) == ("cold start", "cold start, cached")
    assert said["cold_start_steps"] == cached["cold_start_steps"] == 5
    assert [path.name for path in tmp_path.iterdir()] == [Path(said["cache"]).name]
    assert_equal(made, again)
    made.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "<|im_end|>"


def test_a_cold_start_depends_on_its_seed_and_settings_alone(tokenizer_path: str, tmp_path: Path) -> None:
    made, _, _ = cold(tokenizer_path, tmp_path / "a")
    same, said, _ = cold(tokenizer_path, tmp_path / "b")
    assert said["source"] == "cold start"
    assert_equal(made, same)
    other, said, _ = cold(tokenizer_path, tmp_path / "a", seed=1)
    assert said["source"] == "cold start"
    assert not np.array_equal(*(next(iter(tensors_of(t.model).values())) for t in (made, other)))
    assert cold(tokenizer_path, tmp_path / "a", batch=5)[1]["source"] == "cold start"


def test_a_model_that_does_not_copy_is_refused(tokenizer_path: str, tmp_path: Path) -> None:
    with pytest.raises(LibraError, match=r"copies with probability 0\.0.* and needs 0\.95"):
        cold(tokenizer_path, tmp_path, required_copy=0.95, max_steps=8)
    with pytest.raises(LibraError, match=r"after 4 steps and needs 0\.9;"):
        cold(tokenizer_path, tmp_path, gate=0.9, max_steps=4)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_told_before_the_cold_start(tokenizer_path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = trainer(tokenizer_path, tmp_path / "file" / "cache", options={"cold_start": SMALL_COLD_START})
    reports: list[dict[str, Any]] = []
    with pytest.raises(ConfigError, match=r"cannot be kept in .*file.*; name a folder .* in LIBRA_CACHE_DIR"):
        made.initialise(reports.append)
    assert reports == []


def test_of_two_that_make_the_same_the_first_stays(tmp_path: Path) -> None:
    first, second = cold_cache.workspace(tmp_path, "k"), cold_cache.workspace(tmp_path, "k")
    (first / "who").write_text("first")
    (second / "who").write_text("second")
    assert cold_cache.keep(tmp_path, "k", first) == cold_cache.keep(tmp_path, "k", second) == tmp_path / "k"
    assert (tmp_path / "k" / "who").read_text() == "first" and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".k-999999999-abc").mkdir()
    mine = cold_cache.workspace(tmp_path, "k")
    assert list(tmp_path.iterdir()) == [mine]


def test_the_key_covers_the_sources_that_take_part() -> None:
    modules = cold_cache.modules_of([TorchTrainer, HopEnvironment])
    assert {f"libra.tasks.envs.hop{suffix}" for suffix in ("", "_task", "_text")} <= modules.keys()
    assert {
        "libra.tasks.trainers.cold_start",
        "libra.tasks.trainers.micro_batches",
        "libra.tasks.models",
    } <= modules.keys()
    assert "torch" not in modules
    assert cold_cache.cache_key([HopEnvironment], {"a": 1}) != cold_cache.cache_key([HopEnvironment], {"a": 2})


def test_the_shipped_sizes_are_what_they_say() -> None:
    from libra.tasks.models import build_model
    from libra.tasks.trainers.cold_start import _model_config

    model = build_model(_model_config(ColdStartConfig(), VOCABULARY))
    assert sum(p.numel() for p in model.parameters()) == 454_400
