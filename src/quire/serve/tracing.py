"""Tracing: the spans of requests, by OpenTelemetry (the extra `otel`).

    request          from its arrival to its end; its parent is the client's, by W3C `traceparent`
      queue          until the turn of the scheduler that admitted it
      fetch          of its prompt from a store or a peer, while it waited
      match          that turn: what of its prompt is cached
      load           until its first step was launched, if pages came from the host
      prefill        until its first token
      decode         until its last one

They are made when the request ends, from times that the engine reports once. Nothing is made for a step or a page. The
exporter has a thread of its own: a collector that is slow or gone holds no request, and spans are dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.cache.request_kv import CacheUse
from quire.engine.config import EngineConfig
from quire.engine.messages import SequenceTimes
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.context import Context

CLOSE_S = 3.0
"""Seconds in which the last spans are sent when a server ends."""

Traced = tuple[SequenceTimes | None, CacheUse, float | None]
"""What the engine says of a sequence, what of its prompt was cached, and when its last token came, in seconds from the
start of its request."""


class SpanSender:
    """Spans of one process on their way. Variables `OTEL_*` say the name of the service, headers and the sampler."""

    def __init__(self, endpoint: str, service: str) -> None:
        """Raises InvalidInput without OpenTelemetry."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise InvalidInput(
                f"--otlp-traces-endpoint needs OpenTelemetry: {error}.", fix="pip install 'quire-kv[otel]'."
            ) from error
        named = Resource({"service.name": service}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self._provider.get_tracer("quire", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def parent(self, headers: Mapping[str, str]) -> Context:
        """The span of a client that sent these; an empty context if it sent none, or none that can be read."""
        return self.propagator.extract(headers)

    def close(self) -> None:
        """Send what is left, for at most `CLOSE_S`: a collector may be gone."""
        closing = threading.Thread(target=self._provider.shutdown, name="quire-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class Tracing(SpanSender):
    """The spans of one server."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        super().__init__(endpoint, "quire")
        self._model_name = model_name

    def ended(
        self, parent: Context | None, told: Mapping[str, Any], started_s: float, sequences: Iterable[Traced]
    ) -> None:
        """A request that began at `started_s` of the monotonic clock has ended; `told` is what `Live.ended` is told."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        epoch_s, usage = time.time() - time.monotonic(), told["usage"]

        def at(seconds: float) -> int:
            return int((epoch_s + seconds) * 1e9)

        request = self.tracer.start_span(
            "request",
            parent,
            SpanKind.SERVER,
            {
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.id": told["id"],
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.response.finish_reasons": told["ends"].split(", "),
                "quire.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "quire.client_id": told["client_id"],
            },
            start_time=at(started_s),
        )
        ends_s = started_s + told["seconds"]
        if request.is_recording():
            inside = set_span_in_context(request)
            for index, (times, use, last_s) in enumerate(sequences):
                for name, begin_s, end_s, more in _parts(times, use, ends_s if last_s is None else started_s + last_s):
                    span = self.tracer.start_span(
                        name, inside, attributes={"quire.sequence": index, **more}, start_time=at(begin_s)
                    )
                    span.end(at(max(begin_s, end_s)))
        if "error" in told["ends"]:
            request.set_status(StatusCode.ERROR)
        request.end(at(ends_s))


def _parts(
    times: SequenceTimes | None, use: CacheUse, end_s: float
) -> Iterable[tuple[str, float, float, dict[str, int]]]:
    """The spans of a sequence: name, begin, end and attributes. One that was never admitted has none."""
    if times is None:
        return
    yield "queue", times.queued, times.matched, {}
    if times.fetched is not None:
        since_s, until_s = times.fetched
        tokens = {"quire.storage_tokens": use.num_storage_tokens, "quire.peer_tokens": use.num_peer_tokens}
        yield "fetch", max(since_s, times.queued), until_s or times.admitted, tokens
    yield "match", times.matched, times.admitted, {"quire.cached_tokens": use.num_cached_tokens}
    if not times.launched:
        return
    if num_loaded := use.num_host_tokens + use.num_storage_tokens + use.num_peer_tokens:
        yield "load", times.admitted, times.launched, {"quire.loaded_tokens": num_loaded}
    yield "prefill", times.launched, times.first_token or end_s, {}
    if times.first_token:
        yield "decode", times.first_token, end_s, {}


def open_tracing(config: EngineConfig) -> Tracing | None:
    """That of a server; None if it is not told where spans go. Raises InvalidInput without OpenTelemetry."""
    endpoint = config.otlp_traces_endpoint
    return None if endpoint is None else Tracing(endpoint, config.model_name)
