"""Rollouts and their status: the data in the store.

A *rollout* is one trajectory sampled for a prompt; a *group* is the list of rollouts of one prompt, the unit that is
stored, taken and expired. Field names and statuses are those of InternLM xtuner, so that data can be moved without
renaming.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from replaybuf.rollouts.statuses import ASIDE as ASIDE
from replaybuf.rollouts.statuses import UNFIT as UNFIT
from replaybuf.rollouts.statuses import Status as Status
from replaybuf.rollouts.statuses import group_status as group_status


class RolloutState(BaseModel):
    """One rollout.

    Token fields (`prompt_ids, tokens, response_ids, logprobs, response_mask, response_model_steps, input_ids, labels,
    position_ids`) take lists or numpy arrays and are returned as they were put: arrays with the same dtype and shape,
    lists as lists. `response_model_steps[i]` is the training step whose weights produced response token i;
    `seq_staleness` counts train steps. `uid` is the old name of `rollout_id`; setting one sets the other.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    rollout_id: int | str | None = None
    group_id: int | str | None = None
    uid: int | str | None = None
    message: list[dict[str, Any]]
    prompt_ids: Any = None
    num_tokens: int | None = None
    proxy_attn_flops: float | None = None
    data_source: Any = None
    mm_info: Any = None
    reward_model: Any = None
    session_id: int | str | None = None
    tokens: Any = None
    tools: Any = None
    tool_choice: Any = None
    sample_params: Any = None
    response: str | None = None
    tool_calls: Any = None
    response_ids: Any = None
    logprobs: Any = None
    routed_experts: Any = None
    finish_reason: str | None = None
    response_mask: Any = None
    response_model_steps: Any = None
    seq_staleness: int = 0
    input_ids: Any = None
    labels: Any = None
    reward: Any = None
    task_name: str | None = None
    status: Status = Status.INIT
    error_msg: str | None = None
    position_ids: Any = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _one_identity(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        rollout_id, uid = data.get("rollout_id"), data.get("uid")
        if rollout_id is None and uid is None:
            return data
        if rollout_id is not None and uid is not None and rollout_id != uid:
            raise ValueError(f"uid is the old name of rollout_id: give one of them, not {uid!r} and {rollout_id!r}")
        identity = uid if rollout_id is None else rollout_id
        return {**data, "rollout_id": identity, "uid": identity}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "uid":
            super().__setattr__("rollout_id", value)
        elif name == "rollout_id":
            super().__setattr__("uid", value)
