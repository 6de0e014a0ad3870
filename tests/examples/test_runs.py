"""The examples as they are run: with a server, and killed."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig, Status
from tests.examples.conftest import KEY
from tests.examples.endpoint import LENGTH, Body, Endpoint, Script
from tests.scripts import Program

BATCH, K = 4, 2


@dataclass
class Training:
    """One run of the script: its arguments, and where it prints."""

    url: str
    folder: Path

    def start(self, base_url: str, *options: str) -> Program:
        arguments = ["--base-url", base_url, "--model", "tiny", "--url", self.url]
        arguments += ["--batch-size", str(BATCH), "--k", str(K), *options, str(EXAMPLES / "prompts.jsonl")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": KEY, "NO_PROXY": "127.0.0.1"}
        return Program(str(EXAMPLES / "openai_endpoint.py"), *arguments, cwd=self.folder, env=environment)

    def run(self, base_url: str, *options: str) -> tuple[int, str]:
        """The exit code, and what was printed."""
        with self.start(base_url, *options) as process:
            printed, _ = process.communicate(timeout=100)
        assert KEY not in printed
        assert "Traceback" not in printed
        return process.wait(), printed

    async def statuses(self) -> dict[Status, int]:
        async with ReplayBufferConfig(url=self.url).build() as buffer:
            return {status: count for status in Status if (count := await buffer.count("prompts", status))}


@pytest.fixture
def training(shared_url: str, tmp_path: Path) -> Training:
    return Training(shared_url, tmp_path)


def steps_of(printed: str) -> list[int]:
    """The steps that were trained, each on whole answers: as many tokens as those have."""
    lines = re.findall(r"(?m)^step (\d+): mean reward ([\d.]+), (\d+) tokens; ", printed)
    assert {(reward, int(tokens)) for _, reward, tokens in lines} == {("0.50", BATCH * K * LENGTH)}
    return [int(step) for step, _, _ in lines]


def test_it_trains_on_the_prompts_of_a_file(training: Training, endpoint: Endpoint) -> None:
    """Though some answers end in an error at first."""
    faults = [Script(500, "out of memory"), Script(at=3, drop=True), Script(at=2, line="<html>")]
    endpoint.script = lambda body, attempt: faults[body["seed"] % 3] if attempt == 1 else Script()
    code, printed = training.run(endpoint.url, "--steps", "2")
    assert (code, steps_of(printed)) == (0, [1, 2])
    assert "retried" in printed
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert {(body["model"], body["stream"], body["logprobs"]) for body in endpoint.requests} == {("tiny", True, True)}
    fresh = [body["seed"] for body in endpoint.requests if not body.get("continue_final_message")]
    assert len(set(fresh)) >= 2 * BATCH * K  # each rollout has a seed of its own


async def test_a_server_that_is_away_costs_no_prompt(training: Training, endpoint: Endpoint) -> None:
    def dies(body: Body, attempt: int) -> Script:
        return Script() if len(endpoint.requests) < 2 * BATCH * K else Script(503, "is being started")

    endpoint.script = dies
    code, printed = training.run(endpoint.url, "--steps", "4", "--server-timeout", "1")
    assert code == 1
    assert f"waiting for the server at {endpoint.url}/: HTTP 503: is being started" in printed
    assert re.search(r"(?m)^Error: the server at \S+ was away for 1 s .* the prompts are kept", printed)
    by_status = await training.statuses()
    assert by_status
    assert Status.FAILED not in by_status
    endpoint.script = lambda body, attempt: Script()
    first_steps = steps_of(printed)
    code, printed = training.run(endpoint.url, "--steps", "4")
    assert (code, first_steps + steps_of(printed)) == (0, [1, 2, 3, 4])


def test_a_run_that_is_killed_goes_on_from_its_last_step(training: Training, endpoint: Endpoint) -> None:
    endpoint.script = lambda body, attempt: Script(seconds=0.02)
    printed = ""
    with training.start(endpoint.url, "--steps", "4") as process:
        for line in process.stdout:
            printed += line
            if line.startswith("step "):
                break
        process.kill()
        printed += process.stdout.read()
    code, last = training.run(endpoint.url, "--steps", "4")
    assert code == 0
    assert "goes on from step" in last
    assert steps_of(printed + last) == sorted(steps_of(printed + last))
    assert steps_of(last)[-1] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "localhost:8000"], "--base-url must begin with http:// or https://"),
        (["--url", "nothing://here"], "Error: "),
        (["missing.jsonl"], "Error: there is no file"),
    ],
)
def test_a_mistake_is_said_on_one_line(training: Training, arguments: list[str], message: str) -> None:
    code, printed = training.run("http://127.0.0.1:9/v1", *arguments)
    assert code in (1, 2)
    assert message in printed.splitlines()[-1]


NAMES = {"trainer": "trainer", "worker 1": "worker", "worker 2": "worker"}


@pytest.fixture
def run(request: pytest.FixtureRequest, shared_url: str, tmp_path: Path) -> Iterator[Run]:
    run = Run(request.param, shared_url, tmp_path)
    yield run
    run.end()


@pytest.mark.parametrize("run", ["sync.py", "async.py"], indirect=True)
def test_one_process_that_is_killed_trains_on_every_prompt_once(run: Run) -> None:
    chance = random.Random(1)
    run.shorten(96)
    run.start("trainer")
    for step in range(0, 12, 4):
        run.wait_for(step, "trainer")
        time.sleep(chance.uniform(0, 0.1))
        run.kill("trainer")
        run.start("trainer")
    assert run.processes["trainer"].wait(90) == 0, run.printed()
    assert sorted(run.weights()["trained"]) == list(range(96))  # type: ignore[call-overload]
    assert run.printed().count("goes on from step") == 3
    assert "12 steps, 96 of 96 prompts trained" in run.printed()
    assert "Traceback" not in run.printed()


@pytest.mark.parametrize(("times", "prompts"), [(1, 96), pytest.param(2, 200, marks=pytest.mark.long)])
@pytest.mark.parametrize("run", ["disaggregated.py"], indirect=True)
def test_trainer_and_workers_that_are_killed_train_on_every_prompt_once(run: Run, times: int, prompts: int) -> None:
    """Each of them so many times."""
    chance = random.Random(1)
    run.shorten(prompts)
    for name, argument in NAMES.items():
        run.start(name, argument)
    for step, name in zip(range(3, 23, 3), [*NAMES] * times, strict=False):
        run.wait_for(step, "trainer")
        time.sleep(chance.uniform(0, 0.05))
        run.kill(name)
        run.start(name, NAMES[name])
    for process in run.processes.values():
        assert process.wait(90) == 0, run.printed()
    assert sorted(run.weights()["trained"]) == list(range(prompts))  # type: ignore[call-overload]
    assert run.printed().count("trainer: goes on from step") == times
    assert "was restored to the checkpoint of step" in run.printed()
    assert f"{prompts // 8} steps, {prompts} of {prompts} prompts trained" in run.printed()
    assert "Traceback" not in run.printed()


@pytest.mark.parametrize("run", ["disaggregated.py"], indirect=True)
def test_without_an_argument_the_script_says_how_it_is_started(run: Run) -> None:
    run.start("trainer")
    assert run.processes["trainer"].wait(30) == 1
    assert "disaggregated.py worker" in run.printed()


ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"


class Run:
    """The processes of one run of a script, by name."""

    def __init__(self, script: str, url: str, folder: Path) -> None:
        self._script = EXAMPLES / script
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPLAYBUF_URL": url}
        self._folder = folder
        self.processes: dict[str, Program] = {}

    def shorten(self, prompts: int) -> None:
        """Run a copy of the script that has so many prompts."""
        text = self._script.read_text()
        assert text.count("range(200)") == 1
        self._script = self._folder / self._script.name
        self._script.write_text(text.replace("range(200)", f"range({prompts})"))

    def start(self, name: str, *arguments: str) -> None:
        with self._output(name).open("ab") as output:
            self.processes[name] = Program(
                str(self._script), *arguments, cwd=self._folder, env=self._environment, stdout=output
            )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def end(self) -> None:
        for name in self.processes:
            self.kill(name)

    def weights(self) -> dict[str, object]:
        """What the trainer has saved last; empty before the first time."""
        files = list(self._folder.glob("*-weights.json"))
        return json.loads(files[0].read_text()) if files else {}

    def wait_for(self, step: int, name: str) -> None:
        """Wait until the weights are those of a step, or the process that saves them has ended."""
        while int(str(self.weights().get("step", -1))) < step and self.processes[name].poll() is None:
            time.sleep(0.005)

    def printed(self) -> str:
        return "".join(self._output(name).read_text() for name in self.processes)

    def _output(self, name: str) -> Path:
        return self._folder / f"{name}.out"
