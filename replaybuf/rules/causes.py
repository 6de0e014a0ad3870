"""Causes of waits for groups, as a table: when each holds and its sentence, and the advice.

The first column of `DRAWS` is the reason, the second a function that returns the sentence for a need, or None if this
isn't a cause, and the third the advice; if that varies, the function returns both.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replaybuf import units
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import (
    LIVE_SECONDS,
    SILENT_SECONDS,
    Circumstances,
    Counted,
    Wait,
    Worker,
    brief,
    clock,
    groups,
    joined,
    listed,
    named,
)
from replaybuf.rules.limits import Level, Limits
from replaybuf.rules.transitions import Tally, levels


class Reason(StrEnum):
    """Why a call waits; READY if it needn't. The names are stable.

    The order is that of precedence: of several tasks, the one whose reason comes first is explained.
    """

    FENCED = "fenced"  # the buffer was restored since the wait began
    NO_SUCH_TASK = "no_such_task"  # nothing was ever put into it, but into other tasks
    HELD_BACK = "held_back"  # a limit: no draw is allowed, or there is no room
    NO_MATCH = "no_match"  # there are groups, but they don't match the query
    LEASED = "leased"  # consumers hold the groups
    FINISHED = "finished"  # no more groups come: the dataset was read to its end, or the trainer has finished
    DEADLOCK = "deadlock"  # producers and trainer wait for each other
    EXPIRED = "expired"  # the groups have expired
    UNFIT = "unfit"  # the groups were filtered, or failed
    OTHER_STATUS = "other_status"  # there are groups, but they are INIT, aborted, or of another status
    ABSENT = "absent"  # who should put, or publish, was never there, is gone, or does nothing
    SLOW = "slow"  # groups arrive or are generated, or are needed from producers that are alive
    READY = "ready"


#: Groups that arrive within this many seconds cover what is missing: then nothing else is the reason.
_SOON_SECONDS = 3600.0
#: Producers that are alive, but have put nothing for so long and generate nothing, do nothing.
_IDLE_SECONDS = 600.0
#: The maximum length of compared names and quoted errors, and the number of tasks compared with an unknown name.
_LONGEST, _TASKS_COMPARED = 200, 1000

PATIENCE = "Wait, ask for fewer groups, or start more producers"


@dataclass(frozen=True, slots=True)
class Need:
    """The need of a wait in one task: at least `least` groups, of which `there` exist.

    Of the existing ones, `matching` match the query, and `available` may be drawn now.
    """

    wait: Wait
    task: str
    about: Circumstances
    least: int = 0
    there: int = 0
    matching: int = 0
    available: int = 0

    @classmethod
    def of(cls, wait: Wait, task: str, about: Circumstances) -> Need:
        """Return the need of a wait for groups in this task."""
        there = matching = about.count(task, wait.status)
        if wait.query is not None and about.matches is not None:
            matching = min(there, about.matches.get(task, 0))
        available = matching
        if wait.status == Status.COMPLETED and about.limits is not None:
            available = min(matching, about.limits.drawable(levels(about.tallies, [task])[task]))
        return cls(wait, task, about, wait.wants[task], there, matching, available)

    @property
    def missing(self) -> int:
        """The number of available groups that the wait lacks."""
        return max(0, self.least - self.available)

    @property
    def status(self) -> Status:
        """The status of the needed groups."""
        return self.wait.status

    @property
    def level(self) -> Level:
        """The counts to which limits apply."""
        return levels(self.about.tallies, [self.task])[self.task]

    @property
    def rate(self) -> float:
        """The groups per second that arrive: none if only the waiting worker puts, and has put none since it waits."""
        last, since = self.about.last(self.task), self.wait.since
        if self.puts_alone and since is not None and (last is None or last <= since):
            return 0.0
        return self.about.rate(self.task, self.status)

    @property
    def puts_alone(self) -> bool:
        """Whether the waiting worker is the only live producer."""
        return {one.name for one in self.about.alive} == {self.wait.worker}

    @property
    def flying(self) -> int:
        """The groups that live producers generate."""
        return 0 if self.about.abandoned else self.about.in_flight(self.task, self.status)

    @property
    def is_covered(self) -> bool:
        """Whether what arrives, or is generated and will pass as earlier groups did, covers what is missing."""
        if self.rate and self.missing / self.rate <= _SOON_SECONDS:
            return True
        good, bad = (sum(self.about.put(self.task, one).lately for one in some) for some in (_FIT, _UNFIT))
        return self.flying * (good / (good + bad) if bad else 1) >= self.missing

    @property
    def head(self) -> str:
        """The beginning of a sentence about the need."""
        much = "Nothing" if self.available == 0 else "Too little"
        return f"{much} is ready for {named(self.task)} ({self.available:,} of {self.least:,})"


_FIT, _UNFIT = (Status.COMPLETED,), (Status.FILTERED, Status.FAILED)

#: A sentence, or a sentence and the advice; None if the cause doesn't hold.
Said = str | tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of a table of causes.

    A cause that `yields` is no reason while the groups that arrive cover what is missing. A `final` one ends with
    nothing that the producers may still do.
    """

    reason: Reason
    of: Callable[[Need], Said]
    advice: str = ""
    yields: bool = False
    final: bool = False

    def found(self, need: Need) -> Found | None:
        """Return the cause in words, None if it doesn't hold."""
        said = self.of(need)
        return None if said is None else Found(self, *((said, self.advice) if isinstance(said, str) else said))


@dataclass(frozen=True, slots=True)
class Found:
    """A cause that holds, in words."""

    cause: Cause
    text: str
    advice: str

    @property
    def precedence(self) -> tuple[bool, int]:
        """The order of the causes of several tasks."""
        return not self.cause.final, [*Reason].index(self.cause.reason)

    def sentence(self, head: str) -> str:
        """Return the sentence of the diagnosis, which begins with `head`."""
        end = self.advice if not self.advice or self.advice.endswith("?") else f"{self.advice}."
        return f"{head}: {self.text}. {end}".rstrip()


def causes_of(need: Need, table: Iterable[Cause]) -> list[Found]:
    """Return the causes of a table that hold, the reason first."""
    found = [one for cause in table if (one := cause.found(need))]
    slow = [one for one in found if one.cause.reason == Reason.SLOW][:1]
    others = [one for one in found if one.cause.reason != Reason.SLOW]
    covered = bool(slow) and all(one.cause.yields for one in others) and need.is_covered
    return [*slow, *others] if covered else others or slow


# Words


def _are(count: int, status: str = "") -> str:
    return f"{groups(count, status)} {'is' if count == 1 else 'are'}"


def people(names: Iterable[str], one: str, several: str) -> str:
    """Return the names with the verb for their number."""
    unique = list(dict.fromkeys(names))
    return f"{listed(unique)} {one if len(unique) == 1 else several}"


def ends_of(workers: Sequence[Worker], now: float) -> str:
    """Return when each worker ended or was last seen, in words; the latest first."""
    latest = {one.name: one for one in sorted(workers, key=lambda one: one.seen_at)}
    ends = []
    for one in sorted(latest.values(), key=lambda one: -one.seen_at):
        did = (
            "ended" if one.ended_at is not None else "was killed: last seen" if one.killed else "went silent: last seen"
        )
        ends.append(f"{named(one.name)} {did} at {clock(one.ended_at or one.seen_at, now)}")
    return joined(ends)


def _waiters(about: Circumstances, kind: str, what: str) -> str | None:
    """Return `gen-1 and gen-2 wait for room since 20:42:10 UTC` if every live producer does; otherwise None."""
    waits = [wait for wait in about.waits if wait.kind == kind]
    names = {wait.worker for wait in waits}
    if not waits or any(one.name not in names for one in about.alive):
        return None
    began = min((wait.since for wait in waits if wait.since is not None), default=about.now)
    who = people(sorted(name or "a producer" for name in names), "waits", "wait")
    return f"{who} for {what} since {clock(began, about.now)}"


def news_of(about: Circumstances) -> str:
    """Return what the trainer has published, for sentences about a wait for more."""
    return "nothing yet" if about.trainer is None else f"nothing since step {about.trainer.train_step}"


def to_publish(about: Circumstances) -> str:
    """Return the advice for a trainer whose workers wait for it to publish."""
    if about.trainer is None:
        return "Publish the trainer's state (publish) before waiting for a batch"
    return "Publish newer weights (publish), or ask for no more groups than the workers keep ready (their batch_size)"


# Limits


def to_put(limits: Limits, level: Level) -> str:
    """Return the option to change so that puts of completed groups which the limits block are allowed."""
    full = limits.capacity is not None and limits.on_full != "evict" and level.completed >= limits.capacity
    return "raise the capacity" if full or limits.rate is None else "widen error_buffer"


def too_large(limits: Limits, task: str, status: Status, count: int) -> tuple[str, str] | None:
    """Return why a batch of `count` groups can never be drawn and the advice, or None if it can."""
    most = limits.largest_batch
    if most is None or count <= most or status != Status.COMPLETED:
        return None
    why, option = f"the capacity is {limits.capacity:,}" if limits.capacity else "", "raise the capacity"
    if not limits.capacity or count <= limits.capacity:
        wide = "a range of twice" if isinstance(limits.error_buffer, tuple) else "at least"
        why, option = f"{limits.rate} allows {most:,} at once", f"set error_buffer to {wide} the size of a batch"
    return (
        f"a batch of {count:,} groups of task {named(task)} would wait for ever: {why}",
        f"Ask for fewer groups, or {option}",
    )


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
    text = f"{_are(level.completed, 'completed')} there, but {limits.why_slow(level)}"
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


def never_put(name: str, tasks: Sequence[str]) -> tuple[str, str]:
    """Return what is wrong with a task's name that never had a group, and the name that was probably meant."""
    comparable = [task for task in tasks[:_TASKS_COMPARED] if len(task) <= _LONGEST]
    near = difflib.get_close_matches(name[:_LONGEST], comparable, n=1, cutoff=0.5)
    meant = f"Did you mean {named(near[0])}" if near else "Is it the name under which the producers put"
    return f"nothing was ever put into this task; {there_are(tasks)}", f"{meant}?"


def there_are(tasks: Sequence[str]) -> str:
    """Return the existing tasks, in words."""
    return f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"


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
    return f"{_are(need.there, need.status)} there, but {match} {brief(query)}{tag}", advice


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


def prompts_of(task: str, about: Circumstances) -> str:
    """Return the state of the prompts of a dataset that was read to its end, in words, from its prompt ledger."""
    drawn, waiting, flying = about.datasets[task], about.unfinished(task), about.in_flight(task)
    lost = about.in_flight(task, alive=False) - flying
    done = drawn - flying - waiting - lost
    parts = [f"{done:,} {'is' if done == 1 else 'are'} finished", f"{flying:,} in flight"]
    parts += [f"{waiting:,} to be handed out again"] if waiting else []
    parts += [f"{lost:,} leased by workers that are gone"] if lost else []
    return f"no prompt of {named(task)} is left in the dataset: of the {drawn:,} drawn, {joined(parts, len(parts))}"


# Producers that wait


def _deadlock(need: Need) -> Said:
    who = _waiters(need.about, "trainer", "the trainer")
    if who is None or need.task in need.about.datasets:
        return None
    text = f"deadlock: {who}, which has published {news_of(need.about)}, while it waits for their groups"
    return text, to_publish(need.about)


def _no_room(need: Need) -> Said:
    about = need.about
    if (who := _waiters(about, "room", "room")) is None:
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
        text += f"; the last error: {brief(about.errors[task], _LONGEST)}"
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
    return f"{_are(there)} aborted: interrupted, and {'waits' if there == 1 else 'wait'} to be continued"


_OF_PROMPTS = (Tally.LEASED, Tally.RETURNED, Tally.LEASE_EXPIRED, Tally.REPLACED)


def _init(need: Need) -> Said:
    """INIT groups are prompts of a ledger if some were leased, else perhaps results without a status."""
    about, task = need.about, need.task
    there = about.count(task, Status.INIT)
    if not there or (about.unfinished(task) < need.missing and about.put(task, need.status).ever):
        return None
    text = f"{_are(there)} there, but {'its' if there == 1 else 'their'} status is init"
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
    text = f"{_are(there)} there, but {'its' if there == 1 else 'their'} status is {status}"
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
        parts.append(f"{_are(flying)} being generated")
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
