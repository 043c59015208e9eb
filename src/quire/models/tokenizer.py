"""Tokenizer: text to token ids and back, and conversations to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from quire.errors import InvalidInput, ModelLoadError
from quire.models.source import ModelSource, quiet, reading
from quire.plan.source import check_tokenizer
from quire.spec.ids import Ids


class Tokenizer:
    """A Hugging Face tokenizer behind the few methods that Quire uses."""

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        self.name = name
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have holes
        self._tokenizer = tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token, if the tokenizer names one."""
        found = self._tokenizer.eos_token_id
        return () if found is None else (int(found),)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        """Token ids int32 of `text`."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | Ids, *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary (a padded output layer has them) decode to nothing."""
        known = [token for token in map(int, token_ids) if 0 <= token < self.vocab_size]
        return str(
            self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> Ids:
        """Token ids of a conversation; `variables` are passed to the template."""
        if not self.has_chat_template:
            raise InvalidInput(
                f"tokenizer '{self.name}' has no chat template.",
                fix="use plain completions, or add 'chat_template' to tokenizer_config.json.",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **variables
            )
        except Exception as error:  # templates raise exceptions of their authors' choice
            raise InvalidInput(
                f"the chat template of '{self.name}' refuses these messages: {error}.",
                fix="check roles, their order and the content of each message.",
            ) from error
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(path_or_id: str, *, revision: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in a folder or on the hub, with the chat template in the file `chat_template` if given.

    Raises ModelLoadError if none can be read.
    """
    source = ModelSource.find(path_or_id, revision)
    if source.local:
        check_tokenizer(Path(source.name))
    with quiet(), reading(source, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, local_files_only=source.local, trust_remote_code=False
        )
    if not len(tokenizer):
        raise ModelLoadError(
            f"'{path_or_id}' has no tokenizer.", fix="add tokenizer.json, or run with token ids and no tokenizer."
        )
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return Tokenizer(tokenizer, name=path_or_id)
