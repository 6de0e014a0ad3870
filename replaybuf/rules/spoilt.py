"""What became of groups that were put and can't be drawn: expired, filtered, failed, aborted, of another status."""

from __future__ import annotations

from replaybuf import units
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.causes import Cause, Need, Reason, be
from replaybuf.rules.circumstances import Circumstances, Counted
from replaybuf.rules.transitions import Tally
from replaybuf.rules.wording import brief, groups, joined, named, since

#: Errors are quoted up to this length.
_LONGEST = 200


def spoilt(need: Need, about: Circumstances) -> list[Cause]:
    """Return what became of groups that were put and can't be drawn, what befell the most first."""
    if not need.missing:
        return []
    if need.status != Status.COMPLETED:
        found = [_of_status(need, about, status) for status in Status if status not in (need.status, Status.ARCHIVED)]
    else:
        found = [_expired(need, about), *(_unfit(need, about, status) for status in _UNFIT), _aborted(need, about)]
        found.append(_of_status(need, about, Status.INIT))
    return [cause for _, cause in sorted((one for one in found if one), key=lambda one: -one[0])]


def _of_status(need: Need, about: Circumstances, status: Status) -> tuple[int, Cause] | None:
    """Groups of a status that isn't wanted explain a wait if they are enough, or there never was a wanted one.

    INIT groups are no cause while producers generate others of the task: those will be generated, too.
    """
    there = about.count(need.task, status)
    never = not about.put(need.task, need.status).ever
    if not there or (status == Status.INIT and about.in_flight(need.task, need.status)):
        return None
    if not never and (about.unfinished(need.task) if status == Status.INIT else there) < need.missing:
        return None
    text = f"{groups(there)} {be(there)} there, but {'its' if there == 1 else 'their'} status is {status}"
    if need.status != Status.COMPLETED:
        advice = f"Draw groups of that status (group_status={status.value!r}), or wait for {need.status} ones"
    else:
        text += ": put without a status, or prompts that nobody has generated yet"
        advice = (
            "Put results as COMPLETED (rollout.status, or put(status='completed')), and mark those that are there by "
            f"update({{'status': '{status}'}}, status='completed'); prompts need a worker that generates them"
        )
    return there, Cause(Reason.OTHER_STATUS, text, advice)


def _expired(need: Need, about: Circumstances) -> tuple[int, Cause] | None:
    there, at = about.count(need.task, Status.EXPIRED), _at_step(need, about)
    before_put = about.put(need.task, Status.EXPIRED)
    put = about.put(need.task, Status.COMPLETED) + before_put
    lost = _lost(need, about, about.expired(need.task), put, share=1 / 2)
    advice = "Raise the stale threshold or sync the producers' weights sooner"
    if there and about.unfinished(need.task) >= need.missing:
        have, wait = ("has", "waits") if there == 1 else ("have", "wait")
        text = f"{groups(there)} {have} expired{at}, and {wait} to be generated again"
    elif lost is not None:
        bad, of, span = lost
        stale = "they grow stale faster than they are drawn"
        if 2 * (before_put.lately if span else before_put.ever) >= bad:
            at, stale = "", "they were too stale when they were put"
        text = f"{bad:,} of the {groups(of)} put{span} expired{at}: {stale}"
    else:
        return None
    kept = there or about.count(need.task, Status.EXPIRED, Tally.LEASED)
    advice += "; " + (
        "see that a producer generates them again"
        if kept
        else "with expired_groups_retryable=True they are kept, to be generated again"
    )
    return max(there, lost[0] if lost else 0), Cause(Reason.EXPIRED, text, advice)


def _at_step(need: Need, about: Circumstances) -> str:
    step = about.steps.get(need.task)
    return "" if step is None else f" at the refresh to train step {step}"


_UNFIT = {
    Status.FILTERED: (Reason.FILTERED, "Look at what the filter drops", ""),
    Status.FAILED: (Reason.FAILED, "Look at the errors", ", and mend what makes them"),
}


def _unfit(need: Need, about: Circumstances, status: Status) -> tuple[int, Cause] | None:
    """Filtered and failed groups stay for SQL: they count only where most of what was put became so."""
    reason, look, mend = _UNFIT[status]
    advice = f"{look} (replaybuf ls --status {status}){mend}"
    if not about.count(need.task, status):
        advice = (
            f"{look}{mend}: none of them is kept to look at; unfit=1000 in the config keeps what a strategy makes so, "
        )
        advice += "keep_unfit=True what you put"
    bad, good = about.put(need.task, status), about.put(need.task, Status.COMPLETED)
    if status == Status.FAILED:
        bad, good = bad + about.set_aside(need.task), good - about.spoilt(need.task)
    lost = _lost(need, about, bad, good, share=1)
    if lost is None:
        return None
    count, put, span = lost
    text = f"{count:,} of the {groups(count + put)} put{span}"
    if status == Status.FILTERED:
        return count, Cause(reason, f"{text} {'was filtered' if count == 1 else 'were filtered'}", advice)
    text += " failed"
    for did, who in (("made", about.failed_by), ("drawn", about.failed_with)):
        if by := who.get(need.task):
            names = sorted(by, key=lambda name: (-by[name], name))
            text += f", {did} by {joined([f'{named(name)} ({by[name]:,})' for name in names])}"
    if need.task in about.errors:
        text += f"; the last error: {brief(about.errors[need.task], _LONGEST)}"
    return count, Cause(reason, text, advice)


def _lost(need: Need, about: Circumstances, bad: Counted, put: Counted, share: float) -> tuple[int, int, str] | None:
    """Return the groups that were lost in some way if that explains what is missing, those that were put, and since
    when: lately, or else ever. It does where they are at least this share of those put, also lately."""
    whole = (bad.lately, put.lately) == (bad.ever, put.ever)
    if bad.lately < share * put.lately:
        return None
    if bad.lately >= need.missing and about.before is not None and not whole:
        if about.for_later:
            return bad.lately, put.lately, f" {since(about.before.time, None)}"
        return bad.lately, put.lately, f" in the last {units.age(about.now - about.before.time)}"
    if bad.ever >= need.missing and bad.ever >= share * put.ever:
        return bad.ever, put.ever, ""
    return None


def _aborted(need: Need, about: Circumstances) -> tuple[int, Cause] | None:
    there = about.count(need.task, Status.ABORTED)
    if not there or about.unfinished(need.task) < need.missing:
        return None
    text = f"{groups(there)} {be(there)} aborted: interrupted, and {'waits' if there == 1 else 'wait'} to be continued"
    return there, Cause(Reason.ABORTED, text, "See that a producer continues them (produce_loop takes them first)")
