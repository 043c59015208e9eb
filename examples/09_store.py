"""A store of your own: a file for each record, which another engine finds. `quire.Store` is the port to implement.

A store answers and does not raise. It may lose records; what it returns is checked by a digest that each record has.
Writing has two phases, `prepare` and `complete`, so that no reader finds half a record.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

from quire import LLM, Answer, Entry, Record, RecordViews, SamplingParams, Store, StoreKey, register_store


class FileStore(Store):
    """Records in files `FOLDER/SCOPE/PAGE.PART`. It evicts nothing. Any thread may call it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[StoreKey, int] = {}  # what is prepared
        self._lock = Lock()
        self._closed = False

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        found = (not self._closed and (self._folder / str(key)).exists() for key in keys)
        return [Answer.HIT if each else Answer.MISS for each in found]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        with self._lock:
            if self._closed:
                return [Answer.RETRY] * len(keys)
            return [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if self.exists([key]) == [Answer.HIT]:
            return Answer.HIT
        if key in self._sizes:
            return Answer.PENDING
        self._sizes[key] = size
        return Answer.MISS  # that is: write it

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        return [self._put(key, RecordViews(record)) for key, record in zip(keys, records, strict=True)]

    def _put(self, key: StoreKey, record: RecordViews) -> Answer:
        if self._sizes.get(key) != record.num_bytes:
            return Answer.RETRY
        try:
            self._writing(key).parent.mkdir(parents=True, exist_ok=True)
            self._writing(key).write_bytes(record.join())
        except OSError:
            return Answer.RETRY
        return Answer.HIT

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        with self._lock:
            return [self._complete(key, good) for key, good in zip(keys, ok, strict=True)]

    def _complete(self, key: StoreKey, good: bool) -> Answer:
        prepared, written = self._sizes.pop(key, None) is not None, self._writing(key)
        try:
            if prepared and good:
                (self._folder / str(key)).hardlink_to(written)  # fails where another writer was first
                return Answer.HIT
        except OSError:
            return Answer.RETRY
        finally:
            written.unlink(missing_ok=True)
        return Answer.MISS

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        return [
            self._get(self._folder / str(key), RecordViews(record)) for key, record in zip(keys, records, strict=True)
        ]

    def _get(self, path: Path, record: RecordViews) -> Answer:
        try:
            found = path.read_bytes()
        except OSError:
            return Answer.MISS
        if self._closed or len(found) != record.num_bytes:
            return Answer.MISS
        record.write(0, memoryview(found))
        return Answer.HIT

    def remove(self, keys: Sequence[StoreKey]) -> int:
        found = [key for key, answer in zip(keys, self.exists(keys), strict=True) if answer is Answer.HIT]
        for key in found:
            (self._folder / str(key)).unlink(missing_ok=True)
        return len(set(found))

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        for path in self._folder.glob("*/*.*[0-9]" if scope is None else f"{scope.hex()}/*.*[0-9]"):
            page, part = path.name.split(".")
            key = StoreKey(bytes.fromhex(path.parent.name), bytes.fromhex(page), int(part))
            yield Entry(key, path.stat().st_size)

    def close(self) -> None:
        self._closed = True
        self.complete(list(self._sizes), [False] * len(self._sizes))

    def _writing(self, key: StoreKey) -> Path:
        return self._folder / f"{key}.{id(self)}.part"


def open_files(url: str, capacity: int | None, *, counts_use: bool) -> Store:
    return FileStore(Path(url.removeprefix("files://")))


register_store("files", open_files)  # also for `quire serve`, in a program that calls `quire.cli.main()` after this


def main() -> None:
    prompt = "Emma had nothing to say, and so she looked out of the window at the rain. " * 12
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with tempfile.TemporaryDirectory() as folder:
        for number in ("first", "second"):
            with LLM(kv_memory="2MiB", storage=f"files://{folder}", load="always", prefetch="wait_complete") as llm:
                [output] = llm.generate(prompt, greedy)
                print(f"{number} engine: {output.num_storage_tokens} of {len(output.prompt_token_ids)} from storage")
        print(
            sum(1 for path in Path(folder).glob("*/*")), "records in", sum(1 for _ in Path(folder).iterdir()), "scope"
        )


if __name__ == "__main__":
    main()
