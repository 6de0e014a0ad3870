"""OpenTelemetry spans, if the application has set a tracer provider; otherwise nothing, at almost no cost.

This doesn't import OpenTelemetry: an application that has set a provider has imported `opentelemetry.trace`. Failures
there (of a sampler, a processor, an exporter) are logged, and don't affect calls. Attributes are tasks, numbers and
steps, never the content of rollouts, or URLs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from replaybuf import __version__
from replaybuf.common.redact import redact_words
from replaybuf.errors import DecodeError, InputError, ReplayBufError, RolloutError

P = ParamSpec("P")
T = TypeVar("T")

Attributes = Mapping[str, Any]

#: Errors whose texts may quote the content of a rollout: spans record only their types.
_QUOTING_ERRORS = (RolloutError, DecodeError, InputError)
_LONGEST = 200
_MODULE = "opentelemetry.trace"

_logger = logging.getLogger("replaybuf.buffer.tracing")

#: The attribute of each argument of a call, and how its value is made.
_ARGUMENTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "task_name": ("task", str),
    "items": ("rollouts", len),
    "model_step": ("model_step", int),
    "current_train_step": ("train_step", int),
    "train_step": ("train_step", int),
    "step": ("train_step", int),
    "keep_new": ("keep_new", bool),
    "task_stale_thresholds": ("tasks", list),
    "failed": ("failed", bool),
}


def traced(
    name: str, of_result: Callable[[Any], Attributes] | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Make each call of a coroutine of a buffer, a lease or a draw a span.

    Its attributes are made of the arguments and by `of_result`; they get the prefix `replaybuf.`, and None is left out.
    An error is recorded with its type, and with its text unless that may quote a rollout; a cancelled call has the
    attribute `replaybuf.cancelled`.
    """

    def decorate(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:  # without a coroutine of its own
            return (method if _tracer() is None else in_span)(*args, **kwargs)

        async def in_span(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name) as open_span:
                _describe(open_span, lambda: _call_attributes(signature.bind(*args, **kwargs)))
                result = await method(*args, **kwargs)
                if of_result is not None:
                    _describe(open_span, lambda: of_result(result))
                return result

        return call

    return decorate


@contextmanager
def span(name: str, **attributes: str) -> Iterator[Any]:
    """Make a current span of the block, with its error; yield None without a tracer, or if that fails."""
    current = open_span = None
    if (tracer := _tracer()) is not None:
        with _logging_errors():
            current = tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False)
            open_span = current.__enter__()
            _describe(open_span, lambda: attributes)
    try:
        yield open_span
    except BaseException as error:
        _record(open_span, error)
        raise
    finally:
        if current is not None and open_span is not None:
            with _logging_errors():
                current.__exit__(None, None, None)


def _call_attributes(bound: inspect.BoundArguments) -> Attributes:
    """Return the attributes of a call, by its arguments."""
    bound.apply_defaults()
    values = bound.arguments
    owner, arguments = values["self"], {**values, **values.get("options", {})}
    storage = arguments.get("storage")  # an empty one is false
    attributes: dict[str, Any] = {"buffer": (owner.storage if storage is None else storage).name}
    for name, (attribute, convert) in _ARGUMENTS.items():
        if arguments.get(name) is not None:
            attributes[attribute] = convert(arguments[name])
    if (token := getattr(owner, "token", None)) is not None:
        attributes["lease"] = token
    if "uids" in arguments:
        chosen = owner.open if arguments["uids"] is None else arguments["uids"]
        attributes["groups"] = len(chosen) if hasattr(chosen, "__len__") else None
    if (draw := getattr(owner, "draw", None)) is not None:
        attributes |= {"tasks": list(draw.sizes), "sizes": list(draw.sizes.values()), "status": str(draw.status)}
        attributes |= {"queried": draw.where is not None, "train_step": draw.train_step, "worker": draw.worker}
    return attributes


def of_uid(uid: int | None) -> Attributes:
    """Return the attributes of the result of a put."""
    return {"uid": uid, "stored": uid is not None}


def of_drawn(drawn: Mapping[str, Sequence[Any]]) -> Attributes:
    """Return the attributes of drawn groups, by task."""
    items = [item for items in drawn.values() for item in items]
    return {
        "groups": len(items),
        "replayed": sum(item.times_sampled > 1 for item in items),
        "max_staleness": max((item.staleness for item in items), default=None),
    }


@contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception:
        _logger.warning("a span was lost: the application's tracing failed", exc_info=True)


_NO_TRACER: tuple[Any, Any] = (None, None)
_known_tracer = _NO_TRACER  # a provider and its tracer, replaced as one tuple for thread safety


def _tracer() -> Any:
    """Return the tracer of the application's provider, or None if it has set none."""
    global _known_tracer
    trace = sys.modules.get(_MODULE)
    if trace is None:
        return None
    try:
        provider = trace.get_tracer_provider()
        current, tracer = _known_tracer
        if provider is not current:
            # Before a provider is set, this is a proxy.
            is_unset = isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
            tracer = None if is_unset else provider.get_tracer("replaybuf", __version__)
            _known_tracer = provider, tracer
        return tracer
    except AttributeError:  # another thread is still importing opentelemetry.trace
        return None


def _describe(open_span: Any, describe: Callable[[], Attributes]) -> None:
    with suppress(Exception):  # invalid arguments, for which the call itself raises
        if open_span is not None and open_span.is_recording():
            for name, value in describe().items():
                if value is not None:
                    open_span.set_attribute(f"replaybuf.{name}", value[:_LONGEST] if isinstance(value, str) else value)


def _record(open_span: Any, error: BaseException) -> None:
    """Record an error in a span, without traceback and causes, in which drivers quote parameters."""
    if open_span is None:
        return
    with _logging_errors():
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            open_span.set_attribute("replaybuf.cancelled", True)
            return
        trace, kind = sys.modules[_MODULE], type(error).__name__
        shows_text = isinstance(error, ReplayBufError) and not isinstance(error, _QUOTING_ERRORS)
        text = redact_words(str(error)) if shows_text else ""
        open_span.add_event("exception", {"exception.type": kind, "exception.message": text})
        open_span.set_status(trace.Status(trace.StatusCode.ERROR, f"{kind}: {text}" if text else kind))
