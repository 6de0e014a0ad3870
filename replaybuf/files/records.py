"""Records: what a pickle makes in place of objects. `Made("torch._utils._rebuild_tensor_v2", args)` is one."""

from __future__ import annotations

from typing import Any, Final

from replaybuf.errors import FileError, UnsafePickleError

#: xtuner's classes in a saved buffer, wherever their modules are.
RECORDS: Final = frozenset(
    (
        *("RolloutState", "StorageItem", "SerializedRayObjectRef", "SampleParams", "RolloutToolCall"),
        *("RolloutFunctionCall", "MultimodalInfo"),
    )
)
#: ... and their statuses.
STATUS: Final = "Status"


class Name:
    """A class or function that a pickle names. Calling it makes a record."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *args: Any, **options: Any) -> Made:
        return Made(self.text, args, options)

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError(f"the pickle changes {self.text}; it holds more than data, and was not loaded")


class Made:
    """What a pickle makes of a name: its arguments, its state, and what was put into it."""

    __slots__ = ("args", "items", "name", "options", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.name = name
        self.args = args
        self.options = options
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    add = append

    def __setitem__(self, name: Any, value: Any) -> None:
        self.pairs.append((name, value))


def record_fields(made: Made) -> dict[str, Any]:
    """Return the fields of an instance of a dataclass or a pydantic model."""
    state = made.state if isinstance(made.state, dict) else {}
    fields = state.get("__dict__") if "__pydantic_fields_set__" in state else state
    if not isinstance(fields, dict):
        raise FileError(f"the pickle's {made.name} has no fields")
    return fields
