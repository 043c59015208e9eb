"""Keys of pages: the same everywhere, and another one for everything that a page's bytes depend on."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.models.fingerprint import identity_of
from quire.prefix.hashing import PageHashes, chain_pages, layout_identity, namespace_seed, scope_of, scope_prefix_of
from quire.spec.events import Namespace
from quire.spec.kv_format import KV_FORMATS
from quire.spec.layout import DType, Field, PageLayout
from tests.prefix.key_vectors import IDENTITY, tokens, vectors

GOLDEN = {
    "seeds": [
        "5947ef46f897a090c49a149af51da2d7930983287636165a9e28a148079f35ea",
        "38d7089d857650ad13542d01e96e04e52b43c3c2c379d353804535679c149962",
        "891e3f584807e69fdd46a3653328a0052c25afdbf28dee13e67fc0215204ab4f",
        "748d2c13e33cdfc0038263057f20364a16bede9e1ac0c3e7f8daec96babf7264",
    ],
    "scopes": [
        "3eb803886136c829e387db49a829c8d5",
        "3eb803886136c829490fada141736f58",
        "3eb803886136c829eba010729271db6a",
        "3eb803886136c829eeb666d01e1801a7",
    ],
    "scope prefix": [
        "3eb803886136c829",
    ],
    "layouts": [
        "0b8fd08afe945f3ab7a9513adcce3810c3f9be94e748f854003fd744a0384600",
        "f5f35c3219845720439a0ed0fe79be50a55ad4f5d07936c6c7d7c57bd6d7c9f6",
    ],
    "page of 1": [
        "d03722a7e59bf81f34a1da2d6e9034115d920b89de1e4fb2cacb22f4440b9e2b",
    ],
    "pages of 1": [
        "d03722a7e59bf81f34a1da2d6e9034115d920b89de1e4fb2cacb22f4440b9e2b",
        "c7f0d1ecab88e88f0c87a665b9841ff9bffdb320a3e94c36ceb81b82b623207c",
        "991c67b77c105d3ed08a1c95fdf82ff0bedfeac134f5ed93cab559e9306a67bf",
    ],
    "pages of 16": [
        "f1f0cffbc1cebc991acac2ae6bc94a5039836bb52f95e1a34d11530e4759cbb6",
        "6b5decdbc86eddb68a18016c5aa6720fc27d5e4b0a9481dcb6a86bf02e5f867d",
        "8eddf6dcab47d37b5ed1a01e0dd077f37d5b2c4d9ff789dcb15d8dd8462ae250",
    ],
    "cut run": [
        "6b5decdbc86eddb68a18016c5aa6720fc27d5e4b0a9481dcb6a86bf02e5f867d",
        "8eddf6dcab47d37b5ed1a01e0dd077f37d5b2c4d9ff789dcb15d8dd8462ae250",
    ],
}
"""Stored pages are found by these: a change of any of them empties every store there is."""


def test_golden_vectors() -> None:
    assert vectors() == GOLDEN


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_the_same_in_another_process(hash_seed: str) -> None:
    command = [sys.executable, "-m", "tests.prefix.key_vectors"]
    found = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True)
    assert json.loads(found.stdout) == GOLDEN


def field(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def test_a_key_written_out_by_hand() -> None:
    """Independent of the code: domain, number of fields, and each field behind its length."""
    seed = hashlib.sha256(
        b"quire-namespace-2" + (3).to_bytes(8, "little") + field(IDENTITY) + field(b"") + field(b"tenant-1")
    ).digest()
    assert namespace_seed(Namespace(salt="tenant-1"), IDENTITY) == seed
    page = hashlib.sha256(b"quire-page-2" + (4).to_bytes(4, "little") + seed + b"\x07\x00\x00\x00").digest()
    assert chain_pages(seed, tokens(7), 4) == (page,)
    prefix = hashlib.sha256(b"quire-edition-1" + (1).to_bytes(8, "little") + field(IDENTITY)).digest()[:8]
    assert scope_prefix_of(IDENTITY) == prefix
    assert scope_of(Namespace(), IDENTITY)[:8] == prefix and len(scope_of(Namespace(), IDENTITY)) == 16


# -- nothing collides


def all_distinct(keys: list[bytes]) -> bool:
    return len(set(keys)) == len(keys)


NAMES = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aa",
    "\0",
    "a\0",
    "\0a",
    "é",
    "e\u0301",
    "É",
    " a",
    "a ",
    "\u200ba",
    "塩",
    "quire-page-2",
]
NAMES += ["quire-namespace-2", (1).to_bytes(8, "little").decode() + "a", "None", "null", "default", "a" * 4096]


def test_no_two_namespaces_share_a_seed_or_a_scope() -> None:
    """An adapter named like a salt, fields that run into each other, empty ones, text that only looks the same."""
    namespaces = [Namespace(adapter, salt) for adapter, salt in itertools.product(NAMES, NAMES)]
    seeds = [namespace_seed(namespace, IDENTITY) for namespace in namespaces]
    scopes = [scope_of(namespace, IDENTITY) for namespace in namespaces]
    assert all_distinct(seeds) and all_distinct(scopes)
    assert all_distinct([key[:16] for key in seeds] + scopes), "scopes are of a domain of their own"
    assert {scope[:8] for scope in scopes} == {scope_prefix_of(IDENTITY)}


def test_identities_and_names_do_not_run_into_each_other() -> None:
    pairs = [(b"", "ab"), (b"a", "b"), (b"ab", ""), (field(b"ab"), ""), (b"", field(b"ab").decode())]
    assert all_distinct([namespace_seed(Namespace(adapter), identity) for identity, adapter in pairs])
    assert all_distinct([scope_of(Namespace(adapter), identity) for identity, adapter in pairs])


def test_layouts_do_not_run_into_each_other() -> None:
    joined = [["ab", "cd"], ["abcd"], ["a", "bcd"], ["ab", "cd", ""], ["", "ab", "cd"], ["cd", "ab"], [], [""]]
    assert all_distinct([layout_identity(b"m", layouts) for layouts in joined])
    assert all_distinct([layout_identity(model, ["x"]) for model in (b"", b"x", field(b"x"), b"m")])
    assert layout_identity(b"mx", []) != layout_identity(b"m", ["x"])


def test_tokens_that_look_like_headers_are_tokens() -> None:
    """A page whose bytes are another page's head, parent or whole input has a key of its own."""
    seed = namespace_seed(Namespace(), IDENTITY)
    inputs = [
        b"quire-page-2",
        seed,
        b"quire-page-2" + (4).to_bytes(4, "little") + seed,
        bytes(64),
        bytes(4),
        b"\xff" * 4,
    ]
    inputs += [b"quire-page-2" + (64).to_bytes(4, "little") + seed[:16] + bytes(32)]
    keys = [chain_pages(seed, text, len(text))[0] for text in inputs]
    assert all_distinct([seed, *keys])


def test_pages_of_another_size_have_other_keys() -> None:
    seed = namespace_seed(Namespace(), IDENTITY)
    prompt = tokens(*range(32))
    keys = [key for size in (1, 2, 4, 8, 16, 32) for key in chain_pages(seed, prompt, 4 * size)]
    assert len(keys) == 63 and all_distinct(keys)


@given(
    first=st.tuples(st.binary(max_size=4), st.text(max_size=4), st.text(max_size=4)),
    second=st.tuples(st.binary(max_size=4), st.text(max_size=4), st.text(max_size=4)),
)
def test_seeds_are_equal_only_where_all_fields_are(
    first: tuple[bytes, str, str], second: tuple[bytes, str, str]
) -> None:
    for key in (namespace_seed, scope_of):
        of: Callable[..., bytes] = key
        one, other = (of(Namespace(adapter, salt), identity) for identity, adapter, salt in (first, second))
        assert (one == other) == (first == second)


# -- every input counts

FIELD = Field(name="k", shape=(2, 8), dtype=DType.FLOAT16, layers=(0, 1), per=1)
LAYOUT = PageLayout(16, (FIELD, replace(FIELD, name="v")))
INPUTS: dict[str, Any] = {
    "described": b"a model",
    "weights": bytes(32),
    "weights_epoch": 3,
    "layouts": (LAYOUT, replace(LAYOUT, fields=(replace(FIELD, name="state", per=0),))),
    "namespace": Namespace("adapter", "salt"),
    "parent": tokens(*range(16)),
    "page": tokens(*range(16, 32)),
}


def key_of(inputs: dict[str, Any]) -> bytes:
    """The key of the second page, from everything that it depends on."""
    identity = identity_of(inputs["described"], inputs["weights"], inputs["weights_epoch"])
    whole = layout_identity(identity, [layout.fingerprint() for layout in inputs["layouts"]])
    seed = namespace_seed(inputs["namespace"], whole)
    size = 4 * inputs["layouts"][0].page_size
    return chain_pages(seed, inputs["parent"] + inputs["page"], size)[-1]


def other_layouts() -> list[tuple[PageLayout, ...]]:
    """The layouts of `INPUTS`, each with one thing changed."""
    first, second = INPUTS["layouts"]
    changes: list[dict[str, Any]] = [
        {"name": "q"},
        {"shape": (8, 2)},
        {"shape": (16,)},
        {"dtype": DType.BFLOAT16},
        {"layers": (0, 2)},
        {"layers": (1, 0)},
        {"layers": (0,)},
        {"per": 2},
        {"per": 0},
        {"kv_format": KV_FORMATS["fp8_e4m3"]},
        {"kv_format": KV_FORMATS["fp8_e5m2"]},
        {"kv_format": KV_FORMATS["nvfp4"]},
        {"kv_format": KV_FORMATS["mxfp8"]},
    ]
    found = [(replace(first, fields=(replace(FIELD, **change), first.fields[1])), second) for change in changes]
    wide = replace(first, page_size=32)
    return [*found, (second, first), (first,), (first, second, second), (first, first), (wide, second)]


def test_every_input_changes_the_key() -> None:
    flipped = [bytes(at) + b"\x01" + bytes(31 - at) for at in range(32)]
    changes = [{"described": value} for value in (b"", b"a model ", b"b model")]
    changes += [{"weights": value} for value in (*flipped, b"", bytes(31), bytes(33))]
    changes += [{"weights_epoch": value} for value in (0, 2, 4, 3 + 2**32)]
    changes += [{"layouts": value} for value in other_layouts()]
    names = (Namespace("adapter"), Namespace(salt="salt"), Namespace("salt", "adapter"), Namespace("adapters", "alt"))
    changes += [{"namespace": value} for value in (*names, Namespace("adapter", "salt2"))]
    for part in ("parent", "page"):
        original = INPUTS[part]
        changes += [
            {part: original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :]} for at in range(len(original))
        ]
    keys = [key_of(INPUTS), *[key_of(INPUTS | change) for change in changes]]
    assert len(keys) > 190 and all_distinct(keys)


def test_hashes_do_not_depend_on_how_runs_are_cut() -> None:
    seed, prompt = namespace_seed(Namespace(), IDENTITY), tokens(*range(60))
    whole = chain_pages(seed, prompt, 16)
    first = PageHashes(seed, prompt[:64], 16)
    second = PageHashes(first, prompt[64:], 16)
    assert first.digests + second.digests == whole
    assert second.parent == whole[3] and second.last == whole[-1]
