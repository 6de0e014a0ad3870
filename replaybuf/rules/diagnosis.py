"""Explains why a draw or a put blocks: one reason as a sentence, and further facts.

`diagnose` takes the wait and the circumstances. Several causes may hold at once: the reason is the first cause in order
of precedence; the others follow as facts. If several tasks lack groups, the sentence is about the task whose reason
comes first in `Reason`. Causes of missing puts (what the producers do, and what they wait for) are here, the others in
`causes`.

Names, queries and error texts are shortened, and control characters in them escaped (`brief`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replaybuf import units
from replaybuf.rollouts.statuses import Status
from replaybuf.rules import causes
from replaybuf.rules.causes import Cause, Need, Reason, be, to_put
from replaybuf.rules.circumstances import (
    LIVE_SECONDS,
    Circumstances,
    Wait,
    Worker,
    ago,
    at,
    brief,
    clock,
    groups,
    joined,
    listed,
    named,
    since,
    wanted,
)
from replaybuf.rules.transitions import Tally, levels

#: Producers that are alive, but have put nothing for so long and have nothing in flight, are called silent.
_IDLE_SECONDS = 600.0
PATIENCE = "Wait, ask for fewer groups, or start more producers"
_START = "Start the producers, or see that they use the same url, name and task"


def finished(need: Need, about: Circumstances) -> Cause | None:
    """The trainer has published that it has finished."""
    if about.trainer is None or not about.trainer.finished or about.alive:  # live producers go on regardless
        return None
    text = f"the trainer has published that it has finished (step {about.trainer.train_step}), so the workers stop"
    return Cause(Reason.FINISHED, text, "Publish a state that isn't finished, and start workers, to go on")


def end_of_dataset(need: Need, about: Circumstances) -> Cause | None:
    """All prompts of the task's dataset were drawn, and fewer groups are unfinished than are missing."""
    if need.status != Status.COMPLETED or need.task not in about.datasets:
        return None
    to_come = about.in_flight(need.task, need.status) + about.unfinished(need.task)
    if to_come >= need.missing:
        return None
    text, left = prompts_of(need.task, about), need.available + to_come
    advice = f"Ask for fewer groups (at_least={left}), read the dataset for more epochs, or end the run"
    if not left:
        text += ": nothing is left to draw, so the run is finished"
        advice = "End it, or read the dataset for more epochs"
    return Cause(Reason.END_OF_DATASET, text, advice)


def prompts_of(task: str, about: Circumstances) -> str:
    """Return the state of the prompts of a dataset that was read to its end, in words, from its prompt ledger."""
    drawn, waiting = about.datasets[task], about.unfinished(task)
    flying = about.in_flight(task)
    parts = [f"{drawn - flying - waiting:,} {be(drawn - flying - waiting)} finished", f"{flying:,} in flight"]
    parts += [f"{waiting:,} to be handed out again"] if waiting else []
    return f"no prompt is left in the dataset: of the {drawn:,} drawn, {', '.join(parts[:-1])} and {parts[-1]}"


def deadlock(need: Need, about: Circumstances) -> Cause | None:
    """All producers wait for the trainer to publish, while it waits for groups."""
    if not (waiting := _all_wait(about, "trainer")):
        return None
    text = f"deadlock: {_waiters(waiting, about)} for the trainer, which has published {about.news}, while it waits for"
    return Cause(Reason.DEADLOCK, f"{text} their groups", publishing(about))


def publishing(about: Circumstances) -> str:
    """Return the advice for a trainer whose workers wait for it to publish."""
    if about.trainer is None:
        return "Publish the trainer's state (publish) before waiting for a batch"
    return "Publish newer weights (publish), or ask for no more groups than the workers keep ready (their batch_size)"


def producers_held_back(need: Need, about: Circumstances) -> Cause | None:
    """All producers wait for room."""
    if not (waiting := _all_wait(about, "room")):
        return None
    tasks = sorted({task for wait in waiting for task in wait.wants})
    full = [f"{groups(about.count(task, Status.COMPLETED), 'completed')} of {named(task)}" for task in tasks]
    text = f"{_waiters(waiting, about)} for room, with {joined(full)} there"
    advice = f"Draw {listed(tasks)} first"
    if need.task in tasks:
        advice = "Draw those groups (with another query, or fewer at once)"
    if tasks and about.limits is not None:
        advice = joined([advice, *to_put(about.limits, levels(about.tallies, tasks)[tasks[0]])], link="or")
    return Cause(Reason.PRODUCERS_HELD_BACK, text, advice)


def nothing_put(need: Need, about: Circumstances) -> Cause | None:
    """Nothing was ever put into any task."""
    if about.tasks:
        return None
    known = [one.name for one in about.workers if one.is_alive(about.now) and one.name != need.wait.worker]
    who = f"; {listed(known)} {'has' if len(known) == 1 else 'have'} it open" if known else ""
    return Cause(Reason.NOTHING_PUT, f"nothing was ever put into this buffer{who}", _START)


def producers_silent(need: Need, about: Circumstances) -> Cause | None:
    """All producers have ended or were killed, or they are alive and idle."""
    known, alive, last = about.producers, about.alive, about.last_put.get(need.task)
    if not known:
        if last is None or about.now - last < _IDLE_SECONDS:
            return None
        text = f"nobody is known to put groups; the last was put {at(last, about.read_at)}"
        return Cause(Reason.PRODUCERS_SILENT, text, "Start the producers")
    if not alive:
        text = f"no producer is left: {ends_of(known, about.read_at)}"
        return Cause(Reason.PRODUCERS_SILENT, text, "Start them again")
    restored = about.restored
    if restored and all(one.started_at < restored.time and one.name != restored.worker for one in alive):
        text = f"{listed(_names(alive))} opened the buffer before it was restored at {clock(restored.time)}, "
        return Cause(Reason.PRODUCERS_SILENT, f"{text}and can put nothing any more", "Start them again")
    if last is None or about.in_flight(need.task, need.status):
        return None
    if gone := _silent_since_the_last_put(about, last):
        silent = f"{'one' if len(gone) == 1 else 'some'} of the producers went silent: "
        silent += joined([f"{named(one.name)} was last seen {at(one.seen_at, about.read_at)}" for one in gone])
        idle = f"but {'has' if len(_names(alive)) == 1 else 'have'} put nothing since the last group came"
        text = f"{silent}; {_alive(alive, about)}, {idle} {ago(last, about.read_at)}"
        return Cause(Reason.PRODUCERS_SILENT, text, "Start it again, and see what the others do (replaybuf watch)")
    if about.now - last < _IDLE_SECONDS:
        return None
    text = f"{_alive(alive, about)}, but the last group was put {ago(last, about.read_at)}, and none is being generated"
    return Cause(Reason.PRODUCERS_SILENT, text, "See what they do (their logs; replaybuf watch)")


def _silent_since_the_last_put(about: Circumstances, last: float) -> list[Worker]:
    """Return the producers whose last heartbeat was about the time of the last put, and that have no successor."""
    alive = {one.name for one in about.alive}
    known = {one.name: one for one in sorted(about.producers, key=lambda one: one.seen_at) if one.name not in alive}
    return [one for one in known.values() if one.is_silent(about.now) and one.seen_at >= last - LIVE_SECONDS]


def slow(need: Need, about: Circumstances) -> Cause:
    """Return the cause if there is no other: groups arrive slowly or are in flight, or no known worker makes any."""
    parts = []
    if rate := about.rate(need.task, need.status):
        hourly = round(rate * 3600)
        come = "1 group an hour arrives" if hourly == 1 else f"{hourly:,} groups an hour arrive"
        parts.append(f"{come}, so the missing {need.missing:,} take about {units.age(need.missing / rate)}")
    if flying := about.in_flight(need.task, need.status):
        parts.append(f"{groups(flying)} {be(flying)} being generated")
    if parts:
        return Cause(Reason.SLOW, "; ".join(parts), PATIENCE)
    last, needed = about.last_put.get(need.task), f"{need.missing:,} more {'is' if need.missing == 1 else 'are'} needed"
    if last is not None:
        needed = f"the last group was put {ago(last, about.read_at)}, and {needed}"
    if not about.alive:
        return Cause(Reason.PRODUCERS_SILENT, "too few were put, and nobody is known to put any", _START)
    if {one.name for one in about.alive} == {need.wait.worker}:
        text = f"{needed}, but only {named(need.wait.worker or '')} puts any, which waits"
        return Cause(Reason.SLOW, text, "Put more before the draw, or meanwhile in another task or process")
    lately = all(about.now - one.seen_at <= LIVE_SECONDS for one in about.alive)
    advice = PATIENCE if lately else "See whether they still run: who is silent for a minute counts as gone"
    return Cause(Reason.SLOW, f"{_alive(about.alive, about)}{',' if last else ', and'} {needed}", advice)


def _all_wait(about: Circumstances, kind: str) -> list[Wait]:
    """Return the waits of this kind if every live producer has one; otherwise []."""
    waits = [wait for wait in about.waits if wait.kind == kind]
    waiting = {wait.worker for wait in waits}
    return waits if all(one.name in waiting for one in about.alive) else []


def _waiters(waits: Sequence[Wait], about: Circumstances) -> str:
    """Return `gen-1 waits since 40s`, `gen-1 and gen-2 wait since 3m`."""
    names = sorted({wait.worker or "a producer" for wait in waits})
    began = min((wait.since for wait in waits if wait.since is not None), default=about.now)
    return f"{listed(names)} {'waits' if len(names) == 1 else 'wait'} {since(began, about.read_at)}"


def ends_of(workers: Sequence[Worker], now: float | None) -> str:
    """Return when each worker ended or was last seen, in words; the latest first."""
    latest = {one.name: one for one in sorted(workers, key=lambda one: one.seen_at)}
    ends = []
    for one in sorted(latest.values(), key=lambda one: -one.seen_at):
        end = (
            f"went silent: last seen {at(one.seen_at, now)}"
            if one.ended_at is None
            else f"ended {at(one.ended_at, now)}"
        )
        ends.append(f"{named(one.name)} {end}")
    return joined(ends)


def _alive(workers: Sequence[Worker], about: Circumstances) -> str:
    """Return `gen-1 was last seen 4s ago and gen-2 40s ago`: whether they still run is unknown."""
    seen = {one.name: one.seen_at for one in sorted(workers, key=lambda one: one.seen_at)}
    names = sorted(seen, key=lambda name: -seen[name])
    first = [name for name in names if ago(seen[name], about.read_at) == ago(seen[names[0]], about.read_at)]
    were = "was" if len(first) == 1 else "were"
    text = f"{listed(sorted(first))} {were} last seen {ago(seen[names[0]], about.read_at)}"
    return joined([text, *(f"{named(name)} {ago(seen[name], about.read_at)}" for name in names[len(first) :])])


def _names(workers: Sequence[Worker]) -> list[str]:
    return list(dict.fromkeys(one.name for one in workers))


_TASKS_NAMED = 5
# Of more tasks, only the first are explained: a wait for hundreds of tasks must not block the event loop.
_TASKS_EXPLAINED = 20
_ORDER = list(Reason)


@dataclass(frozen=True, slots=True)
class Fact:
    """A further fact about a wait: another cause, if it has a reason, or numbers."""

    text: str
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason of a wait, its sentence for people, the task it is about, and further facts.

    `recorded` is the sentence for later readers, with times of day instead of ages. `final`: nothing that the producers
    may still do ends the wait; the caller has to ask for something else.
    """

    reason: Reason
    sentence: str
    task_name: str | None = None
    facts: tuple[Fact, ...] = ()
    recorded: str = ""
    final: bool = False

    def __str__(self) -> str:
        return "; ".join([self.sentence.removesuffix("."), *(fact.text for fact in self.facts)])


def diagnose(wait: Wait, circumstances: Circumstances) -> Diagnosis:
    """Return why this wait goes on, or READY if it could end now."""
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
    final = first.reason == Reason.END_OF_DATASET
    facts += _background(wait, circumstances)
    return Diagnosis(first.reason, _sentence(need.head, first), need.task, tuple(facts), final=final)


def causes_of(need: Need, about: Circumstances) -> list[Cause]:
    """Return the causes of a lack of groups, at least one, in order of precedence."""
    found = [
        causes.fenced(need.wait, about),
        causes.too_large(need, about),
        causes.no_such_task(need, about),
        causes.held_back(need, about),
        causes.no_match(need, about),
        causes.leased(need, about),
        finished(need, about),
        ended := end_of_dataset(need, about),
        None if ended else deadlock(need, about),
        producers_held_back(need, about),
        *causes.spoilt(need, about),
        nothing_put(need, about),
        None if ended else producers_silent(need, about),
    ]
    return [cause for cause in found if cause] or [slow(need, about)]


def line_of(need: Need, about: Circumstances) -> str:
    """Return `task math: 12 of 64 completed groups (3 expired, 1 failed)`, and the limit that blocks them, if any."""
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
    """Return the last draw and the other waiting consumers."""
    facts = []
    if last := about.last_take:
        who = "" if last.worker is None else f" by {named(last.worker)}"
        facts.append(Fact(f"last drawn: {groups(last.groups)}{who}, {ago(last.time, about.read_at)}"))
    if names := sorted({other.worker or "somebody" for other in about.consumers if other.worker != wait.worker}):
        facts.append(Fact(f"{listed(names)} {'waits' if len(names) == 1 else 'wait'} for groups, too"))
    return facts


# Waits for room


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
    """Return what a full task's consumers do, the advice, and the diagnosis of a consumer's own wait."""
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
    drawn = f"the last draw was {ago(last.time, about.read_at)}" if last is not None else ""
    if alive:
        names = listed(dict.fromkeys(one.name for one in alive))
        return f"{names} should draw them{', and ' if drawn else ''}{drawn}", "Wait for the consumer", []
    if takers:
        return f"no consumer is left: {ends_of(takers, about.read_at)}", "Start the trainer again", []
    return drawn or "nobody has drawn any yet", "Is the consumer running?", []


# Waits for the trainer


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
        cause = Cause(Reason.END_OF_DATASET, prompts_of(ended[0], about), advice)
    elif waiting:
        names = listed(sorted({other.worker or "the trainer" for other in waiting}))
        lacks = wanted(waiting[0].wants, waiting[0].status)
        text = f"deadlock: {names}, which has published {about.news}, waits itself for {lacks}"
        cause = Cause(Reason.DEADLOCK, text, publishing(about))
    else:
        takers = [one for one in about.workers if one.taken]
        gone = takers and not any(one.is_alive(about.now) for one in takers)
        text = f"the trainer has published {about.news}"
        text += f", and is gone: {ends_of(takers, about.read_at)}" if gone else ""
        cause = Cause(Reason.WAITS_FOR_TRAINER, text, "Start the trainer again" if gone else "Is it running?")
    return Diagnosis(cause.reason, _sentence(head, cause), None, tuple(_background(wait, about)))
