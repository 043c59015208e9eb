"""Two and three processes give the tokens of one engine, for all kinds of layers and both ways to send."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import core_for, run
from tests.engine.tiered import PROMPTS, build
from tests.serve.apart import HAS_NIXL, apart, ask, at_rest, transfer
from tests.serve.tiny_model import byte_tokenizer

KINDS = ("llama_gqa", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next", "falcon_h1")
CASES = [
    pytest.param(
        *(kind, page, connector, num_decode),
        marks=[
            *([] if (kind, page, connector) == ("gpt_oss", 4, "tcp") else [pytest.mark.slow]),
            *([] if connector != "nixl" or HAS_NIXL else [pytest.mark.skip(reason="NIXL is not installed")]),
        ],
    )
    for kind in KINDS
    for page, connector, num_decode in ((4, "tcp", 1), (1, "tcp", 2), (16, "nixl", 2), (64, "tcp", 1), (64, "nixl", 1))
]


@pytest.mark.parametrize(("kind", "page_size", "connector", "num_decode"), CASES)
def test_tokens_are_those_of_one_engine(
    tmp_path: Path, kind: str, page_size: int, connector: str, num_decode: int
) -> None:
    reference = build(kind)
    reference.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>").save_pretrained(tmp_path)
    ways = [SamplingParams(temperature=t, seed=5, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = [[*PROMPTS[0], *prompt, *prompt] for prompt in PROMPTS]  # whole pages of 64
    one = core_for(LoadedModel(build(kind), name=kind), page_size=page_size)
    expected = [run(one, prompts, way) for way in ways]
    with apart(tmp_path, connector, "--page-size", str(page_size), num_decode=num_decode) as (prefill, decodes, _):
        for _turn in ("cold", "warm"):
            for decode in decodes:
                for way, tokens in zip(ways, expected, strict=True):
                    fields = {"temperature": way.temperature, "seed": 5}
                    assert [ask(decode, prompt, **fields) for prompt in prompts] == tokens
        found = [transfer(decode) for decode in decodes]
        assert all(each["received_bytes"] > 0 and not each["fallbacks"] for each in found), found
        sent = at_rest(prefill)["transfer"]["sent_bytes"]
        assert sent == sum(each["received_bytes"] for each in found)
