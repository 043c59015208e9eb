"""The fingerprint of weights: every byte of them and nothing else, and what of it a model's identity has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.models import linear
from quire.models.fingerprint import fingerprint_weights, identity_of
from quire.models.hf import load_model
from tests.changes import slow_unless_changed
from tests.tiny_models import save_tiny

GOLDEN = "20f6fcfdb04199acc55c845a7afbf923496f3bbafb9aba4b192ff9b3612d3a1e"


def weights() -> dict[str, Tensor]:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "a.weight": whole.clone(),
        "a.bias": torch.arange(6, dtype=torch.bfloat16),
        "b.weight": whole.to(torch.float16).t(),  # not contiguous
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 3),
    }


def test_golden() -> None:
    """Stored pages hang on it."""
    assert fingerprint_weights(weights()).hex() == GOLDEN


def test_every_byte_counts() -> None:
    found = {fingerprint_weights(weights())}
    count = 1
    for name, tensor in weights().items():
        for at in range(tensor.numel()):
            for byte in range(tensor.element_size()):
                changed = weights() | {name: tensor.contiguous()}
                flat = changed[name].view(-1).view(torch.uint8) if changed[name].dim() else None
                if flat is None:
                    changed[name] = torch.tensor(7 ^ (1 << 8 * byte) if byte < 7 else 8)
                else:
                    flat[at * tensor.element_size() + byte] ^= 1
                found.add(fingerprint_weights(changed))
                count += 1
    assert len(found) == count > 160


def test_names_dtypes_and_shapes_count() -> None:
    plain = weights()
    others = [
        {("c" if name == "a.weight" else name): tensor for name, tensor in plain.items()},
        plain | {"a.weight": plain["a.weight"].reshape(6, 4)},
        plain | {"a.weight": plain["a.weight"].reshape(24)},
        plain | {"a.weight": plain["a.weight"].view(torch.int32)},
        plain | {"a.bias": plain["a.bias"].view(torch.float16)},
        plain | {"nothing": torch.empty(3, 0)},
        plain | {"b.weight": plain["b.weight"].t()},
        plain | {"more": torch.empty(0)},
        {name: tensor for name, tensor in plain.items() if name != "nothing"},
        plain | {"a.weight": plain["b.weight"], "b.weight": plain["a.weight"]},
        {},
    ]
    assert len({fingerprint_weights(tensors) for tensors in (plain, *others)}) == 1 + len(others)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 2**20])
def test_how_it_is_read_does_not_count(chunk_bytes: int) -> None:
    """Order, size of pieces, memory layout, and tensors that share memory."""
    plain = weights()
    expected = fingerprint_weights(plain)
    backwards = dict(reversed(plain.items()))
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in plain.items()}
    for tensors in (plain, backwards, copies):
        assert fingerprint_weights(tensors, chunk_bytes=chunk_bytes) == expected
    tied, apart = {"x": plain["a.bias"], "y": plain["a.bias"]}, {"x": plain["a.bias"], "y": plain["a.bias"].clone()}
    assert fingerprint_weights(tied, chunk_bytes=chunk_bytes) == fingerprint_weights(apart)
    part = torch.arange(40)[10:34:2].view(3, 4)
    assert fingerprint_weights({"x": part}, chunk_bytes=chunk_bytes) == fingerprint_weights({"x": part.clone()})


def test_weights_that_are_kept_wider_count_as_what_was_loaded() -> None:
    narrow = {"w": torch.randn(33, 7).to(torch.bfloat16)}
    wide = {"w": narrow["w"].float()}
    assert fingerprint_weights(wide) != fingerprint_weights(narrow)
    assert fingerprint_weights(wide, {"w": torch.bfloat16}, chunk_bytes=50) == fingerprint_weights(narrow)


def test_the_parts_of_an_identity_do_not_run_into_each_other() -> None:
    parts = [(b"", b"ab", 0), (b"a", b"b", 0), (b"ab", b"", 0), (b"ab", b"", 1), (b"ab", bytes(32), 0), (b"", b"", 0)]
    assert len({identity_of(*each) for each in parts}) == len(parts)


# -- of models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("one") / "model")


def exact(folder: Path, **options: object) -> bytes:
    return load_model(str(folder), check=False, **options).identity(exact=True)  # type: ignore[arg-type]


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_copy_in_shards_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other = tmp_path / "elsewhere"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other, max_shard_size="40KB")
    assert len(list(other.glob("*.safetensors"))) > 2
    one, two = (load_model(str(path), check=False) for path in (folder, other))
    assert one.weights_fingerprint == two.weights_fingerprint
    assert one.identity(exact=True) == two.identity(exact=True)
    assert one.identity() != two.identity(), "without reading the weights, a name is all there is"


@slow_unless_changed("src/quire/models/", "src/quire/spec/")
def test_another_process_finds_the_same(folder: Path) -> None:
    code = (
        "import sys; from quire.models.hf import load_model; "
        "print(load_model(sys.argv[1], check=False).identity(5, exact=True).hex())"
    )
    command = [sys.executable, "-c", code, str(folder)]
    found = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": "9"}, capture_output=True, check=True, text=True
    )
    assert found.stdout.strip() == load_model(str(folder), check=False).identity(5, exact=True).hex()


def test_one_bit_of_one_weight_is_another_model(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "model")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors[max(tensors)].view(-1).view(torch.uint8)[-1] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert exact(other) != exact(folder)


def test_dtype_and_epoch_are_in_it(folder: Path) -> None:
    model = load_model(str(folder), check=False)
    found = {model.identity(epoch, exact=reads) for epoch in (0, 1, 2**40) for reads in (False, True)}
    assert len(found | {exact(folder, dtype="bfloat16")}) == 7


def test_a_machine_that_widens_weights_finds_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    packs = linear.native_on_cpu(torch.bfloat16)  # elsewhere oneDNN packs no narrow weights
    for native, pack in ((True, packs), (False, True)):
        monkeypatch.setattr(linear, "native_on_cpu", lambda _, native=native: native)
        model = load_model(str(folder), dtype="bfloat16", check=False, pack=pack)
        found.append((model.identity(exact=True), model.weight_bytes))
    (one, narrow), (other, wide) = found
    assert one == other and narrow <= wide


def test_angles_that_follow_the_deployments_length_are_in_it(tmp_path: Path) -> None:
    """The same weights, and keys turned otherwise."""
    phi = save_tiny("phi3_longrope", tmp_path / "phi")
    assert exact(phi, max_length=64) != exact(phi, max_length=256)
