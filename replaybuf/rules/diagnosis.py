"""Explains why a draw or a put blocks: one reason as a sentence, and further facts.

`diagnose` takes the wait and the circumstances, and finds the causes in the table of `causes`. The reason is the first
that holds; the others follow as one fact. If several tasks lack groups, the sentence is about one for which no more can
come, or else the one whose reason comes first in `Reason`. It is the same in logs, errors and events, on the command
line and on the page.

Names, queries and error texts are shortened, and control characters in them escaped (`brief`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.causes import DRAWS, FENCED
from replaybuf.rules.circumstances import Circumstances, Wait, brief, clock, groups, listed, named, wanted
from replaybuf.rules.needs import (
    OF_THE_GONE,
    PATIENCE,
    Cause,
    Found,
    Need,
    Reason,
    Said,
    are,
    causes_of,
    ends_of,
    gone_with,
    news_of,
    prompts_of,
    there_are,
    to_publish,
    to_put,
)
from replaybuf.rules.transitions import Tally

_TASKS_NAMED = 5
# Of more tasks, only the first are explained: a wait for hundreds of tasks must not block the event loop.
_TASKS_EXPLAINED = 20


@dataclass(frozen=True, slots=True)
class Fact:
    """A further fact about a wait: other causes, if it has a reason (that of the first), or numbers."""

    text: str
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason of a wait, its sentence for people, the task it is about, and further facts.

    `final`: nothing that the producers may still do ends the wait; the caller has to ask for something else.
    """

    reason: Reason
    sentence: str
    task_name: str | None = None
    facts: tuple[Fact, ...] = ()
    final: bool = False

    def __str__(self) -> str:
        return "; ".join([self.sentence.removesuffix("."), *(fact.text for fact in self.facts)])


def diagnose(wait: Wait, about: Circumstances) -> Diagnosis:
    """Return why this wait goes on, or READY if it could end now."""
    if wait.kind == "room":
        return _of_room(wait, about)
    if wait.kind == "trainer":
        return _of_trainer(wait, about)
    needs = [Need.of(wait, task, about) for task in wait.wants]
    lacking = [need for need in needs if need.missing]
    if not lacking:
        return _ready(needs, about)
    explained = [(need, causes_of(need, DRAWS)) for need in lacking[:_TASKS_EXPLAINED]]
    (need, (first, *others)), *rest = sorted(explained, key=lambda one: one[1][0].precedence)
    also = [(cause.text, cause.cause.reason) for cause in others]
    also += [(f"{other.head}: {cause.text}", cause.cause.reason) for other, (cause, *_) in rest[:_TASKS_NAMED]]
    facts = [Fact(line_of(need))]
    facts += [Fact("; ".join(text for text, _ in also), also[0][1])] if also else []
    facts += [Fact(line_of(other)) for other, _ in rest[:_TASKS_NAMED]]
    if len(lacking) > 1 + _TASKS_NAMED:
        facts.append(Fact(f"{len(lacking) - 1 - _TASKS_NAMED:,} more tasks lack groups"))
    facts += _background(wait, about)
    return Diagnosis(first.cause.reason, first.sentence(need.head), need.task, tuple(facts), first.cause.final)


def line_of(need: Need) -> str:
    """Return `task math: 12 completed groups are there, 64 needed (3 expired)`, and the limit that blocks them."""
    about, task, status = need.about, need.task, need.status
    others = sorted(
        f"{n} {other}" for other in Status if other not in (status, Status.ARCHIVED) and (n := about.count(task, other))
    )
    hidden = sum(about.count(task, other, Tally.LEASED) for other in Status)
    others += [f"{hidden} leased"] if hidden else []
    there = need.there
    if need.wait.query is not None:
        there = need.matching
        others.insert(0, f"{need.there} {status} before the where")
    rest = f" ({', '.join(others)})" if others else ""
    if not about.knows(task) and about.tasks:
        rest = f" (nothing was ever put there; {there_are(about.tasks)})"
    least = f"at least {need.least:,}" if need.wait.at_least else f"{need.least:,}"
    line = f"task {named(task)}: {groups(there, status)} there, {least} needed{rest}"
    if about.limits is not None and need.available < there:
        line += f", but {about.limits.why_slow(need.level)}"
    return line


def _ready(needs: Sequence[Need], about: Circumstances) -> Diagnosis:
    status = needs[0].status if needs else Status.COMPLETED
    there = {need.task: need.available for need in needs}
    text = f"Ready: {wanted(there, status)} can be drawn now."
    unknown = () if about.limits is not None else (Fact("the limits are unknown: no consumer has noted any"),)
    return Diagnosis(Reason.READY, text, needs[0].task if needs else None, unknown)


def _background(wait: Wait, about: Circumstances) -> list[Fact]:
    """Return the last draw and the other waiting consumers."""
    facts = []
    if last := about.last_take:
        who = "" if last.worker is None else f" by {named(last.worker)}"
        facts.append(Fact(f"last drawn: {groups(last.groups)}{who} at {clock(last.time, about.now)}"))
    if names := sorted({other.worker or "somebody" for other in about.consumers if other.worker != wait.worker}):
        facts.append(Fact(f"{listed(names)} {'waits' if len(names) == 1 else 'wait'} for groups, too"))
    return facts


# Waits for room


def _of_room(wait: Wait, about: Circumstances) -> Diagnosis:
    """Return the diagnosis of the first full task, with that of the wait of the consumer which should draw it."""
    if found := FENCED.found(Need(wait, "", about)):
        return Diagnosis(Reason.FENCED, found.sentence("Nothing can be put"))
    for task, count in wait.wants.items():
        need, limits = Need(wait, task, about), about.limits
        room = 0 if limits is None else limits.insertable(need.level, wait.status)
        if room is None or room >= count:
            continue
        limit = "" if limits is None else f"{limits.why_full(need.level, wait.status)}; "
        others = sorted(about.consumers, key=lambda other: task not in other.wants)[:1]
        who, advice = _who_should_take(need, others[0] if others else None)
        sentence = Found(FENCED, limit + who, advice).sentence(f"No room for {named(task)}")
        why = [diagnose(other, replace(about, matches=None)) for other in others]
        return Diagnosis(Reason.HELD_BACK, sentence, task, tuple(Fact(one.sentence, one.reason) for one in why))
    return Diagnosis(Reason.READY, f"Ready: there is room for {wanted(wait.wants, wait.status)}.")


def _who_should_take(need: Need, other: Wait | None) -> tuple[str, str]:
    """Return what a full task's consumers do, and the advice."""
    about = need.about
    if other is not None:
        match = "" if other.query is None else f" that match {brief(other.query)}"
        lacks = wanted(other.wants, other.status) + match
        looser = "" if about.limits is None else f" or {to_put(about.limits, need.level)}"
        text = f"{named(other.worker or 'its consumer')}, which should draw them, waits itself for {lacks}"
        return text, f"Both wait for each other: let the consumer ask for less{looser}"
    takers = [one for one in about.workers if one.taken]
    alive = [one.name for one in takers if one.is_alive(about.now)]
    last = about.last_take
    drawn = "nobody has drawn any yet" if last is None else f"the last draw was at {clock(last.time, about.now)}"
    if alive:
        return f"{listed(dict.fromkeys(alive))} should draw them, and {drawn}", "Wait for the consumer"
    if takers:
        return f"no consumer is left: {ends_of(takers, about.now)}", "Start the trainer again"
    return drawn, "Is the consumer running?"


# Waits for the trainer


def _has_finished(need: Need) -> Said:
    trainer = need.about.trainer
    return "the trainer has published that it has finished" if trainer is not None and trainer.finished else None


def _no_prompt_left(need: Need) -> Said:
    """The datasets of all tasks of which the trainer lacks groups have ended; if it does not wait, that of any task."""
    ended = sorted(need.about.datasets)
    consumers = need.about.consumers
    wants = {task for other in consumers for task in other.wants if Need.of(other, task, need.about).missing}
    return "; ".join(prompts_of(task, need.about) for task in ended) if wants <= set(ended) and ended else None


def _groups_come(need: Need) -> Said:
    """The trainer waits for groups of which some are being generated, or are leased by a worker that is gone."""
    for other in need.about.consumers:
        lacking = [one for task in other.wants if (one := Need.of(other, task, need.about)).missing]
        who, lacks = named(other.worker or "the trainer"), wanted(other.wants, other.status)
        if flying := sum(one.flying for one in lacking):
            return f"{who} waits itself for {lacks}, and {are(flying)} being generated", PATIENCE
        if gone := next(filter(None, map(gone_with, lacking)), None):
            return f"{who} waits itself for {lacks}, and {gone}", OF_THE_GONE
    return None


def _trainer_waits(need: Need) -> Said:
    about, waiting = need.about, need.about.consumers
    if not waiting:
        return None
    names = listed(sorted({other.worker or "the trainer" for other in waiting}))
    lacks = wanted(waiting[0].wants, waiting[0].status)
    text = f"deadlock: {names}, which has published {news_of(about)}, waits itself for {lacks}"
    return text, to_publish(about)


def _trainer_absent(need: Need) -> Said:
    about, text = need.about, f"the trainer has published {news_of(need.about)}"
    takers = [one for one in about.workers if one.taken]
    if not takers or any(one.is_alive(about.now) for one in takers):
        return text, "Is it running?"
    return f"{text}, and is gone: {ends_of(takers, about.now)}", "Start the trainer again"


_TRAINER = (
    FENCED,
    Cause(Reason.FINISHED, _has_finished, "Stop them"),
    Cause(Reason.FINISHED, _no_prompt_left, "They end when the trainer has published that it has finished"),
    Cause(Reason.LEASED, _groups_come),
    Cause(Reason.DEADLOCK, _trainer_waits),
    Cause(Reason.ABSENT, _trainer_absent),
)


def _of_trainer(wait: Wait, about: Circumstances) -> Diagnosis:
    first, *_ = causes_of(Need(wait, "", about), _TRAINER)
    sentence = first.sentence("There is nothing to do for the workers")
    return Diagnosis(first.cause.reason, sentence, None, tuple(_background(wait, about)))
