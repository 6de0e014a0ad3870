"""NeMo-RL's replay buffer of trajectories, in a database. `docs/frameworks/README.md`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replaybuf.common.checks import Tags, import_optional
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, FullError, InputError, NotReadyError
from replaybuf.rules.query import Query
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status

_TASK = "trajectories"


class TrajectoryBuffer:
    """The calls of NeMo-RL's `ReplayBuffer`, for `ray.remote`: a trajectory is the rollouts of one prompt, batched.

    `weight_version` is that of the generating weights, `target_weight_version` the train step that the trajectory is
    for. They are the tags `version` and `target` of its group, and `task_index` is NeMo-RL's `_ng_task_index`.
    `max_size` bounds the trajectories. Other `options` are those of ReplayBufferConfig. Raises ConfigError for options
    that this class sets itself.
    """

    def __init__(
        self, url: str, max_size: int, drop_incomplete_targets_on_restore: bool = False, **options: Any
    ) -> None:
        settings: dict[str, Any] = {"capacity": max_size, "on_full": "reject", "policy": "fifo", "rollout_type": dict}
        if conflicts := sorted({*settings, "max_times_sampled"} & set(options)):
            raise ConfigError(f"{', '.join(conflicts)}: a TrajectoryBuffer has its own, as NeMo-RL's buffer has")
        self.max_size = max_size
        self._drops_incomplete = drop_incomplete_targets_on_restore
        self._last_step = -1
        self._buffer = ReplayBufferConfig[dict[str, Any]](url=url, **settings, **options).build_sync()

    def add(self, trajectory: Mapping[str, Any], weight_version: int, target_weight_version: int) -> str:
        """Store a trajectory; it is committed when this returns "success". Return "full" if there is no room."""
        tags: Tags = {"version": weight_version, "target": target_weight_version}
        if (index := trajectory.get("_ng_task_index")) is not None:
            tags |= {"task_index": int(index)}
        row = {**trajectory, "batch": dict(trajectory["batch"])}
        try:
            self._buffer.put([row], _TASK, status=Status.COMPLETED, tags=tags)
        except FullError:
            return "full"
        return "success"

    def sample(self, num_prompt_groups: int, current_weight_version: int, max_age_steps: int) -> dict[str, Any] | None:
        """Take the oldest trajectories for this step, and delete too old ones; return None while there are too few.

        The result has `trajectories` and `avg_trajectory_age`, in steps.
        """
        self._buffer.delete({"tags.version": {"$lt": current_weight_version - max_age_steps}})
        sizes, where = {_TASK: num_prompt_groups}, _usable_trajectories(current_weight_version, max_age_steps)
        if not num_prompt_groups or not self._buffer.is_ready(sizes, where=where):
            return None
        module = import_optional(  # before the groups are taken
            "nemo_rl.distributed.batched_data_dict", "TrajectoryBuffer needs NeMo-RL where it is sampled"
        )
        try:
            batch = self._buffer.sample(sizes, at_least=sizes, where=where, current_train_step=current_weight_version)
        except NotReadyError:  # another process was faster
            return None
        items = batch[_TASK]
        self._last_step = max(self._last_step, current_weight_version)
        versions = [_tags(item)["version"] for item in items]
        return {
            "trajectories": [_as_nemo(item.item[0], module) for item in items],
            "avg_trajectory_age": current_weight_version - sum(versions) / len(versions),
        }

    def close(self) -> None:
        """Close the buffer in this process. Its groups stay in the database."""
        self._buffer.close()

    def size(self) -> int:
        """Return the number of trajectories."""
        return self._buffer.count(_TASK, Status.COMPLETED)

    def clear(self) -> None:
        """Remove all trajectories."""
        self._buffer.delete({})

    def get_trajectories_needed(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None
    ) -> int:
        """Return the number of trajectories that the step still needs."""
        return max(0, num_prompts_per_step - self._buffer.count_where(_usable_trajectories(target_step, max_age_steps)))

    def has_complete_batch(self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None) -> bool:
        """Return whether there are enough trajectories for the step."""
        return not self.get_trajectories_needed(target_step, num_prompts_per_step, max_age_steps)

    def get_last_target_weight_already_generated(self) -> int:
        """Return the last step whose trajectories were taken; -1 before the first."""
        return self._last_step

    def get_existing_target_weights(self) -> set[int]:
        """Return the steps that have trajectories."""
        return {target for _, _, target in self._places()}

    def get_debug_info(self) -> dict[str, Any]:
        """Return the versions and targets of all trajectories. `replaybuf ls URL` shows more."""
        places = self._places()
        return {
            "total_trajectories": len(places),
            "trajectory_versions": [version for _, version, _ in places],
            "target_weight_versions": [target for _, _, target in places],
            "max_size": self.max_size,
        }

    def save_to_path(self, path: str) -> int:
        """Make a step checkpoint in the database, and write its step to a file. Return the number of trajectories."""
        step = self._last_step + 1
        self._buffer.checkpoint(step)
        Path(path).write_text(json.dumps({"checkpoint": step}), "utf-8")
        return self.size()

    def load_from_path(
        self,
        path: str,
        num_prompts_per_step: int | None = None,
        current_training_step: int | None = None,
        max_age_steps: int | None = None,
    ) -> dict[str, int]:
        """Restore the database exactly to the file's checkpoint; then drop the trajectories that NeMo-RL drops.

        These are trajectories too old for their targets, those of past steps, and with
        `drop_incomplete_targets_on_restore` those of incomplete ones. Raises InputError for another file, such as one
        pickled by NeMo-RL's own buffer, and CheckpointError if the database no longer has the checkpoint.
        """
        try:
            step = int(json.loads(Path(path).read_text("utf-8"))["checkpoint"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} isn't a file that TrajectoryBuffer.save_to_path wrote") from error
        self._buffer.restore(step)
        self._last_step = step - 1
        all_tags = [_tags(item) for item in self._buffer.find({}, payloads=False)]
        self._drop_old(num_prompts_per_step, current_training_step, max_age_steps)
        last_index = max((tags.get("task_index", -1) for tags in all_tags), default=-1)
        return {"num_trajectories": len(all_tags), "next_ng_task_index": last_index + 1}

    def _drop_old(self, prompts: int | None, step: int | None, max_age: int | None) -> None:
        places = self._places()
        remaining = [place for place in places if max_age is None or max(0, place[2] - max_age) <= place[1] <= place[2]]
        if step is not None and prompts is not None:
            remaining = [place for place in remaining if place[2] >= step]
            self._last_step = step - 1
        counts = Counter(target for _, _, target in remaining)
        if prompts is not None and (step is None or self._drops_incomplete):
            remaining = [place for place in remaining if counts[place[2]] >= prompts]
        if step is None and prompts is not None:
            self._last_step = min(self._last_step, min((target for _, _, target in remaining), default=0) - 1)
        if uids := sorted({uid for uid, _, _ in places} - {uid for uid, _, _ in remaining}):
            self._buffer.delete({"uid": {"$in": uids}})

    def _places(self) -> list[tuple[int, int, int]]:
        """Return the uid, version and target of every trajectory, oldest first."""
        items = self._buffer.find({"status": Status.COMPLETED}, payloads=False)
        return [(item.uid, _tags(item)["version"], _tags(item)["target"]) for item in items]


def _tags(item: StorageItem[Any]) -> dict[str, Any]:
    return dict(item.tags or {})


def _usable_trajectories(target: int, max_age: int | None) -> Query:
    """Return the query for trajectories of a step whose weights aren't too old for it."""
    versions = {} if max_age is None else {"tags.version": {"$gte": max(0, target - max_age), "$lte": target}}
    return {"tags.target": target, **versions}


def _as_nemo(row: Mapping[str, Any], module: Any) -> dict[str, Any]:
    return {**row, "batch": module.BatchedDataDict(row["batch"])}
