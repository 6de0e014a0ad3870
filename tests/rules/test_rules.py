"""The rules by themselves: limits, policies, balance, comparison."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replaybuf import ConfigError
from replaybuf.buffer.waits import check_possible
from replaybuf.errors import InputError, QueryError
from replaybuf.rules.balance import Parts, balance, micro_batches, packed_rows
from replaybuf.rules.limits import Level, Limits
from replaybuf.rules.policies import (
    KEYS,
    PRIORITIZED,
    UNIFORM,
    UNIT,
    OrderTerm,
    Race,
    ReplayPolicy,
    UniformPolicy,
    in_order,
    parse_order,
    share,
)
from replaybuf.storage.values import Draw
from replaybuf.values.rollouts.rollout import ASIDE
from replaybuf.values.rollouts.statuses import Status
from tests.pages import DOCS

COMPLETED = Status.COMPLETED
MORE_THAN_EVER = 50


@dataclass
class Task:
    """A task as its limits see it: how often each of its groups was drawn, and the totals."""

    limits: Limits
    draws: list[int] = field(default_factory=list)
    inserted: int = 0
    sampled: int = 0

    @property
    def level(self) -> Level:
        return Level(len(self.draws), len(self.draws), self.inserted, self.sampled)

    def put(self, chance: random.Random) -> None:
        if self.limits.insertable(self.level, COMPLETED) == 0:
            return
        self.draws.append(0)
        self.inserted += 1
        if self.limits.capacity is not None and len(self.draws) > self.limits.capacity:
            assert self.limits.on_full == "evict"
            self.lose(chance)

    def draw(self, size: int, chance: random.Random) -> None:
        """Draw as many groups, if they may all be drawn now."""
        if self.limits.drawable(self.level) < size:
            return
        chance.shuffle(self.draws)
        self.sampled += size
        counts = [times + 1 for times in self.draws[:size]]
        self.draws[:size] = [times for times in counts if self.limits.keeps(COMPLETED, times)]

    def lose(self, chance: random.Random) -> None:
        """A group expires, is deleted or is evicted."""
        if self.draws:
            self.draws.pop(chance.randrange(len(self.draws)))

    def goes_on(self, size: int) -> bool:
        """Whether a group can be put, or a batch of this size drawn."""
        return self.limits.insertable(self.level, COMPLETED) != 0 or self.limits.drawable(self.level) >= size


ratios = st.sampled_from([0.1, 0.3, 1 / 3, 0.5, 1, 1, 1.5, 2, 2, 3, 4, 7.3])
ranges = st.builds(
    lambda low, width: (low, low + width),
    st.sampled_from([-20, -7.3, -1, 0, 0, 0.5, 1, 3, 8]),
    st.sampled_from([0.5, 1, 1.5, 2, 2, 3, 4, 6.5, 8, 15, 30]),
)
fields = st.fixed_dictionaries(
    {"max_times_sampled": st.sampled_from([0, 1, 1, 2, 3, 4])},
    optional={
        "capacity": st.integers(1, 12),
        "on_full": st.sampled_from(["evict", "block", "reject"]),
        "min_size": st.integers(0, 12),
        "samples_per_insert": ratios,
        "error_buffer": st.sampled_from([1, 1.5, 2, 3, 4, 7.3, 10, 20]) | ranges,
    },
)


def accepted(values: dict[str, Any]) -> Limits | None:
    try:
        return Limits(**values)
    except ConfigError:
        return None


some_limits = fields.map(accepted).filter(bool)
seeds = st.integers(0, 2**32)


@given(some_limits, seeds, st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([0.3, 0.5, 0.8]))
@example(Limits(max_times_sampled=1, samples_per_insert=0.5, capacity=4), 0, 0.0, 0.5)
@example(Limits(max_times_sampled=2, samples_per_insert=2, capacity=4), 0, 0.0, 0.8)
@example(Limits(max_times_sampled=0, samples_per_insert=4, error_buffer=4), 0, 0.3, 0.5)
@example(Limits(max_times_sampled=0, samples_per_insert=4, error_buffer=8), 0, 0.0, 0.5)
@example(Limits(max_times_sampled=3, samples_per_insert=3, error_buffer=3), 0, 0.0, 0.5)
@settings(max_examples=70)
def test_no_limits_that_are_accepted_bring_all_to_a_stop(limits: Limits, seed: int, losses: float, puts: float) -> None:
    """Producers and consumers that do anything, and groups that are lost: at any time one of the sides can go on."""
    chance = random.Random(seed)
    largest = limits.largest_batch or MORE_THAN_EVER
    size = chance.choice([largest, largest, chance.randint(1, largest)])
    task = Task(limits)
    assert task.goes_on(largest)
    for _ in range(300):
        if chance.random() < losses:
            task.lose(chance)
        elif chance.random() < puts:
            task.put(chance)
        else:
            task.draw(chance.choice([size, size, chance.randint(1, largest)]), chance)
        assert task.goes_on(largest), task


def reverb_range(limits: Limits) -> tuple[float, float]:
    """The range of the error as Reverb's SampleToInsertRatio makes it of its arguments (rate_limiters.py)."""
    assert limits.error_buffer is not None
    if isinstance(limits.error_buffer, tuple):
        return limits.error_buffer
    offset = (limits.samples_per_insert or 0) * limits.min_size
    return offset - limits.error_buffer, offset + limits.error_buffer


rated = st.fixed_dictionaries(
    {
        "max_times_sampled": st.sampled_from([0, 1, 2, 4]),
        "min_size": st.integers(1, 6),
        "samples_per_insert": st.sampled_from([0.25, 0.5, 1, 1.5, 2, 4]),
        "error_buffer": st.sampled_from([1, 2, 4, 8]) | ranges,
    }
)


@given(rated.map(accepted).filter(bool), seeds)
@settings(max_examples=70)
def test_puts_and_draws_are_held_back_when_reverb_holds_them_back(limits: Limits, seed: int) -> None:
    """Where no group is lost, all decisions are those of CanInsert and CanSample in its rate_limiter.cc."""
    low, high = reverb_range(limits)
    ratio = limits.samples_per_insert or 0
    task, chance = Task(limits), random.Random(seed)
    for _ in range(150):
        size, error = len(task.draws), task.inserted * ratio - task.sampled
        assert (limits.drawable(task.level) >= 1) == (size >= max(1, limits.min_size) and error - 1 >= low)
        assert (limits.insertable(task.level, COMPLETED) != 0) == (size + 1 <= limits.min_size or error + ratio <= high)
        if chance.random() < 0.5:
            task.put(chance)
        else:
            task.draw(1, chance)


FULL: dict[str, Any] = {
    "samples_per_insert": 2,
    "max_times_sampled": 2,
    "capacity": 4,
    "on_full": "block",
    "min_size": 4,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"capacity": 4, "min_size": 5}, "capacity 4 is below min_size 5"),
        ({"capacity": 0}, "capacity must be a whole number of at least 1"),
        ({"min_size": -1}, "min_size"),
        ({"max_times_sampled": -1}, "max_times_sampled"),
        ({"max_times_sampled": 1.0}, "max_times_sampled"),
        ({"max_times_sampled": True}, "max_times_sampled"),
        ({"on_full": "block"}, "needs a capacity"),
        ({"capacity": 4, "on_full": "block", "max_times_sampled": 0}, "all puts would wait for ever"),
        ({"error_buffer": 2}, "needs samples_per_insert"),
        ({"samples_per_insert": 0}, "samples_per_insert must be a positive number"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert must be a positive number"),
        ({"samples_per_insert": 1, "error_buffer": 0.5}, "error_buffer 0.5 is too small"),
        ({"samples_per_insert": 4, "error_buffer": 3, "max_times_sampled": 0}, "use at least 4"),
        (
            {"samples_per_insert": 1, "error_buffer": (0.5, 1.5)},
            r"\(0.5, 1.5\) is too small for .* at most 0 to at least 2",
        ),
        ({"samples_per_insert": 1, "error_buffer": (4, 0)}, "is too small"),
        ({"samples_per_insert": 1, "error_buffer": (0, float("inf"))}, "the lowest and highest error"),
        ({"samples_per_insert": 1, "error_buffer": (float("nan"), 4)}, "the lowest and highest error"),
        ({"samples_per_insert": 1, "error_buffer": (1, 2, 3)}, "the lowest and highest error"),
        ({"samples_per_insert": 1, "error_buffer": (0, True)}, "the lowest and highest error"),
        (
            {"samples_per_insert": 2, "error_buffer": (9, 20), "min_size": 4, "max_times_sampled": 0},
            "a range from at most 8 to at least 12",
        ),
        ({"samples_per_insert": 2, "error_buffer": (-9, 1), "max_times_sampled": 0}, "at most 0 to at least 4"),
        (FULL | {"error_buffer": (6, 20)}, "raise the capacity to 7"),
        ({"samples_per_insert": 2}, "can't be reached with max_times_sampled 1"),
        ({"samples_per_insert": 1, "max_times_sampled": 2, "capacity": 4, "on_full": "block"}, "the buffer fills up"),
        ({"samples_per_insert": 2, "max_times_sampled": 0, "capacity": 4, "on_full": "reject"}, "the buffer fills up"),
        (FULL | {"error_buffer": 2}, "widen it, or raise the capacity to 7"),
        ({"archive_seconds": 0}, "archive must be a positive time"),
        ({"archive_groups": 0}, "archive must be a whole number of at least 1"),
        ({"max_deliveries": -1}, "max_deliveries"),
    ],
)
def test_limits_that_can_never_deliver_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limits(**values)


def test_what_a_refusal_names_is_accepted() -> None:
    Limits(**FULL | {"capacity": 7}, error_buffer=2)
    Limits(samples_per_insert=2, max_times_sampled=0, error_buffer=(8, 12), min_size=4)
    Limits(samples_per_insert=1.5, max_times_sampled=0, error_buffer=(0, 3))


def draw_of(size: int) -> Draw:
    return Draw({"math": MORE_THAN_EVER}, at_least={"math": size})


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ({}, None),
        ({"min_size": 9}, None),
        ({"capacity": 4}, 4),
        ({"samples_per_insert": 1}, 2),
        ({"samples_per_insert": 1, "min_size": 8}, 16),
        ({"samples_per_insert": 1, "error_buffer": 10, "capacity": 4}, 4),
        ({"samples_per_insert": 3, "error_buffer": 3, "max_times_sampled": 0}, 1),
        ({"samples_per_insert": 1, "min_size": 4, "error_buffer": 1, "capacity": 4, "on_full": "block"}, 1),
        ({"samples_per_insert": 1, "min_size": 1, "error_buffer": (0, 8)}, 8),
        ({"samples_per_insert": 1, "min_size": 1, "error_buffer": (0, 1)}, 1),
        ({"samples_per_insert": 2, "min_size": 1, "error_buffer": (-4, 4), "max_times_sampled": 0}, 2),
    ],
)
def test_the_largest_batch(values: dict[str, Any], largest: int | None) -> None:
    limits = Limits(**values)
    assert limits.largest_batch == largest
    if largest is not None:
        check_possible(draw_of(largest), limits)
        with pytest.raises(InputError, match=f"a batch of {largest + 1} groups of task math would wait for ever: "):
            check_possible(draw_of(largest + 1), limits)


def test_the_seed_makes_the_sampling_keys() -> None:
    """Of groups with a weight, and of those of priority 0."""
    groups = [(1, 1.0), (2, 0.0)]
    first, repeated, other = (Race(UNIFORM, seed).draw_keys(groups) for seed in (1, 1, 2))
    assert first == repeated
    assert all(key != other_key for key, other_key in zip(first, other, strict=True))


def test_a_race_begins_anew_before_its_keys_lose_their_digits() -> None:
    assert not Race(PRIORITIZED, 0, 2.0**30).is_worn([1.0, 2.0**9])
    assert Race(PRIORITIZED, 0, 2.0**30).is_worn([1.0, 2.0**11])
    assert Race(PRIORITIZED, 0, 0.0, 2.0**41).is_worn([])


def test_a_share_is_in_units_and_0_for_priority_0() -> None:
    assert share(UNIT) == 1.0
    assert share(0.0) == 0.0
    assert 0 < share(1e-300) == share(1e-250)


# Levels


def test_a_put_counts_by_its_status() -> None:
    """A completed group counts for the rate, too; those that aren't trained on take no room."""
    level = Level(5, 3, 7, 2)
    assert level.joined_by(Status.COMPLETED) == Level(6, 4, 8, 2)
    for status in (status for status in Status if status != Status.COMPLETED):
        assert level.joined_by(status) == (level if status in ASIDE else Level(6, 3, 7, 2))


def test_what_is_replaced_makes_room_and_stays_counted_for_the_rate() -> None:
    assert Level(5, 3, 7, 2).without([Status.COMPLETED, Status.FAILED, Status.ARCHIVED]) == Level(4, 2, 7, 2)


# Seeds


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    assert UniformPolicy(seed).seed == seed


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", True])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be a whole number of at least 0, below 2"):
        UniformPolicy(seed)  # type: ignore[arg-type]


def test_items_without_a_value_come_last_in_any_direction() -> None:
    items = [{"reward": reward, "uid": uid} for uid, reward in enumerate((None, 0.5, 1.0, None, 0.5))]
    for order, uids in (
        ("reward", [1, 4, 2, 0, 3]),
        ("-reward", [2, 1, 4, 0, 3]),
        (["reward", "-uid"], [4, 1, 2, 3, 0]),
    ):
        assert [item["uid"] for item in in_order(items, parse_order(order), dict.get)] == uids


def test_one_that_orders_by_an_unknown_field_is_refused_when_it_is_defined() -> None:
    with pytest.raises(QueryError, match=r"^Broken.order: can't order by 'rewards'; did you mean 'reward'\?"):
        type("Broken", (ReplayPolicy,), {"name": "broken", "order": (OrderTerm("rewards"),)})


def test_own_policies_may_order_by_each_sampling_key_that_the_page_names() -> None:
    named = re.findall(r"\w+_key", (DOCS / "sampling.md").read_text())
    assert {*named} == {*KEYS}
    for key in named:
        own = type("Own", (ReplayPolicy,), {"name": "own", "order": (OrderTerm(key), OrderTerm("reward"))})
        assert own().key == key


LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=60)


def sums(lengths: list[int], parts: Parts) -> list[int]:
    return [sum(lengths[index] for index in part) for part in parts]


def each_once(lengths: list[int], parts: Parts) -> bool:
    return sorted(itertools.chain(*parts)) == list(range(len(lengths)))


@settings(max_examples=50)
@given(lengths=LENGTHS, data=st.data())
def test_parts_have_each_sequence_once_and_nearly_equal_sums(lengths: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lengths)))
    parts = balance(lengths, number)
    assert each_once(lengths, parts)
    assert len(parts) == number
    assert all(parts)
    assert max(sums(lengths, parts)) - min(sums(lengths, parts)) <= max(lengths)
    assert parts == balance(lengths, number)


@settings(max_examples=50)
@given(lengths=LENGTHS, number=st.integers(1, 8))
def test_parts_of_the_same_size(lengths: list[int], number: int) -> None:
    lengths = lengths * number
    parts = balance(lengths, number, same_size=True)
    assert each_once(lengths, parts)
    assert {len(part) for part in parts} == {len(lengths) // number}
    assert max(sums(lengths, parts)) - min(sums(lengths, parts)) <= max(lengths)


@settings(max_examples=50)
@given(lengths=LENGTHS, most=st.integers(1, 20_000))
def test_rows_have_each_sequence_once_and_no_more_than_fits(lengths: list[int], most: int) -> None:
    most = max(most, *lengths, 1)
    rows = packed_rows(lengths, most)
    assert each_once(lengths, rows)
    assert max(sums(lengths, rows)) <= most
    # No two rows could be one, so all but one are more than half full.
    assert len(rows) <= 2 * math.ceil(sum(lengths) / most) + 1


@settings(max_examples=50)
@given(lengths=LENGTHS, most=st.integers(1, 20_000), at_least=st.integers(1, 5))
def test_micro_batches_are_no_more_than_packed_rows_and_none_is_too_large(
    lengths: list[int], most: int, at_least: int
) -> None:
    most, at_least = max(most, *lengths, 1), min(at_least, len(lengths))
    parts = micro_batches(lengths, most, at_least=at_least)
    assert each_once(lengths, parts)
    assert max(sums(lengths, parts)) <= most
    assert at_least <= len(parts) <= max(at_least, len(packed_rows(lengths, most)))


@pytest.mark.parametrize(
    ("lengths", "at_least"), [([4] * 9 + [5] * 2 + [6] * 6, 8), ([5] * 13 + [4] * 12, 12)], ids=str
)
def test_micro_batches_that_balance_makes_too_large_are_halves_of_rows(lengths: list[int], at_least: int) -> None:
    assert max(sums(lengths, balance(lengths, at_least))) > 12
    parts = micro_batches(lengths, 12, at_least=at_least)
    assert each_once(lengths, parts)
    assert (len(parts), max(sums(lengths, parts)) <= 12) == (at_least, True)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: balance([1, 2], 3), "2 sequences can't be shared out to 3 parts"),
        (lambda: balance([1, 2], 0), r"parts must be a whole number of at least 1, below 2\*\*53, got 0"),
        (lambda: balance([1, 2, 3], 2, same_size=True), "leave out same_size"),
        (lambda: balance([1, -2], 1), r"lengths\[1\] must be a number of at least 0, got -2"),
        (lambda: balance([math.nan], 1), r"lengths\[0\] must be"),
        (lambda: packed_rows([5, 11], 10), "sequence 1 has a length of 11, more than the 10 of a row"),
        (lambda: packed_rows([], 0), "must be above 0, got 0"),
        (lambda: micro_batches([5, 11], 10), "sequence 1 has a length of 11"),
        (lambda: micro_batches([1], 10, at_least=2), "1 sequences can't be shared out to 2 parts"),
        (lambda: micro_batches([1], 10, at_least=1.5), "at_least must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_shared_out_is_refused(call: object, what: str) -> None:
    with pytest.raises(InputError, match=what):
        call()  # type: ignore[operator]
