"""The groups that are put and taken: token fields of realistic kinds and lengths."""

from __future__ import annotations

from typing import Any

from benchmarks import fields
from replaybuf import RolloutState, Status
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.group_fields import fields_of
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.staleness import date_responses

CODEC = Codec(RolloutType(RolloutState))

#: Groups are put at this train step, so that those of model step s have the staleness TRAIN_STEP - s - 1.
TRAIN_STEP = 100
MODEL_STEP = 97


def small() -> list[RolloutState]:
    """Return a group of one rollout, 1 KB as stored, with lists of tokens."""
    return rollouts(fields.small())


def arrays(kilobytes: int = 100) -> list[RolloutState]:
    """Return a group of 8 rollouts whose token fields are int32 and float32 arrays."""
    return rollouts(fields.arrays(kilobytes))


def lists(kilobytes: int = 100) -> list[RolloutState]:
    """Return a group of 8 rollouts whose token fields are lists."""
    return rollouts(fields.lists(kilobytes))


def payload(group: list[RolloutState], model_step: int = MODEL_STEP) -> bytes | bytearray:
    """Return the bytes that the store keeps for a group."""
    date_responses(group, fields_of(group, CODEC.rollout_type), model_step, CODEC.rollout_type)
    return CODEC.encode(group)


def plain(group: list[RolloutState]) -> list[dict[str, Any]]:
    """Return a group as msgpack takes it, with the model steps that put fills in."""
    date_responses(group, fields_of(group, CODEC.rollout_type), MODEL_STEP, CODEC.rollout_type)
    rows = CODEC.rollout_type.rows(group)
    return [{name: value for name, value in row.items() if value is not None} | {"status": "completed"} for row in rows]


def rollouts(group: list[dict[str, Any]]) -> list[RolloutState]:
    """Return completed rollouts of these fields."""
    return [RolloutState(status=Status.COMPLETED, **rollout) for rollout in group]
