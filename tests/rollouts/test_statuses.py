"""Statuses and rewards of rollouts, in the words of their classes."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum, IntEnum, StrEnum
from typing import Any, Literal, TypedDict

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from replaybuf import ConfigError, ReplayBufferConfig, RolloutState, Status
from replaybuf.common.units import brief
from replaybuf.errors import InputError, QueryError, RolloutError
from replaybuf.produce.agent_loop import reward_varies
from replaybuf.rules.query import parse
from replaybuf.values.rollouts.rewards import reward_value
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.staleness import reset_response
from replaybuf.values.rollouts.statuses import Statuses
from tests.contract.harness import only
from tests.stores import TASK, build


class Plain(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


class Numbered(IntEnum):
    Init = 0
    Completed = 1
    Expired = 2


class Text(StrEnum):
    DONE = "Completed"
    OTHER = "other"


class Few(Enum):
    COMPLETED = "completed"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        *((status, status) for status in Status),
        ("completed", Status.COMPLETED),
        ("COMPLETED", Status.COMPLETED),
        ("pending", Status.INIT),
        ("truncated", Status.COMPLETED),
        (Plain.TRUNCATED, Status.COMPLETED),
        (Numbered.Completed, Status.COMPLETED),
        (Text.DONE, Status.COMPLETED),
        (Text.OTHER, None),
        ("done", None),
        (1, None),
        (None, None),
        ([], None),
    ],
)
def test_a_status_is_known_by_value_or_name_in_any_case(value: Any, status: Status | None) -> None:
    assert Statuses().get(value) is status
    assert Statuses().get(value) is status  # also when it is remembered


def test_unknown_statuses_are_input_errors_that_say_which_there_are() -> None:
    with pytest.raises(InputError, match="unknown status 'done'; there are init, completed"):
        Statuses().check("done")
    with pytest.raises(InputError, match=r"unknown status 'complete'; did you mean completed\? there are init,"):
        Statuses().check("complete")
    with pytest.raises(InputError, match=r"did you mean finished\?"):
        Statuses({"finished": "completed"}).check("Finishd")
    with pytest.raises(InputError, match="; there are init"):
        Statuses().check(object())


def test_the_config_says_what_statuses_mean() -> None:
    statuses = Statuses({"done": "completed", Text.OTHER: Plain.ABORTED, 7: Status.FAILED, "truncated": "aborted"})
    assert statuses.get("DONE") is Status.COMPLETED
    assert statuses.get(Text.OTHER) is Status.ABORTED
    assert statuses.get(7) is Status.FAILED
    assert statuses.get(Plain.TRUNCATED) is Status.ABORTED
    with pytest.raises(ConfigError, match="'done' is mapped to 'ready'; there are init"):
        Statuses({"done": "ready"})


@pytest.mark.parametrize(
    ("now", "choices", "expired"),
    [
        (Status.COMPLETED, Status, Status.EXPIRED),
        (Plain.COMPLETED, (), Plain.ABORTED),
        (Numbered.Completed, (), Numbered.Expired),
        (Few.COMPLETED, (), Few.COMPLETED),
        ("completed", (), "expired"),
        ("COMPLETED", (), "EXPIRED"),
        ("Completed", (), "Expired"),
        ("completed", ("completed", "aborted"), "aborted"),
        (None, Plain, Plain.ABORTED),
        (None, (), Status.EXPIRED),
    ],
)
def test_expiry_writes_what_the_class_has_for_it(now: Any, choices: Any, expired: Any) -> None:
    chosen = Statuses().like(Status.EXPIRED, now, choices)
    assert (type(chosen), chosen) == (type(expired), expired)


def test_what_is_named_like_ours_is_written_rather_than_an_alias() -> None:
    class Early(Enum):
        TRUNCATED = "truncated"
        COMPLETED = "completed"

    assert Statuses().like(Status.COMPLETED, Early.TRUNCATED, ()) is Early.COMPLETED


def test_a_name_of_their_own_is_written_where_they_have_one() -> None:
    assert Statuses({"stale": "expired"}).like(Status.EXPIRED, "completed", ()) == "stale"


@hypothesis.given(st.sampled_from(Status), st.sampled_from([str.lower, str.upper, str.title]))
def test_what_is_written_means_the_same_when_read(status: Status, case: Any) -> None:
    statuses = Statuses()
    assert statuses.get(statuses.like(status, case("completed"), ())) is status


@dataclasses.dataclass
class Trl:
    """A class with names of its own."""

    completion_ids: list[int]
    completion: str = ""
    state: Plain = Plain.PENDING
    prompt_ids: list[int] | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)


NAMES = {"response_ids": "completion_ids", "response": "completion", "status": "state"}


def test_fields_go_by_the_names_of_the_class() -> None:
    kind = RolloutType(Trl, fields=NAMES)
    rollout = Trl([1, 2], "hi", Plain.COMPLETED, [0], [0, 1, 2])
    assert kind.get(rollout, "response_ids") == [1, 2]
    assert kind.has(rollout, "response_ids")
    assert not kind.has(rollout, "reward")
    assert kind.status(rollout) is Status.COMPLETED
    kind.require(rollout, ["response_ids"], "model_step")
    with pytest.raises(RolloutError, match=r"staleness needs field 'reward'.*fields={'reward': \.\.\.}"):
        kind.require(rollout, ["reward"], "staleness")
    reset_response(rollout, kind)
    assert rollout == Trl([], "", Plain.ABORTED, [0], [0])
    assert kind.rows([rollout])[0].keys() == {"completion_ids", "completion", "state", "prompt_ids", "tokens"}


def test_a_field_that_means_another_is_not_the_one_of_its_own_name() -> None:
    kind = RolloutType(Trl, fields={"response_ids": "tokens", "status": None})
    rollout = Trl([1], "hi", Plain.PENDING, [0], [5])
    assert kind.get(rollout, "response_ids") == [5]
    assert not kind.has(rollout, "tokens")
    assert kind.status(rollout) is Status.COMPLETED  # it has none
    reset_response(rollout, kind)
    assert (rollout.tokens, rollout.state) == ([], Plain.PENDING)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"respnse": "completion"}, "'respnse' is no field that replaybuf uses; there are "),
        ({"response": "text"}, "response is mapped to 'text', which Trl doesn't have; it has completion"),
        ({"response": "completion", "prompt": "completion"}, "two names are mapped to 'completion'"),
    ],
)
def test_a_mapping_that_cannot_be_is_a_config_error(fields: dict[str, str | None], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RolloutType(Trl, fields=fields)


def test_a_status_that_means_none_of_ours_is_refused_with_the_line_of_config() -> None:
    with pytest.raises(RolloutError, match=r"status is 'ready'; .*statuses={'ready': \.\.\.}"):
        RolloutType(dict).status({"status": "ready"})


def test_a_literal_status_gets_a_text_that_it_allows() -> None:
    class Row(TypedDict):
        status: Literal["completed", "aborted"]

    row = {"status": "completed"}
    RolloutType(Row).set_status(row, Status.EXPIRED)
    assert row == {"status": "aborted"}


def test_queries_take_statuses_of_users() -> None:
    assert parse({"status": Plain.TRUNCATED}) == parse({"status": "completed"})
    assert parse({"status": {"$in": [Numbered.Expired, "ABORTED"]}}) == parse(
        {"status": {"$in": ["expired", "aborted"]}}
    )
    assert parse({"status": "done"}, Statuses({"done": "completed"})) == parse({"status": "completed"})
    with pytest.raises(QueryError, match="there is no status 'done'"):
        parse({"status": "done"})


async def test_calls_take_the_statuses_of_the_config() -> None:
    config = ReplayBufferConfig(url="memory://", rollout_type=dict, statuses={"done": "completed"})
    async with config.build() as buffer:
        await buffer.put([{"status": "done", "a": 1}], "t")
        assert await buffer.count("t", "done") == 1
        assert await buffer.count_where({"status": "done"}) == 1
        assert await buffer.update({"status": "done"}, status="DONE") == 1
        assert await buffer.get(1, "t", "done", where={"status": "Done"}) == [[{"status": "done", "a": 1}]]


def test_the_environment_has_no_list_and_no_mapping() -> None:
    for name, text in {"TYPES": "tests.rollouts.test_statuses:Plain", "FIELDS": '{"status": null}'}.items():
        with pytest.raises(ConfigError, match=f"REPLAYBUF_{name}: "):
            ReplayBufferConfig.from_env({"REPLAYBUF_URL": "memory://", f"REPLAYBUF_{name}": text})


PARTS = {"accuracy": 0.25, "format": 1.0, "note": "short"}

NUMBERS = [(0.5, 0.5), (True, 1.0), (np.float32(0.5), 0.5), (np.array([0.5]), 0.5), ({"score": 1}, 1.0)]
INFINITE = [math.nan, -math.inf, 1e101, 10**400, -(10**400), np.array([10**400], dtype=object), np.array(math.inf)]
NONE = [None, {"score": None}, "0.5", {"score": 10**400}, np.array([0.5, 1.0]), [0.5], PARTS, {"score": "1"}, 1j]


def group(*rewards: Any) -> list[RolloutState]:
    return [RolloutState(message=[], response="4", reward=reward, status=Status.COMPLETED) for reward in rewards]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "replaybuf.rewards"]


@pytest.mark.parametrize(("reward", "number"), [*NUMBERS, *((value, None) for value in INFINITE + NONE)], ids=str)
def test_a_reward_is_a_finite_number_or_none(reward: Any, number: float | None) -> None:
    assert reward_value(reward) == number


@pytest.mark.parametrize("reward", ["0.5", math.nan, PARTS, np.array([0.5, 1.0]), [0.5]], ids=str)
async def test_it_is_stored_as_it_is_with_one_warning(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with build("memory://") as buffer:
        for _ in range(2):
            await buffer.put(group(1.0, reward), TASK, key="one")
        item = await only(buffer)
        assert item.reward == 1.0
        assert str(item.item[1].reward) == str(reward)
        await buffer.put(group(1.0, None), TASK)
    (warning,) = warnings(caplog)
    assert f"task {TASK}: the reward of rollouts[1] is {brief(repr(reward))}. It is stored as it is" in warning


async def test_the_reward_key_names_the_part_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    """In means and queries; the other parts stay."""
    async with build("memory://", reward_key="accuracy") as buffer:
        await buffer.put(group(PARTS, {"accuracy": 0.75}), TASK)
        assert await buffer.count_where({"reward": 0.5}) == 1
        assert (await only(buffer)).item[0].reward == PARTS
    assert warnings(caplog) == []


def test_groups_differ_by_the_part_that_counts() -> None:
    members = group({"accuracy": 1.0, "format": 0.0}, {"accuracy": 1.0, "format": 1.0})
    assert not reward_varies(members, reward_key="accuracy")
    assert reward_varies(members, reward_key="format")


@pytest.mark.parametrize("key", ["", 5, None])
def test_a_reward_key_is_a_name(key: Any) -> None:
    with pytest.raises(ConfigError, match="reward_key"):
        build("sqlite:///:memory:", reward_key=key)
