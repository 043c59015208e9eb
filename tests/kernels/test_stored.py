"""Writes into a pool."""

import torch

from quire.kernels.stored import StoredRows


def test_rows_land_at_their_slots_and_nowhere_else():
    pool = torch.full((4, 3, 2, 5), torch.nan, dtype=torch.bfloat16)
    rows = torch.randn(2, 4, 5).transpose(0, 1)  # [4, 2, 5], not contiguous, as models give them
    slots = torch.tensor([7, 3, 11, 5])
    StoredRows(pool).write(slots, rows)
    flat = pool.flatten(0, 1)
    assert torch.equal(flat[slots], rows.to(torch.bfloat16))
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert flat[others].isnan().all()


def test_padding_may_share_the_sink():
    pool = torch.zeros(2, 4, 1, 1)
    StoredRows(pool).write(torch.tensor([0, 0, 5]), torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))
    assert pool[1, 1].item() == 3.0
    assert pool[0, 0].item() in (1.0, 2.0)
