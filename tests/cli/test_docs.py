"""The outputs of commands on docs/cli.md and docs/outages.md are true.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/cli/test_docs.py` writes the outputs anew.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replaybuf import ReplayBufferConfig
from replaybuf.cli.commands import app
from tests.cli.example import fill
from tests.cli.test_help import COMMANDS, LIVE
from tests.pages import DOCS
from tests.postgres import execute

#: Its output is measured: tests/bench/test_bench.py.
MEASURING = [("bench",)]

PAGES = [DOCS / "outages.md", DOCS / "cli.md"]
#: Its outputs are of other runs: tests/cli/test_why.py, tests/cli/test_trace.py.
OTHER_RUNS = DOCS / "looking.md"
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
    (r"(?m)^ok +(disk) .*", r"ok \1"),
    (r" +", " "),
    (r"─+", "─"),
]


def blocks(*pages: Path) -> list[tuple[str, str]]:
    return [block for page in pages for block in BLOCK.findall(page.read_text("utf-8"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.db`: its groups were put 1.1 to 2.5 hours ago, and there is a checkpoint of step 43."""
    path = tmp_path_factory.mktemp("docs")
    asyncio.run(fill(f"sqlite:///{path}/run.db"))
    execute(
        path / "run.db",
        f"UPDATE rb_group SET created_at = {time.time()} - (26 - uid) * 360",
        f"UPDATE rb_batch SET taken_at = {time.time() - 5000}",
        f"UPDATE rb_past SET created_at = {time.time() - 9000}",
        "UPDATE rb_worker SET seen_at = seen_at - 3900, ended_at = ended_at - 3900",
        "DELETE FROM rb_history",
    )
    with ReplayBufferConfig(url=f"sqlite:///{path}/run.db", worker="trainer").build_sync() as buffer:
        buffer.checkpoint(43)
    return path


def output_of(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="replaybuf", env={"REPLAYBUF_URL": None})
    return result.output


def same(text: str) -> str:
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def test_outputs_are_those_of_the_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        for page in PAGES:
            text = BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{output_of(m[1])}```", page.read_text("utf-8"))
            page.write_text(text, "utf-8")
        return  # some commands give another output the second time
    for command, output in blocks(*PAGES):
        assert same(output) == same(output_of(command)), command


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS if path not in LIVE + MEASURING])
def test_every_command_is_shown_with_its_output(path: tuple[str, ...]) -> None:
    shown = blocks(*PAGES, OTHER_RUNS)
    assert [output for command, output in shown if command.startswith(f"replaybuf {' '.join(path)} ") and output]
