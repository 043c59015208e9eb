"""Measures the ledger of a plan: what weights and a full step use on this machine's device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import psutil
import torch

from quire.engine.device.device import resolve_device
from quire.engine.host_memory import host_memory
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.state import StateBatch
from quire.memory.pool import Pool
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel, load_model
from quire.plan.devices import Device, Line, working_memory
from quire.spec.pages import pages_for

_PAGE_SIZE = 16  # or more, if a page must hold a block of tokens that share an entry
_GRAPH_BATCH = 256  # requests of the largest graph that would be captured
_SAMPLE_S = 0.001  # between samples of the process's memory


def measure_device(name: str, *, chunk: int) -> tuple[Device, tuple[Line, ...]]:
    """Load the model `name`, run one step of up to `chunk` prompt tokens, and return the device and its ledger's lines.

    On a GPU the device's memory is all of it, and "other" is used by the driver and other programs; on a CPU it is the
    memory available before loading. Raises the QuireErrors of loading.
    """
    found = resolve_device("auto")
    lines: list[Line] = []
    if found.type == "cuda":
        free, memory = (int(size) for size in torch.cuda.mem_get_info(found))
        label = torch.cuda.get_device_name(found)
        lines.append(Line(name="other", bytes=memory - free, why="the driver and other programs, before loading"))
    else:
        memory, label = host_memory().available, "this machine's memory"
    model = load_model(name, device=found, check=False)
    tokens = min(chunk, model.spec.context_length)
    lines += [
        Line(name="weights", bytes=model.weight_bytes, why=f"{model.num_parameters:,} parameters, as loaded"),
        Line(
            name="activations", bytes=_step_bytes(model, tokens), why=f"measured in a step of {tokens:,} prompt tokens"
        ),
    ]
    found_device = Device(name=label, memory=memory)
    if found.type == "cuda":  # no graphs are captured here, and fragmentation is not in one step
        rest = working_memory(
            chunk=tokens,
            hidden_size=model.spec.hidden_size,
            vocabulary=model.spec.vocab_size,
            graph_batch=_GRAPH_BATCH,
            ranks=1,
            device=found_device,
        )
        lines += [line for line in rest if line.name in ("graphs", "reserve")]
    return found_device, tuple(lines)


def _step_bytes(model: LoadedModel, tokens: int) -> int:
    """The most memory that one prompt of `tokens` uses while it is computed, beside weights and pools."""
    page_size = model.spec.page_size(_PAGE_SIZE)
    pages = pages_for(tokens, page_size)
    groups = model.spec.groups(page_size)
    pools = [Pool(group.layout, pages, device=model.device) for group in groups]
    for pool in pools:
        for field in pool.layout.fields:
            for layer in field.layers:
                pool.layer(field.name, layer).fill_(0)  # memory counts as used when it is first written
    frames = np.arange(1, pages + 1, dtype=np.int32)[None, :]  # frame 0 is the padding
    backend = AttentionBackend("auto", model.device)  # that of an engine
    paged = PagedBatch.of(frames, np.array([0]), np.array([tokens]), page_size)
    paged.backend = backend
    places = (np.array(numbers, dtype=np.int32) for numbers in ([0, tokens], [0], [1]))
    states = StateBatch(*places, moves=backend.moves)
    running = RunningForward(pools, [states if group.reach.in_place else paged for group in groups])
    positions = torch.arange(tokens, device=model.device)
    return _peak_bytes(model.device, lambda: model.run(running, torch.zeros_like(positions), positions, positions[-1:]))


def _peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most memory in use during `work`, beyond that before it: by the device, or by this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - start)
    process, done = psutil.Process(), threading.Event()
    start, peak = process.memory_info().rss, 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, process.memory_info().rss - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return peak
