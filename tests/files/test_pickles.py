"""Pickles are read as data: saved buffers and torch's files come in, and what would run code is refused by its name."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, Status
from replaybuf.errors import FileEndsError, FileError, UnsafePickleError
from replaybuf.files.foreign_rows import ColumnMapping
from replaybuf.files.pickles import DataUnpickler
from replaybuf.files.row_format import FileGroup
from replaybuf.files.sources import RolloutFile
from tests.files.pickled import Tensor, classes, save, saved_buffer
from tests.files.stores import contents

pytestmark = pytest.mark.fast


def memory(**settings: Any) -> Any:
    return ReplayBufferConfig(url="memory://", tensors="numpy", **settings).build()


async def test_a_buffer_that_xtuner_saved_comes_in_whole(tmp_path: Path) -> None:
    saved_buffer(tmp_path / "replay_buffer.pth")
    async with memory() as buffer:
        done = await buffer.import_from(tmp_path / "replay_buffer.pth")
        found = await contents(buffer)
    assert (done.groups, done.rollouts) == (3, 6)
    assert [(about["task_name"], about["status"], about["staleness"]) for about, _ in found] == [
        ("math", Status.COMPLETED, 0),
        ("math", Status.ABORTED, 1),
        ("math", Status.COMPLETED, 2),
    ]
    rollout = found[1][1][1]
    assert (rollout.rollout_id, rollout.uid, rollout.status, rollout.response_ids) == (3, 3, Status.ABORTED, [1, 2, 1])
    assert rollout.logprobs.tolist() == [-0.5, -0.25, 0.0]
    assert rollout.routed_experts.tolist() == np.arange(6).reshape(3, 2).tolist()
    assert (rollout.sample_params, rollout.reward) == ({"n": 1}, {"score": 1.0})


async def test_the_older_format_of_torch_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "old.pth").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    async with memory() as buffer:
        with pytest.raises(FileError, match=r"old\.pth: .* before 1\.6; load it with torch, and save it again"):
            await buffer.import_from(tmp_path / "old.pth", as_task="math")


@pytest.mark.parametrize("name", ["run.db", "postgresql://rl:secret@db/run"])
async def test_a_database_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.db").write_bytes(b"SQLite format 3\0" + bytes(84))
    async with memory() as buffer:
        with pytest.raises(FileError, match="this is a database: replaybuf save and resume") as raised:
            await buffer.import_from(name)
    assert "secret" not in str(raised.value)


async def test_half_a_saved_buffer_is_refused(tmp_path: Path) -> None:
    saved_buffer(tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(whole[: len(whole) // 2])
    async with memory() as buffer:
        with pytest.raises(FileEndsError, match=r"half\.pth: the file of torch\.save is cut short"):
            await buffer.import_from(tmp_path / "half.pth")
        assert await contents(buffer) == []


@pytest.mark.parametrize("name", ["prompt_ids", "group_id", "message"])
async def test_rollouts_of_one_prompt_are_one_group_also_with_arrays_or_tensors(name: str, tmp_path: Path) -> None:
    def rows(make: Any) -> list[dict[str, Any]]:
        ids = [make([1, 2]), make([1, 2]), make([1, 3])]
        prompts = [[{"role": "user", "content": one}] for one in ids] if name == "message" else ids
        return [{name: one, "response": str(number)} for number, one in enumerate(prompts)]

    with classes():
        save(rows(Tensor), tmp_path / "tensors.pth")
    for made, file in ((list, "lists.pkl"), (np.array, "arrays.pkl")):
        (tmp_path / file).write_bytes(pickle.dumps(rows(made)))
    files = ["lists.pkl", "arrays.pkl", *(["tensors.pth"] if name != "prompt_ids" else [])]  # which are of floats here
    for file in files:
        assert [
            len(group.rollouts) for group in RolloutFile(str(tmp_path / file), ColumnMapping(task="math")).read()
        ] == [2, 1]


class _Runs:
    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


def run_me(*_: Any) -> Any:
    os.mkdir("owned")


def _ops(*lines: bytes) -> bytes:
    return b"\x80\x04" + b"".join(lines) + b"."


_HERE = f"{__name__}\nrun_me\n".encode()
HOSTILE = {
    "REDUCE": pickle.dumps([_Runs(os.system, ("touch owned",))]),
    "GLOBAL": _ops(b"cos\nsystem\n"),
    "STACK_GLOBAL": _ops(b"\x8c\x02os", b"\x8c\x06system", b"\x93"),
    "INST": _ops(b"(", b"ios\nsystem\n"),
    "OBJ": _ops(b"(", b"cos\nsystem\n", b"o"),
    "NEWOBJ": _ops(b"csubprocess\nPopen\n", b")", b"\x81"),
    "NEWOBJ_EX": _ops(b"csubprocess\nPopen\n", b")", b"}", b"\x92"),
    "BUILD of a class": _ops(b"ccollections\nOrderedDict\n", b"}", b"b"),
    "REDUCE of a value": _ops(b"]", b")", b"R"),
    "REDUCE of a record": _ops(b"ccollections\nOrderedDict\n", b")", b"R", b")", b"R"),
    "a name with dots": _ops(b"\x8c\x0bcollections", b"\x8c\x19OrderedDict.__init__.real", b"\x93"),
    "a look-alike": _ops(b"cevil.xtuner\nRolloutState\n"),
    "EXT1": _ops(b"\x82\x01"),
    "EXT4": _ops(b"\x84\x01\x00\x00\x00"),
    "eval": _ops(b"cbuiltins\neval\n", b"\x8c\x011", b"\x85", b"R"),
    "getattr": _ops(b"cbuiltins\ngetattr\n"),
    "copyreg": _ops(b"ccopy_reg\n_reconstructor\n"),
    "a lambda of ours": _ops(b"c", _HERE, b")", b"R"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_would_run_code_is_refused_and_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(copyreg._extension_cache, 1, run_me)  # type: ignore[attr-defined]
    (tmp_path / "evil.pkl").write_bytes(HOSTILE[name])
    async with memory() as buffer:
        with pytest.raises(UnsafePickleError):
            await buffer.import_from(tmp_path / "evil.pkl", as_task="x")
        assert await contents(buffer) == []
    assert not (tmp_path / "owned").exists()


async def test_the_error_names_what_the_pickle_wanted(tmp_path: Path) -> None:
    (tmp_path / "evil.pkl").write_bytes(HOSTILE["STACK_GLOBAL"])
    async with memory() as buffer:
        with pytest.raises(UnsafePickleError, match=r"evil\.pkl: the pickle wants to import 'os\.system'"):
            await buffer.import_from(tmp_path / "evil.pkl")


def _nested(depth: int) -> bytes:
    return _ops(b"]" * depth + b"a" * (depth - 1))


def _again_and_again() -> bytes:
    """A list of two of a list of two of ...: a few bytes that would unfold into 2 ** 60 items."""
    value: Any = []
    for _ in range(60):
        value = [value, value]
    return pickle.dumps([{"prompt": value}])


def _shared(value: Any) -> bytes:
    return pickle.dumps([{"prompt": "1", "x": [value] * 600}])


UNFOLDED = {
    "a text": _shared("a" * 300_000),
    "bytes": _shared(b"a" * 300_000),
    "a bytearray": _shared(bytearray(300_000)),
    "an array": _shared(np.zeros(300_000, np.uint8)),
    "a number": _ops(
        b"](}(\x8c\x06prompt\x8c\x011\x8c\x01x](\x8b" + struct.pack("<i", 300_000),
        b"\x01" * 300_000 + b"\x94" + b"h\x00" * 600 + b"eue",
    ),
    "an older array": pickle.dumps([{"prompt": "1", "x": [np.zeros(300_000, np.uint8)] * 600}], protocol=2),
}


@pytest.mark.parametrize("name", UNFOLDED)
def test_one_large_value_again_and_again_is_refused_before_it_fills_the_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(UNFOLDED[name])
    with pytest.raises(FileError, match=r"a\.pkl: .*would fill the memory\. If you trust the file, load it with"):
        list(RolloutFile(str(tmp_path / "a.pkl"), ColumnMapping(task="math")).read())


def test_views_of_one_storage_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    tensor = Tensor([0.0] * 100_000)
    with classes():
        save([{"prompt": "1", "x": [tensor] * 2000}], tmp_path / "a.pth")
    with pytest.raises(FileError, match=r"a\.pth: .*would fill the memory"):
        list(RolloutFile(str(tmp_path / "a.pth"), ColumnMapping(task="math")).read())


async def test_the_rollouts_of_a_group_may_share_their_prompt(tmp_path: Path) -> None:
    image = b"a" * 1_000_000
    rows = [{"prompt": "1", "image": image, "response": str(number)} for number in range(64)]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(rows))
    async with memory() as buffer:
        assert (await buffer.import_from(tmp_path / "a.pkl", as_task="math")).rollouts == 64


def _rollout(value: bytes) -> bytes:
    """A list of a rollout with a value that no object pickles to."""
    return _ops(b"](}(\x8c\x06prompt\x8c\x011\x8c\x01x", value, b"ue")


DAMAGED = {
    "a status that is none": _rollout(b"cxtuner.v1.data\nStatus\n\x8c\x05bogus\x85R"),
    "a status without one": _rollout(b"cxtuner.v1.data\nStatus\n)R"),
    "an array as a name": _rollout(b"}" + pickle.dumps(np.zeros(1), 2)[2:-1] + b"K\x01s"),
    "a number beyond a float": _rollout(b"cbuiltins\ncomplex\n(L" + b"9" * 400 + b"L\nK\x01tR"),
    "an endless size": _rollout(b"ctorch\nSize\n](G\x7f\xf0\0\0\0\0\0\0e\x85R"),
    "extra_fields of a list": pickle.dumps([{"prompt": "1", "extra_fields": [1], "z": 1}]),
    "a status of a list": pickle.dumps([{"prompt": "1", "status": []}]),
    "a reward beyond a float": pickle.dumps([{"prompt": "1", "reward": 10**400}]),
    "cut short": pickle.dumps([{"prompt": "1"}])[:-3],
    "a length beyond the file": _ops(b"\x8d" + struct.pack("<Q", 1 << 60)),
    "a bytearray beyond the file": _ops(b"\x96" + struct.pack("<Q", 1 << 60)),
    "a place in the memo far away": _ops(b"]", b"r\xff\xff\xff\xff", b"0]0"),
    "nested deeply": _nested(50_000),
    "again and again": _again_and_again(),
    "itself": _ops(b"]\x94h\x00a"),
    "no rollouts": pickle.dumps({"a": 1}),
    "an unknown opcode": _ops(b"\xff"),
    "storages without torch": _ops(b"\x8c\x01x", b"Q"),
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_a_damaged_pickle_is_refused_and_takes_no_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(DAMAGED[name])
    async with memory() as buffer:
        with pytest.raises(FileError, match=r"a\.pkl"):
            await buffer.import_from(tmp_path / "a.pkl", as_task="x")


def _zip(path: Path, pickled: bytes, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        (b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\xff\0\0\0"),  # a version of zip that nobody has
        (b"PK\x03\x04\x14\0\0\0", b"PK\x03\x04\x14\0\0\x08"),  # a name of UTF-8, which it isn't
    ],
)
async def test_a_damaged_zip_file_is_refused(tmp_path: Path, there: bytes, instead: bytes) -> None:
    _zip(tmp_path / "a.pth", pickle.dumps([{"prompt": "1"}]), {})
    whole = (tmp_path / "a.pth").read_bytes()
    assert there in whole
    (tmp_path / "a.pth").write_bytes(whole.replace(there, instead).replace(b"a/data", b"\xff/data", 1))
    async with memory() as buffer:
        with pytest.raises(FileEndsError, match=r"a\.pth: .*damaged"):
            await buffer.import_from(tmp_path / "a.pth", as_task="x")


async def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    _zip(tmp_path / "a.pth", b"\0" * 10_000_000, {}, zipfile.ZIP_DEFLATED)
    async with memory() as buffer:
        with pytest.raises(FileError, match=r"is compressed, which torch\.save doesn't do"):
            await buffer.import_from(tmp_path / "a.pth")


async def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    with classes():
        save([{"prompt": "1", "logprobs": _Beyond()}], tmp_path / "a.pth")
    async with memory() as buffer:
        with pytest.raises(FileError, match="larger than its storage"):
            await buffer.import_from(tmp_path / "a.pth", as_task="x")


class _Beyond:
    def __reduce__(self) -> Any:
        from tests.files.pickled import Tensor

        rebuild, (storage, *_) = Tensor([1.0]).__reduce__()
        return rebuild, (storage, 0, (1 << 40,), (0,), False, None)


def test_what_no_reader_has_foreseen_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the place after which it is."""

    def unforeseen(*_: Any) -> Any:
        yield FileGroup("item 1", "math", Status.COMPLETED, [{}])
        raise LookupError("what is this?")

    (tmp_path / "a.pkl").write_bytes(b"\x80")
    monkeypatch.setattr("replaybuf.files.sources.read_saved", unforeseen)
    with pytest.raises(FileError, match=r"a\.pkl: after .*item 1: the values can't be read \(LookupError: what is"):
        list(RolloutFile(str(tmp_path / "a.pkl")).read())


def test_the_machine_knows_every_opcode_of_pythons() -> None:
    """A new opcode of a later Python has to be looked at here."""
    known = {ord(opcode.code) for opcode in pickletools.opcodes}
    assert known == set(DataUnpickler.dispatch)
    plain = DataUnpickler(io.BytesIO(pickle.dumps([1, {"a": (b"x", 2.5)}])), 1000, (), lambda pid: None).load()
    assert plain == [1, {"a": (b"x", 2.5)}]
