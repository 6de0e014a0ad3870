"""Figures of faults: what processes write, and their sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import pytest

from tests.faults.processes import reap
from tests.histories.history import Call, numbers_of_calls, violations


@dataclass
class Figures:
    """Counts of one test, or of many.

    `faults` are kills, cuts, cancellations, full disks, damaged files and the like. `groups` were put, `lost` are gone
    though nobody got them, `doubled` were delivered or acknowledged more than once. `with_the_dead` were being taken
    or acknowledged by a process at the moment when it was killed: a taken group is the taker's, so nobody else has
    them. `prompts` were handed out, and `skipped` are those that were trained less often than asked.
    """

    faults: int = 0
    groups: int = 0
    lost: int = 0
    doubled: int = 0
    with_the_dead: int = 0
    prompts: int = 0
    skipped: int = 0

    def add(self, **counts: int) -> None:
        """Add to the counts of these names."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def compare(self, faults: int, put_numbers: Sequence[int], delivered: Sequence[int]) -> None:
        """Add what became of groups that were put, and all of which should have been delivered, each once."""
        lost, doubled = len(set(put_numbers) - set(delivered)), len(delivered) - len(set(delivered))
        self.add(faults=faults, groups=len(put_numbers), lost=lost, doubled=doubled)

    def judge(self, faults: int, calls: Sequence[Call], crashes: Sequence[int] = ()) -> None:
        """Add what became of the groups of a history that ends when nothing is left; fail if no order explains it."""
        problems = violations(calls, crashes=crashes)
        put_numbers, received = (set(numbers_of_calls(calls, *kinds)) for kinds in (("put",), ("take", "acknowledge")))
        lost = any(problem.startswith("nobody got") for problem in problems)
        missing = len(put_numbers - received) * any(call.died for call in calls)
        self.add(faults=faults, groups=len(put_numbers), doubled=sum("twice" in problem for problem in problems))
        self.add(lost=len(put_numbers - received) if lost else 0, with_the_dead=0 if lost else missing)
        assert not problems, "\n".join(problems[:20])

    def __bool__(self) -> bool:
        return any(asdict(self).values())

    def __str__(self) -> str:
        names = [field.name for field in fields(self)]
        return ", ".join(f"{name.replace('_', ' ')} {getattr(self, name):,}" for name in names)


_NAME = "figures"


class Summary:
    """Sums up what tests report of themselves (as `user_properties`, which come with the reports of all workers)."""

    def __init__(self) -> None:
        self._total = Figures()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, counts in report.user_properties if report.when == "teardown" else ():
            if name == _NAME:
                self._total.add(**counts)  # type: ignore[arg-type]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._total:
            terminalreporter.section("faults")
            terminalreporter.line(str(self._total))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """The counts of this test; add to them before asserting anything of them."""
    counts = Figures()
    yield counts
    if counts:
        request.node.user_properties.append((_NAME, asdict(counts)))


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    reap()
