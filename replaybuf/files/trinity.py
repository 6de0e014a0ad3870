"""Databases of Trinity-RFT: its experiences as rollouts, read from SQLite or PostgreSQL without its package.

It keeps a row of metadata for each experience in one table, and what the experience holds in a second one, named
`..._blob`: a header, a pickle of plain values, and tensors in the format of safetensors (trinity-rft 0.6).
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import column, inspect, select, table

from replaybuf.codec.tensors import SIZES, StoredTensor
from replaybuf.errors import FileError, InputError
from replaybuf.files.foreign import Mapped
from replaybuf.files.pickles import Loading
from replaybuf.files.rebuilding import Rebuilding
from replaybuf.files.rows import FileGroup
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_MAGIC: Final = b"TRXP"
_HEAD: Final = struct.Struct("<4sBQQ")
_COLUMNS: Final = ("id", "task_id", "run_id", "msg_id", "model_version", "reward", "consumed")
_ROWS: Final = 64
_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def read_trinity(url: str, mapped: Mapped, name: str | None = None) -> Iterator[FileGroup]:
    """Yield the experiences of a Trinity-RFT database as groups: those of one task that follow each other.

    `name` is the table, the only one with experiences unless given. Raises FileError and InputError.
    """
    reader = open_reader(url)
    chosen = _choose(reader, name)
    group: FileGroup | None = None
    last: Any = None
    after = 0
    while rows := reader.read(partial(_read, name=chosen, after=after)):
        after = rows[-1][0]
        for row in rows:
            place = f"{chosen}, id {row[0]}"
            rollout, batch = _rollout(place, row, mapped)
            mine = (batch, row[1])
            if group is not None and mine != last:
                yield group
                group = None
            if group is None:
                task = mapped.task or chosen
                group = FileGroup(place, task, rollout["status"], [rollout], times_sampled=_consumed(place, row[6]))
                last = mine
            else:
                group.rollouts.append(rollout)
    if group is not None:
        yield group


def _choose(reader: Reader, name: str | None) -> str:
    there = reader.read(lambda tx: inspect(tx.connection).get_table_names())
    found = [one for one in there if f"{one}_blob" in there]
    if name is not None and name not in found:
        raise InputError(f"there is no table {name!r:.100} with experiences; there are {', '.join(found) or 'none'}")
    if name is None and len(found) != 1:
        if "rb_group" in there:
            raise InputError("this is a database of replaybuf: replaybuf save and resume, or export, copy its groups")
        what = (
            f"several tables: choose one with table= (--from-table): {', '.join(found)}"
            if found
            else "no table with experiences"
        )
        raise InputError(f"{reader.where} is no database of Trinity-RFT that can be read: it has {what}")
    return name or found[0]


def _read(tx: Transaction, name: str, after: int) -> list[Any]:
    about = table(name, *map(column, _COLUMNS))
    blob = table(f"{name}_blob", column("id"), column("experience_bytes"))
    both = about.outerjoin(blob, about.c.id == blob.c.id)
    chosen = select(*about.c, blob.c.experience_bytes).select_from(both).where(about.c.id > after)
    return [tuple(row) for row in tx.execute(chosen.order_by(about.c.id).limit(_ROWS))]


def _rollout(place: str, row: tuple[Any, ...], mapped: Mapped) -> tuple[dict[str, Any], Any]:
    """Return an experience as a rollout, and the batch that it was made in."""
    ident, task_id, _, _, version, reward, _, blob = row
    if not isinstance(blob, bytes):
        raise FileError(f"{place}: its experience_bytes are missing")
    try:
        meta, tensors = _parts(blob)
        eid = meta.get("eid") or {}
        return _fields(meta, tensors, version, reward, mapped) | {
            "group_id": task_id,
            "rollout_id": ident,
            "uid": ident,
        }, eid.get("batch")
    except FileError as error:
        raise type(error)(f"{place}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
        raise FileError(f"{place}: its experience_bytes are damaged ({error!s:.150})") from error


def _consumed(place: str, value: Any) -> int:
    """Return how often an experience was read."""
    if type(value) not in (int, type(None)):  # SQLite keeps anything in any column
        raise FileError(f"{place}: consumed is {value!r:.60}; expected a whole number")
    return value or 0


def _parts(blob: bytes) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the plain values and the tensors of an experience."""
    if not blob.startswith(_MAGIC):
        raise ValueError("they are a pickle of a version of Trinity-RFT before 0.6, which this reader doesn't know")
    _, version, meta_size, tensor_size = _HEAD.unpack_from(blob)
    if version != 1 or _HEAD.size + meta_size + tensor_size != len(blob):
        raise ValueError(f"version {version}, {meta_size} and {tensor_size} bytes in {len(blob)}")
    pickled = blob[_HEAD.size : _HEAD.size + meta_size]
    loaded = Loading(io.BytesIO(pickled), meta_size, lambda pid: None).load()
    about = Rebuilding(meta_size).tree(loaded)
    [meta] = about["items"]
    return meta, {name.partition(":")[2]: one for name, one in _safetensors(blob[_HEAD.size + meta_size :]).items()}


def _safetensors(data: bytes) -> dict[str, StoredTensor]:
    """Return the tensors in a file of safetensors."""
    (size,) = struct.unpack_from("<Q", data)
    if size > len(data) - 8:
        raise ValueError(f"a header of {size} bytes in {len(data)}")
    header, body = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
    tensors = {}
    for name, one in header.items():
        if name != "__metadata__":
            start, end = one["data_offsets"]
            dtype = _DTYPES[one["dtype"]]
            if not 0 <= start <= end <= len(body) or (end - start) % SIZES[dtype]:
                raise ValueError(f"tensor {name!r:.60} at {start} to {end} of {len(body)}")
            tensors[name] = StoredTensor([dtype, one["shape"], bytes(body[start:end]), 0])
    return tensors


def _fields(
    meta: dict[str, Any], tensors: dict[str, StoredTensor], version: Any, reward: Any, mapped: Mapped
) -> dict[str, Any]:
    """Return the fields of a rollout. What it has no field for is in `extra_fields`."""
    tokens, prompt = tensors.pop("tokens").numpy(), int(meta["prompt_length"])
    mask, logprobs = tensors.pop("action_mask", None), tensors.pop("logprobs", None)
    routed = tensors.pop("routed_experts", None)
    answer = [int(token) for token in tokens[prompt:]]
    messages = meta.get("messages") or [{"role": "user", "content": meta.get("prompt_text") or ""}]
    extra: dict[str, Any] = {
        name: meta[name]
        for name in ("info", "metrics", "eid", "truncate_status", "tools", "chosen_messages", "rejected_messages")
        if meta.get(name)
    }
    fields: dict[str, Any] = {
        "message": messages,
        "task_name": mapped.task,
        "prompt_ids": [int(token) for token in tokens[:prompt]],
        "response": meta.get("response_text"),
        "response_ids": answer,
        "response_mask": None if mask is None else [int(one) for one in mask.numpy()],
        "logprobs": None if logprobs is None else [float(one) for one in logprobs.numpy()],
        "routed_experts": routed,
        "response_model_steps": None if version is None else [int(version)] * len(answer),
        "reward": None if reward is None else {"score": float(reward)},
        "status": mapped.status or Status.COMPLETED,
        "extra_fields": extra | dict(tensors),
    }
    return {name: value for name, value in fields.items() if value is not None}
