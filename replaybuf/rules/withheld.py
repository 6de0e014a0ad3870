"""Why groups that are there can't be drawn: a restore, limits, a wrong task, a query, leases."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Sequence

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.causes import Cause, Need, Reason, be
from replaybuf.rules.circumstances import Circumstances, Held, Wait
from replaybuf.rules.loosening import to_draw
from replaybuf.rules.transitions import Tally, levels
from replaybuf.rules.wording import brief, clock, groups, joined, listed, named, until

#: Names are compared up to this length, so many of them with one that isn't there.
_LONGEST, _TASKS_COMPARED = 200, 1000


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
        why, option = f"the capacity is {limits.capacity:,}", "raise the capacity"
    else:
        why, option = f"{limits.rate} allows {largest:,} at once", "widen error_buffer"
    return Cause(
        Reason.TOO_LARGE_A_BATCH,
        f"a batch of {need.least:,} is never there, because {why}",
        f"Ask for fewer groups, or {option}",
    )


def no_such_task(need: Need, about: Circumstances) -> Cause | None:
    """Nothing was ever put into this task, but into others."""
    if about.knows(need.task) or not (tasks := about.tasks):
        return None
    return Cause(Reason.NO_SUCH_TASK, *never_put(need.task, tasks))


def never_put(name: str, tasks: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong with the name of a task that never had a group, where others had, and which was meant."""
    comparable = [task for task in tasks[:_TASKS_COMPARED] if len(task) <= _LONGEST]
    near = difflib.get_close_matches(name[:_LONGEST], comparable, n=1, cutoff=0.5)
    meant = f"Did you mean {named(near[0])}" if near else "Is it the name under which the producers put"
    return f"nothing was ever put into this task; {there_are(tasks)}", f"{meant}?"


def there_are(tasks: Sequence[str]) -> str:
    """Return which tasks there are."""
    return f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"


def held_back(need: Need, about: Circumstances) -> Cause | None:
    """There are enough groups, but min_size or the rate limit doesn't let them go yet."""
    limits = about.limits
    if limits is None or need.status != Status.COMPLETED or need.available >= min(need.least, need.matching):
        return None
    level = levels(about.tallies, [need.task])[need.task]
    more, rate = limits.min_size - level.completed, limits.rate
    if more <= 0 and rate is not None:  # each put allows samples_per_insert more draws
        more = math.ceil((need.least - rate.drawable(level)) / rate.samples_per_insert)
    text = f"{groups(level.completed, 'completed')} {be(level.completed)} there, but {limits.why_slow(level)}"
    producers = "Start the producers again" if about.abandoned else "Wait for the producers"
    return Cause(
        Reason.HELD_BACK,
        f"{text}: {more:,} more {'has' if more == 1 else 'have'} to be put",
        joined([producers, *to_draw(limits, level, need.least)], link="or"),
    )


def no_match(need: Need, about: Circumstances) -> Cause | None:
    """There are enough groups, but not enough that match the query; or none of those that are there does."""
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
    """Consumers hold as many groups as are missing.

    Where the waiting worker itself does, groups that come in sooner are the better reason: it holds a batch, and waits
    for the next one.
    """
    count = about.count(need.task, need.status, Tally.LEASED)
    if count < need.missing or not need.missing:
        return None
    held = [one for one in about.held if (one.task_name, one.status) == (need.task, need.status)]
    ends = max((one.until for one in held), default=about.now)
    own = [one for one in held if one.holder == need.wait.worker and not _is_of_earlier(one, need.wait)]
    if count - sum(one.groups for one in own) < need.missing < about.rate(need.task, need.status) * (ends - about.now):
        return None
    every = f"all {count:,}" if need.there == 0 and count > 1 else f"{count:,} more"
    if need.there == 0 and count == 1:
        every = "the only"
    completed = f"{every} {need.status} group{'' if count == 1 else 's'} {be(count)} leased"
    return Cause(Reason.LEASED, f"{completed}{_by_holders(held, need.wait, about)}", _to_get_back(held, own, need.wait))


def _is_of_earlier(one: Held, wait: Wait) -> bool:
    """Return whether an earlier process leased these under the name of the one that waits."""
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
    """Return by whom groups are held, and until when."""
    last: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for one in held:
        name = "somebody without a name" if one.holder is None else named(one.holder)
        name = f"an earlier process of {name}" if _is_of_earlier(one, wait) else name
        last[name] = max(last[name], one.until)
        counts[name] += one.groups
    if not last:
        return ""
    names = sorted(last, key=lambda name: (-counts[name], name))
    if len(names) == 1:
        return f" by {names[0]} {until(last[names[0]], about.told_at)}"
    shown = [f"{name} ({counts[name]:,})" for name in names]
    return f" by {joined(shown)}, the last {until(max(last.values()), about.told_at)}"
