"""Imports: each group exactly once, whatever happens; nothing of a file that is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replaybuf import FullError, InputError, ReplayBufferConfig, Status
from replaybuf.errors import FileEndsError, FileError, ReplayBufError
from replaybuf.files import importing
from replaybuf.files.importing import Importing, import_groups, survey
from replaybuf.files.reading import Source
from replaybuf.progress import Progress
from tests.files.stores import contents, fill

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    """An export of five groups of two rollouts."""
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await fill(buffer)
        await buffer.export(tmp_path / "a.jsonl")
    return tmp_path / "a.jsonl"


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


async def test_a_second_import_finds_nothing_to_do_also_after_draws(file: Path, sql_url: str) -> None:
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        assert (await buffer.import_from(file)).groups == 5
        await buffer.get(2, "math")
        assert (await buffer.import_from(file)).groups == 0
        assert len(buffer) == 3
        assert (await buffer.import_from(file, again=True)).groups == 5


async def test_parts_of_a_file_and_the_rest_are_each_imported_once(file: Path, sql_url: str) -> None:
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        assert (await buffer.import_from(file, task="math")).groups == 2
        done = await buffer.import_from(file)
        assert (done.groups, done.there) == (3, 2)
        assert (await buffer.import_from(file, status=Status.COMPLETED)).groups == 0


async def test_a_failure_in_the_middle_is_made_good_by_the_next_import(
    file: Path, sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_GROUPS", 2)
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        put, calls = buffer.storage.put_behind, []  # type: ignore[attr-defined]

        async def failing(*args: Any) -> bool:
            calls.append(args)
            if len(calls) == 2:
                raise OSError("the network is down")
            return bool(await put(*args))

        monkeypatch.setattr(buffer.storage, "put_behind", failing)
        with pytest.raises(OSError, match="network"):
            await buffer.import_from(file)
        assert len(buffer) == 2
        assert (await buffer.import_from(file)).groups == 3
        assert [group[0].rollout_id for _, group in await contents(buffer)] == [0, 2, 4, 6, 8]


async def test_a_restore_of_a_checkpoint_takes_the_import_back(file: Path, sql_url: str) -> None:
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        await buffer.checkpoint(1)
        await buffer.import_from(file)
        await buffer.restore(1)
        assert (await buffer.import_from(file)).groups == 5


async def test_two_imports_of_one_file_at_once_double_nothing(file: Path, sql_url: str) -> None:
    source = Source(str(file))
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        found = await survey(buffer.storage, source.read, Importing())
        cursor = await buffer.storage.cursor(f"import {found.digest}")  # type: ignore[attr-defined]
        await import_groups(buffer.storage, source.read, Importing(), found)
        assert not await buffer.storage.put_behind([], cursor)  # type: ignore[attr-defined]
        assert len(buffer) == 5


async def test_a_dry_run_counts_and_puts_nothing(file: Path, sql_url: str) -> None:
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        assert (await buffer.import_from(file, task="math")).groups == 2
        done = await buffer.import_from(file, dry_run=True)
        assert len(buffer) == 2
    assert (done.groups, done.there, done.found.new) == (0, 2, 3)
    assert done.found.groups == {("code", Status.COMPLETED): 3, ("math", Status.COMPLETED): 2}
    assert done.found.rollouts.total() == 10


@pytest.mark.fast
async def test_both_passes_tell_their_progress(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a total that isn't known, the second of the groups that are new."""
    monkeypatch.setattr(importing, "_GROUPS", 2)
    monkeypatch.setattr("replaybuf.progress._SECONDS", 0)
    seen: list[Progress] = []
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await buffer.import_from(file, progress=seen.append)
        told = [(one.groups, one.total) for one in seen]
        reading = [(0, 0), (2, 0), (4, 0), (5, 0), (5, 5)]
        assert told == [*reading, (0, 5), (2, 5), (4, 5), (5, 5), (5, 5)]
        assert seen[4].bytes == seen[-1].bytes > 0
        seen.clear()
        await buffer.import_from(file, dry_run=True, progress=seen.append)
        assert [(one.groups, one.total) for one in seen] == reading


@pytest.mark.parametrize("calls", [2, 7])
async def test_an_import_that_is_cancelled_ends_at_once_and_goes_on(
    file: Path, sql_url: str, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """In its first pass, and in its second."""
    monkeypatch.setattr(importing, "_GROUPS", 2)
    monkeypatch.setattr("replaybuf.progress._SECONDS", 0)
    seen: list[Progress] = []
    async with ReplayBufferConfig(url=sql_url).build() as buffer:

        def tell(progress: Progress) -> None:
            seen.append(progress)
            if len(seen) == calls:
                running.cancel()

        running = asyncio.ensure_future(buffer.import_from(file, progress=tell))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(seen) == calls
        there = len(buffer)
        assert there == (0 if calls == 2 else 2)
        assert (await buffer.import_from(file)).groups == 5 - there


async def test_the_limits_hold_and_what_was_put_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_GROUPS", 2)
    async with ReplayBufferConfig(url="memory://", capacity=2, on_full="reject").build() as buffer:
        with pytest.raises(FullError, match="the capacity is 2"):
            await buffer.import_from(file)
        assert len(buffer) == 4
        await buffer.get(1, "code")
        done = await buffer.import_from(file)
        assert (done.groups, done.there) == (1, 4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": 5}, "expected the path of a file, got 5"),
        ({"source": ""}, "expected the path of a file"),
        ({"source": "a.jsonl", "fields": ["a=b"]}, "fields must be a dict such as"),
        ({"source": "a.jsonl", "fields": {"response": 1}}, "fields must be a dict such as"),
        ({"source": "a.jsonl", "fields": {"respnse": "a"}}, "respnse is no field of rollouts; did you mean response"),
        ({"source": "a.jsonl", "fields": {"completion": "a"}}, "completion is no field .* did you mean response"),
        ({"source": "a.jsonl", "fields": {"xyzzy": "a"}}, "xyzzy is no field .*--as-they-are"),
        ({"source": "a.jsonl", "as_task": ""}, "as_task is empty"),
        ({"source": "a.jsonl", "task": 5}, "task must be a text"),
        ({"source": "a.jsonl", "as_status": "done"}, "unknown status 'done'"),
        ({"source": "a.jsonl", "key": 1}, "key must be the name of a column"),
    ],
)
async def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(InputError, match=message):
            await buffer.import_from(**arguments)


def _import(url: str, file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "replaybuf", "import", url, str(file)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(("groups", "kills"), [(2000, 1), pytest.param(20_000, 8, marks=pytest.mark.long)])
async def test_an_import_that_is_killed_goes_on(shared_url: str, tmp_path: Path, groups: int, kills: int) -> None:
    """Also when that is killed again; and half of what was there by then was drawn meanwhile."""
    file = tmp_path / "a.jsonl"
    one = {"prompt": "1 + 1?", "response": "2" * 2000, "task_name": "math"}
    file.write_text("".join(json.dumps({**one, "group_id": n}) + "\n" for n in range(groups)))
    drawn: list[int] = []
    async with ReplayBufferConfig(url=shared_url).build() as buffer:
        for _ in range(kills):
            process, before = _import(shared_url, file), len(buffer)
            async with asyncio.timeout(60):
                while len(buffer) == before:  # noqa: ASYNC110 another process puts them
                    await asyncio.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
            there = len(buffer)
            assert before < there < groups - len(drawn)
            drawn += [group[0].group_id for group in await buffer.get(there // 2, "math")]
        assert _import(shared_url, file).wait(60) == 0
        left = [group[0].group_id for _, group in await contents(buffer)]
    assert drawn + left == list(range(groups))


# Files that are wrong

MIDDLE = "the file ends within"


@pytest.mark.parametrize("keep", [-1, -200, 2000])
async def test_a_file_that_was_cut_short_imports_nothing_unless_asked(file: Path, keep: int) -> None:
    whole = b"".join(lines(file))
    write(file, whole[:keep] if keep != -1 else b"".join(lines(file)[:-1]))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(FileEndsError, match=MIDDLE):
            await buffer.import_from(file)
        assert len(buffer) == 0
        done = await buffer.import_from(file, partial=True)
        assert 0 < done.groups == len(buffer) < 5


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.arrows"])
async def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await fill(buffer)
        await buffer.export(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        for size in (0, 3, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(FileError, match=name):
                await buffer.import_from(tmp_path / name)
        assert len(buffer) == 5


GOOD = {"prompt": "1 + 1?", "response": "2", "task_name": "math"}
WRONG = {
    "NaN": (b'{"prompt": "a", "reward": NaN}', "line 2: NaN is no JSON"),
    "Infinity": (b'{"prompt": "a", "reward": -Infinity}', "line 2: -Infinity is no JSON"),
    "a number beyond a float": (b'{"prompt": "a", "reward": -1e999}', "line 2: -1e999 is larger than any number that"),
    "a name twice": (b'{"prompt": "a", "prompt": "b"}', "line 2: the name 'prompt' is there twice"),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', "line 2: byte 12 is no UTF-8"),
    "no JSON": (b"{'prompt': 1}", "line 2: no JSON"),
    "no object": (b"[1]", r"line 2: expected an object, got \[1\]"),
    "deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2: nested too deeply"),
    "a huge number": (b'{"reward": 1' + b"0" * 5000 + b"}", "line 2: no JSON"),
    "a wrong reward": (b'{"prompt": "a", "task_name": "x", "reward": "good"}', "line 2: reward is 'good'; expected"),
    "wrong tokens": (
        b'{"prompt": "a", "task_name": "x", "response_ids": ["a"]}',
        "response_ids is .*a list",
    ),
    "a wrong prompt": (b'{"prompt": 5, "task_name": "x"}', "message is 5; expected a text"),
    "a wrong status": (
        b'{"prompt": "a", "task_name": "x", "status": "done"}',
        "status is 'done'; expected one",
    ),
    "no task": (b'{"prompt": "a"}', "line 2 has no task_name: say of which task .*--as-task"),
    "a wrong priority": (b'{"prompt": "a", "task_name": "x", "priority": -1}', "line 2: priority must be"),
    "a wrong tag": (b'{"prompt": "a", "task_name": "x", "tags": {"a": []}}', r"line 2: tags\['a'\] is \[\]"),
    "no rollouts": (b'{"rollouts": [], "task_name": "x"}', "line 2: rollouts is an empty list"),
    "no rollout": (b'{"rollouts": [5], "task_name": "x"}', r"line 2, rollouts\[0\] is 5; expected an object"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_line_is_named_and_nothing_imported(name: str, tmp_path: Path) -> None:
    line, message = WRONG[name]
    (tmp_path / "a.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(FileError, match=rf"a\.jsonl: .*{message}"):
            await buffer.import_from(tmp_path / "a.jsonl")
        assert len(buffer) == 0


UNKNOWN = {
    "CSV": (
        b"question,answer\n1 + 1?,2\n",
        "line 1: no JSON object: 'question,answer'; what can be read is JSONL .*Parquet",
    ),
    "a JSON array": (b'[{"prompt": "a"}]', "line 1: a JSON array; write one object a line"),
    "an indented JSON array": (b'[\n  {"prompt": "a"}\n]\n', "line 1: a JSON array; write one object a line"),
    "an indented object": (b'\n{\n  "prompt": "a"\n}\n', "line 2: an object over several lines; write one"),
    "garbage": (b"\x93\xff\x00\n\xfe", "line 1: no JSON object: .*; what can be read is JSONL .*torch"),
    "a JSON text": (b'"a"', "line 1: no JSON object: .*; what can be read is"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", UNKNOWN)
async def test_a_file_of_another_format_says_what_can_be_read(name: str, tmp_path: Path) -> None:
    content, message = UNKNOWN[name]
    (tmp_path / "b.pt").write_bytes(content)
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(FileError, match=rf"b\.pt: {message}"):
            await buffer.import_from(tmp_path / "b.pt", partial=True)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a status": ({"group.status": "done"}, "line 1: group.status is 'done'; expected one of init"),
    "a staleness": ({"group.staleness": "3"}, "line 1: group.staleness is '3'; expected a whole number"),
    "no priority": ({"group.priority": None}, "line 1: group.priority is None; expected a number"),
    "an order": ({"group.index": 1}, "line 1: group.index is 1 .*not in their order"),
    "a dtype": ({"response_ids": [1.5]}, "line 1, field 'response_ids': expected a list of numbers"),
    "a half": ({"logprobs": [1e300], "$kinds": {"logprobs": "array:<f2"}}, "line 1, field 'logprobs': .*too large"),
    "a bfloat16": (
        {"logprobs": [1e300], "$kinds": {"logprobs": "tensor:bfloat16:0"}},
        "line 1, field 'logprobs': .*too large",
    ),
    "a range": ({"prompt_ids": [1 << 40]}, "line 1, field 'prompt_ids'"),
    "a kind": ({"$kinds": {"response": "array:O"}}, "line 1, field 'response': there is no dtype"),
    "a tag": ({"response": {"$python": "os"}}, r"line 1, field 'response': there is no tag '\$python'"),
    "base64": ({"response": {"$bytes": "?"}}, "line 1, field 'response'"),
    "an array": ({"response": {"$ndarray": ["<f4", [1 << 50], ""]}}, "line 1, field 'response'"),
    "a content": ({"response": {"$datetime": ["x"]}}, "line 1: .*damaged"),
}


BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "staleness": ({"group.staleness": 2**63}, "staleness is 9223372036854775808, which is no difference"),
    "times_sampled": ({"group.times_sampled": 2**31}, "times_sampled is 2147483648; it must be from 0 to 2147483647"),
    "deliveries": ({"group.deliveries": 2**31}, "deliveries is 2147483648; it must be"),
    "seq_staleness": ({"seq_staleness": 10**30}, "seq_staleness is 1000.*, which is no difference"),
    "a NUL": ({"group.error": "a\0"}, r"error 'a\\x00' holds a NUL"),
    "a surrogate": ({"group.error": "\ud800"}, r"error '\\ud800' holds a NUL or a lone surrogate"),
    "a huge created_at": ({"group.created_at": 10**400}, "group.created_at is 1000.*; expected a number"),
    "a huge priority": ({"group.priority": 10**400}, "group.priority is 1000.*; expected a number"),
    "a step": ({"response_model_steps": [10**30], "$kinds": {}}, "response_model_steps holds 1e.30"),
}


@pytest.mark.parametrize("name", BEYOND)
async def test_what_no_store_holds_is_refused_before_anything_is_put(
    name: str, sql_url: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last group is wrong, when the others' batches would be in."""
    monkeypatch.setattr(importing, "_GROUPS", 2)
    change, message = BEYOND[name]
    *others, first, last = lines(file)  # the first row of a group says what it is
    write(file, b"".join(others) + json.dumps({**json.loads(first), **change}).encode() + b"\n" + last)
    async with ReplayBufferConfig(url=sql_url).build() as buffer:
        with pytest.raises(FileError, match=f"line .*{message}"):
            await buffer.import_from(file)
        assert len(buffer) == 0


async def test_a_range_beyond_all_memory_has_no_length_and_comes_in(file: Path) -> None:
    first, *others = lines(file)
    changed = {**json.loads(first), "response_ids": {"$range": [0, 10**30, 1]}, "$kinds": {}}
    write(file, json.dumps(changed).encode() + b"\n" + b"".join(others))
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    async with config.build() as buffer:
        assert (await buffer.import_from(file)).groups == 5


@pytest.mark.parametrize("name", CHANGES)
async def test_a_changed_export_is_refused_with_its_line_and_field(name: str, file: Path) -> None:
    change, message = CHANGES[name]
    first, *others = lines(file)
    write(file, json.dumps({**json.loads(first), **change}).encode() + b"\n" + b"".join(others))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(FileError, match=message):
            await buffer.import_from(file)
        assert len(buffer) == 0


@pytest.mark.fast
async def test_marks_of_other_systems_are_no_error(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        assert (await buffer.import_from(tmp_path / "a.jsonl")).rollouts == 2
        assert (await buffer.import_from(tmp_path / "empty.jsonl")).groups == 0


# Rows of others


async def test_rows_of_others_are_groups_by_their_id_or_prompt(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "a", "completion": "1", "score": 1, "source": "gsm8k"},
        {"question": "a", "completion": "2", "score": 0},
        {"question": "b", "completion": "3", "score": 0.5, "completion_ids": [1, 2]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await buffer.import_from(tmp_path / "a.jsonl", as_task="math")
        first, second = [group for _, group in await contents(buffer)]
    assert [(one.response, one.reward) for one in first] == [("1", {"score": 1.0}), ("2", {"score": 0.0})]
    assert first[0].message == [{"role": "user", "content": "a"}]
    assert first[0].extra_fields == {"source": "gsm8k"}
    assert (second[0].response_ids, second[0].status) == ([1, 2], Status.COMPLETED)


async def test_columns_may_be_named(tmp_path: Path) -> None:
    rows = [{"q": "a", "a": "1", "id": n, "note": "x"} for n in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    async with config.build() as buffer:
        settings = {"fields": {"message": "q", "response": "a"}, "key": "id", "as_task": "math", "as_they_are": True}
        await buffer.import_from(tmp_path / "a.jsonl", **settings)
        [(about, [first, _])] = await contents(buffer)
        with pytest.raises(FileError, match="line 1 has no field 'z'"):
            await buffer.import_from(tmp_path / "a.jsonl", fields={"response": "z"}, as_task="math")
        done = await buffer.import_from(tmp_path / "a.jsonl", fields={"mine": "a"}, as_task="math", dry_run=True)
        assert done.groups == 0
    assert (about["key"], first["response"], first["note"]) == ("0", "1", "x")


ANSWERS = [{"question": str(n), "answer": str(2 * n), "grade": 1} for n in range(5)]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        (
            {},
            [
                "no response was found: nothing of this can be trained on; --field response=answer? "
                "Not used: answer, grade"
            ],
        ),
        ({"fields": {"response": "answer"}}, []),
        ({"as_status": "init"}, []),
    ],
)
async def test_a_file_without_responses_is_warned_about_unless_it_was_meant(
    options: dict[str, Any], warnings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ANSWERS)))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        done = await buffer.import_from(tmp_path / "a.jsonl", as_task="math", dry_run=True, **options)
    assert done.found.warnings == warnings


@pytest.mark.fast
@pytest.mark.parametrize("last", [{"completion": "x"}, {"status": "init"}])
async def test_one_response_or_status_is_enough_for_no_warning(last: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*ANSWERS, {"question": "z", **last}])))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        done = await buffer.import_from(tmp_path / "a.jsonl", as_task="math")
    assert done.found.warnings == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("column", "warning"),
    [
        ("prompt", "5 prompts make 15 groups, .*: sort the file by prompt, or give group_id"),
        ("group_id", "5 group_ids make 15 groups, .*: sort the file by group_id"),
    ],
)
async def test_rows_of_one_group_that_are_apart_are_warned_about(column: str, warning: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", column: str(n % 5), "response": "1", "task_name": "math"} for n in range(15)]
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        [found] = (await buffer.import_from(tmp_path / "a.jsonl", dry_run=True)).found.warnings
        assert re.fullmatch(warning, found)
        rows.sort(key=lambda row: row[column])
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        done = await buffer.import_from(tmp_path / "a.jsonl")
    assert (done.groups, done.found.warnings) == (5, [])


@pytest.mark.fast
async def test_a_prompt_in_two_tasks_or_groups_that_are_whole_are_no_warning(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "response": "1", "task_name": name} for name in ("x", "y")]
    rows += [{"prompt": "a", "task_name": "x", "rollouts": [{"response": str(n)}]} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        assert (await buffer.import_from(tmp_path / "a.jsonl")).found.warnings == []


@pytest.mark.fast
async def test_the_prompts_that_are_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaybuf.files.remarks._PROMPTS", 2)
    rows = [{"prompt": str(n % 5), "response": "1", "task_name": "math"} for n in range(15)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        [found] = (await buffer.import_from(tmp_path / "a.jsonl")).found.warnings
    assert found.startswith("at most 11 prompts make 15 groups")


@pytest.mark.fast
@pytest.mark.parametrize("where", ["fields", "key"])
@pytest.mark.parametrize("url", ["postgresql://me:hunter2@db/rl", "postgresql://db/rl?password=hunter2"])
async def test_a_url_in_place_of_a_columns_name_keeps_its_password(tmp_path: Path, where: str, url: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        for given in [url] if where == "key" else [{"response": url}, {url: "z"}]:
            with pytest.raises(ReplayBufError, match=r"(has|is) no field") as caught:
                await buffer.import_from(tmp_path / "a.jsonl", **{where: given})
            assert "hunter2" not in str(caught.value)


async def test_parquet_of_others_with_its_own_types(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table(
        {
            "prompt": pa.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]),
            "completion": pa.array(["1", "2"], pa.large_string()),
            "task": pa.array(["math", "math"]).dictionary_encode(),
            "response_ids": pa.array([[1, 2], None], pa.large_list(pa.int32())),
            "nested": pa.array([[[1], []], [[2, 3]]]),
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await buffer.import_from(tmp_path / "a.parquet")
        first, second = [group[0] for _, group in await contents(buffer)]
    assert (first.response, first.response_ids, second.response_ids) == ("1", [1, 2], None)
    assert first.extra_fields["nested"] == [[1], []]


@pytest.mark.fast
@pytest.mark.parametrize("name", ["a.arrow", "a.arrows"])
@pytest.mark.parametrize("offset", [10**9, -(10**9)])
def test_an_arrow_file_with_offsets_that_lead_out_of_it_is_refused(tmp_path: Path, name: str, offset: int) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"task_name": ["m", "m", "m"], "response": ["hello", "there", "friend"]})
    file = tmp_path / name
    with (pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream)(str(file), table.schema) as writer:
        writer.write_table(table)
    offsets = struct.pack("<4i", 0, 5, 10, 16)
    assert offsets in file.read_bytes()
    write(file, file.read_bytes().replace(offsets, struct.pack("<4i", 0, offset, 10, 16)))
    with pytest.raises(FileError, match=rf"{name}: row 1: this is no whole Arrow file"):
        list(Source(str(file)).read())


def _group(fields: Any, **about: Any) -> Any:
    """Return a table of one group with these rollouts, as our exports are, or nearly."""
    import pyarrow as pa

    metadata = {"format": 1, "rows": "groups", "json": ["$more"], **about}
    columns = {"uid": [1], "task_name": ["m"], "status": ["completed"], "staleness": [0], "rollouts": [fields]}
    return pa.table(columns).replace_schema_metadata({"replaybuf": json.dumps(metadata)})


WRONG_TABLES: dict[str, tuple[Any, str]] = {
    **{
        f"about {text}": (
            lambda pa, text=text: pa.table({"response": ["x"]}).replace_schema_metadata({"replaybuf": text}),
            "metadata 'replaybuf' is damaged",
        )
        for text in ("[]", '""', "0", "null", '{"format": 1}', '{"format": 1, "rows": "groups", "json": [[]]}', "\xff")
    },
    "of a later version": (lambda pa: _group([], format=2), "the file has format 2 of replaybuf's; upgrade"),
    "more is a number": (
        lambda pa: _group([{"$more": "{}"}, {"$more": "5"}]),
        r"row 1, rollouts\[1\], column '\$more': 5; expected an object",
    ),
    "a rollout is a number": (lambda pa: _group([1]), r"row 1: rollouts is \[1\]; expected a list of objects"),
    "rollouts are a number": (lambda pa: _group(5), "row 1: rollouts is 5; expected a list of objects"),
    "two of a name": (
        lambda pa: pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]),
        "two columns have the name 'text'; rename one",
    ),
    "two of a name within": (
        lambda pa: pa.table({"at": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])}),
        "row 1, column 'at': it can't be read .*duplicate",
    ),
    "date": (lambda pa: pa.table({"day": pa.array([0, 2**30], pa.date32())}), "row 2, column 'day': it can't be read"),
    "time": (lambda pa: pa.table({"at": pa.array([0, 2**62], pa.timestamp("us"))}), "row 2, column 'at': it can't be"),
    "UTF-8": (
        lambda pa: pa.table({"text": pa.array([b"a", b"\xff"]).view(pa.string())}),
        "row 2, column 'text': it ca",
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", WRONG_TABLES)
def test_a_wrong_table_is_refused_with_its_row_and_column(tmp_path: Path, name: str) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table, message = WRONG_TABLES[name]
    parquet.write_table(table(pa), tmp_path / "a.parquet")
    with pytest.raises(FileError, match=rf"a\.parquet: .*{message}"):
        list(Source(str(tmp_path / "a.parquet")).read())
