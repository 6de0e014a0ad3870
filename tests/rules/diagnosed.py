"""Circumstances in which somebody waits, and what is to be said of each."""

from __future__ import annotations

from typing import Any

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.causes import Reason
from replaybuf.rules.circumstances import Before, Circumstances, Held, Restored, Taking, Wait, Worker
from replaybuf.rules.diagnosis import Diagnosis, diagnose
from replaybuf.rules.limits import Limits
from replaybuf.rules.train_state import TrainState
from replaybuf.rules.transitions import Tally

NOW = 1_763_844_190.0  # 20:43:10 UTC
C = Status.COMPLETED


def tallies(task: str = "math", **counts: int) -> dict[tuple[str, Status, Tally], int]:
    """Return tallies: `completed=3, completed_put=7`."""
    named = {name.partition("_")[::2]: n for name, n in counts.items()}
    return {(task, Status(status), Tally(name or "size")): n for (status, name), n in named.items()}


def worker(name: str = "gen-1", *, seen: float = 5, groups: int = 100, **more: Any) -> Worker:
    return Worker(name, NOW - 3600, NOW - seen, groups=groups, **more)


def wait(count: int = 64, query: str | None = None, since: float = NOW - 40, **more: Any) -> Wait:
    return Wait({"math": count}, query=query, worker="trainer-1", since=since, **more)


def why(waiting: Wait, counts: dict[tuple[str, Status, Tally], int], **known: Any) -> Diagnosis:
    return diagnose(waiting, Circumstances(NOW, counts, **known))


LIVE, KILLED = worker(), worker(seen=500)
TRAINER = worker("trainer-1", groups=0, taken=64)
FOR_TRAINER = Wait({"math": 1}, "trainer", worker="gen-1", since=NOW - 60)
FOR_ROOM = Wait({"math": 1}, "room", worker="gen-1", since=NOW - 60)
BLOCK = Limits(capacity=64, on_full="block")
FULL = tallies(completed=64, completed_put=64)
FEW = tallies(completed=8, completed_put=48)
GREAT = '{"reward": {"$gte": 0.9}}'

CASES: dict[str, tuple[Diagnosis, Reason, str]] = {
    "enough": (why(wait(), FULL), Reason.READY, "Ready: 64 completed groups of math can be drawn now."),
    "none wanted": (why(wait(0), {}), Reason.READY, "Ready: 0 completed groups of math"),
    "empty": (why(wait(), {}), Reason.NOTHING_PUT, "(0 of 64): nothing was ever put into this buffer. Start the"),
    "empty, with a producer": (why(wait(), {}, workers=[LIVE]), Reason.NOTHING_PUT, "this buffer; gen-1 has it open"),
    "a task that isn't": (
        diagnose(Wait({"maths": 4}), Circumstances(NOW, FULL)),
        Reason.NO_SUCH_TASK,
        "Nothing is ready for maths (0 of 4): nothing was ever put into this task; there is the task math. "
        "Did you mean math?",
    ),
    "leased": (
        why(
            wait(),
            tallies(completed_leased=64, completed_put=64),
            held=[Held("math", C, "trainer-2@gpu7", 64, NOW + 48)],
        ),
        Reason.LEASED,
        "Nothing is ready for math (0 of 64): all 64 completed groups are leased by trainer-2@gpu7 until 20:43:58 UTC "
        "(in 48s). They come back when",
    ),
    "leased by two": (
        why(
            wait(),
            tallies(completed=4, completed_leased=64),
            held=[Held("math", C, "a", 4, NOW + 4), Held("math", C, "b", 60, NOW + 40)],
        ),
        Reason.LEASED,
        "(4 of 64): 64 more completed groups are leased by b (60) and a (4), the last until 20:43:50 UTC",
    ),
    "leased by the waiter": (
        why(wait(4), tallies(completed_leased=4), held=[Held("math", C, "trainer-1", 4, NOW - 3)]),
        Reason.LEASED,
        "(3s ago: they come back as soon as somebody looks). The waiting worker holds them itself",
    ),
    "leased by a predecessor of the waiter": (
        why(
            wait(4, process_began=NOW - 50),
            tallies(completed_leased=4, completed_put=900),
            held=[Held("math", C, "trainer-1", 4, NOW + 300, NOW - 90, NOW - 80)],
            recent=Before(NOW - 100, {}),
        ),
        Reason.LEASED,
        "all 4 completed groups are leased by an earlier process of trainer-1 until 20:48:10 UTC (in 5.0m). They come "
        "back when its lease ends; sooner if you restore a checkpoint, or if somebody who has the lease's handle",
    ),
    "leased by the waiter and its predecessor": (
        why(
            wait(4, process_began=NOW - 50),
            tallies(completed_leased=4),
            held=[Held("math", C, "trainer-1", 4, NOW + 300, NOW - 90, NOW - 30)],
        ),
        Reason.LEASED,
        "The waiting worker holds some itself: acknowledge these batches, or give them back; an earlier process",
    ),
    "the waiter holds a batch, and new ones come before its lease ends": (
        why(
            wait(4),
            tallies(completed_leased=4, completed_put=1000),
            held=[Held("math", C, "trainer-1", 4, NOW + 60)],
            recent=Before(NOW - 100, {}),
        ),
        Reason.SLOW,
        "36,000 groups an hour arrive, so the missing 4 take about 0s",
    ),
    "others hold them, and new ones come": (
        why(
            wait(4),
            tallies(completed_leased=9, completed_put=1000),
            held=[Held("math", C, "b", 4, NOW + 60), Held("math", C, "trainer-1", 5, NOW + 60)],
            recent=Before(NOW - 100, {}),
        ),
        Reason.LEASED,
        "all 9 completed groups are leased by trainer-1 (5) and b (4)",
    ),
    "new ones came, but their producer was killed": (
        why(
            wait(4),
            tallies(completed_leased=4, completed_put=1000),
            held=[Held("math", C, "b", 4, NOW + 60)],
            workers=[KILLED],
            recent=Before(NOW - 100, {}),
        ),
        Reason.LEASED,
        "all 4 completed groups are leased by b",
    ),
    "expired": (
        why(wait(), tallies(expired=64, completed_put=64, completed_expired=64), steps={"math": 12}),
        Reason.EXPIRED,
        "64 groups have expired at the refresh to train step 12, and wait to be generated again. Raise the stale",
    ),
    "they expire faster than they come": (
        why(
            wait(),
            tallies(completed=10, completed_put=500, completed_dropped=390),
            before=Before(NOW - 900, {("math", C): 400}, {"math": 300}),
        ),
        Reason.EXPIRED,
        "90 of the 100 groups put in the last 15m expired: they grow stale faster than they are drawn",
    ),
    "dropped when they were put": (
        why(wait(4), tallies(expired_put=6, expired_dropped=6, completed_put=2, completed=2), steps={"math": 3}),
        Reason.EXPIRED,
        "(2 of 4): 6 of the 8 groups put expired: they were too stale when they were put. Raise the stale threshold or "
        "sync the producers' weights sooner; with expired_groups_retryable=True they are kept, to be generated again.",
    ),
    "dropped in a refresh, and when they were put": (
        why(wait(4), tallies(expired_put=2, expired_dropped=2, completed_put=6, completed_dropped=6)),
        Reason.EXPIRED,
        "8 of the 8 groups put expired: they grow stale faster than they are drawn. Raise",
    ),
    "filtered": (
        why(wait(), tallies(completed=2, completed_put=2, filtered=9, filtered_put=64, filtered_pruned=55)),
        Reason.FILTERED,
        "(2 of 64): 64 of the 66 groups put were filtered. Look at what the filter drops (replaybuf ls --status filt",
    ),
    "filtered, and none is kept": (
        why(wait(), tallies(completed=2, completed_put=2, filtered_put=64, filtered_pruned=64)),
        Reason.FILTERED,
        "(2 of 64): 64 of the 66 groups put were filtered. Look at what the filter drops: none of them is kept to look "
        "at; unfit=1000 in the config keeps what a strategy makes so, keep_unfit=True what you put.",
    ),
    "filtered in two spurts": (
        why(
            wait(4),
            tallies(completed=2, completed_put=2, filtered=6, filtered_put=6),
            before=Before(NOW - 20, {}),
        ),
        Reason.FILTERED,
        "(2 of 4): 6 of the 8 groups put were filtered. Look",
    ),
    "failed": (
        why(
            wait(),
            tallies(failed=64, failed_put=60, init_set_aside=4),
            failed_by={"math": {"gen-2": 60, "gen-3": 4}},
            errors={"math": "CUDA out of memory"},
        ),
        Reason.FAILED,
        "64 of the 64 groups put failed, made by gen-2 (60) and gen-3 (4); the last error: CUDA out of memory.",
    ),
    "set aside": (
        why(
            wait(2),
            tallies(failed=2, completed_put=2, completed_set_aside=2),
            failed_with={"math": {"trainer-1": 2}},
            errors={"math": "group 1 can't be decoded"},
        ),
        Reason.FAILED,
        "2 of the 2 groups put failed, drawn by trainer-1 (2); the last error: group 1 can't be decoded.",
    ),
    "set aside lately": (
        why(
            wait(2),
            tallies(failed=9, failed_put=1, completed_put=12, completed_set_aside=8, aborted_set_aside=0),
            before=Before(NOW - 900, {("math", C): 9, ("math", Status.FAILED): 1}, {}, {"math": 6}),
        ),
        Reason.FAILED,
        "2 of the 3 groups put in the last 15m failed. Look",
    ),
    "failures of long ago": (
        why(
            wait(),
            tallies(failed=500, failed_put=500, completed_put=9000),
            workers=[LIVE],
            before=Before(NOW - 3600, {("math", Status.FAILED): 500, ("math", C): 8000}),
            recent=Before(NOW - 300, {("math", C): 8900}),
        ),
        Reason.SLOW,
        "1,200 groups an hour arrive, so the missing 64 take about 3.2m. Wait",
    ),
    "failures of a bad beginning": (
        why(
            wait(),
            tallies(failed=500, failed_put=500, completed_put=300),
            workers=[LIVE],
            before=Before(NOW - 3600, {("math", Status.FAILED): 500, ("math", C): 200}),
            last_put={"math": NOW - 90},
        ),
        Reason.SLOW,
        "gen-1 was last seen 5s ago, the last group was put 1.5m ago, and 64 more are needed",
    ),
    "failures before anybody counted by the minute": (
        why(
            wait(),
            tallies(failed=64, failed_put=64),
            workers=[KILLED],
            before=Before(NOW - 60, {("math", Status.FAILED): 62}),
        ),
        Reason.FAILED,
        "64 of the 64 groups put failed. Look at the errors",
    ),
    "aborted": (
        why(wait(), tallies(aborted=64, aborted_put=64), workers=[KILLED]),
        Reason.ABORTED,
        "64 groups are aborted: interrupted, and wait to be continued. See that a producer",
    ),
    "a query": (
        why(wait(query=GREAT), tallies(completed=512, completed_put=512), matches={"math": 3}),
        Reason.NO_MATCH,
        "Too little is ready for math (3 of 64): 512 completed groups are there, but only 3 match "
        '{"reward": {"$gte": 0.9}}. Relax the query',
    ),
    "a query, and too few in any case": (
        why(wait(query=GREAT), FEW, matches={"math": 3}, workers=[KILLED]),
        Reason.PRODUCERS_SILENT,
        "Too little is ready for math (3 of 64): no producer is left",
    ),
    "min_size": (
        why(wait(16), tallies(completed=48, completed_put=48), limits=Limits(min_size=64)),
        Reason.HELD_BACK,
        "(0 of 16): 48 completed groups are there, but min_size is 64: 16 more have to be put",
    ),
    "min_size, and no producer is left": (
        why(wait(16), tallies(completed=48, completed_put=48), limits=Limits(min_size=64), workers=[KILLED]),
        Reason.HELD_BACK,
        "16 more have to be put. Start the producers again or lower min_size.",
    ),
    "samples_per_insert": (
        why(
            wait(16),
            tallies(completed=48, completed_put=48, completed_sampled_again=60),
            limits=Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=16),
        ),
        Reason.READY,
        "Ready: 48 completed groups",
    ),
    "samples_per_insert holds back": (
        why(
            wait(16),
            tallies(completed=48, completed_put=48, completed_sampled_again=108),
            limits=Limits(max_times_sampled=0, samples_per_insert=2, error_buffer=(-16, 60)),
        ),
        Reason.HELD_BACK,
        "(4 of 16): 48 completed groups are there, but samples_per_insert 2 allows 4 now: 48 were put and 108 drawn: "
        "6 more have to be put. Wait for the producers, raise samples_per_insert or lower the first number of "
        "error_buffer to -28.",
    ),
    "samples_per_insert allows less than nothing": (
        why(
            wait(8),
            tallies(completed=8, completed_put=16, completed_sampled_new=24),
            limits=Limits(samples_per_insert=1, error_buffer=8),
        ),
        Reason.HELD_BACK,
        "8 more have to be put. Wait for the producers or raise error_buffer to 16.",
    ),
    "the capacity is smaller": (
        why(wait(64), FEW, limits=Limits(capacity=32)),
        Reason.TOO_LARGE_A_BATCH,
        "a batch of 64 is never there, because the capacity is 32. Ask for fewer",
    ),
    "the rate never allows so many": (
        why(wait(64), FEW, limits=Limits(samples_per_insert=1, error_buffer=8)),
        Reason.TOO_LARGE_A_BATCH,
        "with error_buffer 8 allows 8 at once. Ask for fewer groups, or widen error_buffer.",
    ),
    "killed": (
        why(wait(), FEW, workers=[KILLED, worker("gen-2", ended_at=NOW - 50, seen=50)]),
        Reason.PRODUCERS_SILENT,
        "no producer is left: gen-2 ended at 20:42:20 UTC (50s ago) and gen-1 went silent: last seen at 20:34:50 UTC",
    ),
    "a second life": (
        why(wait(), FEW, workers=[KILLED, LIVE]),
        Reason.SLOW,
        "gen-1 was last seen 5s ago, and 56 more are needed",
    ),
    "alive, but idle": (
        why(wait(), FEW, workers=[LIVE], last_put={"math": NOW - 1500}),
        Reason.PRODUCERS_SILENT,
        "gen-1 was last seen 5s ago, but the last group was put 25m ago, and none is being generated",
    ),
    "one was killed, and the other is idle": (
        why(wait(), FEW, workers=[worker("gen-2"), worker(seen=90)], last_put={"math": NOW - 95}),
        Reason.PRODUCERS_SILENT,
        "one of the producers went silent: gen-1 was last seen at 20:41:40 UTC (1.5m ago); gen-2 was last seen 5s ago, "
        "but has put nothing since the last group came 1.6m ago. Start it again",
    ),
    "one was killed, and the other goes on": (
        why(wait(), FEW, workers=[worker("gen-2"), worker(seen=90)], last_put={"math": NOW - 20}),
        Reason.SLOW,
        "gen-2 was last seen 5s ago, the last group was put 20s ago",
    ),
    "one was killed, and the other generates": (
        why(
            wait(),
            FEW | tallies(init_leased=8),
            workers=[worker("gen-2"), worker(seen=90)],
            last_put={"math": NOW - 95},
        ),
        Reason.SLOW,
        "8 groups are being generated",
    ),
    "one of two wasn't seen for a while": (
        why(wait(), FEW, workers=[worker("gen-2"), worker(seen=40)], last_put={"math": NOW - 45}),
        Reason.SLOW,
        "gen-2 was last seen 5s ago and gen-1 40s ago, the last group was put 45s ago",
    ),
    "long rollouts": (
        why(wait(), FEW | tallies(init_leased=8), workers=[LIVE], last_put={"math": NOW - 1500}),
        Reason.SLOW,
        "8 groups are being generated. Wait",
    ),
    "producers of the run before a restore": (
        why(wait(since=NOW - 5), FEW, workers=[LIVE], restored=Restored(40, NOW - 20, "trainer-1")),
        Reason.PRODUCERS_SILENT,
        "gen-1 opened the buffer before it was restored at 20:42:50 UTC, and can put nothing any more",
    ),
    "nobody is known": (why(wait(), FEW), Reason.PRODUCERS_SILENT, "nobody is known to put any"),
    "slow": (
        why(wait(), FEW, workers=[LIVE], recent=Before(NOW - 300, {("math", C): 43})),
        Reason.SLOW,
        "60 groups an hour arrive, so the missing 56 take about 56m",
    ),
    "slow, and seen some time ago": (
        why(wait(), FEW, workers=[worker(seen=25)]),
        Reason.SLOW,
        "gen-1 was last seen 25s ago, and 56 more are needed. See whether they still run",
    ),
    "only the waiter puts": (
        why(wait(), FEW, workers=[worker("trainer-1")], last_put={"math": NOW - 7}),
        Reason.SLOW,
        "the last group was put 7s ago, and 56 more are needed, but only trainer-1 puts any, which waits. Put more",
    ),
    "leased after steady puts": (
        why(
            wait(16),
            tallies(completed_leased=80, completed_put=80),
            held=[Held("math", C, "trainer-2", 80, NOW + 300)],
            workers=[LIVE],
            before=Before(NOW - 380, {}),
            recent=Before(NOW - 280, {("math", C): 60}),
            last_put={"math": NOW - 260},
        ),
        Reason.LEASED,
        "all 80 completed groups are leased by trainer-2",
    ),
    "leased a moment after steady puts": (
        why(
            wait(16),
            tallies(completed_leased=80, completed_put=80),
            held=[Held("math", C, "trainer-2", 80, NOW + 590)],
            workers=[LIVE],
            recent=Before(NOW - 80, {}),
            last_put={"math": NOW - 5},
        ),
        Reason.LEASED,
        "all 80 completed groups are leased by trainer-2",
    ),
    "init": (
        why(wait(4), tallies(init=6, init_put=6), workers=[LIVE]),
        Reason.OTHER_STATUS,
        "(0 of 4): 6 groups are there, but their status is init: put without a status, or prompts that nobody has "
        "generated yet. Put results as COMPLETED",
    ),
    "init, and fewer than are missing": (
        why(wait(4), tallies(init=1, init_put=1), workers=[LIVE]),
        Reason.OTHER_STATUS,
        "1 group is there, but its status is init",
    ),
    "some of each that isn't completed": (
        why(wait(4), tallies(init=1, init_put=1, expired=2, aborted=1, completed_put=8), workers=[LIVE]),
        Reason.EXPIRED,
        "2 groups have expired, and wait to be generated again",
    ),
    "prompts of a dead worker, which others generate": (
        why(wait(4), tallies(init=6, init_put=16, init_leased=9), workers=[LIVE]),
        Reason.SLOW,
        "9 groups are being generated",
    ),
    "another status": (
        why(wait(4, status=Status.ABORTED), FEW, workers=[LIVE]),
        Reason.OTHER_STATUS,
        "8 groups are there, but their status is completed. Draw groups of that status (group_status='completed')",
    ),
    "the end of the dataset": (
        why(
            wait(),
            FEW | tallies(init_leased=3, aborted=2),
            workers=[LIVE],
            waits=[FOR_TRAINER],
            trainer=TrainState(3, 3),
            datasets={"math": 50},
        ),
        Reason.END_OF_DATASET,
        "(8 of 64): no prompt is left in the dataset: of the 50 drawn, 45 are finished, 3 in flight and 2 to be handed "
        "out again. Ask for fewer groups (at_least=13), read the dataset for more epochs, or end the run.",
    ),
    "the end of the dataset, and nothing is left": (
        why(wait(1), tallies(completed_put=50), workers=[LIVE], datasets={"math": 50}),
        Reason.END_OF_DATASET,
        "(0 of 1): no prompt is left in the dataset: of the 50 drawn, 50 are finished and 0 in flight: nothing is left "
        "to draw, so the run is finished. End it, or read the dataset for more epochs.",
    ),
    "the end of the dataset, and enough in flight": (
        why(wait(10), FEW | tallies(init_leased=3), workers=[LIVE], datasets={"math": 50}),
        Reason.SLOW,
        "3 groups are being generated",
    ),
    "a worker at the end of the dataset": (
        why(FOR_TRAINER, FEW, trainer=TrainState(3, 3), datasets={"math": 50}),
        Reason.END_OF_DATASET,
        "There is nothing to do for the workers: no prompt is left in the dataset: of the 50 drawn, 50 are finished "
        "and 0 in flight. They end when the trainer has published",
    ),
    "a worker at the end of the dataset, and the trainer waits": (
        why(FOR_TRAINER, FEW, waits=[wait(128)], trainer=TrainState(3, 3), datasets={"math": 50}),
        Reason.END_OF_DATASET,
        "no prompt is left in the dataset",
    ),
    "both wait, though it has published": (
        why(wait(), FEW, workers=[LIVE], waits=[FOR_TRAINER], trainer=TrainState(3, 3)),
        Reason.DEADLOCK,
        "while it waits for their groups. Publish newer weights (publish), or ask for no more groups than the workers",
    ),
    "a query that few could match, and none does": (
        why(wait(query=GREAT), FEW, matches={"math": 0}, workers=[LIVE]),
        Reason.NO_MATCH,
        "8 completed groups are there, but none matches",
    ),
    "both wait": (
        why(wait(), FEW, workers=[LIVE], waits=[FOR_TRAINER], trainer=TrainState(3, 3)),
        Reason.DEADLOCK,
        "deadlock: gen-1 waits since 1.0m for the trainer, which has published nothing since step 3, while it waits",
    ),
    "one of two producers waits": (
        why(wait(), FEW, workers=[LIVE, worker("gen-2")], waits=[FOR_TRAINER]),
        Reason.SLOW,
        "gen-1 and gen-2 were last seen 5s ago",
    ),
    "the trainer has finished": (
        why(wait(), FEW, workers=[KILLED], trainer=TrainState(9, 9, finished=True)),
        Reason.FINISHED,
        "the trainer has published that it has finished (step 9)",
    ),
    "finished, but they go on": (
        why(wait(), FEW, workers=[LIVE], trainer=TrainState(9, 9, finished=True)),
        Reason.SLOW,
        "gen-1 was last seen 5s ago",
    ),
    "no room for another task": (
        diagnose(
            Wait({"math": 8, "code": 8}),
            Circumstances(NOW, FULL | tallies("code", completed=3), BLOCK, workers=[LIVE], waits=[FOR_ROOM]),
        ),
        Reason.PRODUCERS_HELD_BACK,
        "Too little is ready for code (3 of 8): gen-1 waits since 1.0m for room, with 64 completed groups of math "
        "there. Draw math first or raise the capacity.",
    ),
    "restored": (
        why(wait(), FEW, restored=Restored(40, NOW - 10, "trainer-2")),
        Reason.FENCED,
        "the buffer was restored to step 40 at 20:43:00 UTC, after this wait began, which fences it off. It ends with",
    ),
    "room, and nobody draws": (
        why(FOR_ROOM, FULL, limits=BLOCK),
        Reason.PRODUCERS_HELD_BACK,
        "No room for math: 64 completed groups are buffered, and the capacity is 64; nobody has drawn any yet. "
        "Is the consumer running?",
    ),
    "room, and the trainer is slow": (
        why(FOR_ROOM, FULL, limits=BLOCK, workers=[TRAINER], last_take=Taking("trainer-1", NOW - 90, 64)),
        Reason.PRODUCERS_HELD_BACK,
        "trainer-1 should draw them, and the last draw was 1.5m ago",
    ),
    "room, and the trainer was killed": (
        why(FOR_ROOM, FULL, limits=BLOCK, workers=[worker("trainer-1", seen=300, groups=0, taken=64)]),
        Reason.PRODUCERS_HELD_BACK,
        "no consumer is left: trainer-1 went silent: last seen at 20:38:10 UTC (5.0m ago). Start the trainer again.",
    ),
    "room, and the trainer waits": (
        why(FOR_ROOM, FULL, limits=BLOCK, waits=[wait(32, GREAT)]),
        Reason.PRODUCERS_HELD_BACK,
        "trainer-1, which should draw them, waits itself for 32 completed groups of math that match",
    ),
    "room by rate": (
        why(FOR_ROOM, FULL, limits=Limits(samples_per_insert=1, error_buffer=8)),
        Reason.PRODUCERS_HELD_BACK,
        "64 completed groups were put and 0 times one was drawn, and samples_per_insert 1 with error_buffer 8",
    ),
    "room is there": (why(FOR_ROOM, FEW, limits=BLOCK), Reason.READY, "Ready: there is room for 1 completed group of"),
    "room, before a restore": (
        why(FOR_ROOM, FULL, limits=BLOCK, restored=Restored(None, NOW - 1)),
        Reason.FENCED,
        "Nothing can be put: the buffer was restored at",
    ),
    "nothing published": (
        why(FOR_TRAINER, FEW),
        Reason.WAITS_FOR_TRAINER,
        "the trainer has published nothing yet. Is it running?",
    ),
    "nothing new published": (
        why(FOR_TRAINER, FEW, trainer=TrainState(3, 3), workers=[worker("trainer-1", seen=300, groups=0, taken=9)]),
        Reason.WAITS_FOR_TRAINER,
        "nothing since step 3, and is gone: trainer-1 went silent",
    ),
    "the trainer waits, too": (
        why(FOR_TRAINER, FEW, waits=[wait(128)]),
        Reason.DEADLOCK,
        "deadlock: trainer-1, which has published nothing yet, waits itself for 128 completed groups of math",
    ),
    "a trainer that has finished": (
        why(FOR_TRAINER, FEW, trainer=TrainState(9, 9, finished=True)),
        Reason.FINISHED,
        "the trainer has published that it has finished",
    ),
}
