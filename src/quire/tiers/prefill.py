"""PrefillPeers: the port to engines that compute prompts for this one and write the pages to its host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer


class PrefillAsk(Protocol):
    """One prompt that a peer computes, until `release`. A transfer handed to `want` is on Lane.RECEIVE, and not
    submitted to the mover: a peer writes to its host frames until `PrefillPeers.settle` returns it."""

    seconds: float
    """How long the request waits."""
    label: str
    """What operators call the peer."""
    why: str
    """Why it has ended without the whole prompt; "" while it has not."""

    def want(self, transfer: Transfer, places: Sequence[np.ndarray]) -> None:
        """The peer writes these units, which are pages of the prompt at `places`, when it has computed them."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and what has not arrived will not be used."""

    def stop(self, cause: str = "") -> None:
        """What has not arrived is not wanted. `cause` is "deadline" or "damaged"; "": its request began or ended."""

    def release(self, num_tokens: int) -> None:
        """All its transfers are settled; so many tokens of the prompt arrived whole."""


class PrefillPeers:
    """Here no engine computes prompts for this one. One thread, the engine's, calls all methods; none of them waits."""

    asks = False
    """Whether there are peers to ask, connected or not."""

    def ask(self, tokens: Ids, namespace: Namespace, num_missing: int) -> PrefillAsk | None:
        """Ask a peer to compute whole pages of a prompt, whose last `num_missing` tokens are not here. None if no
        peer can be asked, or if that is not worth it."""
        return None

    def why_local(self, num_missing: int) -> str:
        """Why no peer could compute so many tokens now; "" if one could."""
        return ""

    def settle(self) -> list[tuple[Transfer, str]]:
        """Transfers whose frames no peer writes to any more: "" if all bytes have landed, or why they have not."""
        return []
