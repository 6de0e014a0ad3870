"""Why no more groups come: what the producers do, and what they wait for themselves."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf import units
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.causes import Cause, Need, Reason, be, to_put
from replaybuf.rules.circumstances import LIVE_SECONDS, Circumstances, Wait, Worker
from replaybuf.rules.transitions import levels
from replaybuf.rules.wording import ago, at, clock, groups, joined, listed, named, since

#: Producers that are alive, but have put nothing for so long and have nothing in flight, are called silent.
_IDLE_SECONDS = 600.0
PATIENCE = "Wait, ask for fewer groups, or start more producers"


def finished(need: Need, about: Circumstances) -> Cause | None:
    """The trainer has told the workers that it has finished."""
    if about.trainer is None or not about.trainer.finished:
        return None
    if about.alive:
        return None  # it goes on producing, whatever was published
    text = f"the trainer has published that it has finished (step {about.trainer.train_step}), so the workers stop"
    return Cause(Reason.FINISHED, text, "Publish a state that isn't finished, and start workers, to go on")


def end_of_dataset(need: Need, about: Circumstances) -> Cause | None:
    """All prompts of the task's dataset were drawn, and fewer than the missing groups aren't finished."""
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
    """Return where the prompts of a dataset are that was read to its end, with the numbers of its prompt ledger."""
    drawn, waiting = about.datasets[task], about.unfinished(task)
    flying = about.in_flight(task)
    parts = [f"{drawn - flying - waiting:,} {be(drawn - flying - waiting)} finished", f"{flying:,} in flight"]
    parts += [f"{waiting:,} to be handed out again"] if waiting else []
    return f"no prompt is left in the dataset: of the {drawn:,} drawn, {', '.join(parts[:-1])} and {parts[-1]}"


def deadlock(need: Need, about: Circumstances) -> Cause | None:
    """All producers wait for the trainer to publish something, while it waits for groups."""
    waiting = _all_wait(about, "trainer")
    if not waiting:
        return None
    text = (
        f"deadlock: {_waiters(waiting, about)} for the trainer, which has published {about.news}, "
        "while it waits for their groups"
    )
    return Cause(Reason.DEADLOCK, text, publishing(about))


def publishing(about: Circumstances) -> str:
    """Return what a trainer is to do for whom its workers wait."""
    if about.trainer is None:
        return "Publish the trainer's state (publish) before waiting for a batch"
    return "Publish newer weights (publish), or ask for no more groups than the workers keep ready (their batch_size)"


def producers_held_back(need: Need, about: Circumstances) -> Cause | None:
    """All producers wait for room."""
    waiting = _all_wait(about, "room")
    if not waiting:
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
            f"nobody is known to put groups; the last was put {at(last, about.told_at)}",
            "Start the producers",
        )
    alive = about.alive
    if not alive:
        return Cause(
            Reason.PRODUCERS_SILENT, f"no producer is left: {ends_of(known, about.told_at)}", "Start them again"
        )
    restored = about.restored
    if restored and all(one.started_at < restored.time and one.name != restored.worker for one in alive):
        text = (
            f"{listed(_names(alive))} opened the buffer before it was restored at {clock(restored.time)}, "
            "and can put nothing any more"
        )
        return Cause(Reason.PRODUCERS_SILENT, text, "Start them again")
    if last is None or about.in_flight(need.task, need.status):
        return None
    if gone := _silent_since_the_last_put(about, last):
        silent = f"{'one' if len(gone) == 1 else 'some'} of the producers went silent: "
        silent += joined([f"{named(one.name)} was last seen {at(one.seen_at, about.told_at)}" for one in gone])
        idle = f"but {'has' if len(_names(alive)) == 1 else 'have'} put nothing since the last group came"
        text = f"{silent}; {_alive(alive, about)}, {idle} {ago(last, about.told_at)}"
        return Cause(Reason.PRODUCERS_SILENT, text, "Start it again, and see what the others do (replaybuf watch)")
    if about.now - last < _IDLE_SECONDS:
        return None
    text = f"{_alive(alive, about)}, but the last group was put {ago(last, about.told_at)}, and none is being generated"
    return Cause(Reason.PRODUCERS_SILENT, text, "See what they do (their logs; replaybuf watch)")


def _silent_since_the_last_put(about: Circumstances, last: float) -> list[Worker]:
    """Return the producers that fell silent after, or when, the last group was put, and that nobody replaces."""
    alive = {one.name for one in about.alive}
    known = {one.name: one for one in sorted(about.producers, key=lambda one: one.seen_at) if one.name not in alive}
    return [one for one in known.values() if one.is_silent(about.now) and one.seen_at >= last - LIVE_SECONDS]


def slow(need: Need, about: Circumstances) -> Cause:
    """Return the cause where there is no other: groups come or are being made, or nobody is known to make any."""
    parts = []
    if rate := about.rate(need.task, need.status):
        lasts = units.age(need.missing / rate)
        parts.append(f"{_hourly(rate * 3600)}, so the missing {need.missing:,} take about {lasts}")
    if flying := about.in_flight(need.task, need.status):
        parts.append(f"{groups(flying)} {be(flying)} being generated")
    if parts:
        return Cause(Reason.SLOW, "; ".join(parts), PATIENCE)
    last, needed = about.last_put.get(need.task), f"{need.missing:,} more {'is' if need.missing == 1 else 'are'} needed"
    if last is not None:
        needed = f"the last group was put {ago(last, about.told_at)}, and {needed}"
    if not about.alive:
        text = "too few were put, and nobody is known to put any"
        advice = "Start the producers, or see that they use the same url, name and task"
        return Cause(Reason.PRODUCERS_SILENT, text, advice)
    if {one.name for one in about.alive} == {need.wait.worker}:
        text = f"{needed}, but only {named(need.wait.worker or '')} puts any, which waits"
        return Cause(Reason.SLOW, text, "Put more before the draw, or meanwhile in another task or process")
    lately = all(about.now - one.seen_at <= LIVE_SECONDS for one in about.alive)
    advice = PATIENCE if lately else "See whether they still run: who is silent for a minute counts as gone"
    return Cause(Reason.SLOW, f"{_alive(about.alive, about)}{',' if last else ', and'} {needed}", advice)


def _hourly(rate: float) -> str:
    return "1 group an hour arrives" if round(rate) == 1 else f"{rate:,.0f} groups an hour arrive"


def _all_wait(about: Circumstances, kind: str) -> list[Wait]:
    """Return the waits of this kind if every producer that is alive has one; otherwise nothing."""
    waits = [wait for wait in about.waits if wait.kind == kind]
    if not waits:
        return []
    waiting = {wait.worker for wait in waits}
    return waits if all(one.name in waiting for one in about.alive) else []


def _waiters(waits: Sequence[Wait], about: Circumstances) -> str:
    """Return `gen-1 waits since 40s`, `gen-1 and gen-2 wait since 3m`."""
    names = sorted({wait.worker or "a producer" for wait in waits})
    began = min((wait.since for wait in waits if wait.since is not None), default=about.now)
    return f"{listed(names)} {'waits' if len(names) == 1 else 'wait'} {since(began, about.told_at)}"


def ends_of(workers: Sequence[Worker], now: float | None) -> str:
    """Return when each worker ended, or was seen for the last time; the latest first."""
    latest: dict[str, Worker] = {}
    for one in sorted(workers, key=lambda one: one.seen_at):
        latest[one.name] = one
    shown = sorted(latest.values(), key=lambda one: -one.seen_at)
    return joined([f"{named(one.name)} {_end(one, now)}" for one in shown])


def _end(worker: Worker, now: float | None) -> str:
    if worker.ended_at is not None:
        return f"ended {at(worker.ended_at, now)}"
    return f"went silent: last seen {at(worker.seen_at, now)}"


def _alive(workers: Sequence[Worker], about: Circumstances) -> str:
    """Return `gen-1 was last seen 4s ago and gen-2 40s ago`: whether they still run, nobody can know."""
    seen: dict[str, float] = {}
    for one in workers:
        seen[one.name] = max(one.seen_at, seen.get(one.name, 0.0))
    names = sorted(seen, key=lambda name: -seen[name])
    first = [name for name in names if ago(seen[name], about.told_at) == ago(seen[names[0]], about.told_at)]
    text = (
        f"{listed(sorted(first))} {'was' if len(first) == 1 else 'were'} last seen {ago(seen[names[0]], about.told_at)}"
    )
    return joined([text, *(f"{named(name)} {ago(seen[name], about.told_at)}" for name in names[len(first) :])])


def _names(workers: Sequence[Worker]) -> list[str]:
    return list(dict.fromkeys(one.name for one in workers))
