"""Snapshots by way of state dicts, for backends in memory or without a faster way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from replaybuf.codec.payload import Codec
from replaybuf.progress import OnProgress
from replaybuf.storage.contract import CopyStorage
from replaybuf.storage.sql.copies.snapshot import load_file_state, write_state


class StateCopies(CopyStorage):
    """`save` and `resume` for backends that have `state_dict` and `load_state_dict`."""

    codec: Codec

    async def save(self, path: str, about: Mapping[str, str], progress: OnProgress | None = None) -> None:
        await asyncio.to_thread(write_state, path, self.state_dict(), about, self.codec, progress)

    async def resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        self.load_state_dict(await asyncio.to_thread(load_file_state, path, expected, self.codec, progress))
