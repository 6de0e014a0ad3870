"""The demo's last output: how the reward changed, where the data is, and commands to try on it."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.engine import URL, make_url

from replaybuf.demo.display import times
from replaybuf.demo.figures import Figures
from replaybuf.demo.mode import Mode
from replaybuf.demo.settings import BATCH_GROUPS
from replaybuf.storage.sql.engine.urls import parse_url

WORKERS = "how stale the groups of each worker were"
QUERIES = {
    "what is in the buffer (archived: trained on lately)": (
        "SELECT status, count(*), avg(reward), max(staleness) FROM groups GROUP BY status"
    ),
    "which answers are harder (level: digits of the answer)": (
        "SELECT {level} AS level, count(*), avg(reward) FROM groups GROUP BY 1 ORDER BY 1"
    ),
    WORKERS: ("SELECT {worker} AS worker, count(*), avg(staleness) FROM groups GROUP BY 1 ORDER BY 1"),
    "wrong answers": ("SELECT prompt, response, reward, staleness FROM rollouts WHERE reward < 1 LIMIT 10"),
}


def summary(url: str, folder: Path, figures: Figures, trained: Sequence[int]) -> list[str]:
    """Return the lines at the end of a run. `trained` are the numbers of all prompts that were trained on."""
    lines = ["", _reward(figures), _groups(figures), verdict(trained, figures.target * BATCH_GROUPS)]
    lines += ["", f"The buffer is in {where(url)}, the weights are in {folder}", "", "Try:"]
    for title, query in queries(url, figures.mode).items():
        lines += [f"  # {title}", f"  {query}"]
    lines += ["  # all figures", f"  replaybuf stats {shlex.quote(shell_url(url))}"]
    if has_password(url):
        lines += ["(with the password in PGPASSWORD: it isn't shown here)"]
    return lines


def _reward(figures: Figures) -> str:
    ends = figures.first_and_last()
    if ends is None:
        return "No step was done."
    line = f"Mean reward {ends[0]:.2f} -> {ends[1]:.2f} in {figures.step} steps"
    if figures.first_step:
        line += f" (the last {figures.step - figures.first_step} of them in {figures.seconds:.0f} s)"
    else:
        line += f", {figures.seconds:.0f} s"
    if figures.step < figures.target:
        line += f" (of {figures.target}: the time was up; run it again to go on)"
    return line


def _groups(figures: Figures) -> str:
    line = f"Generated {figures.generated:,} groups, trained on {figures.taken:,}"
    if figures.left:
        line += f", {figures.replayed:,} of them replayed from what the last run left"
    line += f"; {figures.expired:,} expired"
    if figures.mode != Mode.SYNC:
        line += f", {figures.interrupted:,} interruptions"
    return f"{line}; {times(figures)}"


def verdict(trained: Sequence[int], prompts: int) -> str:
    """Return whether each of the prompts, numbered from 0, was trained once."""
    counts = Counter(trained)
    twice = sorted(number for number, count in counts.items() if count > 1)
    if twice:
        return f"{len(twice):,} of {len(counts):,} prompts were trained more than once: number {twice[0]}, for example."
    if counts.keys() == set(range(prompts)):
        return f"Each of the {prompts:,} prompts was trained once."
    return f"{len(counts):,} prompts were trained, each of them once."


def queries(url: str, mode: Mode) -> dict[str, str]:
    """Return shell commands to try, by what they show."""  # a shell leaves "$." alone
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        tags = {name: f"json_extract(tags, '$.{name}')" for name in ("level", "worker")}
        command = f"sqlite3 -box {shlex.quote(str(parsed.database))}"
        if shutil.which("sqlite3") is None:
            command = f"replaybuf sql {shlex.quote(str(parsed.database))}"
    else:
        tags = {name: f"tags ->> '{name}'" for name in ("level", "worker")}
        command = f"psql {shlex.quote(shell_url(url))} -c"
    return {
        title: f'{command} "{query.format(**tags)}"'
        for title, query in QUERIES.items()
        if title != WORKERS or mode == Mode.DISAGGREGATED
    }


def where(url: str) -> str:
    """Return the database, for people."""
    parsed = parse_url(url)
    return str(Path(str(parsed.database)).absolute()) if parsed.get_backend_name() == "sqlite" else shell_url(url)


def shell_url(url: str) -> str:
    """Return the URL for other programs, without a password."""
    parsed = _given(url)
    if parsed.get_backend_name() == "sqlite":
        return url
    return (
        parsed.set(drivername="postgresql")
        ._replace(password=None)
        .difference_update_query(["password", "passwd"])
        .render_as_string()
    )


def has_password(url: str) -> bool:
    """Return whether the URL holds a password."""
    parsed = _given(url)
    return bool(parsed.password or parsed.query.get("password"))


def _given(url: str) -> URL:
    parse_url(url)  # refuses unsupported URLs, without showing a password
    return make_url(url)
