"""`replaybuf show`."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.sql.inspection import group_queries
from tests.cli.conftest import run, run_json, run_on_screen
from tests.cli.example import HOSTILE
from tests.cli.terminal import SIZES, needs_tmux, terminal
from tests.cli.test_help import UNSAFE
from tests.postgres import execute
from tests.stores import TASK, group
from tests.web.conftest import client_of


def test_full_shows_every_message_with_its_lines(filled: str) -> None:
    output = run("show", filled, 15, "--full").stdout
    assert "[system]\nThink step by step.\n[user]\nFind all primes" in output
    assert output.count("[system]") == 1
    assert output.count("Let us see.\n\n") == 4


@dataclass
class Sample:
    question: str
    answer: str
    score: float
    tokens: list[int]
    turns: list[dict[str, str]]


def test_the_fields_of_a_class_with_other_names_are_shown(tmp_path: Path) -> None:
    fields = {"prompt": "question", "response": "answer", "reward": "score"}
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path / 'run.db'}", rollout_type=Sample, fields=fields)
    with config.build_sync() as buffer:
        turns = [{"role": "tool", "content": "ok"}]
        uid = buffer.put(
            [Sample("3+4=", answer, score, [1] * 64, turns) for answer, score in (("7", 1.0), ("8", 0.0))], "math"
        )
    output = run("show", tmp_path / "run.db", uid, "--full").stdout
    assert "\nprompt\n[prompt]\n3+4=\n" in output
    assert '[answer]\n7\n[score]\n1.0\n[tokens]\n64 numbers\n[turns]\n[{"role": "tool", "content": "ok"}]\n' in output
    output = run("show", tmp_path / "run.db", "--worst", 2).stdout
    assert re.findall(r"(?m)^3\+4=$", output) == ["3+4="] * 2
    assert re.findall(r"(?m)^[78]$", output) == ["8", "7"]


def test_segments_say_which_one_they_continue(tmp_path: Path) -> None:
    with ReplayBufferConfig(url=f"sqlite:///{tmp_path / 'run.db'}").build_sync() as buffer:
        group = [RolloutState(message=[], response=text, status=Status.COMPLETED) for text in "abcd"]
        buffer.put([[*group[:3]], group[3]], "math", parents=[None, 0, 0, None])
    output = run("show", tmp_path / "run.db", 1).stdout
    assert re.findall(r"(?m)^ *(└ \d|\d) +(\d|-)", output) == [("0", "-"), ("└ 1", "0"), ("└ 2", "0"), ("3", "-")]
    assert re.findall(r"rollouts +(\d)", output) == ["2"]
    full = run("show", tmp_path / "run.db", 1, "--full").stdout
    titles = ["rollout 0", "└ 1, after 0", "└ 2, after 0", "rollout 3"]
    assert re.findall(r"(?m)^(rollout \d|└ \d, after \d)", full) == titles
    rows = run_json("show", tmp_path / "run.db", 1)["rollouts"]
    assert [(row["rollout"], row["parent"]) for row in rows] == [(0, None), (0, 0), (0, 0), (1, None)]


def test_full_json_holds_all_fields(filled: str) -> None:
    first = run_json("show", filled, 15, "--full")["rollouts"][0]
    assert first["message"][0] == {"role": "system", "content": "Think step by step."}
    assert first["extra_fields"] == {"grader": "exact"}
    assert len(first["response_ids"]) == first["response_tokens"]


def test_full_shows_an_expired_rollout_without_its_response(filled: str) -> None:
    [uid] = [row["uid"] for row in run_json("ls", filled, "--status", "expired", "--task", "math", "--limit", 1)]
    rollouts = run_json("show", filled, uid, "--full")["rollouts"]
    assert [(row["status"], row["response"]) for row in rollouts] == [("expired", "")] * 4


def test_full_shows_values_of_any_kind(tmp_path: Path) -> None:
    values = [np.zeros(2), {("a", 1): 2}, [{"role": np.zeros(2), "content": np.ones(2), "name": np.ones(3)}]]
    url = f"sqlite:///{tmp_path / 'odd.db'}"
    with ReplayBufferConfig(url=url, rollout_type=dict).build_sync() as buffer:
        for value in values:
            buffer.put([{"message": value, "response": value, "error_msg": value}] * 2, "t")
    outputs = [run("show", url, uid, "--full").stdout for uid in (1, 2, 3)]
    assert "\n[0.0, 0.0]\n" in outputs[0]
    assert "{('a', 1): 2}" in outputs[1]
    assert "[1.0, 1.0, 1.0]" in outputs[2]


def test_a_damaged_payload_is_an_error_only_with_full(file: Path) -> None:
    """Nor does `ls` read any."""
    execute(file, "UPDATE rb_payload SET data = x'00'")
    run("show", file, 15)
    assert len(run_json("ls", file)) == 13
    error = run("show", file, 15, "--full", code=1).stderr
    assert error.startswith("Error: group 15: ")
    assert error.endswith("(without --full its metadata can be shown)\n")


def test_a_damaged_group_is_named_once_wherever_it_is_shown(file: Path) -> None:
    execute(file, "DELETE FROM rb_payload")
    sentence = "group 15: its payload is missing"
    assert run("show", file, 15, "--full", code=1).stderr.startswith(f"Error: {sentence} (without")
    text = client_of(str(file)).get("/groups/15").text
    assert sentence in text
    assert f"group 15: {sentence}" not in text
    assert "--full" not in text


def test_a_damaged_group_among_the_worst_leaves_the_others(file: Path) -> None:
    first, *others = [row["uid"] for row in run_json("show", file, "--worst", 3, "--task", "math")]
    execute(file, f"UPDATE rb_payload SET data = x'00' WHERE uid = {first}")
    result = run("show", file, "--worst", 3, "--task", "math")
    assert re.match(rf"group {first}: .* damaged.*; its answers are left out\n", result.stderr)
    assert result.stdout.count("The answer is") == len(others)


def test_a_leased_group_says_so(busy: str) -> None:
    leased, over = [row["uid"] for row in run_json("ls", busy) if row["leased_until"]]
    output = run("show", busy, leased).stdout
    assert re.search(r"(?m)^  buffer        default$", output)
    assert re.search(r"(?m)^  leased        until \S+Z \(in (1.0h|60m)\)$", output)
    assert re.search(r"(?m)^  deliveries    1$", output)
    assert re.search(r"(?m)^  leased        until \S+Z \(over \d+s ago\)$", run("show", busy, over).stdout)


def test_a_group_says_who_made_it_and_rewards_have_their_parts(tmp_path: Path) -> None:
    rollout = RolloutState(message=[], response="a", reward={"score": 0.5, "format": 1.0}, status=Status.COMPLETED)
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", worker="rollout-3")
    with config.build_sync() as buffer:
        buffer.put([rollout], "math", model_step=3, current_train_step=5)
    output = run("show", tmp_path / "run.db", 1, "--full").stdout
    assert re.search(r"(?m)^  made by       rollout-3$", output)
    assert re.search(r"(?m)^  put for step  5$", output)
    assert "reward=0.500 (score 0.5, format 1)" in output


def test_the_worst_and_the_best_answers_of_a_task_are_found(filled: str) -> None:
    for option, reward in (("--worst", 0.0), ("--best", 1.0)):
        rows = run_json("show", filled, option, 3, "--task", "math")
        assert [row["reward"] for row in rows] == [{"score": reward}] * 3
    output = run("show", filled, "--best", 3, "--task", "math").stdout
    assert output.count("The answer is") == 3
    assert "code" not in output


def test_an_answer_whose_group_has_left_meanwhile_is_left_out(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = group_queries.extremes_matching
    monkeypatch.setattr(
        group_queries, "extremes_matching", lambda *args, **options: [(4711, 0), *places(*args, **options)]
    )
    result = run("show", filled, "--worst", 3, "--task", "math")
    assert result.stdout.count("The answer is") == 3
    assert re.match(r"there is no group 4711 in .*; its answers are left out\n", result.stderr)


def test_of_equal_answers_one_of_each_group_comes_first_and_the_newest(tmp_path: Path) -> None:
    with ReplayBufferConfig(url=f"sqlite:///{tmp_path / 'run.db'}").build_sync() as buffer:
        for _ in range(3):
            buffer.put([RolloutState(message=[], response="no", reward=0.0, status=Status.COMPLETED)] * 2, "math")
    output = run("show", tmp_path / "run.db", "--worst", 4).stdout
    titles = re.findall(r"group (\d), math, by \S+, rollout (\d)", output)
    assert titles == [("3", "0"), ("2", "0"), ("1", "0"), ("3", "1")]


def test_the_worst_answer_is_found_behind_many_groups_without_completed_ones(tmp_path: Path) -> None:
    """As dynamic sampling filters them."""
    with ReplayBufferConfig(url=f"sqlite:///{tmp_path / 'run.db'}").build_sync() as buffer:
        for status, count, reward in ((Status.FILTERED, 130, 0.0), (Status.COMPLETED, 1, 0.5)):
            for _ in range(count):
                buffer.put([RolloutState(message=[], response="no", reward=reward, status=status)], "math")
    [row] = run_json("show", tmp_path / "run.db", "--worst", 1)
    assert row["reward"] == 0.5


def test_the_worst_answer_is_found_behind_many_groups_with_lower_ones_that_are_not_completed(shared_url: str) -> None:
    with ReplayBufferConfig(url=shared_url).build_sync() as buffer:
        rollouts = [(0.3, 0.9, Status.COMPLETED), *[(0.8, 0.0, Status.ABORTED)] * 130]
        for reward, other, status in rollouts:
            group = [RolloutState(message=[], response="x", reward=reward, status=Status.COMPLETED)]
            buffer.put([*group, RolloutState(message=[], response="y", reward=other, status=status)], "math")
    assert [row["reward"] for row in run_json("show", shared_url, "--worst", 2)] == [0.3, 0.8]


def test_the_worst_answers_of_groups_that_match_are_found(filled: str) -> None:
    query = '{"uid": {"$in": [9, 10]}}'
    output = run("show", filled, "--worst", 3, "--where", query).stdout
    assert {*map(int, re.findall(r"prompt of group (\d+)", output))} == {9, 10}
    assert re.search(r"(?m)^group (9|10), math, by gpu-node-7, rollout ", output)


@needs_tmux
async def test_a_line_of_a_megabyte_is_shown_in_a_terminal(tmp_path: Path) -> None:
    texts = ["x" * 1_000_000, f"{HOSTILE}\x00\ud800 end"]
    group = [
        RolloutState(message=[{"role": "user", "content": HOSTILE}], response=text, reward=0, status=Status.COMPLETED)
        for text in texts
    ]
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db").build() as buffer:
        await buffer.put(group, HOSTILE)
    with terminal(tmp_path) as screen:
        screen.start(SIZES[0], "show", tmp_path / "run.db", "--worst", 2)
        text = await asyncio.to_thread(screen.wait, "ended with 0")
        assert "998,000 more" in text
        assert not [character for character in UNSAFE if character in text]
        assert screen.tmux("display-message", "-p", "#{pane_title}").strip() != "owned"


def test_groups_of_every_status_are_shown(file: Path) -> None:
    for status in Status:
        condition = "WHERE id = (SELECT lane FROM rb_group WHERE uid = 15)"
        execute(file, f"UPDATE OR REPLACE rb_lane SET status = '{status}' {condition}")
        assert re.search(rf"(?m)^  status +{status}$", run("show", file, 15).stdout)


def test_rollouts_of_groups_that_fill_say_which_and_where(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for name, size, index in (("a", 4, 1), ("b", 3, 0), ("b", 3, 1), ("b", 3, 2)):
            buffer.put(group(index, 1), "math", group=name, size=size, index=index)
    assert re.findall(r"(?m)(\d) +math +\w+ +(a \d/\d|-)", run("ls", url).stdout) == [("1", "a 2/4"), ("4", "-")]
    assert re.search(r"(?m)^  rollout of +a 2/4$", run("show", url, 1).stdout)
    missing = said(url, ("show", "2"), code=1)
    assert "gone: replaced by group 4" in missing
    assert KEEPS not in missing
    page = client_of(url)
    assert "a 2/4" in page.get("/groups").text
    assert "a 2/4" in page.get("/groups/1").text
    assert "It was replaced by" in page.get("/groups/2").text
    assert re.search(r"replaces +group 2, group 3$", run("trace", url, "uid", 4).stdout, re.M)


def test_headings_are_wrapped_at_words(url: str) -> None:
    with ReplayBufferConfig(url=url, worker="gpu-node-7").build_sync() as buffer:
        buffer.put([RolloutState(message=[], response="7", finish_reason="stop", reward=0.25)], TASK, model_step=12345)
    output = re.sub(r"\x1b\[[0-9;]*m", "", run_on_screen(40, "show", url, "--worst", 1))
    assert max(map(len, output.splitlines())) <= 40
    assert {"reward=0.250", "step=12345", "finish=stop"} <= set(output.split())


# Without an archive the texts of groups that were trained on are gone: the command says so, and what keeps them


KEEPS = "archive= in the config of the trainer says how many are kept"


def train(url: str, **options: Any) -> None:
    """Train on two of three groups."""
    with ReplayBufferConfig(url=url, **options).build_sync() as buffer:
        buffer.put_many([group(number) for number in range(3)], TASK)
        buffer.take_batch({TASK: 2}, current_train_step=7)


STEP = ("trace", "step", "7")
COMMANDS = (STEP, ("trace", "uid", "1"))


def said(url: str, command: tuple[str, ...], code: int = 0) -> str:
    name, *rest = command
    result = run(name, url, *rest, code=code)
    return " ".join((result.stdout + result.stderr).split())


def test_every_command_that_would_show_them_says_so(url: str) -> None:
    train(url)
    for command in COMMANDS:
        assert KEEPS in said(url, command), command
    assert "2 of them are gone, and their texts" in said(url, STEP)
    missing = said(url, ("show", "1"), code=1)
    assert "there is no group 1 in" in missing
    assert "gone: trained on" in missing
    assert KEEPS in missing


def test_with_an_archive_there_is_nothing_to_say(url: str) -> None:
    train(url, archive=10)
    for command in (*COMMANDS, ("show", "1")):
        assert KEEPS not in said(url, command), command


@pytest.mark.parametrize("fields", ["extra_fields", None])
def test_arrays_times_and_images_of_users_are_described(tmp_path: Path, fields: str | None) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (16, 24))
    own = {
        "experts": np.zeros((32, 16), np.float32),
        "many": np.zeros(3000, np.int64),
        "few": np.arange(3),
        "half": np.float16(1.5),
        "when": datetime(2026, 1, 2, 3, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "seen": [{"image": image}],
    }
    phrases = (
        "float32 (32, 16)",
        "int64 (3000,)",
        "[0, 1, 2]",
        "1.5",
        "2026-01-02T03:00:00+00:00",
        "2026-01-02",
        "RGB 16x24",
    )
    url = f"sqlite:///{tmp_path}/run.db"
    with ReplayBufferConfig(url=url, rollout_type=dict).build_sync() as buffer:
        fields_known = {"message": [{"role": "user", "content": "q"}], "response": "a"}
        rollout = {**fields_known, "extra_fields": own} if fields else own
        buffer.put([rollout | {"status": "completed"}], "math")
    output = run("show", url, 1, "--full").stdout
    words = " ".join(output.split()).replace("[ 0", "[0").replace("2 ]", "2]")
    assert [phrase for phrase in phrases if phrase not in words] == []
    assert not re.search(r"array\(|datetime|PIL|\\\\n", output)
