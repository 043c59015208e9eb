"""Text of the agent edition: the sources of Python's standard library, and conversations that call tools.

`Library` reads the sources of the Python that runs the script (PSF licence). Functions become definitions of tools: the
name, the docstring and the parameters. `AgentMaker` adds two kinds of rows to those of `SampleMaker`: `code`, pieces
of the sources, and `tools`, conversations in the chat format of the edition. A user names a tool and its values, or
quotes a command; the assistant calls it, a result follows, and the assistant repeats a part of the result.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from corpus import HOUSE_STYLE, SYSTEM, Lexicon, Row, SampleMaker
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens that are text: they are kept when special tokens are skipped."""
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "turtledemo", "__pycache__"}
HOLD_OUT_EVERY = 33  # files

Definition = dict[str, Any]


def tool(name: str, description: str, /, **parameters: Mapping[str, Any]) -> Definition:
    """The definition of a tool, as OpenAI's API has it. A parameter with a `default` is optional."""
    required = [key for key, schema in parameters.items() if "default" not in schema]
    schema = {"type": "object", "properties": parameters, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def text(description: str, **more: Any) -> dict[str, Any]:
    """The schema of a string."""
    return {"type": "string", "description": description, **more}


def whole(description: str, **more: Any) -> dict[str, Any]:
    """The schema of an integer."""
    return {"type": "integer", "description": description, **more}


COMMON_TOOLS = [
    tool(
        "Bash",
        "Executes a given bash command in a shell and returns its output. Quote file paths that contain spaces. "
        "Do not use it for reading files: use the Read tool instead.",
        command=text("The command to execute"),
        timeout=whole("Optional timeout in milliseconds (at most 600000)", default=120000),
    ),
    tool(
        "Read",
        "Reads a file from the local filesystem. The file_path must be an absolute path, not a relative path. "
        "By default, it reads up to 2000 lines from the beginning of the file.",
        file_path=text("The absolute path to the file to read"),
        offset=whole("The line number to start reading from", default=1),
        limit=whole("The number of lines to read", default=2000),
    ),
    tool(
        "Write",
        "Writes a file to the local filesystem. It overwrites the existing file if there is one at the path.",
        file_path=text("The absolute path to the file to write"),
        content=text("The content to write to the file"),
    ),
    tool(
        "Edit",
        "Performs exact string replacements in files. The edit fails if old_string is not unique in the file.",
        file_path=text("The absolute path to the file to modify"),
        old_string=text("The text to replace"),
        new_string=text("The text to replace it with (must be different from old_string)"),
    ),
    tool(
        "Grep",
        "Searches the contents of files with a regular expression.",
        pattern=text("The regular expression pattern to search for in file contents"),
        path=text("File or directory to search in. Defaults to the current working directory.", default="."),
    ),
    tool("Glob", "Finds files by a pattern of their names.", pattern=text("The glob pattern to match files against")),
    tool("WebFetch", "Fetches a page and returns its text.", url=text("The URL to fetch", format="uri")),
    tool(
        "get_weather",
        "Get the current weather in a given location.",
        location=text("The city, e.g. Bath"),
        unit=text("The unit of the temperature", enum=["celsius", "fahrenheit"], default="celsius"),
    ),
    tool("search", "Search the web.", query=text("The search query"), limit=whole("Number of results", default=10)),
]
RULES = [
    "IMPORTANT: You must NEVER guess the value of a required parameter. Ask the user instead.",
    "If the calls do not depend on each other, make all of them in the same answer.",
    "You have access to the tools below. Use them when the user asks for something that they can do.",
    "When a call fails, read the error message, and try again with other arguments.",
    "Keep your answers short: fewer than 4 lines, unless the user asks for detail.",
    "You are an interactive agent that helps users with software engineering tasks.",
    "Do not add comments to the code that you write, unless the user asks you to.",
    "The working directory is a git repository. The platform is linux.",
    "Return the final answer as plain text, without any markdown.",
    "Prefer to edit existing files; do not create new ones unless they are necessary.",
]
COMMANDS = [
    "ls", "ls -la", "pwd", "git status", "git log --oneline", "git diff", "python -m pytest", "cat README.md",
    "echo hello", "date", "whoami", "uname -a", "df -h", "make test", "python --version", "find . -name '*.py'",
    "grep -rn TODO .", "head -20 setup.py", "wc -l *.py", "du -sh .",
]  # fmt: skip
ASK_COMMAND = ["Run `{}`.", "Run {}", "Please run the command `{}`.", "Execute `{}` and tell me what it prints.", "{}"]
ASK_TOOL = ["Use {} with {}.", "Call {} with {}.", "Please call the tool {} with {}.", "{}: {}", "Use {}: {}."]
SAY_FIRST = ["I will call {}.", "Let me use {}.", "I'll use the {} tool.", "First, {}."]
ANSWERS = ["The result is: {}", "It says: {}", "{}", "The output is:\n\n{}", "Here is the result: {}"]


# --------------------------------------------------------------------------- the standard library


class Library:
    """Sources of the standard library, and the tools that its functions make."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.sources = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        self.tools: list[Definition] = []
        for path, source in zip(files, self.sources, strict=True):
            module = path.parent.name if path.stem == "__init__" else path.stem
            for node in ast.parse(source).body:
                members = node.body if isinstance(node, ast.ClassDef) else [node]
                self.tools += [made for member in members if (made := as_tool(module, member))]

    @classmethod
    def split(cls) -> tuple[Library, Library]:
        """Files for training, and those held out: every 33rd, in the order of their paths."""
        root = Path(sysconfig.get_path("stdlib"))
        files = [p for p in sorted(root.rglob("*.py")) if not LEFT_OUT & set(p.relative_to(root).parts)]
        files = [p for p in files if 0 < p.stat().st_size < 300_000]
        held_out = files[::HOLD_OUT_EVERY]
        return cls([p for p in files if p not in set(held_out)]), cls(held_out)


def as_tool(module: str, node: ast.stmt) -> Definition | None:
    """The tool that a documented public function makes, None for anything else."""
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return None
    lines = (ast.get_docstring(node) or "").strip()
    arguments = [
        a for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] if a.arg not in ("self", "cls")
    ]
    if len(lines) < 20 or not lines.isascii() or not arguments or len(arguments) > 8:
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(positional), reversed(node.args.defaults), strict=False)]
    pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None]
    defaults = dict(pairs)
    schemas: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        value = getattr(defaults.get(argument), "value", None)  # of a constant
        value = value if isinstance(value, str | int | float) else None
        schema = {"type": {bool: "boolean", int: "integer", float: "number"}.get(type(value), "string")}
        schemas[argument.arg] = schema | ({"default": value} if argument in defaults else {})
    return tool(f"{module}_{node.name}".strip("_"), lines[:400], **schemas)


# --------------------------------------------------------------------------- the tokenizer


def tokenizer_texts(sentences: Sequence[str], library: Library) -> Iterator[str]:
    """Prose, Python and JSON, from which the tokenizer takes its words."""
    yield from (" " + sentence for sentence in sentences)
    yield from library.sources
    for made in [*library.tools, *COMMON_TOOLS]:
        for _ in range(3):  # documentation and JSON count for more than code
            yield " " + made["function"]["description"]
            yield json.dumps(made)
        yield json.dumps(made, indent=2)
    for rule in RULES * 20:
        yield " " + rule


# --------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Call:
    """One call of a tool, the words that ask for it, and its result."""

    name: str
    arguments: dict[str, Any]
    request: str
    result: str
    answer: str


class AgentMaker(SampleMaker):
    """Makes rows of prose, chat, code and conversations with tools."""

    SHARES: ClassVar[Mapping[str, float]] = {"tools": 0.45, "chat": 0.2, "code": 0.2, "prose": 0.15}

    def __init__(
        self,
        sentences: list[str],
        lexicon: Lexicon,
        tokenizer: Tokenizer,
        rng: random.Random,
        library: Library,
        template: str,
    ) -> None:
        super().__init__(sentences, lexicon, tokenizer, rng)
        self.library = library
        self.kinds |= {"code": self.add_code, "tools": self.add_agent}
        self._renderer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", chat_template=template
        )

    def add_code(self, row: Row, room: int) -> None:
        """Append consecutive lines of one source file."""
        source = self.rng.choice(self.library.sources)
        start = source.find("\n", self.rng.randrange(len(source))) + 1
        row.add([self.bos], learn=False)
        row.add(self.encode(source[start : start + 6 * room])[:room], learn=True)

    def add_agent(self, row: Row, room: int) -> None:
        """Append one conversation with tools. With more room, it has more tools and more turns."""
        rng = self.rng
        offered = [*rng.sample(COMMON_TOOLS, len(COMMON_TOOLS)), *rng.sample(self.library.tools, 20)]
        tools: list[Definition] = []
        most, size = rng.randint(1, 25), 0
        while len(tools) < most and size < room:  # characters: about a third of the row
            tools.append(offered.pop(0 if rng.random() < 0.5 else -1))
            size += len(json.dumps(tools[-1]))
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.6:
            rules = rng.sample([*RULES, *HOUSE_STYLE], rng.randint(0, min(20, room // 200)))
            messages.append({"role": "system", "content": "\n - ".join([rng.choice(SYSTEM), *rules])})
        messages += self.turn(tools)
        while size + len(json.dumps(messages)) < 2 * room and len(messages) < 100:
            messages += self.turn(tools)
        self.add_messages(row, messages, tools)

    def add_messages(self, row: Row, messages: list[dict[str, Any]], tools: list[Definition]) -> None:
        """Append a conversation as the chat template writes it; the assistant's turns carry loss."""
        done = ""
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:at], tools, add_generation_prompt=True)
            after = self.render(messages[: at + 1], tools)
            row.add(self.encode(before[len(done) :]), learn=False)
            row.add(self.encode(after[len(before) :]), learn=True)
            done = after

    def render(self, messages: list[dict[str, Any]], tools: list[Definition], **variables: Any) -> str:
        """The text of a conversation."""
        return str(self._renderer.apply_chat_template(messages, tools=tools, tokenize=False, **variables))

    def turn(self, tools: list[Definition]) -> list[dict[str, Any]]:
        """A request, one call or two, their results, and the answer; at times only a question and an answer."""
        rng = self.rng
        if rng.random() < 0.15:
            at = self.passage_start()
            passage = self.passage(at)
            question = {"role": "user", "content": self.prompt(at, passage, first=True)}
            return [question, {"role": "assistant", "content": " ".join(passage)}]
        calls = [self.call(rng.choice(tools)) for _ in range(2 if rng.random() < 0.15 else 1)]
        asked = {"role": "user", "content": " ".join(call.request for call in calls)}
        made: dict[str, Any] = {
            "role": "assistant",
            "content": rng.choice(SAY_FIRST).format(calls[0].name) if rng.random() < 0.2 else None,
            "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
        }
        if rng.random() < 0.15:
            names = " and ".join(call.name for call in calls)
            made["reasoning_content"] = f"The user asks for {names}. I call {names}."
        results = [{"role": "tool", "content": call.result} for call in calls]
        return [asked, made, *results, {"role": "assistant", "content": "\n".join(call.answer for call in calls)}]

    def call(self, definition: Definition) -> Call:
        """A call of the tool with values of its schema, and what belongs to it."""
        rng = self.rng
        name, schema = definition["function"]["name"], definition["function"]["parameters"]
        if name == "Bash":
            arguments: dict[str, Any] = {"command": rng.choice(COMMANDS)}
            request = rng.choice(ASK_COMMAND).format(arguments["command"])
        else:
            optional = [key for key in schema["properties"] if key not in schema["required"] and rng.random() < 0.3]
            keys = [key for key in schema["properties"] if key in schema["required"] or key in optional]
            arguments = {key: self.value(key, schema["properties"][key]) for key in keys}
            said = ", ".join(f"{key} {json.dumps(value)}" for key, value in arguments.items()) or "no arguments"
            request = rng.choice(ASK_TOOL).format(name, said)
        result, told = self.result()
        return Call(name, arguments, request, result, rng.choice(ANSWERS).format(told))

    def value(self, key: str, schema: Mapping[str, Any]) -> Any:
        """A value of one parameter."""
        rng = self.rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if schema["type"] == "boolean":
            return rng.random() < 0.5
        if schema["type"] == "integer":
            return rng.choice([1, 2, 5, 10, 20, 100, rng.randrange(1000)])
        if schema["type"] == "number":
            return round(rng.random() * 10, 1)
        if "path" in key or "file" in key:
            return "/" + "/".join(rng.sample(["src", "home", "tmp", "docs", "data", "notes"], 2)) + f"/{self.word()}.py"
        return " ".join(self.word() for _ in range(rng.randint(1, 3)))

    def word(self) -> str:
        """A name or a noun of the novels."""
        words = self.rng.choice(self.sentences).split()
        found = "".join(c for c in self.rng.choice(words) if c.isalpha())
        return found or "Emma"

    def result(self) -> tuple[str, str]:
        """What a tool returns, and the part of it that the answer repeats."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.3:
            value = rng.choice([rng.randrange(1000), self.word()])
            return json.dumps({rng.choice(["result", "value", "name", "count"]): value}), str(value)
        if draw < 0.6:
            lines = [self.word() + ".py" for _ in range(rng.randint(1, 8))]
            return "\n".join(lines), lines[0]
        if draw < 0.8:
            source = rng.choice(self.library.sources).splitlines()
            at = rng.randrange(len(source))
            lines = source[at : at + rng.randint(1, 30)]
            return "\n".join(lines), lines[0].strip() or "nothing"
        sentence = rng.choice(self.sentences)
        return sentence, sentence
