"""Where the buffers of state machines keep their groups."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from typing import Any

import asyncpg

from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.backend import SQLStorage
from tests.contract.harness import CODEC
from tests.postgres import Databases

VIEWS = {"groups": "uid", "rollouts": "uid, position"}
# Written otherwise than what `find` gives, or of no use to compare.
_OTHERWISE = {"created_at", "archived_at", "bytes", "put_step", "full_prompt", "full_response", "messages"}


class Place:
    """Storages of one kind, which last."""

    def new(self, rules: Rules) -> SQLStorage:
        """An empty storage."""
        raise NotImplementedError

    def again(self, rules: Rules) -> SQLStorage:
        """A storage over the data of the last new one."""
        raise NotImplementedError

    async def views(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of the SQL views of the last new one."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let go of the storages of an example."""


class SqliteFiles(Place):
    def __init__(self) -> None:
        self._folder: str | None = None
        self._count = 0

    def new(self, rules: Rules) -> SQLStorage:
        self._folder = self._folder or tempfile.mkdtemp(prefix="rb-lite-")
        self._count += 1
        return self.again(rules)

    def again(self, rules: Rules) -> SQLStorage:
        return SQLStorage(f"sqlite:///{self._path}", CODEC, rules)

    async def views(self) -> dict[str, list[dict[str, Any]]]:
        with closing(sqlite3.connect(self._path)) as connection:
            connection.row_factory = sqlite3.Row
            return {
                view: [_row(row) for row in connection.execute(f"SELECT * FROM {view} ORDER BY {order}")]
                for view, order in VIEWS.items()
            }

    def leave(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    @property
    def _path(self) -> str:
        return f"{self._folder}/{self._count}.db"


class PostgresDatabases(Place):
    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._example = ExitStack()
        self._url = ""
        self._lend: Any = None
        self._reader: tuple[str, asyncpg.Connection] | None = None

    def new(self, rules: Rules) -> SQLStorage:
        if self._lend is None:
            self._lend = self._example.enter_context(self._databases.lent())
        self._url = self._lend()
        return self.again(rules)

    def again(self, rules: Rules) -> SQLStorage:
        return SQLStorage(self._url, CODEC, rules)

    async def views(self) -> dict[str, list[dict[str, Any]]]:
        if self._reader is None or self._reader[0] != self._url:
            self._end_reader()
            self._reader = self._url, await asyncpg.connect(self._url)
        return {
            view: [_row(row) for row in await self._reader[1].fetch(f"SELECT * FROM {view} ORDER BY {order}")]
            for view, order in VIEWS.items()
        }

    def _end_reader(self) -> None:
        if self._reader is not None:
            self._reader[1].terminate()
            self._reader = None

    def leave(self) -> None:
        self._end_reader()
        self._example.close()
        self._lend = None


def _row(row: Any) -> dict[str, Any]:
    """The row as a dict of what can be compared."""
    values = {name: value for name, value in dict(row).items() if name not in _OTHERWISE}
    for name in ("tags", "rewards"):
        if isinstance(values.get(name), str):
            values[name] = json.loads(values[name])
    return values
