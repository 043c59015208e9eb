"""Drafts that branch: each has the logits of the text that ends with it, or the model refuses them by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModel
from quire.kernels.batch import PagedBatch
from quire.kernels.moves import TORCH
from quire.memory.pool import Pool
from quire.models.forward import RunningForward, slots_of
from quire.models.hf import LoadedModel
from tests.changes import MODELS, unless_changed
from tests.covering import few
from tests.memory.layouts import PAGE_SIZES, layouts
from tests.tiny_hybrids import build_hybrid
from tests.tiny_latents import build_latent
from tests.tiny_models import VOCAB_SIZE, build_tiny

pytestmark = unless_changed(__name__, *MODELS)

PROMPT = 70
TREE = [-1, *(-(-row // 3) - 1 for row in range(1, 24))]  # three drafts behind each
FIRST = [0, 1, 4, 13]
"""A path of it, that is accepted."""


def model_of(name: str, **changes: object) -> LoadedModel:
    kinds = {"llama_gqa": build_tiny, "deepseek_v3": build_latent, "deepseek_v32": build_latent}
    return LoadedModel(kinds.get(name, build_hybrid)(name, **changes), name=name, check=False)


class Text:
    """One sequence on scattered frames, in pools that are NaN where nothing is written."""

    def __init__(self, model: LoadedModel, page_size: int = 16) -> None:
        self.model = model
        self.page_size = page_size
        self.groups = model.spec.groups(page_size)
        self.frames = np.random.default_rng(5).permutation(np.arange(1, 11))[None].astype(np.int32)
        self.pools = [Pool(group.layout, 11) for group in self.groups]
        for _, tensor in (pair for pool in self.pools for pair in pool.tensors):
            tensor.fill_(torch.nan)

    def slots(self, rows: np.ndarray) -> np.ndarray:
        positions, size = PROMPT + rows, self.page_size
        return (self.frames[0, positions // size] * size + positions % size).astype(np.int32)

    def run(self, tokens: list[int], past: int, parents: list[int] | None = None) -> torch.Tensor:
        ends = np.array([past]), np.array([past + len(tokens)])
        tree = None if parents is None else np.array(parents, dtype=np.int32)
        batches = [PagedBatch.of(self.frames, *ends, self.page_size, tree) for _ in self.groups]
        positions = torch.from_numpy(batches[0].positions())
        return self.model.run(
            RunningForward(self.pools, batches), torch.tensor(tokens), positions, torch.arange(len(tokens))
        )


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_text", "deepseek_v3"])
def test_a_draft_has_the_logits_of_its_own_text(name: str) -> None:
    """24 drafts, which latent attention expands. Then an accepted path moves to where the prompt ends."""
    model = model_of(name)
    text = Text(model)
    prompt, *drafts = np.split(np.random.default_rng(2).integers(0, VOCAB_SIZE - 1, PROMPT + len(TREE)), [PROMPT])
    tokens = drafts[0].tolist()
    text.run(prompt.tolist(), 0)
    logits = text.run(tokens, PROMPT, TREE)
    for row in range(len(TREE)):
        path = [row]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        wanted = model.plain_logits(torch.tensor([*prompt.tolist(), *(tokens[at] for at in path)]))[-1]
        assert (logits[row] - wanted).abs().max() < 1e-3
    sources, targets = (torch.from_numpy(text.slots(np.array(rows))).long() for rows in (FIRST, range(len(FIRST))))
    for pool in text.pools:
        TORCH.move(slots_of(pool), sources, targets)
    accepted = [*prompt.tolist(), *(tokens[at] for at in FIRST), 7]
    wanted = model.plain_logits(torch.tensor(accepted))[-1]
    assert (text.run([7], len(accepted) - 1)[0] - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "what"),
    [("deepseek_v32", "an indexer"), ("llama4_text", "chunked attention"), ("deepseek_v4", "compressed attention")],
)
def test_what_cannot_verify_branches_says_so(name: str, what: str) -> None:
    text = Text(model_of(name), page_size=128)
    with pytest.raises(UnsupportedModel, match=what):
        text.run(list(range(len(TREE))), 0, TREE)


@pytest.mark.parametrize("page_size", few(PAGE_SIZES, 1))
def test_accepted_rows_move_in_every_layout(page_size: int) -> None:
    """Every field and layer of the targets is that of the sources before, although some slots are both; nothing else
    changes. Layouts with entries of several tokens are refused, and nothing changes."""
    moved = 0
    sources = np.array([page_size + 3, page_size + 1, 2 * page_size, page_size + 2], dtype=np.int32)
    targets = np.array([page_size + 1, page_size + 2, page_size + 3, 3 * page_size], dtype=np.int32)
    for name, layout in layouts(page_size, 2**18):
        pool = Pool(layout, 6)
        for _, tensor in pool.tensors:
            tensor.view(torch.uint8).random_(0, 256)
        before = {(f.name, layer): pool.layer(f.name, layer).clone() for f in layout.fields for layer in f.layers}
        whole = all(field.per == 1 for field in layout.fields)
        if whole:
            TORCH.move(slots_of(pool), torch.from_numpy(sources).long(), torch.from_numpy(targets).long())
            moved += 1
        else:
            with pytest.raises(UnsupportedModel, match="cannot be moved"):
                slots_of(pool)
        for (field, layer), tensor in before.items():
            expected = tensor.view(torch.uint8).clone()
            if whole:
                rows, was = expected.view(7 * page_size, -1), tensor.view(torch.uint8).view(7 * page_size, -1)
                for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                    rows[target] = was[source]
            assert torch.equal(pool.layer(field, layer).view(torch.uint8), expected), name
    assert moved > 20
