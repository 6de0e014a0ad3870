"""A disk that loses its power: what a process wrote below a folder (`shim.c`), and what may be left of it.

Everything that was synced is there. Of each write since, all, nothing or some sectors are, and of the names since the
last fsync of their folder (or, as ext4's journal keeps them, since the last fsync of anything) the first ones.
"""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = struct.Struct("=c7xQqII")
_SECTOR = 512
SHIM = Path(__file__).with_name("shim.c")


def compiled(into: Path) -> Path:
    """Compile the recorder, and return its library."""
    library = into / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl", "-lpthread"], check=True)
    return library


@dataclass(frozen=True, slots=True)
class Event:
    """A call that succeeded: `c`reate, `w`rite, `t`runcate, `s`ync, `r`ename, `l`ink, `u`nlink, `d`: mkdir.

    `f` is an fsync that failed: what was written before may never reach the disk, whatever a later fsync says.
    """

    op: str
    inode: int
    at: int
    path: str
    data: bytes


def recorded(log: Path) -> list[Event]:
    """Return the events of a log in their order."""
    text, at, events = log.read_bytes(), 0, []
    while at < len(text):
        op, inode, offset, path, data = _HEAD.unpack_from(text, at)
        at += _HEAD.size
        name, content = text[at : at + path].decode(), text[at + path : at + path + data]
        events.append(Event(op.decode(), inode, offset, name, content))
        at += path + data
    return events


@dataclass(slots=True, eq=False)
class _File:
    """A file: its synced content, and the writes since, a truncation being one without data."""

    is_folder: bool = False
    synced: bytearray = field(default_factory=bytearray)
    since: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        for at, data in self.since:
            _write(self.synced, at, data)
        self.since.clear()

    def content(self, chance: random.Random, kind: str) -> bytes:
        """Return what is left of it: with "none", "all", the "first" or "some" of the writes since."""
        content = bytearray(self.synced)
        kept_count = chance.randint(0, len(self.since)) if kind == "first" else len(self.since)
        for at, data in self.since[: 0 if kind == "none" else kept_count]:
            if kind != "some" or data is None:
                if kind != "some" or chance.random() < 0.5:
                    _write(content, at, data)
            elif (fate := chance.random()) < 0.4:
                _write(content, at, data)
            elif fate < 0.7:
                for start, part in _sectors(at, data):
                    if chance.random() < 0.5:
                        _write(content, start, part)
        return bytes(content)


def _write(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
    content.extend(bytes(max(0, at - len(content))))
    if data is not None:
        content[at : at + len(data)] = data


def _sectors(at: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(data):
        end = min(len(data), start + _SECTOR - (at + start) % _SECTOR)
        yield at + start, data[start:end]
        start = end


class _Names:
    """The names of a disk: those that are certain, and the changes since, each of one folder."""

    def __init__(self, *, journal: bool) -> None:
        self._journal = journal
        self._certain: dict[str, _File] = {}
        self._since: list[tuple[str, dict[str, _File | None]]] = []

    def change(self, names: dict[str, _File | None]) -> None:
        folder = next(iter(names)).rpartition("/")[0]
        self._since.append((folder, names))

    def sync(self, folders: Iterable[str]) -> None:
        """Make the changes of these folders certain; of all, where a journal has them in their order."""
        own = set(folders)
        for folder, names in self._since:
            if self._journal or folder in own:
                _change(self._certain, names)
        self._since = [] if self._journal else [change for change in self._since if change[0] not in own]

    def left(self, chance: random.Random) -> dict[str, _File]:
        names_left = dict(self._certain)
        for _, names in self._since[: chance.choice((0, len(self._since), chance.randint(0, len(self._since))))]:
            _change(names_left, names)
        return names_left


def _change(names: dict[str, _File], changes: dict[str, _File | None]) -> None:
    for path, file in changes.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


class Disk:
    """Files as the events so far have left them, and what a power cut may leave of them.

    `folders` were there before, by inode. `forgets` is a part of the paths whose syncs are planted to do nothing.
    """

    def __init__(self, folders: Mapping[int, Path], *, forgets: str | None = None) -> None:
        self._folders, self._forgets = {inode: str(path) for inode, path in folders.items()}, forgets
        self._files: dict[int, _File] = {}
        self._paths: dict[str, _File] = {}
        self._names = _Names(journal=False), _Names(journal=True)

    def apply(self, event: Event) -> None:
        """Do what the process did next."""
        if event.op in "wtsf":
            self._of_file(event)
            return
        file = self._files.get(event.inode)
        if event.op in "cd" or file is None:
            file = self._files[event.inode] = _File(is_folder=event.op == "d")
        changes: dict[str, _File | None] = {event.path: None if event.op == "u" else file}
        if event.op == "r":
            changes[event.data.decode()] = None
        _change(self._paths, changes)
        for names in self._names:
            names.change(changes)

    def _of_file(self, event: Event) -> None:
        file = self._files.get(event.inode)
        if event.op == "s":
            paths = [path for path, other_file in self._paths.items() if other_file is file]
            if file is None:
                paths = [self._folders[event.inode]]
            if self._forgets is not None and any(self._forgets in path for path in paths):
                return
            if file is not None:
                file.sync()
            for names in self._names:
                names.sync(paths)
        elif event.op == "f":
            if file is not None and not file.is_folder:
                file.since.clear()
        elif file is not None:
            file.since.append((event.at, event.data if event.op == "w" else None))

    def cut(self, chance: random.Random) -> None:
        """Write into the empty folders what a power cut at this moment may leave."""
        kind = chance.choice(("none", "all", "first", "some", "some"))
        files = chance.choice(self._names).left(chance)
        for path, file in sorted(files.items(), key=lambda entry: entry[0]):
            target = Path(path)
            if not target.parent.is_dir():
                continue
            if file.is_folder:
                target.mkdir()
            else:
                target.write_bytes(file.content(chance, kind))
