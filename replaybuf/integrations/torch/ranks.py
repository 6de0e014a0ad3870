"""Steps of several ranks: each with its part of a batch, or all with the same batch.

One rank leases for all, so that they begin and end their steps together, and no rank waits for ever in a collective
that another one never enters. (Ranks that iterate alone have disjoint groups, too: a group goes to one taker.)"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist

from replaybuf.errors import InputError, ReplayBufError
from replaybuf.integrations.torch.train_steps import Step
from replaybuf.storage.values import StorageItem


class Link:
    """The ranks of a process group that has gloo for CPU tensors; None is the group of all ranks.

    `gather` and `broadcast` are collectives of objects, which torch pickles: ranks of one job trust each other. A rank
    waits for the others for as long as the process group's timeout. After that, or the death of a rank, ReplayBufError
    names the operation, and the group can't be used again.
    """

    def __init__(self, group: Any = None) -> None:
        if not dist.is_initialized():
            raise InputError("there are no ranks: call torch.distributed.init_process_group first")
        self._group = group  # None for the group of all ranks, which must be released before the process ends
        self.rank: int = dist.get_rank(self._group)
        if self.rank < 0:
            raise InputError("this process is not in the process group that it was given")
        if "cpu:gloo" not in dist.get_backend_config(self._group):
            raise InputError(
                "batches and errors pass between ranks by gloo: give group=torch.distributed.new_group(backend='gloo')"
            )
        self.size: int = dist.get_world_size(self._group)

    def gather(self, message: Any, operation: str) -> list[Any]:
        """Return the messages of all ranks, in their order; `operation` describes it in errors."""
        messages: list[Any] = [None] * self.size
        with self._waiting(operation):
            dist.all_gather_object(messages, message, self._group)
        return messages

    def broadcast(self, message: Any, source: int, operation: str) -> Any:
        """Return the message of the rank `source` of the group; those of other ranks are ignored."""
        box, rank = [message], source if self._group is None else dist.get_global_rank(self._group, source)
        with self._waiting(operation):
            dist.broadcast_object_list(box, rank, self._group)
        return box[0]

    @contextlib.contextmanager
    def _waiting(self, operation: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # raised by torch when a rank is late, dead, or has closed its connection
            waited = time.monotonic() - start
            raise ReplayBufError(
                f"rank {self.rank} of {self.size} waited {waited:.1f} s for {operation}, and the ranks are no longer "
                f"connected, or one of them is late: {error}",
                reason="ranks",
            ) from error


_STEP, _END, _ERROR = "step", "end", "error"


@dataclass(eq=False, repr=False)
class RankStep:
    """A Step that several ranks acknowledge or give back together.

    All ranks call `acknowledge`, or all `give_back`, or leave a `with` block in the same way. Nothing is acknowledged
    before all have called it: after the death of a rank in its step, the groups of all ranks are trained on again. An
    error of one rank's store is raised on all.

    `train_step` is that of the Step (`Step.train_step`), on every rank; the rank that has leased the groups may set it.
    """

    batch: Any
    items: dict[str, list[StorageItem[Any]]]
    _step: AnyStep | None
    _link: Link
    train_step: int | None = None

    def acknowledge(self, *, train_step: int | None = None) -> None:
        """Report all groups as trained on, once all ranks do. Raises LeaseLostError and ReplayBufError.

        `train_step` is the step that was trained on them (default: that of this RankStep); it counts on the rank that
        has leased them.
        """
        number = self.train_step if train_step is None else train_step
        self._settle_together("acknowledge", lambda step: step.acknowledge(train_step=number))

    def give_back(self, *, failed: str | None = None) -> None:
        """Give all groups back, to be drawn again. Raises ReplayBufError."""
        self._settle_together("give back", lambda step: step.give_back(failed=failed))

    def _settle_together(self, verb: str, settle: Callable[[AnyStep], object]) -> None:
        verbs = self._link.gather(verb, f"all ranks to {verb} the step")
        if len(set(verbs)) > 1:
            text = f"the ranks do different things, and nothing was changed: {_text_by_rank(map(str, verbs))}"
            raise ReplayBufError(text, reason="ranks")
        failure = None
        try:
            if self._step is not None:
                settle(self._step)
        except Exception as error:
            failure = error
        outcomes = self._link.gather(_error_text(failure), f"all ranks to have done so ({verb})")
        if failure is not None:
            raise failure
        if any(outcomes):
            raise ReplayBufError(f"other ranks could not {verb} the step: {_text_by_rank(outcomes)}", reason="ranks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.acknowledge()
        # A failed rank sends no message to the others, which may wait for it elsewhere: the launcher ends them. Open
        # groups are given back at the end of `leased_steps`.


#: A step of this process, or one that other ranks share already.
AnyStep = Step | RankStep


def same_steps(steps: Iterable[AnyStep] | None, *, group: Any = None, source: int = 0) -> Generator[RankStep]:
    """Yield the steps of the group's rank `source` on all its ranks: tensor- or pipeline-parallel ones.

    The source leases and broadcasts the batches; `steps` are None on the others. An error of the source's steps is
    raised there, and as ReplayBufError on the others. The process group's timeout, torch's 30 minutes by default,
    limits a rank's wait for the others: make it longer than the timeout of the source's GroupDataset and than a train
    step.
    """
    return _send_steps(steps, Link(group), source, split=False)


def split_steps(steps: Iterable[AnyStep] | None, *, group: Any = None, source: int = 0) -> Generator[RankStep]:
    """Yield the steps of the group's rank `source` as `same_steps` does, but each rank's `batch` is its own part.

    The source's batches are lists with a part for each rank, in rank order. All parts belong to one lease, which is
    acknowledged as a whole; `items` are the groups of all ranks.
    """
    return _send_steps(steps, Link(group), source, split=True)


def _send_steps(steps: Iterable[AnyStep] | None, link: Link, source: int, *, split: bool) -> Generator[RankStep]:
    if (link.rank == source) == (steps is None):
        raise InputError(f"rank {source} of the group gives the steps, and the others None; this is rank {link.rank}")
    own_steps = iter(()) if steps is None else iter(steps)  # what the other ranks send is ignored
    operation = f"the next step of rank {source}, the source of its batches"
    while True:
        step, pickled, failure = _next_message(own_steps, link.size if split else None)
        kind, content = pickle.loads(link.broadcast(pickled, source, operation))
        if failure is not None:
            raise failure
        if kind == _ERROR:
            raise ReplayBufError(
                f"rank {source}, the source of the batches, has no next step: {content}", reason="ranks"
            )
        if kind == _END:
            return
        batch, items, train_step = content
        part = batch[link.rank] if split else batch
        yield RankStep(part, items, step, link, train_step=train_step)


def largest(value: int, *, group: Any = None) -> int:
    """Return the maximum of the ranks' numbers, such as of micro-batches, which must be the same on all ranks."""
    return int(max(Link(group).gather(value, "the other ranks' numbers")))


def _next_message(steps: Iterator[AnyStep], parts: int | None) -> tuple[AnyStep | None, bytes, Exception | None]:
    """Return the next step, None at the end; its message; and the error that the source raises afterwards.

    The message is pickled here, because an error of that has to reach the other ranks, too.
    """
    try:
        step = next(steps, None)
        if step is None:
            return None, pickle.dumps((_END, None)), None
        if parts is not None and not (isinstance(step.batch, list | tuple) and len(step.batch) == parts):
            raise InputError(f"split_steps needs batches that are lists of {parts} parts, one for each rank")
        message = (_STEP, (step.batch, step.items, step.train_step))
        return step, pickle.dumps(message, pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return None, pickle.dumps((_ERROR, _error_text(error))), error


def _error_text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _text_by_rank(texts: Iterable[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
