"""OpenTelemetry spans of a real server: what they say, whose children they are, and a collector that hangs."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from millstream.config import Settings
from millstream.errors import BadRequest, MillstreamError, ModelError, StepFailed
from millstream.request_context import RequestContext, in_request
from millstream.service.journal import Journal, Phase
from millstream.service.telemetry.setup import is_installed, open_telemetry
from millstream.service.telemetry.spans import RequestSpans
from millstream.types import Usage
from support.fake import FakeBackend
from support.server import running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
BODY = {"messages": [{"role": "user", "content": "a swordfish swims"}], "max_tokens": 4, "ignore_eos": True}


def spans_of(traceparent: str | None, error: MillstreamError | None = None) -> dict[str, ReadableSpan]:
    """The spans of a request, by name."""
    exporter = InMemorySpanExporter()
    journal = Journal(RequestSpans(SimpleSpanProcessor(exporter)).ended)
    trace = {} if traceparent is None else {"traceparent": traceparent}
    with in_request(RequestContext("req_1", "openai", "/v1/chat/completions", trace)):
        record = journal.open("alias", "chat")
    record.found("tiny")
    for phase in Phase:
        record.enter(phase)
    journal.end(record, "done" if error is None else "failed", Usage(9, 4, 3), finish_reason="stop", error=error)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_phases_below_it() -> None:
    spans = spans_of(TRACEPARENT)
    assert set(spans) == {"chat tiny", "prepare", "queue", "prefill", "decode"}
    root = spans["chat tiny"]
    assert root.kind is SpanKind.SERVER and root.status.status_code is StatusCode.UNSET
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT
    assert root.start_time is not None and root.end_time is not None
    for name in Phase:
        child = spans[name]
        assert f"{child.context.trace_id:032x}" == TRACE
        assert child.parent is not None and child.parent.span_id == root.context.span_id
        assert child.start_time is not None and child.end_time is not None
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time
    assert root.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "millstream.request_id": "req_1",
    }
    assert expected.items() <= root.attributes.items()
    assert root.resource.attributes["service.name"] == "millstream"


def test_errors_of_the_server_are_errors_and_the_client_is_not_quoted() -> None:
    failed = spans_of(None, StepFailed("bang"))["chat tiny"]
    assert failed.parent is None and failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None and failed.attributes["error.type"] == "engine_error"
    refused = spans_of("nonsense", BadRequest("swordfish", param="messages"))["chat tiny"]
    assert refused.parent is None and refused.status.status_code is StatusCode.UNSET
    assert "swordfish" not in refused.to_json()


def test_a_client_that_does_not_sample_gets_no_spans() -> None:
    assert spans_of(f"00-{TRACE}-{PARENT}-00") == {}


def test_it_is_on_only_if_asked_for_and_installed(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert is_installed()
    assert open_telemetry(False, {}) is None
    assert open_telemetry(False, endpoint | {"OTEL_SDK_DISABLED": "true"}) is None
    assert open_telemetry(True, {"OTEL_TRACES_EXPORTER": "none"}) is None
    with pytest.raises(ModelError, match=r"pip install 'millstream\[otel\]'"):
        open_telemetry(True, {}, installed=lambda: False)
    assert open_telemetry(False, endpoint, installed=lambda: False) is None
    assert "no spans are exported" in caplog.text


class Collector(ThreadingHTTPServer):
    """Stands in for a collector of OpenTelemetry. With `hold`, it accepts requests and does not answer."""

    def __init__(self, *, hold: bool) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.got = threading.Event()
        self.release = threading.Event()
        if not hold:
            self.release.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def spans(self) -> dict[str, Any]:
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        self.server.requests.append(ExportTraceServiceRequest.FromString(data))
        self.server.got.set()
        self.server.release.wait(60)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch, *, hold: bool = False) -> Iterator[Collector]:
    with Collector(hold=hold) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        try:
            yield collector
        finally:
            collector.release.set()
            collector.shutdown()
            thread.join(60)


def test_spans_reach_a_collector(
    servable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with collecting(monkeypatch) as collector:
        with running(Settings((str(servable),), port=0), lambda *_: FakeBackend(vocab_size=259)) as server:
            url = f"{server.url}/v1/chat/completions"
            assert httpx.post(url, json=BODY, headers={"traceparent": TRACEPARENT}, timeout=60).status_code == 200
        spans = collector.spans
    assert set(spans) == {"chat tiny", "prepare", "queue", "prefill", "decode"}, "the rest is exported at the end"
    assert spans["chat tiny"].trace_id.hex() == TRACE and spans["chat tiny"].parent_span_id.hex() == PARENT
    assert "exporting OpenTelemetry spans to http://127.0.0.1" in caplog.text


def test_a_collector_that_hangs_holds_up_nobody(
    servable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting(monkeypatch, hold=True) as collector:
        with running(Settings((str(servable),), port=0), lambda *_: FakeBackend(vocab_size=259)) as server:
            url = f"{server.url}/v1/chat/completions"
            assert httpx.post(url, json=BODY, timeout=60).status_code == 200
            assert collector.got.wait(60), "the export has begun, and does not end"
            assert httpx.post(url, json=BODY, timeout=60).status_code == 200
            server.call(lambda running: setattr(running.mill, "_telemetry", _Impatient(running.mill._telemetry)))
        assert "the last spans are lost" in caplog.text
    # The thread that closes ends now: nothing is left behind for the next test.
    deadline = time.monotonic() + 60
    while any(thread.name == "otel-close" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class _Impatient:
    """Closes without the usual patience, to save time."""

    def __init__(self, spans: RequestSpans) -> None:
        self._spans = spans

    async def close(self) -> None:
        await asyncio.wait_for(self._spans.close(0.1), 60)
