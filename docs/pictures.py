"""Makes the pictures of the documentation from a real run: `python docs/pictures.py`, from the top of a checkout.

It runs the demo for two minutes in a terminal, and takes pictures of `replaybuf watch`, and of the pages of
`replaybuf serve`. Needs the extra `web`, tmux, and a Chromium on the path, as `chromium` or by the name in CHROMIUM.
"""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).resolve().parent / "pictures"
_REPLAYBUF = (sys.executable, "-m", "replaybuf")
_FILE = "run.db"
_URL = f"sqlite:///{_FILE}"
_COLUMNS = 110
#: A group that stays, whose answers differ.
_DIVERSE = """
SELECT uid FROM rollouts JOIN groups USING (uid) WHERE groups.status = 'archived'
GROUP BY uid ORDER BY max(rollouts.reward) - min(rollouts.reward) DESC, uid DESC LIMIT 1
"""
_MINUTES = "SELECT count(*) FROM rb_history"
#: Pages, with the height of their pictures: while the run goes on, and after it, when what they show stays.
_LIVE = {"overview": ("/", 1500)}
_AFTERWARDS = {
    "groups": ("/groups", 800),
    "group": ("/groups/{uid}", 1000),
    "step": ("/steps/{step}", 1000),
    "steps": ("/steps", 800),
    "workers": ("/workers", 800),
}
_WIDTH = 1280


def main() -> None:
    """Make all of them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _terminal(folder, ["demo", "--url", _URL, "--steps", "2000"], lines=14):
            _wait_for_history(folder / _FILE)
            with _terminal(folder, ["watch", _URL], lines=40) as watch:
                _picture_of_terminal("watch", f"replaybuf watch {_FILE}", watch, shows="so far, less")
            _pictures_of_pages(folder, _LIVE)
        _pictures_of_pages(folder, _AFTERWARDS)


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Interrupt a process in the end."""
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _ask(file: Path, query: str) -> int:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        [value] = connection.execute(query).fetchone()
        return int(value or 0)


def _wait_for_history(file: Path) -> None:
    """Wait until rates can be told: they are those of the last minute."""
    for _ in range(600):
        time.sleep(0.5)
        if file.exists():
            try:
                if _ask(file, "SELECT max(id) > 0 FROM batches") and _ask(file, _MINUTES) >= 3:
                    return
            except sqlite3.OperationalError:  # the tables are being made
                continue
    raise TimeoutError("the demo has not run for two minutes")


@contextmanager
def _terminal(folder: Path, arguments: Sequence[str], *, lines: int) -> Iterator[list[str]]:
    """Run a command of replaybuf in a terminal of its own; yield what begins a command of tmux for it."""
    tmux = ["tmux", "-S", str(folder / f"tmux-{arguments[0]}")]
    command = shlex.join([*_REPLAYBUF, *arguments])
    size = ["-x", str(_COLUMNS), "-y", str(lines)]
    subprocess.run([*tmux, "new-session", "-d", *size, command], check=True, cwd=folder)
    try:
        yield tmux
    finally:
        subprocess.run([*tmux, "send-keys", "C-c"], check=False)
        time.sleep(3)
        subprocess.run([*tmux, "kill-server"], check=False, stderr=subprocess.DEVNULL)


def _picture_of_terminal(name: str, title: str, tmux: Sequence[str], *, shows: str) -> None:
    """Take a picture of a terminal as an SVG, once it shows something."""
    frame = _frame(tmux, shows)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=_COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(frame.rstrip()))
        svg = console.export_svg(title=title)
    # The font that rich names is fetched from elsewhere.
    (PICTURES / f"{name}.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "utf-8")


def _frame(tmux: Sequence[str], shows: str) -> str:
    """Return what a terminal shows, with its colours, once this is in it."""
    for _ in range(60):
        time.sleep(1)
        seen = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True).stdout
        if shows in seen:
            return seen
    raise TimeoutError(f"{tmux[-1]} has not shown {shows!r} for a minute")


def _pictures_of_pages(folder: Path, pages: Mapping[str, tuple[str, int]]) -> None:
    serve = [*_REPLAYBUF, "serve", _URL, "--port", "0"]
    with subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True) as process, _ended(process):
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("replaybuf serve failed")
        file = folder / _FILE
        names = {
            "step": _ask(file, "SELECT max(step) FROM batches WHERE settled = groups"),
            "uid": _ask(file, _DIVERSE),
        }
        for name, (path, height) in pages.items():
            address = found[0].rstrip("/") + path.format(**names)
            _picture_of_page(address, PICTURES / f"{name}.png", height, profile=folder / "chromium")


def _picture_of_page(address: str, picture: Path, height: int, *, profile: Path) -> None:
    command = [os.environ.get("CHROMIUM", "chromium"), "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--hide-scrollbars", f"--user-data-dir={profile}", f"--window-size={_WIDTH},{height}"]
    command += ["--blink-settings=preferredColorScheme=1", "--virtual-time-budget=3000"]
    command += [f"--screenshot={picture}", address]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
