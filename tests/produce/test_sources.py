"""Sources of prompts, and JSON lines."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf import RolloutState
from replaybuf.errors import InputError
from replaybuf.produce.datasets import PromptDataset, epoch_order
from replaybuf.produce.prompt_records import JSONLines


class Again:
    """Can be iterated, again and again; counts how often, and how many items it gave."""

    def __init__(self, size: int | None, fail_at: int | None = None) -> None:
        self.size, self.fail_at = size, fail_at
        self.begun = self.given = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        for number in itertools.count() if self.size is None else range(self.size):
            if number == self.fail_at:
                self.fail_at = None
                raise OSError("the disk is gone")
            self.given += 1
            yield number

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Forward:
    """Can be iterated, and nothing else."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class OldSequence:
    """Iterated by [] from 0 on, as Python does it with classes that have no iter."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, number: int) -> int:
        if number >= self.size:
            raise IndexError(number)
        return number


def generator(size: int) -> Iterator[int]:
    yield from range(size)


Make = Callable[[int | None], PromptDataset]


def sources(size: int) -> dict[str, Make]:
    return {
        "indexed": lambda epochs: PromptDataset(range(size), epochs),
        "shuffled": lambda epochs: PromptDataset(range(size), epochs, 7),
        "iterated": lambda epochs: PromptDataset(Again(size), epochs),
        "old": lambda epochs: PromptDataset(OldSequence(size), epochs),
    }


KINDS = sorted(sources(0))


def read_all(source: PromptDataset, place: bytes = b"", count: int = 3) -> list[int]:
    numbers: list[int] = []
    while True:
        items, place = source.read(place, count)
        if not items:
            return numbers
        numbers += items


def place_after(source: PromptDataset, count: int) -> bytes:
    items, place = source.read(b"", count)
    assert len(items) == count
    return place


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 9),
    epochs=st.integers(1, 4),
    counts=st.lists(st.integers(1, 11), min_size=1),
    restarts=st.randoms(use_true_random=False),
)
def test_every_item_is_read_once_an_epoch_in_the_same_order_whatever_restarts(
    kind: str, size: int, epochs: int, counts: list[int], restarts: random.Random
) -> None:
    """Whatever is asked for at once, and by whichever of several workers, each with a dataset of its own."""
    make = sources(size)[kind]
    expected = read_all(make(epochs), count=1)
    workers = [make(epochs), make(epochs)]
    place, numbers = b"", []
    for count in itertools.cycle(counts):
        worker = restarts.randrange(3)
        if worker == 2:
            workers[0] = make(epochs)
        items, place = workers[worker % 2].read(place, count)
        numbers += items
        if not items:
            break
    assert numbers == expected
    for epoch in range(epochs):
        assert sorted(numbers[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.sampled_from(KINDS), st.integers(1, 9), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=9))
def test_what_was_read_and_not_claimed_is_read_again(kind: str, size: int, moves: list[tuple[int, int]]) -> None:
    """Another worker was faster, with fewer items, or the caller was cancelled: the cursor is behind the dataset."""
    make = sources(size)[kind]
    source, other, place, numbers = make(1), make(1), b"", []
    expected = read_all(make(1))
    for count, claimed in moves:
        assert source.read(place, count)[0] == expected[len(numbers) :][:count]
        if claimed:
            items, place = other.read(place, min(count, claimed))
            numbers += items
    assert numbers + read_all(source, place) == expected


@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40), size=st.integers(0, 200))
def test_an_epochs_order_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    assert sorted(epoch_order(seed, epoch, size)) == list(range(size))


def test_an_epochs_order_depends_on_seed_and_epoch_and_never_changes() -> None:
    """A run that is years old goes on as it began."""
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert epoch_order(7, 2, 8).tolist() == [6, 2, 5, 7, 1, 0, 4, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_end_epoch_follows_epoch(kind: str) -> None:
    items, _ = sources(4)[kind](None).read(b"", 41)
    assert len(items) == 41
    assert set(Counter(items).values()) == {10, 11}


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_dataset_is_at_its_end(kind: str) -> None:
    assert [read_all(sources(0)[kind](epochs)) for epochs in (None, 0, 1, 3)] == [[]] * 4


def test_an_infinite_iterable_is_read_as_far_as_asked() -> None:
    """The next item of a live stream may be hours away: it is not waited for."""
    for epochs in (None, 1):
        dataset = Again(None)
        source = PromptDataset(dataset, epochs)
        items, place = source.read(b"", 5)
        assert (items, dataset.given) == ([0, 1, 2, 3, 4], 5)
        assert source.read(place, 2)[0] == [5, 6]
        assert PromptDataset(Again(None), epochs).read(place, 2)[0] == [5, 6]


def test_a_worker_skips_only_what_others_have_read() -> None:
    """It reads on where it is; from the start it begins only when the cursor went back."""
    dataset = Again(100)
    source = PromptDataset(dataset, 2)
    for start in (0, 10, 40, 90):
        place = place_after(PromptDataset(Again(100), 2), start) if start else b""
        assert source.read(place, 3)[0] == [start, start + 1, start + 2]
    assert (dataset.begun, dataset.given) == (1, 93)
    assert source.read(place_after(PromptDataset(Again(100), 2), 107), 1)[0] == [7]
    assert (dataset.begun, dataset.given, dataset.epochs) == (2, 101, [0, 1])
    assert source.read(b"", 1)[0] == [0]
    assert (dataset.begun, dataset.epochs) == (3, [0, 1, 0])


class Wrapped:
    """Looks as if it could be iterated again, and can't."""

    def __init__(self, size: int, *, anew: bool) -> None:
        self._items, self._anew = generator(size), anew

    def __iter__(self) -> Iterator[int]:
        return (item for item in self._items) if self._anew else self._items


@pytest.mark.parametrize("anew", [True, False])
def test_what_can_be_iterated_once_has_no_second_epoch(anew: bool) -> None:
    """What is left of the first is given before the error, which comes again and again."""
    source = PromptDataset(Wrapped(5, anew=anew), 2)
    place = place_after(source, 3)
    items, place = source.read(place, 9)
    assert items == [3, 4]
    for _ in range(2):
        with pytest.raises(InputError, match=r"once.*give a list"):
            source.read(place, 1)


def test_an_iterable_that_raised_is_iterated_anew() -> None:
    """A generator that raised is at its end from then on; that is not the end of the dataset."""
    source = PromptDataset(Again(6, fail_at=3), 1)
    place = place_after(source, 2)
    with pytest.raises(OSError, match="disk"):
        source.read(place, 4)
    assert read_all(source, place) == [2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["indexed", "iterated", "old"])
@pytest.mark.parametrize("read", [3, 5, 8, 99])
@pytest.mark.parametrize("size", [2, 5])
def test_a_dataset_that_grows_or_shrinks_goes_on_in_its_epoch(kind: str, read: int, size: int) -> None:
    """No item is read again in an epoch, none is left out: those of before its change and of after it; also when it was
    read to its end."""
    items, place = sources(3)[kind](3).read(b"", read)
    epoch, index = divmod(len(items) - 1, 3)
    if index + 1 > size:
        with pytest.raises(InputError, match="become shorter"):
            sources(size)[kind](3).read(place, 1)
    else:
        expected = [*range(index + 1, size), *(list(range(size)) * (2 - epoch))]
        assert read_all(sources(size)[kind](3), place) == expected


@dataclass
class Item:
    number: int
    image: Any = field(default_factory=lambda: np.zeros(3))


ITEMS: dict[str, Callable[[int], Any]] = {
    "texts": lambda number: f"question {number}",
    "records": lambda number: {"messages": [{"role": "user", "content": f"question {number}"}], "image": np.arange(2)},
    "rollouts": lambda number: RolloutState(rollout_id=number, message=[{"role": "user", "content": "?"}]),
    "objects": Item,
}


class Varied(list[Any]):
    """A dataset whose items differ whenever they are read."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        self.read = itertools.count()

    def __getitem__(self, number: Any) -> Any:
        return {"number": number, "augmented": next(self.read)}

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize("wrap", [list, Forward], ids=["list", "again"])
@pytest.mark.parametrize("kind", ITEMS)
def test_another_dataset_is_told_by_an_item_that_was_read(kind: str, wrap: Callable[[Any], Any]) -> None:
    """When a process resumes, by the last one. Items of the same values are the same."""
    items = [ITEMS[kind](number) for number in range(6)]
    place = place_after(PromptDataset(wrap(items), 1), 3)
    assert len(read_all(PromptDataset(wrap([ITEMS[kind](number) for number in range(6)]), 1), place)) == 3
    for other in (items[1:], items[::-1]):
        with pytest.raises(InputError, match=r"item 2 of epoch 0 .* is another one than the run has read there.*name="):
            PromptDataset(wrap(other), 1).read(place, 1)


@pytest.mark.parametrize("make", [Varied, lambda size: Forward(Varied(size)), lambda size: [object()] * size])
def test_items_that_are_never_the_same_tell_nothing(make: Callable[[int], Any]) -> None:
    place = place_after(PromptDataset(make(5), 1), 3)
    assert len(PromptDataset(make(5), 1).read(place, 9)[0]) == 2


#: Dataset, epochs and seed of the run, what it is resumed with, and what is said then.
OTHERS: list[tuple[tuple[Any, ...], tuple[Any, ...], str]] = [
    ((range(4), 3), (range(4), 2), "epochs=2"),
    ((range(4), 3, 7), (range(4), 2, 7), "epochs=2"),
    ((Again(4), 3), (Again(4), 2), "epochs=2"),
    # Of another size the shuffled order is another one: prompts would be read twice, and others never.
    ((range(5), 3, 7), (range(4), 3, 7), "had 5 items and has 4 now"),
    ((range(5), 3, 7), (range(6), 3, 7), "had 5 items and has 6 now"),
    ((range(5), 3, 7), (range(5), 3, 8), "shuffle=7"),
    ((range(5), 3, 7), (range(5), 3), "shuffle=7"),
    ((range(5), 3), (range(5), 3, 7), "without shuffle"),
]


@pytest.mark.parametrize(("run", "resumed", "said"), OTHERS)
def test_another_dataset_or_order_than_that_of_the_run_is_refused(
    run: tuple[Any, ...], resumed: tuple[Any, ...], said: str
) -> None:
    place = place_after(PromptDataset(*run), 10)
    with pytest.raises(InputError, match=said):
        PromptDataset(*resumed).read(place, 1)


REFUSED: list[tuple[Any, Any, str]] = [
    (generator(3), None, "this generator can be iterated only once: give a list"),
    *((dataset, 7, r"shuffle the dataset itself.*or give list\(dataset\)") for dataset in (Again(3), OldSequence(3))),
    *(([1], seed, "shuffle must be a seed") for seed in (-1, 1.5, "7", True, 2**64)),
    *(
        (value, None, "expected a dataset of prompts, got")
        for value in ("text", b"bytes", bytearray(b"bytes"), {"train": [1]}, 7, None, len)
    ),
]


@pytest.mark.parametrize(("dataset", "shuffle", "said"), REFUSED)
def test_what_is_no_dataset_or_no_seed_is_refused_at_once(dataset: Any, shuffle: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        PromptDataset(dataset, 1, shuffle)


def test_a_seed_may_be_a_number_of_numpy() -> None:
    assert read_all(PromptDataset([1], 1, np.int64(0))) == [1]  # type: ignore[arg-type]


NO_PLACES = {
    "iterated": [0, [0, 0], {"epoch": 0}, [0, -1, None, None, 0], ["0", 1, None, None, 0], [0, 1, 5, None, 0]],
    "indexed": [-1, 1 << 63, "3", [1], {b"1": 2}, [0, -1, 5, None, 0], [0, 1, "5", None, 0], [0, 1, None, None, 0]],
}


@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in NO_PLACES.items() for place in places])
def test_a_place_that_is_none_is_refused(kind: str, place: Any) -> None:
    """Instead of a prompt from somewhere."""
    with pytest.raises(InputError, match="cursor"):
        sources(5)[kind](None).read(msgpack.packb(place), 1)


def test_an_indexed_dataset_that_changes_between_two_reads_is_refused() -> None:
    items = [*range(6)]
    dataset = PromptDataset(items, None)
    _, position = dataset.read(b"", 3)
    items.insert(0, 99)
    with pytest.raises(InputError, match="another one than the run has read"):
        dataset.read(position, 3)


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
        text = start + "".join(json.dumps(item, ensure_ascii=is_ascii) + end for item, end, is_ascii in lines)
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_bytes((text.rstrip("\r\n") if is_cut else text).encode("utf-8", "surrogatepass"))
    expected = [item for lines in files for item, _, _ in lines]
    dataset = JSONLines(paths)
    assert len(dataset) == len(expected)
    assert list(dataset) == expected
    assert [dataset[number] for number in range(-len(expected), 0)] == expected


def test_several_threads_may_read_it(tmp_path: Path) -> None:
    dataset = JSONLines([numbered(tmp_path / "a.jsonl", 0, 500), numbered(tmp_path / "b.jsonl", 500, 900)])
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda number: dataset[number]["number"], range(900)))
    assert numbers == list(range(900))


def test_it_can_be_pickled_and_read_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after it was used; relative paths stay those of the folder where it was built."""
    numbered(tmp_path / "a.jsonl", 0, 3)
    monkeypatch.chdir(tmp_path)
    dataset = JSONLines("a.jsonl")
    before = pickle.dumps(dataset)
    assert len(dataset) == 3
    monkeypatch.chdir("/")
    for state in (before, pickle.dumps(dataset)):
        assert [row["number"] for row in pickle.loads(state)] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_on(tmp_path: Path) -> None:
    """At the same time as its parent, at other places."""
    dataset = JSONLines(numbered(tmp_path / "a.jsonl", 0, 2000))
    assert len(dataset) == 2000
    child = os.fork()
    if not child:
        is_right = all(dataset[number]["number"] == number for number in range(1999, -1, -1))
        os._exit(0 if is_right else 1)
    assert [row["number"] for row in dataset] == list(range(2000))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "no JSON"),
        (b"[1]", r"expected an object, got \[1\]"),
        (b'{"a": "\xff"}', "no JSON object .*can't decode byte"),
        (b"[" * 100_000, "no JSON object .*recursion"),
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
    opened, dataset = JSONLines(path), JSONLines(path)
    assert len(opened) == 3
    path.unlink()
    assert [row["number"] for row in opened] == [0, 1, 2]
    with pytest.raises(InputError, match=r"a\.jsonl can't be read: No such file"):
        len(dataset)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*missing\.jsonl"):
        JSONLines([numbered(tmp_path / "a.jsonl", 0, 1), tmp_path / "missing.jsonl"])
    with pytest.raises(InputError, match="is a folder; give the file in it"):
        JSONLines(tmp_path)
    with pytest.raises(InputError, match="empty"):
        JSONLines([])
    for value in (7, b"path", None, [7], ["a\0"]):
        with pytest.raises(InputError, match=r"path of a JSONL file|no file"):
            JSONLines(value)  # type: ignore[arg-type]
