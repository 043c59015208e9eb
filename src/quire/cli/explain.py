"""`quire explain`: why no more of a prompt was cached, of a request of a trace or of a live server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from quire.cli.options import DebugOption, JsonOption
from quire.cli.report import reported
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from quire.cli.replay_inputs import ReplayWords

_REPLAY = "Of a trace"
_SERVER = "Of a live server"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_OF_REPLAYS = ("policy", "pool_tokens", "page_size", "model", "limit", "seed")


def explain(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            help="A trace's file or folder, or a workload; with --url, a request's id.",
            metavar="TRACE", show_default=False,
        ),
    ] = None,
    request: Annotated[
        str | None, typer.Argument(help="A request's id; without one, a summary.", metavar="REQUEST_ID")
    ] = None,
    policy: Annotated[str, _option(_REPLAY, "Eviction policy.")] = "density",
    pool_tokens: Annotated[
        str | None,
        _option(_REPLAY, "Pool size: tokens (64k), or a part of what the trace would fill (1/16). (default: 1/8)"),
    ] = None,
    page_size: Annotated[str, _option(_REPLAY, "Page size, in tokens.")] = "16",
    model: Annotated[
        str | None,
        _option(_REPLAY, "Plan the pools of this model: a name of the catalogue or a config.json.", "--model", "-m"),
    ] = None,
    limit: Annotated[int | None, _option(_REPLAY, "Only the first N requests.", min=1)] = None,
    seed: Annotated[int, _option(_REPLAY, "Of a workload.")] = 0,
    url: Annotated[str | None, _option(_SERVER, "Ask this server: http://127.0.0.1:8000.")] = None,
    api_key: Annotated[
        str | None, _option(_SERVER, "The server's key.", envvar="QUIRE_API_KEY", show_envvar=True)
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:  # fmt: skip
    """Say of every prompt token whether it was reused, and if not, why: evicted (for whom, how long ago), never seen,
    less than a page, cached for another adapter or salt, or given up by a group of layers.

    A trace is replayed, on the virtual clock of `quire replay`. A server knows its last 1,000 sequences, by the id of
    the response or of one of its sequences; without an id it tells of all its prompt tokens. Exit codes: 0 done,
    2 bad input, or nothing is known of the request.

    [dim]Example:[/dim] quire explain sessions --pool-tokens 1/8

    [dim]Example:[/dim] quire explain sessions s27.0 --pool-tokens 1/8

    [dim]Example:[/dim] quire explain --url http://127.0.0.1:8000 chatcmpl-0123
    """
    with reported(as_json=as_json, debug=debug):
        if url is not None:
            if request is not None:
                raise InvalidInput(
                    "--url asks a server, which has no traces.", fix="give it one argument, a request's id, or none."
                )
            _refuse_replay_options(context)
            _ask(url, source, api_key, as_json)
            return
        if source is None:
            raise InvalidInput("nothing to explain.", fix="name a trace or a workload, or a server with --url.")
        from quire.cli.replay_inputs import ReplayWords

        models = (model,) if model is not None else ()
        words = ReplayWords(policy=policy, pool_tokens=pool_tokens, page_size=page_size, models=models, explain=True)
        _replay(source, request, limit, seed, words, as_json)


def _refuse_replay_options(context: typer.Context) -> None:
    given = [
        "--" + name.replace("_", "-")
        for name in _OF_REPLAYS
        if (found := context.get_parameter_source(name)) is not None and found.name == "COMMANDLINE"
    ]
    if given:
        raise InvalidInput(
            f"{', '.join(given)}: for replays of traces; --url asks a server, which has its own settings.",
            fix="leave them out, or leave out --url and name a trace.",
        )


def _ask(url: str, request_id: str | None, api_key: str | None, as_json: bool) -> None:
    from quire.cli.explain_server import Server
    from quire.cli.explain_table import causes_table, reasons_table, sequence_heading

    server = Server(url, api_key)
    if request_id is None:
        statistics = server.get("/v1/cache/statistics")
        causes: dict[str, int] = statistics["explained_tokens"]
        if not causes:
            raise InvalidInput("this server does not explain.", fix="start it without --no-explain.")
        found = {name: statistics[name] for name in ("prompt_tokens", "hit_tokens")} | {"tokens_by_cause": causes}
        if as_json:
            print(json.dumps(found))
            return
        Console().print(f"{url}: {found['prompt_tokens']:,} prompt tokens since its start.\n", causes_table(causes))
        return
    answer = server.explanation(request_id)
    if as_json:
        print(json.dumps(answer))
        return
    console = Console()
    for explanation in answer["explanations"]:
        console.print(sequence_heading(explanation["sequence"], explanation), reasons_table(explanation), "")


def _replay(
    source: str, request_id: str | None, limit: int | None, seed: int, words: ReplayWords, as_json: bool
) -> None:
    from quire.cli.explain_replay import Explained
    from quire.cli.replay_inputs import grid_of
    from quire.cli.replay_table import progress_bar
    from quire.sim.comparison import replay_one
    from quire.sim.trace import open_trace

    grid = grid_of(words)
    trace = open_trace(source, limit=limit, seed=seed)
    with progress_bar(len(trace)) as progress:
        result = replay_one(trace, grid, progress)
    explained = Explained(trace, grid.models[0].name, result)
    if as_json:
        print(json.dumps(explained.summary() if request_id is None else explained.request(request_id)))
        return
    console = Console()
    for part in explained.summary_tables() if request_id is None else explained.request_tables(request_id):
        console.print(part)
