"""The traces on docs/looking.md are true.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/cli/test_trace_page.py` writes the outputs anew.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from pathlib import Path

import pytest

from tests.cli.test_docs import BLOCK, output_of, same
from tests.cli.trained import train
from tests.pages import DOCS

PAGE = DOCS / "looking.md"


def test_outputs_are_those_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(train(f"sqlite:///{tmp_path}/run.db"))
    _age(tmp_path / "run.db")
    page = PAGE.read_text("utf-8")
    shown = [match for match in BLOCK.finditer(page) if match[1].startswith("replaybuf trace ")]
    assert len(shown) == 3
    for match in shown:
        command, output = match.groups()
        found = output_of(command)
        if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
            page = page.replace(match[0], f"```console\n$ {command}\n{found}```")
            PAGE.write_text(page, "utf-8")
        else:
            assert same(output) == same(found), command


def _age(path: Path) -> None:
    """Let the run be of an hour ago, a minute a step, so that ages are the same every time."""
    now = time.time()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE rb_batch SET taken_at = :now - 600 - 60 * (414 - step)", {"now": now})
        connection.execute("UPDATE rb_group SET created_at = :now - 620 - 60 * (414 - put_step)", {"now": now})
        connection.execute("UPDATE rb_group SET archived_at = :now - 590 - 60 * (414 - put_step)", {"now": now})
