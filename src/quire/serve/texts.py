"""PromptTexts: the texts of the last prompts, for the operator; none unless a server is told to keep them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.client.pieces import KnownPieces
from quire.client.tokenising import ServingTokenizer
from quire.observe.explain import Reason
from quire.spec.ids import Ids


class PromptTexts:
    """Token ids of prompts, in at most `most_bytes` together; those that were looked at or came least lately go
    first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_tokens = most_bytes // 4
        self.clear()

    def clear(self) -> None:
        """Delete all."""
        self._kept = KnownPieces(self._most_tokens)

    def keep(self, request_id: str, tokens: Ids) -> None:
        """Keep the prompt of a request, of which all sequences have the id with a number behind it. A prompt that has
        no room at all takes that of no other."""
        if len(tokens) < self._most_tokens:
            self._kept.keep([request_id.encode()], [tokens])

    def beside(self, reasons: Sequence[Reason], sequence: str, tokenizer: ServingTokenizer) -> list[str]:
        """The text of each reason of a sequence, with special tokens; none if it is not kept. Of a
        character whose bytes are tokens of two reasons, both have a replacement."""
        found = self._kept.leading([sequence.rpartition("-")[0].encode()])
        return [
            tokenizer.decode(tokens[each.start : each.start + each.tokens].tolist(), skip_special_tokens=False)
            for tokens in found
            for each in reasons
        ]
