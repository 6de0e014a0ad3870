"""Encoding of groups for a transaction; arrays that are kept apart are written before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from replaybuf.common.progress import in_pieces
from replaybuf.errors import DecodeError, ReplayBufError, StorageError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.eviction import decode_removed, read_removed
from replaybuf.storage.sql.statements.new_rows import EncodedGroup, encode_group
from replaybuf.storage.sql.statements.rows import GroupRow, decode_leniently
from replaybuf.storage.sql.tasks.payload_files import PayloadFiles
from replaybuf.storage.sql.tasks.transactions import Transactions
from replaybuf.storage.values import NewGroup, StorageItem
from replaybuf.values.codec.payload import Codec

T = TypeVar("T")

#: Groups are read in pieces of so many, and of payloads of so many bytes.
PIECE_GROUPS, PIECE_BYTES = 256, 8 * 1024 * 1024

#: Slightly less than the largest block of memory whose release changes glibc's thresholds, with its header.
_LARGEST_BLOCK = (32 << 20) - 4096


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory for the next batch of payloads.

    By default it returns the memory of a batch to the kernel, and each page of the next batch is a page fault: a tenth
    of the processor's time of puts and takes of 100 KB. It raises its thresholds when a large block is freed
    (mallopt(3), M_MMAP_THRESHOLD). This block consists of zeros that are never touched, so that it takes no memory.
    """
    bytes(_LARGEST_BLOCK)


class Encoding:
    """Encodes and decodes the groups of an open buffer, in other threads (called in the database's thread)."""

    def __init__(self, codec: Codec, transactions: Transactions, files: PayloadFiles) -> None:
        self.codec = codec
        self.files = files
        self._transactions = transactions
        keep_freed_memory()

    async def write(self, groups: Sequence[NewGroup], function: Callable[[Transaction, list[EncodedGroup]], T]) -> T:
        """Encode groups and return `function(tx, encoded)`, run in a fenced write transaction.

        None must mean that nothing was stored.
        """
        apart = self.files.batch()
        encode = partial(encode_group, self.codec, apart=apart)
        encoded = await self._transactions.compute(lambda new: [*map(encode, new)], groups)
        await self.files.write(apart)
        try:
            result = await self._transactions.write(lambda tx: function(tx, encoded))
        except ReplayBufError as error:
            if not isinstance(error, StorageError):  # refused, and rolled back
                self.files.discard(encoded)
            raise
        if result is None:
            self.files.discard(encoded)
        return result

    async def read(self, read: Callable[[Transaction], list[GroupRow]], deferred: frozenset[str]) -> list[StorageItem]:
        """Return groups that a transaction reads with their payloads; undecodable ones have an `error`."""
        rows = await self._transactions.read(read)
        await self.files.reader.fetch(rows, deferred)
        if any(isinstance(row.tail, DecodeError) for row in rows):  # or the group was removed, or its payload moved
            rows = await self._transactions.read(read)
            await self.files.reader.fetch(rows, deferred)
        return await self.decode_leniently(rows, deferred)

    async def decode(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        """Return groups, whose tails that are kept apart are read. Raises DecodeError."""
        await self.files.reader.fetch(rows)
        return await self._transactions.compute(lambda some: [row.decode(self.codec) for row in some], rows)

    async def decode_removed(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        """Return removed groups for their caller, whose payloads are read now, in pieces."""
        items: list[StorageItem] = []
        for some in in_pieces(rows, lambda row: row.column("bytes"), PIECE_GROUPS, PIECE_BYTES):
            try:  # the removal is committed, and can't fail any more
                await self._transactions.read(partial(read_removed, rows=some))
                await self.files.reader.fetch(some)
            except ReplayBufError as error:
                for row in some:
                    row.tail = row.tail if row.tail is not None or not row.is_apart else DecodeError(str(error))
            items += await self._transactions.compute(partial(decode_removed, codec=self.codec), some)
            self.files.read(row.uid for row in some)
            for row in some:
                row.payload = row.tail = None
        return items

    async def decode_leniently(self, rows: Sequence[GroupRow], deferred: frozenset[str]) -> list[StorageItem]:
        """Return fetched groups as `rows.decode_leniently` does, with handles in the fields `deferred`."""
        decode = partial(decode_leniently, codec=self.codec, deferral=self.files.reader.deferral(deferred))
        return await self._transactions.compute(decode, rows)
