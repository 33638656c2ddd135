"""Kinds and import paths become classes; what is wrong is named, with what would do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from libra.resources.errors import ConfigError
from libra.resources.types import TrajectoryId
from libra.tasks.names import sample_stream, session_name, session_seed, temperature
from libra.tasks.registry import (
    LAUNCHES,
    SHIPPED,
    engine_class,
    environment_class,
    kinds,
    launches_of,
    load_object,
    trainer_class,
)


def test_shipped_kinds_and_import_paths() -> None:
    assert engine_class("random").__name__ == "RandomEngine"
    assert trainer_class("scripted").__name__ == "ScriptedTrainer"
    assert environment_class("child_parts:CountingEnvironment").__name__ == "CountingEnvironment"
    assert "torch" in kinds("engine")


def test_each_shipped_kind_has_one_module_of_its_name() -> None:
    for seam, table in SHIPPED.items():
        for kind, path in table.items():
            assert path.partition(":")[0].rpartition(".")[2] == kind, (seam, kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scriptet", r"engine\.kind = 'scriptet' is none of the shipped kinds .*did you mean 'scripted'\?"),
        ("no_such_package.engines:Fast", "cannot import 'no_such_package.engines'.*where the workers run"),
        ("child_parts:CrashEngine", r"has no 'CrashEngine'; did you mean 'CrashingEngine'\?"),
        ("child_parts:CountingEnvironment", r"no subclass of libra\.tasks\.engines\.base\.Engine"),
        ("child_parts:endless", "no subclass"),
        (":Engine", "is no import path"),
    ],
)
def test_what_is_no_engine_is_named(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_class(kind)


def test_load_object_names_the_key() -> None:
    assert load_object("child_parts:endless", "engine.options.script").__name__ == "endless"
    with pytest.raises(ConfigError, match=r"engine\.options\.script = 'endless' is no import path"):
        load_object("endless", "engine.options.script")


@pytest.mark.parametrize("kind", kinds("trainer"))
def test_what_a_trainer_launches_is_known_without_its_import_and_is_what_it_says(kind: str) -> None:
    assert LAUNCHES[kind] == trainer_class(kind).launches == launches_of(kind)


def test_asking_for_scripted_imports_no_torch() -> None:
    code = (
        "import sys; from libra.tasks.registry import *; engine_class('scripted'); trainer_class('scripted');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, timeout=60).returncode == 0


def test_randomness_is_named_by_the_trajectory_and_not_by_the_evaluation_round(tmp_path: Path) -> None:
    from child_parts import run_spec

    spec = run_spec(tmp_path)
    train, first, second = (TrajectoryId.parse(text) for text in ("g3m7", "h0m7", "h5m7"))
    for name in (sample_stream, session_seed, temperature):
        assert name(spec, first) == name(spec, second) != name(spec, train)
    assert session_name(first) == session_name(second) == "heldout/7"
    assert session_name(train) == "g3m7"
    assert sample_stream(spec, train) != sample_stream(spec, TrajectoryId.parse("g3m8"))
