"""The collector for prometheus_client's registry."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import InputError
from replaybuf.view.metrics import Collector, exposition, prometheus, read_figures
from tests.observe.test_exposition import numbers


def collected(collector: Collector) -> dict[Any, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    return numbers(parse(generate_latest(registry).decode()))


def group() -> list[RolloutState]:
    return [RolloutState(message=[], response="x", reward=0.5, status=Status.COMPLETED)]


@pytest.fixture(params=["sync", "async"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", name="train")
    with config.build_sync() as buffer:
        buffer.put(group(), "math")
        yield buffer if request.param == "sync" else buffer.asynchronous


def test_an_open_buffer_is_collected_from_any_thread(opened: Any) -> None:
    found = collected(Collector(opened))
    labels = (("buffer", "train"), ("task", "math"))
    assert found["replaybuf_groups_put_total", labels] == 1
    assert found["replaybuf_up", ()] == 1


def test_a_database_is_collected_by_its_url(busy: str) -> None:
    found = collected(Collector(busy))
    expected = numbers(parse(prometheus(read_figures(busy))))
    moving = {"replaybuf_database_bytes"}
    assert {key: n for key, n in found.items() if key[0] not in moving} == {
        key: n for key, n in expected.items() if key[0] not in moving
    }


def test_registering_reads_nothing(tmp_path: Path) -> None:
    CollectorRegistry().register(Collector(f"sqlite:///{tmp_path}/nothing.db"))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_down_and_takes_nothing_else_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "replaybuf.view.metrics"):
        collector = Collector(f"sqlite:///{tmp_path}/nothing.db")
        found = collected(collector)
        collected(collector)
    assert found == {("replaybuf_up", ()): 0, **{key: 1.0 for key in found if key[0] == "replaybuf_info"}}
    assert [("nothing.db" in record.message) for record in caplog.records] == [True]  # once, not at every scrape


def test_a_collection_ends_after_its_time(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.sleep(600)

    collector = Collector(opened, timeout=0.05)
    monkeypatch.setattr(exposition, "read_metrics", hang)
    with caplog.at_level(logging.WARNING, "replaybuf.view.metrics"):
        assert collected(collector)["replaybuf_up", ()] == 0
    assert "nothing came for 0.05 s" in caplog.text


def test_anything_else_is_refused() -> None:
    with pytest.raises(InputError, match="source must be a buffer or the URL of a database, got int"):
        Collector(3)  # type: ignore[arg-type]


def test_a_closed_buffer_is_down() -> None:
    with ReplayBufferConfig(url="memory://").build_sync() as buffer:
        collector = Collector(buffer)
    assert collected(collector)["replaybuf_up", ()] == 0
