"""The selective scan against its definition, one token at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import selective_scan as module
from quire.kernels.selective_scan import linear_scan, selective_scan

CHANNELS, SIZE = 6, 5
LENGTHS = (1, 2, 3, 4, 5, 9, 16, 17, 50)


def naive(x: Tensor, dt: Tensor, rates: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, rates, key, query, state = (tensor.double() for tensor in (x, dt, rates, key, query, state))
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * rates)
        state = decay * state + dt[:, t, :, None] * key[:, t, None, :] * x[:, t, :, None]
        outputs.append((state * query[:, t, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), state


def case(length: int, pieces: int = 2, step: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        draw(pieces, length, CHANNELS),
        step * torch.nn.functional.softplus(draw(pieces, length, CHANNELS)),
        -torch.exp(draw(CHANNELS, SIZE)),
        draw(pieces, length, SIZE),
        draw(pieces, length, SIZE),
        draw(pieces, CHANNELS, SIZE),
    )


def assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).abs().max() < 2e-6 * (1 + exact.abs().max())


@pytest.mark.parametrize("length", LENGTHS)
def test_is_the_recurrence(length):
    inputs = case(length)
    before = inputs[-1].clone()
    assert_close(selective_scan(*inputs), naive(*inputs))
    assert torch.equal(inputs[-1], before), "the initial state belongs to a request"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_segments_continue(length, tokens, monkeypatch):
    monkeypatch.setattr(module, "_SEGMENT_NUMBERS", tokens * CHANNELS * SIZE)
    assert_close(selective_scan(*case(length)), naive(*case(length)))


@pytest.mark.parametrize("cut", [1, 7, 16, 49])
def test_pieces_continue(cut):
    x, dt, rates, key, query, state = case(50)
    whole = selective_scan(x, dt, rates, key, query, state)
    first, between = selective_scan(x[:, :cut], dt[:, :cut], rates, key[:, :cut], query[:, :cut], state)
    rest, last = selective_scan(x[:, cut:], dt[:, cut:], rates, key[:, cut:], query[:, cut:], between)
    assert_close((torch.cat((first, rest), dim=1), last), tuple(tensor.double() for tensor in whole))


@pytest.mark.parametrize("step", [1e-6, 1e3])
def test_decays_near_one_and_near_zero(step):
    assert_close(selective_scan(*case(50, step=step)), naive(*case(50, step=step)))


def test_a_piece_does_not_depend_on_its_neighbours():
    x, dt, rates, key, query, state = case(17, pieces=3)
    together, last = selective_scan(x, dt, rates, key, query, state)
    for i in range(3):
        one = slice(i, i + 1)
        alone, own = selective_scan(x[one], dt[one], rates, key[one], query[one], state[one])
        assert torch.equal(together[one], alone)
        assert torch.equal(last[one], own)


@pytest.mark.parametrize("length", LENGTHS)
def test_linear_scan(length):
    generator = torch.Generator().manual_seed(length)
    decays = torch.rand(2, length, CHANNELS, generator=generator)
    inputs = torch.randn(2, length, CHANNELS, generator=generator)
    state = torch.randn(2, CHANNELS, generator=generator)
    before = [tensor.clone() for tensor in (decays, inputs, state)]
    found = linear_scan(decays, inputs, state)
    wanted, last = [], state.double()
    for t in range(length):
        last = decays[:, t].double() * last + inputs[:, t].double()
        wanted.append(last)
    assert_close(found, (torch.stack(wanted, dim=1), last))
    assert all(torch.equal(now, then) for now, then in zip((decays, inputs, state), before, strict=True))
