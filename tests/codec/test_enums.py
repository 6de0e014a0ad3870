"""Members of enums."""

from __future__ import annotations

from enum import Enum

import pytest

from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, Bits, Color, Level, Name, Typed, hostile_field, round_trip


def test_enums_of_the_annotations_are_restored() -> None:
    codec = Codec(RolloutType(Typed))
    (back,) = codec.decode(codec.encode([Typed(color=Color.RED)]))
    assert back.color is Color.RED


@pytest.mark.parametrize("member", [Color.RED, Level.HIGH, Name.ANN, Bits.A])
def test_an_enum_that_the_config_does_not_name_is_refused(member: Enum) -> None:
    name = type(member).__name__
    with pytest.raises(RolloutError, match=rf"rollouts\[0\]\['a'\]\[0\]: .*\.{name} .*add types=\[{name}\]"):
        Codec(RolloutType(dict)).encode([{"a": [member]}])


def test_an_enum_that_the_reader_does_not_know_is_a_decode_error_with_advice() -> None:
    payload = DICTS.encode([{"field": Color.RED}])
    with pytest.raises(DecodeError, match=r"holds a tests\.codec\.values\.Color.*add types=\[Color\]"):
        Codec(RolloutType(dict)).decode(payload)
    assert Codec(RolloutType(dict), as_plain=True).decode(payload) == [{"field": "RED"}]


class Odd(Enum):
    FUNCTION = object()


def test_a_member_whose_value_cannot_be_stored_is_stored_by_its_name() -> None:
    assert round_trip([Odd.FUNCTION], Codec(RolloutType(dict, types=[Odd])))[0] is Odd.FUNCTION


def test_a_value_that_is_no_member_any_more_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="not a valid Status"):
        DICTS.decode(hostile_field({MARK[ext.ENUM]: [f"{Status.__module__}:Status", "gone"]}))
