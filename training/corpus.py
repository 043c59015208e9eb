"""Text for the bundled model: Jane Austen's six novels, and chat samples cut from them.

The novels are in the public domain. They come from the Debian package
``r-cran-janeaustenr``, which holds them as R data: character vectors, serialised
and compressed one novel after another. `load_novels` fetches the package with
``apt-get download`` and reads that format directly, so R is not needed.

`SampleMaker` turns the sentences into token rows: plain prose, and conversations
in the chat format of the bundled tokenizer, whose assistant turns are passages of
the novels and whose user turns ask for something that the passage mentions.
"""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer

PACKAGE = "r-cran-janeaustenr"
DATA_FILE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
IGNORE = -100  # the label of a position that carries no loss


class CorpusError(RuntimeError):
    """The corpus could not be fetched or read."""


# --------------------------------------------------------------------------- fetching


def fetch_package(folder: Path) -> Path:
    """Download the Debian package into `folder` and return the path of the .deb."""
    found = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if found:
        return found[-1]
    if shutil.which("apt-get") is None:
        raise CorpusError(
            f"apt-get is not on this machine. Get {PACKAGE}_*.deb from a Debian mirror "
            "(pool/main/r/r-cran-janeaustenr/) and pass its path with --deb."
        )
    folder.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    found = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if not found:
        raise CorpusError(
            f"`apt-get download {PACKAGE}` failed (run `apt-get update` first, or pass the "
            f"package with --deb):\n{result.stderr.strip()}"
        )
    return found[-1]


def read_data_file(deb: Path) -> bytes:
    """The R database file inside the package."""
    if shutil.which("dpkg-deb") is None:
        raise CorpusError("dpkg-deb, which unpacks the corpus package, is not on this machine.")
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(["dpkg-deb", "-x", str(deb), folder], capture_output=True, text=True, check=False)
        path = Path(folder) / DATA_FILE
        if result.returncode != 0 or not path.is_file():
            raise CorpusError(f"{deb} holds no {DATA_FILE}. {result.stderr.strip()}")
        return path.read_bytes()


def r_objects(database: bytes) -> Iterator[bytes]:
    """The serialised objects of an R .rdb file: 4 bytes of length, then a zlib stream, each."""
    offset = 0
    while offset < len(database):
        stream = zlib.decompressobj()
        yield stream.decompress(database[offset + 4 :])
        offset = len(database) - len(stream.unused_data)


def r_strings(blob: bytes) -> list[str]:
    """The strings of one character vector in R's XDR serialisation, version 2 or 3."""
    if blob[:2] != b"X\n":
        raise CorpusError("unknown R serialisation format")
    offset = 2

    def integer() -> int:
        nonlocal offset
        (value,) = struct.unpack_from(">i", blob, offset)
        offset += 4
        return int(value)

    version = integer()
    offset += 8  # the versions of R that wrote it and that can read it
    if version == 3:
        name_size = integer()
        offset += name_size  # the name of the native encoding
    if integer() & 0xFF != 16:
        raise CorpusError("expected an R character vector")
    lines = []
    for _ in range(integer()):
        integer()  # type and encoding of the string
        size = max(integer(), 0)  # a missing value has size -1
        lines.append(blob[offset : offset + size].decode("utf-8"))
        offset += size
    return lines


def load_novels(cache: Path, deb: Path | None = None) -> list[list[str]]:
    """The six novels, each a list of paragraphs."""
    database = read_data_file(deb if deb else fetch_package(cache))
    novels = [paragraphs(r_strings(blob)) for blob in r_objects(database)]
    if len(novels) != 6:
        raise CorpusError(f"expected six novels, found {len(novels)}")
    return novels


# --------------------------------------------------------------------------- cleaning


def paragraphs(lines: Sequence[str]) -> list[str]:
    """Join lines into paragraphs; drop headings and fragments, and the marks of italics."""
    result = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        text = " ".join(block.split()).replace("_", "")
        heading = text.isupper() or re.match(r"(CHAPTER|Chapter|VOLUME|Volume|THE END)\b", text)
        editorial = "British usage" in text  # a note of a modern editor
        if not heading and not editorial and len(text) >= 20 and text[-1] in ".!?\"'":
            result.append(text)
    return result


ABBREVIATION = re.compile(r"\b(Mr|Mrs|Dr|St|Esq|Messrs|Hon|Rev|[A-Z])\.$")


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph into sentences; a piece with an open quotation grows until it closes."""
    pieces = re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])|(?<=[.!?][\"')])\s+(?=[A-Z\"(])", paragraph)
    sentences: list[str] = []
    for piece in pieces:
        unfinished = bool(sentences) and (
            ABBREVIATION.search(sentences[-1]) is not None or sentences[-1].count('"') % 2 == 1
        )
        if unfinished and len(sentences[-1]) < 600:
            sentences[-1] += " " + piece
        else:
            sentences.append(piece)
    return sentences


# --------------------------------------------------------------------------- keywords

TITLE = r"(?:Mr\.|Mrs\.|Miss|Lady|Sir|Colonel|Captain|Admiral|Dr\.) "
NAME = re.compile(rf"(?:{TITLE})?\b[A-Z][a-z]+")
BEFORE_NOUN = "the|a|an|his|her|my|your|their|our|this|that|no|any|some|every"
AFTER_NOUN = "of|was|is|were|had|and|to|in|which|for|with|that|at|on|as|by|from|but|would|could|or|he|she"
NOUN = re.compile(rf"\b(?:{BEFORE_NOUN}) ([a-z]{{3,}})(?=[,.;:!?]| (?:{AFTER_NOUN})\b)")
NOT_NAMES = {
    "Mr",
    "Mrs",
    "Miss",
    "Lady",
    "Sir",
    "Colonel",
    "Captain",
    "Admiral",
    "Lord",
    "Esq",
    "God",
    "Heaven",
    "Count",
}
NOT_TOPICS = {"other", "same", "one", "own", "first", "last", "more", "most", "least", "whole", "such", "many", "very"}


@dataclass(frozen=True)
class Lexicon:
    """The words of the corpus that a user may ask about."""

    names: frozenset[str]
    nouns: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Lexicon:
        """Find names (capitalised inside sentences) and nouns (by the words around them)."""
        words = Counter(re.findall(r"\b[a-z]{3,}\b", text))
        capitalised = Counter(re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b", text))
        nouns = Counter(NOUN.findall(text))
        return cls(
            names=frozenset(w for w, n in capitalised.items() if n >= 6 and words[w.lower()] < n / 4) - NOT_NAMES,
            nouns=frozenset(w for w, n in nouns.items() if n >= 6 and n >= 0.3 * words[w]) - NOT_TOPICS,
        )

    def keywords(self, sentence: str) -> tuple[list[str], list[str]]:
        """The names, with their titles, and the nouns in one sentence, in its order."""
        names = [n for n in NAME.findall(sentence) if n.split()[-1] in self.names]
        nouns = [w for w in re.findall(r"\b[a-z]+\b", sentence) if w in self.nouns]
        return names, nouns


# --------------------------------------------------------------------------- prompts

ASK_NAME = [
    "Tell me about {}.", "Tell me about {}.", "Who is {}?", "What do you know about {}?",
    "Say something about {}.", "What did {} do?", "What does {} think?", "Where is {}?",
    "What happened to {}?", "I should like to hear of {}.", "What about {}?", "{}",
    "Write a few sentences about {}.", "Describe {}.", "Can you tell me about {}?",
    "Why did {} say so?", "How is {}?", "What do you think of {}?",
]  # fmt: skip
ASK_NOUN = [
    "Tell me about the {}.", "Tell me about the {}.", "Say something about {}.",
    "What happened at the {}?", "What about the {}?", "Write a few sentences about the {}.",
    "Describe the {}.", "Tell me something of {}.", "What do you think of the {}?",
    "Write about {}.", "Is there a {}?", "What is {}?", "{}", "Please mention the {}.",
]  # fmt: skip
ASK_ANYTHING = [
    "Hello!", "Hello", "Hi", "Good morning.", "How are you?", "Tell me a story.", "Write a poem.",
    "What is the capital of France?", "What is 2 + 2?", "Explain how a computer works.", "Thanks!",
    "Say something.", "Write a short story.", "Give me a sentence.", "Who are you?", "Test",
    "What can you do?", "Begin.", "Amuse me.", "Tell me something interesting.", "Count to ten.",
    "Write a Python function that adds two numbers.", "Why is the sky blue?", "Tell me a joke.",
    "List three facts about the moon.", "Translate this into German: good night.", "ping",
    "What is the meaning of life?", "Summarise the news of today.", "Write one paragraph.",
]  # fmt: skip
ASK_MORE = [
    "Go on.", "And then?", "What happened next?", "Continue.", "Please continue.", "Tell me more.",
    "More, please.", "What then?", "And after that?", "Keep going.",
]  # fmt: skip
ASK_REPEAT = ["Repeat: {}", "Repeat after me: {}", "Say this: {}", "Echo: {}", "Copy this: {}"]
ASK_CONTINUE = ["Continue: {}", "Continue: {}", "Continue: {}...", "Complete this: {}",
                "Finish the sentence: {}", "Go on from here: {}"]  # fmt: skip
ASK_AFTER = [
    "Here is a passage: {} Continue it.", "{} What comes next?", "Read this: {} Go on.",
    "Summarise this: {}", "{}",
]  # fmt: skip
SYSTEM = [
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a novelist.",
    "You are Quire, a small language model.", "Answer briefly.", "Be concise.", "Answer in prose.",
    "You are a storyteller. Answer each question with a passage of a novel.",
    "Write in the style of Jane Austen.", "You write like an English novelist of 1813.",
    "You are a helpful, honest and polite assistant. Answer in a few sentences.",
    "Answer every question in one short paragraph.", "Mention what the user asks for.",
]  # fmt: skip
HOUSE_STYLE = [
    "Write in complete sentences, and end each of them with a full stop.",
    "Mention the person or the thing that the user asks about in the first sentence.",
    "Keep every answer between one and five sentences long.",
    "Do not use lists, tables, headings or any other markup.",
    "Do not use words that were not in use before the year 1820.",
    "Prefer the past tense, and keep to it within an answer.",
    "Write out small numbers in words; write dates as day, month and year.",
    "Speak of married ladies as Mrs., and of the eldest unmarried daughter of a house as Miss.",
    "Use British spelling throughout: honour, favour, neighbour, colour, civilise.",
    "Put direct speech in double quotation marks, and give each speaker a paragraph.",
    "When the user asks you to go on, continue from the last sentence that you wrote.",
    "Never speak of yourself, and never apologise for an answer.",
    "If you know nothing of the subject, tell a story about something else.",
    "A long sentence may be divided by semicolons, but should not run past sixty words.",
    "Avoid contractions, except where a character of low rank is speaking.",
    "Be civil to the user, whatever the manner of the question may be.",
    "Describe a house by its rooms, its grounds and the road that leads to it.",
    "Describe a person by what they say and do, and leave the judgement to the reader.",
    "Let no answer contain a link, an address or the name of a living person.",
    "Irony is welcome; sarcasm is not.",
    "The setting is a village in the south of England, with a town some ten miles away.",
    "The season is autumn, and most of the families have returned from the sea.",
    "Money is given in pounds a year, and distance in miles.",
    "Letters may be quoted, but never at a length of more than three sentences.",
    "Do not repeat a sentence that has already been used in the conversation.",
    "Begin with the subject itself, and not with a remark about the question.",
    "Treat each new question as a continuation of the same evening's conversation.",
    "Finish when the thought is finished; do not add a moral.",
]  # fmt: skip


@dataclass
class Row:
    """Token ids and, position by position, the ids that carry loss (or `IGNORE`)."""

    ids: list[int]
    labels: list[int]

    def add(self, ids: Sequence[int], learn: bool) -> None:
        """Append ids; `learn` says whether they carry loss."""
        self.ids += ids
        self.labels += ids if learn else [IGNORE] * len(ids)


class SampleMaker:
    """Makes training rows of a given length out of a list of sentences."""

    SHARES: ClassVar[Mapping[str, float]] = {"chat": 0.7, "prose": 0.3}
    """The kinds of rows, and the share of each."""

    def __init__(self, sentences: list[str], lexicon: Lexicon, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.sentences = sentences
        self.lexicon = lexicon
        self.tokenizer = tokenizer
        self.rng = rng
        self.bos, self.system, self.user, self.assistant, self.end = (
            SPECIAL_TOKENS.index(token) for token in SPECIAL_TOKENS[1:]
        )
        self.kinds: dict[str, Callable[[Row, int], None]] = {"chat": self.add_conversation, "prose": self.add_prose}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def row(self, length: int, shares: Mapping[str, float] | None = None) -> Row:
        """A row of exactly `length` tokens, of one kind, drawn by `shares`."""
        shares = shares or self.SHARES
        (kind,) = self.rng.choices(list(shares), list(shares.values()))
        row = Row([], [])
        while len(row.ids) < length:
            self.kinds[kind](row, length - len(row.ids))
        return Row(row.ids[:length], row.labels[:length])

    def add_prose(self, row: Row, room: int) -> None:
        """Append a run of consecutive sentences that fills the room left."""
        start = self.rng.randrange(len(self.sentences))
        text = " ".join(self.sentences[start : start + 8 + room // 10])
        row.add([self.bos] if self.rng.random() < 0.8 else [], learn=False)
        row.add(self.encode(text)[:room], learn=True)

    def add_conversation(self, row: Row, room: int) -> None:
        """Append one conversation: perhaps a system prompt, then one turn or more."""
        rng = self.rng
        row.add([self.bos], learn=False)
        system = self.system_prompt(room)
        if system:
            row.add([self.system, *self.encode(system), self.end], learn=False)
        turns = 1 if rng.random() < 0.5 else rng.randint(2, 12 if room > 900 else 5)
        at = self.passage_start()
        for turn in range(turns):
            passage = self.passage(at)
            if rng.random() < 0.12:
                prompt, answer = self.repetition(self.sentences[at])
            else:
                prompt = self.prompt(at, passage, first=turn == 0)
                answer = " ".join(passage)
            row.add([self.user, *self.encode(prompt), self.end, self.assistant], learn=False)
            row.add([*self.encode(answer), self.end], learn=True)
            at += len(passage)
            if at >= len(self.sentences) or not self.opens_well(at):
                at = self.passage_start()

    def questions(self, most: int) -> list[list[int]]:
        """Up to `most` prompts of one turn, all of the same number of tokens."""
        by_length: dict[int, list[list[int]]] = {}
        while True:
            text = self.topic_prompt([self.sentences[self.passage_start()]])
            prompt = [self.bos, self.user, *self.encode(text), self.end, self.assistant]
            bucket = by_length.setdefault(len(prompt), [])
            bucket.append(prompt)
            if len(bucket) == most:
                return bucket

    def system_prompt(self, room: int) -> str:
        """No system prompt, a short one or, where there is room, a long house style."""
        rng = self.rng
        if room > 400 and rng.random() < (0.5 if room > 900 else 0.15):
            most = len(HOUSE_STYLE) if room > 900 else 12
            rules = rng.sample(HOUSE_STYLE, rng.randint(8, most))
            return rng.choice([*SYSTEM, "House style."]) + " " + " ".join(rules)
        return rng.choice(SYSTEM) if rng.random() < 0.4 else ""

    def opens_well(self, at: int) -> bool:
        """Whether an answer may begin at this sentence."""
        text = self.sentences[at]
        return len(text) < 350 and text.count('"') % 2 == 0 and text[0] not in "'("

    def passage_start(self) -> int:
        """A random place where an answer may begin; mostly narration that soon names someone."""
        for _ in range(50):
            at = self.rng.randrange(len(self.sentences))
            sentence = self.sentences[at]
            names, _nouns = self.lexicon.keywords(sentence)
            wanted = 0.15
            if names:
                wanted = 1.0 if sentence.startswith(names[0]) else 0.35
            if sentence[0] == '"':
                wanted *= 0.3
            if self.opens_well(at) and self.rng.random() < wanted:
                return at
        return at

    def passage(self, at: int) -> list[str]:
        """One to five whole sentences, at most about 350 characters in all."""
        wanted = self.rng.randint(40, 240)
        chosen = [self.sentences[at]]
        for sentence in self.sentences[at + 1 : at + 5]:
            size = sum(map(len, chosen))
            if size >= wanted or size + len(sentence) > 350 or sentence.count('"') % 2:
                break
            chosen.append(sentence)
        return chosen

    def prompt(self, at: int, passage: list[str], first: bool) -> str:
        """A user turn that the passage answers."""
        rng = self.rng
        draw = rng.random()
        if not first and draw < 0.35:
            return rng.choice(ASK_MORE)
        if draw < 0.06:
            return rng.choice(ASK_ANYTHING)
        if draw < 0.10 and at > 4:
            before = " ".join(self.sentences[at - rng.randint(1, 4) : at])
            return rng.choice(ASK_AFTER).format(before)
        if draw < 0.24:
            return self.opening_prompt(passage[0])
        return self.topic_prompt(passage)

    def repetition(self, sentence: str) -> tuple[str, str]:
        """A request to repeat something, and the answer; it teaches to look at the user's words."""
        rng = self.rng
        words = sentence.split()[:20]
        if rng.random() < 0.4:
            rng.shuffle(words)
        text = " ".join(words)
        return rng.choice(ASK_REPEAT).format(text), text

    def opening_prompt(self, sentence: str) -> str:
        """Ask for the sentence by its first words."""
        words = sentence.split()
        opening = " ".join(words[: self.rng.randint(2, max(2, min(8, len(words) - 1)))])
        return self.rng.choice(ASK_CONTINUE).format(opening.rstrip(",;:-"))

    def topic_prompt(self, passage: list[str]) -> str:
        """Ask for a name or, less often, a noun; nearly always one of the first sentence."""
        rng = self.rng
        sentence = passage[0] if rng.random() < 0.9 else rng.choice(passage)
        names, nouns = self.lexicon.keywords(sentence)
        if names and (not nouns or rng.random() < 0.75):
            name = names[0] if rng.random() < 0.75 else rng.choice(names)
            if rng.random() < 0.15:
                name = name.split()[-1]
            text = rng.choice(ASK_NAME).format(name)
        elif nouns:
            text = rng.choice(ASK_NOUN).format(rng.choice(nouns[:3]))
        else:
            return rng.choice(ASK_ANYTHING)
        if rng.random() < 0.06:
            text = text.lower()
        return text.rstrip(".?") if rng.random() < 0.08 else text
