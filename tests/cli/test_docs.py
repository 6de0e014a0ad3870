"""The outputs of commands on docs/cli.md, docs/outages.md and, of `trace`, on docs/looking.md are true.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/cli/test_docs.py` writes the outputs anew.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replaybuf import ReplayBufferConfig
from replaybuf.cli.commands import app
from tests.cli.example import LAST, fill, train
from tests.cli.test_help import COMMANDS, LIVE
from tests.pages import DOCS, compare
from tests.postgres import execute

#: Its output is measured: tests/bench/test_bench.py.
MEASURING = [("bench",)]

PAGES = [DOCS / name for name in ("outages.md", "cli.md", "looking.md")]
BLOCK = re.compile(r"(?ms)^```console\n\$ (replaybuf [^\n]*)\n(.*?)^```$")

# What differs from machine to machine, or from day to day.
_VARYING = [
    (r"(?m)^(gpu-node-7) +\d+ +(ended)", r"\1 \2"),  # its pid
    (r"\d{4}-\d\d-\d\d[T ][\d:.]+Z?", "TIME"),
    (r"\d\d:\d\d:\d\d UTC", "TIME"),
    (r"(?m)^\d\d:\d\d:\d\d\b", "TIME"),
    (r"\b\d+s\b", "SECONDS"),
    (r"every [\d.]+ s(: reading takes [\d.e-]+ s)?", "every"),
    (r"(?m)^database .*? unswept", "database unswept"),
    (r"\b\d+ unswept", "unswept"),
    (r" +", " "),
    (r"─+", "─"),
]


def fill_hours_ago(file: Path) -> None:
    """The groups were put 1.1 to 2.5 hours ago, and there is a checkpoint of step 43."""
    asyncio.run(fill(f"sqlite:///{file}"))
    execute(
        file,
        f"UPDATE rb_group SET created_at = {time.time()} - (26 - uid) * 360",
        f"UPDATE rb_batch SET taken_at = {time.time() - 5000}",
        f"UPDATE rb_past SET created_at = {time.time() - 9000}",
        "UPDATE rb_worker SET seen_at = seen_at - 3900, ended_at = ended_at - 3900",
        "DELETE FROM rb_history",
    )
    with ReplayBufferConfig(url=f"sqlite:///{file}", worker="trainer").build_sync() as buffer:
        buffer.checkpoint(43)


def train_minutes_ago(file: Path) -> None:
    """Each step took a minute, and the last one was ten minutes ago."""
    asyncio.run(train(f"sqlite:///{file}"))
    now = time.time()
    execute(
        file,
        f"UPDATE rb_batch SET taken_at = {now - 600} - 60 * ({LAST} - step)",
        f"UPDATE rb_group SET created_at = {now - 620} - 60 * ({LAST} - put_step)",
        f"UPDATE rb_group SET archived_at = {now - 590} - 60 * ({LAST} - put_step)",
    )


def output_of(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="replaybuf", env={"REPLAYBUF_URL": None})
    return result.output


def same(text: str) -> str:
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text.strip()


#: Runs, the commands that pages show of them, and how many at least; the other ones of looking.md are in
#: tests/cli/test_why.py.
RUNS = [(fill_hours_ago, PAGES[:2], "replaybuf ", 1), (train_minutes_ago, PAGES[2:], "replaybuf trace ", 3)]


@pytest.mark.parametrize(("run", "pages", "begins", "least"), RUNS)
def test_outputs_are_those_of_the_commands(
    run: Callable[[Path], None],
    pages: list[Path],
    begins: str,
    least: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "run.db")
    for page in pages:
        blocks = [block for block in BLOCK.finditer(page.read_text("utf-8")) if block[1].startswith(begins)]
        assert len(blocks) >= least
        for block in blocks:
            compare(page, block[0], f"```console\n$ {block[1]}\n{output_of(block[1])}```", same)


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS if path not in LIVE + MEASURING])
def test_every_command_is_shown_with_its_output(path: tuple[str, ...]) -> None:
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text("utf-8"))]
    assert [output for command, output in blocks if command.startswith(f"replaybuf {' '.join(path)} ") and output]
