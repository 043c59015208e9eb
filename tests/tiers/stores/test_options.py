"""Options of URLs, and records between their two phases."""

from __future__ import annotations

import pytest

from quire.errors import InvalidInput
from quire.settings.setting import without_secrets
from quire.testing.contracts.records import make_keys
from quire.tiers.store import Answer, Counts, RecordViews, StoreKey
from quire.tiers.stores.registry import Options
from quire.tiers.stores.remote import RemoteStore

HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY


def test_options_are_understood() -> None:
    options = Options(
        "valkey://me:secret@host:1/2?timeout=.5&size=2MiB&none=&ssl_a=b", ("timeout", "size", "none", "ssl_*")
    )
    assert options.where == "valkey://host:1/2"
    assert options.number("timeout", 3) == 0.5
    assert options.size("size", 0) == 2 << 20
    assert options.number("none", 7) == 7
    assert options.text("absent", "as is") == "as is"
    assert options.rest() == {"ssl_a": "b"}


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "soon", "."])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(InvalidInput, match="a number above 0"):
        Options(f"valkey://host?timeout={text}", ("timeout",)).number("timeout", 1)


@pytest.mark.parametrize("text", ["-1", "1.5GiB", "2mib", "lots", "1 MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidInput, match="a size like"):
        Options(f"mooncake://host?segment={text}", ("segment",)).size("segment", 1)


@pytest.mark.parametrize(
    "url",
    [
        "redis://alice:hunter2@host:1/0",
        "redis://:hunter2@host:1/0",
        "valkeys://alice:hunter2@host/0?ssl_ca_certs=x",
        "unix://alice:hunter2@/run/valkey.sock?db=0",
        "redis://alice:hun/ter2@host/0",
        "redis://alice:12?hunter2@host/0",
        "redis://alice:12/hunter2@host/0",
        "redis://alice:hunter2#@host/0",
        "redis://alice:hunter2@ho@host",
        "redis://alice:hunter2@[host/0",
        "redis://alice:hunter2@host\u2100/0",
        "s3://alice:hunter2@bucket?region=x&secret=hunter2",
        "redis://host?password=hunter2",
        "redis://alice:12#hunter2@host/0",
    ],
)
def test_secrets_are_not_shown(url: str) -> None:
    """Neither by themselves, nor in what is said of a URL that cannot be understood."""
    shown = without_secrets(url)
    assert shown.startswith(url.partition("://")[0] + "://")
    said = shown
    try:
        assert Options(url, ("ssl_*", "db", "region")).where == shown
    except InvalidInput as error:
        said += str(error)
    assert not any(part in said for part in ("alice", "hun", "ter2", ":12"))


class Announcing(RemoteStore):
    """A server that says what it is told to, and takes nothing."""

    def __init__(self, said: dict[StoreKey, Answer]) -> None:
        super().__init__(Counts())
        self.said, self.asked, self.sent = said, list[StoreKey](), list[bytes]()

    def _claim(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        self.asked.extend(keys)
        assert sizes == [9] * len(keys)
        return [self.said[key] for key in keys]

    def _send(self, keys: list[StoreKey], records: list[RecordViews]) -> list[Answer]:
        self.sent += [bytes(record.join()) for record in records]
        return [HIT] * len(keys)


def test_only_what_the_medium_does_not_have_is_announced() -> None:
    first, second, third = make_keys(3)
    store = Announcing({first: MISS, second: HIT, third: RETRY})
    batch = [first, second, first, third, second, third]
    assert store.prepare(batch, [9] * 6) == [MISS, HIT, PENDING, RETRY, HIT, RETRY]
    assert store.asked == [first, second, third]
    assert store.prepare([first], [9]) == [PENDING]
    assert store.put([first, second], [b"123456789", b"123456789"]) == [HIT, RETRY]
    assert store.put([first], [b"12345678"]) == [RETRY]
    assert store.complete([first, second, first], [True] * 3) == [HIT, MISS, MISS]
    assert store.sent == [b"123456789"]
    assert store.prepare([first], [9]) == [MISS]
    assert store.complete([first], [True]) == [RETRY], "it was not put"


def test_a_medium_that_raises_leaves_nothing_announced() -> None:
    store, keys = Announcing({}), make_keys(2)
    with pytest.raises(KeyError):
        store.prepare(keys, [9, 9])
    assert store.complete(keys, [True] * 2) == [MISS] * 2
