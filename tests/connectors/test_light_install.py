"""Stores and records work in an environment that has four packages of Quire's dependencies, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "pydantic", "typing_extensions", "xxhash")
THEIRS = ("pydantic_core", "annotated_types", "typing_inspection")  # what pip installs with them

SCRIPT = """
import sys
from quire import Answer, RecordFormat, RecordViews, StoreKey, open_store
from quire.connectors.checked_store import CheckedStore
from quire.connectors.weights import weights_identity

facts = {"engine": "mine", "model": "m", "weights": "w", "dtype": "float32", "page_size": 16, "rank": "0/1"}
engine = CheckedStore.open(sys.argv[1], facts, {0: 1000}, capacity=1 << 20)
keys, found = [(bytes(32), 0)], bytearray(1000)
assert engine.save(keys, [b"x" * 1000]) == [Answer.HIT]
assert engine.load(keys, [found]) == [Answer.HIT] and found == b"x" * 1000
(facts_entry, entry) = sorted(engine.store.entries(), key=lambda entry: -entry.key.part)
engine.close()
payload = memoryview(b"y" * 5000)
header = RecordFormat(3, bytes(16), 5000).header(bytes(32), (payload,))
assert RecordViews((header, payload)).num_bytes == 5064 and isinstance(entry.key, StoreKey)
store = open_store(sys.argv[1])
assert len(list(store.entries())) == 2
store.close()
for name in ("torch", "transformers", "safetensors", "msgspec", "fastapi"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is here, so this shows nothing")
from quire.cli import main
try:
    main()
except SystemExit as error:
    assert "pip install typer rich" in str(error), error
else:
    raise AssertionError("typer is here")
"""


def test_stores_need_four_packages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in (*PACKAGES, *THEIRS):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin) if spec.submodule_search_locations is None else Path(spec.origin).parent
            (site / place.name).symlink_to(place)
            libs = place.parent / f"{name}.libs"
            if libs.exists():
                (site / libs.name).symlink_to(libs)
    begin = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT / 'src')!r}]\n"
    command = [sys.executable, "-I", "-S", "-c", begin + SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
