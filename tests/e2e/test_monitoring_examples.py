"""examples/monitoring: a real Prometheus scrapes a real server, and each query of the dashboard and of the alerts gives
data. Skipped where Prometheus is not installed; Debian has it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import millstream
from millstream.config import Settings
from millstream.engine.generation.plan import Plan, StepResult
from millstream.service.generation.metrics import GenerationMetrics
from millstream.service.metrics import Metrics
from support.fake import FakeBackend
from support.server import running

ROOT = Path(millstream.__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "monitoring"
WAIT = 120
NEEDS = "needs prometheus and promtool: apt-get install prometheus"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}

needs_prometheus = pytest.mark.skipif(not (shutil.which("prometheus") and shutil.which("promtool")), reason=NEEDS)


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return loaded


def queries() -> list[str]:
    """Of all panels, with Grafana's variables filled in."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [query.replace("$model", ".*").replace("$__rate_interval", "1m") for query in found]


def metric_names() -> set[str]:
    """All that the server exposes, as in the text format."""
    metrics = Metrics()
    GenerationMetrics(metrics)
    names = {metric.name for metric in metrics.registry.collect()}
    return names | {f"{name}{suffix}" for name in names for suffix in ("_total", "_bucket")}


def test_the_dashboard_is_well_formed() -> None:
    page = dashboard()
    assert page["uid"] == "millstream" and page["schemaVersion"] >= 36
    assert {variable["name"] for variable in page["templating"]["list"]} == {"datasource", "model"}
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)), "panels overlap"
    for panel in panels:
        assert panel["type"] == "timeseries" and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert target["legendFormat"]


def test_queries_alerts_and_docs_name_metrics_that_exist() -> None:
    names = metric_names()
    for text in (*queries(), (FOLDER / "alerts.yml").read_text()):
        assert set(re.findall(r"\bmillstream_\w+", text)) <= names, text
    listed = set(re.findall(r"^\| `(millstream_\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    metrics = Metrics()
    GenerationMetrics(metrics)
    counters = {metric.name: metric.type == "counter" for metric in metrics.registry.collect()}
    assert listed == {f"{name}_total" if counter else name for name, counter in counters.items()}


@needs_prometheus
def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "config", FOLDER / "prometheus.yml"], check=True, capture_output=True)
    test = tmp_path / "test.yml"
    test.write_text(ALERT_TEST.replace("RULES", str(FOLDER / "alerts.yml")))
    done = subprocess.run(["promtool", "test", "rules", test], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


ALERT_TEST = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'up{job="millstream", instance="a"}', values: '1 1 0 0 0'}
      - {series: 'millstream_engine_restarts{model="m"}', values: '0 0 1 1 1'}
      - {series: 'millstream_model_failed{model="m"}', values: '0 0 0 0 0'}
    alert_rule_test:
      - eval_time: 1m
        alertname: MillstreamDown
      - eval_time: 4m
        alertname: MillstreamDown
        exp_alerts:
          - exp_labels: {severity: critical, job: millstream, instance: a}
            exp_annotations:
              summary: Millstream at a does not answer.
              description: Look at the service's log. It may have been out of memory; then use a smaller --memory.
      - eval_time: 4m
        alertname: MillstreamEngineRestarts
        exp_alerts:
          - exp_labels: {severity: warning, model: m}
            exp_annotations:
              summary: The engine of m crashed and was restarted.
              description: The log has the cause. Requests that ran at that moment failed.
      - eval_time: 4m
        alertname: MillstreamModelFailed
"""


class Pausing(FakeBackend):
    """Waits in each step while `free` is not set."""

    def __init__(self, free: threading.Event) -> None:
        super().__init__(max_rows=1, vocab_size=259)
        self._free = free

    def step(self, plan: Plan) -> StepResult:
        assert self._free.wait(WAIT)
        return super().step(plan)


@needs_prometheus
def test_every_query_of_the_dashboard_gives_data(servable: Path, tmp_path: Path) -> None:
    free = threading.Event()
    free.set()
    settings = Settings((str(servable),), port=0, max_batch=1, queue=0)
    with (
        running(settings, lambda *_: Pausing(free)) as server,
        prometheus(server.port, tmp_path) as url,
        httpx.Client(base_url=server.url, timeout=WAIT) as http,
    ):
        until(lambda: result(url, "up") == [1.0])
        for count in (1.0, 2.0):  # a rate needs two scrapes, and the series must be there in the first
            use(http, free)
            until(lambda count=count: result(url, "millstream_rejected_total") == [count])
        empty = {query for query in queries() if not result(url, query)}
        assert not empty
        first = "histogram_quantile(0.5, sum by (le) (rate(millstream_time_to_first_token_seconds_bucket[1m])))"
        assert result(url, first)[0] > 0
        until(lambda: rules(url) == ["ok"] * 6)


def use(http: httpx.Client, free: threading.Event) -> None:
    """One request that is served, and one that finds the server full meanwhile."""
    free.clear()
    thread = threading.Thread(target=http.post, args=("/v1/chat/completions",), kwargs={"json": BODY})
    thread.start()
    until(lambda: http.get("/v1/models").json()["data"][0]["active"] == 1)
    refused = http.post("/v1/chat/completions", json=BODY)
    free.set()
    thread.join(WAIT)
    assert refused.status_code == 503


def rules(url: str) -> list[str]:
    """The health of each alert's expression, once it was evaluated."""
    groups = httpx.get(f"{url}/api/v1/rules", timeout=WAIT).json()["data"]["groups"]
    return [rule["health"] for group in groups for rule in group["rules"]]


def result(url: str, query: str) -> list[float]:
    reply = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=WAIT)
    if reply.status_code == 503:
        raise httpx.ConnectError("Prometheus listens before it is ready")
    answer = reply.json()
    assert answer["status"] == "success", (query, answer)
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:  # it starts
            pass
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@contextmanager
def prometheus(target: int, folder: Path) -> Iterator[str]:
    """The configuration of the example, for a server at another port and with a shorter interval."""
    text = (FOLDER / "prometheus.yml").read_text()
    assert "127.0.0.1:8000" in text and "15s" in text
    (folder / "prometheus.yml").write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{target}").replace("15s", "1s"))
    shutil.copy(FOLDER / "alerts.yml", folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
