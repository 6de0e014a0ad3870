"""Laws of staleness and expiry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError, RolloutError
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import Harness, found, group, only, plain, rollout
from tests.reference.snapshots import held_by


async def refresh(buffer: ReplayBuffer, step: int, threshold: int | None = None, **options: Any) -> dict[str, int]:
    """Refresh the task math."""
    return await buffer.refresh_staleness(task_stale_thresholds={"math": threshold}, current_train_step=step, **options)


async def staleness(buffer: ReplayBuffer) -> list[int]:
    """Return the staleness of all groups, and check that it is that of their most stale rollout."""
    items = await found(buffer)
    for item in items:
        assert item.staleness == max(rollout.seq_staleness for rollout in item.item)
    return [item.staleness for item in items]


async def masks(buffer: ReplayBuffer) -> list[Any]:
    """Return the response mask of the first rollout of each group."""
    return [item.item[0].response_mask for item in await found(buffer)]


class RefreshingLaws(Harness):
    """The effects of a refresh on staleness, status and reads."""

    @pytest.mark.parametrize("steps", [None, [1, 8]])
    @pytest.mark.parametrize("again", [Status.ABORTED, Status.EXPIRED])
    async def test_an_updated_status_outlives_those_of_the_put(
        self, buffer: ReplayBuffer, steps: list[int] | None, again: Status
    ) -> None:
        """What was EXPIRED when it was put expires at the next refresh, unless an update has set the group's status."""
        put = [rollout(1, status=Status.EXPIRED), rollout(2, status=Status.ABORTED, response_model_steps=steps)]
        await buffer.put(put, "math")
        await buffer.update({}, status=Status.COMPLETED)
        refreshed = {"task_stale_thresholds": {"math": None}, "task_token_stale_thresholds": {"math": 3}}
        assert await buffer.refresh_staleness(**refreshed, current_train_step=5) == {"math": 0}
        await buffer.update({}, status=again)
        assert await buffer.refresh_staleness(**refreshed, current_train_step=9) == {"math": 0}
        assert all(rollout.response_ids for rollout in (await only(buffer)).item)

    async def test_statuses_default_to_those_that_expire(self, buffer: ReplayBuffer) -> None:
        """completed, aborted and expired; groups of other statuses keep their staleness."""
        for status in set(Status) - {Status.FILLING}:
            await buffer.put(group(1, status=status, response_model_steps=[1]), "math")
        await buffer.put(group(1, response_model_steps=[1]), "math", group="some", size=2)
        await refresh(buffer, 9)
        after = {item.status: item.staleness for item in await found(buffer)}
        assert {status for status, value in after.items() if value == 7} == {"completed", "aborted", "expired"}
        assert set(after.values()) == {0, 7}

    async def test_statuses_can_be_chosen(self, buffer: ReplayBuffer) -> None:
        """Any of them, also some that put doesn't expire; these expire too."""
        for status in ("completed", "failed", "aborted"):
            await buffer.put(group(1, status=Status(status), response_model_steps=[1]), "math")
        assert await refresh(buffer, 9, 3, statuses=["failed", Status.ABORTED]) == {"math": 2}
        assert [(i.status, i.staleness) for i in await found(buffer)] == [
            ("completed", 0),
            ("expired", 7),
            ("expired", 7),
        ]
        kept = held_by(buffer)["groups"]
        assert [one["archived_at"] for one in kept] == [None, None, None]  # the failed one is no longer set aside
        assert await refresh(buffer, 9, 3, statuses=[]) == {"math": 0}
        with pytest.raises(InputError):
            await refresh(buffer, 9, statuses=["done"])

    async def test_an_updated_status_decides(self, buffer: ReplayBuffer) -> None:
        """A group is refreshed if its new status is, and otherwise keeps its staleness."""
        await buffer.put(group(1), "math", model_step=1, current_train_step=4)
        await refresh(buffer, 5)
        await buffer.update({}, status="filtered")
        await refresh(buffer, 9)
        assert await staleness(buffer) == [3]
        await buffer.update({}, status="completed")
        assert await staleness(buffer) == [3]
        await refresh(buffer, 9)
        assert await staleness(buffer) == [7]

    async def test_the_rest_of_an_expired_group_can_expire_later(self, buffer: ReplayBuffer) -> None:
        """An EXPIRED group whose other rollouts grow too old is counted again."""
        put = [rollout(1, response_model_steps=[1]), rollout(2, response_model_steps=[4])]
        await buffer.put(put, "math", current_train_step=5)
        assert [await refresh(buffer, step, 4) for step in (6, 7, 9, 10)] == [
            {"math": 1}, {"math": 0}, {"math": 1}, {"math": 0}
        ]  # fmt: skip
        item = await only(buffer)
        assert [r.status for r in item.item] == ["expired", "expired"]

    async def test_partly_stale_responses_are_masked(self, buffer: ReplayBuffer) -> None:
        """As in put; what is masked stays masked, until the next refresh masks more or the rollout expires."""
        fields: list[dict[str, Any]] = [{}, {"response_mask": [1, 1, 0]}, {"response_mask": None}, {"labels": [1]}]
        for one in fields:
            await buffer.put(group(1, response_model_steps=[0, 4, 7], **one), "math", current_train_step=8)
        assert await refresh(buffer, 8) == {"math": 0}
        assert await masks(buffer) == [[1, 1, 1], [1, 1, 0], None, [1, 1, 1]]
        for threshold in (4, 9):
            assert await refresh(buffer, 8, task_token_stale_thresholds={"math": threshold}) == {"math": 0}
            assert await masks(buffer) == [[0, 1, 1], [0, 1, 0], [0, 1, 1], [1, 1, 1]]
        assert await refresh(buffer, 9, task_token_stale_thresholds={"math": 4}) == {"math": 1}
        assert await masks(buffer) == [[0, 0, 1], None, [0, 0, 1], [1, 1, 1]]

    async def test_a_mask_goes_where_its_group_goes(self, buffer: ReplayBuffer) -> None:
        """A group that changes its status and is taken keeps it."""
        await buffer.put(group(1, response_model_steps=[0, 7], response_mask=[1, 1]), "math", current_train_step=8)
        await refresh(buffer, 8, task_token_stale_thresholds={"math": 4})
        for status in ("filtered", "completed"):
            await buffer.update({}, status=status)
        [[taken]] = await buffer.get(1, "math")
        assert taken.response_mask == [0, 1]


class ExpiryLaws(Harness):
    """The effects of model steps, train steps and thresholds on a put, which it has before a database sees it."""

    async def test_model_step_fills_up_what_is_missing(self, buffer: ReplayBuffer) -> None:
        """It extends `response_model_steps` to the length of `response_ids`; existing ones stay."""
        put = [rollout(1), rollout(2, response_model_steps=[3]), rollout(3, response_model_steps=[1, 1, 1, 1])]
        await buffer.put(put, "math", model_step=7)
        stored = (await only(buffer)).item
        assert [r.response_model_steps for r in stored] == [[7, 7, 7], [3, 7, 7], [1, 1, 1, 1]]

    async def test_model_steps_of_arrays_are_arrays(self, buffer: ReplayBuffer) -> None:
        """An array is extended by its own dtype; where response_ids are an array the steps become one."""
        steps = np.array([3], dtype=np.int16)
        put = [rollout(1, response_model_steps=steps), rollout(2, response_ids=np.array([5, 6]))]
        await buffer.put(put, "math", model_step=7)
        stored = [r.response_model_steps for r in (await only(buffer)).item]
        assert [(s.dtype, s.tolist()) for s in stored] == [(np.int16, [3, 7, 7]), (np.int32, [7, 7])]

    async def test_staleness_is_that_of_the_oldest_token(self, buffer: ReplayBuffer) -> None:
        """`T - min(response_model_steps) - 1` of a rollout, 0 without model steps; the largest of a group."""
        put = [rollout(1, response_model_steps=[5, 2]), rollout(2, response_model_steps=[9]), rollout(3)]
        await buffer.put(put, "math", current_train_step=10)
        item = await only(buffer)
        assert [r.seq_staleness for r in item.item] == [7, 0, 0]
        assert item.staleness == 7

    async def test_staleness_is_negative_when_the_model_is_ahead(self, buffer: ReplayBuffer) -> None:
        """A model step of the train step or later gives a staleness below 0."""
        await buffer.put(group(1), "math", model_step=6, current_train_step=5)
        item = await only(buffer)
        assert (item.staleness, item.item[0].seq_staleness) == (-2, -2)

    async def test_without_train_step_their_own_staleness_counts(self, buffer: ReplayBuffer) -> None:
        """`seq_staleness` is kept, model steps or not, and thresholds go by it."""
        put = [rollout(1, seq_staleness=4, response_model_steps=[0]), rollout(2, seq_staleness=1)]
        await buffer.put(put, "math", stale_threshold=4)
        item = await only(buffer)
        assert (item.staleness, item.status) == (4, Status.EXPIRED)
        assert [r.status for r in item.item] == [Status.EXPIRED, Status.COMPLETED]
        assert [r.seq_staleness for r in item.item] == [4, 1]

    @pytest.mark.parametrize(("threshold", "status"), [(4, Status.COMPLETED), (3, Status.EXPIRED), (1, Status.EXPIRED)])
    async def test_expiry_begins_at_the_threshold(self, buffer: ReplayBuffer, threshold: int, status: Status) -> None:
        """A staleness that equals the threshold expires."""
        await buffer.put(group(1), "math", model_step=1, current_train_step=5, stale_threshold=threshold)
        item = await only(buffer)
        assert (item.status, item.staleness) == (status, 3)

    async def test_an_expired_rollout_loses_its_response(self, buffer: ReplayBuffer) -> None:
        """The response goes, tokens go back to the prompt; prompt, message, mm_info and extra_fields stay."""
        fields: dict[str, Any] = {"mm_info": {"image": "x"}, "routed_experts": [1], "error_msg": "e", "labels": None}
        await buffer.put(group(1, **fields), "math", model_step=0, current_train_step=9, stale_threshold=1)
        [stored] = (await only(buffer)).item
        assert (stored.status, stored.response, stored.tokens, stored.seq_staleness) == ("expired", "", [1, 2], 8)
        assert (stored.response_ids, stored.logprobs, stored.response_model_steps) == ([], [], [])
        gone = ("routed_experts", "finish_reason", "response_mask", "reward", "error_msg")
        assert [getattr(stored, name) for name in gone] == [None] * 5
        before = rollout(1, **fields)
        kept = ("rollout_id", "message", "prompt_ids", "mm_info", "extra_fields")
        assert [plain(getattr(stored, n)) for n in kept] == [plain(getattr(before, n)) for n in kept]

    async def test_the_other_rollouts_keep_all_they_have(self, buffer: ReplayBuffer) -> None:
        """Only rollouts that expired are reset; the group is EXPIRED, its reward that of the others."""
        put = [rollout(1, response_model_steps=[0], reward=1.0), rollout(2, response_model_steps=[8], reward=0.25)]
        await buffer.put(put, "math", current_train_step=9, stale_threshold=5)
        item = await only(buffer)
        assert (item.status, item.staleness, item.reward) == (Status.EXPIRED, 8, 0.25)
        assert plain(item.item[1]) == plain(rollout(2, response_model_steps=[8], reward=0.25))

    async def test_not_retryable_groups_are_dropped_and_counted(self, buffer: ReplayBuffer) -> None:
        """put returns None, nothing is stored, every rollout of the caller is EXPIRED, the task's count goes up."""
        put = [rollout(1, response_model_steps=[0]), rollout(2)]
        uid = await buffer.put(put, "math", current_train_step=9, stale_threshold=5, expired_groups_retryable=False)
        assert (uid, len(buffer)) == (None, 0)
        assert [r.status for r in put] == [Status.EXPIRED, Status.EXPIRED]
        assert put[0].response == "the answer"
        assert (await buffer.dropped("math"), await buffer.dropped("code")) == (1, 0)

    @pytest.mark.parametrize("status", [Status.INIT, Status.FAILED, Status.FILTERED, Status.ARCHIVED])
    async def test_other_statuses_do_not_expire(self, buffer: ReplayBuffer, status: Status) -> None:
        """Only completed, aborted and expired groups do; staleness is computed all the same."""
        await buffer.put(group(1, status=status), "math", model_step=0, current_train_step=9, stale_threshold=1)
        item = await only(buffer)
        assert (item.status, item.staleness, item.item[0].response) == (status, 8, "the answer")

    @pytest.mark.parametrize("status", [Status.ABORTED, Status.EXPIRED])
    async def test_aborted_and_expired_groups_expire(self, buffer: ReplayBuffer, status: Status) -> None:
        """As completed ones do."""
        await buffer.put(group(1, status=status), "math", model_step=0, current_train_step=9, stale_threshold=1)
        item = await only(buffer)
        assert (item.status, item.item[0].response) == (Status.EXPIRED, "")

    @pytest.mark.parametrize(
        ("fields", "expires"),
        [
            ({"response_model_steps": [0, 6, 1]}, False),  # its newest token has staleness 3
            ({"response_model_steps": [0, 5, 1]}, True),
            ({"response_model_steps": [0, 6, 1], "response_mask": [1, 0, 1]}, True),  # the newest isn't trainable
            ({"response_model_steps": [0, 5, 1], "response_mask": [0, 0, 0]}, False),  # none is: exempt
            ({"response_model_steps": [0, 5, 1], "response_mask": None}, True),
            ({"response_model_steps": [0], "response_mask": [0, 1, 1]}, True),  # as old as the oldest
            ({"response_model_steps": [6], "response_mask": [0, 1, 1]}, False),
            ({"response_model_steps": [], "response_ids": []}, False),  # no response: exempt
            ({"response_model_steps": [0, 0, 0], "input_ids": [1]}, False),  # agentic: exempt
            ({"response_model_steps": [0, 0, 0], "labels": [1]}, False),
            ({"response_model_steps": np.array([0, 6, 1]), "response_mask": np.array([1, 0, 1])}, True),
        ],
    )
    async def test_expiry_by_token(self, buffer: ReplayBuffer, fields: dict[str, Any], expires: bool) -> None:
        """A rollout expires when no trainable token has a staleness below `token_stale_threshold`."""
        await buffer.put(group(1, **fields), "math", current_train_step=10, token_stale_threshold=4)
        item = await only(buffer)
        assert item.status is (Status.EXPIRED if expires else Status.COMPLETED)
        assert item.item[0].response == ("" if expires else "the answer")

    @pytest.mark.parametrize(
        ("fields", "mask"),
        [
            ({"response_model_steps": [0, 4, 7]}, [0, 1, 1]),
            ({"response_model_steps": [0, 4, 7], "response_mask": [1, 0, 1]}, [0, 0, 1]),
            ({"response_model_steps": [0, 4, 7], "response_mask": None}, [0, 1, 1]),
            ({"response_model_steps": [4, 7, 7], "response_mask": None}, None),
            ({"response_model_steps": [0, 4, 7], "labels": [1]}, [1, 1, 1]),  # agentic: exempt
            ({"response_model_steps": [0, 7]}, [0, 1, 0]),  # a token without a step is as old as the oldest
            ({"response_model_steps": [4]}, [1, 1, 1]),
        ],
    )
    async def test_stale_tokens_are_masked(
        self, buffer: ReplayBuffer, fields: dict[str, Any], mask: list[int] | None
    ) -> None:
        """Tokens at or over `token_stale_threshold` aren't trained on; a response without a mask then gets one."""
        put = group(1, **fields)
        await buffer.put(put, "math", current_train_step=8, token_stale_threshold=4)
        [stored] = (await only(buffer)).item
        assert (stored.status, stored.response_mask, put[0].response_mask) == ("completed", mask, mask)

    async def test_a_response_without_steps_has_no_age(self, buffer: ReplayBuffer) -> None:
        """With a token threshold it is refused, with the way out; agentic groups, and masked responses, are exempt."""
        step: dict[str, Any] = {"current_train_step": 8, "token_stale_threshold": 4}
        nothing: tuple[list[int] | None, ...] = (None, [])
        for steps in nothing:
            with pytest.raises(RolloutError, match=r"rollouts\[1\].*model_step"):
                await buffer.put(group(1, response_ids=[]) + group(2, response_model_steps=steps), "math", **step)
        assert len(buffer) == 0
        exempt: list[dict[str, Any]] = [{"labels": [1]}, {"response_mask": [0, 0, 0]}, {"response_ids": []}]
        for fields in (*exempt, {"status": Status.FAILED}):
            await buffer.put(group(1, **fields), "math", **step)
        await buffer.put(group(1), "math", model_step=7, **step)
        assert [item.status for item in await found(buffer)] == [*["completed"] * 3, "failed", "completed"]

    async def test_an_expired_group_that_is_not_retryable_is_dropped(self, buffer: ReplayBuffer) -> None:
        """Without a threshold, too: it had expired before."""
        put = group(1, status=Status.EXPIRED) + group(2)
        assert await buffer.put(put, "math", expired_groups_retryable=False) is None
        assert [r.status for r in put] == [Status.EXPIRED, Status.EXPIRED]
        assert (len(buffer), await buffer.dropped("math")) == (0, 1)

    async def test_agentic_rollouts_exempt_their_group(self, buffer: ReplayBuffer) -> None:
        """`input_ids` or `labels` of one rollout exempt all of the group from expiry by token."""
        put = [rollout(1, response_model_steps=[0]), rollout(2, response_model_steps=[0], input_ids=[1])]
        await buffer.put(put, "math", current_train_step=10, token_stale_threshold=1)
        assert (await only(buffer)).status is Status.COMPLETED

    async def test_either_threshold_expires(self, buffer: ReplayBuffer) -> None:
        """With both thresholds a rollout expires by the one or the other."""
        for oldest, newest in ((0, 9), (5, 5), (5, 9)):
            put = group(1, response_model_steps=[oldest, newest])
            await buffer.put(put, "math", current_train_step=10, stale_threshold=6, token_stale_threshold=4)
        statuses = [item.status for item in await found(buffer)]
        assert statuses == [Status.EXPIRED, Status.EXPIRED, Status.COMPLETED]

    async def test_the_rollouts_given_are_normalised_in_place(self, buffer: ReplayBuffer) -> None:
        """The caller's rollouts are afterwards the same as the stored ones."""
        put = [rollout(1, response_model_steps=[0]), rollout(2)]
        await buffer.put(put, "math", model_step=8, current_train_step=10, stale_threshold=5)
        assert plain(put) == plain((await only(buffer)).item)
        assert [(r.status, r.seq_staleness) for r in put] == [(Status.EXPIRED, 9), (Status.COMPLETED, 1)]
