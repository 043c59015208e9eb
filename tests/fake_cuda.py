"""FakeCuda: a CUDA device in Python, for code that cannot run on one here.

Its tensors say that they are on `cuda:0` and compute on the CPU, so code takes the path of a GPU and gives the same
numbers. Copies to pinned memory arrive when the host waits for them, and not before. What would make the host wait for
the device, or what a copy reads too late, is noted with its place. Graphs record operators, and compute them again on
the same memory.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.races import Clock, Races, join

DEVICE = torch.device("cuda", 0)
SOURCE = str(Path(__file__).parents[1] / "src" / "quire")
POISON = 0x7F
"""What a byte of memory has before anything was written there, or while a copy to it is in flight: NaN in floats."""

_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense,
    _aten.item,
    _aten.is_nonzero,
    _aten.equal,
    _aten.allclose,
    _aten.nonzero,
    _aten.nonzero_numpy,
    _aten.argwhere,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.tensor_split,
}
"""Operators whose result, or the size of whose result, depends on values on the device."""
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index}
_COPIES = {_aten.copy_, _aten._to_copy, _aten.to, _aten._copy_from, _aten.lift_fresh, _aten.alias, _aten.detach}


class OnDevice(Tensor):
    """A tensor of the device; `inner` has its numbers."""

    inner: Tensor
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        # Torch's C++ code sees a tensor of the device `meta`: it has no guard for CUDA in a build for the CPU.
        with torch.inference_mode(False):  # so that a view of it is of the same kind in both modes
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device("meta"),
            )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        """As of any tensor: it waits for the device."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeCuda.current().run(function, args, kwargs or {})


@dataclass(frozen=True)
class Noted:
    """What happened, and where: the last line of Quire's source, and what it called."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} at {self.place}"


class FakeStream:
    """A stream: work that is done when the host waits for it. `clock` is what its next work follows. It keeps its
    device: who failed there may wait for it late, when memory is collected."""

    def __init__(self, device: Any = None, *, cuda: FakeCuda | None = None, **_: Any) -> None:
        self.number = next(_numbers)
        self.device = device
        self.cuda = cuda or FakeCuda.current()
        self.pending: list[Callable[[], None]] = []
        self.done = 0
        self.clock: Clock = {}

    def reach(self, end: int) -> None:
        """Do the work up to number `end`."""
        with torch.inference_mode():
            while self.done < end:
                self.pending[self.done]()
                self.done += 1

    def synchronize(self) -> None:
        self.cuda.note("stream.synchronize")
        self.cuda.races.join_host(self.clock)
        self.reach(len(self.pending))

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: FakeEvent) -> None:
        self.pending.append(event.reach)
        join(self.clock, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """An event: a place in a stream of its device, which stays as long as it."""

    def __init__(self, **_: Any) -> None:
        self._cuda = FakeCuda.current()
        self._at: tuple[FakeStream, int] | None = None
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self._cuda.stream
        self._at = stream, len(stream.pending)
        self.clock = dict(stream.clock)

    def reach(self) -> None:
        if self._at is not None:
            self._at[0].reach(self._at[1])

    def query(self) -> bool:
        return self._at is None or self._at[0].done >= self._at[1]

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "an event has no time before its stream has reached it"
        return 1e-3

    def synchronize(self) -> None:
        self._cuda.note("event.synchronize")
        self._cuda.races.join_host(self.clock)
        self.reach()


@dataclass(frozen=True)
class _Outside:
    """A tensor that was there before a capture. A graph does not keep its memory."""

    memory: StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Outside:
        memory = StorageWeakRef(tensor.untyped_storage())
        return cls(memory, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> Tensor:
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        assert memory is not None, "a graph uses memory that was freed"
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)


class FakePool:
    """The memory of graphs: what one of them computes, another one overwrites."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()


class FakeGraph:
    """A graph: operators, which `replay` computes again. It owns what they make. Nothing computes in a capture: memory
    from outside is as it was, and what was made has no number until a replay."""

    def __init__(self, **_: Any) -> None:
        self.pool = FakePool()
        self.stream: FakeStream | None = None  # of the capture
        self.failed = False
        self._operators: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._own: dict[int, Tensor] = {}  # by address, bytes

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._own.values()))

    def made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if len(storage):
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(storage),), (1,))
            self._own.setdefault(storage.data_ptr(), whole)

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator for its shapes, and record it."""
        tensors = [each.inner for each in tree_flatten((args, kwargs))[0] if isinstance(each, OnDevice)]
        held = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
        given = tree_map(self._kept, (args, kwargs))
        written = [
            _bare(each)
            for argument, value in _named(function, args, kwargs)
            for each in tree_flatten(value)[0]
            if isinstance(each, OnDevice) and argument.alias_info is not None and argument.alias_info.is_write
        ]
        before = [(each, each.clone()) for each in written if self._is_outside(each)]
        out = function(*tree_map(_bare, args), **tree_map(_bare, kwargs))
        for each, was in before:
            each.copy_(was)
        outs = [each if isinstance(each, Tensor) else None for each in tree_flatten(out)[0]]
        new = [None if each is None or each.untyped_storage().data_ptr() in held else each for each in outs]
        if not written and all(each is None for each in new) and tensors and any(each is not None for each in outs):
            return out  # a view
        for each in new:
            if each is not None:
                self.made(each)
        self._operators.append((function, *given, new))
        return out

    def forget(self) -> None:
        """Another graph of the pool may have used the memory."""
        for memory in self._own.values():
            memory.fill_(POISON)

    def replay(self) -> None:
        cuda = FakeCuda.current()
        for graph in self.pool.graphs:
            graph.forget()
        with torch.inference_mode():
            for function, given, named, outs in self._operators:
                args, kwargs = tree_map(_there, (given, named), is_leaf=lambda each: isinstance(each, _Outside))
                cuda.races.operator(cuda.stream, function, args, kwargs)
                for into, found in zip(outs, tree_flatten(function(*args, **kwargs))[0], strict=True):
                    if into is not None:
                        into.copy_(found)

    def _is_outside(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self._own

    def _kept(self, value: Any) -> Any:
        if isinstance(value, OnDevice):
            return _Outside.of(value.inner) if value.numel() and self._is_outside(value.inner) else value.inner
        if isinstance(value, Tensor):
            return value.detach().clone()  # a number of the host: an argument of a kernel
        return _bare(value)


def _there(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


def _named(function: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The arguments of an operator, each with what its schema says."""
    return [
        (argument, args[at] if at < len(args) else kwargs.get(argument.name))
        for at, argument in enumerate(function._schema.arguments)
    ]


_numbers = itertools.count()


class FakeCuda:
    """The device. `noted` has what made the host wait, or would: fill it with what happens inside `watched`."""

    _current: FakeCuda | None = None

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self._watching = threading.local()
        self._pinned: dict[int, Tensor] = {}  # by address; none is freed, so that no address means two things
        self.registered: list[tuple[int, int]] = []  # memory of the host: start, stop
        self.most_registered = 1 << 62  # bytes
        self._default = FakeStream(cuda=self)
        self._of_thread = threading.local()
        self.num_copies = 0  # to the device, while watched
        self._capturing = threading.local()
        self._graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.races = Races()
        self.sync_debug_mode: int | str = 0

    @classmethod
    def current(cls) -> FakeCuda:
        assert cls._current is not None, "a tensor of a device that is gone"
        return cls._current

    @property
    def stream(self) -> FakeStream:
        """The stream of this thread."""
        found: FakeStream = getattr(self._of_thread, "stream", self._default)
        return found

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.stream
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What this thread does inside the block is noted."""
        self._watching.on = True
        try:
            yield
        finally:
            self._watching.on = False

    @contextmanager
    def capture(
        self, graph: FakeGraph, pool: FakePool | None = None, stream: FakeStream | None = None, **_: Any
    ) -> Iterator[None]:
        """As `torch.cuda.graph`: on a stream of its own, which stays the current one if the capture has failed."""
        assert self.captured is None
        graph.pool = pool or graph.pool
        graph.stream = stream = stream or FakeStream()
        stream.wait_stream(self.stream)
        before, self._of_thread.stream = self.stream, stream
        self._capturing.graph = graph
        try:
            yield
        finally:
            self._capturing.graph = None
            if graph.failed:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self._of_thread.stream = before
        graph.pool.graphs.add(graph)
        self._graphs.add(graph)
        graph.forget()

    @property
    def captured(self) -> FakeGraph | None:
        """What this thread captures."""
        found: FakeGraph | None = getattr(self._capturing, "graph", None)
        return found

    def _reserved(self, device: Any = None) -> int:
        """Bytes of the pools of graphs."""
        pools = {graph.pool for graph in self._graphs}
        return sum(max((graph.num_bytes for graph in pool.graphs), default=0) for pool in pools)

    def note(self, what: str) -> None:
        if self.captured is not None:
            self.captured.failed = True
            raise RuntimeError(f"{what}, which is not permitted while a stream is captured")
        if self.sync_debug_mode == "error" and not what.startswith("event."):
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        if getattr(self._watching, "on", False):
            self.noted.append(Noted(what, _place()))

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """The device is there inside the block, for this thread; `entered` is for others."""
        assert FakeCuda._current is None
        changes = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: self._default,
            "stream": self.on,
            "Stream": FakeStream,
            "Event": FakeEvent,
            "synchronize": lambda device=None: self._default.synchronize(),
            "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
            "get_device_capability": lambda device=None: (9, 0),
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_debug_mode", mode),
            "CUDAGraph": FakeGraph,
            "graph": self.capture,
            "graph_pool_handle": FakePool,
            "memory_reserved": self._reserved,
            "empty_cache": lambda: None,
            "get_device_name": lambda device=None: "a device in Python",
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register,
                cudaHostUnregister=self._unregister,
                cudaGetErrorString=lambda status: f"error {status} in Python",
            ),
        }
        FakeCuda._current = self
        try:
            with ExitStack() as stack:
                for name, value in changes.items():
                    stack.enter_context(patch.object(torch.cuda, name, value))
                stack.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
                stack.enter_context(patch.object(Tensor, "to", _to))
                _device_constructors()  # remembers `torch.tensor`, for all that loads a model later
                stack.enter_context(patch.object(torch, "tensor", _tensor))
                stack.enter_context(self.entered())
                yield self
        finally:
            FakeCuda._current = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Operators of this thread know the device inside the block."""
        with _Mode(self):
            yield

    # -- operators

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator, on the tensors of the device or to create some there."""
        packet = function.overloadpacket
        if packet is _aten.histc and not args[0].is_floating_point():
            function = _IntegerHistogram(function)
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        on_device = [each for each in tensors if isinstance(each, OnDevice)]
        if packet is _aten.is_pinned:
            return not on_device and self._is_pinned(args[0])
        target = _target(function, args, kwargs)
        if kwargs.get("pin_memory"):
            made = function(*args, **{**kwargs, "pin_memory": False})
            self._pinned[made.untyped_storage().data_ptr()] = made
            return made
        if not on_device and target is not DEVICE:
            return function(*args, **kwargs)
        if packet in (_aten.empty, _aten.empty_strided, _aten.new_empty, _aten.empty_like):
            made = function(*tree_map(_bare, args), **tree_map(_bare, kwargs))
            if made.is_contiguous():
                made.view(-1).view(torch.uint8).fill_(POISON)
            if self.captured is not None:
                self.captured.made(made)
            return OnDevice(made)
        if packet in _COPIES and (crossed := self._cross(packet, args, kwargs, target)) is not None:
            return crossed[0]
        self._check(packet, args, tensors, on_device)
        if self.captured is not None:
            inner = {id(each.inner): each for each in on_device}
            return tree_map(lambda found: _wrapped(found, inner), self.captured.run(function, args, kwargs))
        self.races.operator(self.stream, function, args, kwargs)
        inner = {id(each.inner): each for each in on_device}
        bare = tree_map(_bare, args)
        out = function(*bare, **tree_map(_bare, kwargs))
        return tree_map(lambda found: _wrapped(found, inner), out)

    def _check(self, packet: Any, args: Any, tensors: list[Tensor], on_device: list[OnDevice]) -> None:
        if packet in _READS:
            self.note(f"{packet.__name__} reads the device")
        elif packet is _aten.where and len(tensors) == 1:
            self.note("where reads the device")
        elif packet is _aten.repeat_interleave and len(args) > 1 and isinstance(args[1], OnDevice):
            self.note("repeat_interleave reads the device")
        elif packet in _INDEXING:
            given = [each for each in args[1] if isinstance(each, Tensor)]
            if any(isinstance(each, OnDevice) and each.dtype in (torch.bool, torch.uint8) for each in given):
                self.note("an index of booleans reads the device")
        if on_device and any(not isinstance(each, OnDevice) and each.dim() for each in tensors):
            self.note(f"{packet.__name__} copies a tensor of the host, which is not pinned")

    def _cross(self, packet: Any, args: Any, kwargs: dict[str, Any], target: Any) -> tuple[Tensor] | None:
        """A copy between host and device; None if it is neither."""
        if packet is _aten.copy_:
            into, source = args[:2]
            if isinstance(into, OnDevice) == isinstance(source, OnDevice):
                return None
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self.races.copy(self.stream, into, source)
            if isinstance(into, OnDevice):
                self._sent(source, waits)
                into.inner.copy_(source)
            else:
                self._received(into, source, waits)
            return (into,)
        source = args[0]
        if target is None or not isinstance(source, Tensor) or isinstance(source, OnDevice) == (target is DEVICE):
            return None
        waits = not _asks(args, kwargs)
        kept = {name: value for name, value in kwargs.items() if name == "dtype" and value is not None}
        dtype = next((each for each in [*args[1:], *kept.values()] if isinstance(each, torch.dtype)), source.dtype)
        self.races.copy(self.stream, None, source)
        if target is DEVICE:
            self._sent(source, waits)
            return (OnDevice(source.detach().clone().to(dtype)),)
        made = torch.empty(source.shape, dtype=source.dtype)
        self._received(made, source, waits=True)
        return (made.to(dtype),)

    def _sent(self, source: Tensor, waits: bool) -> None:
        """A copy to the device reads `source` now; memory that it may read later must not change until then."""
        if self.captured is not None:
            raise RuntimeError("a graph would copy this memory of the host again each time")
        if getattr(self._watching, "on", False):
            self.num_copies += 1
        if source.dim() == 0 or not source.numel():
            return
        self._check_slices(source)
        if not self._is_pinned(source):
            self.note("a copy to the device from memory that is not pinned")
        elif waits:
            self.note("a copy to the device that waits")
        else:
            source, before, place = source.detach(), source.detach().clone(), _place()

            def check() -> None:
                if not torch.equal(source.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8)):
                    self.noted.append(Noted("pinned memory was written while a copy to the device read it", place))

            self.stream.pending.append(check)

    def _received(self, into: Tensor, source: OnDevice, waits: bool) -> None:
        """A copy to the host arrives when its stream gets there."""
        self._check_slices(into)
        if waits or not self._is_pinned(into):
            self.note("a copy to the host that waits")
            self.stream.reach(len(self.stream.pending))
            self.races.join_host(self.stream.clock)
            into.copy_(source.inner)
            return
        value = source.inner.detach().clone()
        into.view(torch.uint8).fill_(POISON) if into.is_contiguous() else into.zero_()
        self.stream.pending.append(partial(into.copy_, value))

    def _is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return tensor.untyped_storage().data_ptr() in self._pinned or any(
            start <= at < stop for start, stop in self.registered
        )

    def _check_slices(self, tensor: Tensor) -> None:
        """A copy from or to registered memory is within one registration."""
        if tensor.numel():
            at = tensor.data_ptr()
            end = at + tensor.element_size() * (
                1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            )
            if any(start <= at < stop < end for start, stop in self.registered):
                raise RuntimeError("CUDA error: invalid argument: a copy leaves the memory that was registered")

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 3, "kernels read it, on any device"
        pages = address // 4096, (address + num_bytes - 1) // 4096
        if any(pages[0] <= (stop - 1) // 4096 and start // 4096 <= pages[1] for start, stop in self.registered):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(stop - start for start, stop in self.registered) + num_bytes > self.most_registered:
            return 2  # cudaErrorMemoryAllocation
        self.registered.append((address, address + num_bytes))
        return 0

    def _unregister(self, address: int) -> int:
        self.registered = [each for each in self.registered if each[0] != address]
        return 0


class _IntegerHistogram:
    """`histc` of integers, which only CUDA has."""

    def __init__(self, function: Any) -> None:
        self.overloadpacket, self._schema, self._function = function.overloadpacket, function._schema, function

    def __call__(self, numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self._function(numbers.float(), *args, **kwargs)
        return found.to(numbers.dtype)


class _Mode(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cuda.run(function, args, kwargs or {})


_real_to, _real_tensor = Tensor.to, torch.tensor


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`; torch's own asks for the guard of a device outside inference mode."""
    with torch.inference_mode():
        return _real_to(tensor, *args, **kwargs)


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """`torch.tensor`, which copies from memory that is not pinned."""
    made = _real_tensor(data, **kwargs)
    return made if device is None else made.to(device)


def _target(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The device that an operator names: ours, another one, or None."""
    found = kwargs.get("device")
    if found is None:
        found = next((each for each in args if isinstance(each, torch.device)), None)
    if found is None and function.overloadpacket is _aten.to and len(args) > 1 and isinstance(args[1], Tensor):
        return DEVICE if isinstance(args[1], OnDevice) else torch.device("cpu")
    if found is None:
        return None
    found = torch.device(found)
    is_meta = found.type == "meta" and (
        function.overloadpacket is _aten.scalar_tensor  # a number that is written to a tensor
        or any(isinstance(each, OnDevice) for each in tree_flatten((args, kwargs))[0])
    )
    return DEVICE if found.type == "cuda" or is_meta else found


def _asks(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a copy need not be waited for."""
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return any(each is True for each in args[1:])


def _bare(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.inner
    if isinstance(value, torch.device) and value.type in ("cuda", "meta"):
        return torch.device("cpu")
    return value


def _wrapped(found: Any, known: dict[int, OnDevice]) -> Any:
    if not isinstance(found, Tensor):
        return found
    if id(found) in known:
        same = known[id(found)]
        assert same.shape == found.shape, "an operator changes a shape in place"
        return same
    return OnDevice(found)


def _place() -> str:
    """The last line of Quire's source that runs now, and the last one of other code that it called."""
    frame, outside = sys._getframe(2), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(SOURCE):
            name = path.removeprefix(SOURCE).removeprefix("/")
            return f"{name}:{frame.f_lineno}{outside}"
        if not outside and "/transformers/models/" in path:
            outside = f" in {Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"
