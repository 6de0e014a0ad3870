"""A prompt that a worker has drawn: finished, saved or given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from replaybuf.buffer.cancellation import to_its_end
from replaybuf.buffer.lease import Lease
from replaybuf.buffer.putting import PutOptions
from replaybuf.checks import Tags
from replaybuf.errors import InputError
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import reset_response
from replaybuf.storage.values import UNSET, StorageItem, Unset


class Prompt:
    """A prompt in flight: `group` has its rollouts, with what was generated so far; `attempt` counts from 1.

    `status` and `tags` are those with which it waited: INIT for a new one. It is finished or given back once. While
    this process lives, its lease is extended.
    """

    def __init__(self, lease: Lease, item: StorageItem, kind: RolloutType) -> None:
        self._lease, self._kind = lease, kind
        self.task_name = item.task_name
        self.uid = item.uid
        self.group: list[Any] = item.item
        self.status = item.status
        self.tags: Tags = dict(item.tags or {})
        self.attempt = item.deliveries

    def __repr__(self) -> str:
        number = self._kind.get(self.group[0], "group_id") if self.group else None
        group = "" if number is None else f", group {number!r:.50}"
        return f"<Prompt {self.uid} of {self.task_name}{group}, attempt {self.attempt}>"

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost, or the buffer restored: stop generating then.

        Known within a third of the ledger's `seconds`; `finish` finds out at once.
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

        Options, rules and result are those of `ReplayBuffer.put`. Raises LeaseLostError if the lease had ended and the
        prompt was handed to another worker, and FencedError after a restore; then nothing is stored, and the prompt
        isn't ours any more. Raises InputError if nothing was generated.
        """
        rollouts = list(self.group if group is None else group)
        if rollouts and all(map(self._is_new, rollouts)):
            raise InputError(
                f"nothing was generated for prompt {self.uid}: its rollouts have the status init, and it would be "
                "handed out again; set their status to COMPLETED, or call give_back()"
            )
        return await self._lease.finish(rollouts, self.task_name, replaces=[self.uid], timeout=timeout, **options)

    def _is_new(self, rollout: Any) -> bool:
        """Return whether nothing was generated for a rollout. Raises RolloutError."""
        self._kind.check_class(rollout)
        return self._kind.status(rollout) == Status.INIT

    async def save(self, group: Sequence[Any] | None = None) -> None:
        """Keep what was generated so far: if this worker dies, the next one goes on from there.

        A caller that is cancelled during the call still has the prompt.
        """
        await to_its_end(self._save(group))

    async def _save(self, group: Sequence[Any] | None) -> None:
        rollouts = list(self.group if group is None else group)
        unsaid = not all(self._kind.has(rollout, "status") for rollout in rollouts)  # only the group has a status
        uid = await self._lease.save(
            rollouts, self.task_name, replaces=[self.uid], status=self.status if unsaid else None
        )
        self.uid = self.uid if uid is None else uid

    async def give_back(self, group: Sequence[Any] | None = None, *, failed: str | None = None) -> None:
        """Let the prompt be handed out again, with what was generated if a `group` is given.

        `failed` says why it could not be generated; a prompt that failed `max_deliveries` times is set aside as FAILED.
        """
        if group is not None:
            await self.save(group)
        await self._lease.give_back([self.uid], failed=failed)


def begin_anew(rollouts: Iterable[Any], kind: RolloutType) -> None:
    """Remove what interrupted rollouts have generated; expired ones have lost it already, the others are done."""
    for rollout in rollouts:
        if kind.status(rollout) == Status.ABORTED:
            reset_response(rollout, kind)
            kind.set_status(rollout, Status.INIT)
