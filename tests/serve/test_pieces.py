"""Conversations that go on are tokenised from their first new piece, and have the token ids of the whole text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.client.pieces import Cutter, KnownPieces
from quire.client.tokenising import SHORT_CHARACTERS, Tokenising
from quire.models.tokenizer import Tokenizer
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL
from quire.spec.ids import Ids

LONG = "The ball was at Netherfield. " * 200


class Noted(Tokenizer):
    """Notes the characters of each text that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, name="noted")
        self.lengths: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        self.lengths.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


def bundled() -> Noted:
    return Noted(AutoTokenizer.from_pretrained(BUNDLED_MODELS[DEFAULT_MODEL]))


def other(*, first: bool) -> Noted:
    """A tokenizer that treats the start of a text in a way of its own, with added tokens of every kind."""
    library = Library(models.BPE())
    if first:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Metaspace()
    library.train_from_iterator([LONG, "▁the <s> </s> x<m>"], trainers.BpeTrainer(vocab_size=90, show_progress=False))
    library.add_special_tokens(["<s>", "</s>", "x<s>", AddedToken("<m>", lstrip=True, rstrip=True, special=True)])
    library.add_tokens([AddedToken("<n>", normalized=True), AddedToken("</s></s>", normalized=False, single_word=True)])
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return Noted(PreTrainedTokenizerFast(tokenizer_object=library, chat_template=template))


TOKENIZERS = {"bundled": bundled(), "first": other(first=True), "prepend": other(first=False)}
WORDS = [
    "<s>",
    "</s>",
    "x<s>",
    "x",
    "<m>",
    "<n>",
    " ",
    "  ",
    "ball",
    "é",
    "<|end|>",
    "<tool_call>",
    "<|user|>",
    "<",
    LONG,
]


def turns(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20, deadline=None)
@example(["the ball ", "<m>", "  ", "</s>", "x", "<s>", "</s>", "</s>", " ", "<m>  x</s></s>x"])
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map("".join), min_size=1, max_size=5))
def test_ids_are_those_of_the_whole_text(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=1_000_000)) as pool:
            for end in [*range(1, len(texts) + 1), len(texts)]:
                messages = turns([LONG, *texts[:end]])
                whole = tokenizer.encode(tokenizer.chat_text(messages), add_special_tokens=False)
                found = await pool.chat(messages, {}, salt="a")
                assert found.token_ids.dtype == np.int32
                assert found.token_ids.tolist() == whole.tolist()

    asyncio.run(body())


def test_a_second_turn_encodes_what_is_new_for_its_salt_only() -> None:
    tokenizer = bundled()

    async def lengths(pool: Tokenising, messages: list[dict[str, Any]], salt: str | None) -> list[int]:
        tokenizer.lengths.clear()
        await pool.chat(messages, {}, salt=salt)
        return list(tokenizer.lengths)

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=1_000_000)) as pool:
            first, second = turns([LONG]), turns([LONG, "And then?"])
            whole = len(tokenizer.chat_text(second))
            assert await lengths(pool, first, "a") == [len(tokenizer.chat_text(first))]
            assert await lengths(pool, second, "b") == [whole]
            assert await lengths(pool, second, None) == [whole]
            assert await lengths(pool, second, "a") == [len("<|user|>And then?<|end|><|assistant|>")]
            assert await lengths(pool, second, "a") == []
            short = turns(["x" * (SHORT_CHARACTERS // 2)])
            assert len(await lengths(pool, short, "a")) == len(await lengths(pool, short, "a")) == 1

    asyncio.run(body())


def test_kept_pieces_are_bounded_and_the_least_recent_go() -> None:
    pieces = KnownPieces(most_tokens=138)
    ids = [np.arange(4, dtype=np.int32) + at for at in range(3)]
    pieces.keep([b"0", b"1"], ids[:2])
    assert len(pieces.leading([b"0"])) == 1  # now the most recent
    pieces.keep([b"2"], ids[2:])
    assert pieces.leading([b"1"]) == []
    assert [found.tolist() for found in pieces.leading([b"0", b"2", b"1"])] == [ids[0].tolist(), ids[2].tolist()]
    pieces.keep([b"3"], [np.arange(139, dtype=np.int32)])
    assert pieces.leading([b"3"]) == []


def test_short_pieces_count_what_is_kept_beside_their_ids() -> None:
    pieces = KnownPieces(most_tokens=1000)
    keys = [bytes([at]) for at in range(100)]
    pieces.keep(keys, [np.arange(2, dtype=np.int32)] * 100)
    assert [len(pieces.leading([key])) for key in keys] == [0] * 85 + [1] * 15


def test_keys_are_of_text_and_salt() -> None:
    content = bundled().portable()
    assert content is not None
    cutter = Cutter(content)
    text = "a<|end|>b<|end|>"
    assert cutter.cut(text, "").starts == [0, 1, 9]
    assert cutter.cut(text, "").keys == cutter.cut(text, "").keys
    assert len({*cutter.cut(text, "").keys, *cutter.cut(text, "s").keys}) == 6
