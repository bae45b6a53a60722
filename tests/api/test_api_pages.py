"""The web pages over HTTP: who gets HTML, which headers it has, and what is open without a key."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx
import pytest

from millstream.api.pages.assets import FOLDER, TYPES, read_assets
from millstream.api.pages.routes import PAGES

HTML = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SHOWN = [path for path, name in PAGES.items() if name in read_assets()]


@pytest.fixture(scope="module")
def _keyed(open_client) -> httpx.Client:
    return open_client(body_limit=10_000, api_keys=("secret",))


@pytest.fixture
def keyed(_keyed, stage, service) -> httpx.Client:
    stage.service = service
    return _keyed


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/htmlx, */*"])
def test_the_root_is_json_unless_html_is_asked_for(http, accept):
    response = http.get("/", headers={} if accept is None else {"accept": accept})
    assert response.json()["name"] == "Millstream"
    assert "accept" in response.headers["vary"].lower()


@pytest.mark.parametrize("path", SHOWN)
def test_browsers_get_pages(http, path):
    response = http.get(path, headers=HTML)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")
    assert http.head(path, headers=HTML).headers["etag"] == response.headers["etag"]
    assert "accept" in http.get("/", headers=HTML).headers["vary"].lower()


class _Addresses(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("src") if tag == "script" else given.get("href") if tag == "link" else None
        if address:
            self.found.append(address)
        if (tag == "script" and "src" not in given) or tag == "style" or any(name.startswith("on") for name in given):
            self.inline.append(tag)


@pytest.mark.parametrize("path", SHOWN)
def test_pages_name_files_that_are_there_and_nothing_inline(http, path):
    page = _Addresses()
    page.feed(http.get(path, headers=HTML).text)
    assert page.found and not page.inline
    for address in page.found:
        assert address.startswith("/page/"), "pages load from their own server only"
        assert http.get(address).status_code == 200, address


def test_scripts_import_files_that_are_there():
    for path in [*FOLDER.glob("common/*.js"), *FOLDER.glob("chat/*.js"), *FOLDER.glob("docs/*.js")]:
        for name in re.findall(r'^(?:import|export) .*?from "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            assert name.startswith("."), f"{path.name} imports {name}"
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"


def test_every_response_has_the_policy(http):
    for response in (http.get("/", headers=HTML), http.get("/page/chat/main.js"), http.get("/docs")):
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == (
            "'none'",
            "'self'",
            "'none'",
        )
        assert "unsafe" not in response.headers["content-security-policy"]
        assert "http" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "name, content_type",
    [
        ("chat/main.js", "text/javascript; charset=utf-8"),
        ("common/theme.css", "text/css; charset=utf-8"),
        ("common/icon.svg", "image/svg+xml"),
        ("vendor/dompurify/purify.es.mjs", "text/javascript; charset=utf-8"),
        ("vendor/temml/Temml.woff2", "font/woff2"),
        ("vendor/marked/LICENSE.txt", "text/plain; charset=utf-8"),
    ],
)
def test_files_have_their_type_and_are_not_sent_twice(http, name, content_type):
    first = http.get(f"/page/{name}")
    assert first.headers["content-type"] == content_type
    assert first.content == (FOLDER / name).read_bytes()
    tag = first.headers["etag"]
    for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        again = http.get(f"/page/{name}", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get(f"/page/{name}", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/../server.py", "/page/%2e%2e/server.py", "/page/", "/page/vendor/README.md"]
)
def test_nothing_else_is_served(http, path):
    response = http.get(path)
    assert response.status_code == 404 and response.json()["error"]["code"] == "unknown_url"


def test_pages_accept_get_only(http):
    response = http.post("/docs", json={})
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize("path", [*SHOWN, "/page/chat/main.js", "/page/common/theme.css"])
def test_pages_and_their_files_need_no_key(keyed, path):
    assert keyed.get(path, headers=HTML).status_code == 200
    assert keyed.head(path, headers=HTML).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/openapi.json", "/metrics", "/pages", "/page"])
def test_everything_else_needs_the_key(keyed, path):
    assert keyed.get(path).status_code == 401
    assert keyed.post("/page/chat/main.js", headers=HTML).status_code == 401


@pytest.mark.parametrize("host", ["localhost:4711", "127.0.0.1", "[::1]:80", "mill.example"])
def test_the_page_may_call_from_wherever_it_is_served(http, host):
    """Its requests carry the origin of the page and the same host."""
    headers = {"host": host, "origin": f"http://{host}"}
    assert http.get("/v1/models", headers=headers).status_code == 200
    assert http.get("/v1/models", headers={**headers, "origin": "http://evil.example"}).status_code == 403


def test_the_vendored_libraries_bring_their_licences():
    named = (FOLDER / "vendor" / "README.md").read_text(encoding="utf-8")
    for folder in (FOLDER / "vendor").iterdir():
        if folder.is_dir():
            assert (folder / "LICENSE.txt").is_file()
            assert f"`{folder.name}/`" in named


def test_no_file_of_ours_is_long():
    for path in FOLDER.rglob("*"):
        if path.suffix in TYPES and "vendor" not in path.parts and path.suffix in (".js", ".css", ".html"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, path.name
