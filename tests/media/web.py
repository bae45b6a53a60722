"""A local HTTP server with scripted answers, which records the requested paths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.release = threading.Event()
        """Set when the test is over: slow answers end."""

    def body(self, path: str, data: bytes, *, kind: str = "image/png", length: bool = True) -> str:
        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.send_header("content-type", kind)
            if length:
                request.send_header("content-length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)

        self.answers[path] = answer
        return self.url + path

    def redirect(self, path: str, target: str, status: int = 302) -> str:
        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(status)
            request.send_header("location", target)
            request.send_header("content-length", "0")
            request.end_headers()

        self.answers[path] = answer
        return self.url + path

    def drip(self, path: str, piece: bytes, every: float) -> str:
        """A body that never ends, sent in pieces."""

        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            while not self.release.wait(every):
                request.wfile.write(piece)

        self.answers[path] = answer
        return self.url + path

    def silent(self, path: str) -> str:
        self.answers[path] = lambda request: self.release.wait(30) and None
        return self.url + path


@contextmanager
def running_web() -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.asked.append(self.path)
            answer = web.answers.get(self.path)
            try:
                if answer is None:
                    self.send_error(404)
                else:
                    answer(self)
            except OSError:
                self.close_connection = True  # some tests expect the client to hang up

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web = Web(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        web.release.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
