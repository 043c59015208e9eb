"""Places in a client's own body, by their tokens in the prompt: where a conversation is no longer a cached one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from quire.client.tokenising import Rendered, ServingTokenizer

_AT_THE_END = ("system", "instructions", "messages", "input")  # in the order of prompts; tools may be before or within
_TEXTS = ("text", "content", "thinking", "reasoning_content", "name", "arguments", "output")
_COMPARED = 200  # characters by which an item is found
_PAGE = 16
_MOST_READ = 1 << 26  # characters that were read for texts that are not there: a fraction of a second


class PromptPlaces:
    """The items of `body` in its prompt. Nothing is looked for before an explanation asks."""

    def __init__(self, body: Any, prompt: Rendered, tokenizer: ServingTokenizer) -> None:
        self._body, self._prompt, self._tokenizer = body, prompt, tokenizer

    def at(self, token: int) -> list[str]:
        """The items that the first tokens from this one on belong to, such as `system[0]`, `tools[2]`, `messages[3]`.
        What a template has changed belongs to what is before it."""
        ids = self._prompt.token_ids
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        first, last = (len(decode(ids[:end].tolist())) for end in (token, token + _PAGE))
        begun = sorted(self._starts())
        before = [name for start, name in begun if start <= first][-1:]
        return before + [name for start, name in begun if first < start < last]

    def _starts(self) -> Iterator[tuple[int, str]]:
        """Where each item begins, in characters: those of conversations from the end on, as tools repeat words. After
        many texts that are not there, no more are looked for."""
        text = self._prompt.text
        back, at, unread = text[::-1], 0, _MOST_READ
        for field in reversed(_AT_THE_END):
            for name, item in reversed(_items(field, getattr(self._body, field, None))):
                said = next(_texts(item), "").strip()[:_COMPARED]
                if said and (found := back.find(said[::-1], at)) >= 0:  # linear, which `rfind` is not
                    at = found + len(said)
                    yield len(text) - at, name
                elif said and (unread := unread - (len(text) - at)) <= 0:
                    return
        start = 0
        for name, tool in _items("tools", getattr(self._body, "tools", None)):
            called = getattr(tool, "function", tool)
            if (found := text.find(f'"{getattr(called, "name", None)}"', start)) >= 0:
                start = found
                yield start, name
            elif (unread := unread - (len(text) - start)) <= 0:
                return


def _items(field: str, value: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(value, list):
        return [(f"{field}[{number}]", item) for number, item in enumerate(value)]
    return [(field, value)] if value else []


def _texts(item: Any) -> Iterator[str]:
    """What a template shows of an item."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, list):
        for each in item:
            yield from _texts(each)
    else:
        for name in _TEXTS:
            yield from _texts(getattr(item, name, None) or [])
