"""The demo: its policy, and how a run of it begins and goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

import numpy as np
import pytest

from replaybuf import ConfigError, FencedError, ReplayBufError, ReplayBuffer, RolloutState, Status
from replaybuf.cli.demo import trainer
from replaybuf.cli.demo.policy import (
    END,
    PROMPTS,
    VOCABULARY_SIZE,
    Engine,
    Policy,
    Prompts,
    answer_of,
    encode,
    objective,
    prompt_of,
    rows_of,
    verify,
)
from replaybuf.cli.demo.trainer import Training, argument_of, begin, folder_of, launch, verdict
from replaybuf.cli.demo.worker import BATCH_GROUPS, GROUP_SIZE, TASK, Run, RunFolder, buffer_config, sampler_of, work
from replaybuf.produce import TrainState, publish


@pytest.fixture
async def buffer(shared_url):
    async with buffer_config(shared_url).build() as buffer:
        yield buffer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


async def put_group(buffer):
    await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], TASK)


async def a_run(buffer, folder, step):
    """A run that was saved at this step, with a group completed before and one after that."""
    await begin(buffer, folder, 200)
    await put_group(buffer)
    await buffer.checkpoint(step)
    folder.save(Run(Policy.create(), step, trained=[5]))
    await put_group(buffer)
    await sampler_of(buffer, 100).draw(4)


# How a run begins


async def test_a_new_run_has_a_checkpoint_and_weights_and_fences_off_who_had_the_buffer_open(
    buffer, folder, shared_url
):
    async with buffer_config(shared_url).build() as other:
        run = await begin(buffer, folder, 200)
        assert (run.step, run.trained, folder.load().step) == (0, [], 0)
        assert [checkpoint.step for checkpoint in await buffer.checkpoints()] == [0]
        with pytest.raises(FencedError):
            await put_group(other)
    await put_group(buffer)
    assert Training(folder, buffer, run).begins() == "Training a new policy for 200 steps"


async def test_a_run_goes_on_from_the_buffer_of_its_weights(buffer, folder):
    await a_run(buffer, folder, 57)
    run = await begin(buffer, folder, 200)
    assert (run.step, run.trained) == (57, [5])
    assert await buffer.count_statuses([TASK], Status) == {TASK: {s: int(s == Status.COMPLETED) for s in Status}}
    assert (await buffer.cursors.read(TASK)).position == 0
    begins = Training(folder, buffer, run).begins()
    assert begins == "Resuming at step 57 of 200; for a new run, give another --url, such as new.db"


@pytest.mark.parametrize(
    ("saved", "steps", "target"),
    [((57, 200), 200, 200), ((200, 200), 200, 400), ((250, 400), 500, 500), ((7, 9), 8, 8)],
    ids=["first round", "first round done", "more steps", "fewer steps"],
)
async def test_a_run_goes_on_to_so_many_steps_or_as_many_again(buffer, folder, saved, steps, target):
    await begin(buffer, folder, 200)
    await buffer.checkpoint(saved[0])
    folder.save(Run(Policy.create(), *saved))
    assert (await begin(buffer, folder, steps)).target == folder.load().target == target


@pytest.mark.parametrize("flying", [False, True], ids=["groups", "prompts"])
async def test_groups_without_their_weights_are_refused(buffer, folder, flying):
    await (sampler_of(buffer, 100).draw() if flying else put_group(buffer))
    with pytest.raises(ReplayBufError, match="groups of a demo run whose weights are not in"):
        await begin(buffer, folder, 200)


async def test_weights_without_their_buffer_are_refused(buffer, folder):
    folder.save(Run(Policy.create()))
    with pytest.raises(ReplayBufError, match=r"are of another buffer than this one .*move them away"):
        await begin(buffer, folder, 200)


class Died(BaseException):
    """The trainer was killed."""


#: Calls of a trainer, of which it makes so many but for the last one: there it dies. In the order of a run.
DEATHS = [
    *((ReplayBuffer, "checkpoint", 1), (RunFolder, "save", 1), (Training, "publish", 1)),  # when it begins
    *((Policy, "train", 1), (ReplayBuffer, "checkpoint", 1), (RunFolder, "save", 2), (Training, "publish", 2)),
]


def dying(call, number):
    """The call, until it is made for the given time."""
    numbers = itertools.count(1)

    def dies(*arguments, **options):
        if next(numbers) == number:
            raise Died
        return call(*arguments, **options)

    return dies


async def train_to(steps, url, folder):
    """A life of a trainer, and of its worker."""
    async with buffer_config(url).build() as buffer:
        training = Training(folder, buffer, await begin(buffer, folder, steps))
        await training.publish(finished=False)
        stop = asyncio.Event()
        working = asyncio.create_task(work(url, folder, 0, stop))
        try:
            while training.run.step < steps:
                await training.step()
        finally:
            stop.set()
            await working
    return training.run


async def test_a_trainer_that_dies_at_any_point_of_a_step_trains_each_prompt_once(shared_url, folder, monkeypatch):
    """Processes are killed at random moments: test_demo_run.py."""
    for owner, name, number in DEATHS:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dying(getattr(owner, name), number))
            with pytest.raises(Died):
                await train_to(3, shared_url, folder)
    assert folder.load().step == 1
    run = await train_to(3, shared_url, folder)
    assert sorted(run.trained) == list(range(3 * BATCH_GROUPS))


@pytest.mark.parametrize(
    ("url", "folder", "argument"),
    [
        ("sqlite:///data/my demo.db", "data/my demo.run", ("data/my demo.db", False)),
        ("postgresql://me@h/rl", "replaybuf-demo-rl.run", ("postgresql://me@h/rl", False)),
        (
            "postgresql://me:secret@h:1/rl?sslmode=require",
            "replaybuf-demo-rl.run",
            ("postgresql://me@h:1/rl?sslmode=require", True),
        ),
    ],
)
def test_where_the_weights_are_and_how_commands_name_the_database(url, folder, argument):
    assert str(folder_of(url)) == folder
    assert argument_of(url) == argument


@pytest.mark.parametrize("url", ["sqlite:///:memory:", "sqlite://", "mysql://x"])
def test_a_database_that_cant_be_shared_is_refused(url):
    with pytest.raises(ConfigError):
        folder_of(url)


def test_the_path_of_a_file_is_taken_as_it_is(tmp_path, monkeypatch):
    async def train(*_):
        pass

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.chdir(tmp_path)
    launch("a%20b.db", steps=1, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a%20b.db", "a%20b.run"]


# What is kept beside the buffer


def test_a_folder_that_cant_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ReplayBufError, match="can't write to the run folder"):
        RunFolder(tmp_path / "file").make()


def test_a_run_comes_back_as_it_was_saved_and_a_save_that_fails_leaves_the_one_before(folder, monkeypatch):
    assert folder.load() is None
    run = Run(Policy.create(), step=7, target=9, trained=[4, 2, 9], rewards=[0.1, 0.25])
    run.policy.weights[3] = 0.5
    folder.save(run)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    run.step = 8
    with pytest.raises(ReplayBufError, match="disk full"):
        folder.save(run)
    loaded, run.step = folder.load(), 7
    assert np.array_equal(loaded.policy.weights, run.policy.weights)
    assert {**vars(loaded), "policy": None} == {**vars(run), "policy": None}
    assert [path.name for path in folder.path.iterdir()] == ["weights.npz"]


def test_weights_that_cant_be_read_are_a_clear_error(folder):
    folder.weights.mkdir()
    with pytest.raises(ReplayBufError, match=f"can't read {folder.weights}: Is a directory"):
        folder.load()
    folder.weights.rmdir()
    folder.save(Run(Policy.create()))
    folder.weights.write_bytes(folder.weights.read_bytes()[:100])
    with pytest.raises(ReplayBufError, match=r"weights\.npz can't be read"):
        folder.load()
    for values in ({"step": 3, "updates": 3}, {"weights": np.array([{"a": 1}], dtype=object)}):  # which is pickled
        np.savez(folder.weights, **values)
        with pytest.raises(ReplayBufError, match=r"another version of the demo"):
            folder.load()


# What is said at the end


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ([2, 0, 1], "Each of the 3 prompts was trained once."),
        ([0, 2], "2 prompts were trained, each of them once."),
        ([0, 1, 2, 3], "4 prompts were trained, each of them once."),
        ([], "0 prompts were trained, each of them once."),
        ([0, 1, 2, 1], "1 of 3 prompts were trained more than once: number 1, for example."),
    ],
)
def test_the_verdict_says_whether_each_prompt_was_trained_once(trained, said):
    assert verdict(trained, 3) == said


# Workers


async def test_a_worker_generates_with_the_weights_that_were_saved_and_joins_a_run_that_was_restored(
    buffer, folder, shared_url
):
    run = await begin(buffer, folder, 10)
    working = asyncio.create_task(work(shared_url, folder, 3, asyncio.Event()))
    await publish(buffer, TrainState(1, 0))
    await buffer.wait_ready({TASK: 8}, timeout=20)
    async for item in buffer.find({"status": Status.COMPLETED}):
        assert item.tags == {"worker": 3, "level": len(str(answer_of(prompt_of(item.item))))}
        assert {int(step) for rollout in item.item for step in rollout.response_model_steps} == {0}
    await buffer.restore(0)
    run.step = 2
    folder.save(run)
    await publish(buffer, TrainState(3, 2))
    await buffer.wait_ready({TASK: 8}, timeout=20)
    async for item in buffer.find({"status": Status.COMPLETED}):
        assert {int(step) for rollout in item.item for step in rollout.response_model_steps} == {2}
    await publish(buffer, TrainState(3, 2, finished=True))
    await asyncio.wait_for(working, 20)


async def test_without_weights_a_worker_says_so(shared_url, tmp_path):
    with pytest.raises(ReplayBufError, match="there are no weights in"):
        await work(shared_url, RunFolder(tmp_path), 0, asyncio.Event())


LONG = 60.0


def new_group(prompt: str = "14-9=", number: int = 0) -> list[RolloutState]:
    """Rollouts to be generated, as a sampler gives them."""
    message = [{"role": "user", "content": prompt}]
    members = [RolloutState(message=message, prompt_ids=encode(prompt), group_id=number) for _ in range(GROUP_SIZE)]
    for rollout in members:
        rollout.response_ids = []
    return members


async def generated(policy: Policy, prompt: str = "14-9=", number: int = 0) -> list[RolloutState]:
    """A completed group."""
    engine = Engine(token_seconds=0)
    engine.load(policy, 0)
    return await engine.generate_group(new_group(prompt, number), partial=True)


def tokens_of(group: Sequence[RolloutState]) -> list[list[int]]:
    return [list(rollout.response_ids) for rollout in group]


def test_the_gradient_agrees_with_finite_differences() -> None:
    rng, n = np.random.default_rng(0), 40
    logits, direction = rng.normal(size=(2, n, VOCABULARY_SIZE))
    tokens, advantages = rng.integers(VOCABULARY_SIZE, size=n), rng.normal(size=n)

    def at(shift: float) -> tuple[float, np.ndarray]:
        moved_logits = logits + shift * direction
        log_probs = moved_logits - np.log(np.exp(moved_logits).sum(axis=1, keepdims=True))
        return objective(log_probs, tokens, behaviour, advantages, np.full(n, 1 / n))

    behaviour = np.full(n, -np.log(VOCABULARY_SIZE))
    assert (at(1e-6)[0] - at(-1e-6)[0]) / 2e-6 == pytest.approx(np.vdot(at(0)[1], direction), rel=1e-4)


async def learn(steps: int, lag: int) -> list[float]:
    """The reward of each step of a run in which every batch comes from the weights of `lag` steps ago."""
    policy, weights, rewards, prompts = Policy.create(), [], [], Prompts(10_000)
    for step in range(steps):
        weights.append(policy.weights.copy())
        behaviour = Policy(weights[max(0, step - lag)], policy.squares)
        numbers = range(16 * step, 16 * step + 16)
        groups = [await generated(behaviour, prompt_of([prompts[n]]), n) for n in numbers]
        rewards.append(policy.train(groups))
    return rewards


async def test_the_reward_rises_on_stale_data_and_a_run_repeats_exactly() -> None:
    rewards = await learn(60, lag=2)
    assert np.mean(rewards[:6]) < 0.1
    assert np.mean(rewards[-6:]) > 0.25
    assert await learn(4, lag=2) == rewards[:4]


def test_an_epoch_of_the_stream_has_every_prompt_once() -> None:
    stream = Prompts(100)
    assert {prompt_of([stream[number]]) for number in range(len(PROMPTS))} == set(PROMPTS)
    assert (answer_of("7+5="), answer_of("14-9=")) == (12, 5)


@pytest.mark.parametrize(
    ("text", "reward"), [("12", 1.0), ("1", 0.1), ("0", 0.1), ("", 0.0), ("+", 0.0), ("-2", 0.0), ("01", 0.0)]
)
def test_the_reward_of_an_answer(text: str, reward: float) -> None:
    assert verify("7+5=", [*encode(text), END]) == reward


async def test_an_engine_writes_what_it_sampled_and_from_which_distribution() -> None:
    policy = Policy.create()
    policy.weights[...] = np.random.default_rng(0).normal(size=policy.weights.shape)
    for rollout in await generated(policy):
        expected = policy.log_probs(rows_of("14-9=", rollout.response_ids)[:-1])
        places = np.arange(len(rollout.response_ids))
        assert np.allclose(rollout.logprobs, expected[places, rollout.response_ids], atol=1e-5)
        assert rollout.reward == verify("14-9=", rollout.response_ids)


async def test_a_paused_group_goes_on_where_it_was() -> None:
    engine, group = Engine(token_seconds=LONG), new_group()
    engine.load(Policy.create(), 0)
    running = asyncio.create_task(engine.generate_group(group, partial=True))
    await asyncio.sleep(0)
    await engine.pause()
    await asyncio.wait_for(running, LONG / 4)
    assert {rollout.status for rollout in group} == {Status.ABORTED}
    second = Engine(token_seconds=0)
    second.load(Policy.create(), 0)
    assert tokens_of(await second.generate_group(group, partial=True)) == tokens_of(await generated(Policy.create()))
