"""A process that tokenises long texts for its parent, which ends it when no request waits for the text.

Run as a file, so that it loads the tokenizers library and nothing of Quire. It reads the JSON of a tokenizer from its
standard input, then for each text a byte (whether special tokens are added) and the text, and writes the text's token
ids as int32. A length of 8 bytes, little endian, precedes each message. It ends at the end of its input.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from array import array
from queue import SimpleQueue
from typing import BinaryIO

LENGTH = struct.Struct("<Q")
"""Precedes each message."""


def main() -> None:
    """Answer until the input ends; then end at once, also within a text."""
    from tokenizers import Tokenizer

    texts: SimpleQueue[bytes] = SimpleQueue()
    arrived, answers = sys.stdin.buffer, sys.stdout.buffer
    found = _read(arrived)
    if found is None:
        return
    tokenizer = Tokenizer.from_str(found.decode())

    def read_texts() -> None:  # tokenising leaves this thread running
        while (text := _read(arrived)) is not None:
            texts.put(text)
        os._exit(0)

    threading.Thread(target=read_texts, daemon=True).start()
    while True:
        message = texts.get()
        ids = tokenizer.encode(message[1:].decode(), add_special_tokens=bool(message[0])).ids
        encoded = array("i", ids).tobytes()
        answers.write(LENGTH.pack(len(encoded)) + encoded)
        answers.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    message = stream.read(length)
    return message if len(message) == length else None


if __name__ == "__main__":
    main()
