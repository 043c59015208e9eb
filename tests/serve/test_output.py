"""Text assembly against oracles that see the whole text at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from quire.cache.request_kv import CacheUse
from quire.client.output import SequenceAssembler, SequenceDelta, TextStream, text_of
from quire.client.request_assembler import RequestAssembler
from quire.client.stop_strings import StopAutomaton, StopStrings
from quire.engine.messages import TokenLogprobs, TokenOutput
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL
from tests.serve.tiny_model import byte_tokenizer


class Pieces:
    """A decoder whose token `i` is the bytes `pieces[i]`."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool | str = True) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")


texts = st.text(st.sampled_from("abcé€😀 "), max_size=60)


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text, and its bytes cut anywhere, also inside characters."""
    text = draw(texts)
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=len(raw))))
    edges = [0, *(cut for cut in cuts if cut < len(raw)), len(raw)]
    return text, [raw[a:b] for a, b in pairwise(edges)]


def assemble(
    params: SamplingParams, pieces: list[bytes], *, chunk: int = 1
) -> tuple[SequenceAssembler, list[SequenceDelta]]:
    """Feed all pieces, `chunk` tokens in a step, as an engine would that stops at the first `must_abort`."""
    assembler = SequenceAssembler(params, Pieces(pieces))
    deltas = []
    for start in range(0, len(pieces), chunk):
        ids = list(range(start, min(start + chunk, len(pieces))))
        last = ids[-1] == len(pieces) - 1
        deltas.append(
            assembler.push(TokenOutput(request_id="r-0", token_ids=ids, finish_reason="length" if last else None))
        )
        if assembler.finished:
            break
    return assembler, deltas


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the text would be cut: read it character by character until one of `stops` is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


@given(split_texts())
def test_deltas_join_to_the_text_and_never_split_a_character(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    stream = TextStream(Pieces(pieces), skip_special_tokens=True)
    deltas = [stream.push(i) for i in range(len(pieces))]
    assert "".join(deltas) + stream.flush() == text
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.integers(0, 255), max_size=80))
def test_bytes_that_are_no_text_come_out_as_the_decoder_shows_them(raw: list[int]) -> None:
    stream = TextStream(Pieces([bytes([i]) for i in range(256)]), skip_special_tokens=True)
    shown = "".join(stream.push(byte) for byte in raw) + stream.flush()
    assert shown == bytes(raw).decode(errors="replace")


@given(
    split_texts(),
    st.lists(st.text(st.sampled_from("abcé "), min_size=1, max_size=4), max_size=3),
    st.integers(1, 4),
    st.booleans(),
)
def test_stop_strings_cut_where_the_whole_text_says(
    case: tuple[str, list[bytes]], stops: list[str], chunk: int, include: bool
) -> None:
    text, pieces = case
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, max_tokens=None)
    assembler, deltas = assemble(params, pieces, chunk=chunk)
    found = first_stop(text, stops)
    joined = "".join(delta.text for delta in deltas)
    assert joined == assembler.text
    if found is None:
        assert joined == text
        assert assembler.finish_reason == ("length" if pieces else None)
    else:
        at, stop = found
        assert joined == (text[: at + len(stop)] if include else text[:at])
        assert (assembler.finish_reason, assembler.stop_reason) == ("stop", stop)


@given(texts, st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopStrings(StopAutomaton(stops), include=False)
    shown = ""
    for i, character in enumerate(text):
        piece, stop = scanner.push(character)
        shown += piece
        if stop is not None:
            return
        held = text[len(shown) : i + 1]
        assert text[: i + 1] == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)
    assert shown + scanner.flush() == text


@given(texts, st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=6), st.booleans())
def test_the_automaton_finds_what_reading_all_finds(text: str, stops: list[str], include: bool) -> None:
    check_stop_strings(text, stops, include=include)


def check_stop_strings(text: str, stops: Sequence[str], *, include: bool) -> None:
    """By pieces of every size, against a reader that sees the whole text."""
    expected = first_stop(text, stops)
    for size in (1, 2, 3, 7, 60):
        scanner, shown, stop = StopStrings(StopAutomaton(stops), include=include), "", None
        for start in range(0, len(text), size):
            piece, stop = scanner.push(text[start : start + size])
            shown += piece
            if stop is not None:
                break
        if expected is None:
            assert (shown + scanner.flush(), stop) == (text, None)
        else:
            at, found = expected
            assert (shown, stop) == (text[: at + len(found)] if include else text[:at], found)


def check_stop_strings_are_linear() -> None:
    """Work by characters read, however many strings there are and however much of them is held back."""
    for stops in (
        ["a" * 255 + "b"],
        [f"{'a' * number}b" for number in range(1, 65)],
        [chr(200 + n) for n in range(64)],
    ):
        automaton = StopAutomaton(stops)
        num_links = sum(1 for _ in _links(automaton, "a" * 20_000))
        assert num_links <= 2 * 20_000
        scanner = StopStrings(automaton, include=False)
        assert scanner.push("a" * 20_000)[1] is None


def _links(automaton: StopAutomaton, text: str) -> Iterator[int]:
    """The states that reading visits."""
    state = 0
    for character in text:
        while state and character not in automaton._next[state]:
            state = automaton._shorter[state]
            yield state
        state = automaton._next[state].get(character, 0)
        yield state


def test_stop_strings_take_time_linear_in_the_text() -> None:
    check_stop_strings_are_linear()


def test_the_moves_that_are_kept_are_few() -> None:
    automaton = StopAutomaton(["stop"])
    for number in range(3 * 4096):
        automaton.move(0, str(number))
    assert len(automaton._moves) <= 4096


def check_the_same_stop_strings_have_one_automaton() -> None:
    """A request of 512 prompts with the most stop strings that there may be took 70 s and 2 GiB."""
    params = SamplingParams(stop=["xy", "ab"], n=2, max_tokens=None)
    requests = [
        RequestAssembler(
            request_id=f"r-{i}",
            prompt=None,
            prompt_token_ids=np.array([3]),
            params=params,
            decoder=Pieces([b"a", b"b"]),
        )
        for i in range(3)
    ]
    sequences = [sequence for request in requests for sequence in request.sequences.values()]
    assert len({id(sequence._stop._automaton) for sequence in sequences}) == 1
    requests[0].push(TokenOutput(request_id="r-0-0", token_ids=[0]))
    requests[1].push(TokenOutput(request_id="r-1-1", token_ids=[0, 1]))  # each has a place of its own in the text
    assert [sequence.finish_reason for sequence in sequences] == [None, None, None, "stop", None, None]
    assert ("xy", "ab") in StopAutomaton._in_use
    del requests, sequences
    gc.collect()
    assert ("xy", "ab") not in StopAutomaton._in_use, "strings of requests that have ended stay in memory"


def test_the_same_stop_strings_have_one_automaton() -> None:
    check_the_same_stop_strings_have_one_automaton()


def test_the_tokens_after_the_stop_string_are_dropped() -> None:
    assembler, deltas = assemble(SamplingParams(stop=["cd"], max_tokens=None), [b"ab", b"c", b"de", b"f"], chunk=4)
    assert assembler.text == "ab"
    assert assembler.token_ids == [0, 1, 2]
    assert not deltas[0].must_abort  # the engine has ended it too


def test_a_stop_string_tells_the_engine_to_abort() -> None:
    _, deltas = assemble(SamplingParams(stop=["c"], max_tokens=None), [b"ab", b"c", b"d"])
    assert [delta.must_abort for delta in deltas] == [False, True]


def test_min_tokens_hides_stop_strings() -> None:
    pieces = [b"a", b"b", b"a", b"b"]
    assembler, _ = assemble(SamplingParams(stop=["b"], min_tokens=3, max_tokens=None), pieces)
    assert assembler.text == "aba"


def test_the_stop_token_is_not_shown_unless_asked() -> None:
    for include, text in ((False, "a"), (True, "aX")):
        params = SamplingParams(stop_token_ids=[1], include_stop_str_in_output=include)
        assembler = SequenceAssembler(params, Pieces([b"a", b"X"]))
        assembler.push(TokenOutput(request_id="r-0", token_ids=[0]))
        assembler.push(TokenOutput(request_id="r-0", token_ids=[1], finish_reason="stop", stop_token=1))
        assert (assembler.text, assembler.stop_reason, assembler.token_ids) == (text, 1, [0, 1])


def test_end_of_sequence_has_no_stop_reason() -> None:
    assembler = SequenceAssembler(SamplingParams(), Pieces([b"a", b"E"]))
    delta = assembler.push(TokenOutput(request_id="r-0", token_ids=[0, 1], finish_reason="stop", stop_token=1))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", None)


def test_without_a_decoder_the_text_is_empty() -> None:
    assembler = SequenceAssembler(SamplingParams(logprobs=1), None)
    logprobs = [TokenLogprobs(-0.5, 2, [7], [-0.25])]
    assembler.push(TokenOutput(request_id="r-0", token_ids=[5], logprobs=logprobs, finish_reason="length"))
    completion = assembler.completion()
    assert (completion.text, completion.token_ids, completion.cumulative_logprob) == ("", [5], -0.5)
    assert completion.logprobs is not None
    assert {token_id: lp.rank for token_id, lp in completion.logprobs[0].items()} == {5: 2, 7: 1}


def test_skip_special_tokens_with_a_real_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("né").ids, 256, *tokenizer.encode("e").ids]
    for skip, expected in ((True, "née"), (False, "né<|end|>e")):
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        assert "".join(stream.push(i) for i in ids) + stream.flush() == expected


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a mark in place of a space; other characters are tokens for each of their bytes."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁▁",
        "é",
        "\ufffd",
        ".",
    ]
    backend = BackendTokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "a")], byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(joined)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), name="sentencepiece")


TOKENIZERS = {
    "bytes": Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()), name="bytes"),
    "bundled": load_tokenizer(str(BUNDLED_MODELS[DEFAULT_MODEL])),
    "sentencepiece": sentencepiece_tokenizer(),
}


def tokenizer_of(name: str) -> Tokenizer:
    """One that has met no token yet."""
    return Tokenizer(TOKENIZERS[name]._tokenizer, name=name)


class OnlyDecodes:
    """A tokenizer without a table of texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text(st.sampled_from("ab. é€한😀\ufffd"), max_size=70))
@settings(deadline=None)
def test_real_tokenizers_stream_the_text_of_all_tokens(name: str, text: str) -> None:
    """Also characters that are bytes, many in a row: a decoder shows all of them as marks while the last is half."""
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    for decoder in (tokenizer, OnlyDecodes(tokenizer)):
        stream = TextStream(decoder, skip_special_tokens=True)
        shown = [stream.push(token_id) for token_id in ids]
        assert "".join(shown) + stream.flush() == tokenizer.decode(ids)
        assert len(stream._window) <= 32


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.lists(st.one_of(st.integers(0, 60), st.integers(0, 2100)), max_size=70), st.booleans())
@settings(deadline=None)
def test_a_table_of_texts_changes_nothing(name: str, ids: list[int], skip: bool) -> None:
    """Any tokens: special ones, bytes that are no text, ids that the tokenizer does not have."""
    tokenizer = tokenizer_of(name)
    quick, slow = (TextStream(each, skip_special_tokens=skip) for each in (tokenizer, OnlyDecodes(tokenizer)))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    shown = ["".join(stream.push(token_id) for token_id in ids) + stream.flush() for stream in (quick, slow)]
    assert shown[0] == shown[1] or name == "sentencepiece"  # it shows bytes that are no text by the length of their run
    assert shown[0] == whole or name == "sentencepiece"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text(st.sampled_from("ab. é€한😀\ufffd"), max_size=20))
@settings(deadline=None)
def test_the_bytes_of_tokens_are_those_of_the_text(name: str, text: str) -> None:
    """Also of a part of a character. A space at the start of a text is dropped, and is one of its token's."""
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined.removeprefix(" " if name == "sentencepiece" else "") == tokenizer.decode(ids)


def test_a_token_s_text_is_what_it_adds() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert [text_of(tokenizer, each) for each in tokenizer.encode("a €")] == [" a", " ", "\ufffd", "\ufffd", "\ufffd"]
    assert [tokenizer.token_bytes(each) for each in (1, 9999)] == [b"<s>", b""]


def test_most_tokens_are_not_decoded() -> None:
    tokenizer = TOKENIZERS["bundled"]
    ids = tokenizer.encode("A page is a fixed number of tokens. " * 4).tolist()
    stream = TextStream(tokenizer, skip_special_tokens=True)
    stream.push(ids[0])
    stream._decode = None  # type: ignore[method-assign, assignment]
    assert "".join(map(stream.push, ids[1:])) == tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:1]))


def test_a_tokenizer_whose_tokens_depend_on_others_has_no_table() -> None:
    backend = BackendTokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    words = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), name="words")
    assert words.token_texts(skip_special_tokens=True) is None
    backend.decoder = decoders.Sequence([decoders.Replace("##", ""), decoders.Fuse()])
    assert (
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), name="words").token_texts(skip_special_tokens=True)
        is None
    )


def test_one_sequence_has_the_prompt_scored_for_all() -> None:
    request = RequestAssembler(
        request_id="r",
        prompt="p",
        prompt_token_ids=np.array([3, 4], dtype=np.int32),
        params=SamplingParams(n=3, prompt_logprobs=1, max_tokens=0),
        decoder=Pieces([b"a"]),
    )
    assert [each.params.prompt_logprobs for each in request.engine_requests()] == [1, None, None]


def test_a_request_collects_its_sequences() -> None:
    request = RequestAssembler(
        request_id="r-1",
        prompt="p",
        prompt_token_ids=np.array([3, 4], dtype=np.int32),
        params=SamplingParams(n=2),
        decoder=Pieces([b"a", b"b"]),
    )
    sent = request.engine_requests(salt="s")
    assert [(r.request_id, r.index, r.salt, r.tokens().tolist()) for r in sent] == [
        ("r-1-0", 0, "s", [3, 4]),
        ("r-1-1", 1, "s", [3, 4]),
    ]
    request.push(TokenOutput(request_id="r-1-1", token_ids=[1], use=CacheUse(16), finish_reason="stop"))
    assert request.unfinished_ids() == ["r-1-0"]
    request.push(TokenOutput(request_id="r-1-0", token_ids=[0], finish_reason="length"))
    output = request.output()
    assert [o.text for o in output.outputs] == ["a", "b"]
    assert (output.finished, output.num_cached_tokens, output.prompt_token_ids) == (True, 0, [3, 4])
