"""Mistakes on the way of a token from the engine to the client."""

from __future__ import annotations

from collections.abc import Sequence

from quire.client import output
from quire.client.channel import Channel
from quire.client.output import TextStream
from quire.client.request_stream import RequestStream
from quire.models.tokenizer import TokenTexts
from tests.mutants.mutants import Patch, mutant


@mutant("texts", "a client sees a mark, and then the character whose first byte it was")
def halves_of_characters_are_shown(patch: Patch) -> None:
    patch.setattr(output, "_final_length", len)


@mutant("texts", "a space before a word is lost, because the word was decoded as the first of a text")
def words_are_decoded_alone(patch: Patch) -> None:
    real = TokenTexts.__init__

    def init(texts: TokenTexts, decode: object, before: Sequence[int]) -> None:
        real(texts, decode, ())  # type: ignore[arg-type]

    patch.setattr(TokenTexts, "__init__", init)


@mutant("texts", "a token that ends a character is shown without the bytes before it")
def a_table_is_used_within_characters(patch: Patch) -> None:
    real = TextStream.push

    def push(stream: TextStream, token_id: int) -> str:
        stream._is_final = bool(stream._shown)
        return real(stream, token_id)

    patch.setattr(TextStream, "push", push)


@mutant("channels", "the rest of a message is lost when the reader is slow, and the engine ends")
def what_a_socket_does_not_take_is_lost(patch: Patch) -> None:
    real = Channel.flush

    def flush(channel: Channel) -> bool:
        real(channel)
        channel._unsent.clear()
        return True

    patch.setattr(Channel, "flush", flush)


@mutant("readers", "a client that reads slowly makes the server hold its whole answer a second time")
def a_slow_reader_gets_all_at_once(patch: Patch) -> None:
    async def take(stream: RequestStream) -> object:
        found, stream._arrived = stream._arrived, []
        return found

    patch.setattr(RequestStream, "take", take)
