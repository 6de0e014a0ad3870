"""docs/your-loop.md, and the loop and the table of fields in docs/rollouts.md, are true.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_your_loop_page.py` writes them anew.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.values.rollouts import rollout
from replaybuf.values.rollouts.rollout import RolloutState
from tests.pages import DOCS, Page
from tests.scripts import Program

PAGE = Page("your-loop.md", "## Seven mistakes")
ROLLOUTS = DOCS / "rollouts.md"
PROMPTS = 240


def program(name: str, text: str = PAGE.text) -> str:
    found = re.search(rf'(?ms)^```python title="{name}"\n(.*?)^```', text)
    assert found is not None
    return found[1]


def run(folder: Path, name: str, url: str) -> Program:
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)} | ({"DATABASE": url} if url else {})
    return Program(str(folder / name), cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("shared_url", "name"),
    [
        ("sqlite", "loop.py"),
        ("sqlite", "loop_async.py"),
        pytest.param("postgresql", "loop_async.py", marks=pytest.mark.long),
        pytest.param("postgresql", "loop.py", marks=pytest.mark.long),
    ],
    indirect=["shared_url"],
)
def test_a_loop_that_is_killed_goes_on_and_trains_each_prompt_once(name: str, shared_url: str, tmp_path: Path) -> None:
    for one in ("loop.py", "loop_async.py"):
        (tmp_path / one).write_text(program(one), "utf-8")
    seen = 0
    while seen < 30:  # killed once
        with run(tmp_path, name, shared_url) as process:
            first = process.stdout.readline()
            expected = (f"step {seen + 1}: ", f"step {seen}: ")  # it was killed before it had saved the weights
            assert first.startswith(expected), first + process.stdout.read()
            steps = [int(first.split()[1].rstrip(":"))]
            deadline = time.monotonic() + 60
            for line in process.stdout:
                assert line.startswith("step "), line + process.stdout.read()
                steps.append(int(line.split()[1].rstrip(":")))
                if seen == 0 and len(steps) == 12:
                    process.send_signal(signal.SIGKILL)
                assert time.monotonic() < deadline
        seen = steps[-1]
    trained = open_reader(shared_url).read(lambda tx: tx.values("SELECT prompt FROM groups WHERE status = 'archived'"))
    assert Counter(trained) == Counter(f"{number} + 5 =" for number in range(PROMPTS))


def fields() -> str:
    """Return the table of the fields of RolloutState: names, types, and what the class says of them."""
    [found] = [one for one in ast.parse(inspect.getsource(rollout)).body if isinstance(one, ast.ClassDef)]
    rows = ["| field | type | what it is for |", "|---|---|---|"]
    for field, said in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
            kind = ast.unparse(field.annotation).replace("|", "\\|")
            rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | {said.value.value} |")
    assert len(rows) == len(RolloutState.model_fields) + 2
    return "\n".join(rows)


def test_the_table_of_fields_is_that_of_the_class() -> None:
    text = ROLLOUTS.read_text("utf-8")
    found = re.search(r"(?s)(?<=<!-- fields -->\n\n).*(?=\n\n<!-- /fields -->)", text)
    assert found is not None
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        ROLLOUTS.write_text(text.replace(found[0], fields()), "utf-8")
    else:
        assert found[0] == fields()
