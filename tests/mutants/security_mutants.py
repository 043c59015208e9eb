"""Mistakes in what keeps clients, and other users of the machine, from harming a server."""

from __future__ import annotations

import asyncio
import hmac
import os
from contextlib import nullcontext
from pathlib import Path

from quire import owned_files
from quire.client.stop_strings import StopAutomaton
from quire.client.tokenising import Tokenising
from quire.serve.connections import HttpConnection
from quire.serve.keys import Client, Keys
from quire.spec.ids import Ids
from quire.tiers.stores.directory import index, slab_files
from tests.mutants.mutants import Patch, mutant


@mutant("foreign files", "a link in a store makes the server overwrite a file that another user chose")
def links_are_followed(patch: Patch) -> None:
    def open_any(path: Path, flags: int) -> int:
        return os.open(path, flags, 0o600)

    for module in (slab_files, index):
        patch.setattr(module, "open_owned", open_any)
    patch.setattr(slab_files, "check_file", lambda path: None)


@mutant("foreign files", "a file with a second name elsewhere is taken for the store's own")
def second_names_are_not_seen(patch: Patch) -> None:
    real = owned_files._check

    def check(path: Path, status: os.stat_result) -> None:
        real(path, os.stat_result([*status[:3], 1, *status[4:]]))

    patch.setattr(owned_files, "_check", check)


@mutant("keys", "the time of a refusal tells where among the keys a right one stands")
def the_first_right_key_ends_the_search(patch: Patch) -> None:
    def find(keys: Keys, authorization: bytes) -> Client | None:
        from hashlib import sha256

        given = sha256(authorization).digest()
        return next((client for expected, client in keys._clients if hmac.compare_digest(given, expected)), None)

    patch.setattr(Keys, "_client", find)


@mutant("stop strings", "a stop string is missed whose beginning is the end of a broken-off one")
def a_broken_off_stop_string_starts_anew(patch: Patch) -> None:
    patch.setattr(StopAutomaton, "_link", lambda automaton: None)


@mutant("stop strings", "the shorter of two stop strings that end together is reported, and the text is cut late")
def the_shorter_stop_string_wins(patch: Patch) -> None:
    real = StopAutomaton._link

    def link(automaton: StopAutomaton) -> None:
        real(automaton)
        for state in range(len(automaton.depths)):
            automaton._complete[state] = automaton._complete[automaton._shorter[state]] or automaton._complete[state]

    patch.setattr(StopAutomaton, "_link", link)


@mutant("stop strings", "each of the 512 prompts of a request builds its own automaton: a minute of the event loop")
def an_automaton_for_each_sequence(patch: Patch) -> None:
    patch.setattr(StopAutomaton, "of", StopAutomaton)


@mutant("long texts", "a text that can never fit takes minutes and gigabytes before it is refused")
def texts_are_measured_in_tokens_alone(patch: Patch) -> None:
    patch.setattr(Tokenising, "_check_length", lambda pool, num_characters: None)


@mutant("departed clients", "the tokens of a client that has left are made to the end, and others wait for it")
def work_outlives_its_client(patch: Patch) -> None:
    real = Tokenising._in_process

    async def in_process(pool: Tokenising, content: str, text: str, *, add_special_tokens: bool) -> Ids:
        return await asyncio.shield(real(pool, content, text, add_special_tokens=add_special_tokens))

    patch.setattr(Tokenising, "_in_process", in_process)


@mutant("tokenising queues", "texts wait without limit, and each client waits longer than the one before")
def the_queue_of_texts_is_endless(patch: Patch) -> None:
    patch.setattr(Tokenising, "_counted", lambda pool: nullcontext())


@mutant("slow requests", "a byte now and then keeps a request, and its connection, for ever")
def each_byte_moves_the_deadline(patch: Patch) -> None:
    real = HttpConnection.data_received

    def receive(connection: HttpConnection, data: bytes) -> None:
        if connection._deadline is not None:
            connection._wait("the body", connection.limits.body_s)
        real(connection, data)

    patch.setattr(HttpConnection, "data_received", receive)
