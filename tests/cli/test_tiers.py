"""Tiers on the command line: what `quire generate` finds again, what is refused, and what `quire doctor` sees."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.cli import doctor
from tests.cli.conftest import Run

SMALL = ("--kv-memory", "1MiB", "--dtype", "float32", "--max-tokens", "4")
TEXT = "It was a fine evening, and only the cat was at home. " * 3


def test_generate_finds_what_it_stored(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    options = ("--model", tiny_model, *SMALL, "--storage", tmp_path / "pages", "--storage-size", "8MiB", "--json")
    options = (*options, "--load", "always", "--prefetch", "wait_complete")
    found = [json.loads(run("generate", TEXT, *options).stdout) for _ in range(2)]
    assert [one["num_storage_tokens"] for one in found] == [0, (len(TEXT) - 1) // 16 * 16]
    assert found[0]["outputs"][0]["token_ids"] == found[1]["outputs"][0]["token_ids"]


@pytest.mark.parametrize("command", [("serve",), ("generate", "Hello")])
@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        (("--storage-size", "1GiB"), "--storage-size does nothing without storage", "add --storage DIR"),
        (("--host-memory", "lots"), "lots", ""),
        (("--prefetch-seconds", "1"), "--prefetch-seconds does nothing", "--prefetch timeout"),
        (("--write-policy", "write_sometimes"), "--write-policy", ""),
    ],
)
def test_what_cannot_be_meant_is_refused(
    run: Run, tiny_model: Path, command: tuple[str, ...], options: tuple[str, ...], message: str, fix: str
) -> None:
    if command == ("serve",):
        command = ("serve", "--port", "0")
    done = run(*command, "--model", tiny_model, "--kv-memory", "1MiB", *options, "--json")
    assert done.exit_code == 2
    error = json.loads(done.stderr.strip().splitlines()[-1])["error"]
    assert message in error["message"]
    assert fix in error["fix"]


def test_a_url_that_means_nothing(run: Run, tiny_model: Path) -> None:
    done = run("generate", "Hello", "--model", tiny_model, *SMALL, "--storage", "ftp://host/x", "--json")
    error = json.loads(done.stderr)["error"]
    assert done.exit_code == 2
    assert "no store for 'ftp://'" in error["message"]
    assert "valkey://" in error["fix"]


def test_a_directory_of_another_owner_is_left_alone(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear Emma")
    done = run("generate", "Hello", "--model", tiny_model, *SMALL, "--storage", tmp_path, "--json")
    error = json.loads(done.stderr)["error"]
    assert (done.exit_code, error["code"]) == (2, "QUIRE-STORE-01")
    assert "letter.txt" in error["message"] and "empty directory" in error["fix"]
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_more_host_memory_than_there_is_names_what_fits(run: Run, tiny_model: Path) -> None:
    done = run("generate", "Hello", "--model", tiny_model, *SMALL, "--host-memory", "900TiB", "--json")
    error = json.loads(done.stderr)["error"]
    assert (done.exit_code, error["code"]) == (2, "QUIRE-HOST-01")
    assert "The largest size that fits is" in error["message"]
    size = error["fix"].removeprefix("use --host-memory ").rstrip(".")
    assert size.endswith("MiB")


def test_prefix_caching_off_keeps_nothing_below(run: Run) -> None:
    done = run("serve", "--no-prefix-caching", "--host-memory", "1GiB")
    assert done.exit_code == 2
    assert "prefix caching is off" in done.stderr


def test_doctor_looks_at_the_disk_and_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("doctor", "--json").stdout)
    tiers, memory = found["tiers"], found["memory"]
    assert 0 < tiers["largest_host_memory_bytes"] < memory["available_bytes"]
    assert tiers["storage"]["folder"] == str(tmp_path)
    assert tiers["storage"]["direct"] in (True, False)
    assert set(tiers["store_clients"]) == {"valkey", "s3", "mooncake"}
    assert not os.listdir(tmp_path), "it leaves nothing behind"


def test_doctor_says_which_clients_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CLIENTS", {"valkey": "no_such_package", "s3": "json"})
    found = doctor.examine_tiers(2**30)
    assert found["store_clients"] == {"valkey": False, "s3": True}
    assert dict(doctor.tier_rows(found))["Clients of stores"] == "valkey missing, s3 installed"


def test_doctor_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.chdir(tmp_path)
    found = doctor.examine_tiers(2**30)
    assert found["storage"]["direct"] is None
    assert tuple(part.partition(";")[0] for part in doctor.tier_rows(found)[1]) == (
        "Storage here",
        "cannot be written",
    )
