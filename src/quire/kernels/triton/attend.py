"""The kernels of attention over pages: one that computes a task, and one that merges the parts of a row.

A program computes the rows of a task (`tasks`) for one KV head, or for a part of its query heads if these are many. Row
m of its tile is query head `m % LANES` of its row `m // LANES`. It reads the keys of the task in blocks of N.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.numbers import read_tile


@triton.jit
def _tanh(x):
    """As exact near zero as elsewhere."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    y = x * x
    small = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.25, small, tl.where(x < 0, -large, large))


# fmt: off
@triton.jit
def _sight(position, there, low, high, branch, past, sees, TREES: tl.constexpr):
    """Whether rows `[M]` see the tokens at `position` `[N]`: `[M, N]`."""
    at = position[None, :]
    seen = there[None, :] & (at >= low[:, None]) & (at <= high[:, None])
    if TREES:
        near = at - past[:, None]
        own = (branch[:, None] >= 0) & (near >= 0)
        asked = there[None, :] & own & (at <= high[:, None])
        word = tl.load(sees + branch[:, None] + (near >> 5), mask=asked, other=0)
        follows = ((word >> (near & 31)) & 1) != 0
        seen = (seen & (own == 0)) | (asked & follows)
    return seen


@triton.jit
def _store(
    out, parts, sums, row, place, head, heads, valid, OFFSET: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr
):
    """Finished sums `[M, wide]` of rows whose place is -1, and those of parts, as numbers from OFFSET on of ALL."""
    dim = tl.arange(0, sums.shape[1])
    inside = (dim < WIDTH)[None, :]
    done, part = (valid & (place < 0))[:, None] & inside, (valid & (place >= 0))[:, None] & inside
    of_row = ((row * heads + head) * ALL + OFFSET)[:, None] + dim[None, :]
    of_part = ((place.to(tl.int64) * heads + head) * ALL + OFFSET)[:, None] + dim[None, :]
    tl.store(out + of_row, sums.to(out.dtype.element_ty), mask=done)
    tl.store(parts + of_part, sums, mask=part)


@triton.jit(do_not_specialize=["first_task", "table_row", "selected", "size", "num_parts"])
def attend_tasks(
    query, query_row, query_head, out, lse, parts, part_lse, sinks,
    key, key_frame, key_token, key_head, key_scales, key_scale_frame, key_scale_token, key_scale_head,
    tail, tail_frame, tail_token, tail_head, tail_scales, tail_scale_frame, tail_scale_token, tail_scale_head,
    value, value_frame, value_token, value_head, value_scales, value_scale_frame, value_scale_token, value_scale_head,
    tasks, first_task, task_rows, places, lows, highs, branches, pasts, sees, table, table_row,
    slots, scale, softcap, heads, selected, size, num_parts,
    PAGE: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KEY_FORMAT: tl.constexpr, KEY_SCALE: tl.constexpr, KEY_BLOCK: tl.constexpr, KEY_WIDTH: tl.constexpr,
    KEY_WIDE: tl.constexpr, TAIL_FORMAT: tl.constexpr, TAIL_SCALE: tl.constexpr, TAIL_BLOCK: tl.constexpr,
    TAIL_WIDTH: tl.constexpr, TAIL_WIDE: tl.constexpr, VALUE_FORMAT: tl.constexpr, VALUE_SCALE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr, SELECTED: tl.constexpr,
    TREES: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
):
    """Attention of each task's rows over its keys: finished where the row's place is -1, else a part at that place.

    TAIL_WIDTH 0: keys are one field. VALUE_WIDTH 0: values are the keys. SELECTED: program p is part `p % num_parts` of
    row `p // num_parts`, which reads its own `slots` that are not negative, `size` in a part.
    """
    BLOCKS: tl.constexpr = (GROUP + LANES - 1) // LANES
    DTYPE: tl.constexpr = query.dtype.element_ty
    program, head_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head, lane = head_block // BLOCKS, tl.arange(0, M)
    in_group = (head_block % BLOCKS) * LANES + lane % LANES
    head = kv_head * GROUP + in_group
    low, high, branch, past = lane, lane, lane, lane
    if SELECTED:
        first = (program % num_parts).to(tl.int32) * size
        stop = tl.minimum(first + size, selected)
        valid = (lane < LANES) & (in_group < GROUP)
        row = lane.to(tl.int64) * 0 + program // num_parts
        place = lane * 0 + (tl.where(num_parts > 1, program, -1)).to(tl.int32)
    else:
        tasks += (program + first_task) * 5
        at, count = tl.load(tasks), tl.load(tasks + 1)
        first, stop = tl.load(tasks + 2), tl.load(tasks + 3)
        table += tl.load(tasks + 4).to(tl.int64) * table_row
        valid = (lane // LANES < count) & (lane < M // LANES * LANES) & (in_group < GROUP)
        row = tl.load(task_rows + at + lane // LANES, mask=valid, other=0).to(tl.int64)
        place = tl.load(places + at + lane // LANES, mask=valid, other=0)
        low, high = tl.load(lows + row, mask=valid, other=0), tl.load(highs + row, mask=valid, other=-1)
        if TREES:
            branch = tl.load(branches + row, mask=valid, other=-1)
            past = tl.load(pasts + row, mask=valid, other=0)
    queries = query + row * query_row + head * query_head
    dim, tail_dim = tl.arange(0, KEY_WIDE), tl.arange(0, TAIL_WIDE)
    q = tl.load(queries[:, None] + dim[None, :], mask=valid[:, None] & (dim < KEY_WIDTH)[None, :], other=0)
    acc = tl.zeros((M, VALUE_WIDE if VALUE_WIDTH else KEY_WIDE), tl.float32)
    if TAIL_WIDTH:
        tail_seen = valid[:, None] & (tail_dim < TAIL_WIDTH)[None, :]
        tail_q = tl.load(queries[:, None] + KEY_WIDTH + tail_dim[None, :], mask=tail_seen, other=0)
        tail_acc = tl.zeros((M, TAIL_WIDE), tl.float32)
    peak, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    for begin in tl.range(first, stop, N, num_stages=STAGES):
        position = begin + tl.arange(0, N)
        there = position < stop
        if SELECTED:
            slot = tl.load(slots + (program // num_parts) * selected + position, mask=there, other=-1).to(tl.int64)
            there, frame, offset = slot >= 0, slot // PAGE, slot % PAGE
            seen = valid[:, None] & there[None, :]
        else:
            frame, offset = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64), position % PAGE
            seen = _sight(position, there, low, high, branch, past, sees, TREES)
        k = read_tile(key, key_frame, key_token, key_head, key_scales, key_scale_frame, key_scale_token, key_scale_head,
                      frame, offset, there, kv_head, KEY_FORMAT, KEY_SCALE, KEY_BLOCK, KEY_WIDTH, KEY_WIDE, DTYPE)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if TAIL_WIDTH:
            t = read_tile(tail, tail_frame, tail_token, tail_head, tail_scales, tail_scale_frame, tail_scale_token,
                          tail_scale_head, frame, offset, there, kv_head, TAIL_FORMAT, TAIL_SCALE, TAIL_BLOCK,
                          TAIL_WIDTH, TAIL_WIDE, DTYPE)
            score = tl.dot(tail_q, tl.trans(t), score, input_precision="ieee")
        score *= scale
        if SOFTCAP:
            score = softcap * _tanh(score / softcap)
        score = tl.where(seen, score, float("-inf"))
        before, peak = peak, tl.maximum(peak, tl.max(score, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight, kept = tl.exp(score - base[:, None]), tl.exp(before - base)
        total, weight, acc = total * kept + tl.sum(weight, 1), weight.to(DTYPE), acc * kept[:, None]
        v = k
        if TAIL_WIDTH:
            tail_acc = tl.dot(weight, t, tail_acc * kept[:, None], input_precision="ieee")
        if VALUE_WIDTH:
            v = read_tile(value, value_frame, value_token, value_head, value_scales, value_scale_frame,
                          value_scale_token, value_scale_head, frame, offset, there, kv_head, VALUE_FORMAT,
                          VALUE_SCALE, VALUE_BLOCK, VALUE_WIDTH, VALUE_WIDE, DTYPE)
        acc = tl.dot(weight, v, acc, input_precision="ieee")
    base = tl.where(peak == float("-inf"), 0.0, peak)
    logarithm = base + tl.log(total)
    if SINKS:
        sink = tl.exp(tl.load(sinks + head, mask=valid, other=0.0) - base)
        total += tl.where(place < 0, sink, 0.0)
    share = tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    OUT: tl.constexpr = VALUE_WIDTH if VALUE_WIDTH else KEY_WIDTH
    _store(out, parts, acc * share, row, place, head, heads, valid, 0, OUT, OUT + TAIL_WIDTH)
    if TAIL_WIDTH:
        _store(out, parts, tail_acc * share, row, place, head, heads, valid, OUT, TAIL_WIDTH, OUT + TAIL_WIDTH)
    if LSE:
        tl.store(lse + row * heads + head, logarithm, mask=valid & (place < 0))
    tl.store(part_lse + place.to(tl.int64) * heads + head, logarithm, mask=valid & (place >= 0))


@triton.jit(do_not_specialize=["num_parts"])
def merge_parts(
    out, lse, parts, part_lse, sinks, merges, heads, num_parts,
    SELECTED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):
    """One row and head from its parts. `merges` int32 `[n, 3]` are rows, first places and numbers of parts; if
    SELECTED, row r has `num_parts` from place `r * num_parts` on."""
    program, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SELECTED:
        row, begin, count = program, program * num_parts, num_parts
    else:
        row = tl.load(merges + program * 3).to(tl.int64)
        begin = tl.load(merges + program * 3 + 1).to(tl.int64)
        count = tl.load(merges + program * 3 + 2)
    dim = tl.arange(0, WIDE)
    acc = tl.zeros((WIDE,), tl.float32)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for part in range(count):
        at = (begin + part) * heads + head
        score = tl.load(part_lse + at + tl.arange(0, 1))
        before, peak = peak, tl.maximum(peak, score)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight, kept = tl.exp(score - base), tl.exp(before - base)
        acc = acc * kept + weight * tl.load(parts + at * WIDTH + dim, mask=dim < WIDTH, other=0.0)
        total = total * kept + weight
    base = tl.where(peak == float("-inf"), 0.0, peak)
    if LSE:
        tl.store(lse + row * heads + head + tl.arange(0, 1), base + tl.log(total))
    if SINKS:
        total += tl.exp(tl.load(sinks + head + tl.arange(0, 1)) - base)
    acc = acc * tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(out + (row * heads + head) * WIDTH + dim, acc.to(out.dtype.element_ty), mask=dim < WIDTH)
# fmt: on
