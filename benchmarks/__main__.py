"""`python -m benchmarks`: measure, and print a table. `plans`, `guard`, `trees`, `peers`: see README.md."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from pathlib import Path

from benchmarks.table import Row, Settings, markdown

#: The modules that measure something, in order.
NAMES = (
    "payloads",
    "scale",
    "checkpoints",
    "production",
)


def main() -> int:
    """Run the command line. Return its exit status."""
    if sys.argv[1:2] == ["peers"]:
        from benchmarks.peers import command

        return int(command.main(sys.argv[2:]))
    if sys.argv[1:2] == ["trees"]:
        from benchmarks import trees

        return trees.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("command", nargs="?", default="run", choices=["run", "plans", "guard"])
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: a look, not a measurement")
    parser.add_argument("--db", choices=["sqlite", "postgresql", "postgres", "all"], default="all")
    parser.add_argument("--markdown", metavar="FILE", help="write the table to this file, too")
    parser.add_argument("--update", action="store_true", help="guard: keep the figures of this run")
    options = parser.parse_args()
    databases = {"all": ("sqlite", "postgresql"), "sqlite": ("sqlite",)}.get(options.db, ("postgresql",))
    settings = Settings(options.quick, databases)
    if options.command == "guard":
        from benchmarks import guard

        return asyncio.run(guard.main(settings, update=options.update))
    if options.command == "plans":
        from benchmarks import plans

        return asyncio.run(plans.main(settings))
    rows = [row for name in options.only or NAMES for row in asyncio.run(_run(name, settings))]
    print("\n" + markdown(rows))
    if options.markdown:
        Path(options.markdown).write_text(markdown(rows) + "\n")
    return 0


async def _run(name: str, settings: Settings) -> list[Row]:
    rows = []
    async for row in importlib.import_module(f"benchmarks.{name}").run(settings):
        rows.append(row)
        print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
