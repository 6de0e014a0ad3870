"""JSONL files as a dataset: every object is one item, whatever the files look like."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf.errors import InputError
from replaybuf.produce.datasets import PromptDataset
from replaybuf.produce.prompt_records import JSONLines


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def numbered(path: Path, first: int, last: int) -> Path:
    return write(path, *(json.dumps({"number": number}) for number in range(first, last)), "")


objects = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text()), max_size=3)
separators = st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"])


@settings(max_examples=40)  # each writes files
@given(
    files=st.lists(st.lists(st.tuples(objects, separators, st.booleans()), max_size=5), min_size=1, max_size=3),
    start=st.sampled_from(["", "\ufeff", "\n", "\ufeff\n"]),
    is_cut=st.booleans(),
)
def test_every_object_is_one_item(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[tuple[Any, str, bool]]], start: str, is_cut: bool
) -> None:
    """With blank lines, a byte order mark, any ends of lines, and none at the end of the file."""
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for number, lines in enumerate(files):
        text = start + "".join(json.dumps(one, ensure_ascii=is_ascii) + end for one, end, is_ascii in lines)
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_bytes((text.rstrip("\r\n") if is_cut else text).encode("utf-8", "surrogatepass"))
    expected = [one for lines in files for one, _, _ in lines]
    dataset = JSONLines(paths)
    assert len(dataset) == len(expected)
    assert list(dataset) == expected
    assert [dataset[number] for number in range(-len(expected), 0)] == expected


def test_a_ledger_reads_it(tmp_path: Path) -> None:
    """Several files, shuffled."""
    paths = [str(numbered(tmp_path / "a.jsonl", 0, 3)), str(numbered(tmp_path / "b.jsonl", 3, 7))]
    items, _ = PromptDataset(JSONLines(paths), 1, 5).read(b"", 99)
    numbers = [item["number"] for item in items]
    assert sorted(numbers) == list(range(7))
    assert numbers != list(range(7))


def test_several_threads_may_read_it(tmp_path: Path) -> None:
    dataset = JSONLines([numbered(tmp_path / "a.jsonl", 0, 500), numbered(tmp_path / "b.jsonl", 500, 900)])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: dataset[number]["number"], range(900)))
    assert found == list(range(900))


def test_it_can_be_pickled_and_read_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after it was used; relative paths stay those of the folder where it was built."""
    numbered(tmp_path / "a.jsonl", 0, 3)
    monkeypatch.chdir(tmp_path)
    dataset = JSONLines("a.jsonl")
    before = pickle.dumps(dataset)
    assert len(dataset) == 3
    monkeypatch.chdir("/")
    for state in (before, pickle.dumps(dataset)):
        assert [one["number"] for one in pickle.loads(state)] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_on(tmp_path: Path) -> None:
    """At the same time as its parent, at other places."""
    dataset = JSONLines(numbered(tmp_path / "a.jsonl", 0, 2000))
    assert len(dataset) == 2000
    child = os.fork()
    if not child:
        is_right = all(dataset[number]["number"] == number for number in range(1999, -1, -1))
        os._exit(0 if is_right else 1)
    assert [one["number"] for one in dataset] == list(range(2000))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "no JSON"),
        (b"[1]", r"expected an object, got \[1\]"),
        (b'{"a": "\xff"}', "byte 7 is no UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["cut", "list", "latin", "deep"],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    """Where it is in the file, blank lines counted; the others can be read."""
    path = write(tmp_path / "a.jsonl", '{"number": 0}', "", line, '{"number": 1}')
    dataset = JSONLines([numbered(tmp_path / "first.jsonl", 0, 2), path])
    with pytest.raises(InputError, match=rf"a\.jsonl, line 3: {reason}"):
        dataset[3]
    assert [dataset[2], dataset[4]] == [{"number": 0}, {"number": 1}]
    for missing in (5, -6):
        with pytest.raises(IndexError):
            dataset[missing]


def test_a_file_that_is_removed_is_named(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 0, 3)
    kept, dataset = JSONLines(path), JSONLines(path)
    assert len(kept) == 3
    path.unlink()
    assert [one["number"] for one in kept] == [0, 1, 2]
    with pytest.raises(InputError, match=r"a\.jsonl can't be read: No such file"):
        len(dataset)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*missing\.jsonl"):
        JSONLines([numbered(tmp_path / "a.jsonl", 0, 1), tmp_path / "missing.jsonl"])
    with pytest.raises(InputError, match="there is no file"):
        JSONLines(tmp_path)
    with pytest.raises(InputError, match="empty"):
        JSONLines([])
    for wrong in (7, b"path", None, [7], ["a\0"]):
        with pytest.raises(InputError, match=r"path of a JSONL file|no file"):
            JSONLines(wrong)  # type: ignore[arg-type]
