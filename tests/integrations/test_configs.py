"""The examples of docs/configuration.md, with the real packages; REPLAYBUF_TEST_UPDATE_DOCS=1 writes their outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import DOCS, examples_in

pytestmark = pytest.mark.frameworks

PAGE = DOCS / "configuration.md"
EXAMPLES = examples_in(PAGE.read_text("utf-8"))


@pytest.mark.parametrize(("example", "package"), [*zip(EXAMPLES, ("hydra",), strict=True)])
def test_a_config_is_read_as_the_page_says(example: tuple[str, str], package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    code, output = example
    (tmp_path / "example.py").write_text(code, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent), "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        text = PAGE.read_text("utf-8")
        PAGE.write_text(text.replace(f"{code}```\n\n```\n{output}", f"{code}```\n\n```\n{done.stdout}"), "utf-8")
    else:
        assert done.stdout == output, done.stderr
