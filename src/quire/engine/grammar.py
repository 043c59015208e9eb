"""What an engine adds to grammars: its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from quire.grammar.compiler import Compiler
from quire.grammar.part import GrammarPart
from quire.loop import Part

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def grammars_of(engine: EngineCore) -> GrammarPart:
    """The part that enforces grammars."""
    config, vocabulary = engine.config, engine.model.spec.vocab_size

    def tokenizer() -> str | None:
        return None if config.skip_tokenizer_init else config.load_tokenizer().portable()

    compiler = Compiler(tokenizer, vocabulary, engine.eos_token_ids)
    return GrammarPart(
        compiler,
        vocabulary,
        engine.eos_token_ids,
        lambda: engine.wake(),
        threads=torch.get_num_threads(),
        beside=engine.device.type != "cpu",
    )


def grammar_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that enforces grammars."""
    yield engine.grammars
