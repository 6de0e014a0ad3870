"""Rollouts as token sequences, and collators: the tensors of a model's forward pass and of its loss, padded or packed.

All tensors are on the CPU. B is the number of sequences, T the length of a row. `labels` are the `input_ids` where they
are trained on and -100 elsewhere, unshifted: models of Hugging Face's kind shift them by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from replaybuf.common.checks import check_whole, shown
from replaybuf.errors import InputError, RolloutError
from replaybuf.rules.balance import packed_rows
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rewards import SCORE, as_array, reward_value

#: Computes the advantages of a group's rollouts from their rewards.
Advantages: TypeAlias = Callable[[Sequence[float]], Sequence[float]]

#: The fields that are read, by our names.
FIELDS = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward")

# Avoids a division by zero for groups of equal rewards.
_EPSILON = 1e-6
_FIELDS_HINT = "; where your class calls it otherwise, say so as in the config: Pad(fields={{'{name}': 'its name'}})"


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and its response, n tokens in all.

    `input_ids` is int64 [n]. `loss_mask` is bool [n]: the tokens to train on, none of which is in the prompt.
    `logprobs` is float32 [n]: of each token, by the policy that generated it, 0 in the prompt; None if the rollout has
    none. `advantages` is float32 [n]: the rollout's in all its response tokens, 0 in the prompt. `uid` is that of the
    group.
    """

    uid: int
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None
    advantages: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.input_ids)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / (standard deviation + 1e-6) of a group: GRPO's (Shao et al., "DeepSeekMath", 2024)."""
    values = np.asarray(rewards, dtype=np.float64)
    advantages: list[float] = ((values - values.mean()) / (values.std() + _EPSILON)).tolist()
    return advantages


def sequences(
    items: Iterable[StorageItem[Any]],
    *,
    advantages: Advantages = group_advantages,
    fields: Mapping[str, str | None] | None = None,
    reward_key: str = SCORE,
) -> list[TokenSequence]:
    """Return the rollouts of all groups, in order, as sequences; segments of a rollout each, with its advantage.

    Rollouts need `prompt_ids`, `response_ids` and `reward`, and may have `logprobs` and `response_mask` (0 or 1), each
    as long as the response; `fields` maps these names to other ones, and `reward_key` is the part of a dict reward, as
    in the config. Raises RolloutError, naming group and rollout, for missing fields and wrong lengths or types.
    """
    names = {name: (fields or {}).get(name, name) for name in FIELDS}
    result = []
    for item in items:
        rollouts, segments = item.flat, item.segments
        places = [f"group {item.uid}, rollout {number}" for number in range(len(rollouts))]
        records = [{name: _value(rollout, field_name) for name, field_name in names.items()} for rollout in rollouts]
        values = [record["reward"] for record in records]
        if segments is not None:
            values = segments.rewards([reward_value(value, reward_key) for value in values])
        rewards = [_reward(f"group {item.uid}, rollout {n}", value, reward_key) for n, value in enumerate(values)]
        numbers = list(advantages(rewards))
        if len(numbers) != len(rewards):
            raise RolloutError(
                f"group {item.uid}: advantages gave {len(numbers)} numbers for its {len(rewards)} rollouts"
            )
        numbers = numbers if segments is None else [numbers[number] for number in segments.rollouts]
        result += [_sequence(item.uid, *parts) for parts in zip(places, records, numbers, strict=True)]
    return result


def _value(rollout: Any, name: str | None) -> Any:
    if name is None:
        return None
    return rollout.get(name) if isinstance(rollout, Mapping) else getattr(rollout, name, None)


def _reward(place: str, value: Any, key: str) -> float:
    reward = reward_value(value, key)
    if reward is None:
        hint = _FIELDS_HINT.format(name="reward") if value is None else ""
        raise RolloutError(f"{place} has no reward: expected a finite number, got {shown(value)}{hint}")
    return reward


def _sequence(uid: int, place: str, values: Mapping[str, Any], advantage: float) -> TokenSequence:
    prompt = _row(place, "prompt_ids", values["prompt_ids"], np.int64)
    response = _row(place, "response_ids", values["response_ids"], np.int64)
    if prompt is None or response is None:
        name = "prompt_ids" if prompt is None else "response_ids"
        raise RolloutError(f"{place} has no {name}{_FIELDS_HINT.format(name=name)}")
    mask = _row(place, "response_mask", values["response_mask"], np.bool_, len(response))
    logprobs = _row(place, "logprobs", values["logprobs"], np.float32, len(response))
    offset = len(prompt)
    return TokenSequence(
        uid,
        np.concatenate([prompt, response]),
        np.concatenate([np.zeros(offset, np.bool_), np.ones(len(response), np.bool_) if mask is None else mask]),
        None if logprobs is None else np.concatenate([np.zeros(offset, np.float32), logprobs]),
        np.concatenate([np.zeros(offset, np.float32), np.full(len(response), advantage, np.float32)]),
    )


def _row(place: str, name: str, value: Any, dtype: type[np.generic], length: int | None = None) -> Any:
    """Return a field as an array of one dimension; None for None. Raises RolloutError."""
    if value is None:
        return None
    try:
        row = np.asarray(as_array(value))
        if row.dtype == object and None in (values := row.tolist()):
            raise RolloutError(
                f"{place}: {name}[{values.index(None)}] is None: leave the field out of this class by "
                f"fields={{{name!r}: None}}, or have each token a number"
            )
        row = row.astype(dtype)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{place}: {name} isn't a row of numbers: {error}") from error
    if row.ndim != 1:
        raise RolloutError(f"{place}: {name} has the shape {row.shape}; expected one dimension")
    if length is not None and len(row) != length:
        raise RolloutError(f"{place}: {name} has {len(row)} numbers, and response_ids {length}")
    return row


#: Tensors by name, as arguments of models and losses.
Tensors: TypeAlias = dict[str, torch.Tensor]

IGNORED = -100  # no loss for this label


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of `sequences`, which both collators take."""

    advantages: Advantages = group_advantages
    fields: Mapping[str, str | None] | None = None
    reward_key: str = SCORE

    def __post_init__(self) -> None:
        for name in self.fields or ():
            if name not in FIELDS:
                raise InputError(f"fields: {name!r} is none of {', '.join(FIELDS)}, whose names in your class it gives")

    def sequences(self, items: Sequence[StorageItem[Any]]) -> list[TokenSequence]:
        """Return the rollouts of the groups as sequences."""
        return sequences(items, advantages=self.advantages, fields=self.fields, reward_key=self.reward_key)


@dataclass(frozen=True)
class Pad(_Options):
    """Makes one tensor [B, T] of each kind, T being the longest sequence's length, up to a multiple of `multiple_of`.

    | name | dtype | padding | |
    |---|---|---|---|
    | `input_ids` | int64 [B, T] | `pad_token_id` | prompt and response |
    | `attention_mask` | int64 [B, T] | 0 | 1 at tokens |
    | `position_ids` | int64 [B, T] | 0 | 0, 1, ... from the first token of the sequence |
    | `labels` | int64 [B, T] | -100 | `input_ids` where they are trained on, otherwise -100 |
    | `loss_mask` | bool [B, T] | False | tokens to train on |
    | `logprobs` | float32 [B, T] | 0 | of the policy that generated them; left out unless all rollouts have them |
    | `advantages` | float32 [B, T] | 0 | 0 in the prompt |
    | `uids` | int64 [B] | | of the sequence's group |

    `side` is where the padding goes. `advantages`, `fields` and `reward_key` are those of `sequences`. Raises
    InputError for a sequence longer than `max_tokens`: nothing is cut.
    """

    pad_token_id: int
    side: Literal["right", "left"] = "right"
    max_tokens: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise InputError(f"side must be 'right' or 'left', got {self.side!r}")
        check_whole(self.multiple_of, "multiple_of", least=1)
        super().__post_init__()

    def __call__(self, items: Sequence[StorageItem[Any]]) -> Tensors:
        return self.pad(self.sequences(items))

    def pad(self, given: Sequence[TokenSequence]) -> Tensors:
        """Return the tensors of some sequences, such as those of a micro-batch."""
        if not given:
            raise InputError("there are no sequences to pad")
        lengths = [len(sequence) for sequence in given]
        if self.max_tokens is not None and max(lengths) > self.max_tokens:
            uid = given[lengths.index(max(lengths))].uid
            raise InputError(f"a sequence of group {uid} has {max(lengths)} tokens; max_tokens is {self.max_tokens}")
        width = -(-max(lengths) // self.multiple_of) * self.multiple_of
        rows = [slice(0, n) if self.side == "right" else slice(width - n, width) for n in lengths]
        tensors = {}
        for name, (values, padding) in _columns(given, self.pad_token_id).items():
            array = np.full((len(given), width), padding, dtype=values[0].dtype)
            for row, place, value in zip(array, rows, values, strict=True):
                row[place] = value
            tensors[name] = torch.from_numpy(array)
        tensors["uids"] = torch.tensor([sequence.uid for sequence in given], dtype=torch.int64)
        return tensors


@dataclass(frozen=True)
class Pack(_Options):
    """Puts several sequences into one row of at most `max_tokens` tokens, and makes the tensors of each row.

    Rows are filled by best fit (`packed_rows`). Each is a dict, as attention of variable length takes it (`cu_seqlens`
    of flash-attention); n is the number of its sequences:

    | name | dtype | |
    |---|---|---|
    | `input_ids`, `labels` | int64 [1, T] | the sequences one after the other, without padding |
    | `position_ids` | int64 [1, T] | 0, 1, ... from the first token of each sequence |
    | `loss_mask` | bool [1, T] | |
    | `logprobs`, `advantages` | float32 [1, T] | `logprobs` are left out unless all rollouts have them |
    | `cu_seqlens` | int32 [n + 1] | where sequences begin, and the end of the last |
    | `max_seqlen` | int32 [] | length of the longest |
    | `uids` | int64 [n] | of the sequence's group |

    `advantages`, `fields` and `reward_key` are those of `sequences`. Raises InputError for a sequence longer than a
    row.
    """

    max_tokens: int

    def __post_init__(self) -> None:
        check_whole(self.max_tokens, "max_tokens", least=1)
        super().__post_init__()

    def __call__(self, items: Sequence[StorageItem[Any]]) -> list[Tensors]:
        batch = self.sequences(items)
        rows = packed_rows([len(sequence) for sequence in batch], self.max_tokens)
        return [self.pack([batch[index] for index in row]) for row in rows]

    def pack(self, given: Sequence[TokenSequence]) -> Tensors:
        """Return the tensors of one row of sequences, whatever its length."""
        if not given:
            raise InputError("there are no sequences to pack")
        columns = _columns(given, 0)
        del columns["attention_mask"]
        tensors = {name: torch.from_numpy(np.concatenate(values)).unsqueeze(0) for name, (values, _) in columns.items()}
        lengths = torch.tensor([0, *(len(sequence) for sequence in given)], dtype=torch.int32)
        tensors["cu_seqlens"] = torch.cumsum(lengths, 0, dtype=torch.int32)
        tensors["max_seqlen"] = lengths.max()
        tensors["uids"] = torch.tensor([sequence.uid for sequence in given], dtype=torch.int64)
        return tensors


def _columns(batch: Sequence[TokenSequence], pad_token_id: int) -> dict[str, tuple[list[Any], Any]]:
    """Return for each name the values of all sequences, and the padding value."""
    columns: dict[str, tuple[list[Any], Any]] = {
        "input_ids": ([s.input_ids for s in batch], pad_token_id),
        "attention_mask": ([np.ones(len(s), np.int64) for s in batch], 0),
        "position_ids": ([np.arange(len(s)) for s in batch], 0),
        "labels": ([np.where(s.loss_mask, s.input_ids, IGNORED) for s in batch], IGNORED),
        "loss_mask": ([s.loss_mask for s in batch], False),
        "logprobs": ([s.logprobs for s in batch], 0.0),
        "advantages": ([s.advantages for s in batch], 0.0),
    }
    if any(sequence.logprobs is None for sequence in batch):
        del columns["logprobs"]
    return columns
