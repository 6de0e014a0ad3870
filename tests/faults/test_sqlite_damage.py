"""Truncated and bit-flipped SQLite files: a clear error or the right data, never a crash, a hang or wrong rollouts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults import damage
from tests.faults.figures import Figures
from tests.faults.ledger import entries, numbers
from tests.faults.processes import end, start

PAGE = 16 * 1024


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with damage.COUNT groups."""
    path = tmp_path_factory.mktemp("sound") / "run.db"
    asyncio.run(damage.fill(f"sqlite:///{path}"))
    return path.read_bytes()


def use(folder: Path, content: bytes, figures: Figures) -> Path:
    """Use a file of this content in a process of its own, which has to end by itself; its ledger."""
    folder.mkdir()
    (folder / "run.db").write_bytes(content)
    ledger = folder / "ledger"
    process = start(damage.use, ledger, f"sqlite:///{folder}/run.db")
    assert end(process, ledger, 60) == 0
    given = numbers(ledger, "given")
    figures.add(faults=1, groups=damage.COUNT, doubled=len(given) - len(set(given)))
    assert entries(ledger, "wrong") == []
    assert sorted(given) == sorted(set(given))
    return ledger


def refused(ledger: Path) -> set[str]:
    """The classes of the errors."""
    return {entry.split()[1] for entry in entries(ledger, "refused")}


def test_a_sound_file_is_used_without_an_error(tmp_path: Path, sound: bytes, figures: Figures) -> None:
    ledger = use(tmp_path / "it", sound, figures)
    assert refused(ledger) == set()
    assert sorted(numbers(ledger, "given")) == sorted(numbers(ledger, "seen")) == list(range(damage.COUNT))


@pytest.mark.parametrize("size", [0, 1, 50, 100, PAGE // 2, PAGE, 3 * PAGE, 7 * PAGE + 100, -PAGE, -1])
def test_a_truncated_file(tmp_path: Path, sound: bytes, size: int, figures: Figures) -> None:
    """One that is empty, or a byte, is a new database; others are damaged, or what is read of them is right."""
    ledger = use(tmp_path / "it", sound[:size], figures)
    assert refused(ledger) <= {"StorageError"}
    assert refused(ledger) or size in (0, 1) or numbers(ledger, "given")


def flipped(content: bytes, chance: random.Random, first: int, last: int, count: int) -> bytes:
    """With so many bits of a range turned round."""
    changed = bytearray(content)
    for _ in range(count):
        changed[chance.randrange(first, last)] ^= 1 << chance.randrange(8)
    return bytes(changed)


# (3 and 27 hit texts and numbers among the metadata.)
SEEDS = [(0, 3, 27), pytest.param(range(100, 300), marks=pytest.mark.long)]


@pytest.mark.parametrize("seeds", SEEDS, ids=len)
@pytest.mark.parametrize("where", ["header", "schema", "anywhere", "one page", "zeros"])
def test_a_damaged_file(tmp_path: Path, sound: bytes, where: str, seeds: Sequence[int], figures: Figures) -> None:
    for seed in seeds:
        content = damaged(sound, where, random.Random(f"{where} {seed}"))
        ledger = use(tmp_path / f"it-{seed}", content, figures)
        assert refused(ledger) <= {"StorageError", "DecodeError", "AccessError"}, seed


def damaged(sound: bytes, where: str, chance: random.Random) -> bytes:
    """The content of a database with damage in this part."""
    size = len(sound)
    page = chance.randrange(1, size // PAGE) * PAGE
    match where:
        case "header":
            return flipped(sound, chance, 0, 100, 3)
        case "schema":
            return flipped(sound, chance, 100, PAGE, 20)
        case "anywhere":
            return flipped(sound, chance, 0, size, 100)
        case "one page":
            return flipped(sound, chance, page, page + PAGE, 50)
    return sound[:page] + bytes(PAGE) + sound[page + PAGE :]
