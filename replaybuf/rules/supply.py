"""Why no more groups come: what the producers do, and what they wait for themselves.

Each cause is a function of what a draw needs and of the circumstances, and None where it doesn't hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf import units
from replaybuf.rollouts.status import Status
from replaybuf.rules.causes import Need
from replaybuf.rules.circumstances import IN_FLIGHT, Circumstances, Wait, Worker
from replaybuf.rules.reasons import Cause, Reason
from replaybuf.rules.tallies import Tally
from replaybuf.rules.wording import ago, brief, clock, groups, listed

#: Producers that are alive, but have put nothing for so long and have nothing in flight, are called silent.
_IDLE_SECONDS = 600.0
_PATIENCE = "Wait, ask for fewer groups, or start more producers"


def finished(need: Need, about: Circumstances) -> Cause | None:
    """The trainer has told the workers that it has finished."""
    if about.trainer is None or not about.trainer.finished:
        return None
    if about.alive:
        return None  # it goes on producing, whatever was published
    text = f"the trainer has published that it has finished (step {about.trainer.train_step}), so the workers stop"
    return Cause(Reason.FINISHED, text, "Publish a state that isn't finished, and start workers, to go on")


def deadlock(need: Need, about: Circumstances) -> Cause | None:
    """All producers wait for the trainer to publish something, while it waits for groups."""
    waiting = _all_wait(about, "trainer")
    if not waiting:
        return None
    news = "nothing yet" if about.trainer is None else f"nothing since step {about.trainer.train_step}"
    text = (
        f"deadlock: {_waiters(waiting, about.now)} for the trainer, which has published {news}, "
        "while it waits for their groups"
    )
    return Cause(Reason.DEADLOCK, text, "Publish the trainer's state (publish) before waiting for a batch")


def producers_held_back(need: Need, about: Circumstances) -> Cause | None:
    """All producers wait for room."""
    waiting = _all_wait(about, "room")
    if not waiting:
        return None
    tasks = sorted({task for wait in waiting for task in wait.wants})
    full = [f"{groups(about.count(task, Status.COMPLETED), 'completed')} of {brief(task)}" for task in tasks]
    text = f"{_waiters(waiting, about.now)} for room, with {listed(full)} there"
    advice = f"Somebody has to draw {listed(tasks)} first, or raise its capacity or rate"
    if need.task in tasks:
        advice = "Draw those groups (with another query, or fewer at once), or raise the capacity or the rate"
    return Cause(Reason.PRODUCERS_HELD_BACK, text, advice)


def nothing_put(need: Need, about: Circumstances) -> Cause | None:
    """Nothing was ever put, into no task."""
    if about.tasks:
        return None
    known = [one.name for one in about.workers if one.is_alive(about.now) and one.name != need.wait.worker]
    who = f"; {listed(known)} {'has' if len(known) == 1 else 'have'} it open" if known else ""
    return Cause(
        Reason.NOTHING_PUT,
        f"nothing was ever put into this buffer{who}",
        "Start the producers, or see that they use the same url, name and task",
    )


def producers_silent(need: Need, about: Circumstances) -> Cause | None:
    """All producers have ended or were killed, or they are alive and do nothing."""
    known = about.producers
    last = about.last_put.get(need.task)
    if not known:
        if last is None or about.now - last < _IDLE_SECONDS:
            return None
        return Cause(
            Reason.PRODUCERS_SILENT,
            f"nobody is known to put groups; the last was put at {clock(last)} ({ago(about.now - last)})",
            "Start the producers",
        )
    alive = about.alive
    if not alive:
        return Cause(Reason.PRODUCERS_SILENT, f"no producer is left: {ends_of(known, about.now)}", "Start them again")
    fenced = [one for one in alive if _is_fenced(one, about)]
    if len(fenced) == len(alive):
        assert about.restored is not None
        text = (
            f"{listed(_names(fenced))} opened the buffer before it was restored at {clock(about.restored.time)}, "
            "and can put nothing any more"
        )
        return Cause(Reason.PRODUCERS_SILENT, text, "Start them again")
    if last is None or about.now - last < _IDLE_SECONDS or in_flight(need, about):
        return None
    text = f"{_alive(alive)}, but the last group was put {ago(about.now - last)}, and none is being generated"
    return Cause(Reason.PRODUCERS_SILENT, text, "See what they do (their logs; replaybuf watch)")


def slow(need: Need, about: Circumstances) -> Cause | None:
    """Groups come, or are being made: it takes time."""
    if about.abandoned:
        return None
    parts = []
    if rate := about.rate(need.task, need.status):
        lasts = units.age(need.missing / rate)
        parts.append(f"{_hourly(rate * 3600)}, so the missing {need.missing:,} take about {lasts}")
    if flying := in_flight(need, about):
        parts.append(f"{groups(flying)} {'is' if flying == 1 else 'are'} being generated")
    return Cause(Reason.SLOW, "; ".join(parts), _PATIENCE) if parts else None


def unexplained(need: Need, about: Circumstances) -> Cause:
    """Return the cause where nothing else is known."""
    if about.alive:
        return Cause(Reason.SLOW, f"{_alive(about.alive)}, and {need.missing:,} more are needed", _PATIENCE)
    text = "too few were put, and nobody is known to put any"
    return Cause(Reason.PRODUCERS_SILENT, text, "Start the producers, or see that they use the same url, name and task")


def _hourly(rate: float) -> str:
    return "1 group an hour arrives" if round(rate) == 1 else f"{rate:,.0f} groups an hour arrive"


def in_flight(need: Need, about: Circumstances) -> int:
    """Return the number of groups that producers hold to generate or finish them."""
    return sum(about.count(need.task, status, Tally.LEASED) for status in IN_FLIGHT if status != need.status)


def _all_wait(about: Circumstances, kind: str) -> list[Wait]:
    """Return the waits of this kind if every producer that is alive has one; otherwise nothing."""
    waits = [wait for wait in about.waits if wait.kind == kind]
    if not waits:
        return []
    waiting = {wait.worker for wait in waits}
    return waits if all(one.name in waiting for one in about.alive) else []


def _waiters(waits: Sequence[Wait], now: float) -> str:
    """Return `gen-1 waits since 40s`, `gen-1 and gen-2 wait since 3m`."""
    names = sorted({wait.worker or "a producer" for wait in waits})
    began = min((wait.since for wait in waits if wait.since is not None), default=now)
    return f"{listed(names)} {'waits' if len(names) == 1 else 'wait'} since {units.age(now - began)}"


def ends_of(workers: Sequence[Worker], now: float) -> str:
    """Return when each worker ended, or was seen for the last time; the latest first."""
    latest: dict[str, Worker] = {}
    for one in sorted(workers, key=lambda one: one.seen_at):
        latest[one.name] = one
    shown = sorted(latest.values(), key=lambda one: -one.seen_at)
    return listed([f"{brief(one.name)} {_end(one, now)}" for one in shown])


def _end(worker: Worker, now: float) -> str:
    if worker.ended_at is not None:
        return f"ended at {clock(worker.ended_at)} ({ago(now - worker.ended_at)})"
    return f"went silent: last seen at {clock(worker.seen_at)} ({ago(now - worker.seen_at)})"


def _is_fenced(worker: Worker, about: Circumstances) -> bool:
    restored = about.restored
    return restored is not None and worker.started_at < restored.time and worker.name != restored.worker


def _alive(workers: Sequence[Worker]) -> str:
    names = _names(workers)
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'} alive"


def _names(workers: Sequence[Worker]) -> list[str]:
    return list(dict.fromkeys(one.name for one in workers))
