"""Without an archive the texts of groups that were trained on are gone: the command says so, and what keeps them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.cli.conftest import run
from tests.stores import TASK, build, fill

KEEPS = "archive=1000 in the config of the trainer"


async def train(url: str, **options: Any) -> None:
    """Train on two of three groups."""
    async with build(url, **options) as buffer:
        await fill(buffer, 3)
        await buffer.take_batch({TASK: 2}, timeout=5, current_train_step=7)


COMMANDS = {
    "show --worst": ("show", "--worst", "1"),
    "show --worst --task": ("show", "--worst", "1", "--task", TASK),
    "trace": ("trace", "step", "7"),
    "trace uid": ("trace", "uid", "1"),
}


def said(url: str, command: tuple[str, ...], code: int = 0) -> str:
    name, *rest = command
    ended = run(name, url, *rest, code=code)
    return " ".join((ended.stdout + ended.stderr).split())


def test_every_command_that_would_show_them_says_so(url: str) -> None:
    asyncio.run(train(url))
    for command in COMMANDS.values():
        assert KEEPS in said(url, command), command
    assert "the texts of all 2 groups that were trained on are gone" in said(url, COMMANDS["show --worst"])
    assert "2 of them are gone, and their texts" in said(url, COMMANDS["trace"])
    missing = said(url, ("show", "1"), code=1)
    assert "there is no group 1 in" in missing
    assert "gone: trained on" in missing
    assert KEEPS in missing


def test_with_an_archive_there_is_nothing_to_say(url: str) -> None:
    asyncio.run(train(url, archive=10))
    for command in (*COMMANDS.values(), ("show", "1")):
        assert KEEPS not in said(url, command), command


def test_before_anything_is_trained_on_there_is_not_either(url: str) -> None:
    async def put() -> None:
        async with build(url) as buffer:
            await fill(buffer, 1)

    asyncio.run(put())
    for command in (COMMANDS["show --worst"], COMMANDS["trace uid"]):
        assert KEEPS not in said(url, command), command
