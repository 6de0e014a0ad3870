"""The causes of waits, as tables in order of precedence: the first that holds is the reason.

A row's function returns the sentence for a need, or None if this isn't a cause; where the advice varies, both.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from replaybuf.common import units
from replaybuf.rules.circumstances import IN_FLIGHT, LIVE_SECONDS, SILENT_SECONDS, Came, Circumstances, Wait, Worker
from replaybuf.rules.limits import Limits
from replaybuf.rules.needs import Cause, Found, Need, Reason, Said, causes_of
from replaybuf.rules.transitions import Tally
from replaybuf.rules.words import are, brief, clock, counted, groups, joined, listed, named, people, wanted
from replaybuf.values.rollouts.statuses import Status

#: Producers that are alive, but have put nothing for so long and generate nothing, do nothing.
_IDLE_SECONDS = 600.0
#: Advice for workers that a restore fenced off.
_REJOIN = "; a worker that catches FencedError and builds its buffer again outlives restores"
#: The maximum length of compared names and quoted errors, and the number of tasks compared with an unknown name.
_LONGEST, _TASKS_COMPARED = 200, 1000
# Of more tasks, only the first are explained: a wait for hundreds of tasks must not block the event loop.
_TASKS_EXPLAINED = 20


def explain(wait: Wait, about: Circumstances) -> list[tuple[Need, list[Found]]]:
    """Return the lacking needs of a wait, the most urgent first, each with its causes, the reason first.

    While the consumer waits itself, its cause explains why producers wait for room, or for the trainer.
    """
    if wait.kind == "trainer":
        explained = [(need := Need(wait, "", about), causes_of(need, _FOR_TRAINER))]
    else:
        table = _FOR_ROOM if wait.kind == "room" else _FOR_GROUPS
        lacking = [need for task in wait.wants if (need := Need.of(wait, task, about)).missing]
        explained = [(need, causes_of(need, table)) for need in lacking[:_TASKS_EXPLAINED]]
    explained.sort(key=lambda one: one[1][0].precedence)
    if (
        wait.kind == "groups"
        or not explained
        or explained[0][1][0].cause.reason not in (Reason.ABSENT, Reason.HELD_BACK)
    ):
        return explained
    need, (first, *_) = explained[0]
    for consumer in sorted(about.consumers, key=lambda other: need.task not in other.wants)[:1]:
        match = "" if consumer.query is None else f" that match {brief(consumer.query)}"
        lacks = f"{wanted(consumer.wants, consumer.status)}{match}"
        text = f"{named(consumer.worker or 'the trainer')} waits itself for {lacks}"
        first = replace(first, advice="Let it ask for less")
        for _, (why, *_) in explain(consumer, replace(about, waits=(*about.waits, wait), matches=None))[:1]:
            cause = why.cause if wait.kind == "trainer" else first.cause
            first, text = Found(cause, first.text, why.advice), f"{text}: {why.text}"
        text = f"{_limit(need)}; {text}" if wait.kind == "room" else text
        return [(need, [replace(first, text=text)])]
    return explained


# Groups that are there


def _fenced(need: Need) -> Said:
    restored, since = need.about.restored, need.wait.since
    if restored is None or since is None or restored.time <= since:
        return None
    to = "" if restored.step is None else f" to step {restored.step}"
    time = clock(restored.time, need.about.now)
    return f"the buffer was restored{to} at {time}, after this wait began, which fences it off"


def _too_large(need: Need) -> Said:
    return None if need.about.limits is None else too_large(need.about.limits, need.task, need.status, need.least)


def too_large(limits: Limits, task: str, status: Status, count: int) -> tuple[str, str] | None:
    """Return why a batch of `count` groups can never be drawn and the advice, or None if it can."""
    most = limits.largest_batch
    if most is None or count <= most or status != Status.COMPLETED:
        return None
    by_rate = limits.capacity is None or count <= limits.capacity
    why = f"{limits.rate} allows {most:,} at once" if by_rate else f"the capacity is {limits.capacity:,}"
    return (
        f"a batch of {count:,} groups of task {named(task)} would wait for ever: {why}",
        f"Ask for fewer groups, or {'widen error_buffer' if by_rate else 'raise the capacity'}",
    )


def _no_such_task(need: Need) -> Said:
    about = need.about
    if about.knows(need.task) or not about.tasks or need.task in about.datasets:
        return None
    return never_put(need.task, about.tasks)


def never_put(name: str, tasks: Sequence[str]) -> tuple[str, str]:
    """Return a sentence about a task that never had a group, with the existing name that was probably meant."""
    comparable = [task for task in tasks[:_TASKS_COMPARED] if len(task) <= _LONGEST]
    near = difflib.get_close_matches(name[:_LONGEST], comparable, n=1, cutoff=0.5)
    meant = f"Did you mean {named(near[0])}" if near else "Is it the name under which the producers put"
    there = f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"
    return f"nothing was ever put into this task; {there}", f"{meant}?"


def _held_back(need: Need) -> Said:
    limits = need.about.limits
    if limits is None or need.status != Status.COMPLETED or need.available >= min(need.least, need.matching):
        return None
    start = "Start the producers again" if need.about.abandoned else "Wait for the producers"
    option = "lower min_size" if need.level.completed < limits.min_size else "widen error_buffer"
    return f"{are(need.there, 'completed')} there, but {limits.why_slow(need.level)}", f"{start}, or {option}"


def _no_match(need: Need) -> Said:
    """There are enough groups, but too few match the query; or there are fewer, and none matches."""
    query = need.wait.query
    if query is None or need.matching >= need.least or need.there <= need.matching:
        return None
    if need.there < need.least and need.matching:
        return None
    match = {0: "none matches", 1: "only 1 matches"}.get(need.matching, f"only {need.matching:,} match")
    return f"{are(need.there, need.status)} there, but {match} {brief(query)}"


def _leased(need: Need) -> Said:
    about, count = need.about, need.about.count(need.task, need.status, Tally.LEASED)
    if count < need.missing:
        return None
    every = f"{count:,} more" if need.there else "the only" if count == 1 else f"all {count:,}"
    text = f"{every} {need.status} group{' is' if count == 1 else 's are'} leased"
    held = [one for one in about.held if (one.task_name, one.status) == (need.task, need.status)]
    if not held:
        return text
    by = Counter[str]()
    for one in held:
        by[one.holder or "somebody"] += one.groups
    last = clock(max(one.until for one in held), about.now)
    return f"{text} by {counted(by) if len(by) > 1 else named(*by)} until {last}"


# Ends


def _finished(need: Need) -> Said:
    trainer = need.about.trainer
    if trainer is None or not trainer.finished or (need.wait.kind == "groups" and need.about.alive):
        return None  # live producers go on regardless
    return f"the trainer has published that it has finished (step {trainer.train_step})"


def _end_of_dataset(need: Need) -> Said:
    """All prompts of the task's dataset were drawn, and fewer groups are unfinished than are missing."""
    about, task = need.about, need.task
    if need.status != Status.COMPLETED or task not in about.datasets:
        return None
    left = need.available + about.in_flight(task, alive=False) + about.unfinished(task)
    least = f'at_least={{"{named(task)}": {left}}}'
    advice = f"Ask for no more ({least}), read the dataset for more epochs, or end the run"
    return None if left >= need.least else (_prompts_of(task, about), advice)


def _end_of_all_datasets(need: Need) -> Said:
    about = need.about
    return None if about.consumers else "; ".join(_prompts_of(task, about) for task in sorted(about.datasets)) or None


def _prompts_of(task: str, about: Circumstances) -> str:
    """Return the state of the prompts of a dataset that was read to its end, in words, from its prompt ledger."""
    drawn, waiting, flying = about.datasets[task], about.unfinished(task), about.in_flight(task, alive=False)
    return (
        f"no prompt of {named(task)} is left in the dataset: of the {drawn:,} drawn, {drawn - waiting - flying:,} are "
        f"finished, {flying:,} in flight and {waiting:,} to be handed out again"
    )


# Producers that wait


def _waiters_of(about: Circumstances, kind: str) -> str | None:
    """Return `gen-1 and gen-2 wait for room since 20:42:10 UTC` if every live producer does; otherwise None."""
    waits = [wait for wait in about.waits if wait.kind == kind]
    names = {wait.worker for wait in waits}
    if not waits or any(one.name not in names for one in about.alive):
        return None
    began = min((wait.since for wait in waits if wait.since is not None), default=about.now)
    who = people(sorted(name or "a producer" for name in names), "waits", "wait")
    return f"{who} for {'the trainer' if kind == 'trainer' else kind} since {clock(began, about.now)}"


def _no_news(need: Need) -> Said:
    """All live producers wait for the trainer: a deadlock, unless somebody who is gone holds what is missing."""
    about, waiting = need.about, _waiters_of(need.about, "trainer")
    if waiting is None or need.task in about.datasets or need.flying or _gone_with(need):
        return None
    return f"deadlock: {waiting}, which has published {_news_of(about)}, while it waits for their groups"


def _news_of(about: Circumstances) -> str:
    return "nothing yet" if about.trainer is None else f"nothing since step {about.trainer.train_step}"


def _gone_with(need: Need) -> str | None:
    """All live producers wait for the trainer, and workers that are gone lease unfinished groups of the task."""
    about, live = need.about, {one.name for one in need.about.alive}
    held = [one for one in about.held if one.task_name == need.task and one.status in IN_FLIGHT]
    held = [one for one in held if one.holder not in live]
    gone = [one for one in about.workers if one.name in {lease.holder for lease in held}]
    if not gone or need.flying or need.status != Status.COMPLETED or _waiters_of(about, "trainer") is None:
        return None
    count, until = sum(one.groups for one in held), clock(max(one.until for one in held), about.now)
    return f"{are(count)} leased until {until} to be generated, by a worker that is gone ({_ends_of(gone, about)})"


def _no_room(need: Need) -> Said:
    about, waiting = need.about, _waiters_of(need.about, "room")
    tasks = sorted({task for wait in about.waits if wait.kind == "room" for task in wait.wants})
    full = [f"{groups(about.count(task, Status.COMPLETED), 'completed')} of {named(task)}" for task in tasks]
    advice = f"Draw groups of {listed(tasks)} (without a query, or fewer at once), or let the limits allow more puts"
    return None if waiting is None else (f"{waiting}, with {joined(full)} there", advice)


# Groups that can't be drawn, and lost ones


def _lost(need: Need, of: Callable[[Came], tuple[int, int]]) -> str | None:
    """Return `64 of the 66 groups put since 20:28:10 UTC`, if that many lost groups explain the wait, else None.

    They do if they are half of those that came, and as many as are missing: lately, or else ever.
    """
    about, ever = need.about, of(need.about.came(need.task))
    if about.abandoned and ever[1] - ever[0] >= need.missing:
        return None  # enough came while there were producers
    for before in (about.before, None):
        bad, every = of(about.came(need.task, before))
        if 2 * bad < every:
            return None
        if bad and bad >= need.missing:
            since = "" if before is None or bad == ever[0] else f" since {clock(before.time, about.now)}"
            return f"{bad:,} of the {groups(every)} put{since}"
    return None


def _expired(need: Need) -> Said:
    about, task = need.about, need.task
    there = about.count(task, Status.EXPIRED)
    if there and about.unfinished(task) >= need.missing:
        lost: str | None = groups(there)
    else:
        lost = _lost(need, lambda came: (came.expired, came.completed + came.early))
    at = "" if (step := about.steps.get(task)) is None else f"; the last refresh was to train step {step}"
    return None if lost is None else f"{lost} expired{at}"


def _filtered(need: Need) -> Said:
    lost = _lost(need, lambda came: (came.filtered, came.filtered + came.completed))
    return None if lost is None else f"{lost} were filtered"


def _failed(need: Need) -> Said:
    about, task = need.about, need.task
    lost = _lost(need, lambda came: (came.failed, came.failed + came.completed - came.spoilt))
    by = f", with {counted(who)}" if (who := about.failed_by.get(task)) else ""
    error = f"; the last error: {brief(about.errors[task], _LONGEST)}" if task in about.errors else ""
    return None if lost is None else f"{lost} failed{by}{error}"


def _other_status(need: Need) -> Said:
    """There are groups of another status: of a draw of completed ones, those that wait to be generated."""
    about, completed = need.about, need.status == Status.COMPLETED
    others = (Status.INIT, Status.ABORTED) if completed else set(Status) - {need.status, Status.ARCHIVED}
    there = {status: count for status in sorted(others) if (count := about.count(need.task, status))}
    enough = about.unfinished(need.task) if completed else sum(there.values())
    if not there or (enough < need.missing and about.put(need.task, need.status)):
        return None
    kinds = joined([f"{count:,} {status}" for status, count in there.items()])
    return f"{are(sum(there.values()))} there, but of another status: {kinds}"


def _of_completed(of: Callable[[Need], Said]) -> Callable[[Need], Said]:
    return lambda need: of(need) if need.status == Status.COMPLETED else None


# Producers and consumers


def _ends_of(workers: Sequence[Worker], about: Circumstances) -> str:
    """Return when each worker ended or was last seen, in words; the latest first."""
    ends: dict[str, str] = {}
    for one in sorted(workers, key=lambda one: -one.seen_at):
        did = ["was killed" if one.killed else "went silent"] if one.state(about.now) == "silent" else []
        did += ["was fenced off by a restore"] if about.is_fenced(one) else []
        seen = "ended" if one.ended_at is not None else "last seen"
        end = f"{' or '.join(did)}: {seen}" if did else seen
        ends.setdefault(one.name, f"{named(one.name)} {end} at {clock(one.ended_at or one.seen_at, about.now)}")
    return joined([*ends.values()])


def _absent(need: Need) -> Said:
    """Nobody has put anything; all producers are gone; some fell silent at the last put; or all are idle for long."""
    about, last = need.about, need.about.last(need.task)
    start = "Start the producers, or see that they use the same url, name and task"
    if about.abandoned:
        again = f"Start them again{_REJOIN if any(map(about.is_fenced, about.producers)) else ''}"
        return f"no producer is left: {_ends_of(about.producers, about)}", again
    if not about.tasks:
        known = [one.name for one in about.workers if one.is_alive(about.now) and one.name != need.wait.worker]
        open_too = f"; {people(known, 'has it open', 'have it open')}" if known else ""
        return f"nothing was ever put into this buffer{open_too}", start
    if not about.producers:  # who has put the last group may not have given a sign of life yet
        known_soon = last is not None and about.now - last < SILENT_SECONDS
        return None if known_soon else ("nobody is known to put any", start)
    if last is None or need.flying or not (_gone(need) or about.now - last >= _IDLE_SECONDS):
        return None
    return _needed(need), "Start again who is gone, and see in the logs of the others what they do"


def _gone(need: Need) -> list[Worker]:
    """Return the producers that fell silent about the time of the last put or later, or were fenced off.

    Those that have successors are left out.
    """
    about, alive, last = need.about, {one.name for one in need.about.alive}, need.about.last(need.task)
    lost = [one for one in about.producers if one.state(about.now) == "silent" or about.is_fenced(one)]
    lost = [one for one in lost if one.name not in alive]
    return [one for one in lost if last is not None and one.seen_at >= last - LIVE_SECONDS]


def _needed(need: Need) -> str:
    about, last, gone = need.about, need.about.last(need.task), _gone(need)
    silent = f"{_ends_of(gone, about)}; " if gone else ""
    parts = [people(sorted(one.name for one in about.alive), "is alive", "are alive")] if about.alive else []
    parts += [] if last is None else [f"the last group was put at {clock(last, about.now)}"]
    return f"{silent}{', '.join(parts)}, and {need.missing:,} more {'is' if need.missing == 1 else 'are'} needed"


def _slow(need: Need) -> Said:
    about, parts = need.about, []
    if rate := need.rate:
        hourly = f"{round(rate * 3600):,} groups an hour arrive"
        parts.append(f"{hourly}, so the missing {need.missing:,} take about {units.age(need.missing / rate)}")
    if need.flying:
        parts.append(f"{are(need.flying)} being generated")
    if parts or not need.puts_alone:
        known = about.alive or (not about.abandoned and about.last(need.task) is not None)
        return "; ".join(parts) or (_needed(need) if known else None)
    return _needed(need), "Nobody else puts any: put more before the draw, or meanwhile in another task or process"


def _limit(need: Need) -> str:
    limits = need.about.limits
    return "" if limits is None else limits.why_full(need.level, need.status)


def _full(need: Need) -> Said:
    return f"{_limit(need)}; {_drawn(need.about)}"


def _unpublished(need: Need) -> Said:
    return f"the trainer has published {_news_of(need.about)}; {_drawn(need.about)}"


def _drawn(about: Circumstances) -> str:
    """Return what the consumers do, in words."""
    takers, last = [one for one in about.workers if one.taken], about.last_take
    alive = [one.name for one in takers if one.is_alive(about.now)]
    if takers and not alive:
        return f"no consumer is left: {_ends_of(takers, about)}"
    who = f"{people(alive, 'is alive', 'are alive')}, and " if alive else ""
    return who + ("nobody has drawn any yet" if last is None else f"the last draw was at {clock(last.time, about.now)}")


_FENCED = Cause(Reason.FENCED, _fenced, "It ends with a FencedError: build the buffer again to join the restored run")
_LOOK = "(replaybuf ls --status {}, where unfit=, or keep_unfit=True of a put, keeps them)"

_FOR_GROUPS = (
    _FENCED,
    Cause(Reason.HELD_BACK, _too_large, final=True),
    Cause(Reason.NO_SUCH_TASK, _no_such_task),
    Cause(Reason.HELD_BACK, _held_back),
    Cause(Reason.NO_MATCH, _no_match, "Relax the query, or wait for groups that match it"),
    Cause(
        Reason.LEASED,
        _leased,
        "They come back when they are given back, or the lease ends. Who holds them should acknowledge each batch that "
        "was trained on; those of an earlier process of its name: buffer.adopt, restore",
        yields=True,
    ),
    Cause(Reason.FINISHED, _finished, "Publish a state that isn't finished, and start workers, to go on"),
    Cause(Reason.FINISHED, _end_of_dataset, final=True),
    Cause(Reason.LEASED, _gone_with, "They come back then, and other workers generate them", yields=True),
    Cause(
        Reason.DEADLOCK,
        _no_news,
        "Publish (publish) before waiting for a batch, and ask for no more groups than the workers keep ready "
        "(their batch_size)",
    ),
    Cause(Reason.DEADLOCK, _no_room),
    Cause(
        Reason.EXPIRED,
        _of_completed(_expired),
        "Raise the stale threshold, sync the producers' weights sooner, or see that a producer generates them again "
        "(expired_groups_retryable=True keeps them for that)",
        yields=True,
    ),
    Cause(
        Reason.UNFIT, _of_completed(_filtered), f"Look at what the filter drops {_LOOK.format('filtered')}", yields=True
    ),
    Cause(Reason.UNFIT, _of_completed(_failed), f"Mend what makes the errors {_LOOK.format('failed')}", yields=True),
    Cause(
        Reason.OTHER_STATUS,
        _other_status,
        "See that a worker generates what is init or aborted (produce_loop takes that first), put results as "
        "COMPLETED, or draw groups of that status (group_status=)",
        yields=True,
    ),
    Cause(Reason.ABSENT, _absent, yields=True),
    Cause(Reason.SLOW, _slow, "Wait, ask for fewer groups, or start more producers"),
)
_FOR_ROOM = (_FENCED, Cause(Reason.HELD_BACK, _full, "Is the consumer running?"))
_FOR_TRAINER = (
    _FENCED,
    Cause(Reason.FINISHED, _finished, "Stop them"),
    Cause(Reason.FINISHED, _end_of_all_datasets, "They end when the trainer has published that it has finished"),
    Cause(Reason.ABSENT, _unpublished, "Is it running?"),
)
