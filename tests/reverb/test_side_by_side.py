"""The same operations on Reverb's own tables: when inserts and samples have to wait, and which item is sampled.

dm-reverb needs TensorFlow and Python 3.10 or 3.11, so it runs in an environment of its own, the one of
`python -m benchmarks peers` (1.3 GB, made once).
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.environments import CannotInstallError, python_of
from replaybuf.integrations.reverb import Client, Table, rate_limiters, selectors
from replaybuf.rules.transitions import level_of
from replaybuf.values.rollouts.rollout import Status

pytestmark = pytest.mark.frameworks

OPERATIONS = 120
LIMITERS: list[tuple[str, list[Any]]] = [
    ("MinSize", [1]),
    ("MinSize", [5]),
    ("SampleToInsertRatio", [1.0, 1, 1.0]),
    ("SampleToInsertRatio", [2.0, 4, 6.0]),
    ("SampleToInsertRatio", [0.5, 3, 2.0]),
    ("SampleToInsertRatio", [2.0, 2, [-1.0, 6.0]]),
    ("SampleToInsertRatio", [4.0, 1, [0.0, 12.5]]),
    ("SampleToInsertRatio", [1.5, 6, [3.0, 8.0]]),
    ("Queue", [1]),
    ("Queue", [4]),
]


def cases() -> list[dict[str, Any]]:
    chance, new_cases = random.Random(14), []
    for limiter in LIMITERS:
        for sampler, remover, times in (
            ("Fifo", "Fifo", 0),
            ("Lifo", "Fifo", 4),
            ("Fifo", "Lifo", 0),
            ("Fifo", "Fifo", 1),
        ):
            if limiter[0] == "SampleToInsertRatio" and 0 < times < limiter[1][0]:
                continue  # Reverb would stop there for ever; it is refused here
            operations = [chance.choice(["insert", "sample"]) for _ in range(OPERATIONS)]
            new_cases.append(
                {
                    "sampler": sampler,
                    "remover": remover,
                    "max_size": 6 if limiter[0] == "MinSize" else 16,
                    "rate_limiter": limiter,
                    "max_times_sampled": times,
                    "operations": operations,
                }
            )
    return new_cases


def in_ours(case: dict[str, Any]) -> list[list[Any]]:
    name, arguments = case["rate_limiter"]
    table = Table(
        name="t",
        sampler=getattr(selectors, case["sampler"])(),
        remover=getattr(selectors, case["remover"])(),
        max_size=case["max_size"],
        rate_limiter=getattr(rate_limiters, name)(*arguments),
        max_times_sampled=case["max_times_sampled"],
    )
    observed: list[list[Any]] = []
    with Client("memory://", [table]) as client:
        buffer = client.buffer("t")
        for number, operation in enumerate(case["operations"]):
            room = buffer.limits.insertable(level_of(buffer.tallies(), "t"), Status.COMPLETED)
            allowed = [room is None or room >= 1, buffer.is_ready({"t": 1})]
            observed.append([*allowed, len(buffer)])
            if operation == "insert" and allowed[0]:
                client.insert(float(number), {"t": float(number % 7)}, timeout=0)
            elif operation == "sample" and allowed[1]:
                [sample] = client.sample_batch("t", 1, timeout=0)
                observed[-1] += [sample.data, sample.info.times_sampled]
    return observed


@pytest.fixture(scope="module")
def in_reverb() -> list[list[list[Any]]]:
    """What Reverb does in each case."""
    try:
        python = python_of("reverb")
    except CannotInstallError as error:
        pytest.skip(f"dm-reverb: {error}")
    script = Path(__file__).with_name("in_reverb.py")
    done = subprocess.run([python, str(script)], input=json.dumps(cases()), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("number", range(len(cases())))
def test_reverb_does_the_same(in_reverb: list[list[list[Any]]], number: int) -> None:
    case = cases()[number]
    ours = in_ours(case)
    for at, (own_answer, their_answer) in enumerate(zip(ours, in_reverb[number], strict=True)):
        assert own_answer == their_answer, (case, at)
