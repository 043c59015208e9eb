"""Launch: a kernel with its constants, launched by what Triton compiled for launches of the same kind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor


class Launch:
    """Launches `kernel` with `constants` and compiler `options`; both stay the same.

    Triton finds what it has compiled by a text that it makes of all arguments, which costs more than the launch. Here
    the caller names the `kind` of a launch, by all that may differ and that Triton compiles for: of a tensor whether
    its address can be divided by 16 (`is_aligned`), of a number its `hint`. Types of tensors must not differ. The first
    launch of a kind is Triton's own; later ones run what it returned. An interpreted kernel returns nothing, so all of
    its launches are Triton's own.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_options")

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._constants = tuple(constants[name] for name in kernel.arg_names if name in constants)
        assert len(self._constants) == len(constants), "a constant is no argument of the kernel"
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], kind: Hashable) -> None:
        """Launch on all arguments that are no constants, in their order; constants come last in a kernel."""
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[grid](*arguments, *self._constants)
            return
        compiled = self._kernel[grid](*arguments, *self._constants, **self._options)
        if compiled is not None:
            self._compiled[kind] = compiled


def is_aligned(tensor: Tensor) -> bool:
    """Whether Triton compiles for an address that can be divided by 16."""
    return tensor.data_ptr() % 16 == 0


def hint(number: int) -> int:
    """What Triton compiles for in a number that is no constant: its type, and whether it is 1 or divided by 16."""
    if number == 1:
        return 1
    return (16 if number % 16 == 0 else 0) + (2 if number >= 2**31 else 0)
