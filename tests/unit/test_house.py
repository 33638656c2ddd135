"""The rules of the house: who may import whom, how long a module may be, what a fresh import loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("conf", "native", "resources", "scheduler_plugin", "tasks", "pipeline")
MAY_IMPORT = {
    "conf": {"conf"},
    "native": {"native"},
    "resources": {"resources", "native"},
    "scheduler_plugin": {"scheduler_plugin", "resources", "native"},
    "tasks": {"tasks", "resources", "native"},
    "pipeline": set(ROOMS),
}
PLAIN = ("resources/types", "resources/errors.py", "resources/tags.py", "resources/keys.py", "resources/wire.py")
"""What travels everywhere: standard library, numpy and each other only."""
LONGEST = 400
HEAVY = ("torch", "transformers", "vllm", "distributed", "dask", "zarr", "tokenizers")


def modules(*places: str) -> list[Path]:
    found = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    assert found, places
    return sorted(found)


def imports(path: Path) -> set[str]:
    """Every module named by an import statement anywhere in the file, relative ones refused."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    for path in modules(room):
        if path.name == "libra_init.py":  # the import package's own __init__, which belongs to no room
            continue
        for name in imports(path):
            if name.startswith("libra."):
                other = name.split(".")[1]
                assert other in MAY_IMPORT[room] or other not in ROOMS, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_imported_by_their_full_names(room: str) -> None:
    for path in modules(room):
        for name in imports(path):
            assert name.split(".")[0] not in ROOMS, f"{path.relative_to(ROOT)} imports {name}: write libra.{name}"


def test_the_vocabulary_needs_the_standard_library_and_numpy_only() -> None:
    for path in modules(*PLAIN):
        for name in imports(path):
            top = name.split(".")[0]
            plain = name.startswith(("libra.resources.types", "libra.resources.errors", "libra.resources.tags"))
            assert top in sys.stdlib_module_names or top == "numpy" or plain, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ["resources", "scheduler_plugin", "pipeline", "native"])
def test_only_tasks_import_torch(room: str) -> None:
    for path in modules(room):
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers", "vllm"}, path


@pytest.mark.parametrize("room", ROOMS)
def test_modules_are_short_enough_to_read(room: str) -> None:
    long = {
        str(path): lines for path in modules(room) if (lines := len(path.read_text("utf-8").splitlines())) > LONGEST
    }
    assert not long


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_in_it(room: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text("utf-8")))
    assert docstring is not None
    assert len(docstring.splitlines()) <= 8


def test_conf_holds_data_only() -> None:
    body = ast.parse((ROOT / "conf" / "__init__.py").read_text("utf-8")).body
    assert len(body) == 1, "conf/__init__.py is a docstring and nothing else"
    assert [path.name for path in (ROOT / "conf").rglob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("room", ROOMS)
def test_no_rooms_name_leaks_at_top_level(room: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; import libra; s = u.find_spec({room!r}); print(s and s.origin)"
    origin = python(code, tmp_path)
    assert origin == "None" or not Path(origin).is_relative_to(ROOT)


@pytest.mark.parametrize(
    "code",
    [
        "import libra",
        "import libra; libra.__version__; dir(libra)",
        "import libra.scheduler_plugin, libra.tasks, libra.pipeline, libra.resources",
        "import libra.pipeline.cli as c; c.main(['--help'], standalone_mode=False)",
        "import libra.pipeline.cli as c; c.main(['train', '--help'], standalone_mode=False)",
    ],
)
def test_importing_libra_and_help_load_nothing_heavy(code: str, tmp_path: Path) -> None:
    end = f"\nimport sys; print(); print([name for name in sys.modules if name.split('.')[0] in {HEAVY!r}])"
    assert python(code + end, tmp_path).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "module", ["libra.tasks.worker", "libra.scheduler_plugin.preload", "libra.pipeline.api", "libra.pipeline.config"]
)
def test_dask_processes_and_the_driver_load_no_torch(module: str, tmp_path: Path) -> None:
    code = f"import {module}, sys; print([n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers')])"
    assert python(code, tmp_path) == "[]"


def test_the_package_is_typed(tmp_path: Path) -> None:
    code = "import importlib.resources as r; print((r.files('libra') / 'py.typed').is_file())"
    assert python(code, tmp_path) == "True"
