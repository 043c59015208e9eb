"""S3Store: records as objects in a bucket of S3, or of anything that speaks it.

    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1

Further options: `timeout` (seconds that one request may take, 10) and `threads` (requests at once, 8). Credentials come
from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...), never from the URL. The object of a record is
`prefix/SCOPE/PAGE.PART`.

An upload is there whole or not at all and never replaces an object, so two writers of one key cannot harm each other;
they are not told of each other before. What is forgotten, and when, is for the bucket's lifecycle rules. Everything
that goes wrong is RETRY and counted in `failures`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import Buffer

from quire.errors import InvalidInput, StoreError
from quire.tiers.store import Answer, Entry, StoreKey
from quire.tiers.stores.failures import Failures
from quire.tiers.stores.options import Options
from quire.tiers.stores.prepared import Announced, Prepared, bytes_of

if TYPE_CHECKING:
    from obstore.store import S3Store as Bucket

_PATH = re.compile(r"([0-9a-f]{32})/([0-9a-f]{64})\.(\d{1,5})")
_DELETED_AT_ONCE = 1000
_PIECE_BYTES = 1 << 20

_Item = TypeVar("_Item")


def open(url: str, capacity: int | None = None, *, counts_use: bool = True) -> S3Store:  # noqa: A001
    """Find the bucket of `url`, which knows of no use.

    Raises InvalidInput for settings that do not exist, StoreError if it fails.
    """
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
    try:
        from obstore.store import S3Store as Bucket
    except ImportError as error:
        raise StoreError(
            f"the S3 store needs obstore, which cannot be imported: {error}.", fix="pip install 'quire[s3]'."
        ) from error
    timeout, endpoint = timedelta(seconds=options.number("timeout", 10.0)), options.text("endpoint")
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


class S3Store:
    """The store port on a bucket. Owns a small pool of threads, one request each; made by `open`."""

    def __init__(self, bucket: Bucket, where: str, *, threads: int = 8) -> None:
        import obstore

        self.failures = Failures()
        self._obstore = obstore
        self._bucket = bucket
        self._where = where
        self._prepared = Prepared()
        self._closed = False
        try:
            next(iter(obstore.list(bucket, chunk_size=1)), None)
        except (obstore.exceptions.BaseError, OSError) as error:
            raise StoreError(
                f"{where} cannot be reached: {_brief(error)}.",
                fix="check the bucket, the endpoint, and credentials in the environment (AWS_ACCESS_KEY_ID, ...).",
            ) from error
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="quire-s3")

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """HIT or MISS, one request each."""
        return self._each(self._exists, keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """MISS where no object is yet. Writers in other processes are not told."""
        if self._closed:
            return [Answer.RETRY] * len(keys)
        return self._prepared.announce(keys, sizes, lambda mine, _: self._each(self._exists, mine))

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Refer to the records; nothing is sent before `complete`."""
        return self._prepared.hold(keys, records)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Upload what is good. HIT also where another writer was faster: its record stays."""
        taken = self._prepared.take(keys)
        return self._each(self._complete, list(zip(keys, taken, ok, strict=True)))

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Read objects piece by piece into the buffers. An object of another size than its buffer is a MISS."""
        return self._each(self._get, [(key, bytes_of(record)) for key, record in zip(keys, records, strict=True)])

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Forget records, a thousand to a request; those of requests that fail are not counted."""
        there = [key for key, answer in zip(keys, self.exists(keys), strict=True) if answer is Answer.HIT]
        paths = list(dict.fromkeys(str(key) for key in there))
        batches = [paths[start : start + _DELETED_AT_ONCE] for start in range(0, len(paths), _DELETED_AT_ONCE)]
        done = self._each(self._delete, batches)
        return sum(len(batch) for batch, answer in zip(batches, done, strict=True) if answer is Answer.HIT)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """Visible records. Raises StoreError when the bucket cannot be listed."""
        if self._closed:
            raise StoreError(f"{self._where} cannot be listed: the store was closed.")
        try:
            for batch in self._obstore.list(self._bucket, prefix=scope.hex() if scope else None, chunk_size=1000):
                for found in batch:
                    parts = _PATH.fullmatch(found["path"])
                    if parts is not None:
                        key = StoreKey(bytes.fromhex(parts[1]), bytes.fromhex(parts[2]), int(parts[3]))
                        yield Entry(key, found["size"])
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise StoreError(f"{self._where} cannot be listed: {_brief(error)}.") from error

    def close(self) -> None:
        """Forget what was not completed, and end the threads once what they are at is done. May be called twice."""
        self._closed = True
        self._prepared.take(self._prepared.keys())
        self._threads.shutdown()

    def _each(self, verb: Callable[[_Item], Answer], items: Sequence[_Item]) -> list[Answer]:
        """What the verb says of each, several at once; RETRY for what fails, and for all that is not begun by then."""
        failed = Event()

        def attempt(item: _Item) -> Answer:
            if self._closed or failed.is_set():
                return Answer.RETRY
            try:
                return verb(item)
            except (self._obstore.exceptions.BaseError, OSError) as error:
                failed.set()
                self.failures.note(type(error).__name__)
                return Answer.RETRY

        if len(items) == 1:
            return [attempt(items[0])]
        try:
            return list(self._threads.map(attempt, items))
        except RuntimeError:  # closed meanwhile
            return [Answer.RETRY] * len(items)

    def _exists(self, key: StoreKey) -> Answer:
        try:
            self._obstore.head(self._bucket, str(key))
        except FileNotFoundError:
            return Answer.MISS
        return Answer.HIT

    def _complete(self, item: tuple[StoreKey, Announced | None, bool]) -> Answer:
        key, announced, good = item
        if announced is None or not good:
            return Answer.MISS
        if announced.record is None:
            return Answer.RETRY
        try:
            self._obstore.put(self._bucket, str(key), announced.record, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            return Answer.HIT
        return Answer.HIT

    def _get(self, item: tuple[StoreKey, memoryview]) -> Answer:
        key, buffer = item
        try:
            found = self._obstore.get(self._bucket, str(key))
        except FileNotFoundError:
            return Answer.MISS
        if found.meta["size"] != buffer.nbytes:
            return Answer.MISS
        filled = 0
        for piece in found.stream(min_chunk_size=_PIECE_BYTES):
            if filled + len(piece) > buffer.nbytes:
                return Answer.RETRY
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return Answer.HIT if filled == buffer.nbytes else Answer.RETRY

    def _delete(self, paths: list[str]) -> Answer:
        self._obstore.delete(self._bucket, paths)
        return Answer.HIT


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
