"""The Triton kernels on every kind of step, by the interpreter, in float32: within 1e-6 of the slow answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.attention import attend_selected, paged_attention, paged_attention_lse
from quire.kernels.backend import AttentionBackend
from quire.kernels.fields import KVFields, LatentFields, PagedField
from quire.kernels.page_arrays import shared_runs
from quire.kernels.terms import AttentionTerms
from tests.changes import KERNELS, unless_changed
from tests.covering import covering, few
from tests.kernels.paged_case import PagedCase, Shape
from tests.kernels.stored_case import FORMATS, PAGE
from tests.kernels.test_tiles import pool_of, slow
from tests.kernels.triton.triton_case import (
    OPTIONS,
    TREE,
    check_case,
    check_latents,
    check_step,
    mend_bfloat16,
    stored_pair,
    triton_backend,
)

pytest.importorskip("triton")
pytestmark = [*unless_changed(__name__, *KERNELS), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MIXED = [(90, 1), (70, 20), (20, 20), (310, 1)]


@covering(page_size=[3, 16], programs=[50, 1], options=list(OPTIONS))
def test_decodes_and_chunks_of_one_step(page_size, programs, options):
    case = PagedCase(MIXED, page_size=page_size)
    check_case(case, programs, **OPTIONS[options])


@pytest.mark.parametrize("seed", few(range(60), 1))
def test_every_kind_of_step(seed):
    check_step(seed)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(kv_heads=1, group=1, key_dim=64, value_dim=64),
        Shape(kv_heads=3, group=1, key_dim=20, value_dim=12),
        Shape(kv_heads=1, group=3, key_dim=80, value_dim=96),
        Shape(kv_heads=2, group=40, key_dim=16, value_dim=8),
        Shape(kv_heads=1, group=70, key_dim=8, value_dim=24),
    ],
    ids=["64", "widths", "group of 3", "group of 40", "group of 70"],
)
def test_heads_of_any_size_and_number(shape):
    check_case(PagedCase([(30, 1), (40, 5)], page_size=4, shape=shape), 20, window=25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, monkeypatch):
    mend_bfloat16(monkeypatch)
    case = PagedCase(MIXED, page_size=16, shape=Shape(dtype=dtype))
    check_case(case, 50, close={torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype])


def test_a_pool_of_another_dtype_is_read_in_that_of_the_query():
    case = PagedCase(MIXED, page_size=16)
    for pool in (case.keys, case.values):
        pool.copy_(pool.bfloat16())
    wide = case.expected(scale=0.3)
    case.keys, case.values = case.keys.bfloat16(), case.values.bfloat16()
    case.batch.backend = triton_backend()
    assert (case.attend(scale=0.3).double() - wide).abs().max() < 1e-6


@pytest.mark.parametrize("programs", [1, 60])
def test_latents_are_key_and_value(programs):
    check_latents(programs)


def test_a_window_of_latents():
    check_latents(1, 21)


@pytest.mark.parametrize("name", list(FORMATS))
def test_formats_are_decoded_as_torch_does(name):
    """Bit for bit: the decoded numbers are the same, so that only sums differ."""
    fields = stored_pair(FORMATS[name], 128, 30, PAGE)
    case = PagedCase([(70, 3), (40, 1)], page_size=PAGE, shape=Shape(key_dim=128, value_dim=128))
    _, value = fields.gather(case.new, torch.float32)
    for window in (0, 9):
        case.batch.backend = triton_backend(10)
        found = paged_attention(case.query, fields, case.batch, AttentionTerms(scale=0.05, window=window))
        case.batch.backend = AttentionBackend("torch")
        wanted = paged_attention(case.query, fields, case.batch, AttentionTerms(scale=0.05, window=window))
        assert (found - wanted).abs().max() < 2e-6 * float(value.abs().max())


@covering(past=[3, 60], window=[0, 2, 33])
def test_drafts_that_branch(past, window):
    """Also a tree of more rows than bits of a word."""
    large = [(row - 1) // 3 if row else -1 for row in range(40)]
    trees = [TREE, [-1], list(range(-1, 9)), large, [-1, -1, 0]]
    case = PagedCase([(past + len(tree), len(tree)) for tree in trees], page_size=4, trees=trees)
    check_case(case, window=window)
    chains = PagedCase(case.sequences, page_size=4)
    chains.batch.backend = triton_backend()
    assert (chains.attend(scale=0.3) - case.attend(scale=0.3)).abs().max() > 1e-2


def test_a_prefix_of_a_prefix_is_shared_in_levels():
    """Two families of decodes below one prompt, in rows that are not consecutive, and a chunk; tasks are cut."""
    case = PagedCase([(700, 1), (650, 1), (640, 1), (660, 30), (900, 1)], page_size=16, shared=320)
    case.batch.frames[3, :36] = case.batch.frames[1, :36]
    for r in (1, 3):
        case.slots[r] = case._slots(case.batch.frames[r], case.sequences[r][0], 16)
    runs = list(shared_runs(case.batch.frames, np.array([43, 40, 39, 39, 56]), 16))
    assert len(runs) == 2, "two levels"
    check_case(case, 60)


def test_a_shared_run_is_read_once():
    """By programs that count what they read: tasks of keys, times keys."""
    from quire.kernels.triton.tasks import Blocks, plan_tasks

    case = PagedCase([(2112, 1)] * 16, page_size=16, shared=2048)
    plan = plan_tasks(case.batch, 0, Blocks(8, 32, 2, 1), torch.device("cpu"), chunked=False)
    tasks = plan.arrays["tasks"].view(-1, 5)
    assert int((tasks[:, 3] - tasks[:, 2]).sum()) == 2048 + 16 * 64
    check_case(case)


def test_parts_that_take_too_much_memory_are_not_made(monkeypatch):
    """Then each sequence reads what is shared, and its rows have one part."""
    from quire.kernels.triton import attention
    from quire.kernels.triton.tasks import Blocks, plan_tasks

    case = PagedCase([(340, 12)] * 4, page_size=16, shared=320)
    for most, expected in ((96, 96), (95, 0)):
        blocks = Blocks(8, 32, 2, 1, most)
        assert plan_tasks(case.batch, 0, blocks, torch.device("cpu"), chunked=False).num_parts == expected
    monkeypatch.setattr(attention, "PARTS_BYTES", 100)
    check_case(case)


def test_keys_are_cut_until_the_device_is_busy():
    from quire.kernels.triton.tasks import Blocks, plan_tasks

    case = PagedCase([(4000, 1), (100, 1)], page_size=16)
    for wanted, tasks in ((1, 2), (8, 5), (1000, 17)):
        plan = plan_tasks(case.batch, 0, Blocks(8, 32, 2, wanted), torch.device("cpu"), chunked=False)
        assert plan.num_tasks == tasks


@pytest.mark.parametrize("programs", [1, 99])
def test_selected_tokens(programs):
    """Some rows have nothing to see: zeros and -inf."""
    tokens, rows = pool_of(50)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(5, 3, 8, generator=generator)
    slots = torch.randint(0, 49, (5, 700), generator=generator)
    hidden = torch.rand(5, 700, generator=generator) < 0.5
    hidden[3], hidden[4, 256:] = True, True
    slots[:, 0], hidden[:, 0] = 49, True
    tokens._first.stored[0].view(-1, tokens._first.stored[0].shape[-1])[49] = torch.nan
    out, lse = attend_selected(query, tokens, slots, hidden, AttentionTerms(scale=0.4), triton_backend(programs))
    for row in range(5):
        if row == 3:
            assert not out[row].any()
            assert (lse[row] == -torch.inf).all()
            continue
        wanted, wanted_lse = slow(query[row], rows[slots[row][~hidden[row]]], 0.4)
        assert (out[row] - wanted).abs().max() < 1e-6
        assert (lse[row] - wanted_lse).abs().max() < 2e-6


def test_the_log_sum_exp_of_pages():
    case = PagedCase(MIXED, page_size=16)
    fields = KVFields(PagedField(case.keys), PagedField(case.values))
    found = []
    for backend in (triton_backend(50), AttentionBackend("torch")):
        case.batch.backend = backend
        found.append(paged_attention_lse(case.query, fields, case.batch, AttentionTerms(scale=0.3, window=30)))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).abs().max() < 2e-6


def test_a_sequence_without_rows_and_rows_of_no_sequence():
    case = PagedCase([(20, 0), (30, 1)], page_size=16)
    case.batch.backend = triton_backend()
    assert case.error(scale=0.3) < 1e-6
    case.query = torch.cat((case.query, torch.full_like(case.query, torch.nan)))
    assert not case.attend(scale=0.3)[1:].any(), "padding is zeros, not what was in memory"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"scale": 0.3}, {"scale": 0.33}),
        ({"scale": 0.3, "window": 20}, {"scale": 0.3, "window": 21}),
        ({"scale": 0.3, "window": 20, "chunked": True}, {"scale": 0.3, "window": 20}),
        ({"scale": 0.3, "softcap": 3.0}, {"scale": 0.3}),
        ({"scale": 0.3, "sinks": torch.ones(4)}, {"scale": 0.3}),
    ],
)
def test_the_comparison_notices_a_wrong_option(right, wrong):
    case = PagedCase([(90, 1), (70, 20)], page_size=16)
    case.batch.backend = triton_backend()
    assert (case.attend(**wrong).double() - case.expected(**right)).abs().max() > 1e-3


def test_what_the_kernels_cannot_read_is_counted():
    """Heads that are too large for shared memory go to torch, with the same answer."""
    case = PagedCase([(9, 1)], page_size=4, shape=Shape(kv_heads=1, group=1, key_dim=516, value_dim=8))
    backend = case.batch.backend = triton_backend()
    assert case.error(scale=0.05) < 1e-5
    assert backend.fallbacks == {"head size": 1}
    assert backend.calls == {"torch": 1}
    reader = LatentFields(PagedField(case.keys), PagedField(case.values))
    assert backend.kernel(case.query.double(), reader) is None
    assert backend.fallbacks["dtype"] == 1
