"""The check every model passes at load: a mixed step on scattered frames against the model's own forward pass.

step      sequence 0      sequence 1
1         0..6 chunk
2         6..10 chunk     0..5 chunk
3         10 decode       5..8 chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelCheckFailed
from quire.kernels.batch import PagedBatch
from quire.kernels.state import StateBatch
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.models.forward import RunningForward
from quire.plan.budget import MemoryPlan
from quire.sparse.coordinator import HiSparseCoordinator
from quire.spec.group import GroupSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.layout import DType
from quire.upload import to_device

if TYPE_CHECKING:
    from quire.models.hf import LoadedModel

_PAGE_SIZE = 4  # or more, if a page must hold a block of tokens that share an entry
_STEPS = (((0, 6), (0, 0)), ((6, 10), (0, 5)), ((10, 11), (5, 8)))
"""Per step, the positions each of the two sequences computes."""
_FRAMES = np.array([[5, 2, 4], [3, 1, 0]], dtype=np.int32)
"""Page tables: scattered, so that neither order nor adjacency helps. Each group's are shifted by one more frame."""
_CUT = 8
_STATE_FRAMES = ((5, 2), (3, 4))
"""Per sequence, the frame of its state before position `_CUT` and the frame of its state from there on."""
_TOLERANCE = {DType.FLOAT32: 2e-3, DType.FLOAT16: 5e-2, DType.BFLOAT16: 2e-1}
"""Largest accepted error of a row of logits, relative to the row's norm. A wrong scale, mask or key costs 0.3 to 2."""


def plain_logits(model: LoadedModel) -> list[Tensor]:
    """The logits of each sequence of the check by the model's own code, as its weights and layers are now."""
    return [model.plain_logits(to_device(tokens, model.device)) for tokens in _tokens(model.spec.vocab_size)]


def check_forward(model: LoadedModel, hot: HotBuffers | None = None, *, plain: Sequence[Tensor] = ()) -> None:
    """Raise ModelCheckFailed unless the paged steps give the plain logits, by default those of now. The pool starts as
    NaN: no wrong read escapes. With `hot`, its group is in host memory, and the step of one row reads a hot buffer."""
    tokens = _tokens(model.spec.vocab_size)
    plain = plain or plain_logits(model)
    groups = model.spec.groups(model.spec.page_size(_PAGE_SIZE))
    pools = [Pool(group.layout, int(_FRAMES.max()), device=model.device) for group in groups]
    filled = list(pools)
    if hot is not None:
        hisparse = _hot_buffers(groups, hot, model.device)
        pools[hot.group] = hisparse.hosted
        filled += [hisparse.hosted, hisparse.pool]
    for _, tensor in (field for pool in filled for field in pool.tensors):
        tensor.fill_(float("nan"))
    errors: list[float] = []
    for step in _STEPS:
        logits = _run_step(model, groups, pools, step, tokens)
        wanted = torch.cat([plain[i][start:stop] for i, (start, stop) in enumerate(step)])
        errors += ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)).tolist()
    _judge(model, np.array(errors))


def _tokens(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, stop) for _, stop in (steps[-1] for steps in zip(*_STEPS, strict=True))]


def _hot_buffers(groups: Sequence[GroupSpec], hot: HotBuffers, device: torch.device) -> HiSparseCoordinator:
    """Small buffers, and host memory that lives as long as its views."""
    frames, page_size = int(_FRAMES.max()), groups[hot.group].layout.page_size
    small = replace(hot, buffer_size=max(stop for step in _STEPS for _, stop in step))
    plan = MemoryPlan(
        page_size=page_size, groups=tuple(groups), num_pages=frames, context=page_size, max_requests=2, hot=small
    )
    host = HostPool(groups, [frames] * len(groups))
    hosted = Pool(groups[hot.group].layout, rows=torch.from_numpy(host.payloads(hot.group)), reader=device)
    return HiSparseCoordinator(plan, hosted, device)


def _run_step(
    model: LoadedModel,
    groups: Sequence[GroupSpec],
    pools: Sequence[Pool],
    step: tuple[tuple[int, int], ...],
    tokens: list[np.ndarray],
) -> Tensor:
    """Logits of every row of one step."""
    positions = np.concatenate([np.arange(start, stop) for start, stop in step])
    present = [i for i, (start, stop) in enumerate(step) if stop > start]
    starts, stops = np.array(step)[present].T
    input_ids = np.concatenate([tokens[i][start:stop] for i, (start, stop) in enumerate(step)])
    states = _states(step, present)
    batches = [
        states
        if group.reach.in_place
        else PagedBatch.of((_FRAMES[present] + i) % _FRAMES.size, starts, stops, group.layout.page_size)
        for i, group in enumerate(groups)
    ]
    for batch in batches:
        if isinstance(batch, PagedBatch):
            batch.ids = np.array(present)
    tensors = (input_ids, positions, np.arange(len(positions)))
    running = RunningForward(pools, batches)
    return model.run(running, *(to_device(array, model.device) for array in tensors))


def _states(step: tuple[tuple[int, int], ...], present: list[int]) -> StateBatch:
    """Each sequence alternates between two frames, and a chunk that crosses `_CUT` is cut there."""
    starts, sources, targets = [0], [], []
    for i in present:
        start, stop = step[i]
        for low, high in ((start, min(stop, _CUT)), (max(start, _CUT), stop)):
            if high > low:
                before = starts[-1]
                starts.append(before + high - low)
                sources.append(_STATE_FRAMES[i][low >= _CUT] if low else 0)
                targets.append(_STATE_FRAMES[i][high >= _CUT])
    return StateBatch(*(np.array(numbers, dtype=np.int32) for numbers in (starts, sources, targets)))


def _judge(model: LoadedModel, errors: np.ndarray) -> None:
    """In float32 every row counts. In lower precision the median counts, since near ties may go either way."""
    tolerance = _TOLERANCE[model.spec.dtype]
    error = float(errors.max() if model.spec.dtype is DType.FLOAT32 else np.median(errors))
    if np.isnan(errors).any() or error > tolerance:
        shown = "reads memory that was never written" if np.isnan(errors).any() else f"differs by {error:.2g}"
        raise ModelCheckFailed(
            f"'{model.name}' ({model.spec.architecture}, {model.spec.dtype}) on paged memory {shown} from its plain "
            f"forward pass, relative to the logits; at most {tolerance:g} is accepted. It is not served.",
            fix="use a model type listed as verified, or float32; please report this architecture.",
        )
