"""Converters: values of classes that the config names, and nothing else is run."""

from __future__ import annotations

import dataclasses
import fractions
import sys
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from replaybuf.errors import ConfigError, DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, hostile_field, round_trip, same, values


class Box:
    """Holds any value."""

    def __init__(self, content: Any = None) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and same(self.content, other.content)

    __hash__ = None  # type: ignore[assignment]


class BigBox(Box):
    """A subclass, which has no converter."""


@dataclasses.dataclass
class Moves:
    names: list[str]


def _open(box: Box) -> Any:
    return box.content


CONVERTERS = {
    Box: ("box", _open, Box),
    Moves: ("moves", lambda moves: ";".join(moves.names), lambda text: Moves(text.split(";"))),
    fractions.Fraction: ("fraction", str, fractions.Fraction),
    set: ("set", sorted, set),
}


def codec_of(*entries: tuple[type, Any], **options: Any) -> Codec:
    return Codec(RolloutType(dict), converters=dict(entries), **options)


CODEC = Codec(RolloutType(dict), converters=CONVERTERS)
BOXES = Codec(DICTS.rollout_type, converters={Box: CONVERTERS[Box]})


@settings(max_examples=40)
@given(values)
def test_what_a_converter_returns_comes_back_as_it_was(value: Any) -> None:
    assert round_trip([Box((Box(value), 1))], BOXES) == [Box((Box(value), 1))]


def test_a_converter_wins_over_what_is_known_of_its_class() -> None:
    value = {"a": Moves(["x", "y"]), "b": fractions.Fraction(1, 3), "c": {3, 1}}
    payload = CODEC.encode([value])
    (restored,) = CODEC.decode(payload)
    assert same(list(restored.items()), list(value.items()))
    (plain_values,) = Codec(RolloutType(dict), as_plain=True).decode(payload)
    assert plain_values == {"a": "x;y", "b": "1/3", "c": [1, 3]}


def test_a_converter_is_for_exactly_its_class() -> None:
    message = (
        r"rollouts\[0\]\['field'\]\[0\]: a value of type tests\.codec\.test_converters\.BigBox can't be stored: "
        r"add converters=\{BigBox: \(\"BigBox\", encode, decode\)\} to the config"
    )
    with pytest.raises(RolloutError, match=message):
        BOXES.encode([{"field": [BigBox()]}])


def test_a_converter_that_raises_is_named_with_the_place() -> None:
    def fail(box: Box) -> Any:
        raise KeyError("no such box")

    message = r"rollouts\[0\]\['field'\]\['a'\]\[1\]: the converter 'box' of .*test_converters.Box raised KeyError: "
    with pytest.raises(RolloutError, match=message + "'no such box'"):
        codec_of((Box, ("box", fail, Box))).encode([{"field": {"a": [1, Box()]}}])


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda box: [1, object()], ": a value of type object"),
        (lambda box: box, ": the converter 'box' of .*Box returned a Box again"),
    ],
)
def test_a_converter_that_returns_what_can_not_be_stored_is_named(encode: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=r"rollouts\[1\]\['field'\]\[0\]" + message):
        codec_of((Box, ("box", encode, Box))).encode([{"field": 1}, {"field": [Box()]}])


def test_a_converter_that_returns_the_value_inside_another_is_noticed() -> None:
    with pytest.raises(RolloutError, match=r"rollouts\[0\]\['field'\].*: nested too deeply, or holds itself"):
        codec_of((Box, ("box", lambda box: [box], Box))).encode([{"field": [Box()]}])


def test_a_converter_that_changes_what_is_being_packed_is_an_encode_error() -> None:
    holder: dict[str, Any] = {"a": Box()}

    def grow(box: Box) -> int:
        holder[f"b{len(holder)}"] = 1
        return 1

    with pytest.raises(RolloutError, match=r"rollouts\[0\]\['field'\]: dictionary changed size"):
        codec_of((Box, ("box", grow, Box))).encode([{"field": holder}])


@pytest.mark.parametrize("inside", [lambda items: items, lambda items: {"a": (1, items)}], ids=["alone", "nested"])
@pytest.mark.parametrize("change", [lambda items: items.append(1), lambda items: items.pop()], ids=["grows", "shrinks"])
def test_a_list_that_changes_while_it_is_packed_is_an_encode_error(change: Any, inside: Any) -> None:
    """As when another thread has it: msgpack has written its length before."""
    items: list[Any] = [Box(), 2, 3]

    def encode(box: Box) -> int:
        change(items)
        return 1

    with pytest.raises(RolloutError, match="a list in the rollouts was changed while it was stored"):
        codec_of((Box, ("box", encode, Box))).encode([{"field": inside(items), "other": 1}])


def test_an_unknown_converter_is_a_decode_error() -> None:
    with pytest.raises(
        DecodeError, match="the converter 'box', which the buffer's config doesn't name: add converters="
    ):
        DICTS.decode(BOXES.encode([{"field": Box(1)}]))


def test_a_converter_that_can_not_rebuild_is_a_decode_error() -> None:
    def fail(content: Any) -> Any:
        raise RuntimeError("x" * 10_000)

    payload = BOXES.encode([{"field": Box(1)}])
    with pytest.raises(
        DecodeError, match=r"a value can't be rebuilt: the converter 'box' of .*Box raised RuntimeE"
    ) as e:
        codec_of((Box, ("box", _open, fail))).decode(payload)
    assert len(str(e.value)) < 1000


def test_reading_runs_nothing_that_the_config_does_not_name() -> None:
    before = set(sys.modules)
    for name in ("os.system", "antigravity.fly", "builtins:exit", "", None, [], {"a": 1}, 1):
        with pytest.raises(DecodeError):
            BOXES.decode(hostile_field({MARK[ext.CONVERTED]: [name, "exit 1"]}))
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("converters", "message"),
    [
        ({"Box": ("box", _open, Box)}, "'Box' is no class"),
        ({list: ("list", _open, list)}, "'list'> is no class, or one whose values are stored as they are"),
        ({np.ndarray: ("array", _open, list)}, "values are stored as they are"),
        *(
            ({Box: entry}, r"Box needs \(name, encode, decode\)")
            for entry in (("box", _open), "box", ("", _open, Box), (1, _open, Box), ("box", 1, Box))
        ),
        ({Box: ("box", _open, Box), Moves: ("box", _open, Moves)}, "Box and .*Moves have the same name 'box'"),
    ],
)
def test_what_is_no_converter_is_a_config_error(converters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="converters: .*" + message):
        Codec(RolloutType(dict), converters=converters)


@attrs.frozen
class Turn:
    role: str
    ids: Any = attrs.field(factory=list)


class Call(msgspec.Struct, frozen=True):
    tool: str
    arguments: dict[str, Any] = {}


def test_attrs_classes_and_msgspec_structs_are_stored_by_the_converters_of_the_docs() -> None:
    converters = {
        Turn: ("turn", attrs.asdict, lambda fields: Turn(**fields)),
        Call: ("call", msgspec.structs.asdict, lambda fields: Call(**fields)),
    }
    originals = [Turn("user", [1, 2]), {"calls": (Call("search", {"ids": [3]}),)}]
    assert round_trip(originals, Codec(RolloutType(dict), converters=converters)) == originals
    for value in (Turn("user"), Call("search")):
        with pytest.raises(RolloutError, match=rf"{type(value).__name__} can't be stored: add converters="):
            round_trip(value)
