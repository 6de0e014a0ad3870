"""Rollouts and their status: the data in the store.

A *rollout* is one trajectory sampled for a prompt; a *group* is the list of rollouts of one prompt, the unit that is
stored, taken and expired. Field names and statuses are those of InternLM xtuner, so that data can be moved without
renaming.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from replaybuf.values.rollouts.statuses import ASIDE as ASIDE
from replaybuf.values.rollouts.statuses import UNFIT as UNFIT
from replaybuf.values.rollouts.statuses import Status as Status
from replaybuf.values.rollouts.statuses import group_status as group_status


class RolloutState(BaseModel):
    """One rollout.

    Token fields (`prompt_ids, tokens, response_ids, logprobs, response_mask, response_model_steps, input_ids, labels,
    position_ids`) take lists or numpy arrays and are returned as they were put: arrays with the same dtype and shape,
    lists as lists. `response_model_steps[i]` is the training step whose weights produced response token i;
    `seq_staleness` counts train steps. `uid` is the old name of `rollout_id`; setting one sets the other.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    rollout_id: int | str | None = None
    """The rollout's identity, for you; a column of the view `rollouts`. Setting `uid` sets it, too."""
    group_id: int | str | None = None
    """The identity of the prompt, which rollouts of a group share; `import` groups rows of files by it."""
    uid: int | str | None = None
    """xtuner's old name of `rollout_id`. The uid of a group is another number, which `put` returns."""
    message: list[dict[str, Any]]
    """The prompt: messages with `role` and `content`. Previews, SQL's `prompt` and the page show it."""
    prompt_ids: Any = None
    """Token ids of the prompt, shape (prompt,). Their number is `prompt_tokens` in SQL."""
    num_tokens: int | None = None
    """The number of tokens of the prompt, for the framework."""
    proxy_attn_flops: float | None = None
    """An estimate of the work that a prompt is, for the framework."""
    data_source: Any = None
    """The dataset that the prompt is from, for reward functions."""
    mm_info: Any = None
    """Images and the like of the prompt."""
    reward_model: Any = None
    """What the reward is computed from, such as `{"ground_truth": ...}`."""
    session_id: int | str | None = None
    """The session of the inference engine."""
    tokens: Any = None
    """Token ids that the engine goes on from; those of the prompt again when the rollout expires."""
    tools: Any = None
    """The tools that the model may call."""
    tool_choice: Any = None
    """Which of them it has to call."""
    sample_params: Any = None
    """How the engine sampled: temperature, top_p and so on."""
    response: str | None = None
    """The text that was generated. Cleared when the rollout expires, as the next ones are."""
    tool_calls: Any = None
    """The calls of tools that the engine found in the response."""
    response_ids: Any = None
    """Token ids of the response, shape (response,): `model_step=` dates each of them."""
    logprobs: Any = None
    """Log-probabilities of the response's tokens, shape (response,); the page colours tokens by them."""
    routed_experts: Any = None
    """The experts that the tokens went through (mixture of experts), an array."""
    finish_reason: str | None = None
    """Why the engine ended: stop, length, ...; `finish_reasons` of the view `groups` counts them."""
    response_mask: Any = None
    """1 for tokens that are trained, else 0, shape (response,); `token_stale_threshold` sets 0."""
    response_model_steps: Any = None
    """The train step whose weights made each token, shape (response,); staleness is counted from it."""
    seq_staleness: int = 0
    """How many train steps the oldest token is behind; `put` and `refresh_staleness` set it."""
    input_ids: Any = None
    """What the trainer packs: token ids."""
    labels: Any = None
    """What the trainer packs: labels."""
    reward: Any = None
    """A finite number, or a dict with one under `score` (or the config's `reward_key`): means, orders, SQL, `trace`."""
    task_name: str | None = None
    """Kept for you; the task of a group is the one that `put` is given."""
    status: Status = Status.INIT
    """Left out, it becomes COMPLETED at the put of a group with responses and rewards; draws take COMPLETED groups."""
    error_msg: str | None = None
    """Why it failed or was aborted; shown by `show` and the page."""
    position_ids: Any = None
    """What the trainer packs: positions."""
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    """Fields of your own, by name; any values that can be stored (`docs/rollouts.md`)."""

    @model_validator(mode="before")
    @classmethod
    def _merge_identity(cls, data: Any) -> Any:
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

    __setattr__.__sets_more__ = frozenset({"rollout_id", "uid"})  # type: ignore[attr-defined]
