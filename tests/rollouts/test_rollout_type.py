"""Rollouts of any type: fields out, fields in, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum
from typing import Any, Literal

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from replaybuf import ReplayBufferConfig
from replaybuf.errors import ConfigError, DecodeError, RolloutError
from replaybuf.values.rollouts.rollout import RolloutState, Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.shapes import shape_of


class Color(Enum):
    RED = "red"


class Size(Enum):
    BIG = 1


class Shape(Enum):
    ROUND = 1


class Model(BaseModel):
    message: str
    tags: list[str] = []
    notes: dict[str, Any] = Field(default_factory=dict)
    color: Color | None = None
    sizes: dict[str, list[Size]] | None = None
    score: float | None = 1.0
    _seen: list[int] = PrivateAttr(default_factory=list)

    @functools.cached_property
    def length(self) -> int:
        return len(self.message)


class OpenModel(BaseModel):
    model_config = ConfigDict(extra="allow")
    message: str


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True)
    message: str
    status: Status = Status.INIT


@dataclasses.dataclass
class Plain:
    message: str
    tags: list[str] = dataclasses.field(default_factory=list)
    shape: Literal[Shape.ROUND] | None = None
    count: int = dataclasses.field(init=False)
    unset: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.message)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tight:
    message: str
    tags: tuple[str, ...] = ()
    note: str | None = None
    unset: int = dataclasses.field(init=False)


@dataclasses.dataclass
class Inherits(Tight.__mro__[1]):  # type: ignore[misc]
    message: str = "x"


@pydantic.dataclasses.dataclass
class Validated:
    message: str
    count: int = Field(default=3)
    tags: list[str] = Field(default_factory=list)


ROLLOUTS = [
    RolloutState(message=[{"role": "user"}], rollout_id=3, status=Status.COMPLETED),
    Model(message="hi", color=Color.RED, score=None),
    OpenModel(message="hi", more=[1]),  # type: ignore[call-arg]
    FrozenModel(message="hi"),
    Plain("hi", ["a"]),
    Tight(message="hi", tags=("a",)),
    Inherits("hi"),
    Validated("hi", tags=["a"]),
    {"message": "hi", "none": None},
]
of_each_type = pytest.mark.parametrize("rollout", ROLLOUTS, ids=lambda rollout: type(rollout).__name__)


def read(instance: Any) -> dict[str, Any]:
    """The fields of an instance, as those of one inside a rollout are stored."""
    shape = shape_of(type(instance))
    assert shape is not None
    return shape.read(instance)


def round_trip(rollout: Any) -> Any:
    return RolloutType(type(rollout)).from_fields(read(rollout))


@of_each_type
def test_the_round_trip_gives_an_equal_rollout(rollout: Any) -> None:
    if isinstance(rollout, Plain | Tight):
        fields = [f.name for f in dataclasses.fields(rollout) if f.name != "unset"]
        restored = round_trip(rollout)
        assert type(restored) is type(rollout)
        assert [getattr(restored, name) for name in fields] == [getattr(rollout, name) for name in fields]
        assert not hasattr(restored, "unset")
        return
    assert round_trip(rollout) == rollout
    assert repr(round_trip(rollout)) == repr(rollout)


@of_each_type
def test_fields_are_got_set_and_looked_for_alike(rollout: Any) -> None:
    rollout, kind = round_trip(rollout), RolloutType(type(rollout))
    assert kind.get(rollout, "message") in ("hi", [{"role": "user"}])
    assert kind.get(rollout, "absent") is None
    assert kind.get(rollout, "absent", 3) == 3
    assert kind.has(rollout, "message")
    assert not kind.has(rollout, "absent")
    message: Any = [{"a": 1}]
    kind.set(rollout, "message", message)
    assert kind.get(rollout, "message") is message


def test_setting_a_field_runs_the_class_own_setattr() -> None:
    rollout = RolloutState(message=[])
    RolloutType(RolloutState).set(rollout, "rollout_id", 7)
    assert rollout.uid == 7


def test_a_field_that_the_class_lacks_is_not_set() -> None:
    rollout = Plain("hi")
    RolloutType(Plain).set(rollout, "reward", 1)
    assert not hasattr(rollout, "reward")


def test_a_value_that_the_class_refuses_is_an_error_that_names_the_field() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(validate_assignment=True)
        reward: float = 0.0

    with pytest.raises(RolloutError, match=r"can't set 'reward' of a .*Strict: "):
        RolloutType(Strict).set(Strict(), "reward", "much")


def test_none_that_is_the_default_is_left_out() -> None:
    assert read(RolloutState(message=[])).keys() == {
        "message",
        "seq_staleness",
        "status",
        "extra_fields",
    }
    assert read(Tight(message="hi")) == {"message": "hi", "tags": ()}


def test_private_attributes_get_their_defaults() -> None:
    rollout = Model(message="hi")
    rollout._seen.append(1)
    first, second = round_trip(rollout), round_trip(rollout)
    assert first._seen == []
    assert first._seen is not second._seen


def test_a_built_model_is_whole() -> None:
    rollout = round_trip(Model(message="hi"))
    rollout.message = "other"
    assert rollout.model_copy(deep=True) == rollout
    assert rollout.model_dump()["message"] == "other"
    assert "message" in rollout.model_fields_set


def test_a_field_whose_default_depends_on_others_has_to_be_there() -> None:
    class Dependent(BaseModel):
        message: str
        size: int = Field(default_factory=lambda values: len(values["message"]))

    assert round_trip(Dependent(message="hi")).size == 2
    with pytest.raises(DecodeError, match="field 'size' must be there"):
        RolloutType(Dependent).from_fields({"message": "hi"})


@pytest.mark.parametrize("cls", [Model, RolloutState, Plain, Tight])
def test_fields_of_another_rollout_type_are_named(cls: type[Any]) -> None:
    rollout_type = RolloutType(cls)
    for _ in range(2):  # what was found wrong is not remembered as right
        with pytest.raises(DecodeError, match=rf"{cls.__name__}: it has no field 'alien' and field 'message' must be"):
            rollout_type.from_fields({"alien": 1})


def test_a_rollout_without_a_required_field_is_refused_at_put() -> None:
    with pytest.raises(RolloutError, match="field 'message' must be there"):
        RolloutType(RolloutState).rows([RolloutState.model_construct()])


def test_a_rollout_of_another_class_is_refused_and_both_are_named() -> None:
    with pytest.raises(RolloutError, match="exactly RolloutState, not dict; rollout_type= in the config"):
        RolloutType(RolloutState).rows([{"message": []}])
    with pytest.raises(RolloutError, match="exactly dict, not RolloutState"):
        RolloutType(dict).require(RolloutState(message=[]), ["message"], "put")

    class More(RolloutState):
        more: int = 0

    with pytest.raises(RolloutError, match=r"exactly RolloutState, not .*More;"):
        RolloutType(RolloutState).rows([More(message=[])])


@of_each_type
def test_require_names_the_missing_fields_and_the_feature(rollout: Any) -> None:
    rollout_type = RolloutType(type(rollout))
    rollout_type.require(rollout, ["message"], "put")
    with pytest.raises(RolloutError, match="staleness needs fields 'aa', 'bb', which this"):
        rollout_type.require(rollout, ["message", "aa", "bb"], "staleness")


@pytest.mark.parametrize("cls", [int, list, Color, "dict", dict[str, int]])
def test_classes_that_are_no_rollouts_are_refused(cls: Any) -> None:
    with pytest.raises(ConfigError, match="rollout_type must be"):
        RolloutType(cls)


async def test_a_refresh_that_would_mask_tokens_needs_a_mask() -> None:
    @dataclasses.dataclass
    class Bare:
        response_ids: list[int]
        response_model_steps: list[int]

    async with ReplayBufferConfig(url="memory://", rollout_type=Bare).build() as buffer:
        await buffer.put([Bare([1, 2], [0, 7])], "math", current_train_step=8)
        with pytest.raises(RolloutError, match="task_token_stale_thresholds needs field 'response_mask'"):
            await buffer.refresh_staleness(
                task_stale_thresholds={"math": None}, task_token_stale_thresholds={"math": 4}, current_train_step=8
            )
        thresholds: dict[str, int | None] = {"math": None}
        await buffer.refresh_staleness(
            task_stale_thresholds=thresholds, task_token_stale_thresholds=thresholds, current_train_step=8
        )


def test_a_field_that_a_dict_has_not_is_no_key() -> None:
    kind = RolloutType(dict, fields={"status": None})
    assert kind.get({None: "failed"}, "status") is None
    assert not kind.has({None: "failed"}, "status")
