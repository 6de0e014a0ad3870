"""Explains why a draw or a put blocks: the one reason in a sentence, and what else is to be known as facts.

`diagnose` is given what is waited for, and the circumstances. Several causes may hold at once: the reason is the first
of those which, if it went away, would let the waiter go on; the others follow as facts. Where several tasks lack
groups, the sentence is about the one whose reason comes first in `Reason`.

Names, queries and error texts are shortened, and what could drive a terminal in them is escaped (`wording.brief`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replaybuf.rollouts.statuses import Status
from replaybuf.rules import causes, producing
from replaybuf.rules.causes import Cause, Need, Reason
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.transitions import Tally, levels
from replaybuf.rules.wording import ago, brief, groups, joined, listed, named, wanted

_TASKS_NAMED = 5
# Of more, the first ones are looked at: a wait for hundreds of tasks holds up the event loop for no longer.
_TASKS_EXPLAINED = 20
_ORDER = list(Reason)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something else to be known about a wait: another cause, if it has a reason, or numbers."""

    text: str
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason of a wait, a sentence for people, the task that it is about, and further facts.

    `recorded` is the sentence for who reads it later: with times of the day in place of ages.
    """

    reason: Reason
    sentence: str
    task_name: str | None = None
    facts: tuple[Fact, ...] = ()
    recorded: str = ""

    def __str__(self) -> str:
        return "; ".join([self.sentence.removesuffix("."), *(fact.text for fact in self.facts)])


def diagnose(wait: Wait, circumstances: Circumstances) -> Diagnosis:
    """Return why this wait isn't over, or that it could be over now (READY)."""
    later = _diagnose(wait, replace(circumstances, for_later=True))
    return replace(_diagnose(wait, circumstances), recorded=later.sentence)


def _diagnose(wait: Wait, circumstances: Circumstances) -> Diagnosis:
    if wait.kind == "room":
        return _of_room(wait, circumstances)
    if wait.kind == "trainer":
        return _of_trainer(wait, circumstances)
    needs = [Need.of(wait, task, circumstances) for task in wait.wants]
    lacking = [need for need in needs if need.missing]
    if not lacking:
        return _ready(needs, circumstances)
    explained = [(need, causes_of(need, circumstances)) for need in lacking[:_TASKS_EXPLAINED]]
    (need, (first, *others)), *rest = sorted(explained, key=lambda one: _ORDER.index(one[1][0].reason))
    facts = [Fact(line_of(need, circumstances))]
    facts += [Fact(cause.text, cause.reason) for cause in others]
    for other, (cause, *_) in rest[:_TASKS_NAMED]:
        facts += [Fact(f"{other.head}: {cause.text}", cause.reason), Fact(line_of(other, circumstances))]
    if len(lacking) > 1 + _TASKS_NAMED:
        facts.append(Fact(f"{len(lacking) - 1 - _TASKS_NAMED:,} more tasks lack groups"))
    return Diagnosis(first.reason, _sentence(need.head, first), need.task, (*facts, *_background(wait, circumstances)))


def causes_of(need: Need, about: Circumstances) -> list[Cause]:
    """Return the causes of a lack of groups, at least one; the first is the one to remove."""
    found = [
        causes.fenced(need.wait, about),
        causes.too_large(need, about),
        causes.no_such_task(need, about),
        causes.held_back(need, about),
        causes.no_match(need, about),
        causes.leased(need, about),
        producing.finished(need, about),
        ended := producing.end_of_dataset(need, about),
        None if ended else producing.deadlock(need, about),
        producing.producers_held_back(need, about),
        *causes.spoilt(need, about),
        producing.nothing_put(need, about),
        None if ended else producing.producers_silent(need, about),
    ]
    return [cause for cause in found if cause] or [producing.slow(need, about)]


def line_of(need: Need, about: Circumstances) -> str:
    """Return `task math: 12 of 64 completed groups (3 expired, 1 failed)`, and what holds them back."""
    task, status = need.task, need.status
    others = sorted(
        f"{n} {other}" for other in Status if other not in (status, Status.ARCHIVED) and (n := about.count(task, other))
    )
    hidden = sum(about.count(task, other, Tally.LEASED) for other in Status)
    others += [f"{hidden} leased"] if hidden else []
    if need.wait.query is not None:
        others.insert(0, f"{need.there} {status} before the where")
    rest = f" ({', '.join(others)})" if others else ""
    if not about.knows(task) and about.tasks:
        rest = f" (nothing was ever put there; {causes.there_are(about.tasks)})"
    there = need.there if need.wait.query is None else need.matching
    least = f"at least {need.least}" if need.wait.at_least else f"{need.least}"
    line = f"task {named(task)}: {there} of {least} {status} groups{rest}"
    if about.limits is not None and need.available < there:
        line += f", but {about.limits.why_slow(levels(about.tallies, [task])[task])}"
    return line


def _sentence(head: str, cause: Cause) -> str:
    end = cause.advice if cause.advice.endswith("?") else f"{cause.advice}."
    return f"{head}: {cause.text}. {end}" if cause.advice else f"{head}: {cause.text}."


def _ready(needs: Sequence[Need], about: Circumstances) -> Diagnosis:
    status = needs[0].status if needs else Status.COMPLETED
    there = {need.task: need.available for need in needs}
    text = f"Ready: {wanted(there, status)} can be drawn now."
    unknown = () if about.limits is not None else (Fact("the limits are unknown: no consumer has noted any"),)
    return Diagnosis(Reason.READY, text, needs[0].task if needs else None, unknown)


def _background(wait: Wait, about: Circumstances) -> list[Fact]:
    """Return who drew last, which others wait, and for what."""
    facts = []
    if last := about.last_take:
        who = "" if last.worker is None else f" by {named(last.worker)}"
        facts.append(Fact(f"last drawn: {groups(last.groups)}{who}, {ago(last.time, about.told_at)}"))
    if names := sorted({other.worker or "somebody" for other in about.consumers if other.worker != wait.worker}):
        facts.append(Fact(f"{listed(names)} {'waits' if len(names) == 1 else 'wait'} for groups, too"))
    return facts


# For room


def _of_room(wait: Wait, about: Circumstances) -> Diagnosis:
    limits, full = about.limits, []
    for task, count in wait.wants.items():
        level = levels(about.tallies, [task])[task]
        room = None if limits is None else limits.insertable(level, wait.status)
        if limits is None or (room is not None and room < count):
            full.append((task, "" if limits is None else limits.why_full(level, wait.status)))
    if cause := causes.fenced(wait, about):
        return Diagnosis(cause.reason, _sentence("Nothing can be put", cause))
    if not full:
        return Diagnosis(Reason.READY, f"Ready: there is room for {wanted(wait.wants, wait.status)}.")
    task, why = full[0]
    takers, advice, facts = _who_should_take(task, about)
    text = "; ".join(part for part in (why, takers) if part)
    cause = Cause(Reason.PRODUCERS_HELD_BACK, text, advice)
    return Diagnosis(cause.reason, _sentence(f"No room for {named(task)}", cause), task, tuple(facts))


def _who_should_take(task: str, about: Circumstances) -> tuple[str, str, list[Fact]]:
    """Return what the consumers of a full task do, what is to be done, and why those wait who should draw."""
    looser = [] if about.limits is None else causes.to_put(about.limits, levels(about.tallies, [task])[task])
    for other in sorted(about.consumers, key=lambda other: task not in other.wants):
        why = _diagnose(other, replace(about, matches=None))
        name = named(other.worker or "its consumer")
        text = f"{name}, which should draw them, waits itself for {wanted(other.wants, other.status)}"
        if other.query is not None:
            text += f" that match {brief(other.query)}"
        return (
            text,
            f"Both wait for each other: {joined(['let the consumer ask for less', *looser], link='or')}",
            [Fact(why.sentence, why.reason)],
        )
    takers = [one for one in about.workers if one.taken]
    alive = [one for one in takers if one.is_alive(about.now)]
    last = about.last_take
    drawn = f"the last draw was {ago(last.time, about.told_at)}" if last is not None else ""
    if alive:
        names = listed(dict.fromkeys(one.name for one in alive))
        return f"{names} should draw them{', and ' if drawn else ''}{drawn}", "Wait for the consumer", []
    if takers:
        return f"no consumer is left: {producing.ends_of(takers, about.told_at)}", "Start the trainer again", []
    return drawn or "nobody has drawn any yet", "Is the consumer running?", []


# For the trainer


def _of_trainer(wait: Wait, about: Circumstances) -> Diagnosis:
    state, head, waiting = about.trainer, "There is nothing to do for the workers", about.consumers
    if cause := causes.fenced(wait, about):
        return Diagnosis(cause.reason, _sentence(head, cause))
    why = [_diagnose(other, replace(about, matches=None)) for other in waiting]
    ended = [one.task_name for one in why if one.reason == Reason.END_OF_DATASET] if why else sorted(about.datasets)
    if state is not None and state.finished:
        cause = Cause(Reason.FINISHED, "the trainer has published that it has finished", "Stop them")
    elif ended and ended[0] is not None:
        advice = "They end when the trainer has published that it has finished"
        cause = Cause(Reason.END_OF_DATASET, producing.prompts_of(ended[0], about), advice)
    elif waiting:
        names = listed(sorted({other.worker or "the trainer" for other in waiting}))
        lacks = wanted(waiting[0].wants, waiting[0].status)
        text = f"deadlock: {names}, which has published {about.news}, waits itself for {lacks}"
        cause = Cause(Reason.DEADLOCK, text, producing.publishing(about))
    else:
        takers = [one for one in about.workers if one.taken]
        gone = takers and not any(one.is_alive(about.now) for one in takers)
        text = f"the trainer has published {about.news}"
        text += f", and is gone: {producing.ends_of(takers, about.told_at)}" if gone else ""
        cause = Cause(Reason.WAITS_FOR_TRAINER, text, "Start the trainer again" if gone else "Is it running?")
    return Diagnosis(cause.reason, _sentence(head, cause), None, tuple(_background(wait, about)))
