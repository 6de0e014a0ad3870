"""The wheel and the source distribution: what is in them, what indexes show of them, and their types.

`pip install build twine`, then `python -m pytest -m tools tests/test_distribution.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.pages import DOCS

ROOT = DOCS.parent
pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="build isn't installed"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, of which the wheel is made from the source distribution, as an index would."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    return folder


def run(*command: str, **settings: object) -> str:
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, **settings)  # type: ignore[call-overload]
    assert process.returncode == 0, process.stdout + process.stderr
    return str(process.stdout)


def tracked(*paths: str) -> set[str]:
    return set(run("git", "ls-files", "--", *paths, cwd=ROOT).splitlines())


def wheel_of(folder: Path) -> zipfile.ZipFile:
    [wheel] = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_wheel_has_the_package_and_its_migrations_and_nothing_else(made: Path) -> None:
    with wheel_of(made) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    migrations = {name.replace("migrations/", "replaybuf/_migrations/", 1) for name in tracked("migrations")}
    assert names == tracked("replaybuf") | migrations
    assert "replaybuf/py.typed" in names


def test_the_source_distribution_has_what_is_needed_to_test_it(made: Path) -> None:
    [source] = made.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked("replaybuf", "migrations", "tests", "docs", "README.md", "CHANGELOG.md", "LICENSE") <= names
    assert not [name for name in names if name.startswith((".ci", ".git/", ".venv"))]


def test_an_index_can_show_them(made: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine isn't installed")
    run(sys.executable, "-m", "twine", "check", "--strict", *(str(path) for path in made.iterdir()))


def test_the_wheel_says_what_it_is(made: Path) -> None:
    with wheel_of(made) as wheel:
        [path] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(path))
        [entry] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert b"replaybuf = replaybuf.cli:main" in wheel.read(entry)
        assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    assert (metadata["Name"], metadata["License-Expression"]) == ("replaybuf", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"


def test_users_of_the_wheel_get_its_types(made: Path, tmp_path: Path) -> None:
    """The examples of types pass mypy's strict mode over what is in the wheel, as they do over the checkout."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy isn't installed")
    with wheel_of(made) as wheel:
        wheel.extractall(tmp_path / "site")
    shutil.copytree(ROOT / "tests/typed", tmp_path / "tests/typed")
    (tmp_path / "tests/__init__.py").touch()
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nstrict = true\nmypy_path = {tmp_path}/site\n")
    run(sys.executable, "-m", "mypy", "--config-file", str(settings), "-p", "tests.typed", cwd=tmp_path)
