"""What keeps groups from a draw that the buffer has, or has had: limits, queries, leases, and what became of them.

Each cause is a function of what a draw needs and of the circumstances, and None where it doesn't hold.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from dataclasses import dataclass

from replaybuf import units
from replaybuf.rollouts.status import Status
from replaybuf.rules.circumstances import Circumstances, Counted, Held, Wait
from replaybuf.rules.reasons import Cause, Reason
from replaybuf.rules.tallies import Tally, levels
from replaybuf.rules.wording import brief, clock, groups, listed, until

#: Errors are quoted, and names compared, up to this length.
_LONGEST = 200
#: So many names are compared with one that isn't there.
_TASKS_COMPARED = 1000


@dataclass(frozen=True, slots=True)
class Need:
    """What a wait needs of one task: at least `least` groups, of which `there` are there.

    Of these, `matching` match the query, and `available` may be drawn now.
    """

    wait: Wait
    task: str
    least: int
    there: int
    matching: int
    available: int

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return what the wait needs of this task."""
        there = matching = about.count(task, wait.status)
        if wait.query is not None and about.matches is not None:
            matching = min(there, about.matches.get(task, 0))
        available = matching
        if wait.status == Status.COMPLETED and about.limits is not None:
            available = min(matching, about.limits.drawable(levels(about.tallies, [task])[task]))
        return cls(wait, task, wait.wants[task], there, matching, available)

    @property
    def missing(self) -> int:
        """The number of groups without which the wait goes on."""
        return max(0, self.least - self.available)

    @property
    def status(self) -> Status:
        """The status of the groups."""
        return self.wait.status

    @property
    def head(self) -> str:
        """The beginning of a sentence about it."""
        much = "Nothing" if self.available == 0 else "Too little"
        return f"{much} is ready for {brief(self.task)} ({self.available:,} of {self.least:,})"


def fenced(wait: Wait, about: Circumstances) -> Cause | None:
    """The buffer was restored while somebody waited."""
    restored, since = about.restored, wait.since
    if restored is None or since is None or restored.time <= since:
        return None
    step = "" if restored.step is None else f" to step {restored.step}"
    text = f"the buffer was restored{step} at {clock(restored.time)}, after this wait began, which fences it off"
    return Cause(Reason.FENCED, text, "It ends with a FencedError: build the buffer anew to join the restored run")


def too_large(need: Need, about: Circumstances) -> Cause | None:
    """The limits never allow a draw of this size."""
    limits = about.limits
    if limits is None or need.status != Status.COMPLETED:
        return None
    largest = limits.largest_batch
    if largest is None or need.least <= largest:
        return None
    if limits.capacity is not None and need.least > limits.capacity:
        why = f"the capacity is {limits.capacity:,}"
    else:
        why = f"{limits.rate} allows {largest:,} at once"
    return Cause(
        Reason.TOO_LARGE_A_BATCH,
        f"a batch of {need.least:,} is never there, because {why}",
        "Ask for fewer groups, or raise the limit",
    )


def no_such_task(need: Need, about: Circumstances) -> Cause | None:
    """Nothing was ever put into this task, but into others."""
    if about.knows(need.task) or not (tasks := about.tasks):
        return None
    comparable = [task for task in tasks[:_TASKS_COMPARED] if len(task) <= _LONGEST]
    near = difflib.get_close_matches(need.task[:_LONGEST], comparable, n=1, cutoff=0.5)
    meant = f"Did you mean {brief(near[0])}" if near else "Is it the name under which the producers put"
    there = f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"
    return Cause(Reason.NO_SUCH_TASK, f"nothing was ever put into this task; {there}", f"{meant}?")


def held_back(need: Need, about: Circumstances) -> Cause | None:
    """There are enough groups, but min_size or the rate limit doesn't let them go yet."""
    limits = about.limits
    if limits is None or need.status != Status.COMPLETED or need.available >= min(need.least, need.matching):
        return None
    level = levels(about.tallies, [need.task])[need.task]
    if level.completed < limits.min_size:
        more = f"{limits.min_size - level.completed:,} more have to be put"
    else:
        # Each put allows samples_per_insert more draws.
        more = f"{math.ceil(need.missing / (limits.samples_per_insert or 1.0)):,} more have to be put"
    text = f"{groups(level.completed, 'completed')} {_is(level.completed)} there, but {limits.why_slow(level)}: {more}"
    producers = "Start the producers again" if about.abandoned else "Wait for the producers"
    return Cause(Reason.HELD_BACK, text, f"{producers}, or lower the limit")


def no_match(need: Need, about: Circumstances) -> Cause | None:
    """There are enough groups, but not enough that match the query."""
    if need.wait.query is None or need.matching >= need.least or need.there <= need.matching:
        return None
    if need.there < need.least:
        return None
    match = "none matches" if need.matching == 0 else f"only {need.matching:,} match"
    return Cause(
        Reason.NO_MATCH,
        f"{groups(need.there, need.status)} {_is(need.there)} there, but {match} {brief(need.wait.query)}",
        "Relax the query, or wait for groups that match it",
    )


def leased(need: Need, about: Circumstances) -> Cause | None:
    """Others hold as many groups as are missing, and no new ones will be there before these might be back."""
    count = about.count(need.task, need.status, Tally.LEASED)
    if count < need.missing or not need.missing:
        return None
    held = [one for one in about.held if (one.task_name, one.status) == (need.task, need.status)]
    ends = max((one.until for one in held), default=about.now)
    if not about.abandoned and need.missing < about.rate(need.task, need.status) * (ends - about.now):
        return None
    every = f"all {count:,}" if need.there == 0 and count > 1 else f"{count:,} more"
    if need.there == 0 and count == 1:
        every = "the only"
    completed = f"{every} {need.status} group{'' if count == 1 else 's'} {_is(count)} leased"
    advice = "They come back when their lease is given back or ends; acknowledged ones don't"
    if need.wait.worker is not None and {one.holder for one in held} == {need.wait.worker}:
        advice = "The waiting worker holds them itself: acknowledge the batch, or give it back"
    return Cause(Reason.LEASED, f"{completed}{_by_holders(held, about.now)}", advice)


def _by_holders(held: list[Held], now: float) -> str:
    """Return by whom groups are held, and until when."""
    last: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for one in held:
        name = one.holder or "somebody without a name"
        last[name] = max(last[name], one.until)
        counts[name] += one.groups
    if not last:
        return ""
    names = sorted(last, key=lambda name: (-counts[name], name))
    if len(names) == 1:
        return f" by {brief(names[0])} {until(last[names[0]], now)}"
    shown = [f"{brief(name)} ({counts[name]:,})" for name in names]
    return f" by {listed(shown)}, the last {until(max(last.values()), now)}"


def spoilt(need: Need, about: Circumstances) -> list[Cause]:
    """Return what became of groups that were put and can't be drawn, what befell the most first."""
    if need.status != Status.COMPLETED or not need.missing:
        return []
    found = [_expired(need, about), *(_unfit(need, about, status) for status in _UNFIT), _aborted(need, about)]
    return [cause for _, cause in sorted((one for one in found if one), key=lambda one: -one[0])]


def _expired(need: Need, about: Circumstances) -> tuple[int, Cause] | None:
    there, at = about.count(need.task, Status.EXPIRED), _at_step(need, about)
    lost = _lost(need, about, about.expired(need.task), share=1 / 2)
    if there >= need.missing:
        have, wait = ("has", "waits") if there == 1 else ("have", "wait")
        text = f"{groups(there)} {have} expired{at}, and {wait} to be generated again"
    elif lost is not None:
        bad, put, span = lost
        text = f"{bad:,} of the {groups(put)} put{span} expired{at}: they grow stale faster than they are drawn"
    else:
        return None
    advice = "Raise the stale threshold or sync the producers' weights sooner; see that a producer generates them again"
    return max(there, lost[0] if lost else 0), Cause(Reason.EXPIRED, text, advice)


def _at_step(need: Need, about: Circumstances) -> str:
    step = about.steps.get(need.task)
    return "" if step is None else f" at the refresh to train step {step}"


_UNFIT = {
    Status.FILTERED: (Reason.FILTERED, "Look at what the filter drops (replaybuf ls --status filtered)"),
    Status.FAILED: (Reason.FAILED, "Look at the errors (replaybuf ls --status failed), and mend what makes them"),
}


def _unfit(need: Need, about: Circumstances, status: Status) -> tuple[int, Cause] | None:
    """Filtered and failed groups stay for SQL: they count only where most of what was put became so."""
    reason, advice = _UNFIT[status]
    bad = about.put(need.task, status)
    if status == Status.FAILED:
        bad += about.set_aside(need.task)
    lost = _lost(need, about, bad, share=1)
    if lost is None:
        return None
    count, put, span = lost
    text = f"{count:,} of the {groups(count + put)} put{span}"
    if status == Status.FILTERED:
        return count, Cause(reason, f"{text} {'was filtered' if count == 1 else 'were filtered'}", advice)
    text += " failed"
    if makers := about.failed_by.get(need.task):
        names = sorted(makers, key=lambda name: (-makers[name], name))
        text += f", made by {listed([f'{brief(name)} ({makers[name]:,})' for name in names])}"
    if need.task in about.errors:
        text += f"; the last error: {brief(about.errors[need.task], _LONGEST)}"
    return count, Cause(reason, text, advice)


def _lost(need: Need, about: Circumstances, bad: Counted, share: float) -> tuple[int, int, str] | None:
    """Return the groups that were lost in some way if that explains what is missing, those that were put, and since
    when: lately, or else ever. It does where they are at least this share of those put, also lately."""
    put = about.put(need.task, Status.COMPLETED)
    if bad.lately < share * put.lately:
        return None
    if bad.lately >= need.missing and about.before is not None:
        return bad.lately, put.lately, f" in the last {units.age(about.now - about.before.time)}"
    if bad.ever >= need.missing and bad.ever >= share * put.ever:
        return bad.ever, put.ever, ""
    return None


def _aborted(need: Need, about: Circumstances) -> tuple[int, Cause] | None:
    there = about.count(need.task, Status.ABORTED)
    if there < need.missing:
        return None
    text = f"{groups(there)} {_is(there)} aborted: interrupted, and {'waits' if there == 1 else 'wait'} to be continued"
    return there, Cause(Reason.ABORTED, text, "See that a producer continues them (produce_loop takes them first)")


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
