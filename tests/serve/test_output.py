"""Text assembly against oracles that see the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.messages import TokenLogprobs, TokenOutput
from quire.engine.output import RequestAssembler, SequenceAssembler, SequenceDelta, StopStrings, TextStream
from quire.scheduler.sampling_params import SamplingParams
from tests.serve.tiny_model import byte_tokenizer


class Pieces:
    """A decoder whose token `i` is the bytes `pieces[i]`."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
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
    scanner = StopStrings(stops, include=False)
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
    request.push(TokenOutput(request_id="r-1-1", token_ids=[1], num_cached_tokens=16, finish_reason="stop"))
    assert request.unfinished_ids() == ["r-1-0"]
    request.push(TokenOutput(request_id="r-1-0", token_ids=[0], finish_reason="length"))
    output = request.output()
    assert [o.text for o in output.outputs] == ["a", "b"]
    assert (output.finished, output.num_cached_tokens, output.prompt_token_ids) == (True, 0, [3, 4])
