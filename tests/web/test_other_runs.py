"""Runs of other databases and of exports beside one another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import FileError, InputError, UnreachableError
from replaybuf.web.ask import other_runs
from tests.web.conftest import client_of


async def _train(url: str, reward: float, name: str = "default", export: Path | None = None) -> None:
    """Three train steps of two groups each, whose rewards rise from `reward` by 0.1."""
    async with ReplayBufferConfig(url=url, name=name, archive=100).build() as buffer:
        for step in range(1, 4):
            for _ in range(2):
                one = RolloutState(message=[], response="a", reward=reward + step / 10, status=Status.COMPLETED)
                await buffer.put([one], "math", model_step=step - 1, current_train_step=step)
            await buffer.take_batch({"math": 2}, current_train_step=step)
        if export is not None:
            await buffer.export(export)


def _rewards(page: Any, beside: str) -> list[tuple[int, float]]:
    found = page.get("/api/steps.json", params={"beside": beside}).json()["beside"]
    return [(one["step"], round(one["reward"], 3)) for one in found]


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/run.db"
    asyncio.run(_train(found, 0.0))
    return found


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_database_is_plotted_beside(kind: str, url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    other = f"{tmp_path}/other.db" if kind == "sqlite" else request.getfixturevalue("postgres_database")
    asyncio.run(_train(f"sqlite:///{other}" if kind == "sqlite" else other, 0.5))
    page = client_of(url, beside=[other])
    [name] = page.get("/api/steps.json").json()["others"]
    assert _rewards(page, name) == [(3, 0.8), (2, 0.7), (1, 0.6)]
    text = page.get("/steps", params={"beside": name}).text
    assert "Mean reward, from step 1 to step 3; at the end: default 0.30, " in text
    swapped = client_of(other, beside=[url])
    assert _rewards(swapped, "run.db") == [(3, 0.3), (2, 0.2), (1, 0.1)]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_an_export_is_plotted_beside_by_the_steps_that_trained_on_its_groups(
    ending: str, url: str, tmp_path: Path
) -> None:
    export = tmp_path / f"old.{ending}"
    asyncio.run(_train(f"sqlite:///{tmp_path}/old.db", 0.5, export=export))
    page = client_of(url, beside=[str(export)])
    assert page.get("/api/steps.json").json()["others"] == [export.name]
    assert _rewards(page, export.name) == [(3, 0.8), (2, 0.7), (1, 0.6)]
    assert (
        page.get("/api/steps.json", params={"beside": export.name, "before": 3, "from": 2}).json()["beside"][0]["step"]
        == 2
    )


def test_buffers_of_another_database_have_names_of_their_own(url: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    asyncio.run(_train(other, 0.5, "a"))
    asyncio.run(_train(other, 0.6, "b"))
    assert [*other_runs([other, url, url])] == ["other.db a", "other.db b", "run.db", "run.db (2)"]


def test_what_cant_be_plotted_beside_is_said_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError):
        other_runs([f"{tmp_path}/nix.db"])
    (tmp_path / "odd.jsonl").write_text("no JSON\n")
    with pytest.raises(FileError):
        other_runs([f"{tmp_path}/odd.jsonl"])
    (tmp_path / "untrained.jsonl").write_text('{"task_name": "math", "prompt": "a", "response": "b", "reward": 1.0}\n')
    with pytest.raises(InputError, match="has no groups that were trained on"):
        other_runs([f"{tmp_path}/untrained.jsonl"])
    assert client_of(url).get("/steps", params={"beside": "nix"}).status_code == 400
