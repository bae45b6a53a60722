"""Log lines as text and as JSON, and those of a real server with its engine in a process of its own."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import millstream
from millstream.logs import JsonFormatter, TextFormatter
from millstream.request_context import RequestContext, in_request

CONTEXT = RequestContext("req_1", "openai", "/v1/chat/completions")


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def logger(stream: io.StringIO, formatter: logging.Formatter) -> logging.Logger:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    made = logging.Logger("test")
    made.addHandler(handler)
    return made


def test_text_names_the_request_once(stream: io.StringIO) -> None:
    log = logger(stream, TextFormatter())
    log.info("a line")
    with in_request(CONTEXT):
        log.warning("a %s", "warning")
        log.info("[req_1] another")
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in stream.getvalue().splitlines()]
    assert lines == ["I a line", "W req_1 a warning", "I [req_1] another"]


def test_json_is_one_object_per_line(stream: io.StringIO) -> None:
    log = logger(stream, JsonFormatter())
    log.info("two\nlines %s", "ü\ud800", extra={"fields": {"event": "request", "odd": Path("x")}})
    try:
        raise ValueError("oops")
    except ValueError:
        with in_request(CONTEXT):
            log.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "test", "two\nlines ü\ud800")
    assert (first["event"], first["odd"]) == ("request", "x") and "request_id" not in first
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert second["request_id"] == "req_1" and "ValueError: oops" in second["exception"]


def test_every_line_of_a_server_is_json(servable: Path) -> None:
    command = [sys.executable, "-m", "millstream", "serve", str(servable), "--port", "0", "--isolation", "process"]
    environment = {**os.environ, "PYTHONPATH": str(Path(millstream.__file__).parent.parent)}
    process = subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    lines: list[dict[str, Any]] = []
    try:
        for line in process.stderr:
            lines.append(json.loads(line))
            if found := re.search(r"API: (http://\S+)/v1,", lines[-1]["message"]):
                body = {"messages": [{"role": "user", "content": "swordfish"}], "max_tokens": 2}
                answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == 200
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
    [request] = [line for line in lines if line.get("event") == "request"]
    assert request["request_id"] == answer.headers["x-request-id"]
    assert (request["outcome"], request["completion_tokens"], request["model"]) == ("done", 2, "tiny")
    assert {"queue_seconds", "first_token_seconds", "total_seconds", "finish_reason"} <= request.keys()
    assert "swordfish" not in json.dumps(lines)
