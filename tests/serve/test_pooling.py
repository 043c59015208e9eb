"""The routes of models that were made for embeddings or scores, by their clients, against the real server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from openai.types import embedding_create_params
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from quire.models.tokenizer import load_tokenizer
from quire.serve.pooling_protocol import EmbeddingBody
from quire.spec.pooling import Vectors
from tests.serve.live_server import LiveServer
from tests.serve.tiny_model import TEMPLATE, byte_tokenizer
from tests.tiny_pooling import save_embedder, save_scorer

DIFFERENCE = 2e-4
VOCABULARY: dict[str, Any] = {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": None}
TEXTS = ["It is a truth universally acknowledged", "It is a truth that a single man", "must be in want of a wife"]
QUERY, DOCUMENTS = "Who is in want? ", ["A single man.", "Nobody at all.", "The whole neighbourhood."]


def with_tokenizer(folder: Path) -> Path:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    return with_tokenizer(save_embedder("qwen3", folder, is_matryoshka=True, **VOCABULARY))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save_scorer("qwen3", tmp_path_factory.mktemp("scorer"), **VOCABULARY))


@pytest.fixture(scope="module")
def embeds(embedder: Path) -> Iterator[LiveServer]:
    with LiveServer.quire("--model", str(embedder), "--kv-memory", "1MiB", "--served-model-name", "tiny") as live:
        yield live


@pytest.fixture(scope="module")
def scores(scorer: Path) -> Iterator[LiveServer]:
    with LiveServer.quire("--model", str(scorer), "--kv-memory", "1MiB", "--served-model-name", "tiny") as live:
        yield live


@torch.inference_mode()
def embeddings_of(folder: Path, texts: list[str], dimensions: int | None = None) -> Vectors:
    """By transformers."""
    model, tokenizer = AutoModel.from_pretrained(folder), load_tokenizer(str(folder))
    states = [model(torch.tensor(tokenizer.encode(text)[None].astype(int))).last_hidden_state[0, -1] for text in texts]
    found = torch.stack(states)[:, :dimensions]
    normed: Vectors = (found / found.norm(dim=1, keepdim=True)).numpy()
    return normed


@torch.inference_mode()
def logits_of(folder: Path, texts: list[str]) -> list[float]:
    """By transformers."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), load_tokenizer(str(folder))
    return [float(model(torch.tensor(tokenizer.encode(text)[None].astype(int))).logits[0, 0]) for text in texts]


def test_by_openais_client(embeds: LiveServer, embedder: Path) -> None:
    """Its default is base64; twice, the second time from the cache."""
    client, wanted = embeds.client(), embeddings_of(embedder, TEXTS)
    for _ in range(2):
        answer = client.embeddings.create(model="tiny", input=TEXTS)
        assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "tiny"
        np.testing.assert_allclose([each.embedding for each in answer.data], wanted, atol=DIFFERENCE)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    usage: Any = answer.usage.model_extra
    assert usage["prompt_tokens_details"]["cached_tokens"] >= sum(len(text) // 16 * 16 for text in TEXTS) - 3 * 16
    one = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float", dimensions=10)
    np.testing.assert_allclose([one.data[0].embedding], embeddings_of(embedder, TEXTS[:1], 10), atol=DIFFERENCE)


def test_its_model_does_not_generate(embeds: LiveServer) -> None:
    assert embeds.request("/model_info", method="GET")[1]["is_generation"] is False


def test_all_forms_of_input(embeds: LiveServer, embedder: Path) -> None:
    ids = load_tokenizer(str(embedder)).encode(TEXTS[0]).tolist()
    found = [embeds.client().embeddings.create(model="tiny", input=each) for each in (TEXTS[0], [TEXTS[0]], ids, [ids])]
    for answer in found[1:]:
        np.testing.assert_allclose(answer.data[0].embedding, found[0].data[0].embedding, atol=1e-5)
    status, raw = embeds.request("/v1/embeddings", {"input": ids, "encoding_format": "base64", "user": "me"})
    assert status == 200
    decoded = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(decoded, found[0].data[0].embedding, atol=1e-5)


def test_more_inputs_than_sequences_at_once(embeds: LiveServer) -> None:
    inputs = [[1 + at % 200, 2, 3] for at in range(600)]
    answer = embeds.client().embeddings.create(model="tiny", input=inputs)
    assert [each.index for each in answer.data] == list(range(600))
    np.testing.assert_allclose(answer.data[3].embedding, answer.data[403].embedding, atol=1e-5)
    assert not np.allclose(answer.data[3].embedding, answer.data[4].embedding, atol=1e-2)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [""]}, "prompt"),
        ({"input": "x", "dimensions": 65}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "x", "session_id": "s"}, "session_id"),
        ({"input": "x", "explain": True}, "explain"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x" * 600}, "context"),
        ({"inputs": "x"}, "input"),
    ],
)
def test_refused_fields(embeds: LiveServer, body: dict[str, Any], field: str) -> None:
    status, answer = embeds.request("/v1/embeddings", body)
    assert status == 400 and field in f"{answer['error']['param']} {answer['error']['message']}", answer


def test_each_field_that_openai_documents_is_there() -> None:
    documented = get_type_hints(embedding_create_params.EmbeddingCreateParams).keys()
    assert documented <= EmbeddingBody.model_fields.keys() | EmbeddingBody.ignored


@pytest.mark.parametrize("kind", ["embeds", "scores"])
def test_text_is_refused_by_name(kind: str, request: pytest.FixtureRequest) -> None:
    client: OpenAI = request.getfixturevalue(kind).client()
    for create in (
        lambda: client.completions.create(model="tiny", prompt="x"),
        lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(BadRequestError, match="and generates no text"):
            create()


def test_scores_are_cosines_of_embeddings(embeds: LiveServer, embedder: Path) -> None:
    found = embeddings_of(embedder, [QUERY, *DOCUMENTS])
    wanted = found[1:] @ found[0]
    status, answer = embeds.request("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert status == 200 and answer["usage"]["prompt_tokens"] == sum(map(len, [QUERY, *DOCUMENTS]))
    np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted, atol=DIFFERENCE)


def test_scores_of_pairs(scores: LiveServer, scorer: Path) -> None:
    logits = np.array(logits_of(scorer, [QUERY + text for text in DOCUMENTS]))
    body = {"text_1": QUERY, "text_2": DOCUMENTS}
    for more, wanted in (({}, 1 / (1 + np.exp(-logits))), ({"use_activation": False}, logits)):
        status, answer = scores.request("/v1/score", body | more)
        assert status == 200
        np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted, atol=DIFFERENCE)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * len(DOCUMENTS)
    status, answer = scores.request("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert status == 400 and "2 texts, and text_2 has 3" in answer["error"]["message"]


def test_a_ranking(scores: LiveServer, scorer: Path) -> None:
    logits = np.array(logits_of(scorer, [QUERY + text for text in DOCUMENTS]))
    best = np.argsort(-logits).tolist()
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    status, answer = scores.request("/v1/rerank", {"query": QUERY, "documents": documents})
    assert status == 200 and [each["index"] for each in answer["results"]] == best
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[at] for at in best]
    few = {"query": QUERY, "documents": documents, "top_n": 1, "return_documents": False}
    status, answer = scores.request("/v1/rerank", few)
    assert status == 200 and [each.keys() for each in answer["results"]] == [{"index", "relevance_score"}]
    with pytest.raises(BadRequestError, match="'tiny' generates scores and was not trained for embeddings"):
        scores.client().embeddings.create(model="tiny", input="x")
