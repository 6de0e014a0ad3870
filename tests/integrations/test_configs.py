"""The examples of docs/configuration.md, with the real packages; REPLAYBUF_TEST_UPDATE_DOCS=1 writes their outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integrations.scripts import printed_by
from tests.pages import DOCS, examples_in

pytestmark = pytest.mark.frameworks

PAGE = DOCS / "configuration.md"
EXAMPLES = examples_in(PAGE.read_text("utf-8"))


@pytest.mark.parametrize(("example", "package"), [*zip(EXAMPLES, ("hydra",), strict=True)])
def test_a_config_is_read_as_the_page_says(example: tuple[str, str], package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    code, output = example
    (tmp_path / "example.py").write_text(code, "utf-8")
    printed = printed_by(["example.py"], tmp_path)
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        text = PAGE.read_text("utf-8")
        PAGE.write_text(text.replace(f"{code}```\n\n```\n{output}", f"{code}```\n\n```\n{printed}"), "utf-8")
    else:
        assert printed == output
