"""S3Store: records as objects in a bucket of S3, or of a compatible server.

    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1

Further options: `timeout` (seconds per request, 10) and `threads` (requests at once, 8). Credentials come from the
environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...), never from the URL. The object of a record is
`prefix/SCOPE/PAGE.PART`.

An upload is atomic and never replaces an object, so two writers of one key do no harm. A bucket counts no uses: a
record is as old as its object. Lifecycle rules of the bucket remove records. Every error is RETRY and counted in
`failures`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store as Bucket

from quire.errors import InvalidInput, StoreError
from quire.tiers.store import Answer, Counts, Entry, Record, RecordViews, StoreKey
from quire.tiers.stores.registry import Options
from quire.tiers.stores.remote import RemoteStore, in_parts, key_of

_DELETED_AT_ONCE = 1000
_PIECE_BYTES = 1 << 20

_Item = TypeVar("_Item")


def open(url: str, capacity: int | None = None, *, counts_use: bool = True) -> S3Store:  # noqa: A001
    """Open the bucket of `url`; it does not count uses. Raises InvalidInput for invalid settings, or StoreError."""
    if capacity is not None:
        raise InvalidInput(
            f"a bucket has no bound, so {capacity} bytes cannot be asked of it.",
            fix="give the bucket a lifecycle rule, and leave the capacity out.",
        )
    options = Options(url, ("endpoint", "region", "timeout", "threads"))
    if options.parts.scheme != "s3" or not options.parts.netloc:
        raise InvalidInput(f"an S3 URL looks like s3://bucket/prefix, not {options.where}.")
    if "@" in options.parts.netloc:
        raise InvalidInput(
            f"the URL of {options.where} has a user in it, which would be taken for part of the bucket's name.",
            fix="leave it out, and give credentials in the environment (AWS_ACCESS_KEY_ID, ...).",
        )
    timeout, endpoint = timedelta(seconds=options.number("timeout", 10.0)), options.text("endpoint")
    if endpoint and not re.match("https?://[^/]", endpoint):
        raise InvalidInput(f"{options.where} has an endpoint that is no URL.", fix="write endpoint=http://HOST:PORT.")
    bucket = Bucket(
        options.parts.netloc,
        prefix=options.parts.path.strip("/") or None,
        region=options.text("region", "us-east-1"),
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=2)),
        },
        retry_config={
            "max_retries": 1,
            "retry_timeout": timeout,
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1)},
        },
        config={"endpoint": endpoint} if endpoint else None,
    )
    return S3Store(bucket, options.where, threads=math.ceil(options.number("threads", 8)))


class S3Store(RemoteStore):
    """The store port on a bucket; made by `open`. Owns a pool of threads, one request each. It never answers PENDING
    for writers in other processes; the first record of a key stays."""

    def __init__(self, bucket: Bucket, where: str, *, threads: int = 8) -> None:
        super().__init__(Counts())
        self._bucket = bucket
        self._where = where
        self._closed = False
        try:
            next(iter(obstore.list(bucket, chunk_size=1)), None)
        except (BaseError, OSError) as error:
            raise StoreError(
                f"{where} cannot be reached: {_brief(error)}.",
                fix="check the bucket, the endpoint, and credentials in the environment (AWS_ACCESS_KEY_ID, ...).",
            ) from error
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="quire-s3")

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return self._each(self._exists, keys)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        return self._each(self._get, [(key, RecordViews(record)) for key, record in zip(keys, records, strict=True)])

    def remove(self, keys: Sequence[StoreKey]) -> int:
        there = [key for key, answer in zip(keys, self.exists(keys), strict=True) if answer is Answer.HIT]
        batches = list(in_parts(list(dict.fromkeys(map(str, there))), _DELETED_AT_ONCE))
        done = self._each(self._delete, batches)
        return sum(len(batch) for batch, answer in zip(batches, done, strict=True) if answer is Answer.HIT)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        if self._closed:
            raise StoreError(f"{self._where} cannot be listed: the store was closed.")
        try:
            for batch in obstore.list(self._bucket, prefix=scope.hex() if scope else None, chunk_size=1000):
                for found in batch:
                    key = key_of(found["path"])
                    if key is not None:
                        yield Entry(key, found["size"], max(0.0, time.time() - found["last_modified"].timestamp()))
        except (BaseError, OSError) as error:
            raise StoreError(f"{self._where} cannot be listed: {_brief(error)}.") from error

    def close(self) -> None:
        self._closed = True
        self._drop_announced()
        self._threads.shutdown()

    def _each(self, verb: Callable[[_Item], Answer], items: Sequence[_Item]) -> list[Answer]:
        """Answers of `verb`, on several threads; RETRY for a failure, and for all items that begin after it."""
        failed = Event()

        def attempt(item: _Item) -> Answer:
            if self._closed or failed.is_set():
                return Answer.RETRY
            try:
                return verb(item)
            except (BaseError, OSError) as error:
                failed.set()
                self.failures.add(type(error).__name__)
                return Answer.RETRY

        if len(items) == 1:
            return [attempt(items[0])]
        try:
            return list(self._threads.map(attempt, items))
        except RuntimeError:  # closed meanwhile
            return [Answer.RETRY] * len(items)

    def _exists(self, key: StoreKey) -> Answer:
        try:
            obstore.head(self._bucket, str(key))
        except FileNotFoundError:
            return Answer.MISS
        return Answer.HIT

    def _send(self, keys: list[StoreKey], records: list[RecordViews]) -> list[Answer]:
        return self._each(self._put, list(zip(keys, records, strict=True)))

    def _put(self, item: tuple[StoreKey, RecordViews]) -> Answer:
        key, record = item
        with suppress(AlreadyExistsError):
            obstore.put(self._bucket, str(key), iter(record.views), mode="create", use_multipart=False)
        return Answer.HIT

    def _get(self, item: tuple[StoreKey, RecordViews]) -> Answer:
        key, record = item
        try:
            found = obstore.get(self._bucket, str(key))
        except FileNotFoundError:
            return Answer.MISS
        if found.meta["size"] != record.num_bytes:
            return Answer.MISS
        filled = 0
        for piece in found.stream(min_chunk_size=_PIECE_BYTES):
            if filled + len(piece) > record.num_bytes:
                return Answer.RETRY
            record.write(filled, memoryview(piece))
            filled += len(piece)
        return Answer.HIT if filled == record.num_bytes else Answer.RETRY

    def _delete(self, paths: Sequence[str]) -> Answer:
        obstore.delete(self._bucket, paths)
        return Answer.HIT


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
