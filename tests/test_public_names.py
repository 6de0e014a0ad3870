"""What `replaybuf` itself has: some names, each imported when it is asked for."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replaybuf
import replaybuf.errors
import replaybuf.integrations.verl

HEAVY = {"sqlalchemy", "pydantic", "numpy", "typer", "rich", "alembic", "yaml", "asyncio", "replaybuf.errors"}


def loaded_by(code: str) -> set[str]:
    """The modules that a new process has loaded after this code."""
    script = f"import sys\n{code}\nsys.stdout.write('\\n' + ' '.join(sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return set(process.stdout.splitlines()[-1].split())


def test_nothing_is_loaded_before_it_is_needed() -> None:
    """Neither by the package, nor by its errors; by a command no other; and nobody's classes."""
    modules = loaded_by(
        "import replaybuf\nassert {'ReplayBuffer', 'NotReadyError', '__version__'} <= set(dir(replaybuf))"
    )
    assert not HEAVY & modules
    assert [name for name in modules if name.startswith("replaybuf")] == ["replaybuf"]
    assert not (HEAVY - {"replaybuf.errors"}) & loaded_by("from replaybuf import NotReadyError")
    modules = loaded_by(
        "sys.argv[1:] = ['demo', '--help']\nfrom replaybuf.cli import main\ntry: main()\nexcept SystemExit: pass"
    )
    assert "replaybuf.cli.demo" in modules
    assert not {"sqlalchemy", "numpy", "replaybuf.cli.stats", "replaybuf.cli.demo.trainer"} & modules
    optional = {"attr", "attrs", "msgspec", "torch", "yaml", "alembic", "typer", "rich"}
    assert not optional & loaded_by("import replaybuf.config, replaybuf.rules.balance")


WITHOUT_TORCH = """
sys.modules["torch"] = None
from replaybuf.errors import MissingDriverError
try:
    import replaybuf.integrations.torch
except MissingDriverError as error:
    assert isinstance(error, ImportError)
    assert str(error) == "this module needs torch, which is not installed: pip install torch"
else:
    raise AssertionError
"""


def test_what_needs_a_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_by(WITHOUT_TORCH)
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(replaybuf.errors.MissingDriverError, match="pip install verl"):
        replaybuf.integrations.verl.from_groups([[replaybuf.RolloutState(message=[])]])


def test_type_checkers_see_what_there_is_at_run_time() -> None:
    source = ast.parse(Path(replaybuf.__file__).read_text())
    [for_checkers] = [part for part in source.body if isinstance(part, ast.If) and isinstance(part.test, ast.Name)]
    imported = {
        name.asname: f"{line.module}.{name.name}"
        for line in for_checkers.body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }
    assert imported == {name: f"{module}.{name}" for name, module in replaybuf._MODULES.items()}


def test_the_names_are_few_and_all_there() -> None:
    everything: dict[str, object] = {}
    exec("from replaybuf import *", everything)
    assert set(everything) - {"__builtins__"} == set(replaybuf.__all__)
    assert len(replaybuf.__all__) <= 25


def test_the_names_of_readme_are_among_them() -> None:
    """Also those of the snippets that go on from others; `engine`, `load` and so on are the reader's."""
    snippets = re.findall(r"(?ms)^```python\n(.*?)^```$", (Path(__file__).parents[1] / "README.md").read_text())
    names = {
        node.id
        for snippet in snippets
        for node in ast.walk(compile(snippet, "README", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if isinstance(node, ast.Name) and (node.id[0].isupper() or node.id == "produce_loop")
    }
    assert {"ReplayBufferConfig", "Sampler", "JSONLines", "AsyncProduceStrategy", "produce_loop"} <= names
    assert names <= set(replaybuf.__all__)


def test_a_mistyped_name_is_told_its_neighbour() -> None:
    code = "import replaybuf; replaybuf.RolloutStat"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "module 'replaybuf' has no attribute 'RolloutStat'. Did you mean: 'RolloutState'?" in process.stderr


def test_errors_are_pickled_by_the_module_that_defines_them() -> None:
    error = pickle.loads(pickle.dumps(replaybuf.NotReadyError("task math: 12 of 64 completed groups")))
    assert type(error) is replaybuf.NotReadyError
    assert str(error) == "task math: 12 of 64 completed groups"
