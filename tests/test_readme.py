"""The README's promises: its example prints what it says, its names exist, its commands are those of CI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import replaybuf
from replaybuf.rules.query import parse

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_ten_lines_print_what_the_readme_says(tmp_path: Path) -> None:
    code, output = re.search(r"## Ten lines\n\n```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == (output, "")


def test_every_file_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`((?:docs|benchmarks)/[\w./-]+|CHANGELOG\.md)`", README))
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_everything_public_imports_from_the_package() -> None:
    assert all(hasattr(replaybuf, name) for name in replaybuf.__all__)
    assert sorted(replaybuf.__all__) == replaybuf.__all__


def test_the_example_of_a_policy_runs() -> None:
    namespace: dict[str, Any] = {}
    text = (ROOT / "docs/sampling.md").read_text("utf-8")
    exec(re.findall(r"```python\n(.*?)```", text[text.index("### A policy of your own") :], re.DOTALL)[0], namespace)
    assert namespace["buffer"].policy.name == "best_first"


def test_the_error_in_the_query_docs_is_the_real_one() -> None:
    with pytest.raises(replaybuf.errors.QueryError) as caught:
        parse({"$and": [{"uid": 1}, {"staleness": {"$gt": "five"}}]})
    assert str(caught.value) in (ROOT / "docs/sampling.md").read_text("utf-8")


def test_nothing_refers_to_files_that_are_not_there() -> None:
    for file in ROOT.glob("replaybuf/**/*.py"):
        assert not re.search(r"(SPEC|DESIGN|FIELD)\.md", file.read_text("utf-8")), file
