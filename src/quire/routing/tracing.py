"""Tracing of a router: a span for each request, with the servers that were asked, and why.

    route            from its arrival to the end of its answer; its parent is the client's
      request        that of the server, whose parent is this span

A server that is asked or lost is an event of the span. Without a place for spans nothing is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.routing.config import MembersConfig
from quire.serve.tracing import SpanSender

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_CONTEXT = {b"traceparent", b"tracestate"}


class RouteSpan:
    """What is told of one request. This one tells nothing."""

    def note(self, event: str, server: str, about: Callable[[], Mapping[str, Any]]) -> None:
        """A server was "asked" or "lost", or the request "failed"."""

    def close(self) -> None:
        """The client has the answer, or has left."""


class RouteTracing:
    """What makes the spans of a router. This one sends none."""

    def begin(self, scope: Scope) -> RouteSpan:
        """For a request, whose headers may be changed for the servers that get it."""
        return RouteSpan()

    def close(self) -> None:
        """Send what is left."""


class _SentSpan(RouteSpan):
    def __init__(self, span: Span) -> None:
        self._span, self.close = span, span.end  # type: ignore[method-assign]

    def note(self, event: str, server: str, about: Callable[[], Mapping[str, Any]]) -> None:
        told = {"quire.server": server, **{f"quire.{name}": value for name, value in about().items()}}
        self._span.add_event(event, told)
        if event == "asked":
            self._span.set_attributes(told)
        elif event == "failed":
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, told["quire.why"])


class SentRoutes(SpanSender, RouteTracing):
    """Spans of a router, which go to a collector."""

    def begin(self, scope: Scope) -> RouteSpan:
        from opentelemetry.trace import SpanKind, set_span_in_context

        if scope["method"] != "POST":
            return RouteSpan()
        parent, about = self.parent(Headers(scope=scope)), {"url.path": scope["path"]}
        span = self.tracer.start_span("route", parent, SpanKind.SERVER, about)
        sent: dict[str, str] = {}
        self.propagator.inject(sent, set_span_in_context(span))
        own = [(name.encode(), value.encode()) for name, value in sent.items()]
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _CONTEXT] + own
        return _SentSpan(span)


def open_routes(config: MembersConfig) -> RouteTracing:
    """That of a router. Raises InvalidInput without OpenTelemetry."""
    endpoint = config.otlp_traces_endpoint
    return RouteTracing() if endpoint is None else SentRoutes(endpoint, "quire-router")
