"""The KV memory follows what a container has left, slowly, and not to and fro."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine import elastic, memory_pressure
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.elastic import PressedMemory, memory_of
from quire.engine.memory_pressure import Pressure, PressureSizes, read_pressure
from quire.engine.messages import ResizeRequest
from quire.errors import HostMemoryError, InvalidInput
from quire.testing.choices import Choices
from tests.engine.test_elastic import added, engine, expected, params, prompts, stepped

GIB = 2**30
SOME = "some avg10={} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def system(root: Path, *, limit: int, used: int, stalled: float) -> Path:
    """The files of a machine whose process is in a container of version 2."""
    files = {
        "proc/pressure/memory": SOME.format(f"{stalled:.2f}"),
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{limit}\n",
        "sys/fs/cgroup/box/memory.high": "max\n",
        "sys/fs/cgroup/box/memory.current": f"{used}\n",
        "sys/fs/cgroup/box/memory.stat": "inactive_file 0\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_files_of_a_container_are_read(tmp_path: Path) -> None:
    found = read_pressure(system(tmp_path, limit=2 * GIB, used=GIB + 5, stalled=12.5))
    assert (found.limit, found.stalled) == (2 * GIB, 12.5)
    assert found.available <= GIB - 5


def test_a_system_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="cannot be read") as caught:
        read_pressure(tmp_path)
    assert "leave --kv-pressure out" in caught.value.fix
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/memory").write_text("nothing\n")
    with pytest.raises(HostMemoryError, match="no line 'some avg10'"):
        read_pressure(tmp_path)
    with pytest.raises(HostMemoryError):
        PressureSizes(1, 2, lambda: read_pressure(tmp_path))


class Pressed:
    """Sizes beside a clock and a pressure that a test sets."""

    def __init__(self, least: int = 8, most: int = 24) -> None:
        self.now, self.size = 0.0, most
        self.pressure = Pressure(50, 100, 0.0)
        self.sizes = PressureSizes(least, most, lambda: self.pressure, lambda: self.now)

    def after(self, seconds: float, available: int, stalled: float = 0.0) -> int:
        """The size after so long a time of this pressure."""
        self.pressure = Pressure(available, 100, stalled)
        for _ in range(round(seconds)):
            self.now += 1
            assert self.sizes.is_due
            self.size = self.sizes.next(self.size)
            assert not self.sizes.is_due
        return self.size


def test_it_shrinks_step_by_step_and_grows_after_a_while() -> None:
    pressed = Pressed()
    assert pressed.after(10, 50) == 24
    assert pressed.after(1, 4) == 22
    assert pressed.after(4, 4) == 22, "the next step is 5 seconds later"
    assert pressed.after(1, 4) == 20
    assert pressed.after(60, 4) == 8
    assert pressed.after(1000, 10) == 8, "between short and ample nothing changes"
    assert pressed.after(29, 50) == 8
    assert pressed.after(2, 50) == 10
    assert pressed.after(5, 50, stalled=5.0) == 10, "a stall ends the half minute"
    assert pressed.after(29, 50) == 10
    assert pressed.after(1000, 50) == 24
    assert pressed.after(1, 50, stalled=20.0) == 22


def test_it_never_leaves_its_range_and_never_swings() -> None:
    """Whatever the pressure, at least half a minute lies between a step up and the one before."""
    choices = Choices.seeded(3)
    pressed, ups = Pressed(), [-100.0]
    for _ in range(3000):
        before = pressed.size
        after = pressed.after(1, choices.below(40), float(choices.below(13)) if choices.chance(10) else 0.0)
        assert 8 <= after <= 24 and abs(after - before) <= 2
        if after > before:
            assert pressed.now - ups[-1] >= 30
            ups.append(pressed.now)


def test_an_engine_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = Pressed()

    def sizes(least: int, most: int) -> PressureSizes:
        return PressureSizes(least, most, lambda: pressed.pressure, lambda: pressed.now)

    monkeypatch.setattr(elastic, "PressureSizes", sizes)
    core = EngineCore(
        engine_config(
            model="quire-bundled",
            kv_memory="1MiB..4MiB",
            kv_pressure=True,
            dtype="float32",
            max_running_requests=6,
            max_model_len=512,
            target_itl_ms="off",
        )
    )
    tokens = added(core, "r")

    def between(step: int) -> None:
        pressed.now += 1.0
        pressed.pressure = Pressure(2 if step % 40 < 20 else 90, 100, 0.0)

    assert stepped(core, tokens, between) == expected("quire-bundled")
    assert len(prompts()) == len(params()) and core.statistics()["resizes"] > 3
    pressed.pressure = Pressure(2, 100, 0.0)
    for _ in range(200):
        pressed.now += 1.0
        if core.is_due():
            core.step()
    assert core.memory().done and core.memory().device.reached <= core.memory().device.least
    core.resize(ResizeRequest(device_bytes=3 * 2**20))
    pressed.pressure = Pressure(9 * GIB, 10 * GIB, 0.0)
    for _ in range(400):
        pressed.now += 1.0
        if core.is_due():
            core.step()
    assert core.memory().device.asked == 3 * 2**20, "it grew beyond what was asked for"
    core.release_memory(0.0)
    pressed.now += 1.0
    assert not memory_of(core).is_due, "released memory follows nothing"
    core.close()


def test_a_change_beside_a_shrink_that_preempts_lets_it_preempt() -> None:
    """That of host memory, that of pressure, and one that resumes what is not released."""
    core = engine("quire-bundled", "1MiB..4MiB", load="always", host_memory="16MiB", kv_pressure=True)
    part = memory_of(core)
    assert isinstance(part, PressedMemory)
    core.resize(ResizeRequest(device_bytes=2 * 2**20, preempt=True))
    assert not part.preempts, "it is done"
    part._is_busy = True
    for change in (
        lambda: core.resize(ResizeRequest(host_bytes=8 * 2**20)),
        lambda: part.follow(3 * 2**19),
        lambda: core.resume_memory(0.0),
    ):
        change()
        assert part._preempts
        part._is_busy = True
    core.resize(ResizeRequest(device_bytes=2**20))
    assert not part._preempts, "it was asked not to"
    core.release_memory(0.0)
    part._is_busy = True
    core.resume_memory(0.0)
    assert not part._preempts
    core.close()


def test_it_needs_a_range() -> None:
    with pytest.raises(InvalidInput, match="does nothing without a range of --kv-memory"):
        engine_config(kv_memory="1MiB", kv_pressure=True)
    assert engine_config(kv_memory="1MiB..2MiB", kv_pressure=True).kv_pressure
    assert memory_pressure.LOOK_EVERY_S == 1.0
