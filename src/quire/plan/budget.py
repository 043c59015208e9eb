"""Sizes as text, and MemoryPlan: the one object from which pools are built and requests admitted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from quire.errors import ContextTooLong, InvalidInput, PlanError, RequestTooLarge
from quire.settings.setting import format_bytes as format_bytes
from quire.spec.arena import ArenaLayout
from quire.spec.group import GroupSpec
from quire.spec.hisparse import RESIDENT, HotBuffers, Resident
from quire.spec.layers import INDEX_KEYS, KEY_BOUNDS
from quire.spec.pages import pages_for
from quire.spec.record_size import region_bytes
from quire.spec.speculation import (
    SpeculativeConfig,
    get_alloc_len_per_decode,
    get_drafts_beyond_end,
    get_kept_features,
    get_req_to_token_extra_context_len,
)


def counted(number: int, noun: str) -> str:
    """A number of things: `1 page`, `2,048 pages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def round_up_bytes(size: int) -> str:
    """`size` or a little more, in KiB, MiB or hundredths of a GiB, as input for `parse_bytes`."""
    if size >= 16 * 2**30:
        hundredths = -(-size * 100 // 2**30)
        return f"{hundredths // 100}.{hundredths % 100:02} GiB"
    unit, name = (2**20, "MiB") if size >= 16 * 2**20 else (2**10, "KiB")
    return f"{-(-size // unit)} {name}"


_BYTES_PER_ID = 4  # int32, of a page and of a token
MOST_IDS = 2**31
"""Numbers of int32 from 0 on: of slots of tokens, and of entries of page tables."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The object from which the pools are built and requests are admitted, so that they cannot disagree.

    `num_pages` is the number of pages of tokens. The group at index i has `frames[i]` frames, `num_pages` if `frames`
    is empty, and frame 0, the padding, which `pool_bytes` includes. `context` is the longest sequence in tokens, prompt
    and output together. `speculation` None: one token per request and step. `vector_bytes` are those of a hidden state
    of the target. With `token_ranks` above one, that many
    ranks hold a page's tokens in turn, so a page has `page_size` on each of them. With `hot`, the frames of its group
    are in host memory, and the device has a hot buffer for each request instead. With an `arena` the two groups share
    its bytes, `frames` say how these would be split, and `num_pages` is what the largest request can have. `at_rest`
    are the frames of each group that the load of `frames` has cached once its requests have ended; none given: these.
    """

    page_size: int
    groups: tuple[GroupSpec, ...]
    num_pages: int
    context: int
    max_requests: int
    frames: tuple[int, ...] = ()
    at_rest: tuple[int, ...] = ()
    speculation: SpeculativeConfig | None = None
    token_ranks: int = 1
    vector_bytes: int = 0
    hot: HotBuffers | None = None
    arena: ArenaLayout | None = None

    @cached_property
    def tokens_per_page(self) -> int:
        """Tokens of one page, over all ranks that hold a part of it."""
        return self.page_size * self.token_ranks

    def frames_of(self, group: int) -> int:
        """Frames of the group at that index, without the padding frame; in an arena its largest frame id."""
        if self.arena is not None:
            return self.arena.last_id(group)
        return self.split[group]

    @property
    def split(self) -> tuple[int, ...]:
        """Frames of each group that the expected load uses; without an arena, those that there are."""
        return self.frames or (self.num_pages,) * len(self.groups)

    @property
    def _latents(self) -> Resident:
        return self.hot or RESIDENT

    @property
    def groups_on_host(self) -> tuple[int, ...]:
        """Groups whose frames are in host memory, beside hot buffers on the device."""
        return self._latents.groups

    @property
    def hot_frames_per_row(self) -> int:
        """Device frames of one request's hot buffer; 0 without hot buffers."""
        return self._latents.frames_per_row(self.page_size)

    def device_frames_of(self, group: int) -> int:
        """Frames of the group's pool on the device, without the padding frame.

        A group of latents in host memory has hot buffers there: `hot_frames_per_row` frames for each request.
        """
        if group in self.groups_on_host:
            return self.max_requests * self.hot_frames_per_row
        return self.frames_of(group)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page on the device, in all groups; latents in host memory are not among them."""
        on_host = self.groups_on_host
        return sum(group.layout.bytes_per_frame for index, group in enumerate(self.groups) if index not in on_host)

    def check_numbers(self) -> None:
        """Raise PlanError if a cache of this plan would need numbers of more than 32 bits."""
        rows, tokens = self.max_requests * self.pages_per_row, self.num_pages * self.tokens_per_page
        if rows >= MOST_IDS:
            raise PlanError(
                f"page tables of {counted(self.max_requests, 'request')} of {counted(self.pages_per_row, 'page')} "
                f"have {rows:,} entries; the most is {MOST_IDS - 1:,}.",
                fix="lower --max-running-requests or --max-model-len, or give larger pages with --page-size.",
            )
        if tokens >= MOST_IDS:
            raise PlanError(
                f"the pools hold {tokens:,} tokens; the most is {MOST_IDS - 1:,}.",
                fix=f"give --max-total-tokens {MOST_IDS // 2:,} or less, or less KV memory.",
            )

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools' tensors on the device."""
        if self.arena is not None:
            return self.arena.budget
        return sum(
            (self.device_frames_of(index) + 1) * group.layout.bytes_per_frame for index, group in enumerate(self.groups)
        )

    @property
    def room_bytes(self) -> int:
        """Bytes of all frames that requests can have, in any memory, without padding."""
        if self.arena is not None:
            return self.arena.room
        return sum(n * group.layout.bytes_per_frame for n, group in zip(self.split, self.groups, strict=True))

    @property
    def host_bytes(self) -> int:
        """Bytes of the records of latents whose frames are in host memory; 0 if all frames are on the device."""
        held = self.groups_on_host
        return sum(region_bytes(self.groups[at].layout.bytes_per_frame, self.frames_of(at)) for at in held)

    def within(self, most: MemoryPlan) -> MemoryPlan:
        """This plan with no more frames than `most` has, and its requests. Latents in host memory are as in `most`."""
        pairs = enumerate(zip(self.frames, most.frames, strict=True))
        frames = tuple(given if at in most.groups_on_host else min(own, given) for at, (own, given) in pairs)
        return replace(
            self, frames=frames, num_pages=min(self.num_pages, most.num_pages), max_requests=most.max_requests
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at once."""
        return self.num_pages * self.tokens_per_page

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a decoding request may write in one step."""
        return get_alloc_len_per_decode(self.speculation, self.tokens_per_page)

    @property
    def pages_per_row(self) -> int:
        """Pages that a request's row has room for: its context, and how far a step may write beyond it."""
        extra = get_req_to_token_extra_context_len(self.speculation, self.tokens_per_page)
        return pages_for(self.context + extra, self.tokens_per_page)

    @property
    def row_bytes(self) -> int:
        """Bytes of the host tables of all requests: their page ids, and their tokens."""
        return self.max_requests * self.pages_per_row * (1 + self.tokens_per_page) * _BYTES_PER_ID

    @property
    def index_owners(self) -> tuple[int, ...]:
        """Ordinals of the calls with index keys, or bounds of pages, of their own."""
        fields = [field for group in self.groups for field in group.layout.fields]
        owning = [field for field in fields if field.name in (INDEX_KEYS, KEY_BOUNDS[0])]
        return tuple(sorted(layer for field in owning for layer in field.layers))

    @property
    def slot_table_bytes(self) -> int:
        """Bytes of the host tables of all hot buffers' slots; 0 without hot buffers."""
        return self.max_requests * len(self.index_owners) * self._latents.slot_table_bytes(self.context)

    @property
    def kept_features(self) -> int:
        """Positions of each request whose features, and outputs, a draft head keeps between steps; 0 without a head."""
        return get_kept_features(self.speculation, self.tokens_per_page)

    @property
    def feature_bytes(self) -> int:
        """Bytes of these on the device, beside the pools."""
        return 2 * self.max_requests * self.kept_features * self.vector_bytes

    @cached_property
    def _beyond(self) -> int:
        return get_drafts_beyond_end(self.speculation, self.tokens_per_page)

    @cached_property
    def largest_request(self) -> int:
        """The longest request that is ever admitted, prompt and output together, in tokens.

        The last output token is drawn but never written, so one more than fits; with speculation, the tokens that a
        step may write and reject must fit too.
        """
        return max(0, min(self.context, self.num_tokens + 1 - self._beyond))

    def pages_of(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens, prompt and output together, holds at its end."""
        return pages_for(num_tokens - 1 + self._beyond, self.tokens_per_page) if num_tokens > 1 else 0

    @property
    def attention_identity(self) -> tuple[bytes, ...]:
        """What keys of pages have beside the model: with lossy attention, what decoding rows compute depends on it."""
        return self._latents.identity

    def check_request(self, prompt: int, max_tokens: int) -> None:
        """Refuse a request that can never run here, with the numbers.

        Raises ContextTooLong or RequestTooLarge. All others have a `pages_of` of at most `num_pages`.
        """
        total = prompt + max_tokens
        if prompt < 1:
            raise InvalidInput("the prompt is empty.", fix="send at least one token.")
        if max_tokens < 1:
            raise InvalidInput(f"max_tokens is {max_tokens}.", fix="ask for at least one token.")
        if total > self.context:
            raise ContextTooLong(
                f"{counted(prompt, 'prompt token')} and {counted(max_tokens, 'output token')} make {total:,}; the "
                f"context is {self.context:,} tokens.",
                tokens=total,
                context=self.context,
                fix=f"{self._smaller(prompt, max_tokens)}.",
            )
        if self.pages_of(total) > self.num_pages:
            need = self.pool_bytes + (self.pages_of(total) - self.num_pages) * self.bytes_per_page
            beside, more = "", ""
            if self.groups_on_host:
                frames = [self.groups[at].layout.bytes_per_frame for at in self.groups_on_host]
                held = 2 * sum(region_bytes(size, self.pages_of(total)) for size in frames)  # tiers take half
                beside = f" and {format_bytes(self.host_bytes)} of latents in host memory"
                more = f" and --host-memory {-(-held // 2**20)}MiB"
            raise RequestTooLarge(
                f"{counted(prompt, 'prompt token')} and {counted(max_tokens, 'output token')} need "
                f"{counted(self.pages_of(total), 'page')} of {counted(self.tokens_per_page, 'token')}; "
                f"this server has {self.num_pages:,} in all ({format_bytes(self.pool_bytes)} of KV memory{beside}), so "
                f"it can never hold more than {counted(self.largest_request, 'token')} in one request.",
                fix=f"{self._smaller(prompt, max_tokens)}, or start the server with at least "
                f"--kv-memory {-(-need // 2**20)}MiB{more}.",
            )

    def _smaller(self, prompt: int, max_tokens: int) -> str:
        """The lengths to ask for instead, so that prompt and output together fit."""
        limit = self.largest_request
        if prompt < limit:
            return f"lower max_tokens to {limit - prompt:,}"
        if max_tokens < limit:
            return f"shorten the prompt to at most {limit - max_tokens:,} tokens"
        return f"shorten the prompt to at most {limit - 1:,} tokens and lower max_tokens to 1"
