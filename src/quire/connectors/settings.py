"""ConnectorSettings: what an engine's JSON says to a connector."""

from __future__ import annotations

from quire.settings.setting import Bytes, Settings, setting


class ConnectorSettings(Settings):
    """What all connectors have."""

    store: str = setting(..., "The URL of a store, or a directory.", min_length=1)
    store_size: Bytes | None = setting(
        None, "Bytes that a directory keeps at most. A new one needs it.", otherwise="what it has", gt=0, le=2**62
    )
    weights: str = setting("", "Any text that changes with the weights. Empty: the model's files or commit.")
    adapters: bool = setting(False, "Whether new weights of a LoRA adapter always get a new name or path.")
    threads: int = setting(4, "Threads that read, and as many that write.", ge=1, le=1024)
    log: str | None = setting(None, "A file for what is looked up, saved and found bad, as JSON lines.")


class QuireTierSettings(ConnectorSettings):
    """The tier of vLLM."""

    deadline_s: float = setting(
        10.0, "Seconds that a lookup takes at most, and others wait for a thread.", gt=0, le=86_400
    )
    save_share: float = setting(0.25, "The share of the primary tier's rows that may wait to be saved.", gt=0, le=1)
    serves_after_reset: bool = setting(False, "Whether no reset of vLLM's caches follows new weights.")
    untested_vllm: bool = setting(False, "Whether versions of vLLM that were not tried are taken.")


class HiCacheSettings(ConnectorSettings):
    """The backend of SGLang's HiCache."""

    deadline_s: float = setting(1.0, "Seconds that a call waits for one of the threads.", gt=0, le=86_400)
    direct: bool = setting(
        False, "Whether a directory goes around the page cache: less CPU, and reads wait for the disk."
    )
