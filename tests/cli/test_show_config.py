"""`serve --show-config`: what is in force, where it is set, and no secrets; and the two forms of the help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.cli import main
from millstream.cli.serve_options import GROUPS, OPTIONS
from millstream.cli.toml_lines import find_lines

FILE = """\
[server]
port = 9000  # a comment
api_key_file = "keys"
memory = "16GB"

[models.small]
source = "demo"
alias = ["tiny"]
[models.small.sampling]
temperature = 0.5

[mcp.servers.files]
command = "npx"
args = ["secret-argument"]
env = { TOKEN = "secret-variable" }
[mcp.servers.web]
url = "https://user:secret-password@web.example:8443/mcp?key=secret-query"
headers = { Authorization = "secret-header" }
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "keys").write_text("secret-in-file")
    (tmp_path / "mill.toml").write_text(FILE)
    monkeypatch.setenv("MILLSTREAM_QUEUE", "7")
    monkeypatch.setenv("MILLSTREAM_QUEU", "8")
    return str(tmp_path / "mill.toml")


def test_the_table(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", file, "--show-config", "--host", "::1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Config file: {file}\n")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    assert rows.keys() >= {*OPTIONS, "small", "files", "web"}
    assert rows["host"] == ["--host", "::1"]
    assert rows["port"] == ["mill.toml:2", "9000"]
    assert rows["memory"] == ["mill.toml:4", "16GB"]
    assert rows["queue"] == ["MILLSTREAM_QUEUE", "7"]
    assert rows["max_batch"] == ["default", "32"]
    assert " ".join(rows["small"]) == 'mill.toml:6 demo; alias = ["tiny"], sampling = {"temperature": 0.5}'
    assert rows["web"] == ["mill.toml:16", "https://web.example:8443"]
    assert "Warning:" in text and "did you mean MILLSTREAM_QUEUE?" in text
    assert "secret" not in text


def test_json(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_API_KEY", "secret-key")
    assert main(["serve", "org/first", "--config", file, "--show-config", "--json", "--api-key", "secret-flag"]) == 0
    text = capsys.readouterr().out
    shown = json.loads(text)
    assert shown["config_file"] == file
    assert shown["options"].keys() == OPTIONS.keys()
    port = {"value": 9000, "from": "file", "where": f"{file}:2", "flag": "--port", "variable": "MILLSTREAM_PORT"}
    assert shown["options"]["port"] == port
    assert shown["options"]["memory"]["value"] == 16 * 10**9
    assert shown["options"]["api_keys"]["value"] == "(hidden)"
    assert shown["options"]["api_key"] | {"value": None, "from": "default"} == shown["options"]["api_key"]
    assert shown["models"] == [
        {"name": "org/first", "from": "flag", "where": "command line", "options": {"source": "org/first"}},
        {
            "name": "small",
            "from": "file",
            "where": f"{file}:6",
            "options": {"source": "demo", "alias": ["tiny"], "sampling": {"temperature": 0.5}},
        },
    ]
    assert shown["mcp_servers"][0] == {"name": "files", "target": "npx"}
    assert len(shown["warnings"]) == 1
    assert "secret" not in text


def test_json_without_show_config_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--json"]) == 1
    assert "add --show-config" in capsys.readouterr().err


def help_of(form: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", form])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_short_help_has_what_most_people_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = help_of("--help", capsys), help_of("--help-all", capsys)
    assert short == help_of("-h", capsys)
    order = ["MODEL", "--host", "--port", "--api-key ", "--memory", "--config", "--help-all", "examples:"]
    places = [short.index(f"\n  {word}" if word.startswith("--") and word != "--help-all" else word) for word in order]
    assert places == sorted(places)
    assert "--max-batch" not in short and len(short.splitlines()) < 60
    titles = [f"\n{group.title}:\n" for group in GROUPS]
    assert [title for title in titles if title not in long] == []
    assert [long.index(title) for title in titles] == sorted(map(long.index, titles))
    assert all(f"  {option.flag}" in long for option in OPTIONS.values() if "flag" in option.places)
    assert "MILLSTREAM_MAX_BATCH" in long and "examples:" in long
    assert max(map(len, short.splitlines())) <= 82


def test_lines_are_found_where_they_are_sure() -> None:
    text = 'a = 1\n\n[models."qwen2.5"] # x\n  source = "b = c"\nsampling.top_p = 1\nlist = [\n  "[server]",\n]\n'
    assert find_lines(text) == {
        ("a",): 1,
        ("models", "qwen2.5"): 3,
        ("models", "qwen2.5", "source"): 4,
        ("models", "qwen2.5", "sampling", "top_p"): 5,
        ("models", "qwen2.5", "list"): 6,
    }
    assert find_lines(text + 'b = """\n[server]\nport = 1\n"""') == {}
