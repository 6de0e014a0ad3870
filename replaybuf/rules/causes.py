"""Explains why a draw or a put blocks: one reason as a sentence, and further facts.

The causes are tables in order of precedence: the first that holds is the reason, and the others follow as one fact. If
several tasks lack groups, the sentence is about one for which no more can come, or else the one whose reason comes
first in `Reason`. It is the same in logs, errors and events, on the command line and on the page. Names, queries and
error texts are shortened, and control characters in them escaped.

A row's function returns the sentence for a need, or None if this isn't a cause; where the advice varies, both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replaybuf.common.units import are, brief, clock, counted, groups, joined, listed, named, people, wanted
from replaybuf.rules.circumstances import IN_FLIGHT, LIVE_SECONDS, SILENT_SECONDS, Circumstances, Held, Wait, Worker
from replaybuf.rules.diagnosis import Cause, Diagnosis, Fact, Found, Need, Reason, Said, causes_of, head_of, too_large
from replaybuf.rules.transitions import Tally, total
from replaybuf.values.rollouts.statuses import Status

#: Producers that are alive, but have put nothing for so long and generate nothing, do nothing.
_IDLE_SECONDS = 600.0
#: Advice for workers that a restore fenced off.
_REJOIN = "; a worker that catches FencedError and builds its buffer again outlives restores"
_ADOPT = "those of an earlier process come back then, or by restore or buffer.adopt"
#: The maximum length of quoted errors.
_LONGEST_TEXT = 200
# Of more tasks, only the first are explained: a wait for hundreds of tasks must not block the event loop.
_TASKS_EXPLAINED, _TASKS_NAMED = 20, 5


def diagnose(wait: Wait, about: Circumstances) -> Diagnosis:
    """Return why this wait goes on, or READY if it could end now."""
    explained = _explain(wait, about)
    if not explained:
        return _ready(wait, about)
    (need, causes), *other_tasks = explained
    sentences = {(cause.text, cause.advice): (cause, [need]) for cause in causes}
    for other_need, (cause, *_) in other_tasks:
        sentences.setdefault((cause.text, cause.advice), (cause, []))[1].append(other_need)
    (first, needs), *tail = [*sentences.values()][: len(causes) + _TASKS_NAMED]
    further = [
        (cause.text if gaps == [need] else f"{head_of(gaps)}: {cause.text}", cause.cause.reason) for cause, gaps in tail
    ]
    facts = [Fact(need.line)] if wait.kind == "groups" else []
    facts += [Fact("; ".join(text for text, _ in further), further[0][1])] if further else []
    if wait.kind != "room" and (last_take := about.last_take) is not None:
        taker = "" if last_take.worker is None else f" by {named(last_take.worker)}"
        facts.append(Fact(f"last drawn: {groups(last_take.groups)}{taker} at {clock(last_take.time, about.now)}"))
    coming = about.unfinished(need.task) or total(about.tallies, need.task, Tally.LEASED)  # may still be completed
    final = first.cause.final and wait.kind == "groups" and not coming
    prefix = "in each, " if len(needs) > 1 and first.text.removeprefix("all ")[:1].isdigit() else ""
    sentence = f"{head_of(needs)}: {prefix}{first.text}. {first.advice}."
    return Diagnosis(first.cause.reason, sentence, need.task or None, tuple(facts), final)


def _explain(wait: Wait, about: Circumstances) -> list[tuple[Need, list[Found]]]:
    """Return the lacking needs of a wait, the most urgent first, each with its causes, the reason first."""
    table = {"groups": _GROUP_CAUSES, "room": _ROOM_CAUSES, "trainer": _TRAINER_CAUSES}[wait.kind]
    lacking = [Need(wait, "", about)]
    if wait.kind != "trainer":
        lacking = [need for task in wait.wants if (need := Need.of(wait, task, about)).missing]
    lacking = lacking[:_TASKS_EXPLAINED]
    last_put = max((put_at for need in lacking if (put_at := about.last(need.task)) is not None), default=None)
    explained = [(need, causes_of(replace(need, last=last_put), table)) for need in lacking]
    order = [*Reason]
    explained.sort(key=lambda item: (not item[1][0].cause.final, order.index(item[1][0].cause.reason)))
    return explained


def _ready(wait: Wait, about: Circumstances) -> Diagnosis:
    if wait.kind == "room":
        return Diagnosis(Reason.READY, f"Ready: there is room for {wanted(wait.wants, wait.status)}.")
    available = {task: Need.of(wait, task, about).available for task in wait.wants}
    unknown = () if wait.limits is not None else (Fact("the limits are unknown: no consumer has noted any"),)
    text = f"Ready: {wanted(available, wait.status)} can be drawn."
    return Diagnosis(Reason.READY, text, next(iter(available), None), unknown)


# Groups in the buffer


def _no_such_task(need: Need) -> Said:
    tasks, name = need.about.tasks, need.task
    return None if name in tasks or not tasks or name in need.about.datasets else never_put(tasks)


def never_put(tasks: Sequence[str]) -> str:
    """Return a sentence about a task that never had a group; these are the existing ones."""
    existing = f"there {'is the task' if len(tasks) == 1 else 'are the tasks'} {listed(tasks, 5)}"
    return f"nothing was ever put into this task; {existing}"


def _held_back(need: Need) -> Said:
    limits = need.wait.limits
    if limits is None or need.status != Status.COMPLETED or need.available >= min(need.least, need.matching):
        return None
    start = "Start the producers again" if need.about.abandoned else "Wait for the producers"
    option = "lower min_size" if need.level.completed < limits.min_size else "widen error_buffer"
    return f"{are(need.stored, 'completed')} there, but {limits.why_slow(need.level)}", f"{start}, or {option}"


def _no_match(need: Need) -> Said:
    """There are enough groups, but too few match the query; or there are fewer, and none matches."""
    query = need.wait.query
    if query is None or need.matching >= min(need.least, need.stored) or (need.stored < need.least and need.matching):
        return None
    match = {0: "none matches", 1: "only 1 matches"}.get(need.matching, f"only {need.matching:,} match")
    return f"{are(need.stored, need.status)} there, but {match} {brief(query)}"


def _leased(need: Need) -> Said:
    about, count = need.about, need.about.count(need.task, need.status, Tally.LEASED)
    if count < need.missing:
        return None
    amount = f"{count:,} more" if need.stored else "the only" if count == 1 else f"all {count:,}"
    text = f"{amount} {need.status} group{' is' if count == 1 else 's are'} leased"
    holders = about.holders(need.task, (need.status,))
    if not holders:
        return text
    leases = [lease for lease in about.held if (lease.task_name, lease.status) == (need.task, need.status)]
    until = f"until {_last_end(leases, about)}"
    if [*holders] == [need.wait.worker]:
        advice = f"Acknowledge them, or give them back, before the draw; {_ADOPT}"
        return f"{text} by {named(*holders)}, this process or an earlier one of its name, {until}", advice
    return f"{text} by {counted(holders) if len(holders) > 1 else named(*holders)} {until}"


def _last_end(leases: Sequence[Held], about: Circumstances) -> str:
    return clock(max(lease.until for lease in leases), about.now)


# Ends


def _finished(need: Need) -> Said:
    trainer = need.about.trainer
    if trainer is None or not trainer.finished or (need.wait.kind == "groups" and need.about.alive):
        return None  # live producers go on regardless
    return "the trainer has published that it has finished"


def _end_of_dataset(need: Need) -> Said:
    """All prompts of the task's dataset were drawn, and fewer groups are unfinished than are missing."""
    about, task = need.about, need.task
    if need.status != Status.COMPLETED or task not in about.datasets:
        return None
    remaining = need.available + about.unfinished(task, Tally.LEASED) + about.unfinished(task)
    least = f'at_least={{"{named(task)}": {remaining}}}'
    advice = f"Ask for no more ({least}), read more epochs, let order= skip fewer prompts, or end the run"
    return None if remaining >= need.least else (_prompts_of(task, about), advice)


def _end_of_all_datasets(need: Need) -> Said:
    about = need.about
    if any(wait.kind == "groups" for wait in about.waits):
        return None
    return "; ".join(_prompts_of(task, about) for task in sorted(about.datasets)) or None


def _prompts_of(task: str, about: Circumstances) -> str:
    """Return the state of the prompts of a dataset that was read to its end, in words, from its prompt ledger."""
    drawn, waiting, flying = about.datasets[task], about.unfinished(task), about.unfinished(task, Tally.LEASED)
    return (
        f"no prompt of {named(task)} is left to draw: of the {drawn:,} drawn, {drawn - waiting - flying:,} are "
        f"finished, {flying:,} in flight and {waiting:,} to be handed out again"
    )


# Producers that wait


def _leased_by_gone(need: Need) -> str | None:
    """Workers that are gone lease as many unfinished groups of the task as are missing, and nobody generates any."""
    about, leases = need.about, need.about.abandoned_leases(need.task)
    count = sum(lease.groups for lease in leases)
    if count < need.missing or need.flying or not about.alive or need.status != Status.COMPLETED:
        return None
    gone_workers = [worker for worker in about.gone if worker.name in {lease.holder for lease in leases}]
    until = f"{are(count)} leased until {_last_end(leases, about)} to be generated"
    return f"{until}, by a worker that is gone ({_ends_of(gone_workers, about)})"


def _deadlock(need: Need) -> Said:
    """All live producers wait for room, or for the trainer, and it for their groups; nobody who is gone has them."""
    about, waits = need.about, [wait for wait in need.about.waits if wait.kind != "groups"]
    names = {wait.worker for wait in waits}
    if not waits or any(worker.name not in names for worker in about.alive) or need.flying or _leased_by_gone(need):
        return None
    full = sorted({task for wait in waits if wait.kind == "room" for task in wait.wants})
    began = min((wait.since for wait in waits if wait.since is not None), default=about.now)
    waiters = people(sorted(name or "a producer" for name in names), "waits", "wait")
    waiting = f"{waiters} for {'room' if full else 'the trainer'} since {clock(began, about.now)}"
    if full:
        text = joined([f"{groups(about.count(task, Status.COMPLETED), 'completed')} of {named(task)}" for task in full])
        advice = f"Draw groups of {listed(full)} (without a query, or fewer at once), or let the limits allow more puts"
        return f"{waiting}, with {text} there", advice
    if need.task in about.datasets:
        return None
    return f"deadlock: {waiting}, which has published {_last_published(about)}, while it waits for their groups"


def _last_published(about: Circumstances) -> str:
    return "nothing yet" if about.trainer is None else f"nothing since step {about.trainer.train_step}"


# Groups that can't be drawn, and lost ones


def _lost_groups(need: Need, kind: Status) -> str | None:
    """Return `64 of the 66 groups put since 20:28:10 UTC`, if that many lost groups explain the wait, else None.

    They do if they are half of those that came, and as many as are missing: lately, or else ever.
    """
    about, (lost, arrived) = need.about, need.about.losses(need.task)[kind]
    if need.status != Status.COMPLETED or (about.abandoned and arrived - lost >= need.missing):
        return None  # enough came while there were producers
    for lately in (True, False):
        number, total = about.losses(need.task, lately=lately)[kind]
        if 2 * number < total:
            return None
        if number and number >= need.missing:
            since = "" if about.earlier_at is None or number == lost else f" since {clock(about.earlier_at, about.now)}"
            return f"{number:,} of the {groups(total)} put{since}"
    return None


def _expired(need: Need) -> Said:
    about, task = need.about, need.task
    stored = about.count(task, Status.EXPIRED) if need.status == Status.COMPLETED else 0
    lost = groups(stored) if stored and about.unfinished(task) >= need.missing else _lost_groups(need, Status.EXPIRED)
    refresh = "" if (step := about.steps.get(task)) is None else f"; the last refresh was to train step {step}"
    return None if lost is None else f"{lost} expired{refresh}"


def _filtered(need: Need) -> Said:
    lost = _lost_groups(need, Status.FILTERED)
    return None if lost is None else f"{lost} were filtered"


def _failed(need: Need) -> Said:
    about, task, lost = need.about, need.task, _lost_groups(need, Status.FAILED)
    error = f"; the last error: {brief(about.errors[task], _LONGEST_TEXT)}" if task in about.errors else ""
    return None if lost is None else f"{lost} failed{error}"


def _filling(need: Need) -> Said:
    stored = need.about.count(need.task, Status.FILLING) if need.status == Status.COMPLETED else 0
    finished = f"{stored:,} finished {'rollout is' if stored == 1 else 'rollouts are'} there"
    return f"{finished}, of groups that aren't full yet" if stored else None


def _other_status(need: Need) -> Said:
    """There are groups of another status: of a draw of completed ones, those that wait to be generated."""
    about, completed = need.about, need.status == Status.COMPLETED
    excluded = (need.status, Status.ARCHIVED, Status.FILLING)
    statuses = (Status.INIT, Status.ABORTED) if completed else set(Status).difference(excluded)
    stored = {status: count for status in sorted(statuses) if (count := about.count(need.task, status))}
    enough = about.unfinished(need.task) if completed else sum(stored.values())
    if not stored or (enough < need.missing and about.put(need.task, need.status)):
        return None
    kinds = joined([f"{count:,} {status}" for status, count in stored.items()])
    return f"{are(sum(stored.values()))} there, but of another status: {kinds}"


# Producers and consumers


def _ends_of(workers: Sequence[Worker], about: Circumstances) -> str:
    """Return when each worker ended or was last seen, in words; the latest first."""
    ends: dict[str, str] = {}
    for worker in sorted(workers, key=lambda worker: -worker.seen_at):
        events = ["was killed" if worker.killed else "went silent"] if worker.state(about.now) == "silent" else []
        events += ["was fenced off by a restore"] if about.is_fenced(worker) else []
        verb = "ended" if worker.ended_at is not None else "last seen"
        end = f"{' or '.join(events)}: {verb}" if events else verb
        ends.setdefault(worker.name, f"{named(worker.name)} {end} at {clock(worker.left_at, about.now)}")
    return joined([*ends.values()])


def _absent(need: Need) -> Said:
    """Nobody has put anything; all producers are gone; some fell silent at the last put; or all are idle for long."""
    about, last_put = need.about, need.about.last(need.task)
    start = "Start the producers, or see that they use the same url, name and task"
    if about.abandoned:
        restart = f"Start them again{_REJOIN if any(map(about.is_fenced, about.producers)) else ''}"
        return f"no producer is left: {_ends_of(about.producers, about)}", restart
    if not about.tasks:
        elsewhere = f", but into {listed(about.others)}" if about.others else ""
        return f"nothing was ever put into this buffer{elsewhere}", start
    if not about.producers:  # who has put the last group may not have given a sign of life yet
        known_soon = last_put is not None and about.now - last_put < SILENT_SECONDS
        return None if known_soon else ("nobody is known to put any", start)
    if last_put is None or need.flying:
        return None
    alive = {worker.name for worker in about.alive}
    lost = [worker for worker in about.producers if worker.state(about.now) == "silent" or about.is_fenced(worker)]
    gone_workers = [worker for worker in lost if worker.name not in alive and worker.seen_at >= last_put - LIVE_SECONDS]
    if not gone_workers and about.now - last_put < _IDLE_SECONDS:
        return None
    end = f"{_ends_of(gone_workers, about)}; " if gone_workers else ""
    return f"{end}{_supply(about, last_put)}", "Start again who is gone, and see in the logs of the others what they do"


def _supply(about: Circumstances, last_put: float | None) -> str:
    """Return which workers are alive, and when the last group was put. `head_of` says how many are missing."""
    parts = [people(sorted(worker.name for worker in about.alive), "is alive", "are alive")] if about.alive else []
    parts += [] if last_put is None else [f"the last group was put at {clock(last_put, about.now)}"]
    return f"{', '.join(parts)}, and more are needed"


def _slow(need: Need) -> Said:
    about, needed = need.about, _supply(need.about, need.last)
    if need.flying:
        worker, text = need.wait.worker or "", f"{are(need.flying)} being generated"
        if about.holders(need.task, {*IN_FLIGHT} - {need.status})[worker] < need.flying:
            return text
        advice = "Nobody else generates any: finish them before the draw, or meanwhile in another task or process"
        return f"{text}, by {named(worker)} itself", advice
    if need.puts_alone and not need.is_covered:
        return needed, "Nobody else puts any: put more before the draw, or meanwhile in another task or process"
    has_producers = about.alive or (not about.abandoned and about.last(need.task) is not None)
    return needed if has_producers else None


def _full(need: Need) -> Said:
    limits = need.wait.limits
    state, advice = _consumers(need, "See that the consumer runs")
    return f"{'' if limits is None else limits.why_full(need.level, need.status)}; {state}", advice


def _unpublished(need: Need) -> Said:
    state, advice = _consumers(need, "See that it runs")
    return f"the trainer has published {_last_published(need.about)}; {state}", advice


def _consumers(need: Need, otherwise: str) -> tuple[str, str]:
    """Return the state of the consumers, and advice; of a consumer that waits itself, the cause of its wait."""
    about = need.about
    waiting = [wait for wait in about.waits if wait.kind == "groups"]
    for consumer in sorted(waiting, key=lambda wait: need.task not in wait.wants)[:1]:
        match = "" if consumer.query is None else f" that match {brief(consumer.query)}"
        lacks = f"{wanted(consumer.wants, consumer.status)}{match}"
        text = f"{named(consumer.worker or 'the trainer')} waits itself for {lacks}"
        for _, (cause, *_) in _explain(consumer, replace(about, waits=(*about.waits, need.wait), matches=None))[:1]:
            return f"{text}: {cause.text}", cause.advice
        return text, "Let it ask for less"
    takers, take = [worker for worker in about.workers if worker.taken], about.last_take
    takers = [worker for worker in takers if not worker.groups] or takers  # a sampler draws expired groups, too
    alive = [worker.name for worker in takers if worker.is_alive(about.now)]
    names = {worker.name for worker in about.workers if worker.is_alive(about.now)}
    gone_workers = [worker for worker in takers if worker.name not in names]
    if gone_workers and not alive:
        return f"no consumer is left: {_ends_of(gone_workers, about)}", otherwise
    living = f"{people(alive, 'is alive', 'are alive')}, and " if alive else ""
    last_draw = "nobody has drawn any yet" if take is None else f"the last draw was at {clock(take.time, about.now)}"
    return f"{living}{last_draw}", otherwise


_LOOK = "(replaybuf ls --status {}, where unfit=, or keep_unfit=True of a put, keeps them)"

_GROUP_CAUSES = (
    Cause(Reason.HELD_BACK, lambda need: too_large(need.wait.limits, need.task, need.status, need.least), final=True),
    Cause(Reason.NO_SUCH_TASK, _no_such_task, "See that the producers put under this name"),
    Cause(Reason.HELD_BACK, _held_back),
    Cause(Reason.NO_MATCH, _no_match, "Relax the query, or wait for groups that match it"),
    Cause(
        Reason.LEASED,
        _leased,
        "They come back when they are given back, or the lease ends. Who holds them should acknowledge each batch that "
        f"was trained on; {_ADOPT}",
        yields=True,
    ),
    Cause(Reason.FINISHED, _finished, "Publish a state that isn't finished, and start workers, to go on"),
    Cause(Reason.FINISHED, _end_of_dataset, final=True),
    Cause(Reason.LEASED, _leased_by_gone, "They come back then, and other workers generate them", yields=True),
    Cause(
        Reason.DEADLOCK,
        _deadlock,
        "Publish (publish) before waiting for a batch, and ask for no more groups than the workers keep ready "
        "(their batch_size)",
    ),
    Cause(
        Reason.EXPIRED,
        _expired,
        "Raise the stale threshold, sync the producers' weights sooner, or see that a producer generates them again "
        "(expired_groups_retryable=True keeps them for that)",
        yields=True,
    ),
    Cause(Reason.UNFIT, _filtered, f"Look at what the filter drops {_LOOK.format('filtered')}", yields=True),
    Cause(Reason.UNFIT, _failed, f"Mend what makes the errors {_LOOK.format('failed')}", yields=True),
    Cause(
        Reason.FILLING,
        _filling,
        "Put the rollouts that are missing (buffer.filling(task) has their indices), or let groups go without them "
        "(fill_seconds=, min_size=)",
        yields=True,
    ),
    Cause(
        Reason.OTHER_STATUS,
        _other_status,
        "See that a worker generates what is init or aborted (produce_loop takes that first), put results as "
        "COMPLETED, or draw groups of that status (group_status=)",
        yields=True,
    ),
    Cause(Reason.ABSENT, _absent, yields=True),
    Cause(Reason.SLOW, _slow, "Wait, ask for fewer groups, or start more producers"),
)
_ROOM_CAUSES = (Cause(Reason.HELD_BACK, _full),)
_TRAINER_CAUSES = (
    Cause(Reason.FINISHED, _finished, "Stop them"),
    Cause(Reason.FINISHED, _end_of_all_datasets, "They end when the trainer has published that it has finished"),
    Cause(Reason.ABSENT, _unpublished),
)
