"""Exports as objects of other libraries: pandas' DataFrames and Hugging Face's datasets."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

from replaybuf.errors import MissingDriverError
from replaybuf.files.exporting import Chosen, Exported, batches_of, export_files, in_thread
from replaybuf.files.rows import Row
from replaybuf.progress import OnProgress
from replaybuf.storage.contract import GroupStorage

_BYTES = 1 << 28


async def to_pandas(storage: GroupStorage, chosen: Chosen) -> Any:
    """Return groups as a DataFrame with the rows of an export."""
    try:
        import pandas
    except ImportError as error:
        raise MissingDriverError("to_pandas() needs the package pandas: pip install 'replaybuf[pandas]'") from error
    every: list[Row] = []
    async with aclosing(batches_of(storage, chosen, Exported())) as batches:
        async for rows, _ in batches:
            every += rows
    return await in_thread(lambda: pandas.DataFrame.from_records(every))


async def to_dataset(storage: GroupStorage, chosen: Chosen, folder: Path, progress: OnProgress | None = None) -> Any:
    """Return groups as a dataset that reads its rows from Arrow files in `folder`, which are written first."""
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDriverError(
            "to_dataset() needs the package datasets: pip install 'replaybuf[datasets,parquet]'"
        ) from error
    await in_thread(lambda: folder.mkdir(parents=True, exist_ok=True))
    name = folder / "rollouts.arrows"
    done = await export_files(storage, chosen, name, max_bytes=_BYTES, force=True, progress=progress)
    parts = await in_thread(lambda: [datasets.Dataset.from_file(str(file)) for file in done.files])
    return parts[0] if len(parts) == 1 else await in_thread(lambda: datasets.concatenate_datasets(parts))
