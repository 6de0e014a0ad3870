"""How a run begins, and when it refuses to."""

import io
import sys

import pytest
from rich.console import Console

from replaybuf import ConfigError, FencedError, ReplayBufError, RolloutState, Status
from replaybuf.demo import processes
from replaybuf.demo.display import Display
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.launch import default_folder
from replaybuf.demo.processes import WorkerProcesses
from replaybuf.demo.settings import TASK, WorkerSettings, buffer_config, sampler_of
from replaybuf.demo.start import begin, clear
from replaybuf.demo.trainer import Options, Training
from replaybuf.demo.weights import Saved
from replaybuf.produce import TrainState, publish, published


@pytest.fixture
async def buffer(shared_url):
    async with buffer_config(shared_url).build() as buffer:
        yield buffer


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


async def put_group(buffer, task=TASK):
    await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], task)


async def a_run(buffer, folder, step):
    """A run that was saved at this step, with a group completed before and one after that."""
    await begin(buffer, folder, 3)
    trainer = Trainer.create(3)
    trainer.step = step
    await put_group(buffer)
    await buffer.checkpoint(step)
    folder.save(Saved(trainer, 3, [5]))
    await put_group(buffer)
    await sampler_of(buffer, 3, 100).sample(4)


async def test_a_new_run_has_a_checkpoint_and_weights(buffer, folder):
    saved = await begin(buffer, folder, 3)
    assert (saved.step, saved.seed, saved.trained, folder.load().seed) == (0, 3, [], 3)
    assert [made.step for made in await buffer.checkpoints()] == [0]


async def test_a_new_run_fences_off_who_had_the_buffer_open(buffer, folder, shared_url):
    async with buffer_config(shared_url).build() as other:
        await begin(buffer, folder, 3)
        with pytest.raises(FencedError):
            await put_group(other)
    await put_group(buffer)


async def test_a_run_goes_on_from_the_buffer_of_its_weights(buffer, folder):
    await a_run(buffer, folder, 57)
    saved = await begin(buffer, folder, None)
    assert (saved.step, saved.seed, saved.trained) == (57, 3, [5])
    assert await buffer.count_statuses([TASK], Status) == {TASK: {s: int(s == Status.COMPLETED) for s in Status}}
    assert (await buffer.cursors.read(TASK)).position == 0


async def test_another_seed_is_refused(buffer, folder):
    await begin(buffer, folder, 3)
    with pytest.raises(ReplayBufError, match=r"was started with seed 3: go on with --seed 3, start anew with --fresh"):
        await begin(buffer, folder, 4)


async def test_groups_without_their_weights_are_refused(buffer, folder):
    await put_group(buffer)
    with pytest.raises(ReplayBufError, match="1 groups of a demo run whose weights are not in"):
        await begin(buffer, folder, None)


async def test_prompts_in_flight_without_their_weights_are_refused(buffer, folder):
    prompts = await sampler_of(buffer, 0, 100).sample(2)
    with pytest.raises(ReplayBufError, match="2 groups of a demo run whose weights are not in"):
        await begin(buffer, folder, None)
    assert not any(prompt.lost for prompt in prompts)


async def test_weights_without_their_buffer_are_refused(buffer, folder):
    folder.save(Saved(Trainer.create(0), 0))
    with pytest.raises(ReplayBufError, match=r"are of another buffer than this one .*--fresh"):
        await begin(buffer, folder, None)


@pytest.mark.parametrize("start", [lambda buffer, folder: begin(buffer, folder, None), lambda buffer, _: clear(buffer)])
async def test_a_buffer_with_other_tasks_is_left_alone(buffer, folder, start):
    await put_group(buffer, "math")
    with pytest.raises(ReplayBufError, match=r"groups of other tasks \(math\).*--url"):
        await start(buffer, folder)
    assert await buffer.count("math", Status.COMPLETED) == 1


async def test_clear_leaves_nothing_of_a_run(buffer, folder):
    await a_run(buffer, folder, 57)
    await publish(buffer, TrainState(58, 57, "old weights"))
    folder.clear()
    await clear(buffer)
    assert await published(buffer) is None
    saved = await begin(buffer, folder, 4)
    assert (saved.step, saved.seed, len(buffer)) == (0, 4, 0)
    [prompt] = await sampler_of(buffer, 4, 100).sample()
    assert prompt.group[0].group_id == 0


async def a_training(tmp_path, buffer, saved, **options):
    output = io.StringIO()
    folder = RunFolder(tmp_path)
    folder.save(saved)
    training = Training(Options("", tmp_path, **options), folder, buffer, Display(Console(file=output)), saved)
    training.figures.count_store(await buffer.storage.tallies())
    training._greet()
    return training, output.getvalue()


async def test_a_new_run_says_where_it_goes(tmp_path, buffer):
    training, said = await a_training(tmp_path, buffer, Saved(Trainer.create(3), 3))
    assert (training.figures.target, said) == (200, "Training a new policy for 200 steps (seed 3)\n")


async def test_a_run_that_goes_on_says_from_where(tmp_path, buffer):
    await put_group(buffer)
    saved = Saved(Trainer.create(3), 3)
    saved.trainer.step = 57
    training, said = await a_training(tmp_path, buffer, saved)
    assert (training.figures.target, training.figures.left) == (200, 1)
    assert said == "Resuming at step 57 with 1 groups in the buffer\n"


async def test_a_run_that_is_done_does_as_many_steps_more(tmp_path, buffer):
    saved = Saved(Trainer.create(3), 3)
    saved.trainer.step = 57
    training, said = await a_training(tmp_path, buffer, saved, steps=20)
    assert training.figures.target == 77
    assert "It has done 57 steps already, so it does 20 more" in said


def restart_until_it_fails(workers):
    while True:
        workers.restart_dead()


def test_a_worker_that_keeps_failing_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-c", "raise SystemExit('error: no such thing')"))
    message = r"worker 0 failed: error: no such thing \(3 times in a row"
    processes_of_one = WorkerProcesses(RunFolder(tmp_path), [WorkerSettings("", "", 0, 0, 32, "")])
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
