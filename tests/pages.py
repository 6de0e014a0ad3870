"""Pages of the documentation whose examples are run: a shared beginning, then blocks of code, each with its output.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest` on the tests of a page writes the outputs anew.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"

_BEGINNING = re.compile(r"(?ms)^```python\n(.*?)^```")
_BLOCK = re.compile(r"(?ms)^```python\n((?:(?!```).)*?)^```\n\n```\n(.*?)^```$")


def examples_in(text: str) -> list[tuple[str, str]]:
    """Return the blocks of code that have an output, with it."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(text)]


def _first_block(text: str) -> str:
    match = _BEGINNING.search(text)
    assert match is not None
    return match[1]


def compare(page: Path, block: str, anew: str, same: Callable[[str], object] = str) -> None:
    """Compare a block of a page, by what is always the same of it, with what it should be, or write that there."""
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        page.write_text(page.read_text("utf-8").replace(block, anew), "utf-8")
    else:
        assert same(block) == same(anew), anew


def _without_times(output: str) -> str:
    return re.sub(r"\b\d+s ago", "AGO", re.sub(r"\d\d:\d\d:\d\d UTC", "TIME", output))


class Page:
    """A page, from the heading `since` on, whose first block of code is the beginning of all examples.

    Examples of a page without one begin as those of another page: `beginning`.
    """

    def __init__(self, name: str, since: str = "", beginning: Page | None = None) -> None:
        self.path = DOCS / name
        self.text = self.path.read_text("utf-8")
        self.sections = self.text[self.text.index(since) :]
        self._beginning = beginning._beginning if beginning else _first_block(self.sections)
        self.examples = examples_in(self.sections)

    def check(self, code: str, output: str) -> None:
        """Compare what an example prints with what the page says, or write it there."""
        begin = f"{code}```\n\n```\n"
        compare(self.path, f"{begin}{output}```", f"{begin}{self._output_of(code)}```", _without_times)

    def _output_of(self, code: str) -> str:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        printed = io.StringIO()
        earlier = {thread.ident for thread in threading.enumerate() if thread.name == "replaybuf-database"}
        with contextlib.redirect_stdout(printed):
            exec(self._beginning, namespace)
            for handler in logging.root.handlers:  # stores that earlier tests have left open may log, too
                if getattr(handler, "stream", None) is printed:
                    handler.addFilter(logging.Filter("replaybuf"))
                    handler.addFilter(lambda record: record.thread not in earlier)
            compiled = compile(code, self.path.stem, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            running = eval(compiled, namespace)
            if inspect.iscoroutine(running):
                asyncio.run(running)
        return printed.getvalue()
