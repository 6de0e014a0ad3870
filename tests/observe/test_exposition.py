"""Figures as Prometheus reads them, by the parsers of prometheus_client."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.buffer.metrics import TOTALS
from replaybuf.view.metrics import METRICS, prometheus

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
                    "staleness": {"counts": {0: 1, 5: 2}},
                    "times_sampled": {"counts": {0: 3}},
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


def numbers(families: Iterable[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the numbers by series and labels, of which no two are the same."""
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_every_metric_is_exported_with_its_labels() -> None:
    found = numbers(parse(prometheus(EVERYTHING)))
    assert {name for name, _ in found} == {series for metric in METRICS for series in metric.series}
    for metric in METRICS:
        labels = {name for series, pairs in found for name, _ in pairs if series in metric.series}
        assert labels - {"buffer", "le"} == set(metric.labels)


def test_every_metric_has_its_type_and_a_text() -> None:
    """Prometheus's format writes a gauge histogram as a histogram and two gauges."""
    text = prometheus(EVERYTHING)
    for metric in METRICS:
        kind = "histogram" if metric.bounds else metric.kind
        assert f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {kind}\n" in text


def test_a_histogram_counts_up_to_each_bound() -> None:
    found = {pairs["le"]: value for name, pairs, value in (
        (name, dict(pairs), value) for (name, pairs), value in numbers(parse(prometheus(EVERYTHING))).items()
    ) if name == "replaybuf_staleness_bucket"}  # fmt: skip
    assert [found[bound] for bound in ("0", "4", "6", "64", "+Inf")] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("name", ['a"b\\c\nd', "\x1b[31m", "\ud800", "{}=,", "\u202e\x00", "# EOF\n"])
def test_names_are_any_text(name: str) -> None:
    figures = {"tasks": {name: {"put": 3}, "math": {"put": 4}}}
    found = numbers(parse(prometheus(figures, buffer=name)))
    assert len([series for series, _ in found if series == "replaybuf_groups_put_total"]) == 2
    if name.isprintable() or "\\" in name:
        assert ("replaybuf_groups_put_total", (("buffer", name), ("task", name))) in found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -0.0, True])
def test_numbers_are_any_number(value: float) -> None:
    text = prometheus({"tasks": {"math": {"reward": {"mean": value}}}})
    found = numbers(parse(text))["replaybuf_reward_mean", (("buffer", "default"), ("task", "math"))]
    assert found == float(value) or (math.isnan(found) and math.isnan(value))


def test_what_is_not_known_is_left_out() -> None:
    assert prometheus({"tasks": {"math": {"reward": {"mean": None}}}}) == prometheus({"tasks": {}})


async def test_metrics_of_an_open_buffer() -> None:
    async with ReplayBufferConfig(url="memory://", max_times_sampled=2).build() as buffer:
        for _ in range(3):
            await buffer.put([RolloutState(message=[], response="x", status=Status.COMPLETED)], "math")
        for _ in range(2):
            await buffer.take_batch({"math": 1})
        text = prometheus(await buffer.metrics(), buffer="train")
    found = {name: value for (name, pairs), value in numbers(parse(text)).items() if dict(pairs).get("task") == "math"}
    totals = {
        name: found[f"replaybuf_groups_{name}_total"] for name in ("put", "sampled_new", "sampled_again", "taken")
    }
    assert totals == {"put": 3, "sampled_new": 1, "sampled_again": 1, "taken": 1}
    assert "per_second" not in text
