"""The tokenizer wrapper, on a byte-level tokenizer built here."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from quire.errors import InvalidInput, ModelLoadError
from quire.models.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family, flags 🇯🇵🇫🇷",
    "tab\tand\nlines  and   spaces",
    "�",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text


def test_facts(tokenizer):
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_token_ids == (256,)
    assert tokenizer.decode([*tokenizer.encode("hi"), 256, 9999]) == "hi"
    assert tokenizer.decode([*tokenizer.encode("hi"), 256], skip_special_tokens=False) == "hi<end>"


def test_special_tokens_that_mark_no_part_of_an_answer_are_left_out():
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    marks = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
    backend.add_special_tokens([AddedToken(each, special=True) for each in [*marks, "<|startoftext|>", "<pad>"]])
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), name="x", response_template="harmony")
    ids = range(10)
    assert tokenizer.decode(ids, skip_special_tokens="unmarked") == "a" + "".join(marks)
    texts = tokenizer.token_texts(skip_special_tokens="unmarked")
    assert [texts[token] for token in ids] == ["a", *marks, "", ""]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<pad>")


def test_chat(tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "<user>hello<go>"
    assert tokenizer.decode(tokenizer.apply_chat_template(messages, add_generation_prompt=False)) == "<user>hello"


def test_chat_template_errors(folder, tmp_path):
    broken = load_tokenizer(str(folder))
    broken._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInput, match="roles must alternate"):
        broken.apply_chat_template([{"role": "user", "content": "x"}])
    broken._tokenizer.chat_template = None
    assert not broken.has_chat_template
    with pytest.raises(InvalidInput, match="has no chat template"):
        broken.apply_chat_template([{"role": "user", "content": "x"}])


def test_load_errors(tmp_path):
    with pytest.raises(ModelLoadError, match="there is no folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ModelLoadError, match=r"the tokenizer of .* cannot be read|has no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
