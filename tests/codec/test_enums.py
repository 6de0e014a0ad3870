"""Members of enums."""

from __future__ import annotations

import pytest

from replaybuf.codec import marks
from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, Color, Level, Name, Typed, hostile_field, round_trip, same


def test_enums_of_the_annotations_are_restored() -> None:
    codec = Codec(RolloutType(Typed))
    (back,) = codec.decode(codec.encode([Typed(color=Color.RED)]))
    assert back.color is Color.RED


def test_an_unknown_enum_comes_back_as_its_value() -> None:
    plain = Codec(RolloutType(dict))
    value = {"a": [Color.RED, Level.HIGH, Name.ANN, Status.FAILED]}
    assert same(round_trip(value, plain), {"a": [(1, "r"), 3, "ann", Status.FAILED]})


def test_a_value_that_is_no_member_any_more_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="not a valid Status"):
        DICTS.decode(hostile_field({MARK[marks.ENUM]: ["replaybuf.rollout.Status", "gone"]}))


def test_an_enum_name_is_never_looked_up_among_modules() -> None:
    payload = hostile_field({MARK[marks.ENUM]: ["os.system", "exit 1"]})
    assert DICTS.decode(payload) == [{"field": "exit 1"}]
