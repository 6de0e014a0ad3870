"""What a prompt ledger refuses."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from replaybuf import PromptLedger, Status
from replaybuf.errors import DecodeError, InputError, RolloutError
from tests.datasets import complete, indexed, numbers
from tests.prompts.ledgers import use
from tests.stores import TASK, build


@pytest.mark.parametrize(
    "wrong",
    [{"dataset": 1}, {"epochs": -1}, {"epochs": 1.5}, {"seconds": 0}, {"task_name": ""}, {"again": ["nonsense"]},
     {"again": "init"}],
)  # fmt: skip
async def test_what_can_not_work_is_refused_at_once(wrong: dict[str, Any]) -> None:
    async with build("memory://") as buffer:
        with pytest.raises(InputError):
            use(buffer, **wrong)


async def test_a_result_without_a_status_is_refused(url: str) -> None:
    """Whoever forgets the status would get the same prompt again, for ever. The prompt stays in flight."""
    async with build(url) as buffer:
        [drawn] = await use(buffer, dataset=indexed(1)).draw()
        with pytest.raises(InputError, match=r"status.*COMPLETED, or call give_back"):
            await drawn.finish()
        await drawn.finish(complete(drawn.group))
        assert await buffer.count(TASK, Status.COMPLETED) == 1


async def test_what_is_no_group_says_that_make_group_made_it(url: str) -> None:
    async with build(url) as buffer:
        for wrong in ({"dataset": [1]}, {"dataset": indexed(1), "make_group": lambda item, number: item}):
            with pytest.raises(RolloutError, match="make_group"):
                await use(buffer, **wrong).draw()


async def test_a_count_is_a_whole_number_above_0(url: str) -> None:
    async with build(url) as buffer:
        for count in (0, -1, 1.5, None):
            with pytest.raises(InputError, match="count"):
                await use(buffer).draw(count)  # type: ignore[arg-type]


async def test_prompts_that_can_not_be_read_back_are_not_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is able to comes next, at once."""
    async with build(url) as buffer:
        ledger = PromptLedger(buffer, indexed(2), TASK)
        with monkeypatch.context() as patched:
            patched.setattr(buffer.storage.codec, "decode", Mock(side_effect=DecodeError("of another type")))
            with pytest.raises(DecodeError):
                await ledger.draw(2)
        assert numbers(await ledger.draw(2)) == [0, 1]


async def test_counts_may_be_those_of_numpy() -> None:
    async with build("memory://") as buffer:
        ledger = PromptLedger(buffer, indexed(3), TASK, epochs=np.int64(2))  # type: ignore[arg-type]
        assert numbers(await ledger.draw(np.int64(2))) == [0, 1]  # type: ignore[arg-type]
        assert numbers(await ledger.draw(9)) == [2, 0, 1, 2]
