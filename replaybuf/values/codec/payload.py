"""Encoding of groups of rollouts as bytes, and decoding (format: `codec.payload_format`, `codec.packed_columns`).

Types that msgpack doesn't know are described in `codec.value_types`, `codec.msgpack_values`,
`codec.library_values` and `codec.user_classes`. Nothing is pickled, and nothing that a payload names is imported or
called.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from replaybuf.errors import RolloutError
from replaybuf.values.codec import payload_format as form
from replaybuf.values.codec.blocks import (
    BlockReader,
    DeferredArray,
    Instead,
    PartReader,
    from_pieces,
)
from replaybuf.values.codec.library_values import (
    IMAGE_DECODERS,
    Fetched,
    ObjectRefs,
    RefValues,
    RestoreRefs,
    RestoreTensors,
    Tensors,
    UnfetchedError,
    image_encoder,
)
from replaybuf.values.codec.msgpack_values import (
    Packed,
    Packing,
    Unpacking,
    lenient,
)
from replaybuf.values.codec.packed_columns import Parents
from replaybuf.values.codec.payload_format import Buffer, Head, SplitPayload
from replaybuf.values.codec.user_classes import ConverterMap, Converters, Instances
from replaybuf.values.codec.value_types import DECODERS, SCALARS, Decoders
from replaybuf.values.rollouts.rollout_type import RolloutType

#: The bytes of loaded blocks, by their position after the head.
Pieces = Mapping[int, Any]


class Codec:
    """Encodes groups of rollouts of one type. Thread-safe.

    Values keep their types: None, bool, int of any size, float (bit for bit), str (lone surrogates too), bytes, list,
    tuple, set, frozenset, dict (order and any hashable keys), complex, Decimal, UUID, datetime, date, timedelta, paths,
    numpy arrays (of objects too) and scalars, torch tensors, PIL images, Ray ObjectRefs, instances of the classes that
    `rollout_type` knows (enums, named tuples, pydantic models, dataclasses), and of the exact classes that have
    `converters`. bytearrays and memoryviews come back as bytes. Anything else is refused.

    `tensors`: restored as tensors ("torch") or as arrays ("numpy"). `object_refs`: restored as new ObjectRefs ("ref")
    or as the values of their objects ("value"); `object_ref_timeout` bounds the wait for the objects of a group, in
    seconds. With `as_plain`, instances of unknown classes are decoded as dicts of their fields, tuples, and values of
    enums; and values of unknown converters as they are stored.
    """

    def __init__(
        self,
        rollout_type: RolloutType,
        *,
        tensors: RestoreTensors = "torch",
        object_refs: RestoreRefs = "ref",
        object_ref_timeout: float = 60.0,
        converters: ConverterMap | None = None,
        as_plain: bool = False,
    ) -> None:
        self._refs = ObjectRefs(object_refs, object_ref_timeout)
        self.rollout_type = rollout_type
        converting = Converters(converters or {}, as_plain=as_plain)
        classes = rollout_type.classes
        #: Whether encoding or decoding runs users' code, which may be slow, and may change arrays in place.
        self.runs_code = bool(converters) or any(shape.runs_code for shape in classes.shapes.values())
        instances = Instances(classes, as_plain=as_plain)
        as_tensors = Tensors(tensors)
        encoders = (as_tensors.encoder, self._refs.encoder, image_encoder)
        self._packing = Packing(encoders, converting, instances)
        self._decoders = DECODERS | converting.decoders | instances.decoders
        self._decoders |= as_tensors.decoders | self._refs.decoders | IMAGE_DECODERS

    def encode(
        self, rollouts: Sequence[Any], fetched: Fetched | None = None, parents: Parents = None
    ) -> bytes | bytearray:
        """Return the payload of a group; it shares no memory with the rollouts, which aren't changed.

        `fetched` has the values of the Ray ObjectRefs in the group; UnfetchedError lists the missing ones. Raises
        RolloutError when a rollout is not of this codec's type; RolloutError, naming the path
        (`rollouts[1].extra_fields['a'][3]`), for a value that can't be stored. Of segments (`parents`), arrays and long
        lists of numbers are stored as the beginning of their parent's, and what they add.
        """
        return self.encode_split(rollouts, fetched, sealed_from=math.inf, parents=parents).joined()

    def encode_split(
        self,
        rollouts: Sequence[Any],
        fetched: Fetched | None = None,
        *,
        sealed_from: float = 0,
        parents: Parents = None,
    ) -> SplitPayload:
        """Return the payload of a group as `encode` does, in two parts. The tail shares the memory of the rollouts.

        The checksums of a tail with fewer bytes than `sealed_from` are computed only by `joined`.
        """
        fields = self.rollout_type.rows(rollouts)
        refs = RefValues(fetched or {})
        parts, blocks = self._pack(fields, refs, parents)
        if refs.missing:
            raise UnfetchedError(tuple(refs.missing))
        return form.written(len(fields), parts, blocks.blocks, blocks.sizes, sealed_from=sealed_from)

    @form.as_damage
    def decode(self, payload: Buffer, *, tail: Buffer | None = None) -> list[Any]:
        """Return the rollouts of a payload, independent of its memory, after its checksums were verified.

        Their arrays share one copy of its blocks, but for small ones; where converters run, each is a copy. A payload
        stored in two parts is given as its head and its blocks, the `tail`, whose memory the arrays have if it is
        writable and no part of a larger one.

        Raises DecodeError for a damaged payload, a newer version or another rollout type.
        """
        head = Head.opened(payload)
        blocks = memoryview(payload)[head.head :] if tail is None else memoryview(tail)
        lends = not self.runs_code
        if lends and (tail is None or type(tail) is memoryview or blocks.readonly):
            blocks = memoryview(bytearray(blocks))
        head.verify(blocks)
        return self._unpack(head, payload, BlockReader(head, blocks, lends=lends))

    @form.as_damage
    def decode_deferred(self, head: Buffer, deferred: Collection[str], pieces: Pieces, handles: Instead) -> list[Any]:
        """Return the rollouts of a payload with handles in place of the arrays in these fields, at any depth.

        `head` is a whole payload, or the head of one whose blocks are elsewhere: `pieces` has those that are needed
        (`wanted`), which are verified. Raises the errors of `decode`.
        """
        opened = Head.opened(head)
        blocks = None if form.is_apart(head) else memoryview(bytearray(memoryview(head)[opened.head :]))
        if blocks is not None:
            opened.verify(blocks)
        reader = PartReader(opened, blocks, from_pieces(pieces), handles, lends=not self.runs_code)
        return self._unpack(opened, head, reader, frozenset(deferred))

    @form.as_damage
    def decode_head(self, head: Buffer) -> list[Any]:
        """Return the rollouts of a payload without its blocks, with None for their arrays. Raises DecodeError."""

        def instead(array: Any) -> Any:
            return None if isinstance(array, DeferredArray) else array

        opened = Head.opened(head)
        reader = PartReader(opened, None, instead, instead)  # for arrays that a value is made of, too
        return self._unpack(opened, head, reader, decoders=lenient(self._decoders))

    def split(self, payload: bytes | bytearray) -> SplitPayload:
        """Return a whole payload in two parts; the tail shares its memory."""
        head = Head.read(payload)
        if not head.blocks:
            return SplitPayload(bytes(payload))
        tail = memoryview(payload)[head.head :]
        return SplitPayload(bytes(payload[: head.head]), (tail,), len(tail))

    @form.as_damage
    def wanted(self, head: Buffer, deferred: Collection[str]) -> list[tuple[int, int]]:
        """Return the offset in the tail and the size of each block with arrays outside these fields.

        Raises DecodeError when the head is damaged.
        """
        needs: dict[tuple[int, int], None] = {}

        def note(array: DeferredArray) -> None:
            for part in array.parts or (array,):
                needs[part.block_at, part.block_size] = None

        def nothing(_: Any) -> None:
            pass

        opened = Head.opened(head)
        unpacking = Unpacking(dict.fromkeys(self._decoders, nothing), PartReader(opened, None, note, nothing))
        unpacking.rollouts(opened, head, deferred)
        return sorted(needs)

    def fetch(self, refs: Sequence[Any]) -> Fetched:
        """Return the values of Ray ObjectRefs, for `encode`; blocks for up to `object_ref_timeout`.

        Raises RolloutError if one can't be had.
        """
        return self._refs.fetch(refs)

    def _pack(self, fields: Sequence[Any], refs: RefValues, parents: Parents) -> Packed:
        try:
            return self._packing.pack(fields, self.rollout_type.omitted, refs, parents)
        except RolloutError:
            raise
        except Exception as error:
            path = "rollouts[{}][{!r}]" if self.rollout_type.is_dict else "rollouts[{}].{}"
            parts = [(path.format(index, name), row[name]) for index, row in enumerate(fields) for name in row]
            problem = self._packing.explain(parts, refs) or RolloutError(f"the rollouts can't be stored: {error}")
            raise problem from error

    def _unpack(
        self,
        head: Head,
        payload: Buffer,
        blocks: BlockReader,
        deferred: Collection[str] = (),
        decoders: Decoders | None = None,
    ) -> list[Any]:
        values = Unpacking(decoders or self._decoders, blocks).rollouts(head, payload, deferred)
        if isinstance(values, list):
            return [self.rollout_type.from_fields(fields) for fields in values]
        return self.rollout_type.from_columns(values, head.rollouts)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacing:
    """Replaces the values that `is_one` recognises by `instead(value)`."""

    is_one: Callable[[Any], bool]
    instead: Callable[[Any], Any]

    def replace(self, value: Any) -> Any:
        """Return the value with replacements in it, at any depth; only immutable containers are copied."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if self.is_one(value):
            return self.instead(value)
        if isinstance(value, dict):
            self._replace_items(value.__setitem__, list(value.items()))
        elif isinstance(value, list):
            if not SCALARS.issuperset(map(type, value)):
                self._replace_items(value.__setitem__, enumerate(value))
        elif isinstance(value, (tuple, set, frozenset)):
            return self._replace_in_tuple(value)
        elif isinstance(value, np.ndarray):
            if kind is np.ndarray and value.dtype.char == "O":
                self._replace_items(value.__setitem__, list(np.ndenumerate(value)))
        elif isinstance(value, BaseModel):
            self.replace(value.__dict__)  # bypasses validators and frozen models
            self.replace(value.__pydantic_extra__)
        else:
            if dataclasses.is_dataclass(kind):
                fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(kind)}
                self._replace_items(partial(object.__setattr__, value), fields.items())
        return value

    def _replace_items(self, assign: Callable[[Any, Any], None], items: Iterable[tuple[Any, Any]]) -> None:
        for place, item in items:
            if (replaced := self.replace(item)) is not item:
                assign(place, replaced)

    def _replace_in_tuple(self, value: Any) -> Any:
        replaced = [self.replace(item) for item in value]
        if all(new is old for new, old in zip(replaced, value, strict=True)):
            return value
        return value._make(replaced) if hasattr(value, "_make") else type(value)(replaced)
