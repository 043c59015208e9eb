"""LLM: the engine in this process, for scripts. It has the usual interface, so that users can switch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from quire.cache.session import SessionList
from quire.client.pooled import POOLED, pooled_of, pooling_of
from quire.client.request_assembler import RequestAssembler, RequestOutput
from quire.engine.config import EngineConfig, engine_config
from quire.engine.messages import RetainRequest, prompt_bytes
from quire.engine.tier_report import tiers_line
from quire.errors import EngineDead, InvalidInput, QuireError
from quire.garbage import late_collection
from quire.memory.host_pool import Progress as OnProgress
from quire.offload.deletion import Flushed
from quire.offload.retention import Granted
from quire.plan.plan import Plan
from quire.plan.report import summary_line
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.bundled import DEFAULT_MODEL
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.pooling import Vectors

if TYPE_CHECKING:
    from quire.loop import Part
    from quire.models.tokenizer import Tokenizer

_MOVES_S = 0.02
_COMPILES_S = 0.0005
_IDS = "prompt_token_ids"
_SESSION = "session_id"

Prompt = str | Mapping[str, Any] | Sequence[int]


class LLM:
    """A model served to one caller.

        llm = LLM("path/or/hub-id", kv_memory="2GiB")
        [output] = llm.generate("Tell me of Bath.", SamplingParams(temperature=0, max_tokens=32))
        print(output.outputs[0].text, output.num_cached_tokens)

    Keyword arguments are the fields of `EngineConfig`; without a model it is the bundled one, and without a
    `target_itl_ms` it is off, because answers are read when all have ended. The plan, and what computes attention, are
    printed on standard error, unless `show_plan` is off. `parts` are features of the caller's own (`quire.loop.Part`).
    Raises QuireError if the model cannot be loaded, the pools do not fit, or a prompt can never run.

    With storage, transfers of the newest pages may still be in flight when a script ends. `close`, a `with` block and
    the interpreter's end all wait for them, for a bounded time.
    """

    def __init__(
        self, model: str | None = None, *, show_plan: bool = True, parts: Sequence[Part] = (), **settings: Any
    ) -> None:
        settings = {"model": model if model is not None else DEFAULT_MODEL, "target_itl_ms": "off"} | settings
        self.config: EngineConfig = engine_config(**settings)
        with late_collection():
            from quire.engine.core import EngineCore  # torch and transformers take seconds

        with _host_memory_bar(shown=show_plan) as progress:
            self.engine = EngineCore(self.config, progress=progress, parts=parts)
        self._closing = weakref.finalize(self, self.engine.close)  # at the interpreter's end too
        lines = [summary_line(self.plan)] + ([tiers_line(self.engine.tiers.resolved)] if self.engine.tiers else [])
        for line in [*lines, f"Attention: {self.engine.backend.about()}"] if show_plan else ():
            Console(stderr=True, highlight=False).print(line, style="dim", soft_wrap=True, markup=False)
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            self.tokenizer = self.config.load_tokenizer()
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        priority: int = 0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts. `progress` draws a bar on standard error.

        A prompt is a text, `{"prompt_token_ids": [...]}`, `{"prompt": text}`, or a list of token ids. With
        `"session_id": "s1"` beside, it is a turn of that session: the next turn computes only what comes after the
        tokens of this one, and `outputs[i].session` says what is held. All prompts are checked before any runs: if one
        can never run, QuireError is raised and none has run. Prompts with another
        `salt` share no pages; lower `priority` goes first. With `SamplingParams(grammar=json_schema({...}))`
        (`quire.grammar`) the output is what that allows. `outputs[i].explanation` says why no more of the prompt was
        cached, unless the engine was created with `explain` off.
        """
        if not self._closing.alive:
            raise EngineDead("this LLM was closed.", fix="make another one, or close it later.")
        batch = self._as_list(prompts)
        params = self._params_for(batch, sampling_params)
        assemblers = [self._assembler(prompt, p) for prompt, p in zip(batch, params, strict=True)]
        options = {"salt": salt, "priority": -priority, "explain": self.config.explain}
        try:
            for one in assemblers:
                for request in one.engine_requests(**options):
                    later = self.engine.add(request)
                    while later is not None and later.poll(time.monotonic() < later.until_s) is None:
                        time.sleep(_COMPILES_S)
        except BaseException:
            self._abort(assemblers)
            raise
        with Progress(console=Console(stderr=True), disable=not progress) as bar:
            return self._run(assemblers, bar)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template, which gets the
        `tools`. The text of an output has calls as the model writes them. Raises InvalidInput for tools that the
        template does not show."""
        if self.tokenizer is None:
            raise InvalidInput("chat needs a tokenizer.", fix="leave skip_tokenizer_init out.")
        if tools:
            self.tokenizer.check_shows_tools()
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        more = {} if tools is None else {"tools": list(tools)}
        prompts: list[Prompt] = [
            {"prompt_token_ids": self.tokenizer.apply_chat_template(conversation, **more)}  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, **options)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, salt: str = "") -> Vectors:
        """The embedding of each prompt, float32 `[prompts, dimensions]`. Raises UnsupportedModel for a model that was
        made for something else, and InvalidInput for dimensions for which it was not trained."""
        pooling = pooling_of(self.engine.facts, self.config.model_name, embeds=True)
        pooling.check_dimensions(dimensions)
        found = self.generate(prompts, POOLED, salt=salt)
        return pooling.embeddings(pooled_of([each.outputs[0] for each in found]), dimensions)

    def score(self, text: str, others: Sequence[str], *, salt: str = "") -> list[float]:
        """How well each of the others fits the text: what a model for sequence classification says of both, one behind
        the other, or the cosine of their embeddings. Raises UnsupportedModel for a model that generates text."""
        pooling = pooling_of(self.engine.facts, self.config.model_name)
        pairs = [(text, other) for other in others]
        found = self.generate(pooling.prompts(pairs), POOLED, salt=salt) if pairs else []
        scores: list[float] = pooling.scores(pairs, pooled_of([each.outputs[0] for each in found])).tolist()
        return scores

    def retain(
        self, prompt: Prompt, *, ttl_seconds: float, salt: str = "", priority: int = 0, pin: bool = False
    ) -> Granted:
        """Retain the cached part of a prompt for so long: the answer says how much that is, and why not more.

        It is released earlier, lower `priority` first, if running requests need the room, unless it is a `pin`.
        """
        tokens = self._tokens(prompt)[1].tobytes()
        return self.engine.retain(
            RetainRequest(prompt=tokens, ttl_seconds=ttl_seconds, salt=salt, priority=priority, pin=pin)
        )

    def release(self, retention_id: str) -> bool:
        """Release a retention; returns False if there is none with that id."""
        return self.engine.release(retention_id)

    def sessions(self, *, salt: str | None = None) -> SessionList:
        """The sessions of a salt ("" for prompts without one), or all: what each holds, and the tokens it has saved."""
        return self.engine.sessions(None if salt is None else Namespace(salt=salt))

    def close_session(self, session_id: str, *, salt: str = "") -> bool:
        """End a session that no turn will follow, and free what it holds. Cached pages that no other request has used
        are evicted first. Returns False if there is none with that id."""
        return self.engine.close_session(Namespace(salt=salt), session_id)

    def flush(self, *, salt: str | None = None) -> Flushed:
        """Delete the pages cached under a salt ("" for prompts without one), or all pages, in every tier.

        Waits some seconds for the store at most: `storage` of the answer is the state of the stored records. Raises
        StoreError if they would be found again after a restart.
        """
        later = self.engine.flush(None if salt is None else Namespace(salt=salt))
        while (found := later.poll(time.monotonic() < later.until_s)) is None:
            if not self.engine.offload.ahead.wait_moves(_MOVES_S):
                time.sleep(_MOVES_S)  # tried again later
            self.engine.offload.ahead.settle_moves()
        return found

    def set_weights_epoch(self, epoch: int) -> Flushed:
        """The weights were replaced, `epoch` times: pages cached before are never found again, on any tier."""
        return self.engine.set_weights_epoch(epoch)

    @property
    def plan(self) -> Plan:
        """The plan from which the pools are built and by which prompts are admitted."""
        return self.engine.capacity

    def statistics(self) -> dict[str, Any]:
        """The engine's counters and gauges: hit tokens, evictions, preemptions, frames by state, and more."""
        return self.engine.statistics()

    def close(self) -> None:
        """Wait for transfers to storage, and end the threads. May be called twice; nothing can be generated after
        it."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _as_list(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, (str, Mapping)):
            return [prompts]
        if isinstance(prompts, Iterable) and not isinstance(prompts, (bytes, bytearray)):
            found = list(prompts)
            return [found] if found and isinstance(found[0], (int, np.integer)) else found  # type: ignore[list-item,return-value]
        raise InvalidInput(f"a prompt is a text, a dict or a list, got {type(prompts).__name__}.")

    def _params_for(
        self, batch: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise InvalidInput(f"{len(batch)} prompts and {len(params)} sampling_params.", fix="give one for each.")
        return params

    def _assembler(self, prompt: Prompt, params: SamplingParams) -> RequestAssembler:
        text, tokens = self._tokens(prompt)
        if params.stop and self.tokenizer is None:
            raise InvalidInput("stop strings need a tokenizer.", fix="use stop_token_ids.")
        return RequestAssembler(
            request_id=f"r{next(self._ids)}",
            prompt=text,
            prompt_token_ids=tokens,
            params=params,
            decoder=self.tokenizer,
            session_id=_session_of(prompt),
        )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, Ids]:
        """A prompt's text, if it has one, and its tokens."""
        found: Mapping[str, Any] = {"prompt" if isinstance(prompt, str) else _IDS: prompt}
        if isinstance(prompt, Mapping):
            found = prompt
        if unknown := found.keys() - {"prompt", _IDS, _SESSION}:
            names = ", ".join(sorted(f"'{key}'" for key in unknown))
            has = f"it has 'prompt' or '{_IDS}', '{_SESSION}' and nothing else."
            raise InvalidInput(f"a prompt has no {names}.", fix=has)
        if not found.keys() & {"prompt", _IDS}:
            raise InvalidInput(f"a prompt has 'prompt' or '{_IDS}' and nothing else, got {sorted(found)}.")
        text, ids = found.get("prompt"), found.get(_IDS)
        if ids is None:
            if self.tokenizer is None:
                raise InvalidInput("a text prompt needs a tokenizer.", fix=f"send {_IDS}, or load a tokenizer.")
            ids = self.tokenizer.encode(text or "")
        return text, np.frombuffer(prompt_bytes(ids), dtype=np.int32)

    def _run(self, assemblers: list[RequestAssembler], bar: Progress) -> list[RequestOutput]:
        task = bar.add_task("sequences", total=sum(assembler.params.n for assembler in assemblers))
        sequences = {request_id: found for each in assemblers for request_id, found in each.sequences.items()}
        try:
            while self.engine.has_work():
                outputs = self.engine.step()
                for output in outputs.noted:
                    if (sequence := sequences.get(output.request_id)) is not None:
                        delta = sequence.push(output)
                        bar.advance(task, delta.finish_reason is not None and bool(delta.token_ids))
                        if delta.must_abort:
                            self.engine.abort(output.request_id, stopped=True)
                for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
                    if (sequence := sequences.get(request_id)) is not None and sequence.push_token(token_id):
                        bar.advance(task)
                        self.engine.abort(request_id, stopped=True)
        except BaseException:
            self._abort(assemblers)
            raise
        for assembler in assemblers:
            for sequence in assembler.sequences.values():
                if sequence.finish_reason == "error":
                    raise QuireError(f"request {assembler.request_id} failed: {sequence.error}")
        return [assembler.output() for assembler in assemblers]

    def _abort(self, assemblers: list[RequestAssembler]) -> None:
        """Abort these requests and drop their last outputs."""
        for assembler in assemblers:
            for request_id in assembler.unfinished_ids():
                self.engine.abort(request_id)
        while self.engine.has_work():
            self.engine.step()


def _session_of(prompt: Prompt) -> str:
    """The session id of a prompt; "" for none."""
    found = prompt.get(_SESSION, "") if isinstance(prompt, Mapping) else ""
    if not isinstance(found, str) or (isinstance(prompt, Mapping) and _SESSION in prompt and not found):
        raise InvalidInput(f"{_SESSION} is a text that is not empty, got {found!r}.")
    return found


@contextmanager
def _host_memory_bar(*, shown: bool) -> Iterator[OnProgress | None]:
    """Progress of touching host memory, on a terminal; removed at the end."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    with Progress(
        TextColumn("Touching host memory"), BarColumn(), DownloadColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("host memory", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
