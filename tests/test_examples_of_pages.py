"""Examples on the pages print what the pages say; REPLAYBUF_TEST_UPDATE_DOCS=1 writes their outputs anew.

Pages whose examples need more than a folder have tests of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaybuf.storage.places.owners import PAYLOAD_THRESHOLD
from replaybuf.storage.places.store import FILE_BYTES, FILE_GROUPS
from tests.pages import Page

SAMPLING, PRODUCTION, CALLING = Page("sampling.md"), Page("production.md"), Page("calling.md")
#: Pages of which each example is run by itself.
APART = (
    *(SAMPLING, Page("rollouts.md", beginning=SAMPLING), Page("chunks.md", beginning=SAMPLING), PRODUCTION),
    *map(Page, ("checkpoints.md", "payloads.md", "segments.md")),
    *(CALLING, Page("reverb.md"), Page("looking.md", "## Annotations", SAMPLING)),
)
#: Pages whose examples are run one after another.
IN_ORDER = (Page("your-loop.md", "## Eight mistakes"), Page("metrics.md"))
#: Pages of which every block of code is an example, but for the beginning of those that have one.
WHOLE = {"calling": 1, "metrics": 1, "payloads": 1, "production": 1, "reverb": 1, "segments": 1}
EXAMPLES = [
    pytest.param(
        page,
        [example],
        id=f"{page.path.stem}-{number}",
        marks=[pytest.mark.ray] if "import ray" in example[0] else [],
    )
    for page in APART
    for number, example in enumerate(page.examples)
]
EXAMPLES += [pytest.param(page, page.examples, id=page.path.stem) for page in IN_ORDER]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Ray's
@pytest.mark.parametrize(("page", "examples"), EXAMPLES)
def test_an_example_prints_what_its_page_says(
    page: Page, examples: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for code, output in examples:
        if "import ray" in code:
            pytest.importorskip("ray")
        page.check(code, output)


@pytest.mark.parametrize("name", WHOLE)
def test_every_block_of_code_is_an_example(name: str) -> None:
    [page] = [page for page in (*APART, *IN_ORDER) if page.path.stem == name]
    assert page.text.count("```python") == len(page.examples) + WHOLE[name] > 0


def test_the_page_of_payloads_has_the_sizes_of_the_code() -> None:
    [page] = [example for example in APART if example.path.stem == "payloads"]
    assert f"{FILE_BYTES >> 20} MiB and {FILE_GROUPS} groups" in page.text
    assert f"({PAYLOAD_THRESHOLD >> 10} KiB)" in page.text


def test_every_section_of_the_page_of_calls_has_an_example_and_every_link_a_section() -> None:
    sections = CALLING.text.split("\n## ")[1:]
    assert [section.split("\n", 1)[0] for section in sections if "```python" not in section] == []
    lines = (line.lstrip("#").strip().lower() for line in CALLING.text.split("\n") if line.startswith("##"))
    headings = {re.sub(r"[^\w-]", "", line.replace(" ", "-")) for line in lines}
    assert set(re.findall(r"\]\(#([\w-]+)\)", CALLING.text)) <= headings
