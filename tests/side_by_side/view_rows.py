"""What the SQL views have to say of groups that `find` gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.outline import preview, reward_parts
from replaybuf.values.rollouts.rewards import reward_value

Rows = list[dict[str, Any]]


def expected_views(items: list[StorageItem]) -> dict[str, Rows]:
    """The rows of `groups` and `rollouts`, ordered by uid and position."""
    return {
        "groups": [_group_row(item) for item in items],
        "rollouts": [_rollout_row(item, position) for item in items for position in range(len(item.item))],
    }


def _group_row(item: StorageItem) -> dict[str, Any]:
    reasons = Counter(rollout.finish_reason for rollout in item.item if rollout.finish_reason is not None)
    return {
        "uid": item.uid,
        "timestamp_id": item.timestamp_id,
        "buffer": "default",
        "task_name": item.task_name,
        "status": item.status.value,
        "staleness": item.staleness,
        "priority": item.priority,
        "times_sampled": item.times_sampled,
        "deliveries": item.deliveries,
        "reward": item.reward,
        "rollouts": len(item.item),
        "prompt_tokens": sum(_length(rollout.prompt_ids) for rollout in item.item),
        "response_tokens": sum(_length(rollout.response_ids) for rollout in item.item),
        "finish_reasons": " ".join(f"{reason}:{times}" for reason, times in sorted(reasons.items())) or None,
        "prompt": "?",
        "response": preview(item.item[0].response),
        "tags": item.tags,
        "key": item.key,
        "error": item.error,
        "worker": item.worker,
        "leased_by": None,
    }


def _rollout_row(item: StorageItem, position: int) -> dict[str, Any]:
    rollout = item.item[position]
    steps = rollout.response_model_steps
    return {
        "uid": item.uid,
        "position": position,
        "buffer": "default",
        "task_name": item.task_name,
        "rollout_id": _text(rollout.rollout_id),
        "status": rollout.status.value,
        "staleness": rollout.seq_staleness,
        "oldest_model_step": int(min(steps)) if _length(steps) else None,
        "reward": reward_value(rollout.reward),
        "rewards": reward_parts(rollout.reward) or None,
        "prompt_tokens": _length(rollout.prompt_ids),
        "response_tokens": _length(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "prompt": "?",
        "response": preview(rollout.response),
        "error_msg": preview(rollout.error_msg),
        "worker": item.worker,
    }


def _length(values: Any) -> int:
    return 0 if values is None else len(values)


def _text(value: Any) -> str | None:
    return None if value is None else preview(str(value))
