"""`quire store`: what it says of a directory, and what it changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from quire.memory.record import RecordFormat
from quire.testing.contracts.records import make_key, make_keys, write
from quire.tiers.store import Answer, StoreKey
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.tombstones import delete_scope, tombstone_of
from quire.tiers.transfer import Lane, Transfer
from tests.cli.conftest import Run
from tests.tiers.stores.directory_medium import DirectoryMedium
from tests.tiers.stores.servers import free_port, started, valkey

WIDE = {"COLUMNS": "200"}
PAYLOAD = 5000


def read(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output)
    return found


def sealed(key: StoreKey) -> bytes:
    """A sound record of this key."""
    form = RecordFormat(key.part, b"L" * 16, PAYLOAD)
    rows = np.random.default_rng(key.part).integers(0, 256, (1, form.num_bytes), dtype=np.uint8)
    form.seal(rows, np.array([0], dtype=np.int32), [key.page])
    return rows.tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six records in two scopes, in the order of their numbers."""
    keys = [make_key(number, scope=number // 4, part=number % 2) for number in range(6)]
    with closing(DirectoryStore(tmp_path / "store", 1 << 20)) as opened:
        for key in keys:
            assert write(opened, [key], [sealed(key)]) == [Answer.HIT]
    return tmp_path / "store"


def keys_of(store: Path) -> set[StoreKey]:
    return DirectoryMedium(store).keys()


# -- inspect


def test_inspect(run: Run, store: Path) -> None:
    done = run("store", "inspect", store, "--json")
    assert done.exit_code == 0, done.output
    found = read(done.stdout)
    assert (found["backend"], found["records"], found["bytes"]) == ("DirectoryStore", 6, 6 * (64 + PAYLOAD))
    scopes = {scope["scope"]: scope for scope in found["scopes"]}
    ours = scopes[make_key(0).scope.hex()]
    assert (ours["records"], ours["parts"], ours["bytes"]) == (4, 2, 4 * (64 + PAYLOAD))
    assert ours["oldest_idle_seconds"] >= ours["newest_idle_seconds"] >= 0
    assert found["facts"]["capacity"] == 1 << 20 and found["facts"]["direct"] in (True, False)
    text = run("store", "inspect", f"dir:{store}", env=WIDE).stdout
    assert "6 records" in text and "Capacity 1.00 MiB" in text and make_key(0).scope.hex() in text
    assert "O_DIRECT" in text


def test_inspect_nothing(run: Run, tmp_path: Path) -> None:
    done = run("store", "inspect", tmp_path / "nowhere")
    assert done.exit_code == 2 and "there is no store" in done.stderr
    assert not (tmp_path / "nowhere").exists()
    DirectoryStore(tmp_path / "empty", 1 << 20).close()
    assert read(run("store", "inspect", tmp_path / "empty", "--json").stdout)["scopes"] == []


@pytest.mark.parametrize(
    ("url", "text"),
    [("ftp://host/x", "no store for 'ftp://'"), ("dir:", "no name"), ("xyz://", "no store for 'xyz://'")],
)
def test_urls_that_mean_nothing(run: Run, url: str, text: str) -> None:
    done = run("store", "inspect", url, env=WIDE)
    assert done.exit_code == 2 and text in done.stderr


SECRET = "hunter2"


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
def test_passwords_are_not_shown(run: Run, command: str, as_json: bool) -> None:
    flags = ["--json"] if as_json else []
    check_passwords(lambda url: run("store", command, url, *flags), as_json=as_json)


def check_passwords(ask: Callable[[str], Result], *, as_json: bool) -> None:
    """A server that answers, one that does not, and URLs that mean nothing."""
    pytest.importorskip("redis")
    port = free_port()
    with TemporaryDirectory(prefix="quire-") as folder:  # a socket's name has room for 100 characters
        with started(lambda: valkey(Path(folder), "--requirepass", SECRET)):
            done = ask(f"unix://:{SECRET}@{folder}/valkey.sock?db=0")
        assert done.exit_code == 0, done.output
        if as_json:
            assert read(done.stdout)["url"] == f"unix://{folder}/valkey.sock"
        outputs = [done.stdout + done.stderr]
    for url in (
        f"redis://:{SECRET}@127.0.0.1:{port}/0",
        f"valkey://me:{SECRET}@127.0.0.1:{port}?time={SECRET}",
        f"redis://me:4{SECRET}/@127.0.0.1:{port}",
        f"redis://me:{SECRET}@127.0.0.1:port",
        f"redis:/me:{SECRET}@127.0.0.1:{port}",
        f"ftp://me:{SECRET}@127.0.0.1",
        f"s3://me:{SECRET}@bucket?endpoint=http://127.0.0.1:{port}&timeout=.1",
    ):
        done = ask(url)
        assert done.exit_code == 2, done.output
        outputs.append(done.stdout + done.stderr)
    assert not any(SECRET in output for output in outputs)


# -- verify


def test_verify(run: Run, store: Path) -> None:
    done = run("store", "verify", store, "--json")
    assert done.exit_code == 0, done.output
    found = read(done.stdout)
    assert found["passed"] and (found["records"], found["corrupt"]) == (6, [])
    assert "Every record that was read is what its header says" in run("store", "verify", store, env=WIDE).stdout


def damage(store: Path) -> dict[str, str]:
    """Four kinds of damage; returns the defect of each key that has one."""
    medium = DirectoryMedium(store)
    keys = [make_key(number, scope=number // 4, part=number % 2) for number in range(6)]
    flipped = bytearray(sealed(keys[0]))
    flipped[700] ^= 4
    medium.write(keys[0], bytes(flipped))
    medium.write(keys[1], b"nonsense" + sealed(keys[1])[8:])
    medium.write(keys[2], sealed(keys[4]))  # sound, and of another page
    medium.write(keys[3], sealed(keys[3]._replace(part=7)))
    return {str(keys[0]): "digest", str(keys[1]): "magic", str(keys[2]): "key", str(keys[3]): "group"}


def test_verify_names_each_defect(run: Run, store: Path) -> None:
    expected = damage(store)
    done = run("store", "verify", store, "--json")
    assert done.exit_code == 4
    found = read(done.stdout)
    assert {each["key"]: each["defect"] for each in found["corrupt"]} == expected
    assert not found["passed"] and found["removed"] == 0
    text = run("store", "verify", store, env=WIDE)
    assert text.exit_code == 4 and "4 corrupt" in text.stdout and "--remove drops them" in text.stdout
    only = read(run("store", "verify", store, "--scope", make_key(0, scope=1).scope.hex()[:6], "--json").stdout)
    assert (only["records"], only["corrupt"]) == (2, [])


def test_verify_removes(run: Run, store: Path) -> None:
    expected = damage(store)
    done = run("store", "verify", store, "--remove", "--json")
    assert done.exit_code == 4 and read(done.stdout)["removed"] == 4
    assert {str(key) for key in keys_of(store)}.isdisjoint(expected)
    assert run("store", "verify", store).exit_code == 0


def test_verify_another_scope(run: Run, store: Path) -> None:
    done = run("store", "verify", store, "--scope", "nothex")
    assert done.exit_code == 2 and "is no scope" in done.stderr


# -- gc


def test_gc_by_scope(run: Run, store: Path) -> None:
    scope = make_key(0, scope=1).scope.hex()
    dry = read(run("store", "gc", store, "--keep", scope[:8], "--dry-run", "--json").stdout)
    assert (dry["chosen"], dry["removed"]) == (4, 0) and len(keys_of(store)) == 6
    done = read(run("store", "gc", store, "--keep", scope[:8], "--json").stdout)
    assert (done["chosen"], done["removed"]) == (4, 4)
    assert {key.scope.hex() for key in keys_of(store)} == {scope}


def test_gc_of_one_scope(run: Run, store: Path) -> None:
    scope = make_key(0, scope=1).scope.hex()
    assert run("store", "gc", store, "--drop", "f" * 32).exit_code == 2
    assert read(run("store", "gc", store, "--drop", scope[:8], "--json").stdout)["removed"] == 2
    assert scope not in {key.scope.hex() for key in keys_of(store)} and len(keys_of(store)) == 4


def test_gc_by_size(run: Run, store: Path) -> None:
    """What was used least lately goes."""
    done = run("store", "gc", store, "--to-bytes", str(2 * (64 + PAYLOAD)), env=WIDE)
    assert done.exit_code == 0 and "4 removed" in done.stdout
    assert keys_of(store) == {make_key(4, scope=1), make_key(5, scope=1, part=1)}


def test_gc_gives_the_disk_its_bytes(run: Run, tmp_path: Path) -> None:
    """Wherever the records lie that are left: here, one in each slab was used last."""
    size = 64 + PAYLOAD
    with closing(DirectoryStore(tmp_path, 4 << 20, slab_bytes=64 << 10)) as opened:
        keys = make_keys(64)
        assert write(opened, keys, [sealed(key) for key in keys]) == [Answer.HIT] * 64
        late = keys[::8]
        assert opened.get(late, [bytearray(size) for _ in late]) == [Answer.HIT] * 8
    with closing(DirectoryStore(tmp_path, None)) as opened:
        before = DirectoryMedium(tmp_path).disk_bytes()
        dry = read(run("store", "gc", tmp_path, "--to-bytes", str(8 * size), "--dry-run", "--json").stdout)
        assert dry["freed_bytes"] == 0 and DirectoryMedium(tmp_path).disk_bytes() == before == 8 * (64 << 10)
        done = read(run("store", "gc", tmp_path, "--to-bytes", str(8 * size), "--json").stdout)
        assert done["removed"] == 56 and done["freed_bytes"] == 7 * (64 << 10)
        assert DirectoryMedium(tmp_path).disk_bytes() == 64 << 10
        buffers = [bytearray(size) for _ in late]
        assert opened.get(late, buffers) == [Answer.HIT] * 8, "for a process that has it open too"
        assert buffers == [sealed(key) for key in late]
    DirectoryMedium(tmp_path).check()


def test_gc_by_age(run: Run, store: Path) -> None:
    DirectoryMedium(store).query("UPDATE records SET used = used - 7200000000 WHERE id <= 3")
    done = read(run("store", "gc", store, "--older-than", "1h", "--json").stdout)
    assert done["removed"] == 3 and len(keys_of(store)) == 3
    assert read(run("store", "gc", store, "--json").stdout)["removed"] == 0
    assert run("store", "gc", store, "--older-than", "soon").exit_code == 2


def test_gc_of_dead_writers(run: Run, store: Path) -> None:
    """An owner whose lock file is gone has ended."""
    with closing(DirectoryStore(store, None)) as writer:
        assert writer.prepare(make_keys(20)[10:], [500] * 10) == [Answer.MISS] * 10
        alive = read(run("store", "gc", store, "--json").stdout)
        assert alive["reclaimed"] == 0
        for path in (store / "owners").iterdir():
            path.unlink()
        dead = read(run("store", "gc", store, "--json").stdout)
        assert dead["reclaimed"] == 10
    DirectoryMedium(store).check()


# -- what is no store


COMMANDS = ("inspect", "verify", "gc")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_store_is_told_apart(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("x")
    said = {
        "nowhere": "nothing is there",
        "empty": "it is empty",
        "file": "it is not a directory",
        "foreign": "it holds 'thesis.txt' and no index",
    }
    for name, text in said.items():
        done = run("store", command, tmp_path / name, "--json")
        assert done.exit_code == 2 and done.stdout == ""
        error = read(done.stderr)["error"]
        assert error["code"] == "QUIRE-STORE-01" and error["message"].endswith(f"{text}.") and error["fix"]
    assert not (tmp_path / "nowhere").exists() and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", ["nonsense", "cut", "overwritten", "version", "a table less", "empty"])
def test_an_index_that_cannot_be_used(run: Run, store: Path, command: str, damage: str) -> None:
    index = store / "index.sqlite"
    if damage == "version":
        DirectoryMedium(store).query("PRAGMA user_version = 7")
    elif damage == "a table less":
        DirectoryMedium(store).query("DROP TABLE records")
    else:
        held = index.read_bytes()
        index.write_bytes(
            {
                "nonsense": b"nonsense" * 1000,
                "cut": held[:5000],
                "overwritten": held[: 3 * 4096] + bytes([255]) * 6 * 4096 + held[9 * 4096 :],
                "empty": b"",
            }[damage]
        )
    done = run("store", command, store, "--json")
    assert done.exit_code == 2, done.output
    error = read(done.stderr)["error"]
    assert error["code"] == "QUIRE-STORE-01" and "store" in error["message"] and error["fix"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("url", ["valkey://127.0.0.1:1/0", "unix:///nowhere/valkey.sock"])
def test_a_server_that_is_not_there(run: Run, command: str, url: str) -> None:
    done = run("store", command, url, "--json")
    assert done.exit_code == 2 and "does not answer" in read(done.stderr)["error"]["message"]


# -- looking


def order_of_use(store: Path) -> list[StoreKey]:
    rows = DirectoryMedium(store).query("SELECT name, used FROM records ORDER BY used")
    return [StoreKey.unpack(row[0]) for row in rows]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_to_look_is_no_use(run: Run, store: Path, command: str) -> None:
    """What a directory forgets next is what it would have forgotten."""
    with closing(DirectoryStore(store, None)) as opened:
        first = make_key(0)
        assert opened.get([first], [bytearray(64 + PAYLOAD)]) == [Answer.HIT]
    before = DirectoryMedium(store).query("SELECT name, used FROM records ORDER BY id")
    assert order_of_use(store)[-1] == first, "it was used"
    assert run("store", command, store).exit_code == 0
    assert DirectoryMedium(store).query("SELECT name, used FROM records ORDER BY id") == before


def test_verify_says_what_it_could_not_read(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectoryStore, "get", lambda store, keys, records: [Answer.RETRY] * len(keys))
    done = run("store", "verify", store, "--json")
    assert done.exit_code == 2
    found = read(done.stdout)
    assert (found["unread"], found["records"], found["passed"]) == (6, 0, False)
    assert "Not all of it could be checked" in run("store", "verify", store, env=WIDE).stdout


def test_verify_of_nothing(run: Run, store: Path) -> None:
    done = run("store", "verify", store, "--scope", "ffffffff", env=WIDE)
    assert done.exit_code == 0 and "nothing to check" in done.stdout


def test_scopes_are_told_whole_on_any_terminal(run: Run, store: Path) -> None:
    """They are what `--keep` and `--scope` are given."""
    assert make_key(0).scope.hex() in run("store", "inspect", store, env={"COLUMNS": "60"}).stdout


def test_gc_does_not_drop_all_for_a_scope_that_was_mistyped(run: Run, store: Path) -> None:
    done = run("store", "gc", store, "--keep", "ffff", env=WIDE)
    assert done.exit_code == 2 and "no scope here begins with 'ffff'" in done.stderr
    assert len(keys_of(store)) == 6


# -- what was flushed, by an engine that did not come to the end of it


@pytest.fixture
def flushed(store: Path) -> Path:
    move = Transfer(Lane.DELETE, (), make_key(0).scope)
    with closing(DirectoryStore(store, None)) as opened:
        next(delete_scope(opened, move))
    assert move.hidden and len(keys_of(store)) == 7
    return store


def test_what_was_flushed_is_told_and_checked_as_the_rest(run: Run, flushed: Path) -> None:
    found = read(run("store", "inspect", flushed, "--json").stdout)
    assert found["records"] == 6
    scopes = {scope["scope"]: (scope["records"], scope["parts"], scope["flushed"]) for scope in found["scopes"]}
    assert scopes == {make_key(0).scope.hex(): (4, 2, True), make_key(0, scope=1).scope.hex(): (2, 2, False)}
    text = run("store", "inspect", flushed, env=WIDE).stdout
    assert f"{make_key(0).scope.hex()} was flushed" in text
    assert read(run("store", "verify", flushed, "--json").stdout)["records"] == 6


@pytest.mark.parametrize("keep", [(), ("--keep",)])
def test_gc_ends_a_flush(run: Run, flushed: Path, keep: tuple[str, ...]) -> None:
    options = [*keep, make_key(0).scope.hex()[:8]] if keep else []
    dry = read(run("store", "gc", flushed, *options, "--dry-run", "--json").stdout)
    assert dry["chosen"] == (6 if keep else 4) and len(keys_of(flushed)) == 7
    done = read(run("store", "gc", flushed, *options, "--json").stdout)
    assert done["removed"] == (6 if keep else 4)
    assert keys_of(flushed) == (set() if keep else {make_key(4, scope=1), make_key(5, scope=1, part=1)})


def test_gc_keeps_the_mark_while_something_is_left_under_it(
    run: Run, flushed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryStore, "remove", lambda store, keys: 0)
    done = run("store", "gc", flushed, "--json")
    error = json.loads(done.stderr)["error"]
    assert (done.exit_code, error["code"]) == (2, "QUIRE-STORE-01") and "could be removed" in error["message"]
    monkeypatch.undo()
    assert tombstone_of(make_key(0).scope) in keys_of(flushed)
