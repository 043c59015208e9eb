"""`quire generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from quire.cli.options import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    HostMemoryOption,
    JsonOption,
    KvDtypeOption,
    KvMemoryOption,
    LoadOption,
    MaxModelLenOption,
    ModelOption,
    PageSizeOption,
    PrefetchOption,
    PrefetchSecondsOption,
    StorageOption,
    StorageSizeOption,
    WritePolicyOption,
    make_config,
)
from quire.cli.report import reported


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from the standard input.")],
    model: ModelOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask it as a question, through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the tokens that make up this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given again.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_model_len: MaxModelLenOption = None,
    page_size: PageSizeOption = None,
    kv_dtype: KvDtypeOption = None,
    kv_memory: KvMemoryOption = None,
    host_memory: HostMemoryOption = None,
    storage: StorageOption = None,
    storage_size: StorageSizeOption = None,
    write_policy: WritePolicyOption = None,
    load: LoadOption = None,
    prefetch: PrefetchOption = None,
    prefetch_seconds: PrefetchSecondsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate text here, without a server.

    [dim]Example:[/dim] quire generate --chat "Tell me about Emma." --max-tokens 60

    [dim]Example:[/dim] quire generate "$(cat long.txt)" --storage ~/.cache/quire --storage-size 4GiB
    """
    with reported(as_json=as_json, debug=debug):
        from quire.scheduler.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=list(stop or [])
        )
        config = make_config(
            model=model,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            page_size=page_size,
            kv_dtype=kv_dtype,
            kv_memory=kv_memory,
            host_memory=host_memory,
            storage=storage,
            storage_size=storage_size,
            write_policy=write_policy,
            load=load,
            prefetch=prefetch,
            prefetch_seconds=prefetch_seconds,
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        with Console(stderr=True).status(f"Loading {config.model_name} ..."):
            from quire.engine.llm import LLM

            llm = LLM(show_plan=False, **config.model_dump())
        with llm:
            if chat:
                [output] = llm.chat([{"role": "user", "content": text}], params)
            else:
                [output] = llm.generate([text], params)
        if as_json:
            print(json.dumps(asdict(output)))
        else:
            print(output.outputs[0].text)
