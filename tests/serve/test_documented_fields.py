"""Each documented field of the dialects, sent to the real server: its table in `docs/reference/http.md` is true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.examples.documented_fields import DOCUMENTED, PLAIN, fields, is_accepted, standing, values
from tests.serve.live_server import LiveServer


def sent(server: LiveServer, route: str, name: str, value: Any) -> bool:
    """Whether it is accepted; an error names the field."""
    status, answer = server.request(route, PLAIN[route] | {name: value})
    if status == 200:
        return True
    assert status in (400, 404), answer
    said = (answer["error"].get("param") or "") + answer["error"]["message"]
    assert name in said, (answer, value)
    return False


@pytest.mark.parametrize("route", DOCUMENTED)
def test_fields_are_what_the_table_says(scripted: LiveServer, route: str) -> None:
    """Of each field two values: one of its types' first, and another's last."""
    for name, kind in fields(route).items():
        given = values(name, kind)
        found = [sent(scripted, route, name, value) for value in (given[0], given[-1])]
        told = standing(route, name)
        if told == "no effect":
            assert all(found), name
        if told.startswith("refused"):
            assert not all(found), name
        if told == "accepted":
            assert any(found) or any(is_accepted(route, {name: value}) for value in given[1:-1]), name


@pytest.mark.slow
@pytest.mark.parametrize("route", DOCUMENTED)
def test_each_value_is_accepted_or_refused_by_name(scripted: LiveServer, route: str) -> None:
    for name, kind in fields(route).items():
        found = {json.dumps(value): sent(scripted, route, name, value) for value in values(name, kind)}
        told = standing(route, name)
        assert all(found.values()) if told == "no effect" else any(found.values()) or told != "accepted", name
    scripted.wait_idle()
    assert "Traceback" not in scripted.log()
