"""The routes of `/v1/cache`, `/v1/sessions` and `/v1/tenants`: what an engine keeps, says of it and checks.

A client may use each namespace whose salt it has. A retention is released by the key that made it, by an id that only
the answer has; the list has neither ids nor tokens nor salts. A client sees and ends the sessions of its own key; the
operator those of all. Audit and history are for operators: they tell of requests of all namespaces, without tokens or
salts. So are the size of the memory, and who holds what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import AliasChoices, Field

from quire.client.async_engine import ANSWER_TIMEOUT_S, Prompt
from quire.client.process import Core
from quire.engine.config import MOST_EPOCHS
from quire.engine.messages import Later, MemoryReport, ResizeRequest
from quire.serve.closed_object import ClosedObject
from quire.serve.conversation import Conversation
from quire.serve.errors import BadField
from quire.serve.generation import Service
from quire.serve.keys import Client, not_allowed
from quire.serve.protocol import Int32, Messages, SaltText, TemplateVariables, Text, TokenId, field
from quire.serve.sse import while_connected
from quire.settings.setting import Bytes, parse_bytes, parse_tokens
from quire.spec.events import Namespace

Salt = Annotated[SaltText | None, Field(validation_alias=AliasChoices("cache_salt", "salt"))]
"""`cache_salt`, as in a completion; `salt` is the same."""

SessionSalt = Annotated[SaltText, Query(description="The salt of the requests of these sessions.")]

RequestId = Annotated[str, Path(max_length=256)]

TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]

_PROMPTS = ("prompt", "prompt_token_ids", "messages")


class RetainBody(ClosedObject):
    """A prompt in one of three forms, its namespace, and for how long it is to be kept."""

    ttl_seconds: float = field("Seconds for which it is kept.", ..., allow_inf_nan=False)
    prompt: Text | TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateVariables | None = field("Variables of the model's chat template.")
    model: Text | None = field("The model that is served; no other.")
    cache_salt: Salt = field("The salt of the requests that will use it; `salt` is the same.")
    adapter: Text | None = field("This version loads none: leave it out.")
    priority: Int32 | None = field("Higher is released later, where running requests need the room.")
    pin: bool | None = field("Keep it also where running requests need the room.")

    async def tokens(self, service: Service) -> Prompt:
        """The token ids to retain. Raises BadField unless it is given in exactly one form."""
        given = [name for name in _PROMPTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise BadField(f"one of {', '.join(_PROMPTS)} is required; {found}.", param=(given or _PROMPTS)[-1])
        if self.messages is not None:
            turns, variables = [message.turn() for message in self.messages], self.chat_template_kwargs or {}
            conversation = Conversation(messages=turns, variables=variables)
            return (await conversation.rendered(service.tokenising)).token_ids
        found_prompt: Prompt = getattr(self, given[0])
        return found_prompt


class ReleaseBody(ClosedObject):
    """The id that a retention was given."""

    id: Text


class FlushBody(ClosedObject):
    """A namespace, by its salt or adapter or both, or everything. "" is the salt of requests without one."""

    cache_salt: Salt = field("The salt of the namespace; `salt` is the same.")
    adapter: Text | None = field("Its adapter.")
    all: bool | None = field("Everything.")

    def namespace(self) -> Namespace | None:
        """What to flush; None is everything. Raises BadField unless it is clear which."""
        named = self.cache_salt is not None or self.adapter is not None
        if named == bool(self.all):
            raise BadField(
                "say what to flush: a namespace by cache_salt or adapter, or everything, and not both.",
                param="all",
                fix='send {"cache_salt": "..."} or {"all": true}.',
            )
        return Namespace(self.adapter or "", self.cache_salt or "") if named else None


class EpochBody(ClosedObject):
    """How often the weights were replaced."""

    weights_epoch: int = field("Pages of another epoch are never found.", ..., ge=0, lt=MOST_EPOCHS)


class RoleBody(ClosedObject):
    """What the engine does beside others of the same model."""

    role: Literal["prefill", "decode", "both"] = field("Which prompts it computes, and for which engines.", ...)


class PeersBody(ClosedObject):
    """The engines that compute prompts for this one."""

    prefill_peers: list[Text] = field("Where they listen: HOST:PORT. Without any, prompts are computed here.", ...)


_WAIT_S = 10.0


class WaitBody(ClosedObject):
    """How long an answer may take."""

    wait_s: float = field("Seconds until it is answered in any case.", _WAIT_S, ge=0, le=600, allow_inf_nan=False)


class ResizeBody(WaitBody):
    """What the memory should be."""

    device_bytes: Bytes | None = Field(None, description="KV memory on the device: 8GiB, or a number of bytes.")
    host_bytes: Bytes | None = Field(None, description="Host memory for pages.")
    preempt: bool = field("Requests that run give their memory back, wait, and go on later.", False)


Part = Annotated[str | int, Field(union_mode="left_to_right")]


class TenantBody(ClosedObject):
    """A tenant, and those of its terms that change."""

    name: Text = field("The tenant.", ...)
    floor: Part | None = field("KV memory that no other tenant takes from it: a share, or bytes: 25%, 8GiB, 0.")
    ceiling: Part | None = field("KV memory that it may have; null is all.")
    weight: float | None = field("Its part of admissions where requests of several tenants wait.")


def _check_terms(body: RetainBody, client: Client) -> None:
    """A pin takes memory from all others, and a priority ends the retentions of others first: both are the operator's.
    Clients whose keys have no names have priorities among themselves."""
    if body.pin and not client.is_admin:
        raise not_allowed("a pin")
    if client.name and not client.is_admin and (body.priority or 0) > 0:
        raise not_allowed("a priority above 0")


def cache_router(service: Service) -> APIRouter:
    """The routes of what is kept, for `service`."""
    router, engine = APIRouter(), service.engine

    @router.post("/v1/cache/retain")
    async def retain(body: RetainBody, request: Request) -> dict[str, Any]:
        """Retain the cached part of a prompt. `granted_tokens` says how much, `host_tokens` how much of that is on
        lower tiers now, and `reason` why not more; it may be 0."""
        service.check_model(body.model)
        _check_terms(body, request.state.client)
        granted = await engine.retain(
            await while_connected(request.receive, body.tokens(service)),
            ttl_seconds=body.ttl_seconds,
            adapter=body.adapter or "",
            salt=request.state.client.salt(body.cache_salt or ""),
            priority=body.priority or 0,
            pin=bool(body.pin),
            owner=request.state.client.owner,
        )
        found = asdict(granted)
        return {"id": found.pop("retention_id") or None, **found}

    @router.post("/v1/cache/release")
    async def release(body: ReleaseBody, request: Request) -> dict[str, Any]:
        """Keep it no longer. `released` is false if it had expired, was ended for other requests, never existed, or is
        another key's."""
        return {"id": body.id, "released": await engine.ask(Core.release, body.id, request.state.client.sees)}

    @router.get("/v1/cache/retained")
    async def retained() -> dict[str, Any]:
        """The retentions, in the order in which they would be released, and the budget."""
        return asdict(await engine.ask(Core.retained))

    @router.post("/v1/cache/flush")
    async def flush(body: FlushBody, request: Request) -> dict[str, Any]:
        """Delete the cached pages of a namespace, or all pages, in every tier. Running requests continue; no other
        request finds their pages."""
        client: Client = request.state.client
        namespace = body.namespace()
        if not client.is_admin and not (client.is_tenant and namespace is not None):
            raise not_allowed("flushing more than the namespaces of a named key")
        if namespace is not None:
            namespace = Namespace(namespace.adapter, client.salt(namespace.salt))
        service.texts.clear()
        return asdict(await engine.ask(Core.flush, namespace))

    @router.post("/v1/cache/epoch")
    async def epoch(body: EpochBody) -> dict[str, Any]:
        """The weights were replaced: pages cached before are never found again, on any tier."""
        done = await engine.ask(Core.set_weights_epoch, body.weights_epoch)
        return {"weights_epoch": body.weights_epoch, **asdict(done)}

    @router.post("/v1/cache/role")
    async def role(body: RoleBody) -> dict[str, Any]:
        """The engine's role among others changes. Running requests and transfers continue."""
        return {"role": await engine.ask(Core.set_role, body.role)}

    @router.put("/v1/cache/peers")
    async def peers(body: PeersBody) -> dict[str, Any]:
        """The engines that compute prompts for this one are these, and no others. New ones are connected to as at a
        start. What was asked of removed ones is computed here."""
        return {"prefill_peers": await engine.ask(Core.set_prefill_peers, body.prefill_peers)}

    @router.get("/v1/sessions")
    async def sessions(request: Request, cache_salt: SessionSalt = "") -> dict[str, Any]:
        """The sessions of a namespace, the one used last first: the tokens that each holds and has saved, and for how
        long it is kept."""
        client: Client = request.state.client
        found = await engine.ask(Core.sessions, Namespace(salt=client.salt(cache_salt)), client.sees)
        held = sum(each.held_tokens for each in found.sessions)
        return {
            "sessions": [asdict(each) for each in found.sessions],
            "held_tokens": held,
            "budget_tokens": found.budget_tokens,
        }

    @router.delete("/v1/sessions/{session_id:path}")
    async def close(session_id: str, request: Request, cache_salt: SessionSalt = "") -> dict[str, Any]:
        """End a session that no turn will follow, and free what it holds. Its turns that run go on. Cached pages that
        no other request has used are evicted first. `closed` is false if there is none."""
        client: Client = request.state.client
        namespace = Namespace(salt=client.salt(cache_salt))
        closed = await engine.ask(Core.close_session, namespace, session_id, client.sees)
        return {"session_id": session_id, "closed": closed}

    return router


def insight_router(service: Service) -> APIRouter:
    """The routes that say what the engine does, and change nothing, for `service`."""
    router, engine = APIRouter(), service.engine

    @router.get("/v1/cache/statistics")
    async def statistics() -> dict[str, Any]:
        """The engine's counters as they are now, and those of its `server`."""
        return await engine.statistics() | {"server": service.metrics.own_statistics()}

    @router.get("/v1/cache/explain/{request_id}")
    async def explain(request_id: RequestId, request: Request, texts: bool = False) -> dict[str, Any]:
        """Why no more of a request's prompt was cached, for each of its sequences, by the id of its response; 404 where
        that is not known any more, or another key's. To operators it also tells what other namespaces have cached, and
        the `texts` of its reasons if the server keeps them."""
        found = await engine.ask(Core.explain, request_id, request.state.client.sees)
        if not request.state.client.is_admin:
            found = {key: explanation.for_client() for key, explanation in found.items()}
        told = [{"sequence": key, **explanation.to_dict()} for key, explanation in found.items()]
        if texts and request.state.client.is_admin and engine.tokenising is not None:
            for each, (key, explanation) in zip(told, found.items(), strict=True):
                beside = partial(service.texts.beside, explanation.reasons, key, engine.tokenising.tokenizer)
                each["texts"] = await engine.tokenising.aside(beside)
        return {"request_id": request_id, "explanations": told}

    @router.get("/v1/cache/audit")
    async def audit() -> dict[str, Any]:
        """Audit the whole cache beside the steps, and what the canary has found. With `ended` false the engine is so
        busy that the audit goes on; `whole` says that nothing changed meanwhile, so that no page can be lost."""
        return await engine.ask(Core.audit_cache)

    @router.get("/v1/cache/history")
    async def history() -> dict[str, Any]:
        """Frames by tier, group and state: each second of ten minutes and each minute of a day, the highest marks, and
        what held memory when it was short."""
        return await engine.ask(Core.history)

    @router.get("/v1/cache/tree")
    async def tree() -> dict[str, Any]:
        """The prefixes with most pages and most hits, and what each namespace has, without tokens and salts. A
        namespace has the name of its key, or a hash of its salt. Unless it is `whole`, counts are too low."""
        found = asdict(await engine.ask(Core.outline))
        for each in found["namespaces"]:
            each["name"] = named(each.pop("salt"), service.tenants)
        return found

    @router.get("/v1/cache/plan")
    async def plan(
        kv_memory: Annotated[str, Query(description="Bytes of the pools: 8GiB.")] = "",
        max_model_len: Annotated[str, Query(description="The context: 32k.")] = "",
        page_size: Annotated[str, Query(description="Tokens in a page.")] = "",
    ) -> dict[str, Any]:
        """The plan that this engine would have with another budget, context or page size. Nothing changes."""
        asked = {"kv_memory": kv_memory and parse_bytes(kv_memory)}
        asked |= {"max_model_len": max_model_len and parse_tokens(max_model_len)}
        asked |= {"page_size": page_size and parse_tokens(page_size)}
        return await engine.ask(Core.plan_if, {name: int(value) for name, value in asked.items() if value})

    return router


def memory_router(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router, engine = APIRouter(), service.engine

    async def answered(verb: Callable[..., Later[MemoryReport]], asked: Any, wait_s: float) -> dict[str, Any]:
        return asdict(await engine.ask(verb, asked, timeout_s=wait_s + ANSWER_TIMEOUT_S))

    @router.get("/v1/cache/memory")
    async def memory() -> dict[str, Any]:
        """The size of the KV memory and of host memory for pages, and between what they can be."""
        return asdict(await engine.ask(Core.memory))

    @router.post("/v1/cache/resize")
    async def resize(body: ResizeBody) -> dict[str, Any]:
        """Make the memory smaller or larger while requests run. Cached pages leave first, to lower tiers where there
        are some. Unless it is `done`, the `holders` keep the rest, and it goes on as they end."""
        request = ResizeRequest(**{name: getattr(body, name) for name in ResizeRequest.__struct_fields__})
        return await answered(Core.resize, request, body.wait_s)

    @router.post("/v1/cache/memory/release")
    async def release(body: WaitBody) -> dict[str, Any]:
        """Give all KV memory back until it is resumed; the weights stay. Requests that run are preempted, and all wait.
        Cached pages stay on lower tiers, where there are some."""
        return await answered(Core.release_memory, body.wait_s, body.wait_s)

    @router.post("/v1/cache/memory/resume")
    async def resume(body: WaitBody) -> dict[str, Any]:
        """Have the KV memory again. Requests that wait go on."""
        return await answered(Core.resume_memory, body.wait_s, body.wait_s)

    return router


def tenant_router(service: Service) -> APIRouter:
    """The routes of tenants, for `service`."""
    router, engine = APIRouter(), service.engine

    @router.get("/v1/tenants")
    async def tenants() -> dict[str, Any]:
        """Each tenant: its keys, its terms, the bytes that it holds, and what became of its prompts."""
        return {"tenants": [asdict(each) for each in await engine.ask(Core.tenants)]}

    @router.post("/v1/tenants")
    async def change(body: TenantBody) -> dict[str, Any]:
        """Change terms of a tenant while requests run. What it has above a new ceiling is evicted when it next asks for
        room; what is above the floors of others goes when these need it. Terms that cannot be kept change nothing."""
        terms = {name: getattr(body, name) for name in body.model_fields_set - {"name"}}
        return {"tenants": [asdict(each) for each in await engine.ask(Core.set_tenant, body.name, terms)]}

    return router


def named(salt: str, tenants: frozenset[str]) -> str:
    """The name of a namespace for people: that of its key, and a hash of the salt that its client sent."""
    key, slash, rest = salt.partition("/")
    key, own = (key, rest) if slash and key in tenants else ("", salt)
    digest = f"salt {sha256(own.encode()).hexdigest()[:8]}" if own else ""
    return ", ".join(filter(None, (key, digest))) or "without a salt"
