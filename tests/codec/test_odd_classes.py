"""Classes in odd forms: what decorators, descriptors, slots and generics make of them still comes back equal."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import attrs
import pydantic
import pytest

from replaybuf.errors import ConfigError, RolloutError
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import round_trip


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


class Doubled:
    """A descriptor that keeps the value elsewhere."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return 0 if instance is None else instance.kept

    def __set__(self, instance: Any, value: Any) -> None:
        instance.kept = value


@dataclasses.dataclass
class Described:
    a: Any = Doubled()


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
        Described(4),
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
    with pytest.raises(ConfigError, match=r"fields aren't its whole content: .*converters="):
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


def test_methods_are_no_fields() -> None:
    rollout_type = RolloutType(WithMethods)
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
