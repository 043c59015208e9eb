"""What is launched, and how often Triton is asked for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.launch import Launch, hint, is_aligned


class Kernel:
    """Notes its launches. What it returns notes its own, if it `compiles`."""

    arg_names = ("x", "n", "FIRST", "SECOND")

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self.launched: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: object) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.launched.append(("triton", grid, arguments, options))
            return Compiled(self, len(self.launched)) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments: self.kernel.launched.append((f"code {self.number}", grid, arguments, {}))


def test_each_kind_runs_its_own_code():
    kernel = Kernel(compiles=True)
    launch = Launch(kernel, {"SECOND": 2, "FIRST": 1}, num_warps=4)
    for at, kind in enumerate("aabba"):
        launch((at, 1, 1), ("x", at), kind)
    asked = {"num_warps": 4}
    wanted = [("triton", asked), ("code 1", {}), ("triton", asked), ("code 3", {}), ("code 1", {})]
    assert kernel.launched == [(who, (at, 1, 1), ("x", at, 1, 2), opts) for at, (who, opts) in enumerate(wanted)]


def test_an_interpreted_kernel_is_asked_each_time():
    kernel = Kernel(compiles=False)
    launch = Launch(kernel, {"FIRST": 1, "SECOND": 2})
    for _ in range(3):
        launch((1, 1, 1), ("x", 0), "a")
    assert [who for who, *_ in kernel.launched] == ["triton"] * 3
    with pytest.raises(AssertionError, match="no argument"):
        Launch(kernel, {"THIRD": 3})


def test_kinds_of_arguments():
    memory = torch.zeros(64)
    assert [is_aligned(memory[at:]) for at in (0, 1, 4, 6)] == [True, False, True, False]
    assert len({hint(number) for number in (1, 2, 16, 2**31 + 1, 2**31)}) == 5
    assert hint(16) == hint(48) and hint(3) == hint(2) == hint(0 + 5)
