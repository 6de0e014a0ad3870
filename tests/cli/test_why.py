"""Why a draw waits, as the command says it."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replaybuf import (
    NotReadyError,
    ReplayBufError,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutState,
    Status,
)
from replaybuf.buffer import wait_reports
from replaybuf.buffer.sync import run as sync_run
from replaybuf.produce import AsyncProduceStrategy, Sampler, TrainState, produce_loop, publish
from replaybuf.rules.diagnosis import Reason
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.reader import Transaction, open_reader
from replaybuf.storage.sql.inspection.wait_facts import current_waits, read_circumstances
from tests.cli.conftest import BACKENDS, run, run_json
from tests.pages import DOCS, compare
from tests.postgres import execute, new_database
from tests.produce.conftest import ScriptedLoop, forever, ledger_of
from tests.scripts import Script
from tests.stores import group

_PATIENCE = 120

Part = Callable[[ReplayBuffer], Awaitable[Any]]


@dataclass(frozen=True)
class Scene:
    """A buffer whose trainer waits for this reason: what the others do in it, and what is then said.

    `killed` is done by a producer that is killed later, `alive` by one that lives (and may wait itself), `rival` by
    another trainer, `before` by the trainer itself before it waits for `wants`. The answer has the text `says` in its
    first line, and names the cause `also` below.
    """

    reason: Reason
    says: str
    killed: Part | None = None
    alive: Part | None = None
    rival: Part | None = None
    before: Part | None = None
    wants: dict[str, int] = field(default_factory=lambda: {"math": 4})
    where: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    also: str = ""


def put(count: int, task: str = "math", status: Status = Status.COMPLETED, **details: Any) -> Part:
    """Put so many groups of one task."""

    async def part(buffer: ReplayBuffer) -> None:
        for number in range(count):
            rollouts = group(number, status=status)
            for rollout in rollouts:
                for name, value in details.items():
                    setattr(rollout, name, value)
            await buffer.put(rollouts, task, model_step=1, current_train_step=2)

    return part


async def _lease(buffer: ReplayBuffer) -> Any:
    return await buffer.lease_batch({"math": 4}, seconds=600, timeout=10)


async def _refresh(buffer: ReplayBuffer) -> None:
    await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=12)


async def _put_two_tasks(buffer: ReplayBuffer) -> None:
    await put(1, "code")(buffer)
    await put(3)(buffer)


async def _work(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, [{"prompt": "2 + 2"}], "math", prompt_repeat_k=1)
    await produce_loop(AsyncProduceStrategy(), ScriptedLoop(), sampler, 4, timeout=_PATIENCE)


async def _work_to_the_end(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, [{"prompt": f"2 + {number}"} for number in range(3)], "math", epochs=1)
    loop = ScriptedLoop(scripts={2: forever()})
    await produce_loop(AsyncProduceStrategy(), loop, sampler, 4, timeout=_PATIENCE)


async def _publish(buffer: ReplayBuffer) -> None:
    await publish(buffer, TrainState(1, 1))


async def _sample(buffer: ReplayBuffer) -> None:
    await buffer.sample({"math": 4}, timeout=10)


_GONE = "no producer is left: gen-2 was killed"

SCENES = [
    Scene(Reason.ABSENT, "nothing was ever put into this buffer"),
    Scene(Reason.NO_SUCH_TASK, "there is the task maths. See that", killed=put(4, "maths")),
    Scene(
        Reason.LEASED, "all 4 completed groups are leased by trainer-2 until", killed=put(4), rival=_lease, also=_GONE
    ),
    Scene(
        Reason.EXPIRED,
        "4 groups expired; the last refresh was to train step 12",
        killed=put(4),
        before=_refresh,
        also=_GONE,
    ),
    Scene(
        Reason.UNFIT,
        "4 of the 4 groups put failed; the last error: no such tool: calculator",
        killed=put(4, status=Status.FAILED, error_msg="no such tool: calculator"),
        also=_GONE,
    ),
    Scene(
        Reason.OTHER_STATUS,
        "4 groups are there, but of another status: 4 aborted",
        killed=put(4, status=Status.ABORTED),
        also=_GONE,
    ),
    Scene(
        Reason.NO_MATCH,
        '6 completed groups are there, but none matches {"reward": {"$gte": 3}}',
        killed=put(6),
        where={"reward": {"$gte": 3}},
        also=_GONE,
    ),
    Scene(
        Reason.HELD_BACK,
        "5 completed groups are there, but min_size is 8. Start the producers again",
        killed=put(5),
        options={"min_size": 8},
        also=_GONE,
    ),
    Scene(
        Reason.HELD_BACK,
        "5 completed groups are there, but samples_per_insert 1 allows 1 now: 5 were put and 4 drawn. "
        "Start the producers again, or widen error_buffer",
        killed=put(5),
        before=_sample,
        options={"max_times_sampled": 0, "samples_per_insert": 1.0, "error_buffer": (0, 100)},
    ),
    Scene(
        Reason.FINISHED,
        "(2 of 4): no prompt of math is left to draw: of the 3 drawn, 2 are finished, 1 in flight",
        alive=_work_to_the_end,
        before=_publish,
    ),
    Scene(Reason.ABSENT, _GONE, killed=put(1)),
    Scene(Reason.SLOW, "Too little is ready for math (1 of 4): ", alive=put(1)),
    Scene(
        Reason.DEADLOCK,
        "for code (1 of 2): gen-1 waits for room since",
        alive=_put_two_tasks,
        wants={"math": 2, "code": 2},
        options={"capacity": 2, "on_full": "block", "put_timeout": _PATIENCE},
    ),
    Scene(Reason.DEADLOCK, "deadlock: gen-1 waits for the trainer since", alive=_work),
    Scene(
        Reason.ABSENT,
        "the trainer has published nothing yet; nobody has drawn any yet. See that it runs.",
        alive=_work,
        wants={},
    ),
]


_SOME = (Reason.LEASED, Reason.UNFIT, Reason.FINISHED, Reason.SLOW, Reason.DEADLOCK)
#: Those of the short form, and of the long one.
SETS = {"some": [scene for scene in SCENES if scene.reason in _SOME], "all": SCENES}


def shuffled(set_name: str) -> dict[str, Scene]:
    """Return the scenes of a set by the names of their buffers, which tell nothing."""
    scenes = random.Random(set_name).sample(SETS[set_name], len(SETS[set_name]))
    return {f"run-{number}": scene for number, scene in enumerate(scenes)}


async def _wait(scene: Scene, buffer: ReplayBuffer) -> None:
    if scene.before is not None:
        await scene.before(buffer)
    if scene.wants:
        await buffer.take_batch(scene.wants, where=scene.where, timeout=_PATIENCE)


def _part(role: str, scene: Scene) -> Part | None:
    if role == "trainer-1":
        return lambda buffer: _wait(scene, buffer)
    return {"gen-1": scene.alive, "gen-2": scene.killed, "trainer-2": scene.rival}[role]


async def _play(role: str, url: str, set_name: str) -> None:
    async with AsyncExitStack() as stack:
        playing = []
        for name, scene in shuffled(set_name).items():
            if (part := _part(role, scene)) is not None:
                config = ReplayBufferConfig(url=url, name=name, worker=role, policy="fifo", **scene.options)
                playing.append(asyncio.ensure_future(part(await stack.enter_async_context(config.build()))))
        await asyncio.wait(playing, timeout=0.5)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in playing:
            task.cancel()
            with suppress(asyncio.CancelledError, ReplayBufError):
                await task


def play(role: str, url: str, set_name: str) -> None:
    asyncio.run(_play(role, url, set_name))


PAGE = DOCS / "looking.md"
_BLOCK = re.compile(r"(?ms)^(```console\n\$ replaybuf why run.db --buffer (\w+)\n).*?^```$")


@contextmanager
def playing(role: str, url: str, set_name: str) -> Iterator[Script]:
    """A process that does its part in all buffers; it ends with the block, if it lives so long."""
    process = Script("from tests.cli.test_why import play; play(*sys.argv[1:])", role, url, set_name)
    try:
        yield process
    finally:
        process.end()


def until_ready(*processes: Script) -> None:
    for process in processes:
        assert process.stdout.readline() == "ready\n"


def until(url: str, buffers: Iterable[str], holds: Callable[[Transaction, str], bool]) -> None:
    """Wait until something is to be seen in all these buffers."""
    reader, missing, deadline = open_reader(url), list(buffers), time.monotonic() + 60
    while missing := reader.read(lambda tx: [name for name in missing if not holds(tx, name)]):
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def has_put(tx: Transaction, buffer: str) -> bool:
    """Whether all that was put is counted as a worker's."""
    circumstances = read_circumstances(tx, buffer)
    put_count = sum(n for (_, _, name), n in circumstances.tallies.items() if name == Tally.PUT)
    return 0 < put_count == sum(worker.groups for worker in circumstances.workers)


def silence(url: str, worker: str, seconds: int = 600) -> None:
    """Let a worker that was killed, and its waits, be silent for ten minutes."""
    execute(url, f"UPDATE rb_worker SET seen_at = seen_at - {seconds} WHERE name = '{worker}'")


@contextmanager
def night(url: str, set_name: str) -> Iterator[dict[str, Scene]]:
    """A database in whose buffers somebody waits, and why, by the buffers' names."""
    scenes = shuffled(set_name)
    killed_names = [name for name, scene in scenes.items() if scene.killed]
    both_wait = [name for name, scene in scenes.items() if scene.reason == Reason.DEADLOCK]
    with ExitStack() as stack:
        victim, alive = (stack.enter_context(playing(role, url, set_name)) for role in ("gen-2", "gen-1"))
        until_ready(victim, alive)
        until(url, killed_names, has_put)
        victim.kill()
        silence(url, "gen-2")
        until_ready(stack.enter_context(playing("trainer-2", url, set_name)))
        until_ready(stack.enter_context(playing("trainer-1", url, set_name)))
        until(url, scenes, lambda tx, name: bool(current_waits(tx, name)))
        until(url, both_wait, lambda tx, name: len(current_waits(tx, name)) == 2)
        ended_names = [name for name, scene in scenes.items() if scene.reason == Reason.FINISHED]
        until(url, ended_names, lambda tx, name: bool(read_circumstances(tx, name).datasets))
        yield scenes


@pytest.mark.parametrize(
    ("backend", "which"), [("sqlite", "some"), *(pytest.param(db, "all", marks=pytest.mark.long) for db in BACKENDS)]
)
def test_the_reason_is_named_in_the_first_line(
    backend: str, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path}/run.db"
        if backend == "postgres":
            url = stack.enter_context(new_database(request.getfixturevalue("postgres_url")))
        scenes = stack.enter_context(night(url, which))
        answers = {name: run("why", url, "--buffer", name).stdout for name in scenes}
        for name, scene in scenes.items():
            first, *below = answers[name].splitlines()
            assert scene.says in first, (scene.reason, answers[name])
            assert scene.also in "\n".join(line for line in below if line.startswith("  also: ")), answers[name]
            assert first.startswith("trainer-1 has waited for" if scene.wants else "gen-1 has waited for")
        for name, text in asyncio.run(refusals(url, scenes)).items():
            assert scenes[name].says in text.partition(f"; task {next(iter(scenes[name].wants))}:")[0], text
        reasons = {row["buffer"]: row["reason"] for answer in run_json("why", url) for row in answer["waits"][:1]}
        assert reasons == {name: scene.reason for name, scene in scenes.items()}
        if backend == "sqlite":
            check_page({scene.reason: answers[name] for name, scene in scenes.items() if scene.reason == Reason.LEASED})


async def refusals(url: str, scenes: Mapping[str, Scene]) -> dict[str, str]:
    """The errors of another trainer that wants the same, for a moment."""
    texts = {}
    for name, scene in scenes.items():
        if scene.wants:
            config = ReplayBufferConfig(url=url, name=name, worker="trainer-3", policy="fifo", **scene.options)
            async with config.build() as buffer:
                with pytest.raises(NotReadyError) as error:
                    await buffer.take_batch(scene.wants, where=scene.where, timeout=0.05)
            texts[name] = str(error.value)
    return texts


def check_page(answers: Mapping[Reason, str]) -> None:
    """docs/looking.md shows these answers. `REPLAYBUF_TEST_UPDATE_DOCS=1` writes them anew."""
    for block in _BLOCK.finditer(PAGE.read_text("utf-8")):
        compare(PAGE, block[0], f"{block[1]}{answers[Reason(block[2])]}```", lines_of)


def lines_of(answer: str) -> list[str]:
    """Return what is the same at any time; rates, pids and the order of workers aren't, nor who is idle."""
    for pattern in (r"\d\d:\d\d:\d\d UTC", r"\b[\d.]+[smhd]\b"):
        answer = re.sub(pattern, "TIME", answer)
    lines = (" ".join(line.replace("─", "").split()) for line in answer.splitlines())
    lines = (re.sub(r"^(\S+) \d+ (alive|silent|ended) ", r"\1 \2 ", line) for line in lines)
    return sorted(line for line in lines if line and not line.startswith(("math ", "maths ", "code ")))


def test_every_reason_is_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert [reason for reason in Reason if f"`{reason}`" not in page] == []


def test_where_nobody_waits_it_is_about_a_draw_now(filled: str) -> None:
    first = run("why", filled).stdout.splitlines()[0]
    assert first == "If somebody drew now: Ready: 3 completed groups of code and 8 of math can be drawn."
    assert run("why", filled, "code").stdout.count("If somebody") == 1


def test_the_last_timeout_is_the_last_line(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing was ever put, and after a draw."""
    monkeypatch.setattr(wait_reports, "SHOW_SECONDS", 0.1)
    put_one(shared_url, "gen-1", name="first")
    later = ReplayBufferConfig(url=shared_url, name="later", worker="trainer-1")
    with later.build_sync() as buffer, pytest.raises(NotReadyError):
        buffer.take_batch({"math": 4}, timeout=0.2)
    first, *_, last = run("why", shared_url, "--buffer", "later").stdout.splitlines()
    assert first.startswith("If somebody drew now: Nothing is ready for any task")
    pattern = r"last timeout: trainer-1, \d+s ago, after \d+s of waiting for groups: Nothing is ready for math .*"
    assert re.fullmatch(pattern, last), last
    assert "nothing was ever put into this buffer" in last
    assert run("why", shared_url).stdout.count("last timeout: trainer-1") == 1
    wait, other = run_json("why", shared_url)
    assert (wait["buffer"], wait["last_timeout"]) == ("first", None)
    assert (other["last_timeout"]["worker"], other["last_timeout"]["task_name"]) == ("trainer-1", "math")
    put_one(shared_url, "trainer-1", name="later")
    with later.build_sync() as buffer:
        buffer.take_batch({"math": 1})
    lines = run("why", shared_url, "--buffer", "later").stdout.splitlines()
    assert re.fullmatch(pattern, lines[-1]), lines
    assert re.search(r"^trainer-1 +\d.* 0 +1$", "\n".join(lines), re.M)  # its last life


_WAITS = """
async def main():
    buffer = ReplayBufferConfig(url=sys.argv[1], worker="trainer-1").build()
    await buffer.put(group(1), "math")
    print("ready", flush=True)
    await buffer.take_batch({"math": 4}, timeout=60)

asyncio.run(main())
"""


def test_a_waiter_that_was_killed_is_silent_everywhere(shared_url: str) -> None:
    """Its wait isn't shown any more, at once on its own machine, elsewhere after its last heartbeat."""
    process = Script(_WAITS, shared_url)
    until_ready(process)
    until(shared_url, ["default"], lambda look, name: bool(current_waits(look, name)))
    process.kill()
    assert run("why", shared_url).stdout.startswith("If somebody drew now: ")
    assert re.search(r"^trainer-1 +\d+ +silent ", run("why", shared_url).stdout, re.M)
    silence(shared_url, "trainer-1", 20)
    output = run("why", shared_url).stdout
    assert output.startswith("If somebody drew now: ")
    assert re.search(r"^trainer-1 +\d+ +silent ", output, re.M)


def test_workers_of_one_name_are_told_apart(shared_url: str) -> None:
    """By their pids, and by their hosts where these differ. On another machine nobody knows who was killed."""
    put_one(shared_url, "gen-1")
    elsewhere = "UPDATE rb_worker SET ended_at = NULL, seen_at = seen_at - 30, pid = 999999999, machine = 'elsewhere'"
    execute(shared_url, elsewhere)
    put_one(shared_url, "gen-1")
    output = run("why", shared_url).stdout
    assert re.search(rf"^gen-1 +{os.getpid()} +ended +.*\ngen-1 +999999999 +alive +3\ds ago ", output, re.M)
    assert "host" not in output
    execute(shared_url, "UPDATE rb_worker SET host = 'gpu-7' WHERE pid = 999999999")
    assert re.search(r"^gen-1 +999999999 +gpu-7 +alive ", run("why", shared_url).stdout, re.M)
    states = {row["pid"]: row["state"] for row in run_json("why", shared_url)[0]["workers"]}
    assert states == {os.getpid(): "ended", 999999999: "alive"}


def put_one(url: str, worker: str, **options: Any) -> None:
    with ReplayBufferConfig(url=url, worker=worker, **options).build_sync() as buffer:
        buffer.put(group(1), "math")


def test_a_draw_may_be_asked_for(filled: str) -> None:
    first = run("why", filled, "math", "--size", 64).stdout.splitlines()[0]
    assert "Too little is ready for math (8 of 64)" in first
    first = run("why", filled, "math", "--where", '{"reward": {"$gt": 5}}').stdout.splitlines()[0]
    assert "8 completed groups are there, but none matches" in first
    first = run("why", filled, "maht").stdout.splitlines()[0]
    assert first.endswith("See that the producers put under this name.")
    [line] = [line for line in run("why", filled, "--size", 64).stdout.splitlines() if "no producer is left" in line]
    assert "Too little is ready for code (3 of 64) and math (8 of 64): no producer is left" in line


def test_each_buffer_is_explained(busy: str) -> None:
    output = run("why", busy).stdout
    assert "If somebody drew now of default: Ready" in output
    assert "If somebody drew now of eval: Ready" in output
    assert "there is no buffer 'test'" in run("why", busy, "--buffer", "test", code=1).stderr


def test_who_leases_groups_is_below(busy: str) -> None:
    first, *below = run("why", busy, "--buffer", "default", "--size", 3).stdout.splitlines()
    assert "more completed group" in first
    assert any("leased by" in line for line in below)
    assert any(re.search(r" in (1\.0h|\d+m)$", line) for line in below)


def test_json_has_the_facts_and_the_tasks(filled: str) -> None:
    answer = run_json("why", filled, "math", "--size", 64)[0]
    assert answer["somebody_waits"] is False
    assert answer["waits"][0]["facts"][0]["text"] == "task math: 8 completed groups there, 64 needed (1 expired)"
    assert {row["task_name"]: row["completed"] for row in answer["tasks"]} == {"math": 8}


def test_a_run_whose_trainer_was_killed_begins_with_since_when_nobody_draws(tmp_path: Path) -> None:
    """A trainer that ended by itself is no cause to look into, and a question about one draw is answered alone."""
    url = f"sqlite:///{tmp_path}/run.db"
    with ReplayBufferConfig(url=url, worker="trainer").build_sync() as buffer:
        for number in range(2):
            buffer.put(group(number), "math")
        buffer.take_batch({"math": 1}, current_train_step=1)
    assert run("why", url).stdout.startswith("If somebody drew now: Ready: ")
    execute(url, "UPDATE rb_worker SET ended_at = NULL, seen_at = seen_at - 65")
    first, second, *_ = run("why", url).stdout.splitlines()
    assert re.fullmatch(r"Nobody draws; trainer gave its last sign of life 1\.\dm ago", first)
    assert second.startswith("If somebody drew now: Ready: ")
    assert run("why", url, "--size", "1").stdout.startswith("If somebody drew now: Ready: ")
    assert "last drawn: 1 group by trainer" in run("why", url).stdout


def test_prompts_to_be_generated_are_apart_from_what_was_made(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        data = [RolloutState(message=[{"role": "user", "content": "1 + 1 ="}])]
        [prompt] = sync_run(ledger_of(buffer, data, "math", make_group=lambda prompt_group, _: [prompt_group]).draw(1))
        prompt.group[0].response, prompt.group[0].status = "2", Status.COMPLETED
        sync_run(prompt.finish())
        buffer.take_batch({"math": 1})
    [answer] = run_json("why", url)
    [task] = answer["tasks"]
    assert (task["prompts"], task["made"], task["drawn"]) == (1, 1, 1)


async def _wait_together(url: str) -> str:
    """Return what the command says while three processes' buffers wait for the same, one of them twice."""
    async with AsyncExitStack() as stack:
        configs = [ReplayBufferConfig(url=url, worker=f"trainer-{number}") for number in range(3)]
        buffers = [await stack.enter_async_context(config.build()) for config in configs]
        await asyncio.to_thread(put_one, url, "gen-1")
        waiting = [*buffers, buffers[0]]
        draws = [asyncio.create_task(buffer.take_batch({"math": 4}, timeout=600)) for buffer in waiting]
        all_wait = lambda look, name: len(current_waits(look, name)) == len(waiting)  # noqa: E731
        await asyncio.to_thread(until, url, ["default"], all_wait)
        result = await asyncio.to_thread(run, "why", url)
        for draw in draws:
            draw.cancel()
        await asyncio.wait(draws)
        return str(result.stdout)


def test_those_who_wait_for_one_cause_share_a_line(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_reports, "SHOW_SECONDS", 0.1)
    output = asyncio.run(_wait_together(shared_url))
    waiters = r"trainer-0 \(2 calls\), trainer-1 and trainer-2 have waited for \d+s"
    assert re.match(rf"{waiters}: Too little is ready for math \(1 of 4\)", output), output
    assert output.count("Too little is ready") == 1
