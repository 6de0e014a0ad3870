"""Laws of rollouts that consist of segments: nested groups, and trees."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.storage.sql.tasks.handles import ArrayHandle
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import Harness, OpenBuffer, found, only, plain, rollout
from tests.stores import rows

TOKENS = np.arange(9000)


def segment(number: int, **fields: Any) -> Any:
    """Return a rollout whose tokens begin as those of all others, from 4,000 on and 500 more for each number."""
    count = 4000 + 500 * number
    arrays = {"routed_experts": TOKENS[:count].copy(), "prompt_ids": TOKENS[:count].tolist()}
    return rollout(number, **arrays, **({"reward": {"score": float(number)}} | fields))


def nothing(number: int) -> Any:
    return segment(number, reward=None)


#: Items and parents; the number of rollouts, the mean of their rewards, and the rollout and parent of each segment.
SHAPES: dict[str, tuple[list[Any], Any, int, float | None, list[tuple[int, int | None]]]] = {
    "lists and rollouts": ([segment(1), (nothing(2), segment(3))], None, 2, 2.0, [(0, None), (1, None), (1, 1)]),
    "a reward in the middle": ([[segment(4), nothing(5)], [nothing(6)]], None, 2, 4.0, [(0, None), (0, 0), (1, None)]),
    "no reward": ([[nothing(4), nothing(5)]], None, 1, None, [(0, None), (0, 0)]),
    "two trees": (
        [segment(1), segment(2), segment(3), segment(6)],
        [None, None, 1, 0],
        *(2, 4.5, [(0, None), (1, None), (1, 1), (0, 0)]),
    ),
    "branches in lists": (
        [[segment(1), segment(2), segment(4)], segment(7)],
        [None, 0, 0, None],
        *(2, 5.0, [(0, None), (0, 0), (0, 0), (1, None)]),
    ),
}


def lists(items: list[Any]) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in items]


class SegmentLaws(Harness):
    """Laws of groups of segments."""

    @pytest.mark.parametrize("shape", SHAPES)
    async def test_a_group_of_segments_comes_back_as_it_was_put(
        self, open_buffer: OpenBuffer, tmp_path: Path, shape: str
    ) -> None:
        """By each way of reading, with the parents of its segments; and it is counted by rollout."""
        buffer = await open_buffer(max_times_sampled=4)
        items, parents, rollouts, reward, places = SHAPES[shape]
        await buffer.put(deepcopy(items), "math", parents=parents)
        expected = plain(lists(items))
        await buffer.checkpoint(1)
        [by_sample] = (await buffer.sample({"math": 1}))["math"]
        async with buffer.lease_batch({"math": 1}) as lease:
            [by_lease] = lease.items["math"]
        await buffer.delete({})
        await buffer.restore(1)
        for item in (by_sample, by_lease, await only(buffer)):
            assert plain(item.item) == expected
            assert item.segments is not None
            assert item.segments.parents == [parent for _, parent in places]
            assert (item.rollouts, item.reward) == (rollouts, reward)
        for name, exact in (("exact.jsonl", True), ("plain.parquet", False)):
            assert (await buffer.export(tmp_path / name, where={"uid": 1}, exact=exact)).rollouts == rollouts
            await buffer.import_from(tmp_path / name)
        for item in (await found(buffer))[1:]:
            assert (item.segments, item.rollouts, item.reward) == (by_sample.segments, rollouts, reward)
            assert [part.rollout_id for part in item.flat] == [part.rollout_id for part in by_sample.flat]
        [group] = await buffer.get(1, "math")
        assert plain(group) == expected
        assert await rows(buffer, "SELECT rollouts FROM groups WHERE uid = 1") == [(rollouts,)]
        assert await rows(buffer, "SELECT rollout, parent FROM rollouts WHERE uid = 1 ORDER BY position") == places

    async def test_segments_expire_and_are_masked_one_by_one(self, buffer: ReplayBuffer) -> None:
        """A segment that expires loses its response; the others keep theirs, without their tokens that are too old."""
        fields: dict[str, Any] = {"response_ids": [1, 2], "logprobs": None, "response_mask": [1, 1]}
        steps = [[segment(1, **fields, response_model_steps=[1, 1]), segment(3, **fields, response_model_steps=[3, 5])]]
        await buffer.put(steps, "math", current_train_step=6)
        await buffer.refresh_staleness(
            task_stale_thresholds={"math": 5}, task_token_stale_thresholds={"math": 3}, current_train_step=7
        )
        item = await only(buffer)
        [[first, second]] = item.item
        assert (item.status, item.rollouts, item.reward) == (Status.EXPIRED, 1, 3.0)
        assert (first.response_ids, second.response_ids, second.response_mask) == ([], [1, 2], [0, 1])

    async def test_rollouts_of_segments_fill_groups_that_go_without_failed_ones(self, buffer: ReplayBuffer) -> None:
        """Each is one rollout of its group, whatever it consists of."""
        failed = segment(3, status=Status.FAILED)
        for index, entry in enumerate(([segment(1), segment(2)], segment(5), [segment(4), failed])):
            await buffer.put([entry], "math", group="g", size=3, min_size=2, index=index)
        await buffer.put([[segment(1), failed], [segment(6), segment(7)]], "math", min_size=1)
        by_status = {status: await found(buffer, {"status": status}) for status in (Status.COMPLETED, Status.FAILED)}
        assert [[item.rollouts for item in items] for items in by_status.values()] == [[2, 1], [1, 1]]
        first, second = by_status[Status.COMPLETED]
        assert [[part.rollout_id for part in item.flat] for item in (first, second)] == [[1, 2, 5], [6, 7]]
        assert [type(entry) for entry in (*first.item, *second.item)] == [list, type(failed), list]
        with pytest.raises(InputError, match="parents can't be given with group= or min_size="):
            await buffer.put([segment(1)], "math", group="h", size=2, parents=[None])

    async def test_segments_are_dropped_as_they_were_put(self, buffer: ReplayBuffer) -> None:
        """Before they are stored, and afterwards."""
        dropped: list[Any] = []
        steps: dict[str, Any] = {"response_model_steps": [1, 1, 1]}
        rule: dict[str, Any] = {"expired_groups_retryable": False, "dropped": dropped}
        await buffer.put(
            [[segment(1, **steps), segment(2, **steps)]], "math", stale_threshold=1, current_train_step=9, **rule
        )
        uid = await buffer.put([[segment(3), segment(4)]], "math")
        await buffer.put([segment(5)], "math", replaces=[uid or 0], dropped=dropped)
        assert [[part.rollout_id for part in item.item[0]] for item in dropped] == [[1, 2], [3, 4]]

    async def test_deferred_arrays_of_segments_are_loaded_from_what_each_adds(self, buffer: ReplayBuffer) -> None:
        """A handle reads the blocks of the segments before it, too."""
        await buffer.put([segment(8), *map(segment, range(3))], "math", parents=[None, None, 1, 2])
        async with buffer.lease_batch({"math": 1}, deferred=["routed_experts"]) as lease:
            for part in lease.items["math"][0].flat:
                handle: Any = part.routed_experts
                assert type(handle) is ArrayHandle
                loaded = handle.load()
                assert (loaded.tolist(), loaded.flags.writeable) == (part.prompt_ids, True)
