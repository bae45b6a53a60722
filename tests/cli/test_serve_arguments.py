"""Settings from the command line, the config file and the environment."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.cli import main, serve
from millstream.cli.arguments import duration, memory_size, origin
from millstream.cli.settings import settings_of
from millstream.config import FAST_PATH_ALIASES, FAST_PATHS, ModelSpec, Settings
from millstream.errors import ModelError
from millstream.server import bind, warn_if_open


def parse(*argv: str, environment: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return settings_of(parser.parse_args(["serve", *argv]), environment or {})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "mill.toml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_no_arguments_give_the_defaults() -> None:
    assert parse() == Settings()


def test_every_option_arrives() -> None:
    given = parse(
        *("a", "b", "--host", "::1", "--port", "1", "--body-limit", "2", "--max-batch", "3", "--queue", "0"),
        *("--policy", "fail-fast", "--prefill-chunk", "5", "--device", "cpu", "--isolation", "thread", "--no-blas"),
        *("--no-unpack", "--disable", "fuse", "--disable", "mkl-layout", "--grace", "6", "--cache-dir", "c"),
        *("--memory", "7GB", "--load", "use", "--idle-unload", "8m", "--step-timeout", "9", "--kv-bits", "4"),
        *("--tool-format", "glm", "--reasoning-format", "think"),
        *("--api-key", "k1", "--api-key", "k2", "--cors-origin", "*", "--cors-origin", "http://a"),
        *("--allowed-host", "Mill.example", "--allowed-host", "[FE80::1]", "--max-connections", "10"),
        *("--header-timeout", "11s", "--body-timeout", "0", "--max-token-gap", "12.5"),
        *("--speculation", "off", "--draft", "org/small", "--draft-depth", "4"),
    )
    assert given == Settings(
        models=("a", "b"),
        host="::1",
        port=1,
        body_limit=2,
        max_batch=3,
        queue=0,
        fail_fast=True,
        prefill_chunk=5,
        device="cpu",
        isolation="thread",
        blas=False,
        unpack=False,
        disabled=frozenset({"fuse", "mkl-layout"}),
        grace=6.0,
        cache_dir=Path("c"),
        memory=7 * 10**9,
        load="use",
        idle_unload=480.0,
        step_timeout=9.0,
        kv_bits=4,
        tool_format="glm",
        reasoning_format="think",
        api_keys=("k1", "k2"),
        cors_origins=("*", "http://a"),
        allowed_hosts=("mill.example", "fe80::1"),
        max_connections=10,
        header_timeout=11.0,
        body_timeout=0.0,
        max_token_gap=12.5,
        speculation="off",
        draft="org/small",
        draft_depth=4,
    )


@pytest.mark.parametrize("old, new", [("turn", "mkl-layout"), ("products", "fused-matmul")])
def test_old_names_of_fast_paths_still_work(old: str, new: str) -> None:
    assert FAST_PATH_ALIASES[old] == new
    assert old not in FAST_PATHS and new in FAST_PATHS
    assert parse("--disable", old).disabled == {new}
    assert parse("--disable", old, "--disable", new, "--disable", "fuse").disabled == {new, "fuse"}


def test_an_unknown_fast_path_is_refused_with_the_current_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--disable", "products-of-rows")
    error = capsys.readouterr().err
    assert "argument --disable: 'products-of-rows' is not one of" in error
    assert all(name in error for name in FAST_PATHS) and "turn" not in error


@pytest.mark.parametrize("gap", ["0", "-5", "70000", "nan", "inf", "50ms", ""])
def test_a_token_gap_that_is_no_number_of_milliseconds_is_refused(
    gap: str, write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(f"--max-token-gap={gap}")
    assert f"--max-token-gap: {gap!r} is not a number of milliseconds from 1 to 60000" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"max_token_gap.*from 1 to 60000"):
        parse("--config", write("[server]\nmax_token_gap = 0"))


SERVER = """
[server]
host = "0.0.0.0"
port = 9000
memory = "16GB"
load = "use"
idle_unload = "10m"
step_timeout = 30
isolation = "thread"
max_batch = 8
queue = 9
cors_origins = ["http://file"]
"""


def test_the_file_fills_what_the_command_line_leaves_out(write: Callable[[str], str]) -> None:
    assert parse("--config", write(SERVER)) == Settings(
        host="0.0.0.0",
        port=9000,
        memory=16 * 10**9,
        load="use",
        idle_unload=600.0,
        step_timeout=30.0,
        isolation="thread",
        max_batch=8,
        queue=9,
        cors_origins=("http://file",),
    )


def test_the_command_line_overrides_the_file_also_with_a_default(write: Callable[[str], str]) -> None:
    argv = ["--host", "127.0.0.1", "--port", "8000", "--memory", "1GB", "--load", "start", "--idle-unload", "0"]
    argv += ["--step-timeout", "120", "--isolation", "auto", "--max-batch", "32", "--queue", "256"]
    given = parse("--config", write(SERVER), *argv, "--cors-origin", "http://line")
    assert given == Settings(memory=10**9, cors_origins=("http://line",))


def test_models_of_both_are_served(write: Callable[[str], str]) -> None:
    config = write('[models.x]\nsource = "org/x"\n[models.d]\nsource = "demo"')
    given = parse("org/first", "--config", config)
    assert given.models == ("org/first", ModelSpec("org/x", "x"), ModelSpec(None, "d"))
    assert parse("--config", write("")).specs == (ModelSpec(None),)


@pytest.mark.parametrize("name", ["x", "y"])
def test_names_may_not_clash_between_them(write: Callable[[str], str], tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    config = write('[models.x]\nsource = "org/x"\nalias = "y"')
    with pytest.raises(ModelError, match=f"the model org/x: the name '{name}' is already used by the model .*/{name}"):
        parse(str(tmp_path / name), "--config", config)


def test_the_same_model_twice() -> None:
    with pytest.raises(ModelError, match="the name 'org/x' is already used"):
        parse("org/x", "org/x@main")


@pytest.mark.parametrize(
    "text, size",
    [
        ("16GB", 16 * 10**9),
        ("512mb", 512 * 10**6),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("3KiB", 3072),
        ("77B", 77),
        ("1024", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "0", "0GB", "-1", "1e9", "16G", "16 Gigs", "1,5GB", "9" * 30, "2000TB", "nan"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a memory size: use 16GB, 8GiB, 512MB or"):
        memory_size(text)


@pytest.mark.parametrize(
    "text, value", [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1.5H", 5400), ("0", 0), ("0.25", 0.25)]
)
def test_durations(text: str, value: float) -> None:
    assert duration(text) == value
    assert type(duration(text)) is float


@pytest.mark.parametrize("text", ["", "m", "-1", "1d", "10 min", "1h30m", "inf", "nan", "1e3", "8761h"])
def test_no_durations(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a duration: use 90s, 10m, 2h or a number of seconds"):
        duration(text)


@pytest.mark.parametrize("text", ["", "example.com", "http://a.example/", "https://a/b", "http://", "a b://c", "**"])
def test_no_origins(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not an origin: use https://"):
        origin(text)
    assert [origin(good) for good in ("*", "loopback", "HTTP://A:1", "tauri://localhost")] == [
        "*",
        "loopback",
        "http://a:1",
        "tauri://localhost",
    ]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--memory", "lots"], "argument --memory: 'lots' is not a memory size"),
        (["--idle-unload", "soon"], "argument --idle-unload: 'soon' is not a duration"),
        (["--step-timeout", "-1"], "argument --step-timeout: '-1' is not a duration"),
        (["--kv-bits", "3"], "argument --kv-bits: 3 is not one of 0, 4, 8"),
        (["--kv-bits", "all"], "argument --kv-bits: 'all' is not one of 0, 4, 8"),
        (["--load", "never"], "argument --load: 'never' is not one of start, use"),
        (["--cors-origin", "localhost"], "argument --cors-origin: 'localhost' is not an origin"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_the_command_reports_a_bad_file(capsys: pytest.CaptureFixture[str], write: Callable[[str], str]) -> None:
    file = write("[server]\nprot = 1")
    assert main(["serve", "--config", file]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"millstream: {file}: [server] has no option 'prot'; did you mean 'port'?")


FILE_KEYS = ("file-1", "file-2", "file#4")


def test_the_first_place_that_sets_keys_decides_about_all_of_them(write: Callable[..., str]) -> None:
    keys = write("# ours\n\n  file-1  \nfile-2\r\n#file-3\nfile#4\nfile-1\n", "keys")
    config = write('[server]\napi_keys = ["toml"]\napi_key_file = "keys"')
    environment = {"MILLSTREAM_API_KEY": "from-env\n"}
    assert parse("--api-key-file", keys).api_keys == FILE_KEYS
    assert parse("--config", config).api_keys == ("toml", *FILE_KEYS)
    assert parse("--config", config, "--api-key", "a").api_keys == ("a",)
    assert parse("--api-key", "a", "--api-key-file", keys, "--api-key", "b").api_keys[:3] == ("a", "b", "file-1")
    assert parse(environment=environment).api_keys == ("from-env",)
    assert parse("--api-key", "a", environment=environment).api_keys == ("a",)
    assert parse("--config", config, environment=environment).api_keys == ("from-env",)
    environment["MILLSTREAM_API_KEYS"] = "one, two"
    environment["MILLSTREAM_API_KEY_FILE"] = keys
    assert parse("--config", config, environment=environment).api_keys == ("one", "two", "from-env", *FILE_KEYS)
    assert parse(environment={"MILLSTREAM_API_KEY": "with,comma"}).api_keys == ("with,comma",)
    for empty in ("", " , "):
        with pytest.raises(ModelError, match="MILLSTREAM_API_KEYS: the API key is empty"):
            parse(environment={"MILLSTREAM_API_KEYS": empty})


@pytest.mark.parametrize("key", ["", "  ", "two words", "tab\tbed", "new\nline", "\udcff"])
def test_keys_that_a_header_cannot_carry(write: Callable[..., str], key: str) -> None:
    words = "the API key is empty" if not key.strip() else "contains a space or a character that is not printable"
    with pytest.raises(ModelError, match=f"^--api-key: .*{words}"):
        parse("--api-key", key)
    with pytest.raises(ModelError, match=f"MILLSTREAM_API_KEY: .*{words}"):
        parse(environment={"MILLSTREAM_API_KEY": key})
    if key.isprintable():
        with pytest.raises(ModelError, match=rf"mill.toml: server.api_keys: .*{words}") as caught:
            parse("--config", write(f'[server]\napi_keys = ["{key}"]'))
        assert "two" not in caught.value.message


def test_bad_key_files(write: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="keys has no API key: write one per line"):
        parse("--api-key-file", write("# nothing\n \n", "keys"))
    with pytest.raises(ModelError, match=r"cannot read the API keys in .*none: No such file"):
        parse("--api-key-file", str(tmp_path / "none"))
    with pytest.raises(ModelError, match=r"cannot read the API keys in .*none: No such file"):
        parse("--config", write('[server]\napi_key_file = "none"'))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match="not UTF-8"):
        parse("--api-key-file", str(tmp_path / "latin"))
    with pytest.raises(ModelError, match="keys: an API key contains a space"):
        parse("--api-key-file", write("two words", "keys"))


@pytest.fixture
def options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The help text of each option of `serve`."""
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = capsys.readouterr().out
    return {part.split()[0]: part for part in re.split(r"\n  (?=-)", text)[1:]}


def test_help_shows_the_defaults(options: dict[str, str]) -> None:
    shown = {"--host": "127.0.0.1", "--port": "8000", "--max-batch": "32", "--queue": "256", "--kv-bits": "0"}
    shown |= {"--memory": "what the device has", "--prefill-chunk": "measured at load"}
    shown |= {"--load": "start", "--idle-unload": "never", "--step-timeout": "2m", "--isolation": "auto"}
    shown |= {"--max-token-gap": "50"}
    shown |= {
        "--body-limit": "32MiB",
        "--grace": "20s",
        "--policy": "queue",
        "--log-level": "info",
        "--kv-bits": "0",
    }
    for option, default in shown.items():
        assert f"(default: {default})" in options[option]


def test_help_names_every_fast_path(options: dict[str, str]) -> None:
    text = " ".join(options["--disable"].split())
    assert all(f"{name}: {effect}" in text for name, effect in FAST_PATHS.items())


@pytest.mark.parametrize(
    "host, keys, warns",
    [
        ("127.0.0.1", (), False),
        ("127.0.0.2", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("", (), True),
        ("0.0.0.0", ("key",), False),
    ],
)
def test_an_open_server_on_the_network_logs_a_warning(
    caplog: pytest.LogCaptureFixture, host: str, keys: tuple[str, ...], warns: bool
) -> None:
    settings = Settings(host=host, port=0, api_keys=keys)
    with bind(settings) as listener, caplog.at_level(logging.WARNING):
        warn_if_open(listener, settings)
    assert bool(caplog.records) == warns
    if warns:
        assert "anyone who can reach 0.0.0.0" in caplog.text and "--api-key" in caplog.text
