"""The loads of `speculation.py`: prompts and the answers that are given, as token ids. The same in every process.

    load       prompt                                  answer
    code       a part of a module of Python's library  the part with a name changed, and a line after each `def`
    retrieval  passages of Python's manual             sentences of these between words that are not in them
    json       one record                              records with the same keys and values of their own
    prose      the beginning of a sentence             what the bundled model draws itself at temperature 0.8
    greedy     the same                                what it draws at temperature 0
    chat       a question                              the same

Text becomes tokens of about four characters, as with a large vocabulary: a word or the first six letters of one, with
the blank before it. Ids are of no meaning, and other ones in each pair; the bundled model's own texts are its own ids.
"""

from __future__ import annotations

import importlib
import inspect
import keyword
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

GIVEN = ("code", "retrieval", "json")
DRAWN = ("prose", "greedy", "chat")
_SEED = 20
_MODULES = """
argparse ast asyncio.base_events bisect calendar configparser copy csv dataclasses difflib dis doctest enum
fractions ftplib functools gettext gzip heapq http.client http.server imaplib inspect ipaddress json.decoder
logging mailbox ntpath optparse os pathlib pdb pickle pickletools platform plistlib poplib posixpath pprint
profile pstats queue random sched selectors shelve shlex shutil smtplib socketserver statistics string subprocess
tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest.case urllib.parse uuid
wave weakref webbrowser xmlrpc.client zipfile
""".split()  # noqa: SIM905
_LINES = 70
_OPENINGS = ("The", "It was", "She had", "There is", "He could not", "My dear", "In the evening", "When they", "I am")
_NAMES = ("Emma", "Elizabeth", "Mr. Darcy", "Anne", "her sister", "the captain", "Mrs. Bennet", "Catherine", "Jane")


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the answer that is given to it."""

    prompt: list[int]
    answer: list[int]


def given(load: str, index: int, length: int, vocabulary: int) -> Pair:
    """Pair number `index` of a load of `GIVEN`, with an answer of `length` tokens."""
    draw = random.Random(f"{_SEED} {load} {index}")
    prompt, answer = {"code": _code, "retrieval": _retrieval, "json": _json}[load](draw, length)
    parts = [_TOKEN.findall(text) for text in (prompt, answer)]
    words = list(dict.fromkeys(parts[0] + parts[1]))
    ids = dict(zip(words, draw.sample(range(10, vocabulary), len(words)), strict=True))
    found = [[ids[word] for word in part] for part in parts]
    assert len(found[1]) >= length, f"{load} {index}: an answer of {len(found[1])} tokens"
    return Pair(found[0], found[1][:length])


def opening(index: int, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The prompt of pair number `index` of a load of `DRAWN`, in the bundled model's tokens."""
    draw = random.Random(f"{_SEED} prose {index}")
    words = " ".join(f"{draw.choice(_NAMES)}, {draw.choice(_NAMES)} and {draw.choice(_NAMES)}" for _ in range(3))
    return [int(token) for token in encode(f"A letter to {words}.\n\n{draw.choice(_OPENINGS)}")]


def question(index: int) -> str:
    """What pair number `index` of the load `chat` asks, another one for each of the first 729."""
    names = [_NAMES[index // len(_NAMES) ** place % len(_NAMES)] for place in range(3)]
    return f"Tell me about {names[0]}, {names[1]} and {names[2]}."


_TOKEN = re.compile(r" ?\w{1,6}|\s+|[^\w\s]{1,3}")


def _code(draw: random.Random, length: int) -> tuple[str, str]:
    lines: list[str] = []
    while len(lines) < 3 * _LINES:
        lines = inspect.getsource(importlib.import_module(draw.choice(_MODULES))).splitlines()
    begin = draw.randrange(_LINES, len(lines) - _LINES)
    part = lines[begin : begin + _LINES]
    names = [name for name in re.findall(r"\b[a-z_]{4,}\b", "\n".join(part)) if not keyword.iskeyword(name)]
    old = max(sorted(set(names)), key=names.count)
    new = f"{draw.choice(_NAMES).split()[-1].lower()}_{old[:3]}"
    edited = []
    for line in part:
        edited.append(re.sub(rf"\b{old}\b", new, line))
        if line.lstrip().startswith("def "):
            edited.append(f'        log.debug("{draw.randrange(10_000)} {draw.choice(_words())}")')
    code = "\n".join(part)
    return f"Rename {old} to {new} and log each call.\n\n{code}\n\nThe whole code:\n\n", "\n".join(edited * 3)


def _retrieval(draw: random.Random, length: int) -> tuple[str, str]:
    found: list[str] = []
    while len(found) < 18:
        text = topics[draw.choice(sorted(topics))]
        sentences = [" ".join(each.split()) for each in re.split(r"(?<=[.:])\s+", text)]
        sentences = [each for each in sentences if 60 < len(each) < 220]
        if len(sentences) >= 6:
            at = draw.randrange(len(sentences) - 5)
            found += sentences[at : at + 6]
    answer = []
    for _ in range(length // 20):
        own = " ".join(draw.choice(_words()) for _ in range(draw.randrange(6, 14)))
        answer.append(f'{own}: "{draw.choice(found)}"')
    question = " ".join(draw.choice(_words()) for _ in range(8))
    return "\n".join([*found, f"What is said of {question}?\n\n"]), " ".join(answer)


def _json(draw: random.Random, length: int) -> tuple[str, str]:
    keys = draw.sample(_words(), 6)

    def record(number: int) -> str:
        words = [" ".join(draw.choice(_words()) for _ in range(draw.randrange(1, 5))) for _ in range(3)]
        values = [
            str(number),
            *(f'"{each}"' for each in words),
            str(draw.randrange(10_000)),
            draw.choice(["true", "null"]),
        ]
        inside = ",\n".join(f'    "{key}": {value}' for key, value in zip(keys, values, strict=True))
        return f"  {{\n{inside}\n  }}"

    example = record(0)
    records = ",\n".join(record(number) for number in range(1, 4 + length // 30))
    return f"Write more records like this one, as a list in JSON.\n\n{example}\n\n", f"[\n{records}\n]"


def _words() -> list[str]:
    """Words of Python's manual, those in one topic only among them."""
    if not _WORDS:
        _WORDS.extend(sorted({word for text in topics.values() for word in re.findall(r"\b[a-z]{4,9}\b", text)}))
    return _WORDS


_WORDS: list[str] = []
