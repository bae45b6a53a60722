"""examples/service and examples/proxy: units that their service managers accept, and streams through real proxies.

Skipped where nginx, Caddy or systemd are not installed; Debian has all of them."""

from __future__ import annotations

import argparse
import datetime
import os
import plistlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import millstream
from millstream.cli import serve
from millstream.config import Settings
from support.fake import FakeBackend, Gate
from support.server import running

EXAMPLES = Path(millstream.__file__).parent.parent.parent / "examples"
WAIT = 60
HOST = "llm.example.com"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "ignore_eos": True, "stream": True}


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)}: apt-get install nginx-light caddy systemd"
    )


@needs("systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "service" / "millstream.service").read_text()
    program = "/var/lib/millstream/venv/bin/millstream"
    assert f"ExecStart={program} serve " in text
    unit = tmp_path / "millstream.service"
    unit.write_text(text.replace(f"ExecStart={program}", f"ExecStart={sys.executable}"))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0 and "Unknown" not in done.stderr, done.stderr


def test_launchd_can_read_the_agent() -> None:
    agent = plistlib.loads((EXAMPLES / "service" / "com.millstream.server.plist").read_bytes())
    assert agent["Label"] == "com.millstream.server"
    assert agent["ProgramArguments"][1] == "serve"
    assert agent["ExitTimeOut"] > Settings().grace


def test_the_units_use_options_that_exist() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    known = set(commands.choices["serve"]._option_string_actions)
    for file in EXAMPLES.rglob("*"):
        if file.is_file() and file.parent.name in ("service", "proxy"):
            words = file.read_text().replace(";", " ").replace(")", " ").replace(".", " ").split()
            own = {word for word in words if word.startswith("--") and len(word) > 3}
            others = {"--now", "--system", "--create-home", "--home-dir"}
            assert own - others <= known, file


@contextmanager
def held_server(servable: Path) -> Iterator[tuple[int, Gate]]:
    gate = Gate()
    settings = Settings((str(servable),), port=0, allowed_hosts=(HOST,))
    with running(settings, lambda *_: FakeBackend(vocab_size=259, gate=gate)) as server:
        yield server.port, gate
        gate.open()


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[None]:
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env={**os.environ, "HOME": str(folder)}
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(WAIT)


def stream_through(url: str, gate: Gate, headers: dict[str, str]) -> None:
    """The first token must arrive while the model waits in a later step: no proxy may hold it back."""
    with httpx.Client(verify=False, timeout=WAIT, trust_env=False) as client:
        deadline = time.monotonic() + WAIT
        while True:
            try:
                assert client.get(f"{url}/health", headers=headers).status_code == 200
                break
            except httpx.TransportError:  # it starts
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for _ in range(6):
            gate.let_one()
        request = client.stream("POST", f"{url}/v1/chat/completions", json=BODY, headers=headers)
        with request as response:
            assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            assert next(lines) and next(lines), "tokens arrive, and the answer is far from complete"
            gate.open()
            assert list(lines)[-1] == "data: [DONE]"
        sent = client.get(f"{url}/v1/nothing", headers=headers)
        assert sent.status_code == 404 and sent.json()["error"]["request_id"] == sent.headers["x-request-id"]
        assert not sent.headers["x-request-id"].startswith("req_"), "the proxy's own id is used"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def write_certificate(certificate: Path, key_file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(1))
    signed = builder.not_valid_after(now + datetime.timedelta(1)).sign(key, hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@needs("nginx")
def test_streams_through_nginx(servable: Path, tmp_path: Path) -> None:
    text = (EXAMPLES / "proxy" / "nginx.conf").read_text()
    port = free_port()
    with held_server(servable) as (upstream, gate):
        for old, new in (
            ("127.0.0.1:8000", f"127.0.0.1:{upstream}"),
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            (f"/etc/ssl/{HOST}", f"{tmp_path}/tls"),
        ):
            assert old in text
            text = text.replace(old, new)
        write_certificate(tmp_path / "tls.pem", tmp_path / "tls.key")
        folders = "".join(
            f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;\n" if os.geteuid() == 0 else ""
        (tmp_path / "nginx.conf").write_text(
            f"{user}daemon off;\nmaster_process off;\npid {tmp_path}/pid;\nerror_log {tmp_path}/errors;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{folders}{text}}}\n"
        )
        nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
        with started([nginx, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")], tmp_path):
            stream_through(f"https://127.0.0.1:{port}", gate, {"host": HOST})


@needs("caddy")
def test_streams_through_caddy(servable: Path, tmp_path: Path) -> None:
    text = (EXAMPLES / "proxy" / "Caddyfile").read_text()
    port = free_port()
    with held_server(servable) as (upstream, gate):
        site = f"\n{HOST} {{"
        assert site in text and "127.0.0.1:8000" in text
        text = text.replace(site, f"\nhttp://127.0.0.1:{port} {{").replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
        (tmp_path / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{text}")
        with started(["caddy", "run", "--config", "Caddyfile", "--adapter", "caddyfile"], tmp_path):
            stream_through(f"http://127.0.0.1:{port}", gate, {})
