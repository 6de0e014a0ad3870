"""Configs that can be read from files and environment variables, with one-line errors."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ImportString,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from replaybuf.common.checks import nearest
from replaybuf.common.passwords import name_of
from replaybuf.common.redact import redact, redact_words
from replaybuf.errors import ConfigError

#: A function, itself or as "module:function".
Function = Callable[..., Any] | ImportString[Any]

#: The similarity at which a variable of the environment is a misspelt field: a launcher has variables of its own.
_SIMILARITY = 0.8
#: What follows the prefix in the variables of configs with a longer one.
_PREFIXES = ("chunks_", "produce_")

if TYPE_CHECKING:
    # Type checkers derive the constructor's arguments from the fields only for pydantic's own metaclass.
    from pydantic._internal._model_construction import ModelMetaclass as _OneLineErrors
else:

    class _OneLineErrors(type(BaseModel)):
        """Converts validation errors of the constructor into one-line ConfigErrors.

        Validation inside another pydantic model doesn't call the constructor: there pydantic reports the location.
        """

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **{name: _plain_value(value, name) for name, value in values.items()})
            except ValidationError as error:
                raise ConfigError(f"{cls.__name__}: {_describe(cls, error)}") from None


class ReadableConfig(BaseModel, metaclass=_OneLineErrors):
    """A config that is immutable, rejects unknown fields, and never shows a password."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True, hide_input_in_errors=True)

    env_prefix: ClassVar[str] = "REPLAYBUF_"

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_fields(cls, values: Any) -> Any:
        """Refuse unknown fields in our words, also within another model."""
        if not isinstance(values, Mapping | cls):
            raise refusal(cls, {"": f"expected a mapping of fields, got {type(values).__name__}"})
        if cls.model_config.get("extra") != "forbid" or isinstance(values, cls):  # a subclass may take other fields
            return values
        if unknown := [str(name) for name in values if name not in cls.model_fields]:
            raise refusal(cls, {name: f"{name} is no field" + _hint(name, cls.model_fields) for name in unknown})
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans for numbers: `capacity: yes` would be 1."""
        if isinstance(value, bool) and not _takes_booleans(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"expected a number, got {value}")
        return value

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | Any) -> Self:
        """Read the config from a section of a training config, with the fields' names as keys.

        The section is a mapping, an OmegaConf container (also a structured one; interpolations are resolved), or an
        instance of a dataclass, such as TRL's and verl's arguments. `_target_` may name this class. Raises ConfigError.
        """
        if dataclasses.is_dataclass(values) and not isinstance(values, type):
            values = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
        section = _plain_value(values, cls.__name__)
        if not isinstance(section, Mapping):
            raise ConfigError(f"{cls.__name__}: expected a mapping or a dataclass, got {type(section).__name__}")
        target = section.get("_target_")
        if target is not None and str(target).rpartition(".")[2] in ("", cls.__name__):
            section = {name: value for name, value in section.items() if name != "_target_"}
        if odd := [name for name in section if not isinstance(name, str)]:  # YAML takes `on` and `yes` for True
            raise ConfigError(f"{cls.__name__}: {odd[0]!r} is no field: names are texts")
        return cls(**section)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], section: str | None = None) -> Self:
        """Read the config from a YAML or JSON file, or from a section ("trainer.replay_buffer"). Raises ConfigError."""
        import yaml  # which workers whose config comes from elsewhere needn't import

        file = Path(path)
        try:
            text = file.read_text("utf-8")
            values: Any = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            # Without the error's text, which quotes the file, and perhaps a password.
            position = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ConfigError(f"can't read {file}{position}: it isn't YAML") from None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"can't read {file}: {error}") from error
        for name in (section or "").split(".") if section else ():
            if not isinstance(values, Mapping) or name not in values:
                raise ConfigError(f"{file} has no section {section!r} (at {name!r})")
            values = values[name]
        if values is None and section:  # the section exists, and is empty
            values = {}
        if not isinstance(values, Mapping):
            raise ConfigError(f"{file}: expected a mapping with {', '.join(cls.model_fields)}")
        try:
            return cls.from_mapping(values)
        except ConfigError as error:
            place = f"{file}, section {section}" if section else str(file)
            raise ConfigError(f"{place}: {error}") from error.__cause__

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the config from environment variables, such as REPLAYBUF_URL. Raises ConfigError.

        `none` is None for the fields that take it. Other variables with this prefix are ignored, except that a name
        similar to a field's raises ConfigError.
        """
        environ = os.environ if environ is None else environ
        names = {name: cls.env_prefix + name.upper() for name in cls.model_fields}
        for key in environ:
            name = key.removeprefix(cls.env_prefix).lower()
            if name.startswith(_PREFIXES) or name == key.lower() or name in names:
                continue
            if similar := nearest(name, names, _SIMILARITY):
                raise ConfigError(f"the environment variable {key} is unknown; did you mean {names[similar]}?")
        values: dict[str, str | None] = {name: environ[key] for name, key in names.items() if key in environ}
        for name, text in values.items():
            if text == "none" and NoneType in get_args(cls.model_fields[name].annotation):
                values[name] = None
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {_describe(cls, error, names.__getitem__)}") from None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        safe: dict[str | None, Callable[[Any], Any]] = {
            "url": redact,
            "password": lambda password: password and name_of(password),
        }
        return [(name, safe[name](value) if name in safe else value) for name, value in super().__repr_args__()]


def _describe(config: type[BaseModel], error: ValidationError, called: Callable[[str], str] = lambda name: name) -> str:
    """Return the errors on one line, without the values, which may contain a password."""
    lines: dict[str, list[str]] = {}
    for problem in error.errors(include_input=False, include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "missing" and len(problem["loc"]) == 1:
            lines[f"{called(name)} is missing"] = []
        elif name in config.model_fields:
            lines.setdefault(called(name), []).append(problem["msg"].removeprefix("Value error, "))
        else:
            lines[problem["msg"]] = []
    return "; ".join(f"{head}: {' / '.join(dict.fromkeys(texts))}" if texts else head for head, texts in lines.items())


def refusal(config: type[BaseModel], whys: Mapping[str, str]) -> ValidationError:
    """Return pydantic's error with these texts by place; without the values, which may contain a password."""
    types = {place: PydanticCustomError("refused", "{why}", {"why": text}) for place, text in whys.items()}
    lines: Any = [{"type": kind, "loc": (place,) if place else ()} for place, kind in types.items()]
    return ValidationError.from_exception_data(config.__name__, lines)


def _hint(name: str, fields: Iterable[str]) -> str:
    similar = nearest(name, fields)
    return f"; did you mean {similar}?" if similar else f" (fields: {', '.join(fields)})"


def _plain_value(value: Any, name: str) -> Any:
    """Return OmegaConf's containers as dicts and lists, with interpolations resolved. Raises ConfigError."""
    omegaconf = sys.modules.get("omegaconf")  # without its import, no value is one of its containers
    if omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return value
    try:
        return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        place = getattr(error, "full_key", None) or name
        raise ConfigError(f"{place}: {redact_words(str(error).partition(chr(10))[0])}") from None


def _takes_booleans(annotation: Any) -> bool:
    """Return whether the annotation admits booleans: it has other types than numbers."""
    return not {*(get_args(annotation) or (annotation,))} <= {int, float, NoneType}
