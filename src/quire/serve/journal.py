"""Journal: what a router needs of a stream of events, so that another server can continue it.

    events, a line for all that they show, events, a line, ..., the last events, the last line

A line is a comment of the stream, which clients ignore. When a server is lost, the router sends the lines, and the
body, to another one. That makes the same events of them again, up to the last line, and sends none of these; it goes on
where they end. A draw is a hash of seed, index and position: its tokens are those that the first one would have drawn.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from fastapi import Request
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Message, Receive
from xxhash import xxh3_128_hexdigest

from quire.client.output import SequenceDelta
from quire.engine.messages import TokenOutput
from quire.errors import InvalidInput, QuireError
from quire.scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.serve.generation import Generation

JOURNAL = "X-Quire-Journal"
"""Header of a request whose answer is to have a journal. The body begins with so many bytes of lines."""

MOST_JOURNAL_BYTES = 16 << 20

TOKENS = "X-Quire-Tokens"
"""Header of a request that is to be answered with the `PromptTokens` of its first prompt, and not computed."""

GENERATING = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"}
"""Routes that answer it. Others do not run for it."""

PREFIX = b": "
LOST, END = b'{"lost":', b'{"end":'
"""How lines begin that say that the server cannot go on, or that the stream is complete."""


class PromptTokens(msgspec.Struct):
    """The tokens of a prompt, int32 as bytes, and the salt of its pages."""

    tokens: bytes
    salt: str

    def answer(self) -> Response:
        """For the router that asks."""
        return Response(msgspec.msgpack.encode(self), headers={TOKENS: "1"})


class JournalHead(msgspec.Struct, kw_only=True):
    """What the first server chose: the id and the time of the answer, and the seed; and what must be the same: a hash
    of the prompt's tokens, and the model with its weights."""

    request_id: str
    created: int
    seed: int
    prompt: str = ""
    identity: str = ""
    weights_epoch: int = 0


class JournalLine(msgspec.Struct, omit_defaults=True):
    """One line. The ids of `outputs` are without that of the answer. A server that is `lost` says whether the request
    may be the cause."""

    start: JournalHead | None = None
    outputs: list[TokenOutput] = []
    lost: str = ""
    is_cause: bool = False
    end: bool = False

    def encoded(self) -> bytes:
        """As a comment of a stream."""
        return PREFIX + _encoder.encode(self) + b"\n\n"


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournalLine)


class NoJournal:
    """That of an answer that no other server continues."""

    request_id = ""
    created = 0
    headers: Mapping[str, str] = {}
    """Those of the answer."""

    def begun(self, prompt: int) -> list[TokenOutput]:
        """What the servers before this one have said of this prompt."""
        return []

    def params(self, params: SamplingParams, prompt: int) -> SamplingParams:
        """Those of this prompt, with a seed that another server can draw by."""
        return params

    def first(self, generation: Generation) -> bytes:
        """The first line; none of an answer that is continued. Raises InvalidInput if that is not of the same prompts
        and weights."""
        return b""

    def after(self, deltas: Iterable[tuple[int, SequenceDelta]]) -> bytes:
        """The line behind events that show these."""
        return b""

    def last(self) -> bytes:
        """The line behind the last events."""
        return b""

    def lost(self, error: QuireError, generation: Generation) -> bytes:
        """The line in place of the last events, if another server may be able to go on."""
        return b""


class Journal(NoJournal):
    """`given` are the lines that were written so far. Raises InvalidInput if they are none."""

    headers: Mapping[str, str] = {JOURNAL: "1"}

    def __init__(self, given: bytes) -> None:
        try:
            lines = [_decoder.decode(line) for line in given.splitlines()]
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"the journal cannot be read: {error}.") from error
        self._start = lines[0].start if lines else None
        self._seed = secrets.randbits(62)
        self._outputs = [output for line in lines for output in line.outputs]
        if self._start is not None:
            self.request_id, self.created, self._seed = self._start.request_id, self._start.created, self._start.seed
        elif lines:
            raise InvalidInput("the journal has no beginning.")

    def begun(self, prompt: int) -> list[TokenOutput]:
        """A sequence without tokens begins again."""
        own = [output for output in self._outputs if output.request_id.partition("-")[0] == str(prompt)]
        drawn = {output.request_id for output in own if output.token_ids or output.finish_reason is not None}
        name = self.request_id
        return [replace(each, request_id=f"{name}-{each.request_id}") for each in own if each.request_id in drawn]

    def params(self, params: SamplingParams, prompt: int) -> SamplingParams:
        return params if params.seed is not None else replace(params, seed=self._seed + prompt)

    def first(self, generation: Generation) -> bytes:
        start = JournalHead(
            request_id=generation.request_id,
            created=generation.created,
            seed=self._seed,
            prompt=xxh3_128_hexdigest(b"|".join(ids.tobytes() for ids in generation.prompts)),
            identity=generation.engine.facts.get("identity", ""),
            weights_epoch=generation.engine.last_statistics.get("weights_epoch", 0),
        )
        if self._start is None:
            self._start, self.request_id = start, generation.request_id
            return JournalLine(start=start).encoded()
        if self._start != start:
            raise InvalidInput("the answer cannot be continued here: its prompt or the weights are others.")
        return b""

    def after(self, deltas: Iterable[tuple[int, SequenceDelta]]) -> bytes:
        at = len(self.request_id) + 1
        outputs = [replace(each, request_id=each.request_id[at:]) for _, delta in deltas if (each := delta.source)]
        return JournalLine(outputs=outputs).encoded()

    def last(self) -> bytes:
        return JournalLine(end=True).encoded()

    def lost(self, error: QuireError, generation: Generation) -> bytes:
        if error.status != 503:
            return b""
        return JournalLine(lost=error.message, is_cause=not generation.engine.is_draining).encoded()


NO_JOURNAL = NoJournal()


def journal_of(request: Request, *, stream: bool | None) -> NoJournal:
    """That of an answer. Raises InvalidInput for one that cannot be read."""
    given: bytes | None = getattr(request.state, "journal", None)
    return NO_JOURNAL if given is None or not stream else Journal(given)


def behind_journal(receive: Receive, num_bytes: int, state: dict[str, object]) -> Receive:
    """`receive` of the body alone; `state["journal"]` are the bytes before it."""
    lines = bytearray()
    state["journal"] = b""

    async def received() -> Message:
        message = await receive()
        while len(lines) < num_bytes and message["type"] == "http.request":
            body, missing = message.get("body", b""), num_bytes - len(lines)
            lines.extend(body[:missing])
            message = {**message, "body": body[missing:]}
            state["journal"] = bytes(lines) if len(lines) == num_bytes else b""
            if message["body"] or not message.get("more_body"):
                break
            message = await receive()
        return message

    return received
