"""Laws of tallies and metrics: counts add up, and replayed groups are kept apart from new ones."""

from __future__ import annotations

from collections import Counter

import pytest

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.errors import FullError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.values.rollouts.rollout import Status
from tests.contract.harness import Harness, OpenBuffer, drawn, fill, group

TASKS = ("math", "code")
_GONE = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.PRUNED)


async def conserved(storage: SQLStorage) -> None:
    """Check that every group put is in the buffer or counted by its outcome, and that levels match the groups."""
    tallies = {key: n for key, n in (await storage.tallies()).items() if n}
    assert all(n > 0 for n in tallies.values()), tallies
    for task in TASKS:
        of = Counter[Tally]()
        for (name, status, tally), n in tallies.items():
            if name == task and status != Status.ARCHIVED:
                of[tally] += n
        assert of[Tally.PUT] == sum(of[name] for name in _GONE) + of[Tally.SIZE] + of[Tally.LEASED], (task, of)


class TallyLaws(Harness):
    """A store counts in the same transactions that change groups."""

    async def test_each_thing_has_its_tally(self, open_buffer: OpenBuffer) -> None:
        """By task and by the status that the group had."""
        buffer = await open_buffer(capacity=3, on_full="reject")
        [first, *_] = await fill(buffer, 3)
        with pytest.raises(FullError):
            await buffer.put(group(9), "math")
        await buffer.put(group(4, status=Status.FAILED), "math", replaces=[first])
        await drawn(buffer, 1)
        await buffer.delete({"status": "failed"})
        stale = group(5, response_model_steps=[1, 1, 1])
        await buffer.put(stale, "code", current_train_step=9, stale_threshold=2, expired_groups_retryable=False)
        assert {key: n for key, n in (await buffer.storage.tallies()).items() if n} == {
            ("math", Status.COMPLETED, Tally.PUT): 3,
            ("math", Status.COMPLETED, Tally.SIZE): 1,
            ("math", Status.COMPLETED, Tally.REFUSED): 1,
            ("math", Status.COMPLETED, Tally.REPLACED): 1,
            ("math", Status.COMPLETED, Tally.SAMPLED_NEW): 1,
            ("math", Status.COMPLETED, Tally.TAKEN): 1,
            ("math", Status.FAILED, Tally.PUT): 1,
            ("math", Status.FAILED, Tally.DELETED): 1,
            ("code", Status.EXPIRED, Tally.PUT): 1,
            ("code", Status.EXPIRED, Tally.DROPPED): 1,
        }


class MetricsLaws(Harness):
    """metrics()."""

    async def test_an_empty_buffer_has_metrics(self, buffer: ReplayBuffer) -> None:
        """Of no task."""
        metrics = await buffer.metrics()
        assert metrics["tasks"] == {}
        assert metrics["waits"]["groups"] == {"count": 0, "seconds": 0, "timeouts": 0}

    async def test_what_was_put_is_kept_apart_from_what_is_replayed(self, open_buffer: OpenBuffer) -> None:
        """`put` and `sampled_new` are of new groups, `sampled_again` of those drawn before."""
        buffer = await open_buffer(max_times_sampled=3)
        await fill(buffer, 4)
        for size in (2, 4, 4):
            await drawn(buffer, size)
        math = (await buffer.metrics())["tasks"]["math"]
        names = ("put", "sampled_new", "sampled_again", "taken", "evicted", "leased", "archived")
        assert [math[name] for name in names] == [4, 4, 6, 2, 0, 0, 0]
        assert math["buffered"]["completed"] == 2
        assert math["times_sampled"]["counts"] == {2: 2}

    async def test_distributions_are_of_completed_groups(self, buffer: ReplayBuffer) -> None:
        """Mean, quantiles and counts; left out where there are none, and when they aren't asked for."""
        for staleness in (0, 0, 1, 9):
            await buffer.put(group(1, seq_staleness=staleness), "math")
        await buffer.put(group(1, seq_staleness=50, status=Status.FAILED), "code")
        tasks = (await buffer.metrics())["tasks"]
        expected = {"mean": 2.5, "min": 0, "p50": 0, "p90": 9, "max": 9, "counts": {0: 2, 1: 1, 9: 1}}
        assert tasks["math"]["staleness"] == expected
        assert "staleness" not in tasks["code"]
        assert "staleness" not in (await buffer.metrics(distributions=False))["tasks"]["math"]

    async def test_waits_are_counted(self, buffer: ReplayBuffer) -> None:
        """How often, how long, and how often until the timeout."""
        await fill(buffer, 1)
        await buffer.take_batch({"math": 1}, timeout=1)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await buffer.take_batch({"math": 1}, timeout=0.2)
        waits = (await buffer.metrics())["waits"]["groups"]
        assert (waits["count"], waits["timeouts"]) == (2, 2)
        assert waits["seconds"] > 0
