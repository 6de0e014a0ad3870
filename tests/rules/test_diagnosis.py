"""Why somebody waits, as a function of the circumstances: the cause to remove comes first, the others follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replaybuf.rules.causes import diagnose
from replaybuf.rules.circumstances import Circumstances, Held, Restored, Taking, TrainState, Wait, Worker
from replaybuf.rules.diagnosis import Diagnosis, Reason
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.values.rollouts.rollout import Status

NOW = 1_763_844_190.0  # 20:43:10 UTC
C = Status.COMPLETED


def tallies(task: str = "math", **counts: int) -> dict[tuple[str, Status, Tally], int]:
    """Return tallies: `completed=3, completed_put=7`."""
    by_name = {name.partition("_")[::2]: n for name, n in counts.items()}
    return {(task, Status(status), Tally(name or "size")): n for (status, name), n in by_name.items()}


def worker(name: str = "gen-1", *, seen: float = 5, groups: int = 100, **fields: Any) -> Worker:
    return Worker(name, NOW - 3600, NOW - seen, groups=groups, **fields)


def wait(count: int = 64, query: str | None = None, since: float = NOW - 40, **fields: Any) -> Wait:
    return Wait({"math": count}, query=query, worker="trainer-1", since=since, **fields)


def why(
    waiting: Wait, counts: dict[tuple[str, Status, Tally], int], limits: Limits | None = None, **facts: Any
) -> Diagnosis:
    return diagnose(replace(waiting, limits=limits), Circumstances(NOW, counts, **facts))


def since(seconds_ago: float, completed: int, failed: int = 0, **totals: int) -> dict[str, Any]:
    """Return what was recorded so long ago of the task math."""
    put_of = {"completed": completed, "failed": failed}
    return {"earlier_at": NOW - seconds_ago, "earlier": {"math": {"put_of": put_of, **totals}}}


def put_at(seconds_ago: float) -> dict[LaneName, float]:
    return {("math", C): NOW - seconds_ago}


def held(holder: str, count: int, seconds: float, status: Status = C) -> Held:
    return Held("math", status, holder, count, NOW + seconds)


LIVE, KILLED = worker(), worker(seen=500)
TRAINER = worker("trainer-1", groups=0, taken=64)
FOR_TRAINER = Wait({"math": 1}, "trainer", worker="gen-1", since=NOW - 60)
FOR_ROOM = Wait({"math": 1}, "room", worker="gen-1", since=NOW - 60)
BLOCK = Limits(capacity=64, on_full="block")
FULL = tallies(completed=64, completed_put=64)
FEW = tallies(completed=8, completed_put=48)
ALL_LEASED = tallies(completed_leased=64, completed_put=64)
GREAT = '{"reward": {"$gte": 0.9}}'
#: A completed group came a second ago.
STEADY = {"last_put": put_at(1), "workers": [LIVE]}
HOUR = since(3600, 8000, 500)
PUBLISHED, LAST = TrainState(3, 3), TrainState(9, 9, finished=True)
R, T = Reason, tallies
TWO = Wait({"math": 8, "code": 8}, worker="trainer-1")

Case = tuple[Diagnosis, Reason, str]


def case(
    waiting: Wait, counts: dict[tuple[str, Status, Tally], int], reason: Reason, *, says: str, **facts: Any
) -> Case:
    """Return the diagnosis of a wait, the reason that it should have, and a part of its sentence."""
    return why(waiting, counts, **facts), reason, says


CASES = {
    "enough": case(wait(), FULL, R.READY, says="Ready: 64 completed groups of math can be drawn."),
    "none wanted": case(wait(0), {}, R.READY, says="Ready: 0 completed groups of math"),
    "empty": case(wait(), {}, R.ABSENT, says="(0 of 64): nothing was ever put into this buffer. Start the"),
    "another name": case(wait(), {}, R.ABSENT, others=["train"],
        says="nothing was ever put into this buffer, but into train. Start the producers, or see"),
    "a task that isn't": case(Wait({"maths": 4}), FULL, R.NO_SUCH_TASK,
        says="Nothing is ready for maths (0 of 4): nothing was ever put into this task; there is the task math. "
        "See that the producers put under this name."),
    "leased": case(wait(), ALL_LEASED, R.LEASED, held=[held("trainer-2@gpu7", 64, 48)],
        says="all 64 completed groups are leased by trainer-2@gpu7 until 20:43:58 UTC. They come back when"),
    "leased by two": case(wait(), T(completed=4, completed_leased=64), R.LEASED,
        held=[held("a", 4, 4), held("b", 60, 40)],
        says="(4 of 64): 64 more completed groups are leased by b (60) and a (4) until 20:43:50 UTC"),
    "leased by the waiter, or its predecessor": case(wait(4), T(completed_leased=4), R.LEASED,
        held=[held("trainer-1", 4, -3)],
        says="leased by trainer-1, this process or an earlier one of its name, until 20:43:07 UTC. Acknowledge them, "
        "or give them back, before the draw; those of an earlier process come back then, or by restore or"),
    "new ones came, but their producer was killed": case(wait(4), T(completed_leased=4, completed_put=1000), R.LEASED,
        held=[held("b", 4, 60)], workers=[KILLED], last_put=put_at(1), says="all 4 completed groups are leased by b"),
    "leased after steady puts": case(wait(16), T(completed_leased=80, completed_put=80), R.LEASED,
        **STEADY | {"last_put": put_at(40)}, says="all 80 completed groups are leased"),
    "expired": case(wait(), T(expired=64, completed_put=64, completed_expired=64), R.EXPIRED, steps={"math": 12},
        says="(0 of 64): 64 groups expired; the last refresh was to train step 12. Raise the stale"),
    "they expire faster than they come": case(wait(), T(completed=10, completed_put=500, completed_dropped=390),
        R.EXPIRED, **since(900, 400, expired_ever=300),
        says="90 of the 100 groups put since 20:28:10 UTC expired. Raise the stale"),
    "all expire, though many come": case(wait(8), T(completed_put=80, completed_dropped=80), R.EXPIRED, **STEADY,
        says="80 of the 80 groups put expired. Raise the stale"),
    "dropped when they were put": case(wait(4), T(expired_put=6, expired_dropped=6, completed_put=2, completed=2),
        R.EXPIRED, steps={"math": 3},
        says="(2 of 4): 6 of the 8 groups put expired; the last refresh was to train step 3. Raise"),
    "filtered": case(wait(), T(completed=2, completed_put=2, filtered=9, filtered_put=64, filtered_pruned=55),
        R.UNFIT,
        says="64 of the 66 groups put were filtered. Look at what the filter drops (replaybuf ls --status filt"),
    "filtered, and none is kept": case(wait(), T(completed=2, completed_put=2, filtered_put=64, filtered_pruned=64),
        R.UNFIT, says="64 of the 66 groups put were filtered. Look"),
    "filling": case(wait(2), T(filling=15), R.FILLING, workers=[LIVE], last_put=put_at(900),
        says="15 finished rollouts are there, of groups that aren't full yet. Put the"),
    "failed": case(wait(), T(failed=64, failed_put=60, init_set_aside=4), R.UNFIT,
        errors={"math": "CUDA out of memory"},
        says="64 of the 64 groups put failed; the last error: CUDA out of memory."),
    "set aside": case(wait(2), T(failed=2, completed_put=2, completed_set_aside=2), R.UNFIT,
        says="2 of the 2 groups put failed. Mend what makes"),
    "set aside lately": case(wait(2), T(failed=9, failed_put=1, completed_put=12, completed_set_aside=8), R.UNFIT,
        **since(900, 9, 1, set_aside=6), says="2 of the 3 groups put since 20:28:10 UTC failed"),
    "failures of long ago": case(wait(), T(failed=500, failed_put=500, completed_put=9000), R.SLOW,
        **HOUR | {"workers": [LIVE]}, says="gen-1 is alive, and more are needed. Wait"),
    "failures of a bad beginning": case(wait(), T(failed=500, failed_put=500, completed_put=8300), R.SLOW,
        **HOUR | {"workers": [LIVE]}, says="gen-1 is alive"),
    "failures of long ago, and much is missing": case(wait(400), T(failed=500, failed_put=500, completed_put=8100),
        R.SLOW, **HOUR | {"workers": [LIVE]}, says="more are needed"),
    "aborted": case(wait(), T(aborted=64, aborted_put=64), R.OTHER_STATUS, workers=[KILLED],
        says="64 groups are there, but of another status: 64 aborted. See that a worker"),
    "a query": case(wait(query=GREAT), T(completed=512, completed_put=512), R.NO_MATCH, matches={"math": 3},
        says='(3 of 64): 512 completed groups are there, but only 3 match {"reward": {"$gte": 0.9}}. Relax the '
        "query"),
    "a query, and too few in any case": case(wait(query=GREAT), FEW, R.ABSENT, matches={"math": 3}, workers=[KILLED],
        says="Too little is ready for math (3 of 64): no producer is left"),
    "a query that few could match, and none does": case(wait(query=GREAT), FEW, R.NO_MATCH, matches={"math": 0},
        workers=[LIVE], says="8 completed groups are there, but none matches"),
    "min_size": case(wait(16), T(completed=48, completed_put=48), R.HELD_BACK, limits=Limits(min_size=64),
        says="(0 of 16): 48 completed groups are there, but min_size is 64. Wait for the producers, or lower "
        "min_size."),
    "min_size, and no producer is left": case(wait(16), T(completed=48, completed_put=48), R.HELD_BACK,
        limits=Limits(min_size=64), workers=[KILLED],
        says="but min_size is 64. Start the producers again, or lower min_size."),
    "samples_per_insert": case(wait(16), T(completed=48, completed_put=48, completed_sampled_again=60), R.READY,
        limits=Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=16), says="Ready: 48 completed"),
    "samples_per_insert holds back": case(wait(16), T(completed=48, completed_put=48, completed_sampled_again=108),
        R.HELD_BACK, limits=Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=(-16, 60)),
        says="(4 of 16): 48 completed groups are there, but samples_per_insert 2 allows 4 now: 48 were put and 108 "
        "drawn. Wait for the producers, or widen error_buffer."),
    "the capacity is smaller": case(wait(64), FEW, R.HELD_BACK, limits=Limits(capacity=32),
        says="a batch of 64 groups of task math would wait for ever: the capacity is 32. Ask for fewer groups, or "
        "raise "),
    "the rate never allows so many": case(wait(64), FEW, R.HELD_BACK,
        limits=Limits(samples_per_insert=1, error_buffer=8),
        says="with error_buffer 8 allows 8 at once. Ask for fewer groups, or widen error_buffer."),
    "killed": case(wait(), FEW, R.ABSENT, workers=[KILLED, worker("gen-2", ended_at=NOW - 50, seen=50)],
        says="no producer is left: gen-2 ended at 20:42:20 UTC and gen-1 went silent: last seen at 20:34:50 UTC. "
        "Start them"),
    "killed on this machine a second ago": case(wait(), FEW, R.ABSENT,
        **STEADY | {"workers": [worker(seen=1, killed=True)]},
        says="no producer is left: gen-1 was killed: last seen at 20:43:09 UTC"),
    "killed, of a run whose filter passed a third": case(wait(),
        T(completed=8, completed_put=96, filtered=200, filtered_put=200), R.ABSENT, workers=[KILLED],
        says="no producer is left: gen-1 went silent"),
    "a second life": case(wait(), FEW, R.SLOW, workers=[KILLED, LIVE],
        says="gen-1 is alive, and more are needed. Wait"),
    "alive, but idle": case(wait(), FEW, R.ABSENT, workers=[LIVE], last_put=put_at(1500),
        says="gen-1 is alive, the last group was put at 20:18:10 UTC, and more are needed. Start again who is "
        "gone"),
    "one was killed, and the other is idle": case(wait(), FEW, R.ABSENT, workers=[worker("gen-2"), worker(seen=90)],
        last_put=put_at(95),
        says="gen-1 went silent: last seen at 20:41:40 UTC; gen-2 is alive, the last group was put at 20:41:35 UTC"),
    "one was killed, and the other goes on": case(wait(), FEW, R.SLOW, workers=[worker("gen-2"), worker(seen=90)],
        last_put=put_at(20), says="gen-2 is alive, the last group was put at 20:42:50 UTC"),
    "one was killed, and the other generates": case(wait(), FEW | T(init_leased=8), R.SLOW,
        workers=[worker("gen-2"), worker(seen=90)], last_put=put_at(95), says="8 groups are being generated"),
    "what the dead hold isn't being generated": case(wait(), FEW | T(init_leased=8), R.SLOW,
        workers=[worker("gen-2"), KILLED], held=[held("gen-1", 6, 9, Status.INIT)],
        says="2 groups are being generated"),
    "long rollouts": case(wait(), FEW | T(init_leased=8), R.SLOW, workers=[LIVE], last_put=put_at(1500),
        says="8 groups are being generated. Wait"),
    "what the waiter generates itself": case(wait(), FEW | T(init_leased=8), R.SLOW, workers=[worker("trainer-1")],
        held=[held("trainer-1", 8, 9, Status.INIT)],
        says="8 groups are being generated, by trainer-1 itself. Nobody else generates any: finish them before"),
    "what the waiter and another generate": case(wait(), FEW | T(init_leased=8), R.SLOW,
        workers=[worker("trainer-1"), LIVE],
        held=[held("trainer-1", 7, 9, Status.INIT), held("gen-1", 1, 9, Status.INIT)],
        says="8 groups are being generated. Wait"),
    "producers of the run before a restore": case(wait(since=NOW - 5), FEW, R.ABSENT, workers=[LIVE],
        restored=Restored(NOW - 20, "trainer-1"),
        says="no producer is left: gen-1 was fenced off by a restore: last seen at 20:43:05 UTC. Start them again; "
        "a worker that catches FencedError and builds its buffer again outlives restores."),
    "a restore took back all that was put, and its producers ended or died by that": case(wait(since=NOW - 5), {},
        R.ABSENT,
        workers=[worker(pid=1, ended_at=NOW - 18, seen=18), worker("gen-2", pid=2, seen=25, killed=True), TRAINER],
        restored=Restored(NOW - 20, "trainer-1"),
        says="gen-1 was fenced off by a restore: ended at 20:42:52 UTC and gen-2 was killed or was fenced off by a "
        "restore: last seen at 20:42:45 UTC. Start them again; a worker that"),
    "one was fenced off, and another joined the restored run": case(wait(since=NOW - 5), FEW, R.ABSENT,
        workers=[worker(pid=1), worker("gen-2", pid=2, epoch=1)],
        restored=Restored(NOW - 20, "trainer-1"), last_put=put_at(40),
        says="gen-1 was fenced off by a restore: last seen at 20:43:05 UTC; gen-2 is alive, the last group was put "
        "at"),
    "names of the process that restored the buffer aren't fenced off": case(wait(since=NOW - 5), FEW, R.SLOW,
        workers=[worker(pid=1), replace(TRAINER, pid=1)], restored=Restored(NOW - 20, "trainer-1"),
        says="gen-1 is alive, and more are needed"),
    "nobody is known": case(wait(), FEW, R.ABSENT, says="nobody is known to put any"),
    "nobody is known yet": case(wait(), FEW, R.SLOW, last_put=put_at(2),
        says="(8 of 64): the last group was put at 20:43:08 UTC, and more are needed. Wait"),
    "only the waiter puts": case(wait(), FEW, R.SLOW, workers=[worker("trainer-1")], last_put=put_at(67),
        says="trainer-1 is alive, the last group was put at 20:42:03 UTC, and more are needed. Nobody else puts "
        "any"),
    "only the waiter puts, and put many before it waited": case(wait(since=NOW - 5), FEW, R.SLOW,
        **STEADY | {"workers": [worker("trainer-1")], "last_put": put_at(6)},
        says="and more are needed. Nobody else puts any: put more before the draw"),
    "the waiter puts while it waits": case(wait(), FEW, R.SLOW, **STEADY | {"workers": [worker("trainer-1")]},
        says="the last group was put at 20:43:09 UTC, and more are needed. Wait, ask"),
    "init": case(wait(4), T(init=6, init_put=6), R.OTHER_STATUS, workers=[LIVE],
        says="(0 of 4): 6 groups are there, but of another status: 6 init. See that a worker"),
    "prompts of a ledger": case(wait(4), T(init=6, init_put=16, init_returned=6), R.OTHER_STATUS, workers=[LIVE],
        says="6 groups are there, but of another status: 6 init"),
    "some of each that isn't completed": case(wait(4), T(init=1, init_put=1, expired=2, aborted=1, completed_put=8),
        R.EXPIRED, workers=[LIVE], says="(0 of 4): 2 groups expired."),
    "prompts of a dead worker, which others generate": case(wait(4), T(init=6, init_put=16, init_leased=9), R.SLOW,
        workers=[LIVE], says="9 groups are being generated"),
    "another status": case(wait(4, status=Status.ABORTED), FEW, R.OTHER_STATUS, workers=[LIVE],
        says="8 groups are there, but of another status: 8 completed. "),
    "the end of the dataset": case(wait(), FEW | T(init_leased=3, aborted=2), R.FINISHED, workers=[LIVE],
        waits=[FOR_TRAINER], trainer=PUBLISHED, datasets={"math": 50},
        says="(8 of 64): no prompt of math is left to draw: of the 50 drawn, 45 are finished, 3 in flight "
        'and 2 to be handed out again. Ask for no more (at_least={"math": 13}), read more epochs, '
        "let order= skip fewer prompts, or"),
    "the end of the only dataset": case(wait(1), T(completed_put=50), R.FINISHED, workers=[LIVE],
        datasets={"math": 50}, says="50 are finished, 0 in flight and 0 to be handed out again. Ask for no more"),
    "the end of one dataset of two": case(TWO, T(completed=8, completed_put=48) | T("code", completed_put=9),
        R.FINISHED, workers=[LIVE], datasets={"code": 9},
        says="ready for code (0 of 8): no prompt of code is left to draw: of the 9 drawn, 9 are finished, 0 "
        'in flight and 0 to be handed out again. Ask for no more (at_least={"code": 0}), read'),
    "the end of the dataset, and enough in flight": case(wait(10), FEW | T(init_leased=3), R.SLOW, workers=[LIVE],
        datasets={"math": 50}, says="3 groups are being generated"),
    "a worker at the end of the dataset": case(FOR_TRAINER, FEW, R.FINISHED, trainer=PUBLISHED, datasets={"math": 50},
        says="There is nothing to do for the workers: no prompt of math is left to draw: of the 50 drawn, "
        "50 are finished, 0 in flight and 0 to be handed out again. They end when the trainer has published"),
    "a worker at the end of the dataset of which the trainer lacks groups": case(FOR_TRAINER,
        T(completed=8, completed_put=48) | T("code", completed_put=9), R.ABSENT, waits=[TWO], trainer=PUBLISHED,
        datasets={"code": 9}, says="no prompt of code is left to draw: of the 9 drawn, 9 are finished, 0 in"),
    "both wait, though it has published": case(wait(), FEW, R.DEADLOCK, workers=[LIVE], waits=[FOR_TRAINER],
        trainer=PUBLISHED,
        says="deadlock: gen-1 waits for the trainer since 20:42:10 UTC, which has published nothing since step 3, "
        "while it waits for their groups. Publish (publish) before"),
    "one waits, and a worker that was killed holds the rest": case(wait(9), FEW | T(init_leased=2), R.LEASED,
        workers=[LIVE, worker("gen-2", killed=True)], waits=[FOR_TRAINER], trainer=PUBLISHED,
        held=[held("gen-2", 2, 40, Status.INIT)],
        says="(8 of 9): 2 groups are leased until 20:43:50 UTC to be generated, by a worker that is gone (gen-2 "
        "was killed: last seen at 20:43:05 UTC). They come back then, and other workers generate them."),
    "one waits for what a worker that was killed holds": case(FOR_TRAINER, FEW | T(init_leased=2), R.ABSENT,
        workers=[LIVE, worker("gen-2", killed=True)], waits=[wait(9)], trainer=PUBLISHED,
        held=[held("gen-2", 2, 40, Status.INIT)],
        says="trainer-1 waits itself for 9 completed groups of math: 2 groups are leased until 20:43:50"),
    "a worker's other task waits while it generates": case(wait(9), FEW | T(init_leased=2), R.SLOW, workers=[LIVE],
        waits=[FOR_TRAINER], trainer=PUBLISHED, says="2 groups are being generated"),
    "a worker's other task, while the trainer waits for what it generates": case(FOR_TRAINER, FEW | T(init_leased=2),
        R.ABSENT, workers=[LIVE], waits=[wait(9)], trainer=PUBLISHED,
        says="trainer-1 waits itself for 9 completed groups of math: 2 groups are being generated. Wait"),
    "one of two producers waits": case(wait(), FEW, R.SLOW, workers=[LIVE, worker("gen-2")], waits=[FOR_TRAINER],
        says="gen-1 and gen-2 are alive"),
    "the trainer has finished": case(wait(), FEW, R.FINISHED, workers=[KILLED], trainer=LAST,
        says="the trainer has published that it has finished"),
    "finished, but they go on": case(wait(), FEW, R.SLOW, workers=[LIVE], trainer=LAST, says="gen-1 is alive"),
    "no room for another task": case(TWO, FULL | T("code", completed=3), R.DEADLOCK, limits=BLOCK, workers=[LIVE],
        waits=[FOR_ROOM],
        says="Too little is ready for code (3 of 8): gen-1 waits for room since 20:42:10 UTC, with 64 completed "
        "groups of math there. Draw groups of math"),
    "room, and nobody draws": case(FOR_ROOM, FULL, R.HELD_BACK, limits=BLOCK,
        says="No room for math: 64 completed groups are buffered, and the capacity is 64; nobody has drawn any "
        "yet. See that the consumer runs."),
    "room, and the trainer is slow": case(FOR_ROOM, FULL, R.HELD_BACK, limits=BLOCK, workers=[TRAINER],
        last_take=Taking("trainer-1", NOW - 90, 64),
        says="trainer-1 is alive, and the last draw was at 20:41:40 UTC"),
    "room, and the trainer was killed": case(FOR_ROOM, FULL, R.HELD_BACK, limits=BLOCK,
        workers=[worker("trainer-1", seen=300, groups=0, taken=64)],
        says="no consumer is left: trainer-1 went silent: last seen at 20:38:10 UTC. See that the consumer"),
    "room, and the trainer was killed, but who generates again draws": case(FOR_ROOM, FULL, R.HELD_BACK, limits=BLOCK,
        workers=[worker("trainer-1", seen=300, groups=0, taken=64), worker(taken=9)],
        says="no consumer is left: trainer-1 went silent: last seen at 20:38:10 UTC. See that the consumer"),
    "room, and the consumer was started again": case(FOR_ROOM, FULL, R.HELD_BACK, limits=BLOCK,
        workers=[worker("trainer-1", seen=300, groups=0, taken=64), worker("trainer-1", groups=0)],
        says="the capacity is 64; nobody has drawn any yet. See that the consumer runs."),
    "room, and the trainer waits": case(FOR_ROOM, FULL, R.HELD_BACK, limits=BLOCK, waits=[wait(32, GREAT)],
        says="the capacity is 64; trainer-1 waits itself for 32 completed groups of math that match"),
    "room by rate": case(FOR_ROOM, FULL, R.HELD_BACK, limits=Limits(samples_per_insert=1, error_buffer=8),
        says="64 completed groups were put and 0 drawn, and samples_per_insert 1 with error_buffer 8"),
    "room is there": case(FOR_ROOM, FEW, R.READY, limits=BLOCK, says="Ready: there is room for 1 completed group of"),
    "nothing published": case(FOR_TRAINER, FEW, R.ABSENT,
        says="the trainer has published nothing yet; nobody has drawn any yet. See that it runs."),
    "nothing new published": case(FOR_TRAINER, FEW, R.ABSENT, trainer=PUBLISHED,
        workers=[worker("trainer-1", seen=300, groups=0, taken=9)],
        says="nothing since step 3; no consumer is left: trainer-1 went silent"),
    "the trainer waits, too": case(FOR_TRAINER, FEW, R.ABSENT, waits=[wait(128)],
        says="trainer-1 waits itself for 128 completed groups of math: deadlock: gen-1 waits for the trainer"),
    "a trainer that has finished": case(FOR_TRAINER, FEW, R.FINISHED, trainer=LAST,
        says="has published that it has finished"),
}  # fmt: skip


#: In a healthy run groups of each kind are there, as many as are missing: the tallies, and what else is known.
HEALTHY: dict[str, tuple[dict[tuple[str, Status, Tally], int], dict[str, Any]]] = {
    "filtered": (T(filtered=96, filtered_put=96), {}),
    "aborted": (T(aborted=7, aborted_put=7), {}),
    "init": (T(init=7, init_put=7), {}),
    "leased": (T(completed_leased=9), {"held": [held("trainer-2", 9, 300)]}),
    "leased by the waiter, which prefetches": (T(completed_leased=9), {"held": [held("trainer-1", 9, 300)]}),
    "expired": (T(expired=7, completed_expired=7), {}),
    "failed": (T(failed=60, failed_put=60), {}),
    "of a worker that was killed": (T(), {"workers": [LIVE, worker("gen-2", seen=3, killed=True)]}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_names_the_cause_to_remove(case: str) -> None:
    diagnosis, reason, text = CASES[case]
    assert diagnosis.reason == reason
    assert text in diagnosis.sentence
    assert "\n" not in str(diagnosis)


def test_every_reason_is_met() -> None:
    assert {reason for _, reason, _ in CASES.values()} == set(Reason)


def test_other_causes_follow_as_one_fact() -> None:
    """Behind what expired are producers that were killed, and who took the last groups."""
    counts = tallies(expired=64, completed_put=80, completed_expired=64, completed_leased=16)
    diagnosis = why(wait(), counts, workers=[KILLED], last_take=Taking("trainer-2", NOW - 7, 16))
    assert diagnosis.reason == Reason.EXPIRED
    line, silent, last = diagnosis.facts
    assert line.text == "task math: 0 completed groups there, 64 needed (64 expired, 16 leased)"
    assert (silent.reason, "no producer is left" in silent.text) == (Reason.ABSENT, True)
    assert last.text == "last drawn: 16 groups by trainer-2 at 20:43:03 UTC"


@pytest.mark.parametrize(("lost", "cause"), [("completed_set_aside", "failed"), ("completed_expired", "expired")])
def test_groups_that_are_lost_later_than_in_the_hour_of_their_put_explain_a_wait(lost: str, cause: str) -> None:
    counts: Any = tallies(completed=5, completed_put=10, **{lost: 5})
    diagnosis = why(wait(10), counts, workers=[LIVE], last_put=put_at(3660), **since(3600, completed=10))
    assert f"5 of the 5 groups put {cause}" in diagnosis.sentence


@pytest.mark.parametrize("case", HEALTHY)
def test_groups_that_arrive_come_first_in_a_healthy_run(case: str) -> None:
    """One came a second ago, and 7 of 60 are missing: what else there is follows."""
    counts, circumstances = HEALTHY[case]
    diagnosis = why(wait(60), tallies(completed=53, completed_put=48) | counts, **STEADY | circumstances)
    assert diagnosis.reason == Reason.SLOW
    assert "(53 of 60): gen-1 is alive, the last group was put at 20:43:09 UTC, and more are" in diagnosis.sentence
    assert len([fact for fact in diagnosis.facts if fact.reason]) == 1


def test_what_a_worker_that_is_gone_holds_is_no_deadlock() -> None:
    """Though all others wait for the trainer: other workers generate it when the lease ends."""
    diagnosis, _, _ = CASES["one waits, and a worker that was killed holds the rest"]
    assert "deadlock" not in str(diagnosis)


def test_a_wait_that_can_never_end_is_final() -> None:
    """Since a dataset has ended; not while enough is in flight, or while another task lacks more."""
    facts = {"workers": [LIVE], "datasets": {"math": 50}}
    assert why(wait(10), FEW, **facts).final
    for still in ({"init_leased": 3}, {"init": 1}, {"completed_leased": 1}):
        assert not why(wait(10), FEW | tallies(**still), **facts).final


@pytest.mark.parametrize("seconds", [2, 13, 22, 45, 59])
def test_one_situation_has_one_sentence(seconds: float) -> None:
    """Whenever its idle workers gave their last sign of life."""
    circumstances = Circumstances(NOW, FEW, workers=[worker(seen=seconds)], last_put={("math", C): NOW - 100})
    sentence = "gen-1 is alive, the last group was put at 20:41:30 UTC, and more are needed. Wait, ask for fewer"
    assert sentence in diagnose(wait(), circumstances).sentence
    assert circumstances.workers[0].state(NOW) == "alive"


def test_a_moment_of_another_day_has_its_date() -> None:
    diagnosis = why(wait(), FEW, workers=[worker(seen=3 * 86_400)])
    assert "gen-1 went silent: last seen at 2025-11-19 20:43 UTC" in diagnosis.sentence


def test_of_several_tasks_the_one_that_comes_last_by_itself_is_named() -> None:
    waiting = Wait({"math": 64, "code": 8, "cod": 1})
    counts = FEW | tallies("code", completed=9)
    diagnosis = diagnose(waiting, Circumstances(NOW, counts, workers=[LIVE]))
    assert (diagnosis.task_name, diagnosis.reason) == ("cod", Reason.NO_SUCH_TASK)
    assert any("Too little is ready for math (8 of 64)" in fact.text for fact in diagnosis.facts)
    assert not any("ready for code" in fact.text for fact in diagnosis.facts)


def test_tasks_that_lack_groups_for_one_cause_are_in_one_sentence() -> None:
    """The cause is said once, be it the first or one of the others."""
    counts = FEW | tallies("code", completed_leased=8, completed_put=65)
    waiting = Wait({"math": 64, "code": 8, "chat": 8})
    diagnosis = diagnose(waiting, Circumstances(NOW, counts | tallies("chat", completed_put=1), workers=[KILLED]))
    assert diagnosis.sentence.startswith("Nothing is ready for code (0 of 8): all 8 completed groups are leased")
    [also] = [fact.text for fact in diagnosis.facts if fact.reason]
    assert "Too little is ready for code (0 of 8), math (8 of 64) and chat (0 of 8): no producer is left" in also
    of_both = diagnose(
        Wait({"math": 64, "code": 8}), Circumstances(NOW, FEW | tallies("code", completed_put=8), workers=[KILLED])
    )
    assert of_both.sentence.startswith("Too little is ready for math (8 of 64) and code (0 of 8): no producer is left")
    assert str(of_both).count("no producer is left") == 1
    counts = FEW | tallies("code", completed_put=8)
    slow = Circumstances(NOW, counts, workers=[LIVE], last_put={("math", C): NOW - 9, ("code", C): NOW - 4})
    sentence = diagnose(Wait({"math": 64, "code": 8}), slow).sentence
    assert "math (8 of 64) and code (0 of 8): gen-1 is alive, the last group was put at 20:43:06 UTC, and" in sentence


def test_counts_of_several_tasks_are_those_of_each() -> None:
    counts = tallies(completed=16, completed_put=16) | tallies("code", completed=16, completed_put=16)
    answer = diagnose(Wait({"math": 16, "code": 16}, limits=Limits(min_size=20)), Circumstances(NOW, counts))
    assert "math (0 of 16) and code (0 of 16): in each, 16 completed groups are there, but min_size" in answer.sentence


def test_at_least_a_part_is_enough() -> None:
    """What is needed counts, not what would be taken."""
    assert why(wait(8), FEW).reason == Reason.READY


def test_the_numbers_of_each_task_are_facts() -> None:
    counts = tallies(completed=12, expired=3, failed=1, completed_leased=4, archived=9)
    diagnosis = why(wait(64, GREAT), counts, matches={"math": 2}, limits=Limits(min_size=16))
    assert diagnosis.facts[0].text == (
        "task math: 2 completed groups there, 64 needed (12 completed before the query, 1 failed, 3 expired, "
        "4 leased), but min_size is 16"
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("math", "math"),
        ("math ", "'math '"),
        ("a b", "a b"),
        ("a  b", "'a  b'"),
        ("a\xa0b", "'a\\xa0b'"),
        ("\t", "'\\t'"),
    ],
)
def test_names_that_differ_in_white_space_look_different(name: str, shown: str) -> None:
    """In each sentence that names the task."""
    diagnosis = diagnose(Wait({name: 3}), Circumstances(NOW, tallies("other", completed_put=1)))
    assert diagnosis.sentence.startswith(f"Nothing is ready for {shown} (0 of 3)")
    assert diagnosis.facts[0].text == f"task {shown}: 0 completed groups there, 3 needed"
    other_diagnosis = diagnose(Wait({"other": 3}), Circumstances(NOW, tallies(name, completed_put=1)))
    assert f"there is the task {shown}." in other_diagnosis.sentence


def test_hostile_texts_stay_on_their_line() -> None:
    """The sentence goes into logs and error messages as it is."""
    hostile = "\x1b]0;owned\x07\n2026-01-01 INFO all is well\r\u202e"
    counts = tallies(hostile, failed=9, failed_put=9)
    waiting = Wait({hostile: 3}, query=hostile, worker=hostile)
    circumstances = Circumstances(NOW, counts, errors={hostile: hostile}, matches={})
    assert str(diagnose(waiting, circumstances)).isprintable()


@pytest.mark.parametrize(
    ("stored", "limits"),
    [
        ({}, Limits()),
        ({"capacity": 64, "on_full": "block"}, BLOCK),
        (
            {"samples_per_insert": 1.0, "error_buffer": [-8, 8], "min_size": 0},
            Limits(samples_per_insert=1.0, error_buffer=(-8, 8)),
        ),
        ({"of_later_versions": 3}, None),
        ({"capacity": -1}, None),
        ({"capacity": "many"}, None),
    ],
)
def test_limits_are_read_as_a_process_wrote_them(stored: dict[str, Any], limits: Limits | None) -> None:
    assert Limits.recorded(stored) == limits


@pytest.mark.parametrize(
    ("quiet", "workers", "arrives"),
    [(0, [LIVE], True), (30, [LIVE], True), (31, [LIVE], False), (0, [KILLED], False)],
    ids=["now", "for less than a pause", "for longer", "no producer is left"],
)
def test_groups_that_have_stopped_to_come_dont_arrive(quiet: float, workers: list[Worker], arrives: bool) -> None:
    circumstances = Circumstances(NOW, tallies(completed_put=150), workers=workers, last_put={("math", C): NOW - quiet})
    assert circumstances.arrives("math", C) == arrives


def test_a_dataset_that_has_ended_is_why_its_producers_have() -> None:
    answer = why(wait(), FEW, workers=[KILLED], waits=[FOR_TRAINER], datasets={"math": 50})
    assert [answer.reason, *(fact.reason for fact in answer.facts if fact.reason)] == [Reason.FINISHED, Reason.ABSENT]


def test_of_hundreds_of_tasks_few_are_named() -> None:
    """A short answer, and soon: it is made in the event loop of who waits."""
    counts = {(f"task-{number}", C, Tally.PUT): 1 for number in range(300)}
    diagnosis = diagnose(Wait({task: 9 for task, _, _ in counts}), Circumstances(NOW, counts, workers=[LIVE]))
    assert len(str(diagnosis)) < 1500


def test_what_the_consumer_lacks_is_said_with_all_that_is_known() -> None:
    """The producer that has put is one, though it waits."""
    waits = [FOR_ROOM, Wait({"math": 8, "code": 8}, worker="trainer-1")]
    found = why(FOR_ROOM, FULL | tallies("code", completed=3), limits=BLOCK, workers=[LIVE], waits=waits)
    assert "trainer-1 waits itself for 8 completed groups of math and 8 of code: gen-1 waits for room" in found.sentence
