"""The examples that train: whoever is killed, and whenever, each prompt is trained once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.runs import Run

NAMES = {"trainer": "trainer", "worker 1": "worker", "worker 2": "worker"}


@pytest.fixture
def run(request: pytest.FixtureRequest, shared_url: str, tmp_path: Path) -> Iterator[Run]:
    run = Run(request.param, shared_url, tmp_path)
    yield run
    run.end()


@pytest.mark.parametrize("run", ["sync.py", "async.py"], indirect=True)
def test_one_process_that_is_killed_trains_on_every_prompt_once(run: Run) -> None:
    chance = random.Random(1)
    run.start("trainer")
    for step in range(0, 24, 8):
        run.wait_for(step, "trainer")
        time.sleep(chance.uniform(0, 0.1))
        run.kill("trainer")
        run.start("trainer")
    assert run.processes["trainer"].wait(90) == 0, run.printed()
    assert sorted(run.weights()["trained"]) == list(range(200))  # type: ignore[call-overload]
    assert run.printed().count("goes on from step") == 3
    assert "25 steps, 200 of 200 prompts trained" in run.printed()
    assert "Traceback" not in run.printed()


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("run", ["disaggregated.py"], indirect=True)
def test_trainer_and_workers_that_are_killed_train_on_every_prompt_once(run: Run, times: int) -> None:
    """Each of them so many times."""
    chance = random.Random(1)
    for name, argument in NAMES.items():
        run.start(name, argument)
    for step, name in zip(range(3, 23, 3), [*NAMES] * times, strict=False):
        run.wait_for(step, "trainer")
        time.sleep(chance.uniform(0, 0.05))
        run.kill(name)
        run.start(name, NAMES[name])
    for process in run.processes.values():
        assert process.wait(90) == 0, run.printed()
    assert sorted(run.weights()["trained"]) == list(range(200))  # type: ignore[call-overload]
    assert run.printed().count("trainer: goes on from step") == times
    assert "was restored to the checkpoint of step" in run.printed()
    assert "25 steps, 200 of 200 prompts trained" in run.printed()
    assert "Traceback" not in run.printed()


@pytest.mark.parametrize("run", ["disaggregated.py"], indirect=True)
def test_without_an_argument_the_script_says_how_it_is_started(run: Run) -> None:
    run.start("trainer")
    assert run.processes["trainer"].wait(30) == 1
    assert "disaggregated.py worker" in run.printed()
