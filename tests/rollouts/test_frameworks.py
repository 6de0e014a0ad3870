"""Rollouts as frameworks have them, and of text only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import RolloutError
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.contract.harness import only
from tests.frameworks import (
    GenerationResult,
    Sample,
    SampleParams,
    XtunerRollout,
    XtunerStatus,
    open_instruct_group,
    slime_group,
    xtuner_group,
)
from tests.stores import TASK, build

FRAMEWORKS = {
    "xtuner": (XtunerRollout, xtuner_group, XtunerStatus.COMPLETED),
    "slime": (Sample, slime_group, Sample.Status.TRUNCATED),
    "open-instruct": (GenerationResult, open_instruct_group, Status.COMPLETED),
}
of_each = pytest.mark.parametrize(("cls", "make", "status"), FRAMEWORKS.values(), ids=FRAMEWORKS)


def config(url: str, cls: type[Any], **options: Any) -> ReplayBufferConfig[Any]:
    return ReplayBufferConfig(url=url, rollout_type=cls, **options)


@of_each
async def test_groups_come_back_equal_by_every_call_that_takes_a_status(
    cls: type[Any], make: Callable[[], list[Any]], status: Enum
) -> None:
    async with config("memory://", cls).build() as buffer:
        uid = await buffer.put(make(), "t")
        await buffer.put(make(), "t")
        assert await buffer.count("t", status) == 2
        assert await buffer.count_where({"status": status}) == 2
        assert await buffer.count_where({"status": {"$in": [status]}}) == 2
        assert await buffer.is_ready({"t": 2}, group_status=status)
        assert await buffer.get(1, "t", status, where={"uid": uid}) == [make()]
        async with buffer.lease_batch({"t": 1}, group_status=status) as lease:
            assert lease.items["t"][0].item == make()


@pytest.mark.parametrize(
    ("make", "cls", "expired"),
    [(xtuner_group, XtunerRollout, XtunerStatus.EXPIRED), (slime_group, Sample, Sample.Status.ABORTED)],
)
async def test_expiry_writes_the_member_of_their_enum_that_lets_it_be_generated_again(
    make: Callable[[], list[Any]], cls: type[Any], expired: Enum
) -> None:
    fields = {} if cls is XtunerRollout else {"response_ids": "tokens", "response_model_steps": "weight_versions"}
    async with config("memory://", cls, fields=fields).build() as buffer:
        group = make()
        for rollout in group:
            setattr(rollout, fields.get("response_model_steps", "response_model_steps"), [3, 3, 3])
            setattr(rollout, fields.get("response_ids", "response_ids"), [1, 2, 3])
        await buffer.put(group, "t")
        await buffer.refresh_staleness(task_stale_thresholds={"t": 4}, current_train_step=7)
        assert await buffer.count("t", Status.COMPLETED) == 1
        expiring = await buffer.refresh_staleness(
            task_stale_thresholds={"t": 4}, current_train_step=8, statuses=[FRAMEWORKS["xtuner"][2]]
        )
        assert expiring == {"t": 1}
        [item] = [item async for item in buffer.find({"status": XtunerStatus.EXPIRED})]
        assert (item.status, item.staleness) == (Status.EXPIRED, 4)
        assert [rollout.status for rollout in item.item] == [expired] * 2
        assert [rollout.response for rollout in item.item] == ["", ""]
        assert [getattr(rollout, fields.get("response_ids", "response_ids")) for rollout in item.item] == [[], []]


async def test_a_reader_without_the_class_sets_that_group_aside_and_no_other(shared_url: str) -> None:
    typed_config = ReplayBufferConfig(url=shared_url, policy="fifo", rollout_type=dict, types=[SampleParams])
    async with typed_config.build() as writer:
        await writer.put([{"params": SampleParams()}], "t")
        await writer.put([{"params": None}], "t")
        async with ReplayBufferConfig(url=shared_url, policy="fifo", rollout_type=dict).build() as reader:
            assert await reader.get(2, "t") == [[{"params": None}]]
            [failed] = [item async for item in reader.find({"status": "failed"})]
            assert "tests.frameworks.SampleParams" in str(failed.error)
            assert "types=[SampleParams]" in str(failed.error)
        assert await writer.get(1, "t", "failed") == [[{"params": SampleParams()}]]


async def test_what_the_config_does_not_name_is_refused_with_the_line_that_would_do() -> None:
    async with config("memory://", Sample).build() as buffer:
        for value, name in ((SampleParams(), "SampleParams"), (XtunerStatus.INIT, "XtunerStatus")):
            with pytest.raises(RolloutError, match=rf"rollouts\[0\]\.metadata\['a'\]\[1\]: .*types=\[{name}\]"):
                await buffer.put([Sample(metadata={"a": [1, value]})], "t")
        assert len(buffer) == 0


async def test_rollouts_whose_class_has_no_status_leave_it_to_their_group() -> None:
    async with config("memory://", GenerationResult).build() as buffer:
        await buffer.put(open_instruct_group(), "t", status="aborted")
        [item] = [item async for item in buffer.find({})]
        assert (item.status, item.item) == (Status.ABORTED, open_instruct_group())


THRESHOLDS = ({"stale_threshold": 4}, {"token_stale_threshold": 4})


def rollout(**fields: Any) -> RolloutState:
    values = {"message": [{"role": "user", "content": "?"}], "response": "4", "status": Status.COMPLETED}
    return RolloutState(**(values | fields))


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
async def test_a_text_is_as_old_as_the_model_step_of_its_put(threshold: dict[str, int]) -> None:
    """At put and in every refresh, until it expires by whichever threshold there is."""
    ((name, value),) = threshold.items()
    steps = {f"task_{name}s": {TASK: value}}
    async with build("memory://") as buffer:
        await buffer.put([rollout()], TASK, model_step=2, current_train_step=3, **threshold)  # type: ignore[arg-type]
        item = await only(buffer)
        assert (item.status, item.staleness, item.item[0].response_model_steps) == (Status.COMPLETED, 0, [2])
        for step, status, staleness in ((6, Status.COMPLETED, 3), (7, Status.EXPIRED, 4)):
            await buffer.refresh_staleness(
                **({"task_stale_thresholds": {TASK: None}} | steps),  # type: ignore[arg-type]
                current_train_step=step,
            )
            item = await only(buffer)
            assert (item.status, item.staleness) == (status, staleness)
        assert (item.item[0].response, item.item[0].response_model_steps) == ("", [])


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
async def test_a_text_that_is_too_old_expires_at_its_put(threshold: dict[str, int]) -> None:
    async with build("memory://") as buffer:
        members = [rollout(response_mask=[]), rollout(response="5")]
        await buffer.put(members, TASK, model_step=2, current_train_step=7, **threshold)  # type: ignore[arg-type]
        item = await only(buffer)
        assert (item.status, item.staleness) == (Status.EXPIRED, 4)


async def test_a_text_that_newer_weights_went_on_with_is_as_old_as_its_beginning() -> None:
    async with build("memory://") as buffer:
        interrupted = rollout(status=Status.ABORTED)
        await buffer.put([interrupted], TASK, model_step=2, current_train_step=3)
        interrupted.response, interrupted.status = "42", Status.COMPLETED
        await buffer.put([interrupted], TASK, model_step=5, current_train_step=6, replaces=[1])
        item = await only(buffer)
        assert (item.staleness, item.item[0].response_model_steps) == (3, [2])


async def test_a_rollout_without_a_response_has_no_model_step() -> None:
    async with build("memory://") as buffer:
        await buffer.put([rollout(response=None), rollout(response="")], TASK, model_step=2, current_train_step=9)
        item = await only(buffer)
        assert (item.staleness, [member.response_model_steps for member in item.item]) == (0, [None, None])


@dataclass
class Answer:
    text: str
    steps: list[int] = field(default_factory=list)


async def test_a_class_needs_no_token_ids() -> None:
    """Neither a user's own nor a dict."""
    fields = {"response": "text", "response_model_steps": "steps"}
    async with build("memory://", name="answers", rollout_type=Answer, fields=fields) as buffer:
        await buffer.put([Answer("4")], TASK, model_step=2, current_train_step=5)  # type: ignore[list-item]
        assert ((await only(buffer)).staleness, (await only(buffer)).item) == (2, [Answer("4", [2])])
    async with build("memory://", name="dicts", rollout_type=dict) as buffer:
        await buffer.put([{"response": "4"}], TASK, model_step=2, current_train_step=5)  # type: ignore[list-item]
        assert (await only(buffer)).staleness == 2
        with pytest.raises(RolloutError, match="no 'response' needs field 'response_ids'"):
            await buffer.put([{"text": "4"}], TASK, model_step=2, current_train_step=5)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("fields", "newest"),
    [
        ({}, 3),
        ({"response": ""}, None),
        ({"response": None}, None),
        ({"labels": [1]}, None),
        ({"input_ids": [1]}, None),
    ],
    ids=str,
)
def test_the_newest_step_of_a_text_is_its_oldest(fields: dict[str, Any], newest: int | None) -> None:
    """Groups of agents are exempt, as with tokens."""
    member = rollout(response_model_steps=[3, 5], **fields)
    assert Marks.of([member], RolloutType(RolloutState)).newest == [newest]
