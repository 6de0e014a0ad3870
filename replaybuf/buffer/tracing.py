"""OpenTelemetry spans, if the application has set a tracer provider; otherwise nothing, at almost no cost.

This doesn't import OpenTelemetry: an application that has set a provider has imported `opentelemetry.trace`. Failures
there (of a sampler, a processor, an exporter) are logged, and don't affect calls.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from replaybuf import __version__
from replaybuf.common.redact import redact_words
from replaybuf.errors import DecodeError, InputError, ReplayBufError, RolloutError

P = ParamSpec("P")
T = TypeVar("T")

Attributes = Mapping[str, Any]

#: Errors whose texts may quote the content of a rollout: spans record only their types.
_QUOTING = (RolloutError, DecodeError, InputError)
_LONGEST = 200
_MODULE = "opentelemetry.trace"

_logger = logging.getLogger("replaybuf.buffer.tracing")


def traced(
    name: str, before: Callable[[Mapping[str, Any]], Attributes], after: Callable[[Any], Attributes] | None = None
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Make each call of a coroutine a span.

    Its attributes are returned by `before`, given the arguments by name, and `after(result)`, and get the prefix
    `replaybuf.`; None is left out. They must not contain content of rollouts, or URLs. An error is recorded with its
    type, and with its text unless that may quote a rollout; a cancelled call has the attribute `replaybuf.cancelled`.
    """

    def decorate(method: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        signature = inspect.signature(method)

        def arguments(*args: P.args, **kwargs: P.kwargs) -> Attributes:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return before(bound.arguments)

        @functools.wraps(method)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            tracer = _tracer()
            if tracer is None:
                return await method(*args, **kwargs)
            with _spanned(tracer, name) as span:
                _describe(span, arguments, *args, **kwargs)
                result = await method(*args, **kwargs)
                if after is not None:
                    _describe(span, after, result)
                return result

        return call

    return decorate


@contextmanager
def waiting(kind: str) -> Iterator[Callable[[], None]]:
    """Make a span of a wait, which starts at the first call of the yielded function."""
    started: list[Any] = []

    def begin() -> None:
        tracer = None if started else _tracer()
        if tracer is not None:
            with _harmless():
                started.append(tracer.start_span("replaybuf.wait", attributes={"replaybuf.kind": kind}))

    try:
        yield begin
    except BaseException as error:
        for span in started:
            _record(span, error)
        raise
    finally:
        for span in started:
            with _harmless():
                span.end()


@contextmanager
def _spanned(tracer: Any, name: str) -> Iterator[Any]:
    """Make a current span of the block, with its error; yield None if that fails."""
    current = span = None
    with _harmless():
        current = tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False)
        span = current.__enter__()
    try:
        yield span
    except BaseException as error:
        _record(span, error)
        raise
    finally:
        if span is not None:
            with _harmless():
                current.__exit__(None, None, None)


@contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:
        _logger.warning("a span was lost: the application's tracing failed", exc_info=True)


_NONE: tuple[Any, Any] = (None, None)
_known = _NONE  # a provider and its tracer, replaced as one tuple for thread safety


def _tracer() -> Any:
    """Return the tracer of the application's provider, or None if it has set none."""
    global _known
    trace = sys.modules.get(_MODULE)
    if trace is None:
        return None
    try:
        provider = trace.get_tracer_provider()
        known, tracer = _known
        if provider is not known:
            # Before a provider is set, this is a proxy.
            nothing = isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
            tracer = None if nothing else provider.get_tracer("replaybuf", __version__)
            _known = provider, tracer
        return tracer
    except AttributeError:  # another thread is still importing opentelemetry.trace
        return None


def _describe(span: Any, describe: Callable[..., Attributes], *args: Any, **kwargs: Any) -> None:
    with suppress(Exception):  # invalid arguments, for which the call itself raises
        if span is not None and span.is_recording():
            for name, value in describe(*args, **kwargs).items():
                if value is not None:
                    span.set_attribute(f"replaybuf.{name}", value[:_LONGEST] if isinstance(value, str) else value)


def _record(span: Any, error: BaseException) -> None:
    """Record an error in a span, without traceback and causes, in which drivers quote parameters."""
    if span is None:
        return
    with _harmless():
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            span.set_attribute("replaybuf.cancelled", True)
            return
        trace, kind = sys.modules[_MODULE], type(error).__name__
        said = isinstance(error, ReplayBufError) and not isinstance(error, _QUOTING)
        text = redact_words(str(error)) if said else ""
        span.add_event("exception", {"exception.type": kind, "exception.message": text})
        span.set_status(trace.Status(trace.StatusCode.ERROR, f"{kind}: {text}" if text else kind))
