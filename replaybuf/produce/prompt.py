"""Prompts in flight: leased groups of a dataset, which are generated, and finished or given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from replaybuf.buffer.lease import Lease
from replaybuf.buffer.put_options import PutOptions
from replaybuf.common.cancellation import shielded
from replaybuf.common.checks import Tags, shown
from replaybuf.errors import InputError
from replaybuf.storage.values import UNSET, StorageItem, Unset
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.segments import flat, segmented
from replaybuf.values.rollouts.staleness import reset_response

#: The tag of groups of a ledger with an order: the place of their prompt in the dataset.
ITEM = "prompt"

#: The segment that each segment of a tree continues, as in `ReplayBuffer.put`; None for a group without.
Parents = Sequence[int | None] | None


class Prompt:
    """A prompt in flight: `group` has its rollouts, with their partial responses; `attempt` counts from 1.

    `status` and `tags` are those from before the draw: INIT for a new prompt. It is finished or given back once. While
    this process lives, its lease is renewed. `parents` are those of a tree that was saved (`ReplayBuffer.put`), else
    None; who changes the tree in `group` changes them, too. `ordered` is the name of its ledger if that has an order.
    """

    def __init__(self, lease: Lease, item: StorageItem, kind: RolloutType, ordered: str | None) -> None:
        self._lease, self._kind = lease, kind
        self.task_name = item.task_name
        self.uid = item.uid
        self.group: list[Any] = item.item
        is_tree = item.segments is not None and item.segments != segmented(item.item)[1]
        self.parents = list(item.segments.parents) if item.segments is not None and is_tree else None
        self.status = item.status
        self.tags: Tags = dict(item.tags or {})
        self.attempt = item.deliveries
        place = self.tags.get(ITEM)
        self._place = (ordered, place) if ordered is not None and type(place) is int else None

    def __repr__(self) -> str:
        number = self._kind.get(flat(self.group)[0], "group_id") if self.group else None
        group = "" if number is None else f", group {shown(number)}"
        return f"<Prompt {self.uid} of {self.task_name}{group}, attempt {self.attempt}>"

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost, or the buffer restored: then stop generating.

        Detected within a third of the sampler's `seconds`; `finish` detects it at once.
        """
        return self._lease.lost

    async def finish(
        self,
        group: Sequence[Any] | None = None,
        *,
        timeout: float | Unset | None = UNSET,
        **options: Unpack[PutOptions],
    ) -> int | None:
        """Store the result (default: `group` as it is now) in place of the prompt, in one transaction.

        Options, rules and result are those of `ReplayBuffer.put`; `parents` are the prompt's for its own group, unless
        they are given. Raises LeaseLostError if the lease had ended and the prompt was handed to another worker, and
        FencedError after a restore; then nothing is stored, and this process no longer has the prompt. Raises
        InputError if nothing was generated.
        """
        rollouts = list(self.group if group is None else group)
        if (parents := self._parents(group, options.get("parents"))) is not None:
            options["parents"] = parents
        if rollouts and all(map(self._is_new, flat(rollouts))):
            raise InputError(
                f"nothing was generated for prompt {self.uid}: its rollouts have the status init, and it would be "
                "handed out again; set their status to COMPLETED, or call give_back()"
            )
        if self._place is not None:
            options["tags"] = {**(options.get("tags") or {}), ITEM: self._place[1]}
        return await self._lease.finish(
            rollouts, self.task_name, replaces=[self.uid], timeout=timeout, place=self._place, **options
        )

    def _parents(self, group: Sequence[Any] | None, parents: Parents) -> Parents:
        """Return the parents of a group that is stored: those given, or the prompt's for its own group."""
        return self.parents if group is None and parents is None else parents

    def _is_new(self, rollout: Any) -> bool:
        """Return whether nothing was generated for a rollout. Raises RolloutError."""
        self._kind.check_class(rollout)
        return self._kind.status(rollout) == Status.INIT

    async def save(
        self, group: Sequence[Any] | None = None, *, model_step: int | None = None, parents: Parents = None
    ) -> None:
        """Save the partial responses: if this worker dies, the next one continues them.

        `parents` is as in `finish`. `model_step` is the step of the weights that wrote them. Tokens saved without it
        get that of a later `save` or `finish`, as if newer weights had written them. The prompt stays with this
        process, also if the call is cancelled.
        """
        await shielded(self._save(group, model_step, parents))

    async def _save(self, group: Sequence[Any] | None, model_step: int | None, parents: Parents) -> None:
        rollouts = list(self.group if group is None else group)
        without_status = not all(
            self._kind.has(rollout, "status") for rollout in flat(rollouts)
        )  # then only the group has a status
        uid = await self._lease.save(
            rollouts,
            self.task_name,
            replaces=[self.uid],
            model_step=model_step,
            status=self.status if without_status else None,
            parents=self._parents(group, parents),
            tags=self.tags,
        )
        self.uid = self.uid if uid is None else uid

    async def add(self, index: int, *, model_step: int | None = None) -> None:
        """Store the finished rollout `group[index]` by itself, while others are still being generated.

        If this worker dies, the prompt comes back with it; `finish` and `save` store the whole group in its place.
        `model_step` is that of `save`. Raises InputError if it isn't completed, failed or filtered, and the errors of
        `finish`.
        """
        await self._lease.add(self.uid, index, self.group[index], self.task_name, model_step=model_step)

    async def give_back(
        self,
        group: Sequence[Any] | None = None,
        *,
        model_step: int | None = None,
        failed: str | None = None,
        parents: Parents = None,
    ) -> None:
        """Return the prompt to be handed out again, with partial responses if a `group` is given.

        `model_step` and `parents` are those of `save`. `failed` is the error of a failed generation; after
        `max_deliveries` failures the prompt is set aside as FAILED. A caller that is cancelled waits until the prompt
        is returned.
        """
        await shielded(self._give_back(group, model_step, failed, parents))

    async def _give_back(
        self, group: Sequence[Any] | None, model_step: int | None, failed: str | None, parents: Parents
    ) -> None:
        if group is not None:
            await self._save(group, model_step, parents)
        await self._lease.give_back([self.uid], failed=failed)


def discard_partial_responses(rollouts: Sequence[Any], kind: RolloutType, status: Status = Status.INIT) -> None:
    """Remove the partial responses of interrupted rollouts, and set their status; other rollouts stay as they are."""
    for rollout in flat(rollouts):
        if kind.status(rollout) == Status.ABORTED:
            reset_response(rollout, kind)
            kind.set_status(rollout, status)
