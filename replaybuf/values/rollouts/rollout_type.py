"""Rollouts of any class: access to their fields, and conversion to and from stored fields.

Users bring `RolloutState`, their own pydantic model, dataclass or TypedDict, or plain `dict`. The rest of replaybuf
uses `RolloutType` and doesn't depend on the class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any, Final

from replaybuf.common.checks import shown
from replaybuf.errors import ConfigError, DecodeError, InputError, RolloutError
from replaybuf.values.rollouts.annotations import choices_of, types_in
from replaybuf.values.rollouts.rewards import SCORE
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.shapes import Fields, Shape, quoted, shape_of
from replaybuf.values.rollouts.statuses import Statuses


class Classes:
    """The classes that can be reached from `named` through annotations, by their names in payloads.

    These are enums, and classes with a shape; other classes in annotations are ignored, since their content isn't
    declared. Raises ConfigError when two have the same name.
    """

    def __init__(self, named: Iterable[type[Any]]) -> None:
        self.shapes: dict[type[Any], Shape] = {}
        self._enums: set[type[Any]] = set()
        self._by_name: dict[str, type[Any]] = {}
        self._by_qualname: dict[str, list[type[Any]]] = {}
        self._explore(named)

    def __contains__(self, cls: type[Any]) -> bool:
        return cls in self.shapes or cls in self._enums

    def find(self, name: Any) -> type[Any] | None:
        """Return the class with this name in payloads, or None.

        A class that has moved to another module since (or was in `__main__` then) is found by its qualified name
        without the module, if that is unique.
        """
        cls = self._by_name.get(name)
        if cls is None and isinstance(name, str):
            classes = self._by_qualname.get(name.partition(":")[2], ())
            cls = classes[0] if len(classes) == 1 else None
        return cls

    def _explore(self, named: Iterable[type[Any]]) -> None:
        pending, visited = list(named), set()
        while pending:
            cls = pending.pop(0)
            if cls in visited:
                continue
            visited.add(cls)
            if issubclass(cls, Enum):
                self._enums.add(cls)
                self._add(cls)
            elif (shape := shape_of(cls)) is not None:
                if not issubclass(cls, dict):  # a TypedDict's instances are dicts
                    self.shapes[cls] = shape
                    self._add(cls)
                pending += [kind for field in shape.fields for kind in types_in(field.annotation)]
                pending += _origin(cls)

    def _add(self, cls: type[Any]) -> None:
        name = stored_name(cls)
        if name in self._by_name:
            raise ConfigError(
                f"two classes are called {name_of(cls)}: payloads couldn't tell them apart; rename one of them"
            )
        self._by_name[name] = cls
        self._by_qualname.setdefault(cls.__qualname__, []).append(cls)


def name_of(cls: type[Any]) -> str:
    """Return the name of a class for messages: with its module, unless that is builtins."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def stored_name(cls: type[Any]) -> str:
    """Return the name of a class in payloads, with a colon after its module."""
    return f"{cls.__module__}:{cls.__qualname__}"


def checked(cls: Any, where: str) -> type[Any]:
    """Return a class named in a config. Raises ConfigError unless its annotations declare its content."""
    if not is_storable(cls) or cls is Enum:
        raise ConfigError(
            f"{where} takes enums, named tuples, TypedDicts, pydantic models and dataclasses, not {shown(cls)}; values "
            "of other classes are stored with converters="
        )
    return cls  # type: ignore[no-any-return]


def is_storable(cls: Any) -> bool:
    """Return whether this is a class whose annotations declare its content."""
    if not isinstance(cls, type) or cls is dict:
        return False
    return issubclass(cls, Enum) or shape_of(cls) is not None


def _origin(cls: type[Any]) -> list[type[Any]]:
    """Return the generic model of a parametrised one."""
    origin = getattr(cls, "__pydantic_generic_metadata__", {}).get("origin")
    return [] if origin is None else [origin]


#: The fields used by features, which may have other names in a user's class.
OUR_FIELDS: Final = frozenset(
    (
        *("rollout_id", "group_id", "task_name", "status", "reward", "error_msg", "message", "prompt", "prompt_ids"),
        *("tokens", "response", "response_ids", "response_mask", "response_model_steps", "seq_staleness", "logprobs"),
        *("routed_experts", "finish_reason", "input_ids", "labels"),
    )
)


class RolloutType:
    """A class of rollouts: access to the fields used by features, and conversion to and from stored fields.

    `cls` is `dict`, a TypedDict, a pydantic model or a dataclass; those of a TypedDict are dicts of any keys.
    Nested instances of such classes, enums and named tuples can be stored at any depth, if annotations declare them;
    `types` are further ones, for fields declared as Any. `replaybuf.values.rollouts.shapes` rebuilds instances.

    `reward_key` is the part of a dict reward that counts as the reward. `fields` maps our names to names of the class,
    or to None if the class has no such field, or one of that name with another meaning. `statuses` maps the class's own
    statuses to ours. Stored fields keep the names and values of the class. Raises ConfigError for invalid arguments.
    """

    def __init__(
        self,
        cls: type[Any],
        *,
        types: Iterable[type[Any]] = (),
        fields: Mapping[str, str | None] | None = None,
        statuses: Mapping[Any, Any] | None = None,
        reward_key: str = SCORE,
    ) -> None:
        if not isinstance(reward_key, str) or not reward_key:
            raise ConfigError(f"reward_key must be the name of a part of a dict reward, got {shown(reward_key)}")
        self.cls = cls
        self.reward_key = reward_key
        #: Whether a warning about a reward that isn't a number was logged: once is enough.
        self.warned_of_reward = False
        shape = shape_of(cls)
        if shape is None or issubclass(cls, tuple):
            raise ConfigError(
                f"rollout_type must be dict, a TypedDict, a pydantic model or a dataclass, not {shown(cls)}"
            )
        self._shape = shape
        self.names = shape.names
        self.classes = Classes(dict.fromkeys([cls, *(checked(kind, "types") for kind in types), Status]))
        self.statuses = Statuses(statuses)
        #: Whether rollouts are dicts.
        self.is_dict = issubclass(cls, dict)
        self._instances = dict if self.is_dict else cls
        self._renames = _check_renames(shape, fields or {})
        self._readers: dict[tuple[str, ...], Callable[[Any], Sequence[Any]]] = {}
        status = next((field for field in shape.fields if field.name == self._renames.get("status", "status")), None)
        self._status_choices = choices_of(status.annotation) if status else []

    def __repr__(self) -> str:
        return f"RolloutType({self.cls.__qualname__})"

    def get(self, rollout: Any, name: str, default: Any = None) -> Any:
        """Return the rollout's value of our field `name`, or `default` if it has no such field. Raises RolloutError."""
        field_name = self._renames.get(name, name)
        if field_name is None:
            return default
        if self.is_dict:
            return rollout.get(field_name, default)
        try:
            return getattr(rollout, field_name, default)
        except Exception as error:  # of a property
            raise RolloutError(
                f"{field_name!r} of a {self.cls.__qualname__} raised {type(error).__name__}: {error}"
            ) from error

    def values_of(self, rollouts: Sequence[Any], names: tuple[str, ...]) -> list[Sequence[Any]]:
        """Return the values of these fields of ours, at least two, of each rollout, None for a missing one.

        It costs a fraction of as many calls of `get`. Raises RolloutError when a property raises.
        """
        if (read := self._readers.get(names)) is None:
            read = self._readers[names] = self._reader(names)
        return [*map(read, rollouts)]

    def _reader(self, names: tuple[str, ...]) -> Callable[[Any], Sequence[Any]]:
        field_names = [self._renames.get(name, name) for name in names]
        if self.is_dict and None not in field_names:
            return lambda rollout: [*map(rollout.get, field_names)]
        get_fields: Callable[[Any], Sequence[Any]] = itemgetter(*field_names)
        if not self.names.issuperset(field_names):
            return lambda rollout: [self.get(rollout, name) for name in names]

        def read(rollout: Any) -> Sequence[Any]:
            try:  # a third of the time of as many attributes
                return get_fields(rollout.__dict__)
            except (AttributeError, KeyError):  # an attribute that is unset, or a default of the class, or a slot
                return [self.get(rollout, name) for name in names]

        return read

    def has(self, rollout: Any, name: str) -> bool:
        """Return whether the rollout has our field `name` (which may hold None)."""
        field_name = self._renames.get(name, name)
        if field_name is None:
            return False
        return field_name in self.names or (field_name in rollout if self.is_dict else hasattr(rollout, field_name))

    def may_have(self, *names: str) -> bool:
        """Return whether rollouts of this class may have all these fields of ours; dicts may have any."""
        return self.cls is dict or all(self._renames.get(name, name) in self.names for name in names)

    def set(self, rollout: Any, name: str, value: Any) -> None:
        """Set our field `name` of a rollout, in place, if its class has such a field; a dict has any.

        The class's own `__setattr__` and validators run. Frozen instances are changed, too, since `put` normalises
        rollouts in place. Raises RolloutError when the class refuses the value.
        """
        field_name = self._renames.get(name, name)
        if field_name is None or not (self.cls is dict or self.has(rollout, name)):
            return
        try:
            self._shape.set(rollout, field_name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise RolloutError(f"can't set {field_name!r} of a {type(rollout).__qualname__}: {error}") from error

    def set_all(self, rollouts: Sequence[Any], name: str, values: list[Any]) -> list[Any]:
        """Set our field `name` of rollouts, in place, as `set` does; return the values that they have then."""
        field_name = self._renames.get(name, name)
        if field_name is not None and self._shape.set_directly(rollouts, field_name, values):
            return values
        for rollout, value in zip(rollouts, values, strict=True):
            self.set(rollout, name, value)
        return [self.get(rollout, name) for rollout in rollouts]

    def status(self, rollout: Any) -> Status:
        """Return the status of a rollout; COMPLETED without one. Raises RolloutError for an unknown status."""
        value = self.get(rollout, "status", Status.COMPLETED)
        status = self.statuses.get(value)
        if status is None:
            raise RolloutError(
                f"status is {shown(value)}; expected one of {', '.join(Status)}, or one that the config maps to one of "
                f"them: statuses={{{_key_of(value)!r:.50}: ...}}"
            )
        return status

    def says_status(self, rollout: Any) -> bool:
        """Return whether the status of a rollout was set; only pydantic models tell it from their default."""
        names_set = getattr(rollout, "model_fields_set", None)
        return names_set is None or self._renames.get("status", "status") in names_set

    def set_status(self, rollout: Any, status: Status) -> None:
        """Set the status of a rollout, as a member of its own Enum or a string of its own style (`Statuses.like`).

        Without an equivalent in the class, the rollout isn't changed: then only its group has this status.
        """
        current = self.get(rollout, "status")
        new = self.statuses.like(status, current, self._status_choices)
        if new is not current:
            self.set(rollout, "status", new)

    def from_fields(self, fields: Fields) -> Any:
        """Build a rollout from fields, without validation, with defaults filled in; `fields` is consumed.

        Raises DecodeError, naming the fields, if there are unknown or missing ones, as in a payload of another rollout
        type.
        """
        self._check_stored(fields)
        return self._shape.build(fields)

    def rows(self, rollouts: Sequence[Any]) -> list[Fields]:
        """Return the fields of rollouts by name, with the values themselves; the dicts aren't to be changed.

        Fields that are None by default and in value may be left out. Extra fields of a pydantic model that allows them
        are there. Raises RolloutError when a rollout is not exactly of this class (fields of a subclass would be lost)
        or lacks a required field.
        """
        for rollout in rollouts:
            if type(rollout) is not self._instances:
                self.check_class(rollout)
        rows = self._shape.rows(rollouts)
        names = [*map(tuple, rows)] if len(rows) > 1 else []
        for fields in rows[:1] if names and names.count(names[0]) == len(rows) else rows:
            if problem := self._shape.problem(fields):
                raise RolloutError(f"this {self.cls.__qualname__} can't be stored: {problem}")
        return rows

    @property
    def omitted(self) -> frozenset[str]:
        """The fields that are left out of payloads when they are None."""
        return self._shape.omitted

    def from_columns(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Any]:
        """Build rollouts from the values of each field, as `from_fields` does from those of one rollout."""
        if not columns:
            return [self.from_fields({}) for _ in range(rows)]
        self._check_stored(columns)
        return self._shape.build_all(columns)

    def _check_stored(self, fields: Mapping[str, Any]) -> None:
        if problem := self._shape.problem(fields):
            raise DecodeError(
                f"the payload was written for another rollout type than {self.cls.__qualname__}: {problem}"
            )

    def deferrable(self, names: Iterable[Any]) -> frozenset[str]:
        """Return these names of fields whose arrays can be read later. Raises InputError."""
        chosen = frozenset(name if isinstance(name, str) else shown(name) for name in names)
        for name in sorted(chosen):
            if name not in self.names and not self.is_dict and not self._shape.extra:
                has = _listing(self.names)
                raise InputError(f"deferred: {self.cls.__qualname__} has no field {shown(name)}; it has {has}")
            if name in {self._renames.get(needed, needed) for needed in _MASKED_BY}:
                raise InputError(
                    f"deferred: {name} is needed to mask the tokens that are too old, so it is always read; defer the "
                    "fields with large tensors, such as routed_experts"
                )
        return chosen

    def require_all(self, rollouts: Iterable[Any], features: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Call `require` for each rollout and each feature, given with our names of its required fields."""
        lacking = [required for required in features if self._renames or not self.names.issuperset(required[1])]
        for rollout in rollouts:
            self.check_class(rollout)
            for feature, names in lacking:
                self.require(rollout, names, feature)

    def require(self, rollout: Any, names: Iterable[str], feature: str) -> None:
        """Raise RolloutError, naming the `feature` and its missing fields, unless the rollout has all of them."""
        self.check_class(rollout)
        missing = [name for name in names if not self.has(rollout, name)]
        if missing:
            raise self._lack_error(missing, feature)

    def require_of_class(self, name: str, feature: str) -> None:
        """Raise RolloutError if no rollout of this class can have our field `name`, required by `feature`."""
        config = getattr(self.cls, "model_config", None)
        open_ended = isinstance(config, dict) and config.get("extra") == "allow" and self._renames.get(name, name)
        if not open_ended and not self.may_have(name):
            raise self._lack_error([name], feature)

    def _lack_error(self, missing: Sequence[str], feature: str) -> RolloutError:
        return RolloutError(
            f"{feature} needs {quoted(missing)}, which this {self.cls.__qualname__} doesn't have: give it such "
            f"fields, or, where they have other names, say so in the config: fields={{{missing[0]!r}: ...}}"
        )

    def check_class(self, rollout: Any) -> None:
        """Raise RolloutError unless the rollout is exactly of this class; the other methods rely on it."""
        if type(rollout) is self._instances:
            return
        actual, expected = type(rollout).__qualname__, self.cls.__qualname__
        raise RolloutError(
            f"this buffer holds rollouts of exactly {expected}, not {actual}; rollout_type= in the config names another"
        )


#: The fields with a value for each token of the response.
BY_TOKEN = ("response_ids", "logprobs", "response_mask", "response_model_steps")
#: Our fields that are read for masking tokens.
_MASKED_BY = ("response_ids", "response_mask", "response_model_steps")


def _check_renames(shape: Shape, fields: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the class's names for our fields where they differ. Raises ConfigError."""
    names: dict[str, str | None] = {}
    for key, name in fields.items():
        if key not in OUR_FIELDS:
            raise ConfigError(f"fields: {shown(key)} is no field that replaybuf uses; there are {_listing(OUR_FIELDS)}")
        if name is not None and name not in shape.names and not shape.extra:
            raise ConfigError(
                f"fields: {key} is mapped to {shown(name)}, which {shape.cls.__qualname__} doesn't have; it has "
                f"{_listing(shape.names)}"
            )
        if name is not None and name in names.values():
            raise ConfigError(f"fields: two names are mapped to {shown(name)}")
        names[key] = name
    # A class field mapped to one of our names isn't also our field of its own name, and a method isn't a field.
    hidden = {name: None for name in names.values() if name in OUR_FIELDS and name not in names}
    if not issubclass(shape.cls, dict):
        others = {name: getattr(shape.cls, name, None) for name in OUR_FIELDS - shape.names - names.keys()}
        # Other descriptors are routines to `inspect`, too, such as cached properties, which can't be called.
        hidden |= {name: None for name, value in others.items() if callable(value) and inspect.isroutine(value)}
    return {**hidden, **{key: name for key, name in names.items() if name != key}}


def _listing(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _key_of(value: Any) -> Any:
    return value.name.lower() if isinstance(value, Enum) else value
