"""Explains why a draw or a put blocks: one reason as a sentence, and further facts.

The reason is the first cause (`causes`) that holds; the others follow as one fact. If several tasks lack groups, the
sentence is about one for which no more can come, or else the one whose reason comes first in `Reason`. It is the same
in logs, errors and events, on the command line and on the page. Names, queries and error texts are shortened, and
control characters in them escaped.
"""

from __future__ import annotations

from dataclasses import dataclass

from replaybuf.rules.causes import explain
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.needs import Need, Reason, head_of
from replaybuf.rules.transitions import Tally
from replaybuf.rules.words import clock, groups, named, wanted
from replaybuf.values.rollouts.statuses import Status

_TASKS_NAMED = 5


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
    explained = explain(wait, about)
    if not explained:
        return _ready(wait, about)
    (need, causes), *rest = explained
    said = {(cause.text, cause.advice): (cause, [need]) for cause in causes}
    for other, (cause, *_) in rest:
        said.setdefault((cause.text, cause.advice), (cause, []))[1].append(other)
    (first, alike), *others = [*said.values()][: len(causes) + _TASKS_NAMED]
    also = [
        (cause.text if of == [need] else f"{head_of(of)}: {cause.text}", cause.cause.reason) for cause, of in others
    ]
    facts = [Fact(line_of(need))] if wait.kind == "groups" else []
    facts += [Fact("; ".join(text for text, _ in also), also[0][1])] if also else []
    if wait.kind != "room" and (last := about.last_take) is not None:
        who = "" if last.worker is None else f" by {named(last.worker)}"
        facts.append(Fact(f"last drawn: {groups(last.groups)}{who} at {clock(last.time, about.now)}"))
    final = first.cause.final and wait.kind == "groups"
    return Diagnosis(first.cause.reason, first.sentence(head_of(alike)), need.task or None, tuple(facts), final)


def line_of(need: Need) -> str:
    """Return `task math: 12 completed groups are there, 64 needed (3 expired)`, and the limit that blocks them."""
    about, task, status = need.about, need.task, need.status
    others = sorted(
        f"{n} {other}" for other in Status if other not in (status, Status.ARCHIVED) and (n := about.count(task, other))
    )
    hidden = sum(about.count(task, other, Tally.LEASED) for other in Status)
    others += [f"{hidden} leased"] if hidden else []
    if need.wait.query is not None:
        others.insert(0, f"{need.there} {status} before the where")
    rest = f" ({', '.join(others)})" if others else ""
    least = f"at least {need.least:,}" if need.wait.at_least else f"{need.least:,}"
    line = f"task {named(task)}: {groups(need.matching, status)} there, {least} needed{rest}"
    if about.limits is not None and need.available < need.matching:
        line += f", but {about.limits.why_slow(need.level)}"
    return line


def _ready(wait: Wait, about: Circumstances) -> Diagnosis:
    if wait.kind == "room":
        return Diagnosis(Reason.READY, f"Ready: there is room for {wanted(wait.wants, wait.status)}.")
    there = {task: Need.of(wait, task, about).available for task in wait.wants}
    unknown = () if about.limits is not None else (Fact("the limits are unknown: no consumer has noted any"),)
    text = f"Ready: {wanted(there, wait.status)} can be drawn."
    return Diagnosis(Reason.READY, text, next(iter(there), None), unknown)
