"""`python -m tests.serve.echo_server`: the server and its engine process, with `EchoCore` in place of the engine."""

from __future__ import annotations

import argparse
import gc
import json
import logging
from functools import partial

from quire.client.async_engine import AsyncEngine
from quire.engine.config import engine_config
from quire.serve.config import ServerConfig
from quire.serve.server import Running, serve
from tests.serve.fake_core import ByteTokenizer, EchoCore


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="*", help="of the server, as NAME=VALUE")
    settings = dict(each.split("=", 1) for each in parser.parse_args().settings)
    logging.basicConfig(level=logging.INFO)

    num_frozen = gc.get_freeze_count()  # by what has forked this process

    def on_ready(running: Running) -> None:
        print(json.dumps({"url": running.url, "num_frozen": gc.get_freeze_count() - num_frozen}), flush=True)

    serve(
        engine_config(served_model_name="echo"),
        ServerConfig.read({"port": 0, "drain_s": 5.0} | settings),
        on_ready=on_ready,
        start=partial(AsyncEngine.start, build=EchoCore, tokenizer=ByteTokenizer()),
    )


if __name__ == "__main__":
    main()
