"""EngineCore: the step loop. Schedule, launch, settle; tokens in, tokens out. It connects all parts of the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.running import Lengths
from quire.cache.session import SessionList, SessionSettings
from quire.canary.finding import Finding
from quire.engine.before_load import Storage, check_draft, check_hisparse, open_tiers
from quire.engine.config import FLUSH_S, MOST_EPOCHS, EngineConfig, loading_options
from quire.engine.device import largest_graph, open_device, plan_for, warm_ups_of
from quire.engine.draft_head import HeadDrafter
from quire.engine.draft_model import DraftLayers, ModelDrafter, load_draft
from quire.engine.frame_staging import ComputeStream
from quire.engine.incoming import refuse_adapter, request_of
from quire.engine.messages import (
    EngineRequest,
    Later,
    RetainRequest,
    StepOutputs,
    TokenLogprobs,
    TokenOutput,
    output_of,
)
from quire.engine.proof import Proof
from quire.engine.runner import Launched, ModelRunner
from quire.engine.sampler import Sampler
from quire.engine.tiers import EngineTiers, build_memory
from quire.engine.transfer import identity_of, is_for_peer, prompt_for_peer, transfer_node
from quire.errors import InvalidInput, QuireError, StepFailed
from quire.memory.host_pool import Progress
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel, load_model
from quire.observe.events import EventLog
from quire.observe.explain import Explanation, Explanations
from quire.observe.histogram import Histogram
from quire.offload import Offloads, offload_of
from quire.offload.deletion import Flushed, Stored
from quire.offload.retention import Granted, RetainedList
from quire.plan.report import plan_as_dict
from quire.scheduler.chunk_budget import chunk_budget
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Settled, Step
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.speculation import STANDARD
from quire.speculative.speculator import Speculator, speculator_of
from quire.speculative.verify import Accepted
from quire.transfer.handshake import Identity, parse_role
from quire.transfer.node import TransferNode

logger = logging.getLogger(__name__)

_MOVES_S = 0.005  # to wait for bytes when there is nothing to compute


class EngineCore:
    """One engine: a model, its pools, its queues. Single-threaded; `step` is called while `has_work`.

    Raises the QuireErrors of loading, planning and allocating on construction. After that, a bad request is refused
    alone, and a step that fails (for example for lack of device memory) ends the requests of that step. `model` is a
    loaded model, for engines that share weights, and `draft` its draft model; by default the configured ones are
    loaded. `storage` is the result of `open_tiers`, which the engine owns from now on; by default it opens it itself,
    before it loads anything. `progress` is called while host memory is touched (`EngineTiers`).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        draft: LoadedModel | LoadedHead | None = None,
        storage: Storage | None = None,
        progress: Progress | None = None,
    ) -> None:
        opened = storage if storage is not None else open_tiers(config)
        with ExitStack() as undo:
            if opened.store is not None:
                undo.callback(opened.store.close)
            self._build(config, model, draft, opened, progress)
            undo.pop_all()

    def _build(
        self,
        config: EngineConfig,
        model: LoadedModel | None,
        draft: LoadedModel | LoadedHead | None,
        storage: Storage,
        progress: Progress | None,
    ) -> None:
        self.config = config
        self.device, self.backend = open_device(config)
        if model is None:
            check_draft(config)
            check_hisparse(config)
            model = load_model(config.model, device=self.device, **loading_options(config))
        self.model = model
        self.draft = draft if draft is not None else load_draft(config, model)
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.capacity = plan_for(config, model.spec, self.draft.spec if self.draft is not None else None, self.device)
        self.plan = self.capacity.memory
        self._plan_data = plan_as_dict(self.capacity, model=config.model_name)
        self.events = EventLog() if config.enable_kv_events else None
        self.pools, self.latents, host = build_memory(config, self.capacity, model, progress)
        self.wake: Callable[[], None] = lambda: None
        with ExitStack() as undo:
            if self.latents is not None:
                undo.callback(self.latents.close)
            self.compute = ComputeStream(self.device, self.backend.moves) if self.device.type == "cuda" else None
            self.tiers: EngineTiers | None = None
            if host is not None:
                self.tiers = EngineTiers(config, self.plan, self.pools, storage, host, self.compute)
                undo.callback(self.tiers.close, lambda: False, lambda: None)
            self.transfer: TransferNode | None = None
            if self.tiers is not None and config.role is not None:
                shared = self._shared(config.weights_epoch)
                self.transfer = transfer_node(config, shared, self.tiers.host, lambda: self.wake())
                undo.callback(self.transfer.close)
            self._wire()
            undo.pop_all()
        self._closed = threading.Event()
        if self.device.type == "cpu":
            threading.Thread(target=self._populate, name="quire-populate", daemon=True).start()
        overlaps = self.device.type != "cpu" and self.speculator is None
        self._overlap = config.overlap if config.overlap is not None else overlaps
        self._in_flight: Launched | None = None
        self._settled_at = 0.0  # when the last step settled, by `time.perf_counter`
        self._ended: list[TokenOutput] = []
        self._queued: dict[str, float] = {}  # when a sequence that was not admitted yet was added
        self.queue_s = Histogram()
        self._output_tokens = self._steps = 0
        self._ends = dict.fromkeys(("finished", "aborted", "refused", "failed"), 0)

    def _wire(self) -> None:
        """Create the cache on its pools, and everything that uses it."""
        config = self.config
        self.cache = KVCache(
            self.plan,
            eviction=config.eviction,
            share_prefixes=config.enable_prefix_caching,
            emit=self.events.append if self.events is not None else None,
            model_identity=self._identity(config.weights_epoch),
            checkpoint_interval=config.checkpoint_interval,
            page_tables=True,
            explains=config.explain,
            sessions=SessionSettings(share=config.session_share, ttl_s=config.session_ttl),
            offload=Offloads(
                replace(self.tiers.settings, peers=self.transfer) if self.tiers is not None else None,
                config.retain_share,
            ),
        )
        self.offload = offload_of(self.cache)
        self.weights_epoch = config.weights_epoch
        self.explanations = Explanations()
        where = (self.device, self.pools, self.latents, self.backend, self.compute, largest_graph(config, self.device))
        warm_ups = warm_ups_of(config, self.plan, self.device)
        self.runner = ModelRunner(self.model, self.cache, self._sampler(), *where, warm_ups)
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(config.policy),
            max_running=self.max_running_requests,
            max_tokens=config.max_num_batched_tokens,
            ahead=self.offload.ahead,
            chunks=chunk_budget(config.target_itl_ms),
        )
        if self.draft is not None:
            layers = DraftLayers(len(self.model.spec.calls), self.cache, self.pools, self.backend)
            shared = (layers, self._sampler(drafts=True), self.cache, self.scheduler.tokens)
            if isinstance(self.draft, LoadedHead):
                self.runner.drafter = HeadDrafter(self.draft, *shared)
            else:
                self.runner.drafter = ModelDrafter(self.draft, *shared)
        self.speculator = speculator_of(config.speculative_config, self.plan, self.runner.drafter)
        self.proof = Proof(config, self.cache, self.scheduler, self.runner, len(self.model.spec.calls))
        if self.transfer is not None:
            assert self.offload.tiers is not None
            self.transfer.start(self.offload.tiers, self._prefill, self.abort)

    def _prefill(self, request_id: str, tokens: Ids, namespace: Namespace) -> None:
        self.add(prompt_for_peer(request_id, tokens, namespace))

    def _shared(self, weights_epoch: int) -> Identity:
        return identity_of(self.config, self.plan, self._identity(weights_epoch), weights_epoch)

    def _sampler(self, *, drafts: bool = False) -> Sampler:
        speculation = self.config.speculative_config
        rejects = speculation is not None and speculation.rejection_sample_method == STANDARD
        settings = {"keeps_probabilities": drafts and rejects, "reports_logprobs": not drafts}
        return Sampler(self.eos_token_ids, self.config.seed, **settings)

    def _identity(self, weights_epoch: int) -> bytes:
        """32 bytes for the models whose keys and values are in a page, and for what attention leaves out."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        hot = self.plan.hot
        found = [
            model.identity(weights_epoch, exact=self.config.storage is not None or self.config.role is not None)
            for model in models
        ]
        if hot is not None and hot.lossy:  # what decoding rows compute depends on what they read
            found.append(str(hot.top_k).encode())
        return found[0] if len(found) == 1 else sha256(b"".join(found)).digest()

    def _populate(self) -> None:
        """Make the system provide the pools' memory beside the first steps: it may take seconds."""
        for pool in self.pools:
            for _ in pool.populate():
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

    def add(self, message: EngineRequest) -> None:
        """Queue a sequence. Raises QuireError if it can never run; nothing has changed then."""
        self.proof.check_admits()
        try:
            self.scheduler.add(
                request_of(message, self.config, self.plan, self.model.spec.vocab_size, self.eos_token_ids)
            )
        except QuireError:
            self._ends["refused"] += 1
            raise
        self._queued[message.request_id] = time.perf_counter()

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        """End a sequence at any moment; unknown and finished ids are ignored. Its last output has the reason "abort".

        With `stopped`, its text ended on a stop string, which only its reader sees; that counts as finished.
        """
        request = self.scheduler.abort(request_id)
        if request is not None:
            if stopped:
                self._remember(request)
            self._queued.pop(request_id, None)
            self._ends["finished" if stopped else "aborted"] += 1
            self._ended.append(TokenOutput(request_id=request_id, finish_reason="abort", session=request.grant))

    def has_work(self) -> bool:
        """Whether `step` has work or reports."""
        return self.scheduler.has_requests or self._in_flight is not None or bool(self._ended)

    def has_checks(self) -> bool:
        """Whether a check of memory is due, so that `step` should be called although there is no work."""
        return self.proof.is_due

    def has_moves(self) -> bool:
        """Whether transfers between tiers are in flight, so that `step` should be called now and then."""
        below = self.offload.tiers if self.tiers is not None else None
        if self.transfer is not None and below is not None and self.transfer.is_due:
            return True
        return below is not None and (not below.mover.idle or below.deletion.is_due or below.archiver.is_due)

    def close(self) -> None:
        """Stop: pending transfers to a store end, within `STORE_DRAIN_S`, and threads end. May be called twice; no
        request may be running."""
        self._closed.set()
        if self.latents is not None:
            self.latents.close()
        tiers, below = self.tiers, self.offload.tiers
        if tiers is None or below is None:
            return
        self.tiers = None
        if self.transfer is not None:
            self.transfer.close()
        self.cache.sessions.close_all()
        below.archiver.hasten()
        tiers.close(self.offload.ahead.settle_moves, below.deletion.end)
        states = [*below.deletion.scopes.values()]
        if hidden := states.count(Stored.HIDDEN):
            logger.warning(
                "%d flushes are not at their end: no engine finds their records, but they are stored until one looks "
                "there, or `quire store gc` is run",
                hidden,
            )
        if held := states.count(Stored.HELD):
            logger.warning("%d flushes have not reached the store: flush again when it answers", held)
        if pending := len(below.archiver.pending):
            logger.warning(
                "what is on the host of %d prompts was not all stored: the store took no more of it", pending
            )

    # -- the loop

    def step(self) -> StepOutputs:
        """One turn: schedule and launch a step, settle the one before it (or this one, without overlap)."""
        began = time.perf_counter()
        if self.transfer is not None:
            self.transfer.serve()
        outputs = StepOutputs(noted=self._ended)
        self._ended = []
        self.offload.retention.expire()
        self.cache.sessions.expire()
        if self.speculator is not None:
            self._draft(self.speculator)
        step = self.scheduler.schedule()
        for request in step.admitted:
            self.queue_s.observe(time.perf_counter() - self._queued.pop(request.request_id))
            self._explain(request, outputs)
        self.proof.admitted(step.admitted)
        if not len(step) and self._in_flight is None and not len(outputs):
            self.offload.ahead.wait_moves(_MOVES_S)
        launched = self._launch(step, outputs)
        if self._in_flight is not None:
            self._settle(self._in_flight, outputs)
        self._in_flight = launched
        if launched is not None and not self._overlap:
            self._settle(launched, outputs)
            self._in_flight = None
            if self.speculator is not None and not launched.waits and not step.computes_prompts:
                self.speculator.measured(len(step), step.num_tokens - len(step), time.perf_counter() - began)
        if findings := self.proof.look(idle=launched is None):
            self._contain(findings, outputs)
        if self.transfer is not None:
            outputs.noted = [each for each in outputs.noted if not is_for_peer(each, self.transfer)]
        return outputs

    def _contain(self, findings: list[Finding], outputs: StepOutputs) -> None:
        """Cached pages are damaged: who read them is computed again, after the step in flight."""
        if self._in_flight is not None:
            self._settle(self._in_flight, outputs)
            self._in_flight = None
        outputs.noted += self.proof.contain(findings, self._fail)

    def _launch(self, step: Step, outputs: StepOutputs) -> Launched | None:
        if not len(step):
            return None
        self._steps += 1
        try:
            return self.runner.launch(step, self._in_flight)
        except AssertionError:
            raise  # a broken invariant: no later result can be trusted
        except Exception as error:
            logger.exception("a step of %d requests failed", len(step))
            outputs.noted += [self._fail(request, error) for request in step.requests]
            return None

    def _draft(self, speculator: Speculator) -> None:
        """Propose the next tokens of running requests, which the next step computes too."""
        if speculator.rests(self.scheduler.num_running):
            return
        batch, tokens, known, room = self.scheduler.drafting()
        try:
            drafts = speculator.propose(batch, tokens, known, room) if np.count_nonzero(room) else None
        except AssertionError:
            raise
        except Exception:  # a device out of memory, say: the step goes on without drafts
            logger.exception("no drafts: proposing them failed")
            return
        if drafts is not None:
            self.scheduler.draft(batch, drafts.counts, drafts.tokens, drafts.parents)

    def _settle(self, launched: Launched, outputs: StepOutputs) -> None:
        step, tokens = launched.step, launched.wait()
        self._measure(launched)
        verified = None
        if self.speculator is not None and step.is_decode:
            self.speculator.drew(len(step))
        elif self.speculator is not None:
            verified = self._verify(self.speculator, launched, tokens)
        order = verified.order if verified is not None else None
        logprobs = launched.logprobs(order)
        tokens = tokens if order is None else tokens[order]
        found = self.scheduler.settle(step, tokens, verified.kept if verified is not None else None)
        if self.speculator is not None:
            for request in [found.requests[at] for at in found.noted]:
                if request.finish_reason is not None:
                    self._remember(request)
        self.cache.close_fence(launched.fence)
        self._report(found, logprobs, outputs)

    def _remember(self, request: Request) -> None:
        """Later requests may get drafts from this one, which has ended."""
        if self.speculator is not None and request.is_remembered:
            self.speculator.drafter.ended(request.namespace, request.tokens, request.num_cached)

    def _verify(self, speculator: Speculator, launched: Launched, drawn: Lengths) -> Accepted:
        """Which draws of a step are tokens of their requests. What was written for these is moved to its place."""
        step = launched.step
        found = speculator.accepted(step.batch, step.tokens, step.draws, step.draw_counts, drawn, step.parents)
        self.runner.move(launched, found.sources, found.targets)
        return found

    def _measure(self, launched: Launched) -> None:
        """Learn what steps cost from one that waited for no bytes, since its launch or the end of the one before."""
        began, self._settled_at = max(launched.began, self._settled_at), time.perf_counter()
        if not launched.waits:
            self.scheduler.measured(launched.step, self._settled_at - began)

    def _explain(self, request: Request, outputs: StepOutputs) -> None:
        """Store why no more of a request's prompt was cached, and send it to the client if the request asks for it."""
        if request.explanation is None:
            return
        self.explanations.add(request.request_id, request.explanation, request.owner)
        if request.explain:
            outputs.noted.append(output_of(request, explanation=request.explanation))

    def _report(self, found: Settled, logprobs: dict[str, list[TokenLogprobs]], outputs: StepOutputs) -> None:
        """Report the tokens of each request; most have one token and nothing else to report."""
        self._output_tokens += len(found.tokens)
        ids, tokens = [request.request_id for request in found.requests], found.tokens.tolist()
        apart = set(found.noted)
        if logprobs or len(tokens) > len(ids):
            apart |= {at for at, name in enumerate(ids) if name in logprobs or found.counts[at] > 1}
        if apart:
            stops = np.cumsum(found.counts).tolist()
            for at in sorted(apart):
                request, count = found.requests[at], int(found.counts[at])
                self._ends["finished"] += request.finish_reason is not None
                told = output_of(
                    request,
                    token_ids=tokens[stops[at] - count : stops[at]],
                    logprobs=logprobs[ids[at]][:count] if ids[at] in logprobs else None,
                    finish_reason=request.finish_reason,
                    stop_token=request.stop_token,
                )
                outputs.noted.append(told)
            tokens = [tokens[stop - 1] for at, stop in enumerate(stops) if at not in apart]
            ids = [name for at, name in enumerate(ids) if at not in apart]
        outputs.request_ids += ids
        outputs.token_ids += tokens

    def _fail(self, request: Request, error: Exception) -> TokenOutput:
        self.scheduler.abort(request.request_id, failed=True)
        self._ends["failed"] += 1
        if not isinstance(error, QuireError):
            error = StepFailed(f"the step failed: {type(error).__name__}: {error}.", fix="send the request again.")
        told = TokenOutput(request_id=request.request_id, finish_reason="error", session=request.grant)
        told.error, told.status = str(error), error.status
        return told

    # -- keeping and forgetting

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

    def flush(self, namespace: Namespace | None) -> Later[Flushed]:
        """Delete the cached pages of a namespace, or all, in every tier, and its retentions. Running requests continue;
        no other request finds their pages. The answer comes later: the state in the store, or StoreError if the records
        would be found again after a restart."""
        done = self.offload.flush(namespace)
        if self.speculator is not None:
            self.speculator.drafter.forget(namespace)
            for request in self.scheduler.requests:
                request.is_remembered = request.is_remembered and namespace not in (None, request.namespace)
        return Later(
            poll=lambda waits: self.offload.flushed(done, namespace, waits=waits), until_s=time.monotonic() + FLUSH_S
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
            kept = Stored.KEPT if self.config.storage is not None else Stored.NONE
            return Flushed(flushed_tokens=0, held_tokens=0, num_retentions=0, storage=kept)
        self.model.weights_changed()
        if self.draft is not None:
            self.draft.weights_changed()
        done = self.offload.change_model(self._identity(epoch))
        self.weights_epoch = epoch
        if self.transfer is not None:
            self.transfer.set_identity(self._shared(epoch))
        logger.info("weights epoch %d: %d cached tokens were of another one", epoch, done.flushed_tokens)
        return done

    def set_role(self, role: str) -> str:
        """Have another role among engines from now on (`TransferNode.set_role`); returns it. Raises InvalidInput."""
        if self.transfer is None:
            raise InvalidInput("this engine has no role.", fix="start it with --role both and QUIRE_TRANSFER_SECRET.")
        self.transfer.set_role(parse_role(role))
        return role

    # -- looking

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges, flat except `frames`: by group, the frames of each owner."""
        sessions = self.cache.sessions.statistics()  # first: it ends those that have expired
        retention, cache = self.offload.retention, asdict(self.cache.statistics())
        cache["tiers"] = self.offload.tiers.statistics() if self.offload.tiers is not None else None
        if self.tiers is not None and cache["tiers"] is not None:
            cache["tiers"] |= self.tiers.statistics()
        return {
            **cache,
            **sessions,
            **self.proof.statistics(),
            **{f"{name}_requests": count for name, count in self._ends.items()},
            "output_tokens": self._output_tokens,
            "steps": self._steps,
            "preemptions": self.scheduler.num_preemptions,
            "chunk_budget": self.scheduler.chunks.statistics(),
            "eviction": self.cache.tree.eviction_statistics(),
            "running_requests": self.scheduler.num_running,
            "waiting_requests": len(self.scheduler.waiting),
            "waiting_reason": self.scheduler.waiting[0].wait_reason if self.scheduler.waiting else "",
            "transfer": self.transfer.statistics() if self.transfer is not None else None,
            "speculation": self.speculator.statistics() if self.speculator is not None else None,
            "hisparse": self.latents.statistics() if self.latents is not None else None,
            "queue_seconds": self.queue_s.to_dict(),
            "retentions": len(retention),
            "retained_pages": retention.num_pages,
            "retentions_expired": retention.num_expired,
            "retentions_given_up": retention.num_given_up,
            "retentions_lost": retention.num_lost,
            "weights_epoch": self.weights_epoch,
            "kv_bytes": self.plan.pool_bytes,
            "plan": self._plan_data,
            "weight_bytes": self.model.weight_bytes + (self.draft.weight_bytes if self.draft is not None else 0),
            "forward": self.model.forward_statistics(),
            "bytes_per_token": float(self.capacity.bytes_per_token),
            "largest_request": self.plan.largest_request,
            "context": self.plan.context,
            "max_running_requests": self.max_running_requests,
            "device": str(self.device),
            "attention": self.backend.statistics(),
            "cuda_graphs": self.runner.graphs.statistics() if self.runner.graphs is not None else None,
            "dtype": self.model.spec.dtype.value,
            "architecture": self.model.spec.architecture,
        }

    def explain(self, request_id: str, owner: str | None = None) -> dict[str, Explanation]:
        """Why no more of a request's prompt was cached (`Explanations.of`)."""
        return self.explanations.of(request_id, owner)

    def audit(self) -> None:
        """Check every invariant of the cache. Raises AuditFailure."""
        self.cache.audit()

    def audit_cache(self) -> Later[dict[str, Any]]:
        """Audit the cache beside steps (`Proof.audit`)."""
        return self.proof.audit()

    def history(self) -> dict[str, Any]:
        """How full the pools were (`History.to_dict`)."""
        return self.proof.history.to_dict()
