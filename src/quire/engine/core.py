"""EngineCore: builds an engine from its settings, and has the verbs that its callers use. Tokens in, tokens out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from quire.cache import KVCache
from quire.cache.session import SessionList, SessionSettings
from quire.canary.finding import Reports
from quire.canary.parts import AuditPart, HistoryPart
from quire.counters import Section, declared_in, statistics_of
from quire.engine.before_load import check_features
from quire.engine.config import FLUSH_S, MOST_EPOCHS, EngineConfig, loading_options
from quire.engine.counters import OPTIONAL_SECTIONS, EngineCounters, facts_of
from quire.engine.device.device import largest_graph, open_device, plan_for, warm_ups_of
from quire.engine.device.frame_staging import ComputeStream
from quire.engine.device.runner import ModelRunner
from quire.engine.elastic import memory_of, memory_parts, memory_report
from quire.engine.grammar import grammar_parts, grammars_of
from quire.engine.hisparse import HostedLatents, hot_buffer_parts
from quire.engine.incoming import refuse_adapter, request_of
from quire.engine.kv_events import kv_event_parts
from quire.engine.messages import EngineRequest, Later, MemoryReport, Ready, ResizeRequest, RetainRequest, StepOutputs
from quire.engine.outline import Outline, outline_of
from quire.engine.planning import cost_growth, memory_plan
from quire.engine.pooling import pooling_facts, pooling_parts, refuse_others
from quire.engine.prompt_logprobs import prompt_parts
from quire.engine.reporting import Reporting, explanation_parts, keeping_parts, limit_of, time_parts
from quire.engine.self_checks import check_parts
from quire.engine.speculation import drafter_of, load_draft, sampler_of, speculation_parts
from quire.engine.tier_storage import Storage, open_tiers
from quire.engine.tiers import (
    EngineTiers,
    build_memory,
    describe_in_store,
    flushed_in_store,
    lower_frames,
    offloads_of,
    open_tiers_of,
    tier_parts,
)
from quire.engine.transfer import connections_of, identity_of, open_transfer, transfer_parts
from quire.errors import InvalidInput, QuireError
from quire.grammar.part import PATIENCE_S
from quire.loop import ForwardPart, Loop, Part
from quire.loop.endings import EndingsPart
from quire.loop.tenants import TenantsPart, TenantState, parts_for_tenants
from quire.memory.host_pool import Progress
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel, load_model
from quire.observe.explain import Explanation, Explanations
from quire.offload import offload_of
from quire.offload.deletion import Flushed
from quire.offload.parts import TiersPart
from quire.offload.retention import Granted, RetainedList
from quire.plan.planner import make_plan
from quire.plan.report import plan_as_dict
from quire.scheduler.chunk_budget import chunk_budget
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.scheduler import Scheduler
from quire.settings.tenants import read_tenants
from quire.spec.ending import Ending
from quire.spec.events import Namespace
from quire.speculative.speculator import Speculator
from quire.transfer.handshake import Identity, parse_role
from quire.transfer.node import TransferNode

logger = logging.getLogger(__name__)

AUDIT_S = 8.0
"""Seconds that the answer to a demanded audit waits until the audit has ended."""

P = TypeVar("P", bound=Part)
C = TypeVar("C", bound=HostedLatents | EngineTiers | TransferNode | None)

_PARTS: tuple[Callable[[EngineCore], Iterable[Part]], ...] = (
    transfer_parts,
    keeping_parts,
    grammar_parts,
    speculation_parts,
    explanation_parts,
    time_parts,
    prompt_parts,
    pooling_parts,
    hot_buffer_parts,
    tier_parts,
    check_parts,
    kv_event_parts,
    memory_parts,
)
"""Make the parts of an engine, in the order of their hooks. A feature is a line here."""


class EngineCore:
    """One engine: a model, its pools, its queues. Single-threaded; `step` is called while `has_work`.

    Raises the QuireErrors of loading, planning and allocating on construction. After that, a bad request is refused
    alone, and a step that fails (for example for lack of device memory) ends the requests of that step. `model` is a
    loaded model, for engines that share weights, and `draft` its draft model; by default the configured ones are
    loaded. `storage` is the result of `open_tiers`, which the engine owns from now on; by default it opens it itself,
    before it loads anything. `progress` is called while host memory is touched (`EngineTiers`). `parts` are features of
    the caller's own (`quire.loop.Part`).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        draft: LoadedModel | LoadedHead | None = None,
        storage: Storage | None = None,
        progress: Progress | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        opened = storage if storage is not None else open_tiers(config)
        with ExitStack() as undo:
            if opened.store is not None:
                undo.callback(opened.store.close)
            self._build(config, model, draft, opened, progress, parts)
            undo.pop_all()

    def _build(
        self,
        config: EngineConfig,
        model: LoadedModel | None,
        draft: LoadedModel | LoadedHead | None,
        storage: Storage,
        progress: Progress | None,
        parts: Sequence[Part],
    ) -> None:
        self.config = config
        self.device, self.backend = open_device(config)
        if model is None:
            check_features(config)
            model = load_model(config.model, device=self.device, **loading_options(config))
        self.model = model
        self.draft = draft if draft is not None else load_draft(config, model)
        self.models = [each for each in (model, self.draft) if each is not None]
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.capacity = plan_for(config, self.device, *(each.spec for each in self.models))
        self.plan = memory_plan(config, self.capacity)
        self.facts = facts_of(config, self.capacity, self.models) | pooling_facts(model)
        self.facts["identity"] = sha256(repr(self.identity(0)).encode()).hexdigest()
        self.pools, self.latents, host = build_memory(config, self.capacity, model, progress)
        self.wake: Callable[[], None] = lambda: None
        with ExitStack() as undo:
            _owned(undo, self.latents)
            self.compute = ComputeStream(self.device, self.backend.moves) if self.device.type == "cuda" else None
            self.tiers = _owned(undo, open_tiers_of(self, storage, host))
            self.transfer = _owned(undo, open_transfer(config, self.identity, host, lambda: self.wake()))
            self._wire(parts)
            undo.pop_all()
        self._closed = threading.Event()
        if self.device.type == "cpu":
            threading.Thread(target=self.populate, name="quire-populate", daemon=True).start()

    def _wire(self, more: Sequence[Part]) -> None:
        """Create the cache on its pools, the loop over it, and its parts."""
        config = self.config
        self.cache = KVCache(
            self.plan,
            eviction=config.eviction,
            cost_growth=cost_growth(config, self.model),
            share_prefixes=config.enable_prefix_caching,
            model_identity=self._identity(config.weights_epoch),
            checkpoint_interval=config.checkpoint_interval,
            page_tables=True,
            explains=config.explain,
            sessions=SessionSettings(share=config.session_share, ttl_s=config.session_ttl),
            offload=offloads_of(self),
            tenants=read_tenants(config.tenants),
        )
        self.offload = offload_of(self.cache)
        self.weights_epoch = config.weights_epoch
        describe_in_store(self, self.identity(self.weights_epoch))
        graphs = largest_graph(config, self.device) if self.model.pooler is None else 0
        where = (self.device, self.pools, self.backend, self.compute, graphs)
        warm_ups = warm_ups_of(config, self.plan, self.device)
        self.runner = ModelRunner(self.model, self.cache, sampler_of(config, self.eos_token_ids), *where, warm_ups)
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(config.policy, self.cache.parts.tenants),
            max_running=self.max_running_requests,
            max_tokens=config.max_num_batched_tokens,
            ahead=self.offload.ahead,
            chunks=chunk_budget(config.target_itl_ms),
        )
        self.drafter = drafter_of(self)
        self.grammars = grammars_of(self)
        self.reporting, self.explanations = Reporting(), Explanations()
        self.endings = EndingsPart(limit_of)
        self.reports = Reports(config.canary_reports)
        self.history_part = HistoryPart(self.cache, self.scheduler, lambda: lower_frames(self))
        self.audits = AuditPart(self.cache, self.history_part, self.reports)
        own = chain.from_iterable(made(self) for made in _PARTS)
        parts = [*own, *parts_for_tenants(self.cache), *more, self.reporting]
        self.runner.parts = tuple(part for part in (*parts, self.drafter) if isinstance(part, ForwardPart))
        by_default = config.may_overlap and self.device.type != "cpu"
        overlaps = by_default if config.overlap is None else config.overlap
        self.loop = Loop(self.scheduler, self.cache, self.runner, parts, overlaps=overlaps)

    def part(self, kind: type[P]) -> P | None:
        """The part of that class; None where the feature is off."""
        return next((part for part in self.loop.parts if isinstance(part, kind)), None)

    def identity(self, weights_epoch: int) -> Identity:
        """What engines that exchange pages with this one have in common with it, after so many changes of weights."""
        dtype, model = self.model.spec.dtype, self._identity(weights_epoch)
        return identity_of(self.config, self.plan, model, weights_epoch, dtype=dtype)

    def _identity(self, weights_epoch: int) -> bytes:
        """32 bytes for the models whose keys and values are in a page, and for what attention leaves out."""
        exact = self.config.shares_pages or self.config.identify_weights
        found = [model.identity(weights_epoch, exact=exact) for model in self.models]
        found += self.plan.attention_identity
        return found[0] if len(found) == 1 else sha256(b"".join(found)).digest()

    def populate(self) -> None:
        """Make the system provide the pools' memory beside the first steps: it may take seconds."""
        for backing in dict.fromkeys(pool.backing for pool in self.pools):
            for _ in backing.populate():
                if self._closed.is_set():
                    return

    # -- requests

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and output together, in tokens."""
        return self.plan.context

    @property
    def max_running_requests(self) -> int:
        """Requests that may run at once: as configured, or as many as the plan has room for."""
        return min(self.config.max_running_requests, self.plan.max_requests)

    def add(self, message: EngineRequest) -> Later[bool] | None:
        """Queue a sequence. Raises QuireError if it can never run; nothing has changed then. One with a grammar is
        queued when that is compiled: the answer is True then, or InvalidInput."""
        vocabulary = self.model.spec.vocab_size
        try:
            refuse_others(message, self.model, self.config.model_name)
            largest = self.cache.resizing.plan.largest_request
            largest = min(largest, self.cache.admission.largest_request(Namespace(message.adapter, message.salt)))
            request = request_of(message, self.config, largest, vocabulary, self.eos_token_ids)
        except QuireError:
            self.loop.refused()
            raise
        if request.params.grammar is None:
            self.loop.add(request)
            return None
        return Later(poll=self.grammars.add(request), until_s=time.monotonic() + PATIENCE_S)

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        """End a sequence at any moment; unknown and finished ids are ignored. Its last output has the reason "abort".

        With `stopped`, its text ended on a stop string, which only its reader sees; that counts as finished.
        """
        self.grammars.drop(request_id)
        self.loop.abort(request_id, stopped=stopped)

    def tell_ending(self, request_id: str, ending: Ending) -> bool:
        """How the output of a sequence ended, as its reader saw it (`EndingsPart.tell`)."""
        return self.endings.tell(request_id, ending)

    @property
    def speculator(self) -> Speculator | None:
        """What proposes drafts; None without speculation."""
        return self.part(Speculator)

    def has_work(self) -> bool:
        """Whether `step` has work or reports."""
        return self.loop.has_work

    def is_due(self) -> bool:
        """Whether a part has something to do, so that `step` should be called although there is no work."""
        return self.loop.is_due

    def has_moves(self) -> bool:
        """Whether pages are on their way between tiers or engines."""
        return any(part.is_due for part in self.loop.parts if isinstance(part, TiersPart | TransferNode))

    def close(self) -> None:
        """Stop: pending transfers to a store end, within `STORE_DRAIN_S`, and threads end. May be called twice; no
        request may be running."""
        self._closed.set()
        self.loop.close()

    def step(self) -> StepOutputs:
        """One turn of the loop (`Loop.step`): what it has to report."""
        self.loop.step()
        return self.reporting.take()

    # -- keeping and deleting

    def retain(self, message: RetainRequest) -> Granted:
        """Retain the cached part of a prefix (`Retention.retain`). Raises InvalidInput; nothing has changed then."""
        refuse_adapter(message.adapter)
        return self.offload.retention.retain(
            np.frombuffer(message.prompt, dtype=np.int32),
            Namespace(message.adapter, message.salt),
            ttl_seconds=message.ttl_seconds,
            priority=message.priority,
            pin=message.pin,
            owner=message.owner,
        )

    def release(self, retention_id: str, owner: str | None = None) -> bool:
        """Release a retention of an owner, or of any; returns False if there is none with that id."""
        return self.offload.retention.release(retention_id, owner)

    def retained(self) -> RetainedList:
        """What is kept now."""
        return self.offload.retention.listing()

    def sessions(self, namespace: Namespace | None, owner: str | None = None) -> SessionList:
        """The sessions of a namespace, or all; of an owner, or of any."""
        return self.cache.sessions.listing(namespace, owner)

    def close_session(self, namespace: Namespace, session_id: str, owner: str | None = None) -> bool:
        """End a session of an owner, or of any, and free what it holds; its turns that run go on. Returns False if
        there is none."""
        return self.cache.sessions.close(namespace, session_id, owner)

    def tenants(self) -> list[TenantState]:
        """The tenants, their terms and what they hold. Raises InvalidInput where there are none."""
        return self._tenants().listing()

    def set_tenant(self, name: str, terms: dict[str, Any]) -> list[TenantState]:
        """Other terms for a tenant from now on: `floor`, `ceiling` (None: none) or `weight`. Returns all tenants.
        Raises InvalidInput; nothing has changed then."""
        return self._tenants().change(name, terms)

    def _tenants(self) -> TenantsPart:
        part = self.part(TenantsPart)
        if part is None:
            raise InvalidInput("this engine has no tenants.", fix="start it with --tenants FILE.")
        return part

    def flush(self, namespace: Namespace | None) -> Later[Flushed]:
        """Delete the cached pages of a namespace, or all, in every tier, and its retentions. Running requests continue;
        no other request finds their pages. The answer comes later: the state in the store, or StoreError if the records
        would be found again after a restart."""
        done = self.offload.flush(namespace)
        self.loop.flush(namespace)
        return Later(
            poll=lambda waits: flushed_in_store(self, done, namespace, waits=waits), until_s=time.monotonic() + FLUSH_S
        )

    def set_weights_epoch(self, epoch: int) -> Flushed:
        """The weights were replaced, `epoch` times: pages cached before are never found again, on any tier.

        Call it when the weights are replaced, with no step in between. Running requests continue, and no other request
        finds their pages: a part of these is of the old weights. Stored pages of another epoch stay for engines with
        that epoch. Nothing changes if it is the epoch already. Raises InvalidInput for an invalid number; nothing has
        changed then.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < MOST_EPOCHS:
            raise InvalidInput(f"weights_epoch must be a whole number from 0 to 2**63 - 1, got {epoch!r}.")
        if epoch == self.weights_epoch:
            return Flushed(flushed_tokens=0, held_tokens=0, num_retentions=0, storage=self.offload.stored)
        for model in self.models:
            model.weights_changed()
        done = self.offload.change_model(self._identity(epoch))
        self.weights_epoch = epoch
        self.loop.model_changed(epoch)
        describe_in_store(self, self.identity(epoch))
        logger.info("weights epoch %d: %d cached tokens were of another one", epoch, done.flushed_tokens)
        return done

    def resize(self, request: ResizeRequest) -> Later[MemoryReport]:
        """Have other bytes of KV memory (`ElasticMemory.resize`)."""
        return memory_of(self).resize(request)

    def release_memory(self, wait_s: float) -> Later[MemoryReport]:
        """Give all KV memory back until `resume_memory`; weights stay, and requests wait."""
        return memory_of(self).release(wait_s)

    def resume_memory(self, wait_s: float) -> Later[MemoryReport]:
        """Have the KV memory again."""
        return memory_of(self).resume(wait_s)

    def memory(self) -> MemoryReport:
        """The size of the KV memory."""
        return memory_report(self)

    def set_role(self, role: str) -> str:
        """Have another role among engines from now on (`TransferNode.set_role`); returns it. Raises InvalidInput."""
        connections_of(self).set_role(parse_role(role))
        return role

    def set_prefill_peers(self, addresses: list[str]) -> list[str]:
        """Have the engines at these addresses compute prompts from now on, and no others
        (`TransferNode.set_prefill_peers`); returns them. Raises InvalidInput."""
        return connections_of(self).set_prefill_peers(addresses)

    # -- looking

    def counters(self) -> dict[str, Any]:
        """Counters and gauges now, flat but for sections; a section is None if the engine has no such part."""
        return dict.fromkeys(OPTIONAL_SECTIONS) | statistics_of(self._sections())

    def statistics(self) -> dict[str, Any]:
        """The counters, and what stays as it is."""
        return self.facts | self.counters()

    def ready(self) -> Ready:
        """The description of this engine for its clients."""
        return Ready(
            context_length=self.context_length,
            eos_token_ids=list(self.eos_token_ids),
            facts=self.facts,
            counters=self.counters(),
            metrics=declared_in(self._sections()),
        )

    def _sections(self) -> list[Section]:
        config = {(str(self.plan.page_size), str(self.plan.num_pages)): 1}
        own: list[Section] = [
            *self.loop.counters(),  # first: sessions that have expired end
            ("", self.cache.statistics()),
            (
                "",
                EngineCounters(
                    weights_epoch=self.weights_epoch, kv_bytes=self.cache.resizing.num_bytes, cache_config=config
                ),
            ),
            ("attention", self.backend.counters()),
            ("", {"forward": self.model.forward_statistics()}),
        ]
        graphs = self.runner.graphs
        return own + ([("cuda_graphs", graphs.counters())] if graphs is not None else [])

    def explain(self, request_id: str, owner: str | None = None) -> dict[str, Explanation]:
        """Why no more of a request's prompt was cached (`Explanations.of`)."""
        return self.explanations.of(request_id, owner)

    def audit(self) -> None:
        """Check every invariant of the cache. Raises AuditFailure."""
        self.cache.audit()

    def audit_cache(self) -> Later[dict[str, Any]]:
        """Audit the cache beside steps (`AuditPart.demand`)."""
        return Later(poll=self.audits.demand(), until_s=time.monotonic() + AUDIT_S)

    def outline(self) -> Outline:
        """What is in the tree (`quire.engine.outline.outline_of`)."""
        return outline_of(self.cache.tree)

    def plan_if(self, changes: dict[str, int]) -> dict[str, Any]:
        """The plan with other settings (`PlanSettings`), as `quire plan` tells it. Raises the errors of planning."""
        plan = make_plan(self.capacity.spec, self.capacity.settings.changed(**changes))
        return plan_as_dict(plan, model=self.config.model_name)

    def history(self) -> dict[str, Any]:
        """How full the pools were (`History.to_dict`)."""
        return self.history_part.history.to_dict()


def _owned(undo: ExitStack, resource: C) -> C:
    """What is closed if the engine cannot be built."""
    if resource is not None:
        undo.callback(resource.close)
    return resource
