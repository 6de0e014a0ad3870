"""Causes of waits for groups, as a table: when each holds and its sentence, and the advice.

The first column of `DRAWS` is the reason, the second a function that returns the sentence for a need, or None if this
isn't a cause, and the third the advice; if that varies, the function returns both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from replaybuf import units
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import (
    LIVE_SECONDS,
    SILENT_SECONDS,
    Counted,
    Worker,
    brief,
    clock,
    groups,
    joined,
    listed,
    named,
)
from replaybuf.rules.needs import (
    LONGEST,
    OF_THE_GONE,
    PATIENCE,
    Cause,
    Need,
    Reason,
    Said,
    are,
    ends_of,
    gone_with,
    never_put,
    news_of,
    people,
    prompts_of,
    to_publish,
    to_put,
    too_large,
    waiters_of,
)
from replaybuf.rules.transitions import Tally, levels

#: Producers that are alive, but have put nothing for so long and generate nothing, do nothing.
_IDLE_SECONDS = 600.0


def _too_large(need: Need) -> Said:
    return None if need.about.limits is None else too_large(need.about.limits, need.task, need.status, need.least)


def _held_back(need: Need) -> Said:
    limits, level = need.about.limits, need.level
    if limits is None or need.status != Status.COMPLETED or need.available >= min(need.least, need.matching):
        return None
    more, rate, option = limits.min_size - level.completed, limits.rate, "lower min_size"
    if more <= 0 and rate is not None:  # each put allows samples_per_insert more draws
        lacking = need.least - rate.drawable(level)
        more, option = math.ceil(lacking / rate.samples_per_insert), f"widen error_buffer by {lacking:g}"
    text = f"{are(level.completed, 'completed')} there, but {limits.why_slow(level)}"
    start = "Start the producers again" if need.about.abandoned else "Wait for the producers"
    return f"{text}: {more:,} more {'has' if more == 1 else 'have'} to be put", f"{start} or {option}"


# Groups that are there


def fenced(need: Need) -> Said:
    """The buffer was restored after the wait began."""
    restored, since = need.about.restored, need.wait.since
    if restored is None or since is None or restored.time <= since:
        return None
    to = "" if restored.step is None else f" to step {restored.step}"
    time = clock(restored.time, need.about.now)
    return f"the buffer was restored{to} at {time}, after this wait began, which fences it off"


def _no_such_task(need: Need) -> Said:
    about = need.about
    if about.knows(need.task) or not about.tasks or need.task in about.datasets:
        return None
    return never_put(need.task, about.tasks)


def _no_match(need: Need) -> Said:
    """There are enough groups, but too few match the query; or there are fewer, and none matches."""
    query = need.wait.query
    if query is None or need.matching >= need.least or need.there <= need.matching:
        return None
    if need.there < need.least and need.matching:
        return None
    match = {0: "none matches", 1: "only 1 matches"}.get(need.matching, f"only {need.matching:,} match")
    tag, advice = "", "Relax the query, or wait for groups that match it"
    for unknown, near in list(need.about.unknown_tags.items())[:1]:
        tag = f": none of them has the tag {named(unknown)}"
        advice = advice if near is None else f"Did you mean tags.{named(near)}?"
    return f"{are(need.there, need.status)} there, but {match} {brief(query)}{tag}", advice


def _leased(need: Need) -> Said:
    about, count = need.about, need.about.count(need.task, need.status, Tally.LEASED)
    if count < need.missing:
        return None
    held = [one for one in about.held if (one.task_name, one.status) == (need.task, need.status)]
    every = f"{count:,} more" if need.there else "the only" if count == 1 else f"all {count:,}"
    text = f"{every} {need.status} group{' is' if count == 1 else 's are'} leased"
    counts = Counter[str]()
    for one in held:
        counts["somebody without a name" if one.holder is None else named(one.holder)] += one.groups
    if counts:
        names = [f"{name} ({n:,})" if len(counts) > 1 else name for name, n in counts.most_common()]
        last = max(one.until for one in held)
        text += f" by {joined(names)}{', the last' if len(counts) > 1 else ''} until {clock(last, about.now)}"
        text += " (over: they come back as soon as somebody looks)" if last <= about.now else ""
    if need.wait.worker is None or any(one.holder != need.wait.worker for one in held) or not held:
        return text, "They come back when their lease is given back, or ends because its holder renews it no more"
    return text, (
        "The waiting worker holds them itself, or an earlier process of its name: acknowledge each batch when it is "
        "trained on, or give it back (buffer.adopt, restore); else they come back when the lease ends"
    )


# Ends


def _finished(need: Need) -> Said:
    trainer = need.about.trainer
    if trainer is None or not trainer.finished or need.about.alive:  # live producers go on regardless
        return None
    return f"the trainer has published that it has finished (step {trainer.train_step}), so the workers stop"


def _end_of_dataset(need: Need) -> Said:
    """All prompts of the task's dataset were drawn, and fewer groups are unfinished than are missing."""
    about, task = need.about, need.task
    if need.status != Status.COMPLETED or task not in about.datasets:
        return None
    left = need.available + about.in_flight(task, alive=False) + about.unfinished(task)
    if left >= need.least:
        return None
    least, others = f'at_least={{"{named(task)}": {left}}}', {*about.tasks, *need.wait.wants} - {task}
    if left:
        return prompts_of(task, about), f"Ask for no more ({least}), or read the dataset for more epochs"
    if any(other not in about.datasets or about.has_groups(other) for other in others):
        return prompts_of(task, about), f"Go on without it ({least}), or read its dataset for more epochs"
    return prompts_of(task, about), "Nothing is left to draw: end the run, or read the dataset for more epochs"


# Producers that wait


def _with_the_gone(need: Need) -> Said:
    """All live producers wait for the trainer, or for what those that are gone lease."""
    waiting = waiters_of(need.about, "trainer", "the trainer") is not None
    return gone_with(need) if waiting and need.status == Status.COMPLETED and not need.flying else None


def _deadlock(need: Need) -> Said:
    who = waiters_of(need.about, "trainer", "the trainer")
    if who is None or need.task in need.about.datasets or need.flying or gone_with(need):
        return None
    text = f"deadlock: {who}, which has published {news_of(need.about)}, while it waits for their groups"
    return text, to_publish(need.about)


def _no_room(need: Need) -> Said:
    about = need.about
    if (who := waiters_of(about, "room", "room")) is None:
        return None
    tasks = sorted({task for wait in about.waits if wait.kind == "room" for task in wait.wants})
    full = [f"{groups(about.count(task, Status.COMPLETED), 'completed')} of {named(task)}" for task in tasks]
    own = need.task in tasks
    ways = ["Draw those groups (with another query, or fewer at once)" if own else f"Draw {listed(tasks)} first"]
    if tasks and about.limits is not None:
        ways.append(to_put(about.limits, levels(about.tallies, tasks)[tasks[0]]))
    return f"{who}, with {joined(full)} there", " or ".join(ways)


# Groups that can't be drawn, and lost ones


def _lost(need: Need, bad: Counted, put: Counted, share: float) -> tuple[int, int, str] | None:
    """Return the number lost, the number put, and the period in words, if losses explain the missing groups, else None.
    Recent losses come first, then all; in both cases at least this share of the puts."""
    before = need.about.before
    whole = (bad.lately, put.lately) == (bad.ever, put.ever)
    if need.about.abandoned and put.ever - bad.ever * (share < 1) >= need.missing:
        return None  # enough came while there were producers
    if bad.lately < share * put.lately:
        return None
    if bad.lately >= need.missing and before is not None and not whole:
        return bad.lately, put.lately, f" since {clock(before.time, need.about.now)}"
    if bad.ever >= need.missing and bad.ever >= share * put.ever:
        return bad.ever, put.ever, ""
    return None


def _expired(need: Need) -> Said:
    """Expired groups explain a wait if they are enough, or if most that were put expired."""
    about, task = need.about, need.task
    there, early = about.count(task, Status.EXPIRED), about.put(task, Status.EXPIRED)
    lost = _lost(need, about.expired(task), about.put(task, Status.COMPLETED) + early, share=1 / 2)
    at = "" if (step := about.steps.get(task)) is None else f" at the refresh to train step {step}"
    if there and about.unfinished(task) >= need.missing:
        text = f"{groups(there)} {'has' if there == 1 else 'have'} expired{at}, to be generated again"
    elif lost is not None:
        bad, of, span = lost
        early_ones = 2 * (early.lately if span else early.ever) >= bad
        why = "they were too stale when they were put" if early_ones else "they grow stale faster than they are drawn"
        text = f"{bad:,} of the {groups(of)} put{span} expired{'' if early_ones else at}: {why}"
    else:
        return None
    kept = there or about.count(task, Status.EXPIRED, Tally.LEASED)
    keep = "with expired_groups_retryable=True they are kept, to be generated again"
    again = "see that a producer generates them again" if kept else keep
    return text, f"Raise the stale threshold or sync the producers' weights sooner; {again}"


def _filtered(need: Need) -> Said:
    lost = _lost(need, need.about.put(need.task, Status.FILTERED), need.about.put(need.task, Status.COMPLETED), share=1)
    if lost is None:
        return None
    text = f"{lost[0]:,} of the {groups(sum(lost[:2]))} put{lost[2]} {'was' if lost[0] == 1 else 'were'} filtered"
    return text, f"Look at what the filter drops{_kept(need, Status.FILTERED)}"


def _failed(need: Need) -> Said:
    about, task = need.about, need.task
    bad = about.put(task, Status.FAILED) + about.set_aside(task)
    lost = _lost(need, bad, about.put(task, Status.COMPLETED) - about.spoilt(task), share=1)
    if lost is None:
        return None
    text = f"{lost[0]:,} of the {groups(sum(lost[:2]))} put{lost[2]} failed"
    for did, who in (("made", about.failed_by), ("drawn", about.failed_with)):
        if by := Counter(who.get(task, {})):
            text += f", {did} by {joined([f'{named(name)} ({n:,})' for name, n in by.most_common()])}"
    if task in about.errors:
        text += f"; the last error: {brief(about.errors[task], LONGEST)}"
    return text, f"Mend what makes the errors{_kept(need, Status.FAILED)}"


def _kept(need: Need, status: Status) -> str:
    """Return where the groups of a status are to be seen that takes no room."""
    if need.about.count(need.task, status):
        return f" (replaybuf ls --status {status})"
    return ": none is kept to look at; unfit=1000 in the config keeps what a strategy makes so, keep_unfit=True a put"


def _aborted(need: Need) -> Said:
    there = need.about.count(need.task, Status.ABORTED)
    if not there or need.about.unfinished(need.task) < need.missing:
        return None
    return f"{are(there)} aborted: interrupted, and {'waits' if there == 1 else 'wait'} to be continued"


_OF_PROMPTS = (Tally.LEASED, Tally.RETURNED, Tally.LEASE_EXPIRED, Tally.REPLACED)


def _init(need: Need) -> Said:
    """INIT groups are prompts of a ledger if some were leased, else perhaps results without a status."""
    about, task = need.about, need.task
    there = about.count(task, Status.INIT)
    if not there or (about.unfinished(task) < need.missing and about.put(task, need.status).ever):
        return None
    text = f"{are(there)} there, but {'its' if there == 1 else 'their'} status is init"
    if task in about.datasets or any(about.count(task, Status.INIT, name) for name in _OF_PROMPTS):
        return f"{text}: prompts that wait for a worker", "See that one generates them (produce_loop takes them first)"
    return f"{text}: put without a status, or prompts that nobody has generated yet", (
        "Put results as COMPLETED (rollout.status, or put(status='completed')), and mark those that are there by "
        "update({'status': 'init'}, status='completed'); prompts need a worker that generates them"
    )


def _other_status(need: Need) -> Said:
    """Of a draw of groups that aren't completed: there are enough of one other status."""
    about, never = need.about, not need.about.put(need.task, need.status).ever
    counts = {one: about.count(need.task, one) for one in Status if one not in (need.status, Status.ARCHIVED)}
    status = max(counts, key=lambda one: counts[one])
    there = counts[status]
    if not there or (not never and there < need.missing):
        return None
    text = f"{are(there)} there, but {'its' if there == 1 else 'their'} status is {status}"
    return text, f"Draw groups of that status (group_status={status.value!r}), or wait for {need.status} ones"


def _of_completed(of: Callable[[Need], Said]) -> Callable[[Need], Said]:
    return lambda need: of(need) if need.status == Status.COMPLETED else None


# Producers


def _nothing_put(need: Need) -> Said:
    about = need.about
    known = [one.name for one in about.workers if one.is_alive(about.now) and one.name != need.wait.worker]
    open_too = f"; {people(known, 'has it open', 'have it open')}" if known else ""
    return None if about.tasks else f"nothing was ever put into this buffer{open_too}"


def _nobody_left(need: Need) -> Said:
    return f"no producer is left: {ends_of(need.about.producers, need.about.now)}" if need.about.abandoned else None


def _nobody_known(need: Need) -> Said:
    last, now = need.about.last(need.task), need.about.now
    if need.about.producers or not need.about.tasks or (last is not None and now - last < SILENT_SECONDS):
        return None  # who has put it may not have given a sign of life yet
    put = "" if last is None else f"; the last group was put at {clock(last, now)}"
    return f"too few were put, and nobody is known to put any{put}"


def _fenced_producers(need: Need) -> Said:
    restored, alive = need.about.restored, need.about.alive
    if restored is None or not alive:
        return None
    if any(one.started_at >= restored.time or one.name == restored.worker for one in alive):
        return None
    who, time = listed(dict.fromkeys(one.name for one in alive)), clock(restored.time, need.about.now)
    return f"{who} opened the buffer before it was restored at {time}, and can put nothing any more"


def _idle(need: Need) -> Said:
    """Some producers fell silent about the time of the last put, or all have put nothing for long."""
    about, last = need.about, need.about.last(need.task)
    if last is None or not about.alive or need.flying:
        return None
    gone = _gone(need, last)
    if gone and need.rate:
        return ends_of(gone, about.now)
    return _needed(need) if gone or about.now - last >= _IDLE_SECONDS else None


def _gone(need: Need, last: float) -> list[Worker]:
    """Return the producers that fell silent about the time of the last put or later, and have no successors."""
    about, alive = need.about, {one.name for one in need.about.alive}
    silent = [one for one in about.producers if one.name not in alive and one.is_silent(about.now)]
    return [one for one in silent if one.seen_at >= last - LIVE_SECONDS]


def _needed(need: Need) -> str:
    about, last = need.about, need.about.last(need.task)
    gone = [] if last is None else _gone(need, last)
    silent = f"{ends_of(gone, about.now)}; " if gone else ""
    parts = [people(sorted(one.name for one in about.alive), "is alive", "are alive")] if about.alive else []
    parts += [] if last is None else [f"the last group was put at {clock(last, about.now)}"]
    return f"{silent}{', '.join(parts)}, and {need.missing:,} more {'is' if need.missing == 1 else 'are'} needed"


def _arriving(need: Need) -> Said:
    parts = []
    if rate := need.rate:
        hourly = round(rate * 3600)
        come = "1 group an hour arrives" if hourly == 1 else f"{hourly:,} groups an hour arrive"
        parts.append(f"{come}, so the missing {need.missing:,} take about {units.age(need.missing / rate)}")
    if flying := need.flying:
        parts.append(f"{are(flying)} being generated")
    return "; ".join(parts) or None


def _alive(need: Need) -> Said:
    if not need.about.alive and (need.about.abandoned or need.about.last(need.task) is None):
        return None
    advice = "Nobody else puts any: put more before the draw, or meanwhile in another task or process"
    return _needed(need), advice if need.puts_alone else PATIENCE


_START = "Start the producers, or see that they use the same url, name and task"
AGAIN = "Start them again"
FENCED = Cause(Reason.FENCED, fenced, "It ends with a FencedError: build the buffer anew to join the restored run")

#: The causes of waits for groups, in order of precedence.
DRAWS = (
    FENCED,
    Cause(Reason.HELD_BACK, _too_large, final=True),
    Cause(Reason.NO_SUCH_TASK, _no_such_task),
    Cause(Reason.HELD_BACK, _held_back),
    Cause(Reason.NO_MATCH, _no_match),
    Cause(Reason.LEASED, _leased, yields=True),
    Cause(Reason.FINISHED, _finished, "Publish a state that isn't finished, and start workers, to go on"),
    Cause(Reason.FINISHED, _end_of_dataset, final=True),
    Cause(Reason.LEASED, _with_the_gone, OF_THE_GONE, yields=True),
    Cause(Reason.DEADLOCK, _deadlock),
    Cause(Reason.DEADLOCK, _no_room),
    Cause(Reason.EXPIRED, _of_completed(_expired), yields=True),
    Cause(Reason.UNFIT, _of_completed(_filtered), yields=True),
    Cause(Reason.UNFIT, _of_completed(_failed), yields=True),
    Cause(
        Reason.OTHER_STATUS,
        _of_completed(_aborted),
        "See that a producer continues them (produce_loop takes them first)",
        yields=True,
    ),
    Cause(Reason.OTHER_STATUS, _of_completed(_init), yields=True),
    Cause(Reason.OTHER_STATUS, lambda need: None if need.status == Status.COMPLETED else _other_status(need)),
    Cause(Reason.ABSENT, _nothing_put, _START),
    Cause(Reason.ABSENT, _nobody_left, AGAIN),
    Cause(Reason.ABSENT, _nobody_known, _START, yields=True),
    Cause(Reason.ABSENT, _fenced_producers, AGAIN),
    Cause(Reason.ABSENT, _idle, "Start again who is gone, and see in the logs of the others what they do", yields=True),
    Cause(Reason.SLOW, _arriving, PATIENCE),
    Cause(Reason.SLOW, _alive),
)
