"""PlanSettings: what is asked of a plan. The planner, and the configurators of its pools, read nothing else."""

from __future__ import annotations

from pydantic import InstanceOf, field_validator

from quire.errors import InvalidInput
from quire.plan.devices import Device, Line
from quire.plan.mix import Mix
from quire.plan.parallel import Parallelism
from quire.settings.fields import MEMORY, PoolFields
from quire.settings.setting import Bytes, Tokens, setting
from quire.spec.group import ReachSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.speculation import get_alloc_reserve_per_decode

_LARGEST_GRAPH = 256  # requests
_LOAD = "Load"


class LoadFields(PoolFields):
    """What an operator asks of a plan beside the pools of an engine. Sizes are those of one rank."""

    mem_fraction_static: float | None = setting(
        None,
        "Share of the device for weights and pools, such as 0.85; printed back in bytes.",
        group=MEMORY,
        aliases=("--gpu-memory-utilization",),
    )
    weight_bytes: Bytes | None = setting(
        None, "Bytes of weights on a rank, instead of the estimate.", group=MEMORY, option="--weights"
    )
    max_total_tokens: Tokens | None = setting(None, "At most this many tokens; every pool follows.", group=MEMORY)
    concurrency: int | None = setting(
        None, "Requests of the longest length that must fit at once.", group=_LOAD, otherwise="1", ge=1
    )

    @field_validator("mem_fraction_static")
    @classmethod
    def _share(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < 1:
            raise InvalidInput(f"{value} is not a share.", fix="give a share between 0 and 1, such as 0.85.")
        return value


class PlanSettings(LoadFields):
    """What is asked for. Bytes and tokens are of one rank unless said otherwise. None: the planner chooses.

    Either `kv_memory`, exactly the bytes of the pools, or `rank_device`, of which the pools get what weights and
    working memory leave. The configurators read a copy of these settings with `mix`, `hot` and `windows_only` as the
    planner found them, and with the `concurrency` that it tries, None for as many requests as fit.
    """

    rank_device: InstanceOf[Device] | None = setting(None, "The device of each rank.", option=None)
    draft_weight_bytes: int | None = setting(None, "Bytes of a draft model's weights.", option=None)
    measured: tuple[InstanceOf[Line], ...] | None = setting(
        None, "Lines of the ledger that replace the estimates.", option=None
    )
    mix: InstanceOf[Mix] | None = setting(
        None, "The expected requests, which split the budget unless a ratio is given.", option=None
    )
    parallel: InstanceOf[Parallelism] = setting(Parallelism(), "How the server is divided over ranks.", option=None)
    graph_batch: int | None = setting(None, "Requests of the largest CUDA graph.", option=None)
    graph_bytes: int = setting(0, "Bytes of CUDA graphs beside `kv_memory`.", option=None)
    sampling_bytes: int = setting(0, "Bytes of draws beside `kv_memory`.", option=None)
    latent_bytes: int | None = setting(None, "Bytes of a rank's host memory for latents; None: not known.", option=None)
    hot: InstanceOf[HotBuffers] | None = setting(None, "The hot buffers, if latents are in host memory.", option=None)
    windows_only: bool = setting(
        False, "No layer reads everything, so the tokens of a plan are those of its windows.", option=None
    )

    @property
    def largest_graph(self) -> int:
        """Requests of the largest captured graph that the ledger has room for."""
        return self.graph_batch or min(_LARGEST_GRAPH, self.concurrency or self.max_running_requests)

    @property
    def token_ranks(self) -> int:
        """Ranks that hold a page's tokens in turn."""
        return self.parallel.dcp

    @property
    def group_requests(self) -> int | None:
        """Requests that must fit at once in one attention group; None for as many as fit."""
        return None if self.concurrency is None else -(-self.concurrency // self.parallel.dp)

    @property
    def group_rows(self) -> int:
        """The most requests that run at once in one attention group."""
        return max(1, self.max_running_requests // self.parallel.dp)

    @property
    def expected(self) -> Mix:
        """The expected requests, which the planner has found."""
        assert self.mix is not None
        return self.mix

    def window_tokens(self, reach: ReachSpec, page_size: int) -> int:
        """Tokens of a decoding request in a window pool: its window, the page that begins in, a step's reserve."""
        step = page_size * self.token_ranks
        return reach.tokens + step + ragged(reach, step) + get_alloc_reserve_per_decode(self.speculative_config, step)

    @property
    def states_per_request(self) -> int:
        """States that one request uses: its own and, with prefix caching, two checkpoints.

        With fewer it still runs, and stores no checkpoints.
        """
        return 3 if self.enable_prefix_caching else 1

    def requests_in(self, slots: int) -> int:
        """The number of requests for that many states."""
        return max(min(1, slots), slots // self.states_per_request)


def ragged(reach: ReachSpec, step: int) -> int:
    """Tokens of the two pages that a chunk shares with its neighbours, if chunks begin inside pages of `step`."""
    return 2 * step if reach.kind == "chunk" and reach.tokens % step else 0
