"""What mkdocs does beside its own: pages from the top of the repository, links between pages, tables from the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from replaybuf.storage.sql.inspection.user_sql import VIEW_COLUMNS
from replaybuf.view.metrics import METRICS

_TOP = Path(__file__).resolve().parents[1]

#: Pages of the repository's top, and what they are called here.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_NAMED = re.compile(r"`(docs/[\w/-]+\.md|README\.md|CHANGELOG\.md|CONTRIBUTING\.md)`")


#: The places of the table of metrics, of the columns of the views for SQL, and of the modules.
_METRICS, _VIEWS, _MODULES = "<!-- metrics -->", "<!-- views -->", "<!-- modules -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(_TOP / source).read_text("utf-8").replace("(docs/", "(")))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Make links of the pages that a page names by their paths, as `docs/payloads.md`."""
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        target = PAGES.get(match[1], match[1].removeprefix("docs/"))
        if files.get_file_from_path(target) is None or target == page.file.src_uri:
            return match[0]
        return f"[{match[0]}]({up}{target})"

    filled = markdown.replace(_METRICS, table_of_metrics()).replace(_VIEWS, tables_of_views())
    filled = filled.replace(_MODULES, table_of_modules())
    return _NAMED.sub(link, filled)


def table_of_metrics() -> str:
    """Return the metrics of the catalogue as a table."""
    rows = [
        f"| `{one.name}` | {one.kind} | {' '.join(f'`{label}`' for label in one.labels)} | {one.help} |"
        for one in METRICS
    ]
    return "\n".join(["| metric | type | labels | |", "|---|---|---|---|", *rows])


def tables_of_views() -> str:
    """Return a table for each view for SQL, with its columns, their types and meanings."""
    parts = []
    for name, view in VIEW_COLUMNS.items():
        rows = [f"| `{one.name}` | {one.type} | {one.meaning} |" for one in view.columns]
        parts.append("\n".join([f"### {name}", "", "| column | type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def table_of_modules() -> str:
    """Return the modules of the package, each with the sentence that it begins with, as a table."""
    rows = []
    for file in sorted((_TOP / "replaybuf").rglob("*.py")):
        first = file.read_text("utf-8").partition("\n")[0].strip('"')
        if file.stem != "__init__" and first:
            rows.append(f"| `{file.relative_to(_TOP / 'replaybuf').as_posix()}` | {first} |")
    return "\n".join(["| module | |", "|---|---|", *rows])
