"""Places for segments: folders, and an object store behind a relay."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from replaybuf.segments.folder import FolderStore
from replaybuf.segments.places import open_place
from replaybuf.segments.store import SegmentStore, claim
from tests.faults.conftest import _no_process_is_left, figures
from tests.segments.relay import Relay, relayed

__all__ = ["_no_process_is_left", "figures"]

PATIENCE = 3.0


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """The port of a server with S3's interface."""
    server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield running.get_host_and_port()[1]
    running.stop()


@pytest.fixture
def relay(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay before the object store, which the environment names as the endpoint, with credentials."""
    with relayed(moto_port) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield relay


@pytest.fixture
def bucket(relay: Relay) -> str:
    """`s3://bucket/prefix`, empty. The name is one of which texts of errors make something else."""
    name = f"range-{uuid.uuid4().hex[:12]}"
    urlopen(Request(f"{relay.url}/{name}", method="PUT")).close()
    return f"s3://{name}/run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for payloads, empty."""
    place = tmp_path / "payloads"
    place.mkdir()
    return place


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest) -> str:
    """What the setting `payloads` names: a folder, an object store."""
    return str(request.getfixturevalue("folder" if request.param == "folder" else "bucket"))


@pytest.fixture
def store(place: str) -> Iterator[SegmentStore]:
    """An open place, which is marked."""
    store = open_place(place, PATIENCE)
    store.check_writable()
    claim(store, "d" * 32, 1)
    yield store
    store.close()


@pytest.fixture
def network_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderStore]:
    """A folder that is taken for one on a network file system."""
    monkeypatch.setattr("replaybuf.segments.folder.filesystem_type", lambda path: "nfs4")
    store = FolderStore(str(folder))
    store.check_writable()
    claim(store, "d" * 32, 1)
    yield store
    store.close()


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where the user may do everything."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
