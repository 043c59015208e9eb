"""`quire audit`: ask a live server whether its cache is what it should be."""

from __future__ import annotations

from rich.text import Text

from quire.cli.report import Report
from quire.cli.server import DEFAULT_URL, Server, ServerAddress
from quire.errors import AuditFailure


def audit(where: ServerAddress) -> Report:
    """Audit the cache of a live server, beside its steps, and show what its canary has found. Exit codes: 0 all is
    well, 2 bad input, 4 an invariant is broken.

    [dim]Example:[/dim] quire audit --url http://127.0.0.1:8000
    """
    server = Server(where.url or DEFAULT_URL, where.api_key)
    found = server.ask("/v1/cache/audit")
    if faults := [*found["faults"], *([found["violation"]] if found["violation"] else [])]:
        raise AuditFailure("; ".join(faults) + ".")
    scope = "the whole cache, unchanged meanwhile" if found["whole"] else "beside running requests"
    if not found["ended"]:
        scope = "not to its end: the server is busy"
    lines = [
        f"{server.url}: {found['pages']:,} pages and {found['nodes']:,} edges audited in {found['pieces']:,} pieces, "
        f"the longest {found['longest_s'] * 1e3:.1f} ms: {scope}."
    ]
    if (canary := found["canary"]) is None:
        lines.append("canary: off.")
    else:
        lines.append(
            f"canary: {canary['stamped_pages']:,} pages stamped, {canary['waiting_pages']:,} wait; "
            f"{canary['sweeps']:,} sweeps, the last in {canary['sweep_seconds']:.1f} s; "
            f"{canary['found_pages']:,} damaged."
        )
    lines += [
        f"  page {each['page']} of group '{each['group']}': {each['kind']} after step {each['good_step']}, seen in "
        f"step {each['step']}, written by {each['wrote_request']}; "
        f"computed again: {', '.join(each['readers']) or 'none'}"
        for each in found["findings"]
    ]
    return Report(found, lambda: [Text("\n".join(lines))])
