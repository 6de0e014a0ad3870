"""The dashboard and the alerts are of metrics that there are."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from replaybuf.view.metrics import METRICS
from tests.pages import DOCS

FOLDER = DOCS / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "replaybuf.json").read_text("utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_PANELS = [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_VARIABLES = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
OF_ALERTS = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
EVERY = [*OF_PANELS, *OF_VARIABLES, *OF_ALERTS, *(one["expr"] for one in DASHBOARD["annotations"]["list"])]

SERIES = {series: metric for metric in METRICS for series in metric.series}
_SERIES = re.compile(r"replaybuf_\w+")
#: What every metric has, and what Prometheus adds.
_ALWAYS = {"buffer", "job", "instance"}


@pytest.mark.parametrize("expression", EVERY)
def test_every_series_is_exported_with_the_labels_that_are_asked_for(expression: str) -> None:
    metrics = [SERIES[name] for name in _SERIES.findall(expression)]
    assert metrics
    labels = {label for metric in metrics for label in metric.labels} | _ALWAYS
    labels |= {"le"} if any(metric.bounds for metric in metrics) else set()
    grouped = " ".join(re.findall(r"(?:by|on) \(([^)]*)\)", expression))
    asked = [*re.findall(r"(\w+)=~?\"", expression), *re.findall(r"\w+", grouped)]
    assert set(asked) <= labels


def test_every_metric_has_a_panel() -> None:
    shown = {SERIES[name].name for expression in OF_PANELS for name in _SERIES.findall(expression)}
    assert shown == {metric.name for metric in METRICS}


def test_every_query_asks_the_data_source_that_is_chosen() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(one["datasource"] == chosen for panel in PANELS for one in (panel, *panel["targets"]))
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "job", "buffer", "task"]


def test_panels_have_their_own_places_and_numbers() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 for at in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def test_a_rate_over_a_restore_is_left_out() -> None:
    """A restore takes the counters back, which Prometheus would take for a restart from 0."""
    rates = [one for one in OF_PANELS if "rate(replaybuf_groups_" in one]
    assert rates
    assert all("unless on (buffer, instance) changes(replaybuf_restores" in one for one in rates)
