"""What engines publish (`quire.observe.kv_batch`): events in their order, and an index of the pages they tell of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from quire.observe.kv_batch import MEDIA, BlockRemoved, BlockStored, KvEvent
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier

_GPU = MEDIA[Tier.DEVICE]


@dataclass(slots=True)
class EventOrder:
    """Puts the batches of one engine in order, which may be lost, late, or come twice. `next` is the number of the
    first that was not taken yet."""

    next: int = 0
    _early: dict[int, Sequence[KvEvent]] = field(default_factory=dict)
    _is_asked: bool = False

    def receive(self, number: int, events: Sequence[KvEvent]) -> list[KvEvent]:
        """A batch has come: the events that can be applied now."""
        if number >= self.next:
            self._early[number] = events
        found: list[KvEvent] = []
        while (batch := self._early.pop(self.next, None)) is not None:
            found += batch
            self.next += 1
        return found

    def asks(self, known: int = 0) -> int | None:
        """The number from which on the engine should tell everything again; None while nothing is missing, or it was
        asked already. The engine is known to have published the numbers before `known`."""
        if self._is_asked or not (self._early or known > self.next):
            return None
        self._is_asked = True
        return self.next

    def told_again(self, batches: Sequence[tuple[int, Sequence[KvEvent]]]) -> list[KvEvent]:
        """The answer to `asks`: the events that can be applied now. What is not in it is not kept any more, or never
        was: numbers of an engine that was started again begin higher."""
        self._is_asked = False
        self.next = max(self.next, min((number for number, _ in (*batches, *self._early.items())), default=0))
        self._early = {number: batch for number, batch in self._early.items() if number >= self.next}
        return [event for batch in batches for event in self.receive(*batch)]


class PageIndex:
    """How much of a prompt each engine has. Engines are numbered from 0. Pages of other sizes than `page_size` are
    ignored.

    A page has a key, a hash of all tokens up to its end and of whose they are. So a prompt is looked up without the
    hashes of engines, and these need not agree on them. A page whose parent is unknown, because events were missed,
    has no key: it is ignored.
    """

    def __init__(self, num_engines: int, page_size: int) -> None:
        self._page_bytes, self._num_engines = 4 * page_size, num_engines
        self._keys: list[dict[int, int]] = [{} for _ in range(num_engines)]  # key: the engine's hash of a page
        self._holders: dict[int, int] = {}  # two bits of each engine: on its device, in its host memory
        self._devices = sum(1 << 2 * engine for engine in range(num_engines))

    def num_pages(self, engine: int) -> int:
        """Pages of an engine."""
        return len(self._keys[engine])

    def apply(self, engine: int, events: Iterable[KvEvent]) -> None:
        """What an engine published, in its order. An event may come twice."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(engine, event)
            elif isinstance(event, BlockRemoved):
                self._remove(engine, event.block_hashes, self._bit(engine, event.medium))
            else:
                self._remove(engine, list(self._keys[engine]), self._bit(engine, _GPU) * 3)

    def held(self, tokens: Ids, namespace: Namespace) -> list[tuple[int, int]]:
        """How many first tokens of a prompt each engine has on its device, and there or in its host memory."""
        ends, alive, depth = [0] * (2 * self._num_engines), (1 << 2 * self._num_engines) - 1, 0
        for key in self._chain(_root(namespace.adapter, namespace.salt), tokens.tobytes()):
            holders = self._holders.get(key, 0)
            holders |= (holders & self._devices) << 1
            _note(ends, alive & ~holders, depth)
            alive &= holders
            if not alive:
                break
            depth += self._page_bytes // 4
        _note(ends, alive, depth)
        return list(zip(ends[::2], ends[1::2], strict=True))

    def _store(self, engine: int, event: BlockStored) -> None:
        keys, bit, parent = self._keys[engine], self._bit(engine, event.medium), event.parent_block_hash
        above = _root(event.lora_name or "", event.cache_salt or "") if parent is None else keys.get(parent)
        if above is None or 4 * event.block_size != self._page_bytes:
            return
        tokens = np.array(event.token_ids, dtype=np.int32).tobytes()
        for page, key in zip(event.block_hashes, self._chain(above, tokens), strict=True):
            keys[page] = key
            self._holders[key] = self._holders.get(key, 0) | bit

    def _remove(self, engine: int, pages: Sequence[int], bits: int) -> None:
        keys, all_bits = self._keys[engine], self._bit(engine, _GPU) * 3
        for page in pages:
            key = keys.get(page)
            if key is None:
                continue
            left = self._holders[key] = self._holders[key] & ~bits
            if not left & all_bits:
                del keys[page]
            if not left:
                del self._holders[key]

    def _bit(self, engine: int, medium: str) -> int:
        return 1 << 2 * engine + (medium != _GPU)

    def _chain(self, above: int, tokens: bytes) -> Iterator[int]:
        """The keys of whole pages after the one with this key."""
        for at in range(0, len(tokens) - self._page_bytes + 1, self._page_bytes):
            above = xxhash.xxh3_64_intdigest(tokens[at : at + self._page_bytes], seed=above)
            yield above


def _root(adapter: str, salt: str) -> int:
    """The key before the first page of a namespace."""
    return xxhash.xxh3_64_intdigest(f"{len(adapter)} {adapter}{salt}".encode())


def _note(ends: list[int], bits: int, depth: int) -> None:
    """These bits end here."""
    while bits:
        ends[bits.bit_length() - 1] = depth
        bits &= ~(1 << bits.bit_length() - 1)
