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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.seeds import MUTATIONS, NEAR, ROOT, Mutation

_REST = ("tests", "--ignore=tests/mutations")
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.db", "*.run")
#: Of one run of pytest.
_SECONDS = 1800
# By the exit code of pytest; None is a time-out, 2 an error in collecting the tests.
_RESULTS = {0: "survived", 1: "caught", 2: "caught", None: "hung"}
_TIMES = itertools.count(int(time.time()))


def main() -> int:
    options = _options()
    mutants = [mutant for mutant in MUTATIONS if not options.only or any(part in mutant.name for part in options.only)]
    mutants = [mutant for mutant in mutants if not options.area or mutant.area in options.area]
    if problems := [problem for mutant in mutants if (problem := mutant.problem())]:
        print("These don't fit the code any more:", *problems, sep="\n  ", file=sys.stderr)
        return 2
    verdicts: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=_NOT_COPIED))
        for area in {} if options.no_baseline else dict.fromkeys(mutant.area for mutant in mutants):
            code, by = _run(copy, NEAR[area])
            if code:
                # What fails anyway catches nothing.
                print(f"fails on the unchanged code: pytest {shlex.join(NEAR[area])}: {by}", file=sys.stderr)
                return 2
        for mutant in mutants:
            verdicts.append(_try(copy, mutant, near=options.near))
    results = Counter(verdict["result"] for verdict in verdicts)
    print(*(f"{result}: {count}" for result, count in results.items()), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(verdicts, indent=1))
    return 0 if set(results) <= {"caught", "hung"} else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="PART", help="mutations whose names have this part")
    parser.add_argument("--area", action="append", choices=list(NEAR), help="mutations of this area")
    parser.add_argument("--near", action="store_true", help="the nearby tests only, not the rest of the default tier")
    parser.add_argument("--no-baseline", action="store_true", help="don't run the nearby tests on the unchanged code")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts to this file")
    return parser.parse_args()


def _try(copy: Path, mutation: Mutation, *, near: bool) -> dict[str, str]:
    """Print and return a verdict: "caught", "survived", "hung" (caught by the time-out) or "can't tell"."""
    started, result, by = time.monotonic(), "survived", ""
    file = copy / "replaybuf" / mutation.file
    before = file.read_text()
    _write(file, before.replace(mutation.old, mutation.new))
    for arguments in [NEAR[mutation.area]] if near else [NEAR[mutation.area], _REST]:
        code, by = _run(copy, arguments)
        result = _RESULTS.get(code, "can't tell")
        if result != "survived":
            break
    _write(file, before)
    said = f"by {by}" if by else mutation.law
    print(f"{result:10} {time.monotonic() - started:6.1f} s  {mutation.area:8}  {mutation.name}: {said}", flush=True)
    return {"name": mutation.name, "area": mutation.area, "law": mutation.law, "result": result, "by": by}


def _write(file: Path, text: str) -> None:
    """Write source with a time of change of its own, to the second, by which cached bytecode is told to be of it."""
    file.write_text(text)
    second = next(_TIMES)
    os.utime(file, (second, second))


def _run(copy: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """The exit code of pytest, None when the time is over; and the first test that failed."""
    env = {**os.environ, "PYTHONPATH": str(copy)}  # before an installed checkout
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
        process.communicate()
        return None, "the time-out"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return process.returncode, failed[0].split(" ", 1)[1].split(" - ")[0] if failed else ""


if __name__ == "__main__":
    sys.exit(main())
