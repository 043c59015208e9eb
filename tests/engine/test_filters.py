"""Filters by counting, which a device uses, keep what sorting keeps, and take the memory that is planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from quire.engine.device import filters
from quire.engine.device.sampler import Sampler
from quire.plan import devices
from quire.plan.devices import sampling_bytes
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import DEVICE, slow_unless_changed
from tests.engine.test_sampler import places, request
from tests.fake_cuda import FakeCuda

ROWS = 250


def kinds_of_rows(seed: int, rows: int, vocabulary: int) -> Tensor:
    """Scores: spread and flat, of few values, so that most are equal, with excluded tokens, and all equal."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(rows, vocabulary)).astype(np.float32) * rng.choice([0.01, 1, 8], (rows, 1))
    kind = rng.integers(0, 5, rows)
    found[kind == 1] = np.round(found[kind == 1])
    found[kind == 2] = np.round(found[kind == 2] * 4) / 4
    found[(kind == 3)[:, None] & (rng.random(found.shape) < 0.3)] = -np.inf
    found[kind == 4] = rng.choice([0.0, -0.0, 1.0], (rows, 1))[kind == 4]
    return torch.from_numpy(found.astype(np.float32))


def check_counting(seed: int, vocabulary: int = 300) -> None:
    """The same threshold as in a sorted row, for shares that sums meet exactly too."""
    rng, scores = np.random.default_rng(seed), kinds_of_rows(seed, ROWS, vocabulary)
    probabilities = torch.softmax(scores, -1, dtype=torch.float64)
    top_k = torch.from_numpy(np.where(rng.random(ROWS) < 0.5, vocabulary, rng.integers(1, vocabulary, ROWS)))
    descending = probabilities.sort(-1, descending=True).values
    some = torch.from_numpy(rng.integers(0, vocabulary, ROWS))[:, None]
    met = filters.shares_of(descending).cumsum(-1).gather(1, some)[:, 0].double() / 2**52
    met = torch.where(torch.from_numpy(rng.random(ROWS) < 0.5), met, torch.from_numpy(rng.random(ROWS)))
    for top_p in (met.clamp(1e-9, 1.0), torch.full_like(met, 1 - 2.0**-40), torch.ones_like(met)):
        expected = filters._prefix_end(descending, top_k, top_p, vocabulary)
        found = filters.least_of_all(scores, probabilities, top_k, top_p, limits=True)
        assert torch.equal(found, expected)
        whole = torch.full_like(top_k, vocabulary)
        expected = filters._prefix_end(descending, whole, top_p, vocabulary)
        assert torch.equal(filters.least_of_all(scores, probabilities, whole, top_p, limits=False), expected)


@pytest.mark.parametrize("seed", range(6))
def test_counting_keeps_what_sorting_keeps(seed: int) -> None:
    check_counting(seed)


@slow_unless_changed(*DEVICE)
def test_draws_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 rows, of which most are looked at as a whole, in blocks of few rows."""
    monkeypatch.setattr(filters, "_MOST_CANDIDATES", 20)
    monkeypatch.setattr(devices, "_MOST_SAMPLED", 17 * 300)
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 2.0},
        {"top_k": 150, "top_p": 0.7},
        {"top_k": 5},
        {"top_k": 40, "min_p": 0.01},
        {"min_p": 0.2, "top_p": 0.99},
        {},
    ]
    scores = kinds_of_rows(7, 2000, 300)
    many = [request(SamplingParams(seed=at, **kinds[at % len(kinds)]), name=str(at)) for at in range(len(scores))]
    expected = Sampler([]).draw(scores.clone(), places(many)).tokens
    with FakeCuda().installed():
        found = Sampler([]).draw(scores.clone().to("cuda"), places(many)).tokens.cpu()
    assert torch.equal(found, expected)


class _Peak(TorchDispatchMode):
    """The most bytes of memory at once that operators have allocated inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {StorageWeakRef(each.untyped_storage()).cdata for each in _tensors((args, kwargs))}
        for tensor in _tensors(found):
            made = StorageWeakRef(tensor.untyped_storage())
            if made.cdata not in given:
                self._known[made.cdata] = made, tensor.untyped_storage().nbytes()
        self._known = {at: each for at, each in self._known.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._known.values()))
        return found


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


@slow_unless_changed(*DEVICE)
@pytest.mark.parametrize("rows", [3, 16, 40])
def test_draws_take_the_memory_that_is_planned(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each row has filters and reports log-probabilities; and not much less."""
    vocabulary = 20_000
    monkeypatch.setattr(devices, "_MOST_SAMPLED", 8 * vocabulary)
    params = SamplingParams(seed=1, top_k=4000, top_p=0.9999, logprobs=2)
    many = places([request(params, name=str(at)) for at in range(rows)])
    with FakeCuda().installed():
        sampler, logits = Sampler([]), torch.randn(rows, vocabulary).to("cuda")
        prepared = sampler.prepare(many, logits.device)
        with _Peak() as peak:
            sampler.draw(logits, many, prepared=prepared)
    taken, planned = peak.most + logits.inner.nbytes, sampling_bytes(rows, vocabulary)
    assert planned / 2 < taken <= planned, f"{taken / vocabulary / rows} of {planned / vocabulary / rows}"
