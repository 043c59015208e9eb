"""A plan as tables: the ledger, what fits, and why. Made from the dictionary that machines get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.report import named_rows, panel
from quire.plan.budget import counted, format_bytes


def plan_panel(found: Mapping[str, Any], title: str) -> Panel:
    """The plan in one panel, with the formula of each number where `found` has them."""
    parts: list[RenderableType] = [ledger_table(found), "", summary_table(found)]
    parts += [Text(f"Note: {note}", style="dim") for note in found["notes"]]
    if found["to_fit"]:
        parts.append(Text.assemble(("To fit: ", "bold yellow"), ", or ".join(found["to_fit"]) + "."))
    elif not found["fits"]:
        parts.append("Nothing that was tried makes it fit: not less context, fewer requests or fewer bits.")
    if "why" in found:
        parts += ["", named_rows((line["name"], line["why"]) for line in found["why"])]
    verdict, style = ("fits", "green") if found["fits"] else ("does not fit", "red")
    if found["fits"] and found["hisparse"] and found["hisparse"]["gain"]["loses"]:
        verdict, style = "loses: leave hisparse out", "red"
    return panel(Group(*parts), Text.assemble((f"{title} ", "bold"), (verdict, f"bold {style}")), style)


def roles_panel(found: Mapping[str, Any]) -> Panel:
    """Engines of each role for a load, and what travels between them."""
    load = found["load"]
    link, out, into = (f"{found[f'{which}link_bytes_per_s'] / 1e9:.2f}" for which in ("", "prefill_", "decode_"))
    held = [format_bytes(found[f"{role}_host_bytes"]) for role in ("prefill", "decode")]
    lengths = f"{load['prompt_tokens']:,} prompt and {load['output_tokens']:,} output tokens"
    rows = [
        ("Load", f"{load['requests_per_s']:g} requests/s of {lengths}, {load['cached']:.0%} of a prompt cached"),
        ("One engine", f"{load['prefill_rate']:,.0f} prompt tokens/s, or {load['decode_rate']:,.0f} output tokens/s"),
        ("Prefill", f"{counted(found['prefill'], 'engine')}, {found['prefill_busy']:.0%} busy"),
        ("Decode", f"{counted(found['decode'], 'engine')}, {found['decode_busy']:.0%} busy"),
        ("A prompt", f"arrives in {found['prompt_s']:.3f} s; {found['prompts_in_flight']:.1f} are in flight"),
        ("Host memory", f"{held[0]} of each prefill and {held[1]} of each decode engine, for prompts in flight"),
        ("Link", f"{link} GB/s: {out} out of each prefill engine, {into} into each decode engine"),
    ]
    rows += [("Note", note) for note in found["notes"]]
    return panel(named_rows(rows), f"{found['model']}, engines by role")


def ledger_table(found: Mapping[str, Any]) -> Table:
    """A line for every byte of one rank's budget, and their sum."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("One rank" if found["parallel"]["tp"] * found["parallel"]["pp"] > 1 else "Device", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    table.add_column("")
    frames = {
        f"pool {pool['name']}": f"{pool['frames'] - 1:,} of {format_bytes(pool['bytes_per_frame'])}"
        for pool in found["pools"]
    }
    lines = [line for line in found["ledger"] if line["where"] == "device"]
    for line in lines:
        about = "about " if line["estimated"] else ""
        size = about + format_bytes(line["bytes"])
        table.add_row(line["name"], f"{line['bytes']:,}", size, frames.get(line["name"], ""))
    total = sum(line["bytes"] for line in lines)
    table.add_section()
    table.add_row(found["device"] or "KV memory", f"{total:,}", format_bytes(total), style="bold")
    for line in found["ledger"]:
        if line["where"] == "host":
            table.add_row(Text(f"host: {line['name']}", style="dim"), f"{line['bytes']:,}", format_bytes(line["bytes"]))
    return table


def ledger_picture(found: Mapping[str, Any], label: str = "") -> dict[str, Any]:
    """The ledger on a page."""
    return {"kind": "ledger", "label": label, "lines": found["ledger"]}


def _hisparse(found: Mapping[str, Any], context: int) -> Iterator[tuple[str, str]]:
    yield (
        "Hot buffers",
        f"{counted(found['hot_rows'], 'request')} of {found['device_buffer_size']:,} tokens, of which a step reads "
        f"{found['top_k']:,}; {found['contents']} take {format_bytes(found['host_bytes'])} of host memory",
    )
    gain = found.get("gain")
    if gain is None:  # an engine logs whether it pays
        return
    costs, swap = gain["costs"], format_bytes(gain["swapped_bytes"])
    yield (
        "All on device",
        f"{gain['resident_tokens']:,} tokens, {counted(gain['resident_requests'], 'request')} of {context:,}; "
        f"hisparse {gain['tokens']:,} tokens, {counted(gain['requests'], 'request')}",
    )
    rate = f"at {costs['link_rate'] / 1e9:.3g} GB/s" if costs["link_rate"] else "over a link of unknown speed"
    yield "A swap", f"{swap} of a request and step {rate}, if {costs['hit_rate']:.0%} of what is read is in its buffer"
    if gain["loses"]:
        yield "Break-even", f"never: {gain['loses']}"
    elif gain["break_even"] is None:
        yield "Break-even", "not known: name the --gpu, or give --decode-ms and --host-bandwidth"
    else:
        yield "Break-even", f"faster from {counted(gain['break_even'], 'request')} at once on"


def summary_table(found: Mapping[str, Any]) -> Table:
    """What the budget holds."""
    return named_rows(_summary(found))


def _summary(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    price = found["bytes_per_token"]
    arena = found["arena"] is not None and found["arena"]["is_planned"]
    tokens = f"up to {found['max_total_num_tokens']:,} in one arena" if arena else f"{found['max_total_num_tokens']:,}"
    yield "Tokens", f"{tokens} ({price:,.10g} bytes for each, as {found['kv_dtype']})"
    if found["swa_max_total_num_tokens"] is not None and found["full_max_total_num_tokens"] is not None:
        yield "Window tokens", f"{found['swa_max_total_num_tokens']:,}"
    if found["state_slots"] is not None:
        yield "State slots", f"{found['state_slots']:,}"
    asked, room = found["required_requests"], found["room_at_context"]
    wanted = f"; {asked:,} asked for" if asked > 1 else ""
    wanted += f"; room for {room:,}" if room > found["requests_at_context"] else ""
    yield "Requests at once", f"{found['requests_at_context']:,} of {found['context']:,} tokens{wanted}"
    mean = found["expected"]["mean_tokens"]
    if found["expected"]["given"] and mean != found["context"]:
        yield "As expected", f"{found['requests_at_mean']:,} of {mean:,} tokens, the mean"
    yield "Largest request", f"{found['largest_request']:,} tokens, prompt and output together"
    if (drafts := found["speculation"]) is not None:
        size = drafts["draft_bytes_per_token"]
        layers = f"; draft layers take {size:,.10g} bytes of a token" if size else ""
        kept = drafts["draft_feature_bytes"]
        layers += f"; features of running requests take {format_bytes(kept)} beside the pools" if kept else ""
        yield (
            "Drafts",
            f"{drafts['draft_tokens']:,} in a step; a request reserves {drafts['reserved_tokens']:,} tokens{layers}",
        )
    if (hisparse := found["hisparse"]) is not None:
        yield from _hisparse(hisparse, found["context"])
    for each in found.get("tenants", ()):
        floor, ceiling = each["floor"], each["ceiling"]
        yield (
            f"Tenant {each['name']}",
            f"floor {format_bytes(floor['bytes'])}, {floor['tokens']:,} tokens; ceiling "
            f"{format_bytes(ceiling['bytes'])}, {ceiling['tokens']:,} tokens; largest request "
            f"{each['largest_request']:,}; weight {each['weight']:g}",
        )
    reused = found["minimum_reusable_prefix"]
    yield "Smallest reuse", "none: prefix caching is off" if reused is None else f"prefixes from {reused:,} tokens on"
    shape = found["geometry"]
    yield (
        "Page",
        f"{shape['page_size']:,} tokens, wasting {shape['waste']:.2%} of a request of {shape['request_tokens']:,}; "
        f"runner-up {shape['runner_up']:,}, wasting {shape['runner_up_waste']:.2%}",
    )
