"""Instances of classes: of every kind, found through annotations, rebuilt without running their code."""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Optional, TypeVar

import hypothesis
import pytest
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from typing_extensions import TypeAliasType, TypedDict

from replaybuf.errors import ConfigError, DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.codec.values import DICTS, MARK, Bits, Color, Level, Name, hostile_field, round_trip, same, values

if TYPE_CHECKING:
    from nowhere import Ghost  # type: ignore[import-not-found]

T = TypeVar("T")


class Mood(Enum):
    GOOD = 1


class Model(BaseModel):
    a: Any = None
    b: list[int] = Field(default_factory=list)
    _secret: int = PrivateAttr(7)

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.a, str) and self.a == "boom":
            raise AssertionError("building must not run the class's code")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Cached(BaseModel):
    a: Any = None

    @functools.cached_property
    def size(self) -> int:
        return 1


class Box(BaseModel, Generic[T]):
    content: T


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


@dataclasses.dataclass
class Data:
    a: Any = None


@dataclasses.dataclass
class Late:
    later: int = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Tight:
    a: Any = None
    ghost: Ghost | None = None

    def __post_init__(self) -> None:
        if isinstance(self.a, str) and self.a == "boom":
            raise AssertionError("building must not run the class's code")


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any = None
    b: list[int] = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    a: Any = None
    b: int = 3


KINDS = [Model, Cached, Data, Tight, Slotted, Pair]
CODEC = Codec(RolloutType(dict, types=[*KINDS, Late, Open, Mood, Box[int], Color, Level, Name, Bits]))


@dataclasses.dataclass
class Remark:
    """What an annotation says beside its type."""


@dataclasses.dataclass
class Node:
    """Reaches the others through its annotations."""

    children: list[Node] = dataclasses.field(default_factory=list)
    mood: Mood | None = None
    model: Optional[Model] = None  # noqa: UP045
    pet: Annotated[Cat | Dog, "raise AssertionError", Remark] = dataclasses.field(default_factory=Cat)
    box: Box[int] | None = None
    ghost: list[Ghost] | dict[str, Slotted] | None = None
    pairs: dict[str, tuple[Pair, ...]] = dataclasses.field(default_factory=dict)
    typed: Typed | None = None
    alias: Alias | None = None
    renamed: Renamed | None = None


class Typed(TypedDict):
    data: NotRequired[Data]
    slotted: Slotted


Alias = TypeAliasType("Alias", "list[Alias] | Data")
Renamed = NewType("Renamed", Tight)


@hypothesis.given(values)
@hypothesis.settings(max_examples=40)
def test_what_an_instance_holds_comes_back_with_its_type(value: Any) -> None:
    instances = [kind.model_construct(a=value) if issubclass(kind, BaseModel) else kind(a=value) for kind in KINDS]
    restored = round_trip(instances, CODEC)
    assert [type(instance) for instance in restored] == KINDS
    assert all(same(instance.a, value) for instance in restored)


def test_everything_that_annotations_reach_is_known() -> None:
    classes = RolloutType(Node).classes
    reached = {Node, Mood, Model, Cat, Dog, Box, Box[int], Pair, Data, Slotted, Tight}
    assert all(kind in classes for kind in reached)
    assert Remark not in classes
    codec = Codec(RolloutType(Node))
    node = Node(
        [Node(mood=Mood.GOOD)],
        model=Model(a=1),
        pet=Dog(),
        box=Box[int](content=3),
        pairs={"x": (Pair(1, 2),)},
        typed={"slotted": Slotted(1, [2])},
        alias=[Data(1)],  # type: ignore[arg-type]
        renamed=Renamed(Tight(4)),
    )
    assert codec.decode(codec.encode([node])) == [node]


def test_what_keys_a_typed_dict_has_is_left_to_type_checkers() -> None:
    codec, rollout = Codec(RolloutType(Typed)), {"other": Slotted(1)}
    assert codec.decode(codec.encode([rollout])) == [rollout]


def test_instances_can_be_keys() -> None:
    assert round_trip({Tight(1): {Pair(1, 2)}}, CODEC) == {Tight(1): {Pair(1, 2)}}


def test_no_code_of_the_class_decides_what_comes_back() -> None:
    model = Model()
    model.a = "boom"
    assert round_trip(model, CODEC) == model
    tight = Tight()
    object.__setattr__(tight, "a", "boom")
    assert round_trip(tight, CODEC) == tight


def test_a_subclass_is_another_class() -> None:
    class Sub(Model):
        more: int = 0

    with pytest.raises(RolloutError, match=r"Sub \(a pydantic model\) can't be stored.*types=\["):
        CODEC.encode([{"a": Sub()}])


def test_the_place_inside_an_instance_is_named() -> None:
    for outer, step in ((Model.model_construct(a=[1, len]), r"\.a\[1\]"), (Pair({"x": len}), r"\.a\['x'\]")):
        with pytest.raises(RolloutError, match=rf"rollouts\[0\]\['f'\]\[0\]{step}: a value of type builtin"):
            CODEC.encode([{"f": [outer]}])


def twin(module: str) -> type[Any]:
    cls = dataclasses.make_dataclass("Twin", ["a"])
    cls.__module__ = module
    return cls


def test_a_class_that_moved_to_another_module_is_found_by_the_rest_of_its_name() -> None:
    payload = hostile_field({MARK[ext.OBJECT]: ["__main__:Data", {"a": 1}]})
    assert CODEC.decode(payload) == [{"field": Data(1)}]
    codec = Codec(RolloutType(dict, types=[twin("one"), twin("two")]))
    with pytest.raises(DecodeError, match=r"types=\[Twin\]"):
        codec.decode(hostile_field({MARK[ext.OBJECT]: ["three:Twin", {"a": 1}]}))


def test_a_class_inside_another_is_not_taken_for_one_of_its_last_name() -> None:
    with pytest.raises(DecodeError, match=r"holds a other\.Sample\.Status, .*types=\[Sample\.Status\]"):
        CODEC.decode(hostile_field({MARK[ext.ENUM]: ["other:Sample.Status", "completed"]}))


def test_two_classes_of_one_name_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"two classes are called one\.Twin"):
        RolloutType(dict, types=[twin("one"), twin("one")])


@pytest.mark.parametrize("cls", [int, len, dict, Enum, BaseModel, "Data"])
def test_types_that_no_annotations_describe_are_a_config_error(cls: Any) -> None:
    with pytest.raises(ConfigError, match="types takes enums, named tuples"):
        RolloutType(dict, types=[cls])


@pytest.mark.parametrize(
    "content",
    [
        {MARK[ext.OBJECT]: ["tests.codec.test_classes:Data", [1]]},
        {MARK[ext.OBJECT]: ["tests.codec.test_classes:Pair", {"c": 1}]},
        {MARK[ext.OBJECT]: ["tests.codec.test_classes:Data"]},
        {MARK[ext.OBJECT]: [[1], {}]},
        {MARK[ext.ENUM]: ["tests.codec.test_classes:Data", 1]},
        {MARK[ext.ENUM]: ["tests.codec.test_classes:Mood", None, "BAD"]},
        {MARK[ext.OBJECT]: ["tests.codec.test_classes:Pair", [1, 2]]},
        {MARK[ext.OBJECT]: ["tests.codec.test_classes:Data", {"alien": 1}]},
    ],
)
def test_hostile_instances_are_decode_errors(content: Any) -> None:
    with pytest.raises(DecodeError, match=r"damaged|another"):
        CODEC.decode(hostile_field(content))


def test_readers_that_only_look_need_no_classes() -> None:
    instances = {"m": Model(a=1), "p": Pair(1), "e": Mood.GOOD, "k": {Tight(1): 2}}
    payload = CODEC.encode([instances])
    with pytest.raises(DecodeError, match=r"add types=\[Model\]"):
        DICTS.decode(payload)
    [plain] = Codec(RolloutType(dict), as_plain=True).decode(payload)
    assert (plain["m"], plain["p"], plain["e"]) == ({"a": 1, "b": []}, {"a": 1, "b": 3}, 1)
    assert [dict(key) for key in plain["k"]] == [{"a": 1}]
