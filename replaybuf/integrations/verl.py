"""verl: its batches as groups of rollouts, and its message queue over a buffer. `docs/frameworks/verl.md`.

Batches are stored without padding, and restored exactly. A DataProto holds the rollouts of many prompts as tensors of
one width: prompts padded on the left, responses on the right. Here each row becomes a RolloutState and the rows of a
prompt become a group:

| RolloutState | DataProto |
|---|---|
| `group_id` | `uid` |
| `message` | `raw_prompt` |
| `prompt_ids`, `response_ids` | `prompts`, `responses` |
| `logprobs`, `response_mask` | `rollout_log_probs`, `response_mask` |
| `reward` | the sum of `rm_scores`, or else of `token_level_scores` |
| `response_model_steps` | `min_global_steps`, for every token |

Everything else is in `extra_fields["verl"]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from replaybuf.buffer.lease import Lease
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.buffer.sync import run
from replaybuf.common.checks import check_whole, import_optional
from replaybuf.config import ReplayBufferConfig
from replaybuf.errors import ConfigError, InputError, LeaseLostError, RolloutError
from replaybuf.rules.transitions import Tally
from replaybuf.storage.values import LEASE_SECONDS
from replaybuf.values.rollouts.rollout import RolloutState, Status

if TYPE_CHECKING:
    from torch import Tensor  # type: ignore[import-not-found, unused-ignore]
    from verl import DataProto  # type: ignore[import-not-found, unused-ignore]

_OUR_FIELDS = {
    "prompts": "prompt_ids",
    "responses": "response_ids",
    "rollout_log_probs": "logprobs",
    "response_mask": "response_mask",
}
_REWARDS = ("rm_scores", "token_level_scores")

#: The half-open range of a row's tokens; the rest is padding.
Span = tuple[int, int]


def to_groups(batch: DataProto) -> list[list[RolloutState]]:
    """Return the rows of a batch as COMPLETED groups: one for each run of rows with the same `uid`.

    Rows of a prompt must be adjacent, as after `DataProto.repeat(interleave=True)`. The rollouts share no memory with
    the batch. Its tensors, among them `prompts`, `responses` and `attention_mask`, must be on the CPU.

    Raises RolloutError for a batch without these or without `uid`, and for rows of a prompt that aren't adjacent.
    """
    missing = {"prompts", "responses", "attention_mask"} - set(batch.batch.keys() if batch.batch is not None else ())
    missing |= {"uid"} - set(batch.non_tensor_batch)
    if missing:
        raise RolloutError(f"the batch has no {', '.join(sorted(missing))}: it can't be stored as groups of rollouts")
    rows = groupby(range(len(batch)), key=lambda row: batch.non_tensor_batch["uid"][row])
    runs = [(value, list(numbers)) for value, numbers in rows]
    if len({value for value, _ in runs}) < len(runs):
        raise RolloutError(
            "rows with the same uid aren't neighbours in the batch: sort it, or repeat with interleave=True"
        )
    return [_group(batch, value, rows) for value, rows in runs]


def from_groups(groups: Iterable[Sequence[RolloutState]]) -> DataProto:
    """Return the batch of groups made by `to_groups`, in the order of the groups, with the original padding.

    Every value, dtype, width and key is that of the original batch. `meta_info` is that of the groups, with the
    `metrics` of each row.

    Raises InputError for groups of incompatible batches, and RolloutError for groups that `to_groups` didn't make.
    Raises MissingDriverError without verl.
    """
    reason = "this call needs verl, which is not installed: pip install verl"
    torch, verl = import_optional("torch", reason), import_optional("verl", reason)
    group_lists = [list(group) for group in groups]
    if not group_lists:
        raise InputError("there are no groups to make a batch of")
    batches = [_batch_of(group) for group in group_lists]
    for part in ("tensors", "arrays"):
        if names := {name for fields in batches for name in set(batches[0][part]) ^ set(fields[part])}:
            raise InputError(f"not all of the groups have {', '.join(sorted(names))}: they are of different batches")
    rollouts = [rollout for group in group_lists for rollout in group]
    tensors = {name: _stack_rows(torch, name, rollouts) for name in batches[0]["tensors"]}
    arrays = {name: _array(name, rollouts, kind) for name, kind in batches[0]["arrays"].items()}
    return verl.DataProto.from_dict(tensors=tensors, non_tensors=arrays, meta_info=_merged_meta(batches))


def _group(batch: DataProto, value: Any, rows: list[int]) -> list[RolloutState]:
    group = [_rollout(batch, value, row) for row in rows]
    meta = dict(batch.meta_info)
    metrics = meta.get("metrics")
    if isinstance(metrics, list) and len(metrics) == len(batch):
        meta["metrics"] = [metrics[row] for row in rows]
    group[0].extra_fields["verl"]["batch"] = {
        "tensors": list(batch.batch.keys()),
        "arrays": {name: array.dtype.str for name, array in batch.non_tensor_batch.items()},
        "meta_info": meta,
    }
    return group


def _rollout(batch: DataProto, value: Any, row: int) -> RolloutState:
    """Return a row of a batch as a rollout."""
    tensors: dict[str, Tensor] = {name: tensor[row] for name, tensor in batch.batch.items()}
    arrays = {name: array[row] for name, array in batch.non_tensor_batch.items()}
    stored = {name: _without_padding(name, tensors) for name in tensors}
    fields = {_OUR_FIELDS[name]: _take_tokens(stored[name]) for name in _OUR_FIELDS if name in stored}
    rewards = next((tensors[name] for name in _REWARDS if name in tensors), None)
    oldest_step, prompt = arrays.get("min_global_steps"), arrays.get("raw_prompt")
    return RolloutState(
        group_id=value if isinstance(value, int | str) else str(value),
        message=list(prompt) if isinstance(prompt, list | tuple | np.ndarray) else [],
        reward=None if rewards is None else float(rewards.sum()),
        response_model_steps=None if oldest_step is None else [int(oldest_step)] * len(fields["response_ids"]),
        status=Status.COMPLETED,
        extra_fields={"verl": {"tensors": stored, "arrays": arrays}},
        **fields,
    )


def _take_tokens(stored: dict[str, Any]) -> Any:
    """Remove the tokens, and return them as an array; dtypes that numpy lacks aren't removed, and return float32."""
    try:
        array = stored["tokens"].numpy()
    except TypeError:
        return stored["tokens"].float().numpy()
    del stored["tokens"]
    return array


def _without_padding(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a row's tensor without its padding, and the padding's shape and values; {} for a derivable tensor."""
    row, prompts, responses = tensors[name], tensors["prompts"], tensors["responses"]
    width = prompts.shape[0]
    if name == "input_ids" and row[:width].equal(prompts) and row[width:].equal(responses):
        return {}
    mask = tensors["attention_mask"]
    spans = {width: _span(mask[:width])}
    if name != "prompts":
        spans |= {len(mask): _span(mask), len(mask) - width: _span(mask[width:])}
    for axis, size in enumerate(row.shape):
        if size in spans:
            begin, end = spans[size]
            left, tokens, right = row.split([begin, end - begin, size - end], dim=axis)
            if _is_padding(left, axis) and _is_padding(right, axis):
                padding = [
                    (part.shape[axis], part.narrow(axis, 0, min(1, part.shape[axis])).clone()) for part in (left, right)
                ]
                return {"tokens": tokens.clone(), "axis": axis, "padding": padding}
    return {"tokens": row.clone()}


def _span(mask: Tensor) -> Span:
    places = mask.nonzero()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _is_padding(part: Tensor, axis: int) -> bool:
    """Return whether a tensor is one value, repeated along the axis."""
    return not part.shape[axis] or bool((part == part.narrow(axis, 0, 1)).all())


def _batch_of(group: Sequence[RolloutState]) -> dict[str, Any]:
    """Return the fields of its batch that are stored with a group."""
    try:
        fields: dict[str, Any] = group[0].extra_fields["verl"]["batch"]
    except (AttributeError, IndexError, KeyError, TypeError):
        raise RolloutError("expected groups that `to_groups` made, whole and in their order") from None
    return fields


def _stack_rows(torch: Any, name: str, rollouts: list[RolloutState]) -> Tensor:
    rows = [_padded_row(torch, name, rollout) for rollout in rollouts]
    kinds = {(tuple(row.shape), str(row.dtype)) for row in rows}
    if len(kinds) > 1:
        raise InputError(f"the groups are of batches in which {name} has other widths or dtypes: {sorted(kinds)}")
    return torch.stack(rows)


def _padded_row(torch: Any, name: str, rollout: RolloutState) -> Tensor:
    """Return a row's tensor with its original padding."""
    stored = rollout.extra_fields["verl"]["tensors"][name]
    if not stored:  # input_ids, derived from prompts and responses
        return torch.cat([_padded_row(torch, part, rollout) for part in ("prompts", "responses")])
    tokens = stored["tokens"] if "tokens" in stored else torch.from_numpy(getattr(rollout, _OUR_FIELDS[name]))
    if "axis" not in stored:
        return tokens
    (left, left_fill), (right, right_fill) = stored["padding"]
    axis = stored["axis"]
    return torch.cat([left_fill.repeat_interleave(left, axis), tokens, right_fill.repeat_interleave(right, axis)], axis)


def _array(name: str, rollouts: list[RolloutState], kind: str) -> Any:
    values = [rollout.extra_fields["verl"]["arrays"][name] for rollout in rollouts]
    if kind != "|O":
        return np.array(values, dtype=kind)
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # one by one, since numpy would make lists of equal length an array
        array[place] = value
    return array


def _merged_meta(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the `meta_info` of groups; the metrics are those of all their rows."""
    metas = [batch["meta_info"] for batch in batches]
    merged = dict(metas[0])
    for meta in metas[1:]:
        if {**meta, "metrics": 0} != {**merged, "metrics": 0}:
            raise InputError(f"the groups are of batches with different meta_info: {sorted(meta)} and {sorted(merged)}")
    if isinstance(merged.get("metrics"), list):
        merged["metrics"] = [metric for meta in metas for metric in meta["metrics"]]
    return merged


_PAUSE = 0.25  # seconds between two polls for the end


class BufferQueueClient:
    """Replaces the MessageQueueClient of verl's `fully_async_policy`, without an actor.

    Each process opens the buffer of `config` by itself, so the client may be pickled and sent to actors. A sample is
    the group of a prompt's rollouts, in the task `task_name`. `required_samples` is the number of samples per step of
    verl's trainer: `ppo_mini_batch_size * require_batches`.

    Samples are leased, and acknowledged when the trainer requests the first sample of its next step. If the trainer
    dies before, the samples of its step come back `seconds` later, in their old order.

    A rollouter's end marker ends the run of its client and of pickled copies of that. A client that is made anew, as in
    a run that is resumed, begins another run; give clients that are made apart the same `run_id`.
    """

    def __init__(
        self,
        config: ReplayBufferConfig,
        required_samples: int,
        *,
        task_name: str = "train",
        seconds: float = LEASE_SECONDS,
        run_id: str | None = None,
    ) -> None:
        """Raise ConfigError for options of the config that are incompatible with a queue."""
        check_whole(required_samples, "required_samples", 1, ConfigError)
        for option, value in (("max_times_sampled", 1), ("rollout_type", RolloutState), ("tensors", "torch")):
            if getattr(config, option) != value:
                raise ConfigError(
                    f"{option}={getattr(config, option)!r:.100}: verl's queue hands out each sample once, as it was "
                    "put; leave this option out"
                )
        self.config = config
        self.required_samples = required_samples
        self.task_name = task_name
        self.seconds = seconds
        self.run_id = uuid4().hex if run_id is None else run_id
        self._leases: list[Lease[RolloutState]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "buffer"} | {"_leases": []}

    @cached_property
    def buffer(self) -> ReplayBuffer[RolloutState]:
        """The buffer, opened in this process."""
        return self.config.build()

    @property
    def _end(self) -> str:
        return f"{self.task_name}/end"

    async def put_sample(self, sample: bytes | None) -> bool:
        """Store a pickled RolloutSample, or None as the end marker. Return False if it was dropped.

        Waits while the buffer is full, if its `on_full` is "block"; verl's own queue drops the oldest sample.
        """
        if sample is None:
            marker = [RolloutState(message=[], status=Status.COMPLETED)]
            return await self.buffer.put(marker, self._end, key=self.run_id, tags={"run_id": self.run_id}) is not None
        pickle, _ = _verl()
        unpickled = pickle.loads(sample)
        group = [rollout for part in to_groups(unpickled.full_batch) for rollout in part]
        extra = {"sample_id": unpickled.sample_id, "epoch": unpickled.epoch, "rollout_status": unpickled.rollout_status}
        group[0].extra_fields["verl"]["sample"] = extra
        return await self.buffer.put(group, self.task_name) is not None

    async def get_sample(self) -> tuple[bytes | None, int]:
        """Wait for the next sample; return it, pickled, and the number left; None after the rollouter's end marker.

        The end marker is returned when no sample is left, not even one leased by a dead trainer; then every further
        call returns it, too. No timeout.
        """
        pickle, rollout_sample = _verl()  # before the lease, which a slow first import could outlast
        if len(self._leases) == self.required_samples:
            errors = [error for lease in self._leases if (error := await _acknowledge(lease))]
            self._leases = []
            if errors:
                raise errors[0]
        while not (lease := await self.buffer.lease_batch({self.task_name: 1}, seconds=self.seconds)).open:
            if await self._has_ended():
                return None, 0
            await asyncio.sleep(_PAUSE)
        try:
            [group] = lease.batch[self.task_name]
            sample = rollout_sample(full_batch=from_groups([group]), **group[0].extra_fields["verl"]["sample"])
            answer = pickle.dumps(sample), await self.get_queue_size()
        except BaseException as error:  # the trainer has not got it: it isn't one of its step
            await lease.give_back_after(error)
            raise
        self._leases.append(self.buffer.adopt(lease.handle, seconds=self.seconds))  # without the rollouts
        return answer

    async def _has_ended(self) -> bool:
        """Return whether this run's end marker is there and, afterwards, no sample is left."""
        if not await self.buffer.count_where({"task_name": self._end, "tags.run_id": self.run_id}):
            return False
        tallies = await self.buffer.tallies()
        size, leased = (tallies.get((self.task_name, Status.COMPLETED, kind), 0) for kind in (Tally.SIZE, Tally.LEASED))
        return not size and leased == len(self._leases)

    async def get_queue_size(self) -> int:
        """Return the number of samples in the queue."""
        return await self.buffer.count(self.task_name, Status.COMPLETED)

    def get_queue_size_sync(self) -> int:
        """Return the number of samples in the queue; for callers outside an event loop."""
        return run(self.get_queue_size())

    async def get_statistics(self) -> dict[str, Any]:
        """Return `queue_size`, `total_produced`, `total_consumed` and `dropped_samples`, over all processes."""
        metrics = await self.buffer.metrics(distributions=False)
        counts = metrics["tasks"].get(self.task_name, {})
        return {
            "queue_size": await self.get_queue_size(),
            "total_produced": counts.get("put", 0),
            "total_consumed": counts.get("taken", 0),
            "dropped_samples": counts.get("evicted", 0) + counts.get("dropped", 0),
        }

    async def clear_queue(self) -> None:
        """Do nothing: verl calls this whenever a run ends, also when it has failed and is to be resumed.

        `delete_samples` empties the queue.
        """

    async def delete_samples(self) -> None:
        """Delete all samples from the queue, and all end markers."""
        await self.buffer.delete({"task_name": {"$in": [self.task_name, self._end]}})

    async def shutdown(self) -> None:
        """Close the buffer in this process. Its groups stay in the database."""
        if "buffer" in self.__dict__:
            await self.buffer.close()


async def _acknowledge(lease: Lease[RolloutState]) -> LeaseLostError | None:
    """Acknowledge a lease; return the error if it was lost, so that the others are acknowledged, too."""
    try:
        await lease.acknowledge()
    except LeaseLostError as error:
        return error
    return None


def _verl() -> tuple[Any, Any]:
    """Return Ray's pickle and verl's RolloutSample."""
    hint = "BufferQueueClient needs verl and what its trainer imports"
    utils = import_optional("verl.experimental.fully_async_policy.detach_utils", hint)
    return import_optional("ray.cloudpickle", hint), utils.RolloutSample
