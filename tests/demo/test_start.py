"""How a run begins, and when it refuses to."""

import asyncio
import io
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from replaybuf import ConfigError, FencedError, ReplayBufError, ReplayBufferConfig, RolloutState, Status
from replaybuf.cli.app import app
from replaybuf.demo import Mode, trainer
from replaybuf.demo.display import Display, Figures
from replaybuf.demo.policy import Policy
from replaybuf.demo.run_folder import TASK, Run, RunFolder, buffer_config, sampler_of
from replaybuf.demo.trainer import Training, Workers, begin, clear, default_folder, launch
from replaybuf.demo.worker import WorkerSettings
from replaybuf.produce import TrainState, publish, published


@pytest.fixture
async def buffer(shared_url):
    async with buffer_config(shared_url).build() as buffer:
        yield buffer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


async def put_group(buffer, task=TASK):
    await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], task)


async def a_run(buffer, folder, step):
    """A run that was saved at this step, with a group completed before and one after that."""
    await begin(buffer, folder, 3, 200)
    await put_group(buffer)
    await buffer.checkpoint(step)
    folder.save(Run(Policy.create(), 3, step, trained=[5]))
    await put_group(buffer)
    await sampler_of(buffer, 3, 100).sample(4)


async def test_a_new_run_has_a_checkpoint_and_weights(buffer, folder):
    saved = await begin(buffer, folder, 3, 200)
    assert (saved.step, saved.seed, saved.trained, folder.load().seed) == (0, 3, [], 3)
    assert [made.step for made in await buffer.checkpoints()] == [0]


async def test_a_new_run_fences_off_who_had_the_buffer_open(buffer, folder, shared_url):
    async with buffer_config(shared_url).build() as other:
        await begin(buffer, folder, 3, 200)
        with pytest.raises(FencedError):
            await put_group(other)
    await put_group(buffer)


async def test_a_run_goes_on_from_the_buffer_of_its_weights(buffer, folder):
    await a_run(buffer, folder, 57)
    saved = await begin(buffer, folder, None, 200)
    assert (saved.step, saved.seed, saved.trained) == (57, 3, [5])
    assert await buffer.count_statuses([TASK], Status) == {TASK: {s: int(s == Status.COMPLETED) for s in Status}}
    assert (await buffer.cursors.read(TASK)).position == 0


async def test_another_seed_is_refused(buffer, folder):
    await begin(buffer, folder, 3, 200)
    with pytest.raises(ReplayBufError, match=r"was started with seed 3: go on with --seed 3, start anew with --fresh"):
        await begin(buffer, folder, 4, 200)


async def test_groups_without_their_weights_are_refused(buffer, folder):
    await put_group(buffer)
    with pytest.raises(ReplayBufError, match="1 groups of a demo run whose weights are not in"):
        await begin(buffer, folder, None, 200)


async def test_prompts_in_flight_without_their_weights_are_refused(buffer, folder):
    prompts = await sampler_of(buffer, 0, 100).sample(2)
    with pytest.raises(ReplayBufError, match="2 groups of a demo run whose weights are not in"):
        await begin(buffer, folder, None, 200)
    assert not any(prompt.lost for prompt in prompts)


async def test_weights_without_their_buffer_are_refused(buffer, folder):
    folder.save(Run(Policy.create(), 0))
    with pytest.raises(ReplayBufError, match=r"are of another buffer than this one .*--fresh"):
        await begin(buffer, folder, None, 200)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_database_of_others_is_not_entered(shared_url, tmp_path, monkeypatch, fresh):
    """Neither named, though its task has the demo's name, nor by a variable of the shell."""
    monkeypatch.chdir(tmp_path)

    async def put(count):
        async with ReplayBufferConfig(url=shared_url).build() as buffer:
            if count:
                await put_group(buffer)
            return await buffer.count(TASK, "completed")

    assert asyncio.run(put(1)) == 1
    options = {"mode": Mode.SYNC, "steps": 1, "workers": 1, "seed": None, "fresh": fresh}
    with pytest.raises(ReplayBufError, match=r"has groups of others \(default: arithmetic\), .*--url"):
        launch(shared_url, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert asyncio.run(put(0)) == 1
    monkeypatch.setenv("REPLAYBUF_URL", shared_url)
    monkeypatch.setattr("replaybuf.demo.trainer.launch", lambda url, *_, **__: url == "sqlite:///replaybuf-demo.db")
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0


def test_its_own_database_and_an_empty_one_are_entered(shared_url, tmp_path, monkeypatch):
    trained = []

    async def end(training, seconds):
        trained.append(len(await training.buffer.checkpoints()))

    monkeypatch.setattr(Training, "run", end)
    for fresh in (False, False, True):
        options = {"mode": Mode.SYNC, "steps": 1, "workers": 1, "seed": None, "fresh": fresh}
        assert launch(shared_url, tmp_path / "run", **options)
    assert trained == [1, 1, 1]

    async def put():
        async with buffer_config(shared_url).build() as buffer:
            await put_group(buffer, "math")

    asyncio.run(put())  # the demo would take it back with its own whenever it goes on
    with pytest.raises(ReplayBufError, match=r"has groups of others \(default: math\), .*--url"):
        launch(shared_url, tmp_path / "run", **options)


async def test_clear_leaves_nothing_of_a_run(buffer, folder):
    await a_run(buffer, folder, 57)
    await publish(buffer, TrainState(58, 57, "old weights"))
    folder.clear()
    await clear(buffer)
    assert await published(buffer) is None
    saved = await begin(buffer, folder, 4, 200)
    assert (saved.step, saved.seed, len(buffer)) == (0, 4, 0)
    [prompt] = await sampler_of(buffer, 4, 100).sample()
    assert prompt.group[0].group_id == 0


async def greeting(tmp_path, buffer, saved):
    output = io.StringIO()
    display = Display(Console(file=output, width=200))
    training = Training("sqlite:///x.db", Mode.SYNC, 2, RunFolder(tmp_path), buffer, display, saved)
    counted = await buffer.tallies()
    training.figures = Figures(counted, counted)
    training.greet()
    return output.getvalue().splitlines()[2:]


async def test_a_new_run_says_where_it_goes(tmp_path, buffer):
    said = await greeting(tmp_path, buffer, Run(Policy.create(), 3, 0, 200))
    assert said == ["Training a new policy for 200 steps (seed 3)"]


async def test_a_run_that_goes_on_says_from_where(tmp_path, buffer):
    await put_group(buffer)
    said = await greeting(tmp_path, buffer, Run(Policy.create(), 3, 57, 200))
    assert said == ["Resuming at step 57 of 200 with 1 groups in the buffer"]


async def test_a_run_that_is_done_does_as_many_steps_more(buffer, folder):
    run = await begin(buffer, folder, None, 20)
    run.step = 20
    await buffer.checkpoint(20)
    folder.finish(run)
    assert (await begin(buffer, folder, None, 20)).target == folder.load().target == 40


def test_a_worker_that_fails_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_COMMAND", (sys.executable, "-c", "raise SystemExit('error: no such thing')"))
    workers = Workers([WorkerSettings("", str(tmp_path), 0, 0, 32)], print)
    for process in workers._processes.values():
        process.wait()
    with pytest.raises(ReplayBufError, match=r"worker 0 failed: error: no such thing \(all that it wrote is in"):
        workers.restart_killed()
    workers.stop()


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
