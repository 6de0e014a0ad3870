"""How a run begins, and when it refuses to."""

import io
import sys

import pytest
from rich.console import Console

from replaybuf import ConfigError, ReplayBufError, ReplayBufferConfig
from replaybuf.demo import processes
from replaybuf.demo.display import Display
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.launch import default_folder
from replaybuf.demo.processes import WorkerProcesses
from replaybuf.demo.settings import TASK, WorkerSettings
from replaybuf.demo.trainer import Options, Training
from replaybuf.rollout import RolloutState, Status


@pytest.fixture
async def buffer(tmp_path):
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/demo.db").build() as buffer:
        yield buffer


async def start(tmp_path, buffer, **options):
    output = io.StringIO()
    training = await Training.start(
        Options("", tmp_path, **options), RunFolder(tmp_path), buffer, Display(Console(file=output))
    )
    return training, output.getvalue()


async def put_group(buffer):
    await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], TASK)


async def test_a_new_run_saves_its_first_weights(tmp_path, buffer):
    training, output = await start(tmp_path, buffer, seed=3)
    assert RunFolder(tmp_path).load()[1] == 3
    assert (training.figures.target, output) == (200, "Training a new policy for 200 steps (seed 3)\n")


async def test_a_run_goes_on_with_its_seed(tmp_path, buffer):
    trainer = Trainer.create(3)
    trainer.step = 57
    RunFolder(tmp_path).save(trainer, 3)
    await put_group(buffer)
    training, output = await start(tmp_path, buffer)
    assert (training.trainer.step, training.seed, training.figures.left) == (57, 3, 1)
    assert output == "Resuming at step 57 with 1 groups in the buffer\n"


async def test_a_run_that_is_done_does_as_many_steps_more(tmp_path, buffer):
    trainer = Trainer.create(0)
    trainer.step = 57
    RunFolder(tmp_path).save(trainer, 0)
    training, output = await start(tmp_path, buffer, steps=20)
    assert training.figures.target == 77
    assert "It has done 20 steps already, so it does 20 more" in output


async def test_another_seed_is_refused(tmp_path, buffer):
    await start(tmp_path, buffer, seed=3)
    with pytest.raises(ReplayBufError, match=r"was started with seed 3: go on with --seed 3, start anew with --fresh"):
        await start(tmp_path, buffer, seed=4)


async def test_groups_without_their_weights_are_refused(tmp_path, buffer):
    await put_group(buffer)
    with pytest.raises(ReplayBufError, match="1 groups of a demo run whose weights are not in"):
        await start(tmp_path, buffer)


def restart_until_it_fails(workers):
    while True:
        workers.restart_dead()


def test_a_worker_that_keeps_failing_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-c", "raise SystemExit('error: no such thing')"))
    message = r"worker 0 failed: error: no such thing \(3 times in a row"
    processes_of_one = WorkerProcesses(RunFolder(tmp_path), [WorkerSettings("", "", 0, 1, 0, "")])
    with processes_of_one as workers, pytest.raises(ReplayBufError, match=message):
        restart_until_it_fails(workers)


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("sqlite:///data/demo.db", "data/demo.run"),
        ("postgresql://me@host/rl", "replaybuf-demo-rl.run"),
    ],
)
def test_weights_are_in_a_folder_beside_the_database(url, folder):
    assert str(default_folder(url)) == folder


@pytest.mark.parametrize("url", ["sqlite:///:memory:", "sqlite://", "mysql://x"])
def test_a_database_that_cant_be_shared_is_refused(url):
    with pytest.raises(ConfigError):
        default_folder(url)
