"""Odd classes of rollouts, and what is refused because it would not come back."""

from __future__ import annotations

import collections
import dataclasses
import functools
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import attrs
import numpy as np
import pydantic
import pytest

from replaybuf.errors import ConfigError, RolloutError
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import RolloutState, Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, STATES, ListOf, Pair, Point, Typed, round_trip


@pydantic.dataclasses.dataclass
class Checked:
    a: int = pydantic.Field(default=1)


@dataclasses.dataclass
class BelowChecked(Checked):
    b: int = 2
    a: int = 3


@attrs.define
class BelowPlain(BelowChecked):
    c: int = 3


@pydantic.dataclasses.dataclass
class OnlyToMakeIt:
    a: int
    given: dataclasses.InitVar[int]


@pydantic.dataclasses.dataclass(slots=True, frozen=True)
class TightOnlyToMakeIt:
    a: int
    given: dataclasses.InitVar[int] = 0


@dataclasses.dataclass
class NeedsArguments:
    a: int

    def __new__(cls, a: int) -> NeedsArguments:
        return super().__new__(cls)


@pytest.mark.parametrize(
    "instance",
    [
        BelowChecked(5, 6),
        OnlyToMakeIt(1, 2),
        TightOnlyToMakeIt(1),
        NeedsArguments(1),
    ],
    ids=lambda instance: type(instance).__name__,
)
def test_instances_come_back_equal(instance: Any) -> None:
    codec = Codec(RolloutType(type(instance)))
    assert codec.decode(codec.encode([instance])) == [instance]


def test_a_class_whose_fields_are_not_those_of_the_dataclass_it_inherits_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="not <class"):
        RolloutType(BelowPlain)
    with pytest.raises(RolloutError, match=r"BelowPlain can't be stored: add converters="):
        round_trip(BelowPlain())


@dataclasses.dataclass
class Failure(Exception):  # noqa: N818
    a: int = 0


def test_a_class_with_more_content_than_its_fields_is_advised_a_converter() -> None:
    with pytest.raises(RolloutError, match=r"Failure can't be stored: .*converters=\{Failure:"):
        round_trip(Failure(1))
    with pytest.raises(ConfigError, match="other classes are stored with converters="):
        RolloutType(dict, types=[Failure])


class Odd(Enum):
    NAN = float("nan")
    PAIR = (1, 2)
    CALLED = ("a", len)
    ITEMS = (1, [2])


class Misnamed(Enum):
    A = range(3)

    @property
    def name(self) -> str:  # type: ignore[override]
        return "another"


@pytest.mark.parametrize("member", [*Odd, *Misnamed], ids=lambda member: member._name_)
def test_members_with_odd_values_are_stored_by_their_names(member: Enum) -> None:
    assert round_trip([member], Codec(RolloutType(dict, types=[Odd, Misnamed])))[0] is member


REFUSED = [
    (object(), "a value of type object can't be stored"),
    (Enum("Shade", "DARK")["DARK"], r"\(an enum\) .* add types=\[Shade\]"),
    (Typed(), r"\(a pydantic model\) .* add types=\[Typed\]"),
    (Point(), r"\(a dataclass\) .* add types=\[Point\]"),
    (Pair(1, 2), r"\(a named tuple\) .* add types=\[Pair\]"),
    (collections.defaultdict(list), "plain dict"),
    (collections.deque(), "deque can't be stored: add converters"),
    (collections.UserDict(), "UserDict can't be stored: add converters"),
    (ListOf([1]), "plain list"),
    (len, "or leave it out of the rollout"),
    (np.array([{}, object()]), "a value of type object can't be stored"),
    (np.zeros(1, [("a", "i4")]), "or store a dict of arrays"),
    (np.zeros(1, "M8[s]"), "astype"),
    (np.longdouble(1), "astype"),
    (np.ma.masked_array([1]), "convert it to a plain numpy.ndarray"),
    (datetime(2024, 1, 1, tzinfo=type("Tz", (UTC.__class__.__base__,), {})()), "time zone"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[type(value).__name__ for value, _ in REFUSED])
def test_what_would_not_come_back_is_refused_with_advice(value: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        DICTS.encode([{"field": value}])
    with pytest.raises(RolloutError, match=message):
        DICTS.encode([{"field": {"a": [1, (value,)]}}])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, 2, 3, object()]}, r"rollouts\[1\]\.extra_fields\['a'\]\[3\]: a value of type object"),
        ({"a": ({"b": object()},)}, r"rollouts\[1\]\.extra_fields\['a'\]\[0\]\['b'\]: "),
        ({object: 1}, r"rollouts\[1\]\.extra_fields\[key <class 'object'>\]: "),
        ({"a": [b"fine", object()]}, r"rollouts\[1\]\.extra_fields\['a'\]\[1\]: a value of type object"),
        ({"a": [1, len]}, r"rollouts\[1\]\.extra_fields\['a'\]\[1\]: a value of type builtin_function"),
        ({"a": np.array([[1, len]])}, r"rollouts\[1\]\.extra_fields\['a'\]\[0, 1\]: a value of type builtin_function"),
    ],
)
def test_the_path_of_what_is_refused_is_named(value: Any, path: str) -> None:
    with pytest.raises(RolloutError, match=path):
        STATES.encode([RolloutState(message=[]), RolloutState.model_construct(message=[], extra_fields=value)])


def test_the_fields_of_a_rollout_are_named_by_texts() -> None:
    with pytest.raises(RolloutError, match="must be texts"):
        DICTS.encode([{"a": 1}, {1: 1}])


class Methods:
    """Has methods where other classes have fields that features use."""

    def reward(self) -> float:
        return 1.0

    @staticmethod
    def status() -> str:
        return "x"


@dataclasses.dataclass
class WithMethods(Methods):
    a: int = 0

    @functools.cached_property
    def finish_reason(self) -> str:
        return "stop"


def test_methods_are_no_fields() -> None:
    """A property is one, of either kind."""
    rollout_type = RolloutType(WithMethods)
    assert rollout_type.get(WithMethods(), "finish_reason") == "stop"
    assert rollout_type.status(WithMethods()) is Status.COMPLETED
    assert rollout_type.get(WithMethods(), "reward") is None
    assert not rollout_type.has(WithMethods(), "reward")


def test_a_property_that_raises_is_a_rollout_error() -> None:
    @dataclasses.dataclass
    class Lazy:
        @property
        def reward(self) -> float:
            raise OSError("no such judge")

    with pytest.raises(RolloutError, match=r"'reward' of a .*Lazy raised OSError: no such judge"):
        RolloutType(Lazy).get(Lazy(), "reward")


def nested(make: Any, depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: frozenset([x])])
def test_too_deep_nesting_is_an_encode_error(make: Any) -> None:
    with pytest.raises(RolloutError, match=r"rollouts\[0\]\['field'\]: nested too deeply"):
        DICTS.encode([{"field": nested(make, 5000)}])


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_whatever_depth_is_encoded_is_decoded(make: Any) -> None:
    for depth in (200, 240, 250, 255, 400, 500, 505, 510):
        try:
            payload = DICTS.encode([{"field": nested(make, depth)}])
        except RolloutError:
            assert depth > 200
        else:
            DICTS.decode(payload)


def test_a_value_over_the_limit_of_msgpack_is_an_encode_error() -> None:
    with pytest.raises(RolloutError, match=r"rollouts\[0\]\['field'\]: .*large"):
        DICTS.encode([{"field": bytes(2**32)}])  # zeros that are never touched
