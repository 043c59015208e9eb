"""The dashboard, the alert rules and their compose file: made from the counters, and naming no metric that is not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.generated_boards import ALERTS, DASHBOARD, FOLDER, RULES, exposed, files, named


def test_the_files_are_what_the_counters_say() -> None:
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name}: run `python -m tests.examples.generated_boards`"


def test_each_metric_that_they_name_exists() -> None:
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in panels(board) for target in panel.get("targets", ())]
    for text in (*expressions, *(each["query"] for each in board["templating"]["list"]), RULES.read_text()):
        assert named(text) <= exposed(), named(text) - exposed()
    assert len(expressions) > 50 and all(named(text) for text in expressions)


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [inside for panel in board["panels"] for inside in (panel, *panel.get("panels", ()))]


def test_each_metric_that_exists_is_in_the_dashboard() -> None:
    board = json.loads(DASHBOARD.read_text())
    parts = ("_sum", "_count")  # of a histogram, whose buckets have the panel
    assert {name for name in exposed() if name.startswith("quire_") and not name.endswith(parts)} <= named(
        json.dumps(board)
    )
    ids = [panel["id"] for panel in panels(board)]
    assert len(ids) == len(set(ids)) > 50
    cells = [
        (place["x"] + right, place["y"] + down)
        for place in (panel["gridPos"] for panel in panels(board))
        for right in range(place["w"])
        for down in range(place["h"])
    ]
    assert len(cells) == len(set(cells)), "no panel is on another"


def test_grafana_reads_the_dashboard() -> None:
    """By its own types."""
    sdk = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="it comes with the extra dev")
    board = json.loads(DASHBOARD.read_text())
    read = sdk.Dashboard.from_json(board)
    assert read.title == "Quire" and len(read.panels) == len(board["panels"])


def promtool_or_skip() -> str:
    """Debian's, or that of the caller."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found


def test_prometheus_reads_the_rules(tmp_path: Path) -> None:
    promtool = promtool_or_skip()
    configuration = (FOLDER / "prometheus.yml").read_text().replace("/etc/prometheus/rules.yml", str(RULES))
    (tmp_path / "prometheus.yml").write_text(configuration)
    for kind, path in (("rules", RULES), ("config", tmp_path / "prometheus.yml")):
        done = subprocess.run([promtool, "check", kind, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def bucket(until: str, values: str) -> tuple[str, str]:
    return f'quire_time_to_first_token_seconds_bucket{{instance="ill", le="{until}"}}', values


FIRES: dict[str, tuple[list[tuple[str, str]], int, int]] = {
    "QuireDown": ([('up{job="quire", instance="ill"}', "1x4 0x30")], 5, 7),
    "QuireUnhealthy": ([('quire_healthy{instance="ill"}', "1x4 0x30")], 5, 7),
    "QuireNoServer": ([('quire_router_can_answer{instance="ill"}', "1x4 0x30")], 5, 7),
    "QuireServerLost": ([('quire_router_healthy{instance="ill"}', "1x4 0x30")], 5, 7),
    "QuireInvariantBroken": ([('quire_invariant_broken{instance="ill"}', "0x4 1x30")], 4, 5),
    "QuireEngineRestarted": ([('quire_engine_restarts_total{instance="ill"}', "0x4 1x30")], 4, 6),
    "QuirePageDamaged": ([('quire_canary_found_pages_total{instance="ill"}', "0x4 1x30")], 4, 6),
    "QuireRecordDamaged": ([('quire_tier_corrupt_records_total{instance="ill"}', "2x4 3x30")], 4, 6),
    "QuireStoreLost": ([('quire_store_lost{instance="ill"}', "0x4 1x30")], 9, 11),
    "QuireMemoryShort": (
        [
            ('quire_waiting_requests{instance="ill"}', "0x4 3x30"),
            ('quire_preemptions_total{instance="ill"}', "0x4 1+1x30"),
        ],
        14,
        18,
    ),
    "QuireSequencesFail": (
        [('quire_request_success_total{instance="ill", finished_reason="error"}', "0x4 1+1x30")],
        9,
        12,
    ),
    "QuireFirstTokenSlow": ([bucket("10.0", "0x30"), bucket("30.0", "0+9x30"), bucket("+Inf", "0+9x30")], 9, 13),
    "QuireEventsDropped": ([('quire_kv_events_dropped_total{instance="ill"}', "0x4 5x30")], 4, 6),
}
"""What makes each alert fire, a minute between values; when it does not yet, and when it does."""

RESTARTED = [('quire_steps_total{instance="ill", process="decode-0"}', "5x4 0+1x30")], 4, 6
"""A process of `quire up` that is started again, and counts anew."""

WELL = [
    *((f'{name}{{instance="well"}}', "0x30") for name in ("quire_invariant_broken", "quire_store_lost")),
    *(
        (f'{name}{{instance="well"}}', "1x30")
        for name in ("quire_healthy", "quire_router_healthy", "quire_router_can_answer")
    ),
    ('quire_steps_total{instance="well"}', "9x10 0+1x20"),  # it was started by hand
    ('quire_waiting_requests{instance="well"}', "5x30"),
    ('quire_preemptions_total{instance="well"}', "7x30"),
    ('quire_request_success_total{instance="well", finished_reason="stop"}', "0+9x30"),
]
"""A server on which nothing fires."""


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    promtool = promtool_or_skip()
    assert list(FIRES) == [name for name, *_ in ALERTS]
    groups = []
    told = {name: (severity, about) for name, _, _, severity, about in ALERTS}
    for name, (series, quiet, firing) in [*FIRES.items(), ("QuireEngineRestarted", RESTARTED)]:
        severity, about = told[name]
        labels = {"severity": severity, "instance": "ill"}
        labels |= {"job": "quire"} if name == "QuireDown" else {}
        labels |= {"finished_reason": "error"} if name == "QuireSequencesFail" else {}
        labels |= {"process": "decode-0"} if series == RESTARTED[0] else {}
        fired = [{"exp_labels": labels, "exp_annotations": {"summary": about}}]
        groups.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": at, "values": values} for at, values in [*WELL, *series]],
                "alert_rule_test": [
                    {"eval_time": f"{quiet}m", "alertname": name, "exp_alerts": []},
                    {"eval_time": f"{firing}m", "alertname": name, "exp_alerts": fired},
                    *(
                        {"eval_time": f"{firing}m", "alertname": other, "exp_alerts": []}
                        for other in FIRES
                        if other != name
                    ),
                ],
            }
        )
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": groups}))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_mounts_files_that_exist() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounted = [each.split(":")[0] for service in services.values() for each in service["volumes"] if each[0] == "."]
    assert len(mounted) == 5 and all((FOLDER / path).is_file() for path in mounted)
    source = yaml.safe_load((FOLDER / "datasource.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
