"""Settings of the tiers: what contradicts itself is refused before anything is loaded, and what they mean is said."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.config import STORE_DRAIN_S, engine_config
from quire.engine.tier_report import tier_rows, tiers_as_dict, tiers_line, without_secrets
from quire.errors import InvalidInput
from quire.testing import small_plan

PEER, SECRET = "10.0.0.1:8998", {"transfer_secret": "s" * 16}


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        ({"host_memory": "1GiB", "enable_prefix_caching": False}, "prefix caching is off", "--host-memory"),
        ({"storage": "/x", "enable_prefix_caching": False}, "prefix caching is off", "leave"),
        ({"storage": ""}, "no name", "--storage"),
        ({"storage_size": "1GiB"}, "--storage-size does nothing without storage", "--storage DIR"),
        ({"host_memory": "auto", "prefetch": "timeout"}, "--prefetch does nothing without storage", "--storage DIR"),
        ({"storage": "/x", "prefetch_seconds": 1.0}, "--prefetch-seconds does nothing", "--prefetch timeout"),
        ({"write_policy": "write_back"}, "--write-policy does nothing", "--host-memory auto"),
        ({"load": "always"}, "--load does nothing", "--host-memory auto"),
        ({"host_memory": "lots"}, "lots", ""),
        ({"prefill_peers": PEER}, "does nothing without --role", "add --role decode and QUIRE_TRANSFER_SECRET, or"),
        ({"prefill_peers": PEER, **SECRET}, "does nothing without --role", "add --role decode, or"),
        ({"transfer_listen": PEER, **SECRET}, "does nothing without --role", "add --role prefill, or"),
        ({"storage": "/x", "storage_size": "auto-ish"}, "auto-ish", ""),
        ({"storage": "/x", "prefetch": "never"}, "prefetch", ""),
        (
            {
                "role": "decode",
                **SECRET,
                "prefill_peers": PEER,
                "transfer_listen": "0.0.0.0:0",
            },
            "0.0.0.0:0 names none",
            "the address of this machine",
        ),
        ({"role": "decode", **SECRET, "transfer_listen": "[::]:0"}, "names none", "the address of this machine"),
        ({"role": "both", **SECRET, "prefill_peers": f"{PEER},{PEER}"}, "is given twice", "once"),
        ({"role": "both", **SECRET, "prefill_peers": "10.0.0.1:0"}, "port 0", "the port of the peer"),
        ({"role": "both", **SECRET, "transfer_listen": "8998"}, "'8998' is not HOST:PORT", "127.0.0.1:8998"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], said: str, fix: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine_config(**settings)
    assert said in caught.value.message
    assert fix in caught.value.fix


def test_settings_that_agree() -> None:
    config = engine_config(storage="/x", storage_size="1GiB", prefetch="timeout", prefetch_seconds=0.5)
    assert config.has_tiers
    assert config.host_memory is None
    assert config.storage_size == 2**30
    assert engine_config(**config.model_dump()) == config, "settings may be handed on as they are"
    assert engine_config(host_memory="auto", write_policy="write_back", load="always").has_tiers
    assert not engine_config().has_tiers


def test_what_a_refusal_advises_is_accepted() -> None:
    assert engine_config(prefill_peers=PEER, role="decode", **SECRET).has_tiers
    assert engine_config(transfer_listen=PEER, role="prefill", **SECRET).has_tiers
    assert engine_config(role="decode", **SECRET).has_tiers, "its peers come later"


def test_an_engine_with_storage_may_take_longer_to_end() -> None:
    short = engine_config(host_memory="1GiB").stop_seconds
    assert engine_config(storage="/x").stop_seconds == short + STORE_DRAIN_S


def described(**settings: Any) -> dict[str, Any]:
    plan = small_plan(num_pages=20, page_size=16)
    return tiers_as_dict(engine_config(**settings), plan, (40,), (1000,), 50_000)


def test_each_tier_says_what_it_holds() -> None:
    found = described(storage="valkey://user:secret@host:6379/0?pool=3", storage_size="1MiB", prefetch="timeout")
    assert found["host"]["tokens"] == 40 * 16
    assert found["host"]["groups"] == {"full": {"frames": 40, "bytes": 40_000, "whole": True}}
    assert found["storage"] == {"where": "valkey://host:6379/0", "bytes": 2**20, "tokens": 2**20 // 1000 * 16}
    assert found["prefetch"] == "timeout of 2 s"
    rows = dict(tier_rows(found))
    assert rows["Host memory"] == "48.83 KiB: 640 tokens (full 40 frames, 39.06 KiB)"
    assert rows["Storage"] == "valkey://host:6379/0, at most 1.00 MiB: about 16,768 tokens"
    assert "secret" not in tiers_line(found)


def test_what_brings_little_is_said() -> None:
    assert "chosen here: storage" in described(storage="/x")["notes"][0]
    assert any("outlives" in note for note in described(host_memory="1GiB")["notes"])
    apart = described(role="prefill", **SECRET)
    assert "chosen here: other engines are reached through it" in apart["notes"][0]
    assert (apart["load"], apart["storage"]) == ("always", None)
    assert "storage" not in " ".join(apart["notes"]).replace("Without storage", "")
    small = tiers_as_dict(engine_config(host_memory="1GiB"), small_plan(num_pages=90, page_size=16), (40,), (1,), 1)
    assert any("fewer tokens than the device (640 of 1,440)" in note for note in small["notes"])
    alike = tiers_as_dict(engine_config(host_memory="1GiB"), small_plan(num_pages=41, page_size=16), (40,), (1,), 1)
    assert not any("fewer tokens than the device" in note for note in alike["notes"])
    less = described(host_memory="1GiB", storage="/x", storage_size="2KiB")
    assert any("Storage holds fewer tokens than host memory (32 of 640)" in note for note in less["notes"])
    assert dict(tier_rows(described(storage="/x")))["Storage"] == "/x, as large as it is"


@pytest.mark.parametrize(
    ("url", "shown"),
    [("/a/dir", "/a/dir"), ("s3://key:secret@bucket/pages?region=x", "s3://bucket/pages"), ("dir:/x", "dir:/x")],
)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
