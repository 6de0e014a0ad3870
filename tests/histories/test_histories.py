"""A restore of a buffer that processes call meanwhile. (That some of them are killed: `tests/faults/test_storm.py`.)

python -m pytest tests/histories -m long    # 20 histories of ten seconds on each database
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Figures
from tests.faults.conftest import figures as figures
from tests.faults.processes import end, start
from tests.histories import workers
from tests.histories.history import Call, calls_in, violations

#: Seeds, and seconds of each history.
RUNS = [
    pytest.param((range(0, 10, 10), 0.8), id="short"),
    pytest.param((range(0, 200, 10), 10.0), id="long", marks=pytest.mark.long),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_restore_is_to_a_moment_within_the_checkpoint(
    new_url: Callable[[], str], tmp_path: Path, run: tuple[range, float], figures: Figures
) -> None:
    seeds, seconds = run
    for seed in seeds:
        url, folder = new_url(), tmp_path / str(seed)
        folder.mkdir()
        ledgers, stop = [folder / str(number) for number in range(4)], str(folder / "stop")
        processes = [start(workers.work, ledgers[n], url, stop, 100_000 * n, seed + n, 0.0) for n in range(3)]
        processes.append(start(workers.go_back, ledgers[3], url, stop, seconds))
        for process, ledger in zip(processes, ledgers, strict=True):
            assert end(process, ledger, 60 + seconds) == 0
        ledgers.append(folder / "drain")
        assert end(start(workers.drain, ledgers[4], url), ledgers[4], 120) == 0
        calls = calls_in(ledgers)
        figures.judge(1, calls)
        assert sum(call.kind == "restore" and call.known for call in calls) == 1


def put(number: int, begin: int, end: int, **more: object) -> Call:
    return Call("put", begin, end, known=True, groups=[number], **more)  # type: ignore[arg-type]


def take(begin: int, end: int, *groups: int, asked: int = 0, **more: object) -> Call:
    return Call("take", begin, end, known=True, groups=[*groups], asked=asked or len(groups), **more)  # type: ignore[arg-type]


def lease(begin: int, end: int, *groups: int) -> Call:
    return Call("lease", begin, end, known=True, groups=[*groups], seconds=1.0)


def acknowledge(begin: int, end: int, *groups: int, known: bool = True) -> Call:
    return Call("acknowledge", begin, end, known=known, groups=[*groups])


PUTS = [put(1, 0, 1), put(2, 2, 3), put(3, 4, 5)]
SECOND = 10**9
RESTORED = [
    *PUTS,
    Call("checkpoint", 10, 11, known=True, step=1),
    take(12, 13, 1, 2),
    put(4, 14, 15),
    Call("restore", 20, 21, known=True, step=1),
]

EXPLAINED = {
    "in order": [*PUTS, take(6, 7, 1, 2), take(8, 9, 3)],
    "puts at the same time in any order": [put(1, 0, 5), put(2, 1, 4), take(6, 7, 2), take(8, 9, 1)],
    "takes at the same time": [*PUTS, take(6, 9, 2), take(7, 8, 1, 3)],
    "a take beside the put": [put(1, 0, 9), take(1, 8, 1)],
    "a put that failed, and was done": [Call("put", 0, 1, groups=[1]), take(2, 3, 1)],
    "a put that failed, and wasn't": [Call("put", 0, 1, groups=[1]), take(2, 3, asked=1)],
    "taken by a process that died": [*PUTS, Call("take", 6, asked=1, died=True), take(8, 9, 2, 3, asked=5)],
    "given back by a take that was cancelled": [*PUTS, Call("take", 6, 7, asked=1), take(7, 8, 2, 3), take(9, 10, 1)],
    "leased again after its time": [*PUTS[:1], lease(2, 3, 1), lease(2 * SECOND, 2 * SECOND + 1, 1),
                                    acknowledge(2 * SECOND + 2, 2 * SECOND + 3, 1)],
    "restored": [*RESTORED, take(22, 23, 1, 2), acknowledge(24, 25, 3)],
}  # fmt: skip

PLANTED = {
    "lost": [*PUTS, take(6, 7, 1, 2)],
    "lost, though a process died": [*PUTS, Call("take", 6, asked=1, died=True), take(8, 9, 2, asked=5)],
    "doubled": [*PUTS, take(6, 7, 1, 2), take(8, 9, 2, 3)],
    "from nowhere": [*PUTS, take(6, 7, 1, 2, 3, 4)],
    "before its put": [take(0, 1, 1), put(1, 2, 3)],
    "reordered": [*PUTS, take(6, 7, 1, 3), take(8, 9, 2)],
    "too few": [*PUTS, take(6, 7, 1, asked=3), take(8, 9, 2, 3)],
    "acknowledged twice": [*PUTS[:1], lease(2, 3, 1), acknowledge(4, 5, 1), acknowledge(6, 7, 1)],
    "leased twice": [*PUTS[:1], lease(2, 3, 1), lease(4, 5, 1), acknowledge(6, 7, 1)],
    "leased after its acknowledgement": [*PUTS[:1], lease(2, 3, 1), acknowledge(4, 5, 1), lease(6, 7, 1)],
    "not restored": [*RESTORED, take(22, 23, 1, 3)],
    "put after the checkpoint that was restored": [*RESTORED, take(22, 23, 1, 2, 3, 4)],
}


@pytest.mark.fast
@pytest.mark.parametrize("name", EXPLAINED)
def test_a_history_that_an_order_explains_passes(name: str) -> None:
    assert violations(EXPLAINED[name]) == []


@pytest.mark.fast
@pytest.mark.parametrize("name", PLANTED)
def test_a_history_that_no_order_explains_is_named(name: str) -> None:
    assert violations(PLANTED[name])


def test_a_draw_that_was_begun_again_after_a_crash_held_groups_before_it() -> None:
    """Others skip what its transaction has locked, which the crash rolls back."""
    calls = [*PUTS, take(6, 12, 3), take(7, 8, 2), take(10, 11, 1)]
    assert violations(calls) == ["group 1 was put before 2, and taken after it"]
    assert violations(calls, crashes=[9]) == []


@pytest.mark.parametrize("returned", [False, True])
def test_a_failed_take_is_excused_if_its_process_died_before_it_was_undone(tmp_path: Path, returned: bool) -> None:
    """A call that began after it, and returned, has waited for that."""
    calls = [[1, {"kind": "take", "begin": 10, "asked": 6}], [1, {"end": 20}], [2, {"kind": "put", "begin": 30}]]
    calls += [[2, {"end": 40, "known": True}]] if returned else []
    calls.append([3, {"kind": "put", "begin": 50}])
    (tmp_path / "ledger").write_text("".join(f"call {json.dumps(call)}\n" for call in calls))
    take, _, last = calls_in([tmp_path / "ledger"])
    assert (take.died, last.died) == (not returned, True)
