"""Laws of annotations: what a trainer writes about groups that it drew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import InputError
from replaybuf.storage.sql.statements.annotate import MOST_NAMES
from tests.contract.harness import Harness, OpenBuffer, drawn, fill, found, group
from tests.contract.leasing import LONG
from tests.stores import rows

_COLUMNS = "step, restores, uid, name, position, value, text, min_value, max_value, tokens"


async def annotated(buffer: ReplayBuffer, columns: str = _COLUMNS) -> list[tuple[Any, ...]]:
    """Return the rows of the view."""
    return await rows(buffer, f"SELECT {columns} FROM annotations ORDER BY batch, uid, name, position")


class Tensor:
    """A tensor of torch, as far as annotations know it."""

    ndim = 1

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def double(self) -> Any:
        return np.array([0.5, 1.5, 1.0])


class AnnotatingLaws(Harness):
    """annotate."""

    async def test_groups_are_annotated_after_they_have_left_and_as_long_as_they_stay(
        self, open_buffer: OpenBuffer
    ) -> None:
        """Values of a group and of its rollouts; a name replaces what there was under it."""
        buffer = await open_buffer()
        await buffer.put(group(1, 2), "math")
        await fill(buffer, 2, first=3)
        [drawn_uid] = await drawn(buffer, 1, current_train_step=4)
        lease = await buffer.lease_batch({"math": 2}, current_train_step=5, seconds=LONG, heartbeat=False)
        acknowledged, given_back = sorted(lease.open)
        of_rollouts: Any = [{"kl": np.float32(0.5), "why": "odd", "length": 3}, {"kl": None, "length": np.array(4)}]
        values = {
            drawn_uid: of_rollouts,
            acknowledged: {"kl": 0.25, "clipped": True},
            given_back: [{"token": np.arange(3), "other": Tensor(), "listed": [0, 1, 0.5]}],
        }
        assert await buffer.annotate(values) == 3
        await lease.acknowledge([acknowledged])
        await lease.give_back([given_back])
        assert await buffer.annotate({drawn_uid: [{"length": 7}, {}], acknowledged: {"kl": -1}}) == 2
        assert await annotated(buffer) == [
            (4, 0, drawn_uid, "kl", 0, 0.5, None, None, None, None),
            (4, 0, drawn_uid, "length", 0, 7, None, None, None, None),
            (4, 0, drawn_uid, "why", 0, None, "odd", None, None, None),
            (5, 0, acknowledged, "clipped", None, 1, None, None, None, None),
            (5, 0, acknowledged, "kl", None, -1, None, None, None, None),
            (5, 0, given_back, "listed", 0, 0.5, None, 0, 1, 3),
            (5, 0, given_back, "other", 0, 1, None, 0.5, 1.5, 3),
            (5, 0, given_back, "token", 0, 1, None, 0, 2, 3),
        ]
        assert await buffer.annotate({}) == 0

    async def test_annotations_are_of_a_draw_and_outlive_restores(self, open_buffer: OpenBuffer) -> None:
        """The last draw, or that of a step; after a restore a step has those of both runs, and groups are as before."""
        buffer = await open_buffer(max_times_sampled=3)
        uids = await fill(buffer, 1)
        await buffer.checkpoint(0)
        for step in (1, 2):
            assert await drawn(buffer, 1, current_train_step=step) == uids
        await buffer.annotate({uids[0]: {"kl": 1}}, train_step=1)
        await buffer.annotate({uids[0]: {"kl": 2}})
        await buffer.restore(0)
        assert [item.times_sampled for item in await found(buffer)] == [0]
        await drawn(buffer, 1, current_train_step=1)
        await buffer.annotate({uids[0]: {"kl": 3}})
        expected = [(1, 0, 1), (2, 0, 2), (1, 1, 3)]
        assert await annotated(buffer, "step, restores, value") == expected
        await buffer.delete({})
        assert await annotated(buffer, "step, restores, value") == expected

    async def test_they_follow_a_group_into_the_step_that_it_is_acknowledged_for(self, buffer: ReplayBuffer) -> None:
        uids = await fill(buffer, 2)
        lease = await buffer.lease_batch({"math": 2}, current_train_step=1, seconds=LONG, heartbeat=False)
        await buffer.annotate({uid: {"kl": uid} for uid in uids})
        for step, uid in enumerate(uids, 1):
            await lease.acknowledge([uid], train_step=step)
        assert await annotated(buffer, "step, uid, value") == [(1, uids[0], uids[0]), (2, uids[1], uids[1])]

    async def test_they_go_with_the_draw_that_they_belong_to(self, buffer: ReplayBuffer) -> None:
        """When its record is pruned."""
        work = buffer.storage
        work.sweeper._history = 1
        await fill(buffer, 2)
        for _ in range(2):
            uids = await drawn(buffer)
            await buffer.annotate({uid: {"kl": 0.5} for uid in uids})
        await work.thread.run(work.sweeper.prune_history)
        assert await work._read(lambda tx: tx.values("SELECT uid FROM rb_annotation")) == uids

    async def test_what_cannot_be_annotated_is_refused(self, buffer: ReplayBuffer) -> None:
        """A sentence, and nothing is written, also of other groups of the call."""
        uids = await fill(buffer, 2)
        await buffer.lease_batch({"math": 1}, current_train_step=4, seconds=LONG, heartbeat=False)
        ok, undrawn = {"kl": 0.5}, {uids[1]: {"kl": 0.5}}
        messages: dict[str, Any] = {
            "no draw of group 2": undrawn,
            r"no draw of group 77 .*\(nor of 1 others\)": {77: ok, 78: ok},
        }
        of_one: dict[str, Any] = {
            "has 1 rollouts or segments, and 2 dicts: give one for each": [ok, ok],
            "given 0 annotations": {},
            "group 1 is given 0": [{"kl": None}],
            f"given {MOST_NAMES + 1} annotations": {f"n{n}": 1.0 for n in range(MOST_NAMES + 1)},
            "unless they are a dict, must be a list, got 3": 3,
            "annotations of group 1, rollout 0 must be a dict, got float": [0.5],
            r"the name 'a\\x00b' must be an identifier": {"a\0b": {}},
            "the name 5 must be": {5: 1},
            "kl of group 1 is nan: an annotation is": {"kl": float("nan")},
            "kl of group 1 is inf": {"kl": np.float32("inf")},
            "kl of group 1 is {}": {"kl": {}},
            "why of group 1 has 201 characters": {"why": "x" * 201},
            "why of group 1 is 'a.*NUL": {"why": "a\0"},
            "token of group 1 is an array: arrays are of rollouts .a list of dicts., each": {"token": np.ones(3)},
            "rollout 0 has 2 dimensions of float64": [{"token": np.ones((1, 3))}],
            "rollout 0 has 1 dimensions of object": [{"token": np.array([{}, {}, {}])}],
            "rollout 0 has nan at token 1, which": [{"token": np.array([0, np.nan, 0])}],
            "rollout 0 has 1e.300 at token 0": [{"token": np.array([1e300, 0, 0])}],
            r"rollout 0 is \[\[1\], .*: an annotation is a str": [{"token": [[1], [1, 2]]}],
            "each of which has one or None": [{"token": np.ones(3)}, {"token": 1.0}],
        }
        for message, values in (*messages.items(), *((message, {uids[0]: value}) for message, value in of_one.items())):
            with pytest.raises(InputError, match=f"(?s){message}.*; nothing was annotated$"):
                await buffer.annotate(values)
        with pytest.raises(InputError, match="for train step 5 is recorded"):
            await buffer.annotate({uids[0]: ok}, train_step=5)
        for values, message in ((7, "a dict of uids"), ({"a": ok}, "must be uids"), ({-1: ok}, "must be uids")):
            with pytest.raises(InputError, match=message):
                await buffer.annotate(values)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no draw"):
            await buffer.annotate({uids[0]: ok, **undrawn})
        assert await annotated(buffer) == []
