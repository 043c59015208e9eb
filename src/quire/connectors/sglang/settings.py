"""HiCacheSettings: what `--hicache-storage-backend-extra-config` says to Quire's backend, as JSON."""

from __future__ import annotations

from quire.settings.setting import Bytes, Settings, setting


class HiCacheSettings(Settings):
    """Those of the connector to vLLM have the same names."""

    store: str = setting(..., "The URL of a store, or a directory.", min_length=1)
    store_size: Bytes | None = setting(None, "Bytes that a directory keeps at most.", otherwise="what it has", gt=0)
    weights: str = setting("", "Any text that changes with the weights. Empty: SGLang's model, by its files or commit.")
    adapters: bool = setting(False, "Whether new weights of a LoRA adapter always get a new name or path.")
    deadline_s: float = setting(1.0, "Seconds that a call waits for one of the threads.", gt=0)
    threads: int = setting(4, "Threads that read a pool, and as many that write it.", ge=1)
    direct: bool = setting(
        False, "Whether a directory goes around the page cache: less CPU, and reads wait for the disk."
    )
    log: str | None = setting(None, "A file for what is looked up, saved and found bad, as JSON lines.")
