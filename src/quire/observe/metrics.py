"""Prometheus metrics: the engine's counters as they are, and what only the server can measure (latencies, statuses).

The engine's numbers are read when a scrape asks, from the snapshot `statistics` returns, so that nothing is counted
twice and no number exists in two places. Counters restart with the engine process, as Prometheus expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.observe.histogram import TOKENS, Histogram
from quire.observe.tier_metrics import tier_metrics

FRAME_STATES = ("free", "private", "cached", "moving", "quarantined")
FRAME_COUNTERS = {
    "dropped": "Frames of cached pages that were dropped while their pages stayed.",
    "revived": "Frames that such pages got back from requests that had computed them again.",
    "left": "Frames that requests left for others to begin on.",
    "skipped": "Places where a request left none, because no frame was to spare.",
}

COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "hit_tokens": "Prompt tokens that came from the cache.",
    "output_tokens": "Generated tokens.",
    "evicted_pages": "Cached pages given up for others.",
    "preemptions": "Times a running request had to give its pages back.",
    "finished_requests": "Requests that ended by themselves.",
    "aborted_requests": "Requests that the client gave up.",
    "refused_requests": "Requests that could never fit or were invalid.",
    "failed_requests": "Requests that a failed step ended.",
    "retentions_expired": "Retentions whose time was over.",
    "retentions_given_up": "Retentions that were released for running requests.",
    "retentions_lost": "Retentions that ended because what they kept was damaged.",
    "steps": "Steps of the engine.",
}

GAUGES = {
    "running_requests": "Requests that hold pages.",
    "waiting_requests": "Requests that wait for room.",
    "shared_pages": "Pages that more than one request reads now.",
    "retentions": "Prefixes that callers asked to keep.",
    "retained_pages": "Pages that these keep, each counted once.",
    "weights_epoch": "How often the weights were replaced.",
    "kv_bytes": "Bytes of the KV pools.",
    "page_size": "Tokens in a page.",
}

Snapshot = Callable[[], Mapping[str, Any]]


class EngineCollector(Collector):
    """Shows a snapshot of the engine's statistics. A key the engine does not report is left out, not shown as 0."""

    def __init__(self, statistics: Snapshot, healthy: Callable[[], bool]) -> None:
        self._statistics = statistics
        self._healthy = healthy

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        statistics = self._statistics()
        yield GaugeMetricFamily("quire_healthy", "1 while requests can progress.", value=float(self._healthy()))
        for key, text in COUNTERS.items():
            if key in statistics:
                yield CounterMetricFamily(f"quire_{key}", text, value=float(statistics[key]))
        for key, text in GAUGES.items():
            if key in statistics:
                yield GaugeMetricFamily(f"quire_{key}", text, value=float(statistics[key]))
        if "queue_seconds" in statistics:
            yield _histogram(
                "quire_request_queue_time_seconds", "Sequence queued to admitted.", statistics["queue_seconds"]
            )
        causes = statistics.get("explained_tokens")
        if causes:
            yield self._causes(causes)
        if statistics.get("num_pages"):
            yield self._usage(statistics)
        groups = statistics.get("frames", {})
        tiers = statistics.get("tiers") or {}
        yield self._frames({"device": groups, "host": tiers.get("host", {})})
        if tiers:
            yield from tier_metrics(tiers, int(statistics["hit_tokens"]))
        for name, text in FRAME_COUNTERS.items():
            family = CounterMetricFamily(f"quire_frames_{name}", text, labels=("group",))
            for group, frames in groups.items():
                family.add_metric((group,), float(frames.get(name, 0)))
            yield family

    def _usage(self, statistics: Mapping[str, Any]) -> GaugeMetricFamily:
        groups = statistics["frames"].values()
        return GaugeMetricFamily(
            "quire_kv_cache_usage_ratio",
            "Frames in use, of all, from 0 to 1, of the fullest group: frames that could be evicted count as free.",
            value=max(1 - (frames["free"] + frames["evictable"]) / frames["total"] for frames in groups),
        )

    def _causes(self, causes: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "quire_prompt_tokens_by_cause",
            "Prompt tokens by what became of them; the causes add up to quire_prompt_tokens.",
            labels=("cause",),
        )
        for cause, tokens in causes.items():
            family.add_metric((cause,), float(tokens))
        return family

    def _frames(self, tiers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "quire_frames",
            "Frames of a group in a tier by state; the states of a group add up to its pool.",
            labels=("tier", "group", "state"),
        )
        for tier, groups in tiers.items():
            for group, frames in groups.items():
                for state in FRAME_STATES:
                    family.add_metric((tier, group, state), float(frames.get(state, 0)))
        return family


class ServerMetrics(Collector):
    """All metrics of one server; each sample says of which model."""

    def __init__(self, statistics: Snapshot, healthy: Callable[[], bool], *, model_name: str, version: str) -> None:
        self._engine = EngineCollector(statistics, healthy)
        self._model_name = model_name
        self._version = version
        self.first_token_s = Histogram()
        self.inter_token_s = Histogram()
        self.request_s = Histogram()
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.finished = Counter[str]()  # sequences, by how they ended
        self.responses = Counter[tuple[str, str]]()  # by route and status

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        for family in (*self._engine.collect(), *self._own()):
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model_name}) for sample in family.samples
            ]
            yield family

    def _own(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Request received to first token.", self.first_token_s),
            ("inter_token_latency_seconds", "A sequence's token to its next.", self.inter_token_s),
            ("request_latency_seconds", "Request received to last token.", self.request_s),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens that a request generated.", self.generation_tokens),
        ):
            yield _histogram(f"quire_{name}", text, histogram.to_dict())
        ended = CounterMetricFamily(
            "quire_request_success", "Sequences that ended, by how.", labels=("finished_reason",)
        )
        for reason in dict.fromkeys(("stop", "length", "abort", "error", *self.finished)):
            ended.add_metric((reason,), self.finished[reason])
        yield ended
        responses = CounterMetricFamily(
            "quire_http_responses", "HTTP responses by route and status.", labels=("route", "status")
        )
        for labels, count in self.responses.items():
            responses.add_metric(labels, count)
        yield responses
        build = GaugeMetricFamily("quire_build_info", "1; the version is a label.", labels=("version",))
        build.add_metric((self._version,), 1.0)
        yield build

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def _histogram(name: str, text: str, counted: Mapping[str, Any]) -> HistogramMetricFamily:
    buckets = [(str(float(bound)), float(count)) for bound, count in counted["at_most"]]
    return HistogramMetricFamily(
        name, text, buckets=[*buckets, ("+Inf", float(counted["count"]))], sum_value=float(counted["sum"])
    )
