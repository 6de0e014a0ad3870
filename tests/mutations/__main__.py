"""`python -m tests.mutations`: apply one mutation at a time to a copy of the checkout, and see whether tests fail."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.seeds import MUTATIONS, NEAR, ROOT, Mutation

_REST = ("tests", "--ignore=tests/mutations")
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.db", "*.run")
# By the exit code of pytest; None is a time-out, 2 an error in collecting the tests.
_RESULTS = {0: "survived", 1: "caught", 2: "caught", None: "hung"}
_SECONDS = itertools.count(int(time.time()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutation: "caught", "survived", "hung" (caught by the time-out) or "can't tell"."""

    name: str
    area: str
    law: str
    result: str
    seconds: float
    by: str = ""

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by else f": {self.law}"
        return f"{self.result:10} {self.seconds:6.1f} s  {self.area:8}  {self.name}{by}"


def main() -> int:
    options = _options()
    mutants = [mutant for mutant in MUTATIONS if not options.only or any(part in mutant.name for part in options.only)]
    mutants = [mutant for mutant in mutants if not options.area or mutant.area in options.area]
    if problems := [problem for mutant in mutants if (problem := mutant.problem())]:
        print("These don't fit the code any more:", *problems, sep="\n  ", file=sys.stderr)
        return 2
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), ignore=_NOT_COPIED)))
        if not options.no_baseline and not _fit(copies, mutants, options):
            return 2
        for verdict in pool.map(lambda mutant: _try(copies, mutant, options), mutants):
            verdicts.append(verdict)
            print(verdict, flush=True)
    for result in ("caught", "hung", "survived", "can't tell"):
        print(f"{result}: {sum(judged.result == result for judged in verdicts)}")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(judged) for judged in verdicts], indent=1))
    return 0 if all(judged.result in ("caught", "hung") for judged in verdicts) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="PART", help="mutations whose names have this part")
    parser.add_argument("--area", action="append", choices=list(NEAR), help="mutations of this area")
    parser.add_argument("--near", action="store_true", help="the nearby tests only, not the rest of the default tier")
    parser.add_argument("--tests", metavar="ARGS", help="run pytest with these arguments instead")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of one run of pytest")
    parser.add_argument("--no-baseline", action="store_true", help="don't run the nearby tests on the unchanged code")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts to this file")
    parser.add_argument("-j", dest="jobs", type=int, default=1, metavar="N", help="so many at once")
    return parser.parse_args()


def _selections(area: str, options: argparse.Namespace) -> list[Sequence[str]]:
    if options.tests:
        return [shlex.split(options.tests)]
    return [NEAR[area]] if options.near else [NEAR[area], _REST]


def _fit(copies: SimpleQueue[Path], mutants: Sequence[Mutation], options: argparse.Namespace) -> bool:
    """Whether the first selections pass on the unchanged code: what fails anyway catches nothing."""
    with _lent(copies) as copy:
        for arguments in dict.fromkeys(tuple(_selections(mutant.area, options)[0]) for mutant in mutants):
            code, by = _run(copy, arguments, options.timeout)
            if code:
                print(f"fails on the unchanged code: pytest {shlex.join(arguments)}: {by}", file=sys.stderr)
                return False
    return True


def _try(copies: SimpleQueue[Path], mutation: Mutation, options: argparse.Namespace) -> Verdict:
    started, result, by = time.monotonic(), "survived", ""
    with _lent(copies) as copy:
        file = copy / "replaybuf" / mutation.file
        before = file.read_text()
        _write(file, before.replace(mutation.old, mutation.new))
        try:
            for arguments in _selections(mutation.area, options):
                code, by = _run(copy, arguments, options.timeout)
                result = _RESULTS.get(code, "can't tell")
                if result != "survived":
                    break
        finally:
            _write(file, before)
    seconds = round(time.monotonic() - started, 1)
    return Verdict(mutation.name, mutation.area, mutation.law, result, seconds, by)


def _write(file: Path, text: str) -> None:
    """Write source with a time of change of its own, to the second, by which cached bytecode is told to be of it."""
    file.write_text(text)
    second = next(_SECONDS)
    os.utime(file, (second, second))


@contextmanager
def _lent(copies: SimpleQueue[Path]) -> Iterator[Path]:
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)


def _run(copy: Path, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """The exit code of pytest, None when the time is over; and the first test that failed."""
    env = {**os.environ, "PYTHONPATH": str(copy)}  # before an installed checkout
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
        process.communicate()
        return None, "the time-out"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return process.returncode, failed[0].split(" ", 1)[1].split(" - ")[0] if failed else ""


if __name__ == "__main__":
    sys.exit(main())
