"""Causes of waits: existing groups that can't be drawn, and lost groups. (`diagnosis` has causes of missing puts.)

Each is a function of the need of a draw in one task and of the circumstances, and returns None if it doesn't hold. If a
limit blocks draws or puts, `to_draw` and `to_put` name the options to change.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from replaybuf import units
from replaybuf.errors import ConfigError
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import (
    Circumstances,
    Counted,
    Held,
    Wait,
    brief,
    clock,
    groups,
    joined,
    listed,
    named,
    since,
    until,
)
from replaybuf.rules.limits import Level, Limits
from replaybuf.rules.transitions import Tally, levels


class Reason(StrEnum):
    """Why a call waits; READY if it needn't. The names are stable.

    The order is that of precedence: of several reasons, the first is the one to remove.
    """

    FENCED = "fenced"  # the buffer was restored since the wait began
    TOO_LARGE_A_BATCH = "too_large_a_batch"  # the limits never allow such a batch
    NO_SUCH_TASK = "no_such_task"  # nothing was ever put into it, but into other tasks
    HELD_BACK = "held_back"  # there are enough groups, but a limit blocks the draw
    NO_MATCH = "no_match"  # there are groups, but they don't match the query
    LEASED = "leased"  # consumers hold the groups
    FINISHED = "finished"  # the trainer has published its end, so the producers stop
    END_OF_DATASET = "end_of_dataset"  # all prompts were drawn, and too few are in flight
    DEADLOCK = "deadlock"  # producers and trainer wait for each other
    PRODUCERS_HELD_BACK = "producers_held_back"  # producers wait for room
    OTHER_STATUS = "other_status"  # there are groups, but of another status, such as INIT
    EXPIRED = "expired"
    FILTERED = "filtered"
    FAILED = "failed"
    ABORTED = "aborted"  # interrupted, waiting for continuation
    NOTHING_PUT = "nothing_put"
    PRODUCERS_SILENT = "producers_silent"  # killed, ended, or alive without putting anything
    WAITS_FOR_TRAINER = "waits_for_trainer"  # producers wait for newer weights of the trainer
    SLOW = "slow"  # groups arrive, but slowly
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a wait and the advice against it, as parts of a sentence."""

    reason: Reason
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """The need of a wait in one task: at least `least` groups, of which `there` exist.

    Of the existing ones, `matching` match the query, and `available` may be drawn now.
    """

    wait: Wait
    task: str
    least: int
    there: int
    matching: int
    available: int

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return the need of the wait in this task."""
        there = matching = about.count(task, wait.status)
        if wait.query is not None and about.matches is not None:
            matching = min(there, about.matches.get(task, 0))
        available = matching
        if wait.status == Status.COMPLETED and about.limits is not None:
            available = min(matching, about.limits.drawable(levels(about.tallies, [task])[task]))
        return cls(wait, task, wait.wants[task], there, matching, available)

    @property
    def missing(self) -> int:
        """The number of available groups that the wait lacks."""
        return max(0, self.least - self.available)

    @property
    def status(self) -> Status:
        """The status of the needed groups."""
        return self.wait.status

    @property
    def head(self) -> str:
        """The beginning of a sentence about the need."""
        much = "Nothing" if self.available == 0 else "Too little"
        return f"{much} is ready for {named(self.task)} ({self.available:,} of {self.least:,})"


def be(count: int) -> str:
    """Return the verb for this number."""
    return "is" if count == 1 else "are"


def to_draw(limits: Limits, level: Level, count: int) -> list[str]:
    """Return the option changes that allow a draw of `count` existing groups that the limits block."""
    rate, ratio = limits.rate, limits.samples_per_insert
    if level.completed < limits.min_size or rate is None or ratio is None:
        return ["lower min_size"]
    low, high = rate.errors
    lacking = count - rate.drawable(level)
    wider = f"raise error_buffer to {(high - low) / 2 + lacking:g}"
    if isinstance(limits.error_buffer, tuple):
        wider = f"lower the first number of error_buffer to {low - lacking:g}"
    more = _allows_more(limits, 2 * ratio, lambda changed: changed.drawable(level))
    return ["raise samples_per_insert", wider] if more else [wider]


def to_put(limits: Limits, level: Level) -> list[str]:
    """Return the option changes that allow puts of completed groups that the limits block."""
    ratio, full = limits.samples_per_insert, limits.capacity is not None and level.completed >= limits.capacity
    if ratio is None or (full and limits.on_full != "evict"):
        return ["raise the capacity"]
    wider = f"raise {'the second number of ' if isinstance(limits.error_buffer, tuple) else ''}error_buffer"
    less = _allows_more(limits, ratio / 2, lambda changed: changed.insertable(level, Status.COMPLETED) or 0)
    return ["lower samples_per_insert", wider] if less else [wider]


def _allows_more(limits: Limits, ratio: float, allowed: Callable[[Limits], int]) -> bool:
    """Return whether another `samples_per_insert` is valid with the other options, and allows more."""
    try:
        return allowed(replace(limits, samples_per_insert=ratio)) > allowed(limits)
    except ConfigError:
        return False


#: The maximum length of compared names and quoted errors, and the number of tasks compared with an unknown name.
_LONGEST, _TASKS_COMPARED = 200, 1000


def fenced(wait: Wait, about: Circumstances) -> Cause | None:
    """The buffer was restored after the wait began."""
    restored, since = about.restored, wait.since
    if restored is None or since is None or restored.time <= since:
        return None
    step = "" if restored.step is None else f" to step {restored.step}"
    text = f"the buffer was restored{step} at {clock(restored.time)}, after this wait began, which fences it off"
    return Cause(Reason.FENCED, text, "It ends with a FencedError: build the buffer anew to join the restored run")


def too_large(need: Need, about: Circumstances) -> Cause | None:
    """The limits never allow a draw of this size."""
    limits = about.limits
    largest = None if limits is None or need.status != Status.COMPLETED else limits.largest_batch
    if limits is None or largest is None or need.least <= largest:
        return None
    if limits.capacity is not None and need.least > limits.capacity:
        why, option = f"the capacity is {limits.capacity:,}", "raise the capacity"
    else:
        why, option = f"{limits.rate} allows {largest:,} at once", "widen error_buffer"
    text = f"a batch of {need.least:,} is never there, because {why}"
    return Cause(Reason.TOO_LARGE_A_BATCH, text, f"Ask for fewer groups, or {option}")


def no_such_task(need: Need, about: Circumstances) -> Cause | None:
    """Nothing was ever put into this task, but into other tasks."""
    if about.knows(need.task) or not (tasks := about.tasks):
        return None
    return Cause(Reason.NO_SUCH_TASK, *never_put(need.task, tasks))


def never_put(name: str, tasks: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong with a task's name that never had a group, and the name that was probably meant."""
    comparable = [task for task in tasks[:_TASKS_COMPARED] if len(task) <= _LONGEST]
    near = difflib.get_close_matches(name[:_LONGEST], comparable, n=1, cutoff=0.5)
    meant = f"Did you mean {named(near[0])}" if near else "Is it the name under which the producers put"
    return f"nothing was ever put into this task; {there_are(tasks)}", f"{meant}?"


def there_are(tasks: Sequence[str]) -> str:
    """Return the existing tasks, in words."""
    return f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"


def held_back(need: Need, about: Circumstances) -> Cause | None:
    """There are enough groups, but min_size or the rate limit blocks the draw."""
    limits = about.limits
    if limits is None or need.status != Status.COMPLETED or need.available >= min(need.least, need.matching):
        return None
    level = levels(about.tallies, [need.task])[need.task]
    more, rate = limits.min_size - level.completed, limits.rate
    if more <= 0 and rate is not None:  # each put allows samples_per_insert more draws
        more = math.ceil((need.least - rate.drawable(level)) / rate.samples_per_insert)
    text = f"{groups(level.completed, 'completed')} {be(level.completed)} there, but {limits.why_slow(level)}"
    text += f": {more:,} more {'has' if more == 1 else 'have'} to be put"
    producers = "Start the producers again" if about.abandoned else "Wait for the producers"
    return Cause(Reason.HELD_BACK, text, joined([producers, *to_draw(limits, level, need.least)], link="or"))


def no_match(need: Need, about: Circumstances) -> Cause | None:
    """There are enough groups, but too few match the query; or there are fewer, and none matches."""
    if need.wait.query is None or need.matching >= need.least or need.there <= need.matching:
        return None
    if need.there < need.least and need.matching:
        return None
    match = {0: "none matches", 1: "only 1 matches"}.get(need.matching, f"only {need.matching:,} match")
    text = f"{groups(need.there, need.status)} {be(need.there)} there, but {match} {brief(need.wait.query)}"
    advice = "Relax the query, or wait for groups that match it"
    for tag, near in list(about.unknown_tags.items())[:1]:
        text += f": none of them has the tag {named(tag)}"
        advice = advice if near is None else f"Did you mean tags.{named(near)}?"
    return Cause(Reason.NO_MATCH, text, advice)


def leased(need: Need, about: Circumstances) -> Cause | None:
    """Consumers hold at least as many groups as are missing.

    If the waiting worker holds them itself, and new groups will arrive before its lease ends, the wait has another
    reason: the worker prefetches the next batch.
    """
    count = about.count(need.task, need.status, Tally.LEASED)
    if count < need.missing or not need.missing:
        return None
    held = [one for one in about.held if (one.task_name, one.status) == (need.task, need.status)]
    ends = max((one.until for one in held), default=about.now)
    own = [one for one in held if one.holder == need.wait.worker and not _is_of_earlier(one, need.wait)]
    if count - sum(one.groups for one in own) < need.missing < about.rate(need.task, need.status) * (ends - about.now):
        return None
    every = f"{count:,} more" if need.there else "the only" if count == 1 else f"all {count:,}"
    completed = f"{every} {need.status} group{'' if count == 1 else 's'} {be(count)} leased"
    return Cause(Reason.LEASED, f"{completed}{_by_holders(held, need.wait, about)}", _to_get_back(held, own, need.wait))


def _is_of_earlier(one: Held, wait: Wait) -> bool:
    """Return whether an earlier process of the waiting worker's name leased these groups."""
    began, leased_at = wait.process_began, one.last_leased
    return one.holder == wait.worker and began is not None and leased_at is not None and leased_at < began


def _to_get_back(held: Sequence[Held], own: Sequence[Held], wait: Wait) -> str:
    if wait.worker is None or {one.holder for one in held} != {wait.worker}:
        return "They come back when their lease is given back, or ends because its holder renews it no more"
    if not own:
        return (
            "They come back when its lease ends; sooner if you restore a checkpoint, or if somebody who has the "
            "lease's handle gives it back (buffer.adopt)"
        )
    began = wait.process_began
    if began is not None and any(one.first_leased is not None and one.first_leased < began for one in own):
        return (
            "The waiting worker holds some itself: acknowledge these batches, or give them back; an earlier process of "
            "that name holds the others until its lease ends"
        )
    return "The waiting worker holds them itself: acknowledge a batch when it is trained on, or give it back"


def _by_holders(held: Sequence[Held], wait: Wait, about: Circumstances) -> str:
    """Return the holders of groups and the ends of their leases, in words."""
    last, counts = defaultdict[str, float](float), Counter[str]()
    for one in held:
        name = "somebody without a name" if one.holder is None else named(one.holder)
        name = f"an earlier process of {name}" if _is_of_earlier(one, wait) else name
        last[name] = max(last[name], one.until)
        counts[name] += one.groups
    if not last:
        return ""
    names = sorted(last, key=lambda name: (-counts[name], name))
    if len(names) == 1:
        return f" by {names[0]} {until(last[names[0]], about.read_at)}"
    shown = [f"{name} ({counts[name]:,})" for name in names]
    return f" by {joined(shown)}, the last {until(max(last.values()), about.read_at)}"


def spoilt(need: Need, about: Circumstances) -> list[Cause]:
    """Return why groups that were put can't be drawn, the cause of most groups first."""
    if not need.missing:
        return []
    if need.status != Status.COMPLETED:
        found = [_of_status(need, about, status) for status in Status if status not in (need.status, Status.ARCHIVED)]
    else:
        found = [_expired(need, about), *(_unfit(need, about, status) for status in _UNFIT), _aborted(need, about)]
        found.append(_of_status(need, about, Status.INIT))
    return [cause for _, cause in sorted((one for one in found if one), key=lambda one: -one[0])]


def _of_status(need: Need, about: Circumstances, status: Status) -> tuple[int, Cause] | None:
    """Groups of another status explain a wait if they are enough, or none of the wanted status was ever put.

    INIT groups are no cause while producers generate others of the task: those will be generated later.
    """
    there = about.count(need.task, status)
    never = not about.put(need.task, need.status).ever
    if not there or (status == Status.INIT and about.in_flight(need.task, need.status)):
        return None
    if not never and (about.unfinished(need.task) if status == Status.INIT else there) < need.missing:
        return None
    text = f"{groups(there)} {be(there)} there, but {'its' if there == 1 else 'their'} status is {status}"
    if need.status != Status.COMPLETED:
        advice = f"Draw groups of that status (group_status={status.value!r}), or wait for {need.status} ones"
    else:
        text += ": put without a status, or prompts that nobody has generated yet"
        advice = (
            "Put results as COMPLETED (rollout.status, or put(status='completed')), and mark those that are there by "
            f"update({{'status': '{status}'}}, status='completed'); prompts need a worker that generates them"
        )
    return there, Cause(Reason.OTHER_STATUS, text, advice)


def _expired(need: Need, about: Circumstances) -> tuple[int, Cause] | None:
    there = about.count(need.task, Status.EXPIRED)
    before_put = about.put(need.task, Status.EXPIRED)
    put = about.put(need.task, Status.COMPLETED) + before_put
    lost = _lost(need, about, about.expired(need.task), put, share=1 / 2)
    advice = "Raise the stale threshold or sync the producers' weights sooner"
    step = about.steps.get(need.task)
    at = "" if step is None else f" at the refresh to train step {step}"
    if there and about.unfinished(need.task) >= need.missing:
        have, wait = ("has", "waits") if there == 1 else ("have", "wait")
        text = f"{groups(there)} {have} expired{at}, and {wait} to be generated again"
    elif lost is not None:
        bad, of, span = lost
        stale = "they grow stale faster than they are drawn"
        if 2 * (before_put.lately if span else before_put.ever) >= bad:
            at, stale = "", "they were too stale when they were put"
        text = f"{bad:,} of the {groups(of)} put{span} expired{at}: {stale}"
    else:
        return None
    kept = there or about.count(need.task, Status.EXPIRED, Tally.LEASED)
    again = "see that a producer generates them again"
    advice += f"; {again if kept else 'with expired_groups_retryable=True they are kept, to be generated again'}"
    return max(there, lost[0] if lost else 0), Cause(Reason.EXPIRED, text, advice)


_UNFIT = {
    Status.FILTERED: (Reason.FILTERED, "Look at what the filter drops", ""),
    Status.FAILED: (Reason.FAILED, "Look at the errors", ", and mend what makes them"),
}


def _unfit(need: Need, about: Circumstances, status: Status) -> tuple[int, Cause] | None:
    """FILTERED or FAILED groups, which are kept for SQL, explain a wait only if most puts became so."""
    reason, look, mend = _UNFIT[status]
    advice = f"{look} (replaybuf ls --status {status}){mend}"
    if not about.count(need.task, status):
        kept = "none of them is kept to look at; unfit=1000 in the config keeps what a strategy makes so"
        advice = f"{look}{mend}: {kept}, keep_unfit=True what you put"
    bad, good = about.put(need.task, status), about.put(need.task, Status.COMPLETED)
    if status == Status.FAILED:
        bad, good = bad + about.set_aside(need.task), good - about.spoilt(need.task)
    lost = _lost(need, about, bad, good, share=1)
    if lost is None:
        return None
    count, put, span = lost
    text = f"{count:,} of the {groups(count + put)} put{span}"
    if status == Status.FILTERED:
        return count, Cause(reason, f"{text} {'was filtered' if count == 1 else 'were filtered'}", advice)
    text += " failed"
    for did, who in (("made", about.failed_by), ("drawn", about.failed_with)):
        if by := who.get(need.task):
            names = sorted(by, key=lambda name: (-by[name], name))
            text += f", {did} by {joined([f'{named(name)} ({by[name]:,})' for name in names])}"
    if need.task in about.errors:
        text += f"; the last error: {brief(about.errors[need.task], _LONGEST)}"
    return count, Cause(reason, text, advice)


def _lost(need: Need, about: Circumstances, bad: Counted, put: Counted, share: float) -> tuple[int, int, str] | None:
    """Return the number lost, the number put, and the period in words, if losses explain the missing groups, else None.
    Recent losses come first, then all; in both cases at least this share of the puts."""
    whole = (bad.lately, put.lately) == (bad.ever, put.ever)
    if bad.lately < share * put.lately:
        return None
    if bad.lately >= need.missing and about.before is not None and not whole:
        lately = f"in the last {units.age(about.now - about.before.time)}"
        return bad.lately, put.lately, f" {since(about.before.time, None) if about.for_later else lately}"
    if bad.ever >= need.missing and bad.ever >= share * put.ever:
        return bad.ever, put.ever, ""
    return None


def _aborted(need: Need, about: Circumstances) -> tuple[int, Cause] | None:
    there = about.count(need.task, Status.ABORTED)
    if not there or about.unfinished(need.task) < need.missing:
        return None
    text = f"{groups(there)} {be(there)} aborted: interrupted, and {'waits' if there == 1 else 'wait'} to be continued"
    return there, Cause(Reason.ABORTED, text, "See that a producer continues them (produce_loop takes them first)")
