"""`replaybuf show`."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replaybuf import ReplayBufferConfig
from tests.cli.conftest import run, run_json


def test_json_holds_the_group_and_its_rollouts(filled: str) -> None:
    group = run_json("show", filled, 15)
    assert (group["uid"], group["task_name"], group["tags"]) == (15, "math", {"level": 1})
    assert [row["position"] for row in group["rollouts"]] == [0, 1, 2, 3]
    assert [row["rollout_id"] for row in group["rollouts"]] in ([60, 61, 62, 63], ["60", "61", "62", "63"])


def test_lines_are_the_rollouts(filled: str) -> None:
    lines = run("show", filled, 15, "--nl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == run_json("show", filled, 15)["rollouts"]


def test_people_see_the_prompt_and_every_rollout(filled: str) -> None:
    shown = run("show", filled, 15).stdout
    assert "Find all primes p such that p^2 + 15 is a perfect square." in shown
    assert shown.count("The answer is") == 4


def test_full_shows_every_message_with_its_lines(filled: str) -> None:
    shown = run("show", filled, 15, "--full").stdout
    assert "[system]\nThink step by step.\n[user]\nFind all primes" in shown
    assert shown.count("[system]") == 1
    assert shown.count("Let us see.\n\n") == 4


@dataclass
class Sample:
    question: str
    answer: str
    tokens: list[int]
    turns: list[dict[str, str]]


async def test_full_shows_the_fields_of_a_class_with_other_names(tmp_path: Path) -> None:
    fields = {"prompt": "question", "response": "answer"}
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path / 'run.db'}", rollout_type=Sample, fields=fields)
    async with config.build() as buffer:
        uid = await buffer.put([Sample("3+4=", "7", [1] * 64, [{"role": "tool", "content": "ok"}])], "math")
    shown = run("show", tmp_path / "run.db", uid, "--full").stdout
    assert "\n[question]\n3+4=\n[answer]\n7\n[tokens]\n64 numbers\n[turns]\n[tool]\nok\n" in shown
    assert "(none)" not in shown


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

    async def fill() -> None:
        async with ReplayBufferConfig(url=url, rollout_type=dict).build() as buffer:
            for value in values:
                await buffer.put([{"message": value, "response": value, "error_msg": value}] * 2, "t")

    asyncio.run(fill())
    shown = [run("show", url, uid, "--full").stdout for uid in (1, 2, 3)]
    assert "array([0., 0.])" in shown[0]
    assert "{('a', 1): 2}" in shown[1]
    assert "array([1., 1., 1.])" in shown[2]


def test_a_group_that_is_not_there_is_an_error(filled: str) -> None:
    stderr = run("show", filled, 9999, code=1).stderr
    assert stderr.startswith("Error: there is no group 9999")


def test_a_uid_that_is_no_number_is_a_usage_error(file: Path) -> None:
    assert "whole number" in run("show", file, "abc", code=2).stderr


def test_a_uid_beyond_64_bits_is_not_there(filled: str) -> None:
    assert "there is no group" in run("show", filled, 10**30, code=1).stderr


def test_a_damaged_payload_is_an_error_only_with_full(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("UPDATE rb_payload SET data = x'00'")
    connection.commit()
    connection.close()
    run("show", file, 15)
    assert "damaged" in run("show", file, 15, "--full", code=1).stderr


def test_the_variable_leaves_only_the_uid_to_give(file: Path) -> None:
    shown = run("show", 15, env={"REPLAYBUF_URL": str(file)})
    assert shown.stdout == run("show", file, 15).stdout


def test_without_a_uid_there_is_a_usage_error(file: Path) -> None:
    assert "UID" in run("show", file, code=2).stderr
    assert "UID" in run("show", code=2, env={"REPLAYBUF_URL": str(file)}).stderr


def test_a_leased_group_says_so(busy: str) -> None:
    leased, over = [row["uid"] for row in run_json("ls", busy) if row["leased_until"]]
    shown = run("show", busy, leased).stdout
    assert re.search(r"(?m)^  buffer        default$", shown)
    assert re.search(r"(?m)^  leased        until \S+Z \(in (1.0h|60m)\)$", shown)
    assert re.search(r"(?m)^  deliveries    1$", shown)
    assert re.search(r"(?m)^  leased        until \S+Z \(over \d+s ago\)$", run("show", busy, over).stdout)


def test_an_archived_group_says_so(busy: str) -> None:
    [uid] = [row["uid"] for row in run_json("ls", busy, "--status", "archived")]
    assert re.search(r"(?m)^  archived      \S+Z \(\d+s ago\)$", run("show", busy, uid).stdout)


def test_of_one_buffer_its_name_is_not_shown(filled: str) -> None:
    assert not re.search(r"(?m)^  (buffer|leased|deliveries|archived) ", run("show", filled, 15).stdout)
