"""The parser of an answer's text: content, reasoning and calls of tools, as they come.

transformers' `ResponseParser` defines the templates, and reads each call that comes whole. It does not split the text:
it keeps the whole answer, loses what came before a call that is no JSON, and shows no marker of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate as ResponseForm
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField as FormField

CALLS = "tool_calls"

_KINDS = {CALLS: "call"} | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "reasoning")

_BEGINNING = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The text of a call before its arguments, where both are in one JSON object."""

LONGEST_MARKER = 1024
"""Characters of a marker, and of a part that is read at once: the time to read an answer is linear in its length."""

_MARKS = re.compile(r'\\.|\\$|["{}\[\]]', re.DOTALL)

_TAIL = 256
"""Characters at the end of a prompt that may open a region."""


def opened(form: ResponseForm, prompt: str) -> FormField | None:
    """The region, such as reasoning, with whose opening marker a prompt ends."""
    tail = prompt.rstrip()[-_TAIL:]
    for field in form.fields.values():
        found = field.open_re.finditer(tail) if field.open_re is not None and field.name != CALLS else ()
        if any(match.end() == len(tail) > match.start() for match in found):
            return field
    return None


class AnswerPart(NamedTuple):
    """A part of an answer. `kind` is "content" or "reasoning", or "call" (then `text` is a name), or "arguments": JSON
    of the last call's arguments, or more of it."""

    kind: str
    text: str


class AnswerParser:
    """Parses one answer to a prompt. A call that is not whole, or is no JSON, is content, with its marker.

    With `streams`, arguments come as the model writes them, where a family writes them as JSON: what comes later cannot
    take them back, so those of a call that is cut off are cut off. Else, and in families that write no JSON, they come
    with the end of the call.
    """

    def __init__(self, form: ResponseForm, prompt: str, tools: Sequence[Mapping[str, Any]], *, streams: bool) -> None:
        """Without tools, no call is looked for."""
        self._form = form
        self._tools = list(map(dict, tools))
        self._streams = streams
        fields = form.fields
        self._outside = [each for each in fields.values() if each.open_re is None]
        self._inside = [each for each in fields.values() if each.open_re and (tools or each.name != CALLS)]
        self._region = opened(form, prompt)
        self._call: _CallText | None = None
        self._last = ""  # the character before `_held`
        self._held = ""  # text that was not read: it may be the beginning of a marker
        self._space: list[str] = []  # white space at the end of what was read of the region
        self._begins = True  # no text of the region was shown
        self._is_after_call = False  # and no text was shown since

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that this text adds."""
        parts: list[AnswerPart] = []
        for at in range(0, len(text), LONGEST_MARKER):
            self._held += text[at : at + LONGEST_MARKER]
            parts += self._read(at_end=False)
        return parts

    def end(self) -> list[AnswerPart]:
        """The parts that the end of the answer adds."""
        parts = list(self._read(at_end=True))
        if self._call is not None:
            parts += self._end_call("")
        if self._region is None and not self._begins and not self._is_after_call and (space := "".join(self._space)):
            parts.append(AnswerPart("content", space))
        return parts

    def _read(self, *, at_end: bool) -> Iterator[AnswerPart]:
        while True:
            found, until = self._marker(at_end=at_end)
            yield from self._text(self._take(until))
            if found is None:
                return
            field, match = found
            marker = self._take(match.end() - match.start())
            if self._region is not None:
                yield from self._close(marker)
            elif field.open_re is not None:
                self._open(field, marker, match.groupdict())
            elif not marker:
                return

    def _take(self, num: int) -> str:
        taken, self._held = self._held[:num], self._held[num:]
        self._last = taken[-1:] or self._last
        return taken

    def _marker(self, *, at_end: bool) -> tuple[tuple[FormField, Any] | None, int]:
        """The next marker in the held text, and the number of characters before it. Without one: those that belong to
        no marker, whatever follows."""
        text, start = self._last + self._held, len(self._last)  # patterns may look behind
        watched = [(field, field.open_re) for field in self._inside] if self._region is None else []
        watched += [(field, field.close_re) for field in ([self._region] if self._region else self._outside)]
        best, until = None, len(text)
        for field, pattern in watched:
            match = pattern.search(text, start, partial=not at_end) if pattern else None
            if match is None:
                continue
            if not at_end and (match.partial or _may_grow(field, match, len(text), opens=pattern is field.open_re)):
                until = min(until, match.start())
            elif best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end()):
                best = (field, match)
        if not at_end:
            until = max(until, len(text) - LONGEST_MARKER)
        if best is not None and (at_end or best[1].start() < until):
            return best, best[1].start() - start
        return None, until - start

    def _open(self, field: FormField, marker: str, captures: Mapping[str, str | None]) -> None:
        self._region = field
        if field.name == CALLS:
            self._call = _CallText(field, marker, captures.get("name"))
        else:
            self._space, self._begins = [], True

    def _close(self, marker: str) -> Iterator[AnswerPart]:
        if self._call is not None:
            yield from self._end_call(marker)
        else:
            self._region, self._space, self._begins = None, [], True

    def _text(self, text: str) -> Iterator[AnswerPart]:
        if not text:
            return
        if self._call is not None:
            parts = self._call.add(text)
            if self._streams:
                yield from parts
        elif self._region is not None or self._outside:
            yield from self._shown(_KINDS.get(self._region.name, "content") if self._region else "content", text)

    def _shown(self, kind: str, text: str) -> Iterator[AnswerPart]:
        """Text without the white space at both ends of its region."""
        kept = text.rstrip()
        if kept:
            shown = "".join(self._space) + kept
            yield AnswerPart(kind, shown.lstrip() if self._begins else shown)
            self._space, self._begins, self._is_after_call = [], False, False
        self._space.append(text[len(kept) :])

    def _end_call(self, marker: str) -> Iterator[AnswerPart]:
        call, self._call, self._region = self._call, None, None
        assert call is not None
        if call.shown and self._streams:
            found: list[AnswerPart] = []
        else:
            found = call.whole(marker) or self._parsed(call, marker)
            if not found:
                yield from self._shown("content", "".join(call.raw) + marker)
                return
        self._is_after_call = True
        yield from found

    def _parsed(self, call: _CallText, marker: str) -> list[AnswerPart]:
        """All calls of a region, as transformers parses them, with arguments cast to the types of the tools' schemas;
        none if it is not whole."""
        if call.field.close_re is not None and not marker and call.field.content != "json":
            return []
        try:
            found = parse_response("".join(call.raw) + marker, self._form, prefix="", tools=self._tools)[CALLS]
            functions = [each.get("function", each) for each in (found if isinstance(found, list) else [found])]
            return [part for each in functions for part in _parts_of(each["name"], each["arguments"])]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []


class _CallText:
    """A call that is being read. Its name and arguments are found as they come where both are in one JSON object, or
    the marker has the name and JSON follows."""

    def __init__(self, field: FormField, marker: str, name: str | None) -> None:
        self.field = field
        self.raw = [marker]
        self.shown: list[AnswerPart] = []
        self._before = ""  # text before the arguments
        self._object: _Object | None = None
        self._name = name
        self._is_json = field.content == "json" and not field.content_args and not field.transform_each

    def add(self, text: str) -> list[AnswerPart]:
        """What this text adds."""
        self.raw.append(text)
        parts: list[AnswerPart] = []
        if not self._is_json:
            return parts
        if self._object is None:
            self._before += text
            name, start = self._beginning()
            self._is_json = len(self._before) < LONGEST_MARKER or name is not None
            if name is None:
                return parts
            self._object, text = _Object(), self._before[start:]
            parts.append(AnswerPart("call", name))
        if kept := self._object.take(text):
            parts.append(AnswerPart("arguments", kept))
        self.shown += parts
        return parts

    def whole(self, marker: str) -> list[AnswerPart]:
        """The call that was found, if its arguments are a JSON object."""
        if self._object is None or not self._object.has_ended:
            return []
        arguments = "".join(part.text for part in self.shown if part.kind == "arguments")
        return [*self.shown[:1], AnswerPart("arguments", arguments)] if _is_object(arguments) else []

    def _beginning(self) -> tuple[str | None, int]:
        """The name, and where the arguments begin."""
        if self._name is not None:
            start = len(self._before) - len(self._before.lstrip())
            return (self._name if self._before[start : start + 1] == "{" else None), start
        match = _BEGINNING.match(self._before)
        return (None, 0) if match is None else (match[1], match.end())


class _Object:
    """A JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._is_text = False
        self._is_escaped = False

    def take(self, text: str) -> str:
        """The part of this text that belongs to it."""
        if self.has_ended:
            return ""
        start = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        for match in _MARKS.finditer(text, start):
            mark = match[0]
            if mark[0] == "\\":
                self._is_escaped = len(mark) == 1
            elif mark == '"':
                self._is_text = not self._is_text
            elif not self._is_text:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self.has_ended = True
                    return text[: match.end()]
        return text


def _may_grow(field: FormField, match: Any, length: int, *, opens: bool) -> bool:
    """Whether more text might make another match of one at the end of a text of this length."""
    literals, extend = (
        (field.open_literals, field.open_literal_can_extend)
        if opens
        else (field.close_literals, field.close_literal_can_extend)
    )
    return match.end() == length and (literals is None or extend)


def _is_object(text: str) -> bool:
    """Whether the text is a JSON object, as Python reads it: with NaN, which in a stream has left as it came."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parts_of(name: Any, arguments: Any) -> list[AnswerPart]:
    """Raises ValueError for what is no call."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not _is_object(text):
        raise ValueError("a call has a name, and an object of arguments")
    f"{name}{text}".encode()
    return [AnswerPart("call", name), AnswerPart("arguments", text)]
