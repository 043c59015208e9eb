"""Every format on a few lines, and on lines that are wrong."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidInput
from quire.sim.trace import Trace, TraceRequest, open_trace, write_trace
from quire.spec.events import Namespace
from tests.sim.tiny_traces import digest


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Tokens that two prompts begin with alike."""
    length = min(len(one.prompt), len(other.prompt))
    different = np.flatnonzero(one.prompt[:length] != other.prompt[:length])
    return int(different[0]) if len(different) else length


def said(tokens: np.ndarray[Any, Any]) -> str:
    return bytes(tokens.tolist()).decode()


# -- Mooncake


def mooncake(**fields: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]} | fields


def test_mooncake_shares_whole_blocks(tmp_path: Path) -> None:
    rows = (mooncake(), mooncake(timestamp=1500, hash_ids=[0, 2]), mooncake(input_length=512, hash_ids=[0]))
    trace = open_trace(write(tmp_path / "m.jsonl", *rows))
    first, whole, second = trace
    assert (len(trace), trace.prompt_tokens, trace.output_tokens) == (3, 1712, 9)
    assert [len(each.prompt) for each in (first, second, whole)] == [600, 600, 512]
    assert (shared(first, second), shared(first, whole)) == (512, 512)
    assert [each.arrival for each in trace] == [0.0, 0.0, 1.5]
    assert not set(first.output.tolist()) & set(second.output.tolist())
    assert trace.source.startswith("Mooncake trace ")


# -- text


def test_agent_text_packed_or_not(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2_500_000, "input": "question two, zwölf", "output": "b", "session_id": "s"},
        {"timestamp": 1_000_000, "input": "question one", "output": "", "session_id": "s"},
    ]
    plain = write(tmp_path / "a.jsonl", *rows)
    packed = tmp_path / "a.jsonl.xz"
    packed.write_bytes(lzma.compress(Path(plain).read_bytes()))
    trace = open_trace(plain)
    one, two = trace
    assert (one.arrival, two.arrival, two.session, one.request_id) == (0.0, 1.5, "s", "2")
    assert (said(two.prompt), said(two.output), len(one.output)) == ("question two, zwölf", "b", 0)
    assert (trace.prompt_tokens, trace.output_tokens) == (32, 1)
    assert digest(trace) == digest(open_trace(str(packed)))


def test_text_goes_through_the_tokenizer_that_is_given(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"timestamp": 0, "input": "some words here", "output": "two words"})
    trace = open_trace(source, tokenize=lambda text: np.array([len(word) for word in text.split()], dtype=np.int32))
    (only,) = trace
    assert (only.prompt.tolist(), only.output.tolist()) == ([4, 5, 4], [3, 5])
    assert (trace.prompt_tokens, trace.output_tokens) == (3, 2)
    with pytest.raises(InvalidInput, match="request '1' of the trace has no prompt tokens"):
        list(open_trace(source, tokenize=lambda _: np.array([], dtype=np.int32)))


def test_a_request_log_of_a_conversation(tmp_path: Path) -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    second = [*first, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": [{"text": "Bye"}]}]
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hello."}}]}
    trace = open_trace(
        write(
            tmp_path / "log.jsonl",
            {"body": {"messages": first, "user": "ada"}, "response": {"body": answer}, "timestamp": 1.7e9},
            {"messages": second, "usage": {"completion_tokens": 7}, "timestamp": 1.7e12 + 500, "cache_salt": "x"},
            {"prompt": [5, 6, 7], "max_tokens": 2, "timestamp": "2023-11-14T22:13:21+00:00"},
            {"request": {"prompt": "Once"}, "response": {"choices": [{"text": " upon"}]}, "timestamp": 1.7e9 + 2},
        )
    )
    one, two, three, four = trace
    assert shared(one, two) == len(one.prompt)
    assert said(two.prompt).startswith(said(one.prompt) + said(one.output))
    assert [round(each.arrival, 3) for each in trace] == [0.0, 0.5, 1.0, 2.0]
    assert (one.session, two.namespace, len(two.output)) == ("ada", Namespace(salt="x"), 7)
    assert (three.prompt.tolist(), len(three.output)) == ([5, 6, 7], 2)
    assert (said(four.prompt), said(four.output)) == ("Once", " upon")


def test_a_request_log_says_which_answers_call_tools(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    called = {"choices": [{"message": {"role": "assistant", "tool_calls": [{"type": "function"}]}}]}
    plain = {"choices": [{"message": {"role": "assistant", "content": "Hello."}}]}
    rows = [{"body": asked | {"tools": tools}, "response": each} for tools in ([{}], []) for each in (called, plain)]
    trace = open_trace(write(tmp_path / "log.jsonl", *rows, asked | {"tools": [{}]}))
    assert [each.calls_tool for each in trace] == [True, False, None, None, None]


# -- lengths and chunks


def rag_folder(folder: Path, *rows: Any) -> str:
    write(folder / "1_sys_prompt.jsonl", {"sys_prompt_id": 1, "token_length": 10}, "")
    write(folder / "2_passages.jsonl", {"passage_id": 1, "token_length": 20}, {"passage_id": 2, "token_length": 30})
    write(folder / "3_history.jsonl", {"history_id": 5, "token_length": 5})
    write(folder / "4_user_input.jsonl", {"user_input_id": 6, "token_length": 3})
    write(folder / "5_web_search.jsonl", {"web_search_id": 7, "token_length": 4})
    write(folder / "0_trace.jsonl", *rows)
    return str(folder)


def rag(at: str, passages: list[int], **more: list[int]) -> dict[str, Any]:
    chunks = {"sys_prompt": [1], "passages_ids": passages, "history": [5], "web_search": [], "user_input": [6]}
    return {"timestamp": at, "input_length": 99, "output_length": 2, "hash_ids": chunks | more, "session_id": "s"}


def test_chunks_are_shared_only_behind_the_same_chunks(tmp_path: Path) -> None:
    folder = rag_folder(tmp_path, rag("10", [2, 1]), "", rag("8.5", [1, 2]), rag("11", [1], web_search=[7]))
    trace = open_trace(folder)
    one, two, three = trace
    assert [len(each.prompt) for each in trace] == [68, 68, 42]
    assert (shared(one, two), shared(one, three)) == (10, 30)
    assert [each.arrival for each in trace] == [0.0, 1.5, 2.5]
    assert digest(trace) == digest(open_trace(f"{folder}/0_trace.jsonl"))


def test_azure_gives_each_request_tokens_of_its_own(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ("2023-11-16 18:17:03.9799600,40,10", "2023-11-16 18:17:04.0319600,30,0")
    trace = open_trace(write(tmp_path / "azure.csv", header, *rows))
    one, two = trace
    assert (len(one.prompt), len(one.output), len(two.prompt), len(two.output)) == (40, 10, 30, 0)
    assert (two.arrival, shared(one, two)) == (pytest.approx(0.052), 0)


# -- token traces


@pytest.mark.parametrize("name", ["chat:requests=40", "abort-storm:requests=40", "same-text-other-namespace"])
def test_a_written_trace_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    trace = open_trace(name, seed=3)
    write_trace(trace, tmp_path / "t.jsonl")
    again = open_trace(str(tmp_path / "t.jsonl"))
    assert digest(again) == digest(trace)
    assert (again.prompt_tokens, again.output_tokens) == (trace.prompt_tokens, trace.output_tokens)


def test_a_token_trace_needs_no_more_than_its_tokens(tmp_path: Path) -> None:
    source = write(
        tmp_path / "t.jsonl",
        {"prompt_token_ids": [1, 2], "output_token_ids": [3], "timestamp": 2000, "session": "a"},
        {"prompt_token_ids": [4], "output_token_ids": [], "timestamp": 1000, "session": "b"},
    )
    first, second = open_trace(source)
    assert (first.request_id, first.session, first.arrival, second.arrival) == ("2", "b", 0.0, 1.0)
    assert (second.prompt.dtype, second.prompt.tolist(), second.after) == (np.int32, [1, 2], "")
    assert [each.session for each in open_trace(source, limit=1)] == ["b"]


def test_names_may_be_numbers(tmp_path: Path) -> None:
    tokens = {"prompt_token_ids": [1], "output_token_ids": [2]}
    source = write(
        tmp_path / "t.jsonl",
        {**tokens, "request_id": 0, "session": 7},
        {**tokens, "request_id": 12, "session": 7, "after": 0, "timestamp": 5},
    )
    first, second = open_trace(source)
    assert (first.request_id, first.session, first.after) == ("0", "7", "")
    assert (second.request_id, second.session, second.after) == ("12", "7", "0")
    text = write(tmp_path / "a.jsonl", {"timestamp": 0, "input": "question", "output": "b", "session_id": 7})
    assert [each.session for each in open_trace(text)] == ["7"]


# -- wrong lines

TOKENS = {"prompt_token_ids": [1], "output_token_ids": [2], "timestamp": 0, "session": ""}
TEXT = {"timestamp": 0, "input": "a", "output": "b"}
LENGTHS = {"input_length": 5, "output_length": 6}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
WHEN = "2023-11-16 18:17:03"


@pytest.mark.parametrize(
    ("good", "bad", "why"),
    [
        (mooncake(), mooncake(hash_ids=[0]), "1 blocks, and 600 tokens are 2 blocks of 512"),
        (mooncake(), mooncake(input_length=0, hash_ids=[]), "input_length"),
        (mooncake(), mooncake(output_length=-1), "output_length"),
        (mooncake(), mooncake(output_length=10**12), "at most"),
        (mooncake(), mooncake(hash_ids=[0, 2**31]), "hash_ids"),
        (mooncake(), mooncake(timestamp=None), "timestamp"),
        (mooncake(), '{"timestamp": NaN}', "malformed"),
        (mooncake(), '{"timestamp": 0, "input_len', "truncated"),
        (mooncake(), '{"more": ' + "[" * 5000, "recursion"),
        (TOKENS, TOKENS | {"prompt_token_ids": []}, "prompt_token_ids"),
        (TOKENS, TOKENS | {"prompt_token_ids": [-1]}, "prompt_token_ids"),
        (TOKENS, TOKENS | {"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        (TOKENS, TOKENS | {"output_token_ids": [2**31]}, "output_token_ids"),
        (TOKENS, TOKENS | {"timestamp": -1}, "timestamp"),
        (TOKENS, TOKENS | {"abort_after": -1}, "abort_after"),
        (TOKENS, TOKENS | {"after": "unknown"}, "'unknown'"),
        (TOKENS | {"timestamp": 5}, TOKENS | {"after": "1"}, "earlier"),
        (TOKENS, TOKENS | {"request_id": "1"}, "a request '1' before"),
        (TEXT, TEXT | {"input": ""}, "input"),
        (TEXT, TEXT | {"timestamp": "soon"}, "timestamp"),
        (TEXT, '{"timestamp": 0, "input": "\\ud800", "output": ""}', "surrogate"),
        (AZURE, f"{WHEN},1", "2 columns"),
        (AZURE, f"{WHEN},0,1", "0 prompt"),
        (AZURE, f"{WHEN},1,many", "many"),
        (AZURE, "yesterday,1,1", "yesterday"),
        (AZURE, f"{WHEN},{10**12},1", "at most"),
        (LENGTHS, LENGTHS | {"input_length": 0}, "input_length"),
        (LENGTHS, LENGTHS | {"output_length": 10**12}, "at most"),
        ({"prompt": "a"}, {"prompt": ""}, "no 'messages'"),
        ({"prompt": "a"}, {"prompt": "a", "timestamp": "soon"}, "timestamp"),
        ({"prompt": "a"}, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"content": "a"}]}, "role"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, good: Any, bad: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=rf"bad\.\w+ line 3: (?i:.*({why}))"):
        open_trace(write(tmp_path / "bad.jsonl", good, "", bad, good))


def test_a_chunk_without_a_length_and_a_missing_file_of_lengths(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"0_trace.jsonl line 2: .*chunk 9, and 2_passages.jsonl"):
        open_trace(rag_folder(tmp_path, rag("1", [1]), rag("2", [9])))
    write(tmp_path / "3_history.jsonl", {"history": 5, "token_length": 5})
    with pytest.raises(InvalidInput, match=r"3_history.jsonl line 1: 'history_id'"):
        open_trace(str(tmp_path))
    (tmp_path / "3_history.jsonl").unlink()
    with pytest.raises(InvalidInput, match=r"3_history.jsonl is missing"):
        open_trace(str(tmp_path))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"begins with b'# Notes'.*token trace, Mooncake"):
        open_trace(write(tmp_path / "notes.md", "# Notes"))
    with pytest.raises(InvalidInput, match="has no first line"):
        open_trace(str(tmp_path))
    with pytest.raises(InvalidInput, match="has no first line"):
        open_trace(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidInput, match="has no requests"):
        open_trace(write(tmp_path / "header.csv", AZURE))
    (tmp_path / "broken.jsonl.xz").write_bytes(b"not packed")
    with pytest.raises(InvalidInput, match="cannot be read"):
        open_trace(str(tmp_path / "broken.jsonl.xz"))
    with pytest.raises(InvalidInput, match=r"no trace file or workload.*chat.*fits"):
        open_trace("no-such-thing")
    with pytest.raises(InvalidInput, match="Fix: use sessions, or name a file"):
        open_trace("sesions:requests=5")
    with pytest.raises(InvalidInput, match="trace of 0 requests"):
        open_trace("chat", limit=0)


def test_tokens_are_built_for_one_request_at_a_time(tmp_path: Path) -> None:
    """A trace of a hundred million tokens opens at once; only what is asked for is built."""
    rows = [mooncake(input_length=51200, hash_ids=list(range(n * 100, n * 100 + 100))) for n in range(2000)]
    trace: Trace = open_trace(write(tmp_path / "large.jsonl", *rows))
    assert trace.prompt_tokens == 102_400_000
    assert len(next(iter(trace)).prompt) == 51200


@pytest.mark.parametrize(
    ("wrong", "likely"), [("slat", "salt"), ("abort_afer", "abort_after"), ("Timestamp", "timestamp")]
)
def test_a_misspelt_field_of_a_token_trace_is_refused_by_name(tmp_path: Path, wrong: str, likely: str) -> None:
    row = {"prompt_token_ids": [1, 2], "output_token_ids": [3], wrong: 1}
    with pytest.raises(InvalidInput, match=f"line 1: '{wrong}' .* nearly '{likely}'"):
        open_trace(write(tmp_path / "t.jsonl", row))


def test_fields_of_other_tools_are_left_alone(tmp_path: Path) -> None:
    own = {"prompt_token_ids": [1, 2], "output_token_ids": [3], "session": "a"}
    others = {"session_id": "b", "prompt_tokens": 2, "model": "m", "temperature": 0.7, "finish_reason": "stop"}
    (found,) = open_trace(write(tmp_path / "t.jsonl", own | others))
    assert found.session == "a"
