"""Counters, gauges and histograms, each declared once: as a field of a dataclass, with its help and labels.

    @dataclass(kw_only=True)
    class CanaryCounters:
        PREFIX: ClassVar = "canary_"
        sweeps: int = counter("Sweeps over all cached pages that have ended.")        # quire_canary_sweeps
        waiting_pages: int = gauge("Frames that wait for a stamp.")                   # quire_canary_waiting_pages

An owner returns such an object and the section of the statistics that it is in. `statistics_of` makes plain data of
them, which `GET /v1/cache/statistics` returns. `declared_in` lists what `/metrics` and the documents show of them.
A plain field is in the statistics alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

Kind = Literal["counter", "gauge", "histogram"]
Statistics = Mapping[str, Any]
Section = tuple[str, object]
"""A key of the statistics, "" for none, and what is under it: counters, or plain data. Several may have one section."""


class Histogram:
    """Counts of values by their bucket, and their sum. One observation costs a search among the bounds."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def counts(self) -> list[int]:
        """The number of values in each bucket until now."""
        return self._counts.copy()

    def quantile(self, part: float, since: Sequence[int]) -> float | None:
        """The value that a `part` of those that came after the `counts` of `since` do not exceed, None if none came.
        Values are taken as even within their bucket, and those above the last bound as equal to it."""
        counts = [now - then for now, then in zip(self._counts, since, strict=True)]
        left, low = part * sum(counts), 0.0
        for bound, count in zip(self._bounds, counts, strict=False):
            if count and count >= left:
                return low + (bound - low) * left / count
            left, low = left - count, bound
        return low if any(counts) else None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Histogram:
        """The histogram that `to_dict` made this of."""
        made = cls([bound for bound, _ in found["at_most"]])
        sums = [count for _, count in found["at_most"]] + [found["count"]]
        made._counts = [count - before for before, count in pairwise([0, *sums])]
        made._sum = found["sum"]
        return made

    def to_dict(self) -> dict[str, Any]:
        """`at_most` has pairs: a bound, and how many values are at most that."""
        at_most = list(zip(self._bounds, accumulate(self._counts[:-1]), strict=True))
        return {"count": self.count, "sum": self._sum, "at_most": at_most}


class Metric(msgspec.Struct, frozen=True):
    """One metric and where its values are in the statistics. `*` in `path` takes each key of an object or list as the
    value of the next of `labels`, and `*:*` as the values of the next two, of which only the first may have a ":".
    `constant` labels have one value; labels in `known` are 0 where the statistics do not have them."""

    name: str
    kind: Kind
    text: str
    path: tuple[str, ...]
    labels: tuple[str, ...] = ()
    constant: dict[str, str] = {}
    known: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names of its family: its own, and those that it has in vLLM, where they mean the same."""
        return (f"quire_{self.name}", *(f"vllm:{name}" for name in self.vllm))

    def samples(self, statistics: Statistics) -> dict[tuple[str, ...], Any]:
        """Values by labels: first those of `labels`, then the constant ones. Empty if the statistics have none."""
        found: dict[tuple[str, ...], Any] = {(): statistics}
        for step in self.path:
            if "*" in step:
                known = dict.fromkeys(self.known, 0) if step == self.path[-1] else {}
                found = {
                    (*keys, *key.rsplit(":", step.count(":"))): value
                    for keys, each in found.items()
                    for key, value in (known | dict(_items(each))).items()
                }
            else:
                found = {keys: each[step] for keys, each in found.items() if each.get(step) is not None}
        values = tuple(self.constant.values())
        return {(*keys, *values): value for keys, value in found.items() if value is not None}


def _items(found: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The entries of an object, or of a list: numbers by their place, names as 1."""
    if isinstance(found, Mapping):
        yield from found.items()
        return
    for place, each in enumerate(found):
        yield (each, 1) if isinstance(each, str) else (str(place), each)


def counter(text: str, *labels: str, **options: Any) -> Any:
    """A field that only grows. Its metric has the class's `PREFIX` and the field's name, or the whole `name`. `start`
    is its default, or makes it if it can be called. Labels of `known` values are 0 until they are counted. Any other
    option is a label with one value. `vllm` are its names there, where they mean the same, with a space between them:
    they are exposed too."""
    return _declared("counter", text, labels, **options)


def gauge(text: str, *labels: str, **options: Any) -> Any:
    """As `counter`, a field that also falls. A text counts as 1, and an empty one as 0."""
    return _declared("gauge", text, labels, **options)


def histogram(text: str, *, bounds: Sequence[float] = SECONDS, name: str = "", vllm: str = "") -> Any:
    """As `counter`, a `Histogram`."""
    return _declared("histogram", text, (), start=lambda: Histogram(bounds), name=name, vllm=vllm)


def labelled(label: str, counters: type, start: Any = dict) -> Any:
    """A field with an object of counters for each value of a label, or one object if that is ""."""
    return field(default_factory=start, metadata={"inner": (label, counters)})


def _declared(
    kind: Kind,
    text: str,
    labels: tuple[str, ...],
    *,
    start: Any = 0,
    name: str = "",
    known: Iterable[str] = (),
    vllm: str = "",
    **constant: str,
) -> Any:
    path = (":".join("*" * len(labels)),) if labels else ()
    metric = Metric(name, kind, text, path, labels, constant, tuple(known), tuple(vllm.split()))
    default: dict[str, Any] = {"default_factory" if callable(start) else "default": start}
    return field(**default, metadata={"metric": metric})


def metrics_of(counters: Any, path: tuple[str, ...] = (), labels: tuple[str, ...] = ()) -> Iterator[Metric]:
    """The metrics that a class of counters declares, which is at `path` in the statistics."""
    for each in fields(counters):
        place = (*path, each.name)
        if "inner" in each.metadata:
            label, inner = each.metadata["inner"]
            yield from metrics_of(inner, (*place, "*"), (*labels, label)) if label else metrics_of(inner, place, labels)
        elif metric := each.metadata.get("metric"):
            name = metric.name or getattr(counters, "PREFIX", "") + each.name
            yield replace(metric, name=name, path=(*place, *metric.path), labels=(*labels, *metric.labels))


def declared_in(sections: Iterable[Section]) -> list[Metric]:
    """All metrics of some counters."""
    return [
        metric
        for section, counters in sections
        if is_dataclass(counters)
        for metric in metrics_of(type(counters), (section,) if section else ())
    ]


def statistics_of(sections: Iterable[Section]) -> dict[str, Any]:
    """All counters as plain data, by section."""
    found: dict[str, Any] = {}
    for section, counters in sections:
        target = found.setdefault(section, {}) if section else found
        target |= plain(counters)
    return found


def added(found: Sequence[Any]) -> Any:
    """Counters of one class, numbers and objects of numbers, added."""
    if is_dataclass(found[0]):
        kind: Any = type(found[0])
        return kind(**{each.name: added([getattr(one, each.name) for one in found]) for each in fields(kind)})
    if isinstance(found[0], Mapping):
        return {key: sum(each[key] for each in found) for key in found[0]}
    return sum(found)


def plain(found: Any) -> Any:
    """Counters as numbers, texts, lists and objects; keys that are tuples are joined by ":"."""
    if found is None or isinstance(found, int | float | str):
        return found
    if isinstance(found, Histogram):
        return found.to_dict()
    if is_dataclass(found):
        return {each.name: plain(getattr(found, each.name)) for each in fields(found)}
    if isinstance(found, Mapping):
        return {":".join(key) if isinstance(key, tuple) else key: plain(each) for key, each in found.items()}
    return [plain(each) for each in found] if isinstance(found, list | tuple) else found
