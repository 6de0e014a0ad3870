"""The types of columns: what values ask for, what takes which values, and what they are in Arrow.

A type is a text: "int64", "list:int32", "structs:role,content", "json", ...
"""

from __future__ import annotations

from typing import Any, Final

from replaybuf.errors import MissingDriverError

_INT64: Final = 2**63
_ITEMS: Final[dict[type, str]] = {int: "int64", float: "double", str: "string", bool: "bool_"}
_DTYPES: Final = {
    **{f"<i{n}": f"int{8 * n}" for n in (2, 4, 8)},
    **{f"<u{n}": f"uint{8 * n}" for n in (2, 4, 8)},
    "|i1": "int8",
    "|u1": "uint8",
    "<f2": "float",
    "<f4": "float",
    "<f8": "double",
    "|b1": "bool_",
    **{name: name for name in ("int8", "int16", "int32", "int64", "uint8")},
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
    "bool": "bool_",
}


def arrow() -> Any:
    """Return the module pyarrow. Raises MissingDriverError."""
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDriverError(
            "Parquet and Arrow files need the package pyarrow: pip install 'replaybuf[parquet]'"
        ) from error
    return pyarrow


def column_for(value: Any, kind: str | None) -> str:
    """Return the type of column that a value of a row asks for, given its kind there (`rows.KINDS`).

    "list:" is that of an empty list, which any list takes.
    """
    if type(value) is int:
        return "int64" if -_INT64 <= value < _INT64 else "json"
    if type(value) is not list:
        return {bool: "bool_", float: "double", str: "string", bytes: "binary"}.get(type(value), "json")
    if kind is not None and ":" in kind:  # numbers
        return f"list:{_DTYPES[kind.split(':')[1]]}"
    kinds = set(map(type, value))
    if not kinds:
        return "list:"
    if len(kinds) == 1 and (one := kinds.pop()) in _ITEMS:
        if one is int and not -_INT64 <= min(value) <= max(value) < _INT64:
            return "json"
        return f"list:{_ITEMS[one]}"
    if all(type(item) is dict and item and set(map(type, item.values())) == {str} for item in value):
        names = {tuple(item) for item in value}
        first = names.pop()
        if not names and is_unicode(first) and not any("," in name for name in first):
            return f"structs:{','.join(first)}"
    return "json"


def joined(wanted: set[str]) -> str:
    """Return the type of a column for values that ask for these."""
    filled = wanted - {"list:"}
    if len(filled) == 1:
        return filled.pop()
    numbers = {one.removeprefix("list:") for one in filled}
    if filled and all(one.startswith("list:") for one in filled):
        if all(name.startswith("int") for name in numbers):
            return "list:int64"
        if numbers <= {"float", "double"}:
            return "list:double"
    return "json"


def fits(wanted: str, column: str) -> bool:
    """Return whether a column takes values that ask for another type."""
    if wanted == column or column == "json":
        return True
    if wanted == "list:":
        return column.startswith(("list:", "structs:"))
    wider = {"list:int64": "list:int", "list:double": "list:float"}.get(column)
    return wider is not None and wanted.startswith(wider)


def arrow_type(column: str) -> Any:
    """Return the type of a column as Arrow has it. Raises MissingDriverError."""
    pa = arrow()
    if column == "json":
        return pa.string()
    if column.startswith("list:"):
        return pa.list_(arrow_type(column.removeprefix("list:")))
    if column.startswith("structs:"):
        return pa.list_(pa.struct([(name, pa.string()) for name in column.removeprefix("structs:").split(",")]))
    return getattr(pa, {"bool_": "bool_", "double": "float64", "float": "float32"}.get(column, column))()


def is_unicode(value: Any) -> bool:
    """Return whether texts are whole: Arrow has no half surrogate pairs."""
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    return all(map(is_unicode, (*value, *value.values()) if type(value) is dict else value))
