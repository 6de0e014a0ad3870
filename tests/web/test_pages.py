"""What the pages show, on both databases."""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import re
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from benchmarks.million import fill_many
from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.common.worker_name import working_as
from replaybuf.storage.sql.engine.sqlite_raw import RawConnection
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.view.overview import Minute, rates_now
from replaybuf.web import page_tables as tables
from tests.postgres import ask, execute
from tests.stores import group, until
from tests.web.conftest import FAILED_EVERY, GROUPS, HOSTILE_UID, LONG_UID, SCRIPT, Client, client_of

PATHS = (
    "/",
    "/groups",
    "/groups/1",
    "/steps",
    "/steps/401",
    "/workers",
)


def read(page: Client, path: str, status: int = 200, **parameters: object) -> str:
    answer = page.get(f"{path}?{urlencode(parameters)}" if parameters else path)
    assert answer.status_code == status, answer.text
    return html.unescape(answer.text)


def test_prometheus_gets_metrics(page: Client) -> None:
    answer = page.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert re.search(r'^replaybuf_\w+\{.*task="math".*\} \d', answer.text, re.M)


def test_overview_says_who_waits_and_why(page: Client) -> None:
    text = read(page, "/")
    assert re.search(r"<strong>trainer:1</strong> waits for\s+groups \(640 of math\)", text)
    assert re.search(r"\b65 completed groups there, 640 needed", text)


def test_overview_counts_groups_by_task_and_status(page: Client) -> None:
    tasks = {task["task_name"]: task for task in page.data("overview")["tasks"]}
    assert tasks["code"]["failed"] == len(range(1, GROUPS, FAILED_EVERY))
    assert tasks["math"]["completed"] == GROUPS // 2


def test_overview_tells_expired_groups_from_those_that_ever_expired(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for number in range(3):
            buffer.put(group(number), "math", model_step=1, current_train_step=1, stale_threshold=2)
        buffer.refresh_staleness(task_stale_thresholds={"math": 2}, current_train_step=9)
        buffer.delete({"uid": {"$lte": 2}})
    [task] = client_of(url).data("overview")["tasks"]
    assert (task["expired"], task["expired_so_far"]) == (1, 3)


def test_overview_plots_rates_and_draws(page: Client) -> None:
    text = read(page, "/")
    for title in ("Groups a minute", "Groups by status", "Reward of draws", "Staleness of draws"):
        assert f"<figcaption>{title}" in text
    assert '<polyline class="line s0"' in text


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Of a run that put 3 groups before a minute was noted, and 69 after it, and ended 20 minutes ago."""
    url = f"sqlite:///{tmp_path_factory.mktemp('ended')}/run.db"

    async def noted() -> bool:
        return bool(open_reader(url).read(lambda tx: tx.value("SELECT count(*) FROM rb_history")))

    async def run() -> None:
        async with ReplayBufferConfig(url=url, worker="gen-1").build() as buffer:
            for number in range(72):
                if number == 3:
                    await until(noted, 30)
                await buffer.put(group(number), "math")

    asyncio.run(run())
    execute(url, "UPDATE rb_worker SET seen_at = seen_at - 1200, ended_at = ended_at - 1200")
    execute(url, "UPDATE rb_history SET since = since - 1200")
    return client_of(url)


def test_a_run_that_ended_has_no_rates_and_is_not_live(ended: Client) -> None:
    text = read(ended, "/")
    assert re.search(r"<dt[^>]*>put a minute</dt><dd>0(\.0)?</dd>", text)
    assert re.search(r"No process has a buffer open:\s+run ended 20m ago\.", text)
    button = re.compile(r'<button[^>]* data-idle="run ended 20m ago"[^>]*>run ended 20m ago</button>')
    assert all(button.search(read(ended, path)) for path in ("/", "/steps", "/workers"))


@pytest.mark.parametrize(
    ("puts", "expected"),
    [
        ([(0, 0), (100, 1000), (130, 1010), (160, 1020)], 20),
        ([(0, 0), (20, 900), (200, 900)], 0),  # the run is over
        ([(100, 10), (110, 10)], None),  # of a young run, which put 10 before it was read first
        ([], None),
        ([(0, 500), (60, 20)], 0),  # a restore
    ],
)
def test_the_rate_now_is_that_since_a_minute_ago(puts: list[tuple[float, int]], expected: float | None) -> None:
    history = [Minute(datetime.fromtimestamp(time, UTC), {}, put_count, 0) for time, put_count in puts]
    rate = rates_now(history)
    assert (None if rate is None else rate.put) == expected


def test_a_run_without_a_sign_of_life_is_not_live(url: str) -> None:
    """Of an idle one, too, that is heard of every 30 s: it is live until it has been silent for a minute."""
    with ReplayBufferConfig(url=url, worker="gen-1").build_sync() as buffer:
        buffer.put(group(1), "math")
    page = client_of(url)
    execute(url, "UPDATE rb_worker SET ended_at = NULL, seen_at = seen_at - 32")
    assert ">live</button>" in read(page, "/")
    execute(url, "UPDATE rb_worker SET seen_at = seen_at - 40")
    assert re.search(r">last sign of life 1\.\dm ago</button>", read(page, "/"))
    text = read(page, "/workers")
    assert re.search(r"Nobody waits: last sign of life 1\.\dm ago\.", text)
    assert 'class="reason"' not in text


def test_plots_end_with_what_there_is_now(ended: Client) -> None:
    """Also where the last minute was noted before the last groups came: as many as the tile says."""
    text = read(ended, "/")
    assert "<dt>groups to draw</dt><dd>72</dd>" in text
    assert re.search(r'aria-label="Groups by status; at the end: completed 72"', text)
    assert re.search(r'aria-label="Groups a minute; at the end: put 0, drawn 0"', text)
    history = ended.data("overview")["view"]["history"]
    assert [minute["put"] for minute in history] == [history[0]["put"], 72, 72]


@pytest.mark.parametrize("order", ["uid", "-reward", "task_name"])
def test_pages_together_have_every_group_once(page: Client, order: str) -> None:
    uids: list[int] = []
    after = None
    while True:
        table = page.data("groups", {"order": order} | ({"after": after} if after else {}))["table"]
        uids += [row["uid"] for row in table["rows"]]
        if (after := table["next"]) is None:
            break
    assert sorted(uids) == list(range(1, GROUPS + 3))
    if order.endswith("uid"):
        assert uids == sorted(uids, reverse=order == "-uid")


#: NULL while others are connected: a connection counts what it has read at its end.
_ROWS_READ = """SELECT CASE (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()) WHEN 1 THEN
    (SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables)
    + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes) END"""


@pytest.fixture
def work_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], int]:
    """A function that says how much a database does for a page: steps of SQLite, or rows that PostgreSQL reads."""
    steps = 0

    def watch(connection: sqlite3.Connection, handler: Callable[[], object], _: int) -> None:
        def count() -> object:
            nonlocal steps
            steps += 100
            return handler()

        sqlite3.Connection.set_progress_handler(connection, count, 100)

    def rows(url: str) -> int:
        while (count := asyncio.run(ask(url, _ROWS_READ))[0]) is None:
            pass
        return int(count)

    def work(url: str, path: str) -> int:
        before = steps if url.startswith("sqlite") else rows(url)
        assert client_of(url).get(path).status_code == 200
        return (steps if url.startswith("sqlite") else rows(url)) - before

    monkeypatch.setattr(RawConnection, "set_progress_handler", watch)
    return work


@pytest.mark.filterwarnings("default")
def test_a_first_page_is_no_more_work_however_many_groups_there_are(
    new_url: Callable[[], str], work_of: Callable[[str, str], int]
) -> None:
    small_url, large_url = new_url(), new_url()
    for url, count in ((small_url, 1_000), (large_url, 8_000)):
        asyncio.run(fill_many(url, count, seed=500))
        if url.startswith("postgresql"):
            execute(url, "ANALYZE")  # as its autovacuum does within a minute
    for path in ("/", "/groups", "/groups?status=completed&order=uid"):
        assert 0 < work_of(large_url, path) <= 1.5 * work_of(small_url, path), path


def test_groups_are_chosen_by_task_status_and_query(page: Client) -> None:
    query = json.dumps({"tags.level": {"$in": [1, 3]}})
    table = page.data("groups", {"task": "code", "status": "completed", "where": query})["table"]
    assert table["rows"]
    assert {(row["task_name"], row["status"]) for row in table["rows"]} == {("code", "completed")}
    assert {row["tags"]["level"] for row in table["rows"]} == {1, 3}


MISTAKES = [
    ("where", '{"stalenes": 3}', "stalenes"),
    ("where", '{"reward": }', "line 1 column 12"),
    ("where", "[1]", "a query is a JSON object"),
    ("where", "[" * 5000, "a query is JSON"),
    *(("after", place, "") for place in ("x", -1, 10**30)),
    *((name, "nix", "nix") for name in ("order", "status", "buffer")),
    *((name, "\0", "") for name in ("task", "where")),
]


@pytest.mark.parametrize(("parameter", "value", "said"), MISTAKES)
def test_bad_parameters_are_answered_with_what_is_wrong(page: Client, parameter: str, value: object, said: str) -> None:
    _, alert, text = read(page, f"/groups?{urlencode({parameter: value})}", 400).partition('role="alert"')
    assert alert
    assert said in text.partition("</p>")[0]


def test_a_group_shows_conversation_responses_and_rewards(page: Client) -> None:
    text = read(page, "/groups/1")
    assert "What is 0 + 5?" in text
    assert text.count("<h3>user</h3>") == 1
    assert text.count("<article") == 4
    assert "<dt>form</dt>" in text


@pytest.mark.parametrize(("by", "shade"), [("logprob", "lp"), ("mask", "mask1"), ("step", "step1")])
def test_tokens_are_coloured(page: Client, by: str, shade: str) -> None:
    text = read(page, "/groups/1", by=by)
    assert re.search(rf'<span class="token {shade}\d?" title="token \d+  id', text)


def test_annotations_are_columns_of_steps_and_facts_and_colours_of_groups(url: str) -> None:
    """One that is named as a colouring of tokens takes its place."""
    with ReplayBufferConfig(url=url, archive=1000, policy="fifo").build_sync() as buffer:
        for _ in range(3):
            group = [RolloutState(message=[], response="abcd", response_ids=[*b"abcd"], status=Status.COMPLETED)]
            buffer.put(group, "math")
        for item in buffer.sample({"math": 3}, current_train_step=1)["math"]:
            arrays = {"kl": np.array([0, 0.5, 1, 2]), "mask": np.array([1, 0, 0, 0]), "flat": np.ones(4)}
            buffer.annotate({item.uid: [{"advantage": (item.uid - 2) ** 2, **(arrays if item.uid == 2 else {})}]})
    page = client_of(url)
    text = read(page, "/steps/1", order="annotations.advantage")
    assert "advantage 0.666667" in text
    assert re.findall(r'<a href="/groups/(\d+)"', text) == ["2", "1", "3"]
    assert "4 tokens, " in read(page, "/groups/2")
    assert "advantage 0, flat 1 (1 to 1), kl 0.875 (0 to 2)" in read(page, "/groups/2")
    shades = {by: re.findall(r'class="token (\w+)" title="token', read(page, "/groups/2", by=by)) for by in arrays}
    assert shades == {"kl": ["lp0", "lp2", "lp3", "lp6"], "mask": ["mask1", *["mask0"] * 3], "flat": ["lp0"] * 4}
    assert "highest" in read(page, "/groups/2", by="kl")


def test_hostile_texts_are_shown_and_are_never_markup_an_address_a_style_or_a_script(page: Client) -> None:
    hostile = f"/groups/{HOSTILE_UID}"
    texts = {path: page.get(path).text for path in (*PATHS, hostile)}
    for text in (*texts.values(), page.get("/groups?" + urlencode({"where": SCRIPT, "task": SCRIPT})).text):
        assert "<script>" not in text
        assert "<img" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    for name, value in itertools.chain.from_iterable(Attributes(text).found for text in texts.values()):
        assert not name.startswith(("on", "style"))
        if name in ("href", "src", "action"):
            assert (value or "").startswith(("/", "?")) or value in ("", "#main")
    text = texts[hostile]
    assert html.escape(SCRIPT).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in text
    for escaped in (r"abc\u202edef", r"\x1b[31mred", r"NUL:\x00", r"surrogate:\ud800", "{{ 7*7 }}"):
        assert escaped in text


class Attributes(HTMLParser):
    """The attributes of all elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += attrs


def test_long_texts_are_cut(page: Client) -> None:
    assert len(read(page, f"/groups/{LONG_UID}")) < 500_000
    assert "The first 200,000 of 1,000,000 characters" in read(page, f"/groups/{LONG_UID}")


def test_a_group_of_very_many_rollouts_is_cut(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        rollout = {"message": [], "response": "ab" * 500, "response_ids": [1, 2] * 500, "status": Status.COMPLETED}
        buffer.put([RolloutState(**rollout, reward=float(place)) for place in range(70)], "math")
    page = client_of(url)
    text = page.get("/groups/1").text
    assert text.count("<article") == 64
    assert text.count('class="token') < 25_000


def test_links_repeat_only_what_pages_know(page: Client) -> None:
    assert "unknown" not in read(page, "/groups", unknown="unknown")


def train(buffer: Any, step: int, rewards: list[float]) -> None:
    """Put groups with these rewards, by gen-0 to gen-2 in turn, and train on them."""
    groups = [[RolloutState(message=[], reward=reward, status=Status.COMPLETED)] for reward in rewards]
    for number in range(3):
        with working_as(f"gen-{number}"):
            buffer.put_many(groups[number::3], "math")
    buffer.take_batch({"math": len(rewards)}, current_train_step=step)


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Of twenty steps gen-2 is bad from the sixth on, and in the 15th all are a little worse; five more are undone."""
    url = f"sqlite:///{tmp_path_factory.mktemp('troubled')}/run.db"
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for step in range(1, 26):
            if step == 21:
                buffer.checkpoint(20)
            dip = 0.06 if step == 15 else 0.0
            rewards = [0.6 + 0.01 * (number % 5) - dip for number in range(36)]
            train(buffer, step, [0.1 if step > 5 and n % 3 == 2 else reward for n, reward in enumerate(rewards)])
        buffer.restore(20)
        buffer.take_batch({"math": 36}, current_train_step=21)
    return client_of(url)


def test_a_worker_that_is_bad_in_many_steps_hides_no_step_in_which_the_others_are_worse(troubled: Client) -> None:
    text = html.unescape(troubled.get("/steps").text)
    assert re.search(r"gen-2 is below the others over steps 1 to 20: 2\d\d groups of mean reward 0\.", text)
    [sentence] = re.findall(r"<strong>([^<]*)</strong>", text.partition("<table")[0].partition('class="events"')[2])
    assert "task math (mean reward 0.56" in sentence
    assert text.count(">step 15</a>") == 1
    assert text.count('class="mark"') == text.count('class="number bad"') == 1
    assert f'class="number bad" title="{sentence}"' in text
    assert troubled.data("step", step=15)["runs"][0]["verdict"].endswith(sentence.partition(", but ")[2])
    assert "a task with the 10 steps before" in text


def test_workers_are_side_by_side_the_worst_first_and_lead_to_their_groups(troubled: Client) -> None:
    """Steps that a restore undid don't count."""
    makers = troubled.data("workers")["found"]["made"]
    assert [(row["name"], row["stands_out"]) for row in makers][:2] == [("gen-2", True), (makers[1]["name"], False)]
    text = html.unescape(troubled.get("/workers").text)
    assert "What they made of steps 1 to 20" in text
    assert '<a href="/steps?worker=gen-2&buffer=default">' in text
    [link] = {*re.findall(r'href="(/groups\?[^"]*gen-2[^"]*)"', text)}
    assert "No such groups" in troubled.get(link).text


def test_tasks_of_any_names_are_columns_of_their_own(tmp_path: Path) -> None:
    url, tasks = f"sqlite:///{tmp_path}/run.db", ("name", "annotations.x", "worse name")
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for number in range(2):
            with working_as(f"gen-{number}"):
                for task in tasks:
                    rollout = RolloutState(message=[], reward=number / 2, status=Status.COMPLETED)
                    buffer.put_many([[rollout]] * 3, task)
        buffer.take_batch(dict.fromkeys(tasks, 6), current_train_step=1)
    text = client_of(url).get("/steps").text.partition("<h2>By task</h2>")[2].partition("</table>")[0]
    assert re.findall(r"gen-[01]</a>|[+-]0\.500", text) == ["gen-0</a>", *["-0.500"] * 3, "gen-1</a>", *["+0.500"] * 3]


def test_an_unknown_step_says_which_there_are(troubled: Client) -> None:
    answer = troubled.get("/steps/99")
    assert answer.status_code == 404
    assert "are for steps 1 to 25" in answer.text


def test_answers_that_have_left_are_said_to_be_gone(url: str) -> None:
    for step, archive in ((1, 1000), (2, None)):
        with ReplayBufferConfig(url=url, archive=archive).build_sync() as buffer:
            buffer.put([RolloutState(message=[], reward=0.0, status=Status.COMPLETED)], "math")
            buffer.take_batch({"math": 1}, current_train_step=step)
    page = client_of(url)
    assert "Its answers have left" not in page.get("/steps/1").text
    assert "Its answers have left" in page.get("/steps/2").text


def test_a_step_has_its_lowest_answers_and_its_groups_page_by_page_in_any_order(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "SIZE", 3)
    with ReplayBufferConfig(url=url, archive=1000).build_sync() as buffer:
        for number in range(7):
            rewards = (0.21 if number == 6 else 0.9, 0.5 - 0.05 * number)
            rollouts = [{"response": f"{number}:{reward:.2f}", "reward": reward} for reward in rewards]
            group = [RolloutState(message=[], status=Status.COMPLETED, **fields) for fields in rollouts]
            buffer.put(group, "math")
        buffer.take_batch({"math": 7}, current_train_step=1)
    page = client_of(url)
    [worst_answers] = [run["worst"] for run in page.data("step", step=1)["runs"]]
    assert [answer["response"] for answer in worst_answers] == ["6:0.20", "6:0.21", "5:0.25"]
    assert [(answer["uid"], answer["position"]) for answer in worst_answers] == [(7, 1), (7, 0), (6, 1)]
    assert "6:0.20" in page.get("/steps/1").text
    uids = []
    for order in ("uid", "-uid"):
        for after in (0, 3, 6):
            text = page.get(f"/steps/1?order={order}&after={after}").text
            uids += [int(uid) for uid in re.findall(r'<td [^>]*><a href="/groups/(\d+)"', text)]
            assert ('rel="next"' in text) == (after < 6)
    assert uids == [*range(1, 8), *range(7, 0, -1)]
    assert page.get("/steps/1?order=nix").status_code == 400


def test_what_isnt_there_is_said(page: Client) -> None:
    for path in ("/nix", "/groups/999999", "/steps/5", "/static/../app.py", "/groups/abc"):
        answer = page.get(path)
        assert answer.status_code in (400, 404)
        assert 'role="alert"' in answer.text
        assert 'id="live"' not in answer.text  # nothing on it changes
    assert "there is no group 999999: uids go from 1 to" in read(page, "/groups/999999", 404)
    assert "There is no such page; there are /, /groups, /groups/{uid}" in read(page, "/group/1", 404)
    assert "Nothing was ever put into this task; there are the tasks " in read(page, "/groups?task=mat")


def test_what_every_run_does_is_no_news_and_events_are_told_in_words(tmp_path: Path) -> None:
    with ReplayBufferConfig(url=(url := f"sqlite:///{tmp_path}/run.db"), keep_checkpoints=1).build_sync() as buffer:
        buffer.put([RolloutState(message=[], status=Status.COMPLETED)], "math")
        for step in (21, 22):
            buffer.checkpoint(step)
        buffer.delete({})
    page = client_of(url)
    assert [event["kind"] for event in page.data("overview")["view"]["events"]] == ["deleted"]
    assert "deleted" in page.get("/").text.partition('class="events"')[2]


def test_steps_are_those_of_the_buffer_that_the_row_is_of(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    for name in ("eval", "train"):
        with ReplayBufferConfig(url=url, name=name).build_sync() as buffer:
            uid = buffer.put([RolloutState(message=[], status=Status.COMPLETED)], "math")
            buffer.take_batch({"math": 1}, current_train_step=22)
    page = client_of(url)
    assert 'href="/steps/22?buffer=train"' in page.get(f"/groups/{uid}").text


def test_other_buffers_are_left_out_where_one_is_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    for name in ("one", "two"):
        with ReplayBufferConfig(url=url, name=name).build_sync() as buffer:
            buffer.put([RolloutState(message=[], status=Status.COMPLETED)], name)
    page = client_of(url, buffer="two")
    assert [page.get(f"/groups/{uid}").status_code for uid in (1, 2)] == [404, 200]
    for path in ("/?buffer=one", "/groups"):
        main = read(page, path).partition("<main")[2]
        assert re.search(r">\s*two\s*<", main)
        assert not re.search(r">\s*one\s*<", main)
