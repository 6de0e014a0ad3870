"""Fixtures for every test."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
from hypothesis import HealthCheck, settings

from tests.faults.conftest import Summary
from tests.matrix import mark_fast, mark_long
from tests.postgres import Databases, new_database, new_urls, running_server
from tests.postgres import new_url as new_url_of

# On a busy machine any example may be slow.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


#: Of tests' files: more than all of them take.
_MEMORY_BYTES = 4 * 2**30


def _work_in_memory() -> None:
    """Keep the files of tests in memory where there is room: SQLite waits for a disk at each commit.

    No test needs a disk: a process that is killed, and a server that crashes, leave what the kernel has of a file.
    """
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not memory.is_dir() or shutil.disk_usage(memory).free < _MEMORY_BYTES:
        return
    folder = memory / f"rb-{os.getuid()}"  # short, because the path of a socket has at most 107 characters
    folder.mkdir(mode=0o755, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


_work_in_memory()

# Hundreds of processes are started, and compiling all that they import would take each of them half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell, where Ctrl-C is ignored, also by child processes; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: A test that hangs fails: after this long, or as `timeout` in `pyproject.toml` says if it isn't a long form.
_LONG_SECONDS = 3600
#: More are not worth it: each has a PostgreSQL of its own, and the longest tests set the time.
_MOST_WORKERS = 8


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary())


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs on all processors; parts of it, and whatever says `-n`, as pytest does it by default."""
    if hasattr(config, "workerinput"):
        return
    option = config.option
    alone = option.usepdb or option.collectonly or option.capture == "no"
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if config.pluginmanager.has_plugin("xdist") and option.numprocesses is None and whole and not alone:
        # Half of the time of the inner loop is waiting, and a third of the others'.
        waiting = 2 if option.markexpr == "fast" else 1.5
        option.numprocesses = min(math.ceil(waiting * (os.cpu_count() or 1)), _MOST_WORKERS)
        if option.dist == "no":
            option.dist = "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Leave classes and functions of long forms out at once where none is asked for, not each of their cases later."""
    marks = getattr(obj, "pytestmark", ()) if isinstance(obj, (type, FunctionType)) else ()
    left_out = "not long" in collector.config.option.markexpr and any(mark.name == "long" for mark in marks)
    return [] if left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_long(items)
    mark_fast(items)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(_LONG_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are collected: that takes a tenth of the time, and there is none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what is there by now out of all collections of garbage, which would look through it each time."""
    _freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what the tests of a file leave behind."""
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that users without any rights can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="rb-open-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """`postgresql://...` of a server whose user may create databases."""
    with running_server() as url:
        yield url


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """`postgresql://...` of a new, empty database, which is dropped after the test."""
    with new_database(postgres_url) as url:
        yield url


def database(request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty database of the kind that is the parameter of the fixture."""
    if request.param == "sqlite":
        return f"sqlite:///{folder}/buffer.db"
    return str(request.getfixturevalue("lent_database"))


@pytest.fixture(params=["sqlite", "postgresql"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database that several processes can open."""
    return database(request, tmp_path)


@pytest.fixture(params=["sqlite", "memory://", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store: a SQLite file, SQLite in memory, PostgreSQL."""
    return request.param if request.param == "memory://" else database(request, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database that isn't there, or has no tables."""
    yield from new_url_of(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """A function that gives the URL of another empty store; in memory, too, where a test asks for it."""
    with new_urls(request.param, request, tmp_path) as new_url:
        yield new_url


@pytest.fixture
def lent_database(postgres_databases: Databases) -> Iterator[str]:
    """`postgresql://...` of a database that is empty, and may have replaybuf's tables."""
    with postgres_databases.lent() as lend:
        yield lend()


@pytest.fixture(scope="session")
def postgres_databases(postgres_url: str) -> Iterator[Databases]:
    """Databases that tests share one after the other."""
    databases = Databases(postgres_url)
    yield databases
    databases.close()
