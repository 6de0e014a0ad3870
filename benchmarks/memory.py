"""The other yardstick: a dict of groups in memory, as in other replay buffers.

Every get filters and sorts all groups, and a refresh computes the staleness of every rollout anew.
"""

from __future__ import annotations

from typing import Any

from benchmarks.groups import CODEC
from replaybuf import Status
from replaybuf.values.rollouts.rollout import group_status
from replaybuf.values.rollouts.staleness import ExpiryRule, find_expired, group_staleness, refresh_group, reset_response


class MemoryBuffer:
    """Groups by uid, each with its task, status and staleness."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, Any]] = {}

    def put(self, rollouts: list[Any], task_name: str) -> None:
        """Keep a group."""
        uid = len(self._groups)
        status = group_status(rollout.status for rollout in rollouts)
        staleness = group_staleness(rollouts, CODEC.rollout_type)
        self._groups[uid] = {
            "uid": uid,
            "task": task_name,
            "status": status,
            "staleness": staleness,
            "rollouts": rollouts,
        }

    def get(self, size: int, task_name: str) -> list[list[Any]]:
        """Take the most stale groups."""
        found = [
            group
            for group in self._groups.values()
            if group["task"] == task_name and group["status"] == Status.COMPLETED
        ]
        found.sort(key=lambda group: (-group["staleness"], group["uid"]))
        return [self._groups.pop(group["uid"])["rollouts"] for group in found[:size]]

    def refresh(self, rule: ExpiryRule, train_step: int) -> int:
        """Compute the staleness of every rollout and expire groups that are too old. Return their number."""
        count = 0
        for group in self._groups.values():
            rollouts = group["rollouts"]
            refresh_group(rollouts, train_step, CODEC.rollout_type)
            group["staleness"] = group_staleness(rollouts, CODEC.rollout_type)
            expired = find_expired(rollouts, rule, train_step, CODEC.rollout_type)
            for index in expired:
                reset_response(rollouts[index], CODEC.rollout_type)
            if expired:
                group["status"] = Status.EXPIRED
                count += 1
        return count
