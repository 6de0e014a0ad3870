"""Collators: groups of rollouts as the tensors of a model's forward pass and of its loss, padded or packed.

All tensors are on the CPU. B is the number of sequences, T the length of a row. `labels` are the `input_ids` where they
are trained on and -100 elsewhere, at their own places: models of Hugging Face's kind shift them by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from replaybuf.errors import InputError
from replaybuf.rules.balance import packed_rows
from replaybuf.storage.values import StorageItem
from replaybuf.torch.sequences import FIELDS, Advantages, TokenSequence, group_advantages, sequences

#: Tensors by name, as models and their trainers take them.
Tensors: TypeAlias = dict[str, torch.Tensor]

IGNORED = -100  # no loss for this label


@dataclass(frozen=True)
class Pad:
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

    `side` is where the padding goes. `advantages` and `fields` are those of `sequences`. Raises InputError for a
    sequence longer than `max_tokens`: nothing is cut.
    """

    pad_token_id: int
    side: Literal["right", "left"] = "right"
    max_tokens: int | None = None
    multiple_of: int = 1
    advantages: Advantages = group_advantages
    fields: Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise InputError(f"side must be 'right' or 'left', got {self.side!r}")
        if self.multiple_of < 1:
            raise InputError(f"multiple_of must be at least 1, got {self.multiple_of!r}")
        _check_fields(self.fields)

    def __call__(self, items: Sequence[StorageItem[Any]]) -> Tensors:
        return self.pad(sequences(items, advantages=self.advantages, fields=self.fields))

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
        made = {}
        for name, (values, padding) in _columns(given, self.pad_token_id).items():
            full = np.full((len(given), width), padding, dtype=values[0].dtype)
            for row, place, value in zip(full, rows, values, strict=True):
                row[place] = value
            made[name] = torch.from_numpy(full)
        made["uids"] = torch.tensor([sequence.uid for sequence in given], dtype=torch.int64)
        return made


@dataclass(frozen=True)
class Pack:
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

    `advantages` and `fields` are those of `sequences`. Raises InputError for a sequence longer than a row.
    """

    max_tokens: int
    advantages: Advantages = group_advantages
    fields: Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {self.max_tokens!r}")
        _check_fields(self.fields)

    def __call__(self, items: Sequence[StorageItem[Any]]) -> list[Tensors]:
        given = sequences(items, advantages=self.advantages, fields=self.fields)
        rows = packed_rows([len(sequence) for sequence in given], self.max_tokens)
        return [self.pack([given[index] for index in row]) for row in rows]

    def pack(self, given: Sequence[TokenSequence]) -> Tensors:
        """Return the tensors of one row of sequences, whatever its length."""
        if not given:
            raise InputError("there are no sequences to pack")
        columns = _columns(given, 0)
        del columns["attention_mask"]
        made = {name: torch.from_numpy(np.concatenate(values)).unsqueeze(0) for name, (values, _) in columns.items()}
        lengths = torch.tensor([0, *(len(sequence) for sequence in given)], dtype=torch.int32)
        made["cu_seqlens"] = torch.cumsum(lengths, 0, dtype=torch.int32)
        made["max_seqlen"] = lengths.max()
        made["uids"] = torch.tensor([sequence.uid for sequence in given], dtype=torch.int64)
        return made


def _check_fields(fields: Mapping[str, str | None] | None) -> None:
    for name in fields or ():
        if name not in FIELDS:
            raise InputError(f"fields: {name!r} is none of {', '.join(FIELDS)}, whose names in your class it gives")


def _columns(given: Sequence[TokenSequence], pad_token_id: int) -> dict[str, tuple[list[Any], Any]]:
    """Return for each name its values of all sequences, and what stands for a missing one."""
    columns: dict[str, tuple[list[Any], Any]] = {
        "input_ids": ([s.input_ids for s in given], pad_token_id),
        "attention_mask": ([np.ones(len(s), np.int64) for s in given], 0),
        "position_ids": ([np.arange(len(s)) for s in given], 0),
        "labels": ([np.where(s.loss_mask, s.input_ids, IGNORED) for s in given], IGNORED),
        "loss_mask": ([s.loss_mask for s in given], False),
        "logprobs": ([s.logprobs for s in given], 0.0),
        "advantages": ([s.advantages for s in given], 0.0),
    }
    if any(sequence.logprobs is None for sequence in given):
        del columns["logprobs"]
    return columns
