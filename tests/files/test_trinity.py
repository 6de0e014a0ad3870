"""Databases of Trinity-RFT come in: tables and blobs as its version 0.6 writes them, made here by hand."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from replaybuf import InputError, ReplayBufferConfig
from replaybuf.errors import FileError, UnsafePickleError
from tests.files.stores import contents

_DTYPES = {"int32": "I32", "float32": "F32", "bool": "BOOL"}


def safetensors(tensors: dict[str, Any]) -> bytes:
    header, body = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        body += raw
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + body


def blob(number: int, metadata: bytes | None = None) -> bytes:
    meta = {
        "eid": {"batch": 3, "task": number // 2, "run": number % 2, "step": 0, "suffix": "abc"},
        "reward": 0.5,
        "info": {"model_version": 7},
        "metrics": {},
        "prompt_length": 2,
        "response_text": f"answer {number}",
        "prompt_text": "question",
        "messages": None,
    }
    packed = metadata or pickle.dumps({"version": 1, "num_items": 1, "items": [meta]}, protocol=5)
    tensors = safetensors(
        {
            "0:tokens": np.arange(5, dtype=np.int32) + number,
            "0:logprobs": np.array([-1, -0.5, 0], np.float32),
            "0:action_mask": np.array([True, False, True]),
        }
    )
    return b"TRXP" + struct.pack("<BQQ", 1, len(packed), len(tensors)) + packed + tensors


async def write(url: str, blobs: list[bytes | None]) -> None:
    """Write experiences, two of a task, as Trinity-RFT does."""
    driver = url.replace("sqlite:", "sqlite+aiosqlite:").replace("postgresql:", "postgresql+asyncpg:")
    engine = create_async_engine(driver)
    kind = "BYTEA" if "postgresql" in url else "BLOB"
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "CREATE TABLE explored (id INTEGER PRIMARY KEY, timestamp TIMESTAMP, task_id VARCHAR(64), run_id "
                "INTEGER, msg_id VARCHAR(64), model_version INTEGER, reward FLOAT, consumed INTEGER)"
            )
        )
        await connection.execute(text(f"CREATE TABLE explored_blob (id INTEGER PRIMARY KEY, experience_bytes {kind})"))
        for n, one in enumerate(blobs):
            values = {"id": n + 1, "task": str(n // 2), "run": n % 2}
            await connection.execute(
                text("INSERT INTO explored VALUES (:id, NULL, :task, :run, 'abc', 7, 0.5, 1)"), values
            )
            await connection.execute(text("INSERT INTO explored_blob VALUES (:id, :blob)"), {"id": n + 1, "blob": one})
    await engine.dispose()


async def test_its_experiences_are_groups_by_task(shared_url: str) -> None:
    await write(shared_url, [blob(n) for n in range(4)])
    async with ReplayBufferConfig(url="memory://", tensors="numpy").build() as buffer:
        done = await buffer.import_from(shared_url, as_task="math")
        [(about, [first, _]), (_, [_, last])] = await contents(buffer)
    assert (done.groups, done.rollouts, about["times_sampled"], about["task_name"]) == (2, 4, 1, "math")
    assert (first.prompt_ids, first.response_ids, first.response_mask) == ([0, 1], [2, 3, 4], [1, 0, 1])
    assert (first.logprobs, first.response_model_steps, first.reward) == ([-1.0, -0.5, 0.0], [7] * 3, {"score": 0.5})
    assert (last.response, last.extra_fields["eid"]["batch"]) == ("answer 3", 3)


BAD: dict[str, tuple[bytes | None, type[Exception], str]] = {
    "a pickle that runs": (blob(0, b"cos\nsystem\n."), UnsafePickleError, r"explored, id 1: .* 'os\.system'"),
    "cut short": (blob(0)[:-5], FileError, "explored, id 1: its experience_bytes are damaged"),
    "an old one": (pickle.dumps({}), FileError, "explored, id 1: .*before 0.6"),
    "none": (None, FileError, "explored, id 1: its experience_bytes are missing"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_bytes_are_named_by_their_row(name: str, tmp_path: Path) -> None:
    one, kind, message = BAD[name]
    url = f"sqlite:///{tmp_path}/trinity.db"
    await write(url, [one])
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(kind, match=message):
            await buffer.import_from(tmp_path / "trinity.db")


async def test_a_column_of_another_kind_is_named_by_its_row(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trinity.db"
    await write(url, [blob(0)])
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE explored SET consumed = 'often'"))
    await engine.dispose()
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(FileError, match="explored, id 1: consumed is 'often'; expected a whole number"):
            await buffer.import_from(tmp_path / "trinity.db")


async def test_our_own_databases_have_commands_of_their_own(tmp_path: Path) -> None:
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db").build():
        pass
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        with pytest.raises(InputError, match="replaybuf save and resume, or export"):
            await buffer.import_from(tmp_path / "run.db")
