"""Files that are wrong, cut short, damaged or hostile: nothing of them is imported, and the error says where."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import FileError
from replaybuf.files import importing
from replaybuf.files.row_format import FileGroup
from replaybuf.files.sources import RolloutFile
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from tests.files.conftest import GOOD, fill, lines, write


@pytest.mark.parametrize("keep", [None, -200, 2000])
async def test_a_file_that_was_cut_short_imports_nothing(memory: Any, file: Path, keep: int | None) -> None:
    """Within a group, or within a row."""
    content = lines(file)
    write(file, b"".join(content[:-1]) if keep is None else b"".join(content)[:keep])
    with pytest.raises(FileError, match="the file ends within a group" if keep is None else "line .*no JSON object"):
        await memory.import_from(file)
    assert len(memory) == 0


async def test_a_table_that_was_cut_short_is_refused(memory: Any, tmp_path: Path) -> None:
    await fill(memory)
    await memory.export(tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    for size in (0, 3, len(content) // 2, len(content) - 1):
        (tmp_path / "a.parquet").write_bytes(content[:size])
        with pytest.raises(FileError, match=r"a\.parquet"):
            await memory.import_from(tmp_path / "a.parquet")
    assert len(memory) == 5


async def test_what_is_no_ordinary_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """To open a pipe waits for who writes into it."""
    pipe, device = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    async with ReplayBufferConfig(url="memory://").build() as buffer, asyncio.timeout(30):
        for path in (pipe, device, tmp_path):
            with pytest.raises(FileError, match=rf"{path} is no file"):
                await buffer.import_from(path)
        assert len(buffer) == 0


WRONG = [
    (b'{"prompt": "a", "reward": NaN}', "line 2: NaN is no JSON"),
    (b'{"prompt": "a", "reward": -Infinity}', "line 2: -Infinity is no JSON"),
    (b'{"prompt": "a", "reward": -1e999}', "line 2: -1e999 is larger than any number that"),
    (b'{"prompt": "\xff\xfe"}', "line 2: no JSON object .*can't decode byte"),
    (b"{'prompt': 1}", "line 2: no JSON"),
    (b"[1]", r"line 2: expected an object, got \[1\]"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2: no JSON object .*recursion"),
    (b'{"reward": 1' + b"0" * 5000 + b"}", "line 2: no JSON"),
    (b'{"message": "a", "task_name": "x", "reward": "good"}', "line 2: reward is 'good'; expected a finite number"),
    (b'{"message": "a", "task_name": "x", "response_ids": ["a"]}', "response_ids is .*a list"),
    (b'{"message": "a", "task_name": "x", "response": ["a"]}', "response is .*expected a text"),
    (b'{"message": 5, "task_name": "x"}', "line 2: message is 5; expected a text"),
    (b'{"message": "a", "task_name": "x", "status": "done"}', "status is 'done'; expected one"),
    (b'{"message": "a"}', "line 2 has no task_name: say of which task .*--as-task"),
    (b'{"prompt": "a", "task_name": "x"}', "line 2 has no prompt, nor prompt_ids: say .*--field message="),
    (b'{"message": null, "response": "b", "task_name": "x"}', "line 2 has no prompt, nor prompt_ids: say"),
    (b'{"message": "a", "task_name": "x"}', "line 2 has no response: say which column .*--as-status init"),
    (b'{"message": "a", "response": "b", "task_name": "x", "priority": -1}', "line 2: priority must be"),
    (
        b'{"message": "a", "response": "b", "task_name": "x", "priority": "high"}',
        "line 2: priority is 'high': .*a valid number",
    ),
    (b'{"message": "a", "response": "b", "task_name": "x", "tags": {"a": []}}', r"line 2: tags\['a'\] is \[\]"),
    (b'{"rollouts": [], "task_name": "x"}', "line 2: rollouts is an empty list"),
    (b'{"rollouts": [5], "task_name": "x"}', r"line 2, rollouts\[0\] is 5; expected an object"),
]


@pytest.mark.fast
async def test_a_wrong_line_is_named_and_nothing_imported(memory: Any, tmp_path: Path) -> None:
    for line, message in WRONG:
        write(tmp_path / "a.jsonl", json.dumps(GOOD).encode() + b"\n" + line + b"\n")
        with pytest.raises(FileError, match=rf"a\.jsonl: .*{message}"):
            await memory.import_from(tmp_path / "a.jsonl")
        assert len(memory) == 0


UNKNOWN = [
    (b"question,answer\n1 + 1?,2\n", "line 1: no JSON object .*; write one a line, in UTF-8"),
    (b'[{"prompt": "a"}]', "line 1: expected an object, .*; write one a line"),
    (b'\n{\n  "prompt": "a"\n}\n', "line 2: no JSON object "),
    (pickle.dumps([{}]), "line 1: no JSON object .*; write one a line, in UTF-8"),
    (b"SQLite format 3\0".ljust(100, b"\0"), "line 1: no JSON object "),
]


@pytest.mark.fast
async def test_a_file_of_another_format_says_what_can_be_read(memory: Any, tmp_path: Path) -> None:
    for content, message in UNKNOWN:
        write(tmp_path / "b.pt", content)
        with pytest.raises(FileError, match=rf"b\.pt: {message}"):
            await memory.import_from(tmp_path / "b.pt")


ONE = base64.b64encode(Codec(RolloutType(dict)).encode([{"message": []}])).decode()
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"group.status": "done"}, "line 1: group.status is 'done': Input should be 'init'"),
    ({"group.staleness": "3"}, "line 1: group.staleness is '3': Input should be a valid integer"),
    ({"group.priority": None}, "line 1: group.priority is None: Input should be a valid number"),
    ({"group.times_sampled": -1}, "line 1: group.times_sampled is -1: .*greater than or equal to 0"),
    ({"group.index": 1}, "line 1: group.index is 1 .*not in their order"),
    ({"respnse": "x"}, "line 1: .*no field 'respnse'"),
    ({"group.more": 5}, "line 1: group.more is 5; expected an object"),
    ({"group.payload": "?"}, r"line 1: the payload can't be '\?'"),
    ({"group.payload": 5.5}, "line 1: the payload can't be 5.5"),
    ({"group.payload": "AAAA"}, "line 1: .*payload"),
    ({"group.payload": ONE}, "line 1: the payload has 1 rollouts, and"),
]


BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"group.staleness": 2**63}, "staleness is 9223372036854775808, which is no difference"),
    ({"group.times_sampled": 2**31}, "group.times_sampled is 2147483648: .*less than 2147483648"),
    ({"group.deliveries": 2**31}, "group.deliveries is 2147483648: .*less than 2147483648"),
    ({"seq_staleness": 10**30}, "seq_staleness is 1000.*, which is no difference"),
    ({"group.error": "a\0"}, r"error 'a\\x00' holds a NUL"),
    ({"group.error": "\ud800"}, r"error '\\ud800' holds a NUL or a lone surrogate"),
    ({"group.created_at": 10**400}, "group.created_at is 1000.*: Input should be a valid number"),
    ({"group.priority": 10**400}, "group.priority is 1000.*: Input should be a valid number"),
    ({"response_model_steps": [10**30]}, "response_model_steps holds 10{30}"),
]


async def test_what_no_store_holds_is_refused_before_anything_is_put(
    url: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last group is wrong, when the others' batches would be in."""
    monkeypatch.setattr(importing, "_GROUPS", 2)
    *other_lines, first, last = lines(file)  # the first row of a group says what it is
    async with ReplayBufferConfig(url=url).build() as buffer:
        for change, message in BEYOND:
            write(file, b"".join(other_lines) + json.dumps({**json.loads(first), **change}).encode() + b"\n" + last)
            with pytest.raises(FileError, match=f"line .*{message}"):
                await buffer.import_from(file)
            assert len(buffer) == 0


async def test_a_changed_export_is_refused_with_its_line_and_field(memory: Any, file: Path) -> None:
    first, *other_lines = lines(file)
    for change, message in CHANGES:
        write(file, json.dumps({**json.loads(first), **change}).encode() + b"\n" + b"".join(other_lines))
        with pytest.raises(FileError, match=message):
            await memory.import_from(file)
        assert len(memory) == 0


def _ours(pa: Any, **columns: Any) -> Any:
    """Return a table of one rollout, as our exports are, or nearly."""
    values = {"uid": 1, "task_name": "m", "status": "completed", "staleness": 0, "priority": 1.0, "created_at": 1.0}
    values |= {"times_sampled": 0, "deliveries": 0, "index": 0, "size": 1}
    table = pa.table({**{f"group.{name}": [value] for name, value in values.items()}, **columns})
    fields = [part.with_metadata({"replaybuf": "json"}) if part.name == "group.more" else part for part in table.schema]
    return table.cast(pa.schema(fields))


WRONG_TABLES: list[tuple[Any, str]] = [
    (lambda pa: _ours(pa, **{"group.more": ["5"]}), "row 1: group.more is 5; expected an object"),
    (lambda pa: _ours(pa, **{"group.more": ["{"]}), "row 1, column 'group.more': no JSON"),
    (lambda pa: _ours(pa, **{"group.more": [5]}), "row 1, column 'group.more': no JSON"),
    (
        lambda pa: pa.table({"at": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])}),
        "rows 1 to 1, column 'at': it can't be read .*duplicate",
    ),
    (lambda pa: pa.table({"day": pa.array([0, 2**30], pa.date32())}), "rows 1 to 2, column 'day': it can't be read"),
    (lambda pa: pa.table({"at": pa.array([0, 2**62], pa.timestamp("us"))}), "rows 1 to 2, column 'at': it can't"),
    (lambda pa: pa.table({"text": pa.array([b"a", b"\xff"]).view(pa.string())}), "rows 1 to 2, column 'text': it"),
]


@pytest.mark.fast
def test_a_wrong_table_is_refused_with_its_row_and_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for table, message in WRONG_TABLES:
        parquet.write_table(table(pa), tmp_path / "a.parquet")
        with pytest.raises(FileError, match=rf"a\.parquet: .*{message}"):
            list(RolloutFile(tmp_path / "a.parquet").read())


def test_a_url_in_place_of_a_file_keeps_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match="can't be read") as raised:
        list(RolloutFile(Path("postgresql://rl:secret@db/run")).read())
    assert "secret" not in str(raised.value)


def test_what_no_reader_has_foreseen_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the place after which it is."""

    def unforeseen(*_: Any) -> Any:
        yield FileGroup("line 1", {}, [{}])
        raise LookupError("what is this?")

    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n')
    monkeypatch.setattr("replaybuf.files.sources.foreign_groups", unforeseen)
    with pytest.raises(FileError, match=r"a\.jsonl: after .*line 1: the values can't be read \(LookupError: what is"):
        list(RolloutFile(tmp_path / "a.jsonl").read())
