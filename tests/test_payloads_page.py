"""docs/payloads.md is true; with REPLAYBUF_TEST_UPDATE_DOCS=1 these tests write its outputs anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf.segments.places import PAYLOAD_THRESHOLD
from replaybuf.storage.sql.tasks.open_segments import SEGMENT_BYTES
from tests.pages import Page

PAGE = Page("payloads.md")


@pytest.mark.parametrize(("code", "output"), PAGE.examples, ids=map(str, range(len(PAGE.examples))))
def test_an_example_prints_what_the_page_says(
    code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PAGE.check(code, output)


def test_every_block_of_code_is_an_example() -> None:
    assert PAGE.text.count("```python") == len(PAGE.examples) + 1  # and the beginning


def test_the_page_has_the_sizes_of_the_code() -> None:
    assert f"{SEGMENT_BYTES >> 20} MiB" in PAGE.text
    assert f"({PAYLOAD_THRESHOLD >> 10} KiB)" in PAGE.text
