"""The trace of a group, a worker and a step, and its page."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from random import Random

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.cli import output, trace
from replaybuf.common.worker_name import working_as
from replaybuf.view.steps import read_steps
from tests.cli.conftest import run, run_json, run_on_screen
from tests.cli.example import BAD, FELL, FIRST, GROUPS, LAST, WORKERS, rollout, train
from tests.postgres import filled_by
from tests.produce.conftest import ledger_of
from tests.web.conftest import client_of

#: A run of which a worker went bad.
trained = filled_by(train)


def screen(*args: object) -> list[str]:
    """Return what fits on a screen of 24 lines."""
    return run(*args).stdout.splitlines()[:24]


def test_from_a_step_whose_reward_fell_to_the_worker_within_three_commands(trained: str) -> None:
    steps = run_json("trace", trained)
    fell = min((row for row in steps if row["lower"]), key=lambda row: row["step"])
    assert fell["step"] == FELL
    lines = screen("trace", trained, "step", fell["step"])
    assert lines[1].strip().startswith(f"{BAD} made {GROUPS // 4} of the {GROUPS} groups")
    assert run_json("trace", trained, "step", FELL)["runs"][0]["verdict"] == fell["lower"]
    first = lines[lines.index("workers") + 3]
    assert first.startswith(BAD)
    worst_line = next(line for line in lines if line.split()[1:2] == [BAD] and line.split()[0].isdigit())
    life = run("trace", trained, "uid", worst_line.split()[0]).stdout
    assert f"put by       {BAD}" in life


def test_a_worker_that_is_bad_at_one_task_of_two_is_named_though_no_step_is_red(bad_at_code: str) -> None:
    """It makes one of the four groups of that task in each step; its other groups are as good as those of others."""
    first, *below = run("trace", bad_at_code).stdout.splitlines()
    sentence = "gen-3 is below the others in code over steps 1 to "
    assert first.startswith(f"{sentence}20: 20 groups of mean reward 0.")
    [row] = [line.split() for line in below if line.startswith("gen-3 ")]
    assert float(row[1]) < -0.3 < -0.1 < float(row[2])
    assert [step["lower"] for step in run_json("trace", bad_at_code)] == [""] * 20
    assert run("trace", bad_at_code, "--limit", 3).stdout.splitlines()[0] == first
    text, page = run("trace", bad_at_code, "step", 15).stdout, client_of(bad_at_code)
    assert f"  {sentence}15: 15 groups" in text
    assert "no other worker and no task stands out" in " ".join(text.split())
    [row] = [line.split() for line in text.partition("the others over")[2].splitlines() if line.startswith("gen-3 ")]
    assert float(row[1]) < -0.3 < float(row[2])
    assert f"{sentence}15" in page.get("/steps/15").text
    assert f"{sentence}20" in page.get("/steps").text
    of_all, of_math = page.get("/workers").text, page.get("/workers?task=math").text
    assert f"{sentence}20" in of_all
    assert of_all.count('class="number bad"') == 2
    assert 'bad"' not in of_math
    assert "all tasks</a>" in of_math
    for path, which in (("/workers", "in the last steps"), ("/steps", "for a step")):
        text = page.get(f"{path}?task=mat").text
        assert f"No group of task mat was drawn {which}; the recorded draws are for steps 1 to 20" in text


def test_rewards_that_are_no_finite_numbers_are_counted_where_rewards_are_shown(url: str) -> None:
    with ReplayBufferConfig(url=url, archive=9).build_sync() as buffer:
        for step, rewards in enumerate([(1.0, float("nan")), (float("nan"), "high"), (1.0, 0.5)], 1):
            items = [RolloutState(message=[], response="7", reward=reward) for reward in rewards]
            buffer.put(items, "math", current_train_step=step)
            buffer.take_batch({"math": 1}, current_train_step=min(step, 2))
    assert "0.750 (0.750 to 0.750), 1.000 in the steps before; no usable reward in 1 of 2 groups" in " ".join(
        run("trace", url, "step", 2).stdout.split()
    )
    assert "reward       no usable one" in run("trace", url, "uid", 2).stdout


def test_a_task_without_usable_rewards_is_named_with_its_figures(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for task, reward in (("math", None), ("code", 1.0), ("chat", "good")):
            buffer.put([RolloutState(message=[], response="7", reward=reward, status=Status.COMPLETED)], task)
        assert "no completed group of chat and math has a usable reward: a finite" in run("stats", url).stdout
        buffer.put([RolloutState(message=[], response="7", reward=0.0)], "math")
        assert "no completed group of chat has a usable reward: a finite" in run("watch", url).stdout


def test_what_a_group_goes_without_is_in_the_life_of_both(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        statuses = Status.COMPLETED, Status.FAILED, Status.COMPLETED
        items = [RolloutState(message=[], response="7", reward=1.0, status=status) for status in statuses]
        uid = buffer.put(items, "math", min_size=2)
    [failed_uid] = [row["uid"] for row in run_json("ls", url, "--status", "failed")]
    for group_uid in (uid, failed_uid):
        assert f"1 failed of group {uid}, now group {failed_uid}" in run("trace", url, "uid", group_uid).stdout


def test_all_steps_of_a_worker_are_all_however_many_groups_there_are(
    bad_at_code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_few = partial(read_steps, judged=5)
    monkeypatch.setattr(trace, "read_steps", judge_few)
    steps = run_json("trace", bad_at_code, "--worker", "gen-3", "--limit", "all")
    assert [row["step"] for row in steps] == [*range(20, 0, -1)]
    error = run("trace", bad_at_code, "--worker", "gen-9").stderr
    assert "no group of worker gen-9 was drawn for a step from 20 on; the recorded draws are for steps 1 to 20" in error
    assert "more steps: --before 20, or --limit all" in error


def test_a_task_and_a_worker_choose_steps_and_groups(bad_at_code: str) -> None:
    steps = run_json("trace", bad_at_code, "--task", "code", "--worker", "gen-3", "--limit", 3)
    assert [(row["step"], row["groups"]) for row in steps] == [(20, 1), (19, 1), (18, 1)]
    assert all(row["others"] > row["reward"] for row in steps)
    [step] = run_json("trace", bad_at_code, "step", 15, "--task", "code", "--worker", "gen-3")["runs"]
    assert [(group_row["task_name"], group_row["worker"]) for group_row in step["groups"]] == [("code", "gen-3")]
    assert {worker["name"] for worker in step["workers"]} == {f"gen-{number}" for number in range(4)}
    lone = run("trace", bad_at_code, "step", 15, "--task", "cod", code=1).stderr
    drawn = "no group of task cod was drawn for step 15; the recorded draws are for steps 1 to 20"
    assert lone == f"Error: {drawn}; the tasks are code and math\n"
    unknown = run("trace", bad_at_code, "--worker", "gen-9").stderr
    assert re.search("no group of worker gen-9 was drawn for a step.*; the workers are gen-0, gen-1, gen-2", unknown)
    assert "they go with steps" in run("trace", bad_at_code, "uid", 1, "--task", "code", code=2).stderr
    page = client_of(bad_at_code)
    [link] = {*re.findall(r'href="(/steps\?task=code&amp;worker=gen-3[^"]*)"', page.get("/workers").text)}
    text = page.get(link.replace("&amp;", "&")).text
    assert "gen-3 is below the others in code over steps 1 to 20" in text
    assert re.search(r'href="/steps/20\?[^"]*task=code&amp;worker=gen-3"', text)
    assert page.get("/steps/20?task=code&worker=gen-3").text.count("/groups/") == 1


@pytest.fixture(scope="module")
def bad_at_code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run of which a worker is bad at one task, which tests only read."""
    url = f"sqlite:///{tmp_path_factory.mktemp('bad')}/run.db"
    chance = Random(4)
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for step in range(1, 21):
            for number in range(8):
                task, worker = ("math", "code")[number // 4], f"gen-{number % 4}"
                mean = 0.1 if (task, worker) == ("code", "gen-3") else 0.6
                reward = min(1.0, max(0.0, chance.gauss(mean, 0.15)))
                with working_as(worker):
                    buffer.put([RolloutState(message=[], reward=reward, status=Status.COMPLETED)], task)
            buffer.take_batch({"math": 4, "code": 4}, current_train_step=step)
    return url


def test_a_page_of_steps_says_how_to_go_on(trained: str) -> None:
    result = run("trace", trained, "--limit", 3, "--before", 410)
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == ["409", "408", "407"]
    assert result.stderr == "more steps: --before 407, or --limit all\n"


def test_steps_are_a_table_on_the_narrowest_terminal(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_UNLIMITED_WIDTH", 40)
    result = run("trace", trained, "--task", "math", "--limit", 3)
    head, _, *rows = result.stdout.splitlines()[-5:]
    assert head.split() == ["step", "trained", "groups", "reward", "low", "stale"]
    assert [row.split()[0] for row in rows] == ["414", "413", "412"]
    assert result.stderr.startswith("too narrow for: high, max stale, weights, taken by\n")


def test_a_step_has_its_groups_and_where_they_are(trained: str) -> None:
    [step] = run_json("trace", trained, "step", FELL)["runs"]
    assert len(step["groups"]) == GROUPS
    assert {group["now"] for group in step["groups"]} == {"archived"}
    assert {group["worker"] for group in step["groups"]} == set(WORKERS)
    rewards = [group["reward"] for group in step["groups"]]
    assert rewards == sorted(rewards)
    assert step["reward"] == pytest.approx(sum(rewards) / GROUPS)
    assert step["workers"][0] | {"reward": 0.0, "stands_out": True} == step["workers"][0]
    assert {group["prompt"] for group in step["groups"]} == {"How many primes are there below 100?"}


def test_a_step_has_its_worst_answers(trained: str) -> None:
    text = run("trace", trained, "step", "413", "--worst", "2").stdout
    assert "the lowest 2 answers" in text
    [run_of_step] = run_json("trace", trained, "step", "413", "--worst", "2")["runs"]
    assert len(run_of_step["worst"]) == 2
    assert run_of_step["worst"][0]["reward"] <= run_of_step["worst"][1]["reward"]
    assert f"group {run_of_step['worst'][0]['uid']}, rollout {run_of_step['worst'][0]['position']}" in text
    assert "it goes with a step" in run("trace", trained, "--worst", "2", code=2).stderr


def test_what_is_not_there_is_told_the_range_of_what_is(trained: str) -> None:
    error = run("trace", trained, "step", 500, code=1).stderr
    assert error == f"Error: no draw for step 500 is recorded; the recorded draws are for steps {FIRST} to {LAST}\n"
    assert f"no draw for a step before {FIRST}" in run("trace", trained, "--before", FIRST).stderr
    assert run_json("trace", trained, "--before", 10**30, "--limit", 10**30) == run_json("trace", trained)
    assert run_json("trace", trained, "--limit", "all") == run_json("trace", trained, "--limit", 10**30)
    assert run("trace", trained, "--limit", 0).stderr == f"more steps: --before {LAST + 1}, or --limit all\n"
    for uid in (0, 2**62):
        assert f"there is no group {uid}: uids go from 1 to" in run("trace", trained, "uid", uid, code=1).stderr


def test_one_of_anything_is_singular(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for step in (3, 4):
            for task in ("code", "math"):
                buffer.put([RolloutState(message=[], reward=0.5, status=Status.COMPLETED)], task)
            buffer.take_batch({"code": 1, "math": 1}, current_train_step=step)
            if step == 3:
                assert "the recorded draws are for step 3" in run("trace", url, "step", 9, code=1).stderr
    text = run("trace", url, "step", 4).stdout
    assert ", 0.500 in the steps before" in text
    assert "rewards by task" not in text


def test_a_group_has_a_life(url: str) -> None:
    with ReplayBufferConfig(url=url, policy="fifo", archive=10, worker="one").build_sync() as buffer:
        uid = buffer.put([rollout("math", 0, 0, Random(0))], "math", current_train_step=4, model_step=3)
        buffer.checkpoint(4)
        with pytest.raises(MemoryError), buffer.lease_batch({"math": 1}, heartbeat=False, current_train_step=5):
            raise MemoryError("the engine was out of memory")
        buffer.lease_batch({"math": 1}, seconds=0.05, heartbeat=False, current_train_step=5).begin()
        buffer.take_batch({"math": 1}, timeout=30, current_train_step=6)
    life = run_json("trace", url, "uid", uid)
    assert [(row["what"], row["step"]) for row in life["timeline"]] == [
        ("put", 4),
        ("leased", 5),
        ("given back", None),
        ("leased", 5),
        ("lease lapsed", None),
        ("taken", 6),
        ("consumed", 6),
    ]
    assert "out of memory" in life["timeline"][2]["detail"]
    assert (life["now"], life["worker"]) == ("archived, trained on at step 6, 0 steps stale", "one")
    [step] = run_json("trace", url, "step", 5)["runs"]
    assert step["settled"] == 0


def test_annotations_are_shown_with_a_group_and_with_its_step(url: str) -> None:
    """Of its last draw that has any: by rollout with `show`, as means of groups and of the step with `trace`."""
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        for n in range(2):
            buffer.put([rollout("math", n, i, Random(n)) for i in range(2)], "math")
        with buffer.lease_batch({"math": 1}, current_train_step=6) as lease:
            leased = lease.items["math"][0]
            tokens = [len(answer.response_ids) for answer in leased.item]
            first = {"kl": 0.125, "why": "low", "entropy": np.linspace(0, 1, tokens[0])}
            buffer.annotate({leased.uid: [first, {"kl": 0.375, "entropy": np.zeros(tokens[1])}]})
            buffer.annotate({leased.uid: {"weight": 0.5}})
            lease.give_back()
        assert "weight 0.5" in re.split(r"\n +annotations +", run("show", url, leased.uid).stdout)[1]
        assert re.search(
            r"  entropy +kl  why  response\n─+\n.*0.5 \(0 to 1\)  0.125  low  ", run("show", url, leased.uid).stdout
        )
        assert "entropy=0.5 (0 to 1) kl=0.125 why=low\n" in run("show", url, leased.uid, "--full").stdout
        text = run_json("show", url, leased.uid)
        entropy = {"mean": 0.5, "min": 0, "max": 1, "tokens": tokens[0]}
        assert text["rollouts"][0]["annotations"] == first | {"entropy": entropy}
        assert (text["annotations"], text["rollouts"][1]["annotations"]["kl"]) == ({"weight": 0.5}, 0.375)
        for item in buffer.sample({"math": 2}, current_train_step=7)["math"]:
            buffer.annotate({item.uid: {"kl": 0.5 * item.uid}})
    text = run("trace", url, "step", 7).stdout
    assert re.search(r"(?m)^  means      kl 0.75$", text)
    assert re.findall(r"(?m)^ +(\d+) .* gone +([\d.]+)", text) == [("2", "1"), ("1", "0.5")]
    groups = run_json("trace", url, "step", 7)["runs"][0]["groups"]
    assert {group_row["uid"]: group_row["annotations"] for group_row in groups} == {1: {"kl": 0.5}, 2: {"kl": 1.0}}


def test_groups_that_were_replaced_and_deleted_are_known_by_the_event(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        first = buffer.put([rollout("math", 0, 0, Random(0))], "math")
        second = buffer.put([rollout("math", 0, 0, Random(0))], "math", replaces=[first])
        assert run_json("trace", url, "uid", second)["replaces"] == [first]
        assert run_json("trace", url, "uid", first)["replaced_by"] == [second]
        assert f"gone: replaced by group {second}" in run("trace", url, "uid", first).stdout
        buffer.delete({"uid": second})
    life = run_json("trace", url, "uid", second)
    assert [row["what"] for row in life["timeline"]] == ["deleted"]
    assert (life["now"], life["task_name"]) == ("gone: deleted", "")


def test_a_step_that_was_trained_again_is_shown_apart(url: str) -> None:
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        for n, step in enumerate((1, 2, 3, 3)):
            buffer.put([rollout("math", step, 0, Random(0))], "math")
            buffer.get(1, "math", current_train_step=step)
            if n == 1:
                buffer.checkpoint(2)
            elif n == 2:
                buffer.restore(2)
    steps = run_json("trace", url)
    assert [(row["step"], row["restores"], row["undone"]) for row in steps] == [
        (3, 1, False),
        (3, 0, True),
        (2, 0, False),
        (1, 0, False),
    ]
    text = run("trace", url, "step", 3).stdout
    assert text.index("step 3, after restore 1") < text.index("step 3, before a restore undid it")
    for width in range(50, 90):
        assert "first, undone" in run_on_screen(width, "trace", url)


def test_the_last_step_has_a_name(trained: str, url: str) -> None:
    newest = run_json("trace", trained)[0]["step"]
    assert run_json("trace", trained, "step", "last")["step"] == newest
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.put([RolloutState(message=[], response="7", reward=1.0)], "math")
        assert "nothing was taken yet" in run("trace", url, "step", "last", code=1).stderr


def test_a_reward_that_is_a_little_lower_has_no_colour(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for step, reward in enumerate((1.0, 0.9), 1):
            buffer.put([RolloutState(message=[], response="7", reward=reward)], "math", current_train_step=step)
            buffer.take_batch({"math": 1}, current_train_step=step)
    assert [row["lower"] for row in run_json("trace", url)] == ["", ""]
    assert "\x1b[31m" not in run_on_screen(100, "trace", url)


def test_redraws_of_groups_to_be_generated_again_are_no_training(url: str) -> None:
    """Those of a sampler, under a lease, and those of a caller that takes them."""
    asyncio.run(_train_and_continue(url))
    [step] = run_json("trace", url)
    assert (step["step"], step["batches"], step["groups"], step["settled"]) == (198, 1, 2, 2)
    assert step["taken_by"] == ["trainer"]
    [run_of_step] = run_json("trace", url, "step", 198)["runs"]
    assert [group["reward"] for group in run_of_step["groups"]] == [1.0, 1.0]
    assert "name no train step" not in run("trace", url).stderr
    draws = run_json("sql", url, "SELECT step, groups FROM batches WHERE worker = 'worker-0'")
    assert draws == [{"step": None, "groups": 1}] * 2


async def _train_and_continue(url: str) -> None:
    """A step in which the trainer takes two groups, and a worker two that were interrupted."""
    async with ReplayBufferConfig(url=url, worker="trainer").build() as buffer:
        for status in (Status.COMPLETED, Status.ABORTED):
            for _ in range(2):
                new_rollout = RolloutState(message=[], response="4", reward=1.0, status=status)
                await buffer.put([new_rollout], "math")
        await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=198)
        ledger = ledger_of(buffer, [], "math")
        with working_as("worker-0"):
            [prompt] = await ledger.draw(1, again=[Status.ABORTED])
            await buffer.get(1, "math", Status.ABORTED)
        await prompt.give_back()
        await buffer.get(2, "math")


def test_what_came_back_is_no_draw_to_be_trained_on(url: str) -> None:
    """As what a DataLoader has leased in advance: nobody names a step for it, and it is there to be drawn again."""
    with ReplayBufferConfig(url=url, worker="trainer", policy="fifo").build_sync() as buffer:
        uid, _ = [buffer.put([rollout("math", step, 0, Random(0))], "math") for step in range(2)]
        for train_step in (None, 8):
            buffer.lease_batch({"math": 2}, current_train_step=train_step).begin().give_back()
        with buffer.lease_batch({"math": 2}, current_train_step=7):
            pass
    [step] = run_json("trace", url)
    assert (step["step"], step["batches"], step["groups"], step["settled"]) == (7, 1, 2, 2)
    assert run("trace", url).stderr == ""
    [run_of_8] = run_json("trace", url, "step", 8)["runs"]
    assert (run_of_8["groups"] != [], run_of_8["settled"]) == (True, 0)
    life = [row["what"] for row in run_json("trace", url, "uid", uid)["timeline"]]
    assert life == ["put", "leased", "leased", "leased"]


def test_what_is_leased_still_is_a_draw_and_of_a_part_the_rest_came_back(url: str) -> None:
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        uids = [buffer.put([rollout("math", step, 0, Random(0))], "math") for step in range(3)]
        lease = buffer.lease_batch({"math": 3}, current_train_step=1).begin()
        lease.acknowledge(uids[:1])
        lease.give_back(uids[1:2], failed="no")
        buffer.lease_batch({"math": 1}, current_train_step=2, seconds=3600, heartbeat=False).begin()  # who is killed
        lease.give_back()
    steps = {row["step"]: (row["groups"], row["settled"]) for row in run_json("trace", url)}
    assert steps == {1: (1, 1), 2: (1, 0)}
    lives = [[row["what"] for row in run_json("trace", url, "uid", uid)["timeline"]] for uid in uids]
    assert lives == [["put", "leased"], ["put", "leased", "given back", "leased"], ["put", "leased"]]
    assert "1 of 1 draws name" not in run("trace", url).stderr


def test_a_run_that_was_never_interrupted_is_after_no_restore(url: str) -> None:
    """Each start of a trainer restores, also the first one: before that nothing was drawn."""
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        buffer.checkpoint(0)
        buffer.restore(0)
        for step in (1, 2):
            buffer.put([rollout("math", step, 0, Random(0))], "math")
            buffer.get(1, "math", current_train_step=step)
            buffer.checkpoint(step)
    assert [row["resumed"] for row in run_json("trace", url)] == [False, False]
    for args in ([], ["step", 1]):
        text = run("trace", url, *args).stdout
        assert "restore" not in text


def test_draws_without_a_train_step_are_told_of(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.put([rollout("math", 0, 0, Random(0))], "math")
        buffer.get(1, "math")
    assert "none names its train step: pass current_train_step=" in run("trace", url).stderr
