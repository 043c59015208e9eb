"""Prometheus metrics: the engine's counters, and latencies and statuses that only the server can measure.

At each scrape the engine's numbers are read from the snapshot that `statistics` returns. No number is counted twice.
Counters restart with the engine process, as Prometheus expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.observe.histogram import TOKENS, Histogram

Statistics = Mapping[str, Any]
Samples = Mapping[Any, float]
"""Values by their label, or by the tuple of their labels."""

FRAME_STATES = ("free", "private", "cached", "moving", "quarantined")
TIERS = ("host", "storage")
DEFECTS = ("magic", "group", "length", "layout", "key", "digest")
"""What may be wrong with a record (`quire.memory.record`)."""

COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "hit_tokens": "Prompt tokens that came from the cache.",
    "output_tokens": "Generated tokens.",
    "audits": "Audits of the whole cache, in pieces beside steps.",
    "whole_audits": "Of these, audits during which nothing changed, so that lost pages would have shown.",
    "shortages": "Steps after which memory was short: a request waited for pages, or was preempted.",
    "evicted_pages": "Cached pages given up for others.",
    "preemptions": "Times a running request had to give its pages back.",
    "finished_requests": "Requests that ended by themselves.",
    "aborted_requests": "Requests that the client gave up.",
    "refused_requests": "Requests that could never fit or were invalid.",
    "failed_requests": "Requests that a failed step ended.",
    "retentions_expired": "Retentions whose time was over.",
    "retentions_given_up": "Retentions that were released for running requests.",
    "retentions_lost": "Retentions that ended because what they kept was damaged.",
    "sessions_continued": "Turns that went on in the row that their session held.",
    "sessions_expired": "Sessions whose time was over.",
    "sessions_given_up": "Rows of sessions that ended because room was needed.",
    "session_resumed_tokens": "Prompt tokens that were in rows of sessions, and were not computed.",
    "session_partial_tokens": "Of these, tokens in no cached whole page.",
    "steps": "Steps of the engine.",
}

GAUGES = {
    "running_requests": "Requests that hold pages.",
    "waiting_requests": "Requests that wait for room.",
    "shared_pages": "Pages that more than one request reads now.",
    "retentions": "Prefixes that callers asked to keep.",
    "retained_pages": "Pages that these keep, each counted once.",
    "sessions": "Sessions that are known.",
    "sessions_held": "Sessions that hold a row between two turns.",
    "session_held_tokens": "Tokens of these rows.",
    "session_held_pages": "Pages of these rows, each counted once.",
    "weights_epoch": "How often the weights were replaced.",
    "kv_bytes": "Bytes of the KV pools.",
    "page_size": "Tokens in a page.",
}

FRAME_COUNTERS = {
    "dropped": "Frames of cached pages that were dropped while their pages stayed.",
    "revived": "Frames that such pages got back from requests that had computed them again.",
    "left": "Frames that requests left for others to begin on.",
    "skipped": "Places where a request left none, because no frame was to spare.",
}

EVICTION_COUNTERS = {
    "switches": "Times that eviction by hit density gave way to LRU, or decided again.",
    "won_pages": "Pages that were hit and that LRU would not have had.",
    "lost_pages": "Pages that were computed and that LRU would have had.",
}

CHUNK_COUNTERS = {
    "steps": "Steps in which requests decoded and prompts were limited (--target-itl-ms).",
    "tokens": "Prompt tokens that such steps computed.",
}

CHUNK_GAUGES = {
    "alone_seconds": "What the last such step was expected to take without prompts.",
    "budget_seconds": "What prompts were allowed to add to it.",
}

SPECULATION_COUNTERS = {
    "drafts": ("num_drafts", "Times that a request computed drafts in a step."),
    "draft_tokens": ("num_draft_tokens", "Drafts that were computed."),
    "accepted_tokens": ("num_accepted_tokens", "Of these, drafts that were accepted."),
    "steps_without_drafts": ("steps_without_drafts", "Steps without drafts, because none would have paid."),
}

SPECULATION_GAUGES = {
    "tokens_per_step": "Mean tokens of a request in a step that draws any, since the start.",
    "draft_cost": "What a draft adds to a step, in tokens without drafts; 0 while it is not measured.",
    "draft_brings": "The chance of a draft to be accepted, if those before it are.",
    "is_off": "1 while no draft is made, because it costs more than it brings.",
}

HISPARSE_COUNTERS = {
    "hit_tokens": "Selected tokens that a hot buffer had, counted once for layers that read the same ones.",
    "swapped_tokens": "Selected tokens that were copied to a hot buffer from host memory, counted in the same way.",
    "swapped_bytes": "Bytes that were copied from host memory to hot buffers, in all layers.",
    "backed_up_tokens": "Tokens of decoding requests that were written to host memory as they were computed.",
}

HISPARSE_GAUGES = {
    "device_buffer_size": "Tokens of the hot buffer of a request.",
    "host_bytes": "Bytes of latents, or of keys and values, in host memory.",
    "hot_bytes": "Bytes of all hot buffers on the device.",
}

CANARY_COUNTERS = {
    "seconds": "Seconds that the canary has taken.",
    "stamped_pages": "Frames of cached pages that got a stamp.",
    "hit_pages": "Frames that were looked at because a request began on them.",
    "swept_pages": "Frames that a sweep looked at.",
    "sweeps": "Sweeps over all cached pages that have ended.",
    "found_pages": "Frames that were not what they had been.",
    "quarantined_frames": "Of these, frames that were set aside.",
    "recomputed_requests": "Requests that were computed again because they had read such a page.",
}

CANARY_GAUGES = {
    "share": "Share of the time that the canary may take.",
    "waiting_pages": "Frames that wait for a stamp.",
    "sweep_seconds": "Seconds that the last sweep took.",
    "sweep_steps": "Steps during the last sweep.",
}

TIER_COUNTERS = {
    "declined_tokens": "Prompt tokens that were cached on the host or in storage and computed again, which was faster.",
    "failed_moves": "Moves between tiers that failed, or brought less than half.",
    "refused_moves": "Moves that were not begun, because too much was on its way on that link.",
    "turned_off": "Times that a link turned itself off, trials that failed counted in.",
    "demoted_pages": "Pages that left the device and stayed on the host.",
    "lost_frames": "Frames that were stored, of use, and gone from the store; stored again.",
    "host_evicted_pages": "Pages of which the host gave up its copy for others.",
}

TRANSFER_COUNTERS = {
    "received": {
        "asks": ("asks", "Prompts that a prefill engine was asked for."),
        "tokens": ("received_tokens", "Prompt tokens that prefill engines computed and that arrived whole."),
        "bytes": ("received_bytes", "Bytes of pages that prefill engines wrote here."),
    },
    "sent": {
        "asks": ("served_asks", "Prompts that a decode engine asked for."),
        "tokens": ("sent_tokens", "Prompt tokens whose pages were written to a decode engine."),
        "bytes": ("sent_bytes", "Bytes of pages that were written to a decode engine."),
    },
}

TRANSFER_CAUSES = {
    "received": ("fallbacks", "Prompts that were computed here instead, whole or in part, by cause."),
    "sent": (
        "failures",
        "Writes to a decode engine that failed, and parts of prompts that were not written, by cause.",
    ),
}

TRANSFER_SECONDS = {
    "received": {
        "ask_seconds": ("ask_seconds", "A prompt asked for to the end of its transfers: what its request waits."),
        "part_seconds": ("part_seconds", "Host frames opened to a prefill engine to their last byte."),
    },
    "sent": {"write_seconds": ("xfer_time_seconds", "A write of pages to a decode engine, from begin to end.")},
}


class EngineCollector(Collector):
    """Shows a snapshot of the engine's statistics. A key that the engine does not report is omitted, not shown as 0."""

    def __init__(self, statistics: Callable[[], Statistics], healthy: Callable[[], bool]) -> None:
        self._statistics = statistics
        self._healthy = healthy

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        statistics = self._statistics()
        yield _gauge("healthy", "1 while requests can progress.", self._healthy())
        for key, text in COUNTERS.items():
            if key in statistics:
                yield _counter(key, text, statistics[key])
        for key, text in GAUGES.items():
            if key in statistics:
                yield _gauge(key, text, statistics[key])
        if "queue_seconds" in statistics:
            counted = statistics["queue_seconds"]
            yield _histogram("request_queue_time_seconds", "Sequence queued to admitted.", {(): counted})
        if causes := statistics.get("explained_tokens"):
            text = "Prompt tokens by what became of them; the causes add up to quire_prompt_tokens."
            yield _counter("prompt_tokens_by_cause", text, causes, "cause")
        groups, tiers = statistics.get("frames", {}), statistics.get("tiers") or {}
        if statistics.get("num_pages"):
            yield _gauge(
                "kv_cache_usage_ratio",
                "Frames in use, of all, from 0 to 1, of the fullest group: frames that could be evicted count as free.",
                max(1 - (frames["free"] + frames["evictable"]) / frames["total"] for frames in groups.values()),
            )
        yield _gauge(
            "frames",
            "Frames of a group in a tier by state; the states of a group add up to its pool.",
            {
                (tier, group, state): frames.get(state, 0)
                for tier, found in (("device", groups), ("host", tiers.get("host", {})))
                for group, frames in found.items()
                for state in FRAME_STATES
            },
            *("tier", "group", "state"),
        )
        if found := statistics.get("attention"):
            yield _gauge("compute_threads", "Threads of the engine's process that compute steps.", found["threads"])
            text = "Calls of attention by what computed them."
            yield _counter("attention_calls", text, found["calls"], "backend")
            text = "Calls of attention that the kernel of the device could not compute, by reason."
            yield _counter("attention_fallbacks", text, found["fallbacks"], "reason")
        if found := statistics.get("eviction"):
            for key, text in EVICTION_COUNTERS.items():
                yield _counter(f"eviction_{key}", text, found[key])
        if found := statistics.get("chunk_budget"):
            for key, text in CHUNK_COUNTERS.items():
                yield _counter(f"chunk_budget_{key}", text, found[key])
            for key, text in CHUNK_GAUGES.items():
                yield _gauge(f"chunk_budget_{key}", text, found[key])
        if found := statistics.get("speculation"):
            yield from _speculation(found)
        if found := statistics.get("hisparse"):
            for key, text in HISPARSE_COUNTERS.items():
                yield _counter(f"hisparse_{key}", text, found[key])
            for key, text in HISPARSE_GAUGES.items():
                yield _gauge(f"hisparse_{key}", text, found[key])
        if "highest" in statistics:
            marks = {(each["tier"], each["group"], each["state"]): each["frames"] for each in statistics["highest"]}
            text = 'The most frames of a group in a tier that were in a state at once; "used" ones cannot be evicted.'
            yield _gauge("frames_highest", text, marks, "tier", "group", "state")
            yield _gauge(
                "invariant_broken", "1 after an invariant of the cache was broken.", bool(statistics["violation"])
            )
        if found := statistics.get("canary"):
            for key, text in CANARY_COUNTERS.items():
                yield _counter(f"canary_{key}", text, found[key])
            for key, text in CANARY_GAUGES.items():
                yield _gauge(f"canary_{key}", text, found[key])
        if tiers:
            yield from _tiers(tiers, statistics["hit_tokens"])
            yield from _store(tiers)
            yield from _links(tiers)
        if transfer := statistics.get("transfer"):
            yield from _transfer(transfer)
        for key, text in FRAME_COUNTERS.items():
            counts = {group: frames.get(key, 0) for group, frames in groups.items()}
            yield _counter(f"frames_{key}", text, counts, "group")


def _speculation(found: Statistics) -> Iterator[Metric]:
    """What drafts brought, and what the governor does about it."""
    for key, (name, text) in SPECULATION_COUNTERS.items():
        if key in found:
            yield _counter(f"spec_decode_{name}", text, found[key])
    yield _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were accepted, by their place after the last known token, from 0.",
        {str(at): count for at, count in enumerate(found["accepted_tokens_per_position"])},
        "position",
    )
    for key, text in SPECULATION_GAUGES.items():
        if key in found:
            yield _gauge(f"spec_decode_{key}", text, found[key])


def _tiers(tiers: Statistics, hit_tokens: int) -> Iterator[Metric]:
    """Of the tiers below the device. `hit_tokens` are those of all tiers, the device among them."""
    for key, text in TIER_COUNTERS.items():
        yield _counter(f"tier_{key}", text, tiers[key])
    yield _gauge("tier_host_bytes", "Bytes of host memory.", tiers["host_bytes"])
    hits = {tier: tiers[f"{tier}_hit_tokens"] for tier in (*TIERS, "peer")}
    yield _counter(
        "tier_hit_tokens",
        "Prompt tokens that came from the cache, by where they were; they add up to quire_hit_tokens.",
        {"device": hit_tokens - sum(hits.values())} | hits,
        "tier",
    )
    yield _counter(
        "tier_dropped_frames",
        "Frames of which no copy was made: the host had no room, or the store did not take them that time.",
        {"host": tiers["unsaved_frames"], "storage": tiers["unstored_frames"]},
        "tier",
    )
    known = {f"{tier}:{defect}": 0 for tier in TIERS for defect in DEFECTS}
    yield _counter(
        "tier_corrupt_records",
        "Records that were not what they should be, by where they were found and what was wrong; none was served.",
        {tuple(name.split(":")): count for name, count in (known | tiers["defects"]).items()},
        *("tier", "defect"),
    )


def _store(tiers: Statistics) -> Iterator[Metric]:
    """What the store has said, and what it has counted itself."""
    counted = dict(tiers.get("store", {}))
    failures = counted.pop("failures", {})
    yield _counter("store_failures", "What went wrong between this process and its store, by kind.", failures, "kind")
    yield _counter(
        "store_records", "What became of records in a store that counts them, by this process.", counted, "state"
    )
    text = "Records of which the store could say nothing now."
    yield _counter("tier_unanswered_records", text, tiers["store_refused"], "link")
    lost = {kind: kind in tiers["store_lost"] for kind in ("read", "write")}
    yield _gauge("store_lost", "1 while the store has answered nothing for some moves in a row.", lost, "kind")
    text = "Cached prefixes of which something is on its way to storage or has to wait."
    yield _gauge("tier_owed_paths", text, tiers["owed_paths"])


def _links(tiers: Statistics) -> Iterator[Metric]:
    """Of the links between tiers. The log and `GET /v1/cache/statistics` say why a lane is off."""
    links, bandwidth = tiers["links"], tiers["bandwidth"]
    yield _gauge(
        "tier_link_off",
        "1 while a link has turned itself off, because to compute is quicker.",
        {link: link in tiers["off"] for link in bandwidth},
        "link",
    )
    moved = {link: counted["bytes"] for link, counted in links.items()}
    yield _counter("tier_moved_bytes", "Bytes that moved between tiers, by link.", moved, "link")
    yield _gauge(
        "tier_bandwidth_bytes_per_second",
        "Measured bandwidth of a link, without the time to the first byte; absent while nothing was measured.",
        {link: value for link, value in bandwidth.items() if value is not None},
        "link",
    )
    yield _histogram(
        "tier_move_seconds",
        "Seconds of work for a move, without its wait in a queue.",
        {(link,): {"count": counted["moves"], "sum": counted["seconds"], **counted} for link, counted in links.items()},
        "link",
    )


def _transfer(found: Statistics) -> Iterator[Metric]:
    """Of what prefill engines did for this one, and this one for decode engines, by peer."""
    ready = [peer for peer in found["prefill_peers"] if peer["state"] == "connected"]
    counts = {"prefill": len(ready), "decode": len(found["decode_peers"])}
    yield _gauge(
        "transfer_connected_peers", "Engines that are connected, by what they do for this one.", counts, "role"
    )
    text = "Host memory that nothing here needs, and that a peer that stopped may still write."
    yield _gauge("transfer_held_bytes", text, found["held_bytes"])
    for side, counters in TRANSFER_COUNTERS.items():
        by_peer = found[side]
        for key, (name, text) in counters.items():
            yield _counter(f"transfer_{name}", text, {peer: each[key] for peer, each in by_peer.items()}, "peer")
        key, text = TRANSFER_CAUSES[side]
        causes = {(peer, cause): count for peer, each in by_peer.items() for cause, count in each[key].items()}
        yield _counter(f"transfer_{key}", text, causes, "peer", "cause")
        for key, (name, text) in TRANSFER_SECONDS[side].items():
            yield _histogram(f"transfer_{name}", text, {(peer,): each[key] for peer, each in by_peer.items()}, "peer")
    text = "Connections that were refused, by reason: a field in which the engines differ, or what was wrong."
    yield _counter("transfer_refused_connections", text, found["refused_connections"], "reason")


class ServerMetrics(Collector):
    """All metrics of one server; each sample has the model as a label."""

    def __init__(
        self,
        statistics: Callable[[], Statistics],
        healthy: Callable[[], bool],
        *,
        model_name: str,
        version: str,
        restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._engine = EngineCollector(statistics, healthy)
        self._restarts = restarts
        self._model_name = model_name
        self._version = version
        self.first_token_s = Histogram()
        self.inter_token_s = Histogram()
        self.request_s = Histogram()
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.finished = Counter[str](stop=0, length=0, abort=0, error=0)  # sequences, by how they ended
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
            yield _histogram(name, text, {(): histogram.to_dict()})
        text = "Engine processes that took the place of one that had ended."
        yield _counter("engine_restarts", text, self._restarts())
        yield _counter("request_success", "Sequences that ended, by how.", self.finished, "finished_reason")
        yield _counter("http_responses", "HTTP responses by route and status.", self.responses, "route", "status")
        yield _gauge("build_info", "1; the version is a label.", {self._version: 1}, "version")

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def _counter(name: str, text: str, found: float | Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"quire_{name}", text, labels=labels), found)


def _gauge(name: str, text: str, found: float | Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"quire_{name}", text, labels=labels), found)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, found: float | Samples) -> Metric:
    for labels, value in (found if isinstance(found, Mapping) else {(): found}).items():
        family.add_metric(labels if isinstance(labels, tuple) else (labels,), float(value))
    return family


def _histogram(name: str, text: str, found: Mapping[tuple[str, ...], Statistics], *labels: str) -> Metric:
    family = HistogramMetricFamily(f"quire_{name}", text, labels=labels)
    for values, counted in found.items():
        buckets = [(str(float(bound)), float(count)) for bound, count in counted["at_most"]]
        family.add_metric(values, [*buckets, ("+Inf", float(counted["count"]))], float(counted["sum"]))
    return family
