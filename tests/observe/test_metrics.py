"""Metrics: their figures, formats, page and dashboard."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf import NotReadyError, ReplayBufferConfig, Status
from replaybuf.buffer.buffer_metrics import DISTRIBUTIONS, TOTALS, flatten
from replaybuf.view.metrics import METRICS, OF_DATABASE, prometheus, read_figures
from tests import sql_example
from tests.cli.conftest import run_json
from tests.cli.example import fill
from tests.observe.test_spans import group, numbers
from tests.pages import DOCS

OF_A_PROCESS = {metric.name for metric in METRICS if metric.path.startswith("waits/")}
OF_PLACES = {metric.name for metric in METRICS if "/places/" in metric.path}
TRAINERS = {metric.name for metric in METRICS if metric.path.startswith("trainer/")}


def test_the_tasks_are_those_of_metrics(empty: str) -> None:
    asyncio.run(fill(empty))
    with ReplayBufferConfig(url=empty, archive=10).build_sync() as buffer:
        buffer.take_batch({"math": 1})
        buffer.lease_batch({"math": 1}, seconds=3600, heartbeat=False).begin()
        tasks = buffer.metrics()["tasks"]
    figures = read_figures(empty)["buffers"]["default"]["tasks"]
    for task, theirs in tasks.items():
        assert {name: figures[task][name] for name in theirs} == theirs
        for field in DISTRIBUTIONS:  # of those that can be drawn, without leased ones
            assert sum(theirs[field]["counts"].values()) == theirs["buffered"]["completed"]


def test_what_groups_hold_is_read_in_one_scan(filled: str) -> None:
    stats = {(row["task_name"], row["status"]): row for row in run_json("stats", filled)["groups"]}
    for task, numbers_ in read_figures(filled)["buffers"]["default"]["tasks"].items():
        rows = [row for (name, _), row in stats.items() if name == task]
        assert numbers_["bytes"] == sum(row["bytes"] for row in rows)
        assert numbers_["reward"]["mean"] == pytest.approx(stats[task, "completed"]["reward"])
        assert numbers_["staleness"]["max"] == stats[task, "completed"]["max_staleness"]


def test_groups_are_not_scanned_beyond_a_number(filled: str) -> None:
    tasks = read_figures(filled, scanned=12)["buffers"]["default"]["tasks"]
    assert all("staleness" not in numbers_ and numbers_["put"] for numbers_ in tasks.values())


def test_overdue_leases_are_counted(busy: str) -> None:
    buffers = read_figures(busy)["buffers"]
    assert {name: (n["tasks"]["math"]["leased"], n["tasks"]["math"]["overdue"]) for name, n in buffers.items()} == {
        "default": (2, 1),
        "eval": (0, 0),
    }


def test_the_exposition_has_the_totals_of_each_buffer_and_task(busy: str) -> None:
    samples = numbers(parse(prometheus(read_figures(busy))))
    assert samples["replaybuf_groups_put_total", (("buffer", "default"), ("task", "math"))] == 5


def test_who_works_and_waits_and_what_was_drawn_last(empty: str) -> None:
    asyncio.run(sql_example.fill(empty))
    figures = read_figures(empty)["buffers"]["default"]
    assert figures["workers"] == {"working": 3, "silent": 1, "ended": 0}
    assert figures["last_hour"] == {"groups": 36, "rollouts": 72, "tokens": 28800, "failures": 1, "taken": 17}
    [(kind, waits)] = figures["waiters"].items()
    assert (kind, waits["count"]) == ("groups", 1)
    assert waits["longest_seconds"] > 0
    assert figures["events_last_hour"]
    last = figures["last_batch"]
    assert (last["step"], last["groups"]) == (414, 2)
    assert last["min_reward"] <= last["reward"] <= last["max_reward"]
    assert 0 <= last["staleness"] <= last["max_staleness"]
    assert abs(last["taken_at"] - time.time()) < 60
    names = {name for name, _ in numbers(parse(prometheus(read_figures(empty))))}
    missing = {metric.name for metric in METRICS} - names
    assert not missing - OF_A_PROCESS - {"replaybuf_prompts_drawn", *TRAINERS, *OF_PLACES}


#: Figures with a number for every metric.
EVERYTHING: dict[str, Any] = {
    "database": {
        "bytes": 4096,
        "unswept_payloads": 2,
        "places": {"/scratch/run": {"files": 3, "groups": 7, "bytes": 200}},
    },
    "buffers": {
        "default": {
            "tasks": {
                "math": {
                    "buffered": {"completed": 3},
                    "leased": 4,
                    "archived": 5,
                    "overdue": 1,
                    "bytes": 6000,
                    "oldest_at": 1.7e9,
                    "staleness": {"mean": 3.3, "p50": 5, "p90": 5, "max": 5},
                    "times_sampled": {"mean": 0.0, "p50": 0, "p90": 0, "max": 0},
                    "reward": {"mean": 0.5, "min": 0.0, "max": 1.0},
                    **{name: 10 + i for i, name in enumerate(TOTALS)},
                }
            },
            "restores": 1,
            "waits": {"groups": {"count": 1, "seconds": 2.5, "timeouts": 0}},
            "waiters": {"groups": {"count": 1, "longest_seconds": 3.5}},
            "workers": {"working": 2, "silent": 1},
            "last_hour": {"groups": 1, "rollouts": 2, "tokens": 3, "failures": 4, "taken": 5},
            "events_last_hour": {"restored": 1},
            "last_batch": {
                "step": 7,
                "groups": 8,
                "reward": 0.25,
                "min_reward": 0.0,
                "max_reward": 1.0,
                "staleness": 1.5,
                "max_staleness": 3,
                "taken_at": 1.7e9,
            },
            "trainer": {"train_step": 8, "model_step": 7},
            "prompts": {"gsm8k": 100},
            "checkpoints": {"count": 2, "step": 6, "created_at": 1.7e9},
        }
    },
}


def test_every_metric_is_exported_with_its_labels() -> None:
    samples = numbers(parse(prometheus(EVERYTHING)))
    assert {name for name, _ in samples} == {metric.name for metric in METRICS}
    for metric in METRICS:
        labels = {name for series, pairs in samples for name, _ in pairs if series == metric.name}
        assert labels - {"buffer"} == set(metric.labels)


def test_every_metric_has_its_type_and_a_text() -> None:
    text = prometheus(EVERYTHING)
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n" in text


@pytest.mark.parametrize("name", ['a"b\\c\nd', "\x1b[31m", "\ud800", "{}=,", "\u202e\x00", "# EOF\n"])
def test_names_are_any_text(name: str) -> None:
    figures = {"tasks": {name: {"put": 3}, "math": {"put": 4}}}
    samples = numbers(parse(prometheus(figures, buffer=name)))
    assert len([series for series, _ in samples if series == "replaybuf_groups_put_total"]) == 2
    if name.isprintable() or "\\" in name:
        assert ("replaybuf_groups_put_total", (("buffer", name), ("task", name))) in samples


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -0.0, True])
def test_numbers_are_any_number(value: float) -> None:
    text = prometheus({"tasks": {"math": {"reward": {"mean": value}}}})
    mean = numbers(parse(text))["replaybuf_reward_mean", (("buffer", "default"), ("task", "math"))]
    assert mean == float(value) or (math.isnan(mean) and math.isnan(value))


def test_what_is_not_known_is_left_out() -> None:
    assert prometheus({"tasks": {"math": {"reward": {"mean": None}}}}) == prometheus({"tasks": {}})


NAMES_PAGE = (DOCS / "reference.md").read_text("utf-8")


def test_the_metrics_without_the_label_of_a_buffer_are_named() -> None:
    sentence = NAMES_PAGE.partition("but for")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", sentence) == [metric.name for metric in OF_DATABASE]


async def test_every_name_of_a_logger_is_in_the_reference() -> None:
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await buffer.put(group(), "math")
        with pytest.raises(NotReadyError):
            await buffer.take_batch({"math": 2}, timeout=0.01)
        names = set(flatten(await buffer.metrics()))
    statuses = "|".join(Status)
    names = {re.sub(rf"/buffered/({statuses})$", "/buffered/STATUS", name) for name in names}
    names = {re.sub("^waits/(groups|room)/", "waits/KIND/", name) for name in names}
    assert _loggers_names() == {name.replace("/math/", "/TASK/") for name in names}


def _loggers_names() -> set[str]:
    """Return the names for a logger in the reference; `min` after a name is that name with another end."""
    names = set()
    for cell in re.findall(r"(?m)^\| (`.*?`) \|", NAMES_PAGE):
        first, *others_of_row = re.findall(r"`(\S+?)`", cell)
        stem = first.removesuffix("/STATUS").rpartition("/")[0]
        names |= {first, *(f"{stem}/{name}" for name in others_of_row)}
    return names


FOLDER = DOCS / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "replaybuf.json").read_text("utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_PANELS = [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_VARIABLES = [query["query"]["query"] for query in DASHBOARD["templating"]["list"] if query["type"] == "query"]
OF_ALERTS = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
EVERY = [*OF_PANELS, *OF_VARIABLES, *OF_ALERTS, *(note["expr"] for note in DASHBOARD["annotations"]["list"])]

SERIES = {metric.name: metric for metric in METRICS}
_SERIES = re.compile(r"replaybuf_\w+")
#: What every metric has, and what Prometheus adds.
_ALWAYS = {"buffer", "job", "instance"}


def test_every_series_is_exported_with_the_labels_that_are_asked_for() -> None:
    for expression in EVERY:
        metrics = [SERIES[name] for name in _SERIES.findall(expression)]
        assert metrics, expression
        labels = {label for metric in metrics for label in metric.labels} | _ALWAYS
        grouped = " ".join(re.findall(r"(?:by|on) \(([^)]*)\)", expression))
        labels_asked = [*re.findall(r"(\w+)=~?\"", expression), *re.findall(r"\w+", grouped)]
        assert set(labels_asked) <= labels, expression


def test_every_metric_has_a_panel() -> None:
    shown_metrics = {SERIES[name].name for expression in OF_PANELS for name in _SERIES.findall(expression)}
    assert shown_metrics == {metric.name for metric in METRICS}


def test_every_query_asks_the_data_source_that_is_chosen() -> None:
    data_source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == data_source for panel in PANELS for target in (panel, *panel["targets"]))
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "job", "buffer", "task"]


def test_a_rate_over_a_restore_is_left_out() -> None:
    """A restore takes the counters back, which Prometheus would take for a restart from 0."""
    rates = [expression for expression in OF_PANELS if "rate(replaybuf_groups_" in expression]
    assert rates
    assert all("unless on (buffer, instance) changes(replaybuf_restores" in expression for expression in rates)
