"""Trinity-RFT's SQL storage, which its writer and its reader use, without the Ray actor around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.adapter import Adapter, Group, Place


class Trinity(Adapter):
    """`SQLExperienceStorage`: 64 groups of experiences are written in one call, and read in one.

    Readers look once a second. Reading marks rows as consumed and removes nothing.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._rollouts = self._taken = 0
        self._as_lists = False

    async def open(self) -> None:
        from trinity.buffer.storage.sql import SQLExperienceStorage
        from trinity.common.config import StorageConfig

        url = self.place.url or f"sqlite:///{self.place.folder}/trinity.db"
        config = StorageConfig(
            name="groups", storage_type="sql", path=url, schema_type="experience", batch_size=1, wrap_in_ray=False
        )
        self._storage = SQLExperienceStorage(config)
        logging.disable(logging.INFO)
        await self._storage.prepare()

    async def close(self) -> None:
        await self._storage.engine.dispose()

    def prepare(self, group: Group) -> Any:
        self._rollouts = len(group)
        self._as_lists = isinstance(group[0]["tokens"], list)
        return group if self._as_lists else [_experience(rollout) for rollout in group]

    async def put(self, prepared: Sequence[Any]) -> None:
        for start in range(0, len(prepared), self.batch):
            rollouts = [rollout for group in prepared[start : start + self.batch] for rollout in group]
            await self._storage.write([_experience(rollout) for rollout in rollouts] if self._as_lists else rollouts)

    async def ready(self, count: int) -> bool:
        return await self._storage.count() - self._taken >= count * self._rollouts

    async def take(self, count: int) -> Sequence[Any]:
        experiences = await self._storage.read(count * self._rollouts)
        self._taken += len(experiences)
        groups = [experiences[start : start + self._rollouts] for start in range(0, len(experiences), self._rollouts)]
        return [[_lists(experience) for experience in group] for group in groups] if self._as_lists else groups

    def tokens(self, group: Any) -> int:
        return sum(sum(row["tokens"]) if self._as_lists else int(row.tokens.sum()) for row in group)


def _experience(rollout: dict[str, Any]) -> Any:
    import torch
    from trinity.common.experience import EID, Experience

    tensors = {name: torch.as_tensor(rollout[name]) for name in ("tokens", "logprobs", "response_mask")}
    return Experience(
        eid=EID(task=str(rollout["group_id"]), run=rollout["rollout_id"]),
        tokens=tensors["tokens"],
        logprobs=tensors["logprobs"],
        action_mask=tensors["response_mask"].bool(),
        prompt_length=len(rollout["prompt_ids"]),
        reward=rollout["reward"]["score"],
        response_text=rollout["response"],
        messages=rollout["message"],
        info={"model_version": 97, "data_source": rollout["data_source"]},
    )


def _lists(experience: Any) -> dict[str, Any]:
    return {"tokens": experience.tokens.tolist(), "logprobs": experience.logprobs.tolist()}
