"""Agent loops that return garbage, or raise what they should not: their group fails, never the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaybuf import RolloutState, Status
from replaybuf.errors import InputError, ProduceError
from replaybuf.produce import AsyncProduceStrategy, ProduceStrategy, Sampler, SyncProduceStrategy
from tests.produce.conftest import (
    Script,
    ScriptedLoop,
    Told,
    assert_accounted,
    ids,
    items_of,
    produce,
    prompts,
    sampler_of,
)
from tests.stores import TASK, build

STRATEGY = SyncProduceStrategy(max_failures=5)


def scripted(script: Script) -> ScriptedLoop:
    """This happens to the first group."""
    return ScriptedLoop(scripts={0: script})


def with_field(name: str, value: Any) -> Callable[[list[RolloutState]], list[RolloutState]]:
    def change(group: list[RolloutState]) -> list[RolloutState]:
        setattr(group[0], name, value)
        return group

    return change


GARBAGE: dict[str, tuple[Callable[[list[RolloutState]], Any], str]] = {
    "an empty list": (lambda group: [], "empty group"),
    "a number": (lambda group: 7, "expected a list of rollouts"),
    "a text": (lambda group: "done", "expected a list of rollouts"),
    "one rollout": (lambda group: group[0], "expected a list of rollouts"),
    "a generator": (lambda group: (rollout for rollout in group), "expected a list of rollouts"),
    "numbers": (lambda group: [1, 2], "exactly RolloutState"),
    "None twice": (lambda group: [None, None], "exactly RolloutState"),
    "dicts": (lambda group: [{"status": "completed"}], "dict"),
    "nothing generated": (with_field("status", Status.INIT), "group that is init"),
    "expired": (with_field("status", Status.EXPIRED), "group that is expired"),
    "archived": (lambda group: [with_field("status", Status.ARCHIVED)([rollout])[0] for rollout in group], "archived"),
    "no such status": (with_field("status", "done"), "status is 'done'"),
    "what can't be encoded": (with_field("extra_fields", {"lock": asyncio.Lock}), "extra_fields"),
    "tokens that are a number": (with_field("response_ids", 5), "response_ids"),
    "tokens of no dimension": (with_field("response_ids", np.array(5)), "response_ids"),
    "model steps that are a text": (with_field("response_model_steps", ["x", "y", "z"]), "steps"),
}


async def test_garbage_fails_its_group_alone() -> None:
    hook = Told()
    loop = ScriptedLoop(scripts={number: Script(returns=GARBAGE[name][0]) for number, name in enumerate(GARBAGE)})
    async with build("memory://", max_deliveries=3) as buffer:
        sampler = Sampler(buffer, prompts(40), TASK, prompt_repeat_k=2, epochs=1)
        summary = await produce(SyncProduceStrategy(on_group=hook, max_failures=99), loop, sampler, 20)
        assert (summary.produced, summary.retried, summary.failed) == (20, 2 * len(GARBAGE), len(GARBAGE))
        errors = {number: str(item.error) for item in await items_of(buffer, Status.FAILED) for number in ids([item])}
        for number, (name, (_, error)) in enumerate(GARBAGE.items()):
            assert error in errors[number], name
            assert sum(error in str(generated.error) for generated in hook.groups) >= 3, name
        await assert_accounted(sampler)


async def test_garbage_in_place_of_one_rollout_fails_its_group_alone(sampler: Sampler) -> None:
    """And the rollout that was to be generated is the one that has failed."""
    garbage: list[Any] = [[7], [None], [[]], [{"status": "completed"}]]
    scripts = {number: Script(returns=lambda group, number=number: garbage[number]) for number in range(len(garbage))}  # type: ignore[misc]
    strategy = SyncProduceStrategy(by_rollout=True, max_failures=99)
    summary = await produce(strategy, ScriptedLoop(scripts=scripts), sampler, 4)
    assert (summary.produced, summary.failed) == (4, len(garbage))
    await assert_accounted(sampler)


async def test_none_stands_for_the_group_that_was_given(sampler: Sampler) -> None:
    assert (await produce(STRATEGY, scripted(Script(returns=lambda group: None)), sampler, 2)).produced == 2
    assert [len(item.item) for item in await items_of(sampler.buffer)] == [2, 2]


@pytest.mark.parametrize("size", [1, 5])
async def test_what_comes_back_is_the_group_whatever_its_size(sampler: Sampler, size: int) -> None:
    returns = lambda group: [group[0].model_copy() for _ in range(size)]  # noqa: E731
    summary = await produce(STRATEGY, scripted(Script(returns=returns)), sampler, 2)
    assert (summary.produced, summary.failed, summary.retried) == (2, 0, 0)
    assert sorted(len(item.item) for item in await items_of(sampler.buffer)) == sorted([size, 2])


class MuteKeyError(KeyError):
    def __str__(self) -> str:
        raise AttributeError("response")


ODD_ERRORS = {"none": KeyError(), "odd": KeyError("\x00\ud800" + "x" * 100_000), "mute": MuteKeyError()}


@pytest.mark.parametrize("error", ODD_ERRORS.values(), ids=ODD_ERRORS)
async def test_any_error_can_be_stored(sampler: Sampler, error: Exception) -> None:
    script = Script(failures=99, error=lambda: error)
    summary = await produce(SyncProduceStrategy(), scripted(script), sampler, 2)
    assert (summary.produced, summary.failed) == (2, 1)
    (failed,) = await items_of(sampler.buffer, Status.FAILED)
    assert "KeyError" in str(failed.error)


async def test_the_error_of_failed_rollouts_is_kept(sampler: Sampler) -> None:
    """Of all that failed, each once."""

    def fail(group: list[RolloutState]) -> list[RolloutState]:
        for rollout, error in zip(group, ("no luck", "the sandbox is gone", "no luck"), strict=True):
            rollout.status, rollout.error_msg = Status.FAILED, error
        return group

    sampler = sampler_of(sampler.buffer, prompt_repeat_k=3)
    await produce(SyncProduceStrategy(), scripted(Script(returns=fail)), sampler, 2)
    (failed,) = await items_of(sampler.buffer, Status.FAILED)
    assert "no luck; the sandbox is gone" in str(failed.error)


async def test_a_loop_that_raises_cancelled_error_fails_its_group(sampler: Sampler) -> None:
    """An engine's client that was shut down cancels its own requests: nobody has cancelled the batch."""
    script = Script(failures=99, error=asyncio.CancelledError)
    summary = await produce(SyncProduceStrategy(), scripted(script), sampler, 3)
    assert (summary.produced, summary.failed) == (3, 1)
    await assert_accounted(sampler)


class Panic(BaseException):
    pass


async def test_what_is_no_exception_ends_the_batch_and_loses_nothing(sampler: Sampler) -> None:
    with pytest.raises(Panic):
        await produce(STRATEGY, scripted(Script(failures=1, error=Panic)), sampler, 4)
    await assert_accounted(sampler)


class CancellingItself(ScriptedLoop):
    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)


class Plain(ScriptedLoop):
    def generate_group(self, group: list[RolloutState], *, partial: bool) -> Any:
        return group


OF_STEP_0 = Script(returns=with_field("response_model_steps", [0, 0, 0]))
#: Strategies with agent loops of which nothing comes, and what is said.
IN_VAIN: dict[str, tuple[ProduceStrategy, Callable[[], ScriptedLoop], str]] = {
    "cancels its own task": (STRATEGY, CancellingItself, r"[5-9] groups in a row.*cancelled its own task"),
    "is no coroutine": (STRATEGY, Plain, "object list can't be used in 'await' expression"),
    "is always interrupted": (
        AsyncProduceStrategy(give_up_after=2, enable_partial_rollout=True),
        lambda: ScriptedLoop(Script(status=Status.ABORTED)),
        r"\d+ interrupted, though generation was not paused",
    ),
    "makes what is too old": (
        AsyncProduceStrategy(give_up_after=2, max_staleness=1),
        lambda: ScriptedLoop(OF_STEP_0),
        r"0 of 4 completed groups, after \d+ in vain: \d+ too old when done",
    ),
    "makes what is filtered": (
        SyncProduceStrategy(give_up_after=3, is_valid=lambda group: False),
        ScriptedLoop,
        r"0 of 4 completed groups, after 1[2-5] in vain: 1[2-5] filtered",
    ),
}


@pytest.mark.parametrize("name", IN_VAIN)
async def test_a_loop_that_works_in_vain_ends_the_batch_and_loses_nothing(sampler: Sampler, name: str) -> None:
    strategy, loop, message = IN_VAIN[name]
    with pytest.raises(ProduceError, match=message):
        await produce(strategy, loop(), sampler, 4, train_step=9, model_step=8)
    await assert_accounted(sampler)


async def test_a_pause_that_raises_ends_the_batch_and_loses_nothing(sampler: Sampler) -> None:
    class Broken(ScriptedLoop):
        async def pause(self) -> None:
            raise TimeoutError("the engine doesn't answer")

    loop = Broken(scripts={0: Script(tokens=10**6)})
    with pytest.raises(TimeoutError, match="the engine doesn't answer"):
        await produce(AsyncProduceStrategy(over_sample=1), loop, sampler, 2)
    await assert_accounted(sampler)


@pytest.mark.parametrize("name", ["pause", "resume"])
async def test_a_loop_that_cancels_its_own_pause_ends_the_batch(sampler: Sampler, name: str) -> None:
    """By an error: nobody has cancelled the batch."""

    async def cancelled() -> None:
        raise asyncio.CancelledError

    loop = ScriptedLoop(scripts={0: Script(tokens=10**6)})
    setattr(loop, name, cancelled)
    with pytest.raises(ProduceError, match=rf"{name}\(\) of the agent loop has cancelled itself"):
        await produce(AsyncProduceStrategy(over_sample=1), loop, sampler, 2)
    await assert_accounted(sampler)


async def test_groups_that_fail_as_they_are_interrupted_do_not_fail_the_batch(sampler: Sampler) -> None:
    """Engines that abort requests with an error."""

    class Aborting(ScriptedLoop):
        async def generate_group(self, group: list[RolloutState], *, partial: bool) -> Any:
            answer = await super().generate_group(group, partial=partial)
            if self.paused:
                raise ConnectionError("aborted")
            return answer

    loop = Aborting(scripts={number: Script(tokens=10**6) for number in range(8)})
    strategy = AsyncProduceStrategy(over_sample=4, max_failures=2)
    summary = await produce(strategy, loop, sampler, 2)
    assert (summary.produced, summary.retried) == (2, 8)
    await assert_accounted(sampler)


async def test_what_is_no_agent_loop_is_said_before_prompts_fail(sampler: Sampler) -> None:
    with pytest.raises(InputError, match="an agent loop needs generate_group, pause and resume; got 5"):
        await produce(STRATEGY, 5, sampler, 4)
    await assert_accounted(sampler)
    assert await sampler.buffer.count(TASK, Status.FAILED) == 0


async def test_an_error_says_where_the_loop_raised(sampler: Sampler, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback of an error is logged once, and is the cause of what ends the batch."""
    with pytest.raises(ProduceError) as raised:
        await produce(STRATEGY, ScriptedLoop(Script(failures=99)), sampler, 4)
    assert isinstance(raised.value.__cause__, ValueError)
    assert [bool(record.exc_info) for record in caplog.records][:3] == [True, False, False]
    assert "<Prompt 1 of math, group 0, attempt 1> failed, and will be tried again" in caplog.records[0].getMessage()
