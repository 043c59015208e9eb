"""Prometheus metrics: the engine's counters, and latencies and statuses that only the server can measure.

At each scrape the engine's numbers are read from the snapshot that `statistics` returns. No number is counted twice.
Counters restart with the engine process, as Prometheus expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from quire.counters import TOKENS, Histogram, Metric, Statistics, counter, gauge, histogram, metrics_of, plain

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


@dataclass(kw_only=True)
class ServerCounters:
    """Counters of one server. `responses` are by route and status."""

    healthy: bool = gauge("1 while requests can progress.")
    first_token_s: Histogram = histogram(
        "Request received to first token.", name="time_to_first_token_seconds", vllm="time_to_first_token_seconds"
    )
    inter_token_s: Histogram = histogram(
        "A sequence's token to its next.", name="inter_token_latency_seconds", vllm="inter_token_latency_seconds"
    )
    request_s: Histogram = histogram(
        "Request received to last token.", name="request_latency_seconds", vllm="e2e_request_latency_seconds"
    )
    prompt_tokens: Histogram = histogram(
        "Prompt tokens of a request.", bounds=TOKENS, name="request_prompt_tokens", vllm="request_prompt_tokens"
    )
    generation_tokens: Histogram = histogram(
        "Tokens that a request generated.",
        bounds=TOKENS,
        name="request_generation_tokens",
        vllm="request_generation_tokens",
    )
    engine_restarts: int = counter("Engine processes that took the place of one that had ended.")
    finished: Counter[str] = counter(
        "Sequences that ended, by how.",
        "finished_reason",
        start=Counter,
        name="request_success",
        vllm="request_success",
        known=("stop", "length", "abort", "error"),
    )
    responses: Counter[tuple[str, str]] = counter(
        "HTTP responses by route and status.", "route", "status", start=Counter, name="http_responses"
    )
    build_info: dict[str, int] = gauge("1; the version is a label.", "version", start=dict)


class ServerMetrics(Collector):
    """All metrics of one server; each sample has the model as a label. `declared` are those of the engine's
    `statistics`; one that these lack is omitted, not shown as 0."""

    def __init__(
        self,
        declared: Sequence[Metric],
        statistics: Callable[[], Statistics],
        healthy: Callable[[], bool],
        *,
        model_name: str,
        version: str,
        restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._declared = declared
        self._statistics = statistics
        self._healthy = healthy
        self._restarts = restarts
        self._model_name = model_name
        self.counters = ServerCounters(build_info={version: 1})

    def collect(self) -> Iterator[Family]:
        """The metrics of one scrape."""
        model = {"model_name": self._model_name}
        yield from families_of(self._declared, self._statistics(), model)
        yield from families_of(tuple(metrics_of(ServerCounters)), self.own_statistics(), model)

    def own_statistics(self) -> Statistics:
        """What the server itself has counted, as plain data."""
        self.counters.healthy, self.counters.engine_restarts = self._healthy(), self._restarts()
        own: Statistics = plain(self.counters)
        return own

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self)


def families_of(declared: Iterable[Metric], statistics: Statistics, more: Mapping[str, str]) -> Iterator[Family]:
    """The families of what is declared and has samples, each of which has `more` as labels."""
    families: dict[str, Any] = {}
    for metric in declared:
        samples = metric.samples(statistics)
        for name in metric.exposed if samples else ():
            if name not in families:
                labels = (*more, *metric.labels, *metric.constant)
                families[name] = _FAMILIES[metric.kind](name, metric.text, labels=labels)
            for labels, value in samples.items():
                _add(families[name], (*more.values(), *labels), value)
    yield from families.values()


def _add(family: Any, labels: tuple[str, ...], value: Any) -> None:
    if isinstance(family, HistogramMetricFamily):
        buckets = [(str(float(bound)), float(count)) for bound, count in value["at_most"]]
        family.add_metric(labels, [*buckets, ("+Inf", float(value["count"]))], float(value["sum"]))
    else:
        family.add_metric(labels, float(bool(value) if isinstance(value, str) else value))
