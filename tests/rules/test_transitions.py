"""Transitions: whatever happens to groups, what was counted adds up; and what each event does to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import (
    Place,
    Tally,
    Transition,
    acknowledged,
    drawn,
    dropped,
    expired,
    given_back,
    lapsed,
    leased,
    put,
    refused,
    removed,
    set_aside,
    unleased,
    updated,
)
from replaybuf.values.rollouts.rollout import Status

COMPLETED, FAILED, ARCHIVED = Status.COMPLETED, Status.FAILED, Status.ARCHIVED
BUFFERED = [status for status in Status if status not in (ARCHIVED, Status.FILLING)]
GONE = (Tally.TAKEN, Tally.EVICTED, Tally.DROPPED, Tally.DELETED, Tally.REPLACED, Tally.PRUNED)


@dataclass
class One:
    """A group, as its transitions see it."""

    place: Place | None = None
    times_sampled: int = 0
    deliveries: int = 0
    error: str | None = None

    @property
    def status(self) -> Status:
        assert self.place is not None
        return self.place.status

    def after(self, step: Transition) -> One:
        assert step.before == self.place
        deliveries = 0 if step.afresh else self.deliveries + step.deliveries
        error = step.error or (None if step.afresh else self.error)
        return One(step.after, self.times_sampled + step.draws, deliveries, error)


def one(status: Status = COMPLETED, times_sampled: int = 0, deliveries: int = 0, *, leased: bool = False) -> One:
    return One(Place(status, leased), times_sampled, deliveries)


limits = st.builds(
    Limits,
    max_times_sampled=st.integers(0, 3),
    max_deliveries=st.integers(0, 2),
    archive_groups=st.none() | st.just(2),
)
ones = st.builds(one, st.sampled_from(BUFFERED), st.integers(0, 4), st.integers(0, 3))

# What may happen to a group that is in the buffer, that is leased, and that is archived.
Event = Callable[[One, Limits], Transition]
HERE: list[Event] = [
    drawn,
    drawn,
    lambda group, limits: leased(group),
    lambda group, limits: leased(group),
    lambda group, limits: set_aside(group.status, "?"),
    lambda group, limits: expired(group.status),
    lambda group, limits: updated(group.status, Status.INIT),
    lambda group, limits: updated(group.status, COMPLETED),
    *(lambda group, limits, tally=tally: removed(group.place, tally) for tally in GONE[1:]),  # type: ignore[misc]
]
LEASED: list[Event] = [
    acknowledged,
    lapsed,
    lambda group, limits: given_back(group, limits, None),
    lambda group, limits: given_back(group, limits, "bad"),
    lambda group, limits: unleased(group),
    lambda group, limits: removed(Place(group.status, leased=True), Tally.REPLACED),
]
RETURNS: list[Event] = [acknowledged, lambda group, limits: given_back(group, limits, None), LEASED[4]]
IN_ARCHIVE: list[Event] = [
    drawn,
    lambda group, limits: leased(group),
    lambda group, limits: removed(Place(ARCHIVED), Tally.PRUNED),
    lambda group, limits: removed(Place(ARCHIVED), Tally.DELETED),
]


@dataclass
class Task:
    """The groups of a task, and its tallies."""

    groups: list[One] = field(default_factory=list)
    tallies: Counter[tuple[Status, Tally]] = field(default_factory=Counter)

    def happens(self, group: One, step: Transition) -> None:
        self.groups = [other for other in self.groups if other is not group]
        if step.after is not None:
            self.groups.append(group.after(step))
        self.tallies.update(step.counts)

    def total(self, *names: Tally) -> int:
        return sum(n for (status, name), n in self.tallies.items() if name in names and status != ARCHIVED)


@given(limits, st.data())
@settings(max_examples=60)
def test_every_group_that_was_put_is_somewhere_or_counted_as_gone(limits: Limits, data: st.DataObject) -> None:
    """After any events put is the sum of all ways to leave, size and leased, and none is negative."""
    task = Task()
    for _ in range(data.draw(st.integers(1, 30))):
        group = data.draw(st.sampled_from([One(), One(), *task.groups]))
        if group.place is None:
            step = data.draw(st.sampled_from([*map(put, BUFFERED), dropped(COMPLETED), dropped(FAILED)]))
        elif group.place.leased:
            # What comes from the archive was taken before: only its returns to it change nothing else.
            step = data.draw(st.sampled_from(RETURNS if group.status == ARCHIVED else LEASED))(group, limits)
        else:
            step = data.draw(st.sampled_from(IN_ARCHIVE if group.status == ARCHIVED else HERE))(group, limits)
        task.happens(group, step)
        assert task.total(Tally.PUT) == task.total(*GONE, Tally.SIZE, Tally.LEASED)
        counts = Counter((group.place.status, group.place.tally) for group in task.groups if group.place is not None)
        from_tallies = {name: n for name, n in task.tallies.items() if name[1] in (Tally.SIZE, Tally.LEASED) and n}
        assert from_tallies == counts
        assert all(n >= 0 for n in task.tallies.values()), task.tallies
        assert all(group.times_sampled >= 0 and group.deliveries >= 0 for group in task.groups)


# Laws of one event, or of two after each other


@given(ones, limits)
def test_a_lease_that_is_acknowledged_counts_as_a_draw(group: One, limits: Limits) -> None:
    lease = leased(group)
    leased_group = group.after(lease)
    end, draw = acknowledged(leased_group, limits), drawn(group, limits)
    assert (end.after, leased_group.after(end).times_sampled) == (draw.after, group.after(draw).times_sampled)
    assert summed(lease, end) == summed(draw)


@given(ones)
def test_a_lease_that_is_undone_leaves_no_trace(group: One) -> None:
    lease = leased(group)
    leased_group = group.after(lease)
    assert leased_group.after(unleased(leased_group)) == group
    assert summed(lease, unleased(leased_group)) == {}
    assert lease.undone == unleased(leased_group)


@given(ones, limits)
def test_a_draw_that_is_undone_leaves_no_trace(group: One, limits: Limits) -> None:
    draw = drawn(group, limits)
    assert group.after(draw).after(draw.undone) == group
    assert summed(draw, draw.undone) == {}


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize(("most", "times"), [(1, 0), (2, 0), (2, 1), (0, 9)])
def test_only_completed_groups_stay_until_their_last_draw_and_archived_ones_after_it(
    status: Status, most: int, times: int
) -> None:
    step = drawn(one(status, times), Limits(max_times_sampled=most))
    stays = status == ARCHIVED or (status == COMPLETED and (most == 0 or times + 1 < most))
    assert step.after == (Place(status) if stays else None)
    assert (Tally.TAKEN in names(step)) is not stays


@pytest.mark.parametrize("status", BUFFERED)
def test_completed_groups_that_were_drawn_are_archived_where_there_is_an_archive(status: Status) -> None:
    step = drawn(one(status), Limits(archive_seconds=9))
    assert step.after == (Place(ARCHIVED) if status == COMPLETED else None)
    assert step.counts[(status, Tally.TAKEN)] == 1


@pytest.mark.parametrize(
    ("times", "name"), [(0, Tally.SAMPLED_NEW), (1, Tally.SAMPLED_AGAIN), (7, Tally.SAMPLED_AGAIN)]
)
def test_first_draws_are_counted_apart(times: int, name: Tally) -> None:
    for step in (drawn(one(times_sampled=times), Limits()), leased(one(times_sampled=times))):
        assert step.counts[(COMPLETED, name)] == 1
    for step in (unleased(one(times_sampled=times + 1)), given_back(one(times_sampled=times + 1), Limits(), "bad")):
        assert step.counts[(COMPLETED, name)] == -1


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
def test_a_group_that_was_delivered_too_often_is_set_aside(status: Status) -> None:
    """It says how often, and why the last time; where it already is FAILED, too."""
    limits = Limits(max_deliveries=3)
    transition = given_back(one(status, 1, 2, leased=True), limits, "bad")
    assert (transition.after, transition.error, transition.deliveries) == (Place(status), None, 0)
    step = given_back(one(status, 1, 3, leased=True), limits, "bad")
    assert step.after == Place(FAILED)
    assert step.error == "delivered 3 times without acknowledgement; the last time bad"
    assert step.counts[(status, Tally.SET_ASIDE)] == 1
    assert step.counts[(FAILED, Tally.SIZE)] == 1


def test_a_delivery_without_a_reason_does_not_count() -> None:
    """Not even the last one that is allowed; the return does."""
    group = one(times_sampled=1, deliveries=1, leased=True)
    step = given_back(group, Limits(max_deliveries=1), None)
    assert step == unleased(group)
    assert step.counts == {**unleased(group).counts, (COMPLETED, Tally.RETURNED): 1}


def test_acknowledgement_forgets_failed_deliveries() -> None:
    group = one(times_sampled=1, deliveries=3, leased=True)
    assert group.after(acknowledged(group, Limits(max_times_sampled=2))) == one(times_sampled=1)


@pytest.mark.parametrize("status", Status)
def test_an_update_forgets_why_a_group_failed(status: Status) -> None:
    group = replace(one(status, 2, 3), error="bad")
    step = updated(status, COMPLETED)
    assert group.after(step) == one(COMPLETED, 2)
    assert set(names(step)) <= {Tally.SIZE}


@pytest.mark.parametrize(
    ("step", "why"), [(set_aside(FAILED, "?"), Tally.SET_ASIDE), (expired(Status.EXPIRED), Tally.EXPIRED)]
)
def test_what_happens_again_counts_again_and_moves_nothing(step: Transition, why: Tally) -> None:
    assert (step.moves, step.enters_races, step.pins_staleness) == (False, False, False)
    assert names(step) == [why]


@pytest.mark.parametrize("place", [Place(status, leased) for status in BUFFERED for leased in (False, True)])
def test_a_group_leaves_the_place_where_it_is(place: Place) -> None:
    step = removed(place, Tally.REPLACED)
    assert step.after is None
    assert step.counts == {(place.status, place.tally): -1, (place.status, Tally.REPLACED): 1}


def test_rollouts_of_a_group_that_fills_are_counted_by_their_group() -> None:
    assert put(Status.FILLING).counts == {(Status.FILLING, Tally.SIZE): 1}
    for tally in (Tally.REPLACED, Tally.DELETED):
        assert removed(Place(Status.FILLING), tally).counts == {(Status.FILLING, Tally.SIZE): -1}


def test_a_put_that_is_lost_is_in_no_place() -> None:
    """What is dropped was put, for its age or as unfit; what is refused wasn't."""
    assert dropped(Status.EXPIRED).counts == {(Status.EXPIRED, Tally.PUT): 1, (Status.EXPIRED, Tally.DROPPED): 1}
    assert dropped(FAILED).counts == {(FAILED, Tally.PUT): 1, (FAILED, Tally.PRUNED): 1}
    assert refused(FAILED).counts == {(FAILED, Tally.REFUSED): 1}


@pytest.mark.parametrize(
    "step",
    [put(COMPLETED), unleased(one(leased=True)), updated(COMPLETED, FAILED), drawn(one(), Limits(max_times_sampled=2))],
)
def test_what_comes_or_was_drawn_and_stays_races_anew(step: Transition) -> None:
    assert step.enters_races


def test_staleness_is_pinned_where_the_train_step_is_left() -> None:
    """By a lease, an archive and another status; what comes back from a lease brings its own."""
    for step in (leased(one()), drawn(one(), Limits(archive_groups=1)), updated(FAILED, COMPLETED)):
        assert step.pins_staleness
    for step in (put(FAILED), unleased(one()), drawn(one(), Limits()), drawn(one(), Limits(max_times_sampled=0))):
        assert not step.pins_staleness


def test_equal_transitions_change_groups_alike_whatever_they_count() -> None:
    limits = Limits(max_times_sampled=0)
    first, second = drawn(one(times_sampled=0), limits), drawn(one(times_sampled=1), limits)
    assert first == second
    assert first.counts != second.counts


def names(step: Transition) -> list[Tally]:
    return [name for _, name in step.counts]


def summed(*steps: Transition) -> dict[tuple[Status, Tally], int]:
    """What several steps count together."""
    total: Counter[tuple[Status, Tally]] = Counter()
    for step in steps:
        total.update(step.counts)
    return {name: n for name, n in total.items() if n}
