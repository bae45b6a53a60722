"""The config file: what it sets, and what its errors say."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from millstream.api.openai.schema import TextRequest
from millstream.cli.config_file import MODEL, SAMPLING, SERVER, ConfigFile, read_config
from millstream.cli.serve_options import OPTIONS
from millstream.config import ModelSpec, Settings
from millstream.errors import ModelError
from millstream.types import Sampling

Reads = Callable[[str], ConfigFile]


@pytest.fixture
def read(tmp_path: Path) -> Reads:
    def read(text: str) -> ConfigFile:
        file = tmp_path / "mill.toml"
        file.write_text(text, encoding="utf-8")
        return read_config(file)

    return read


def test_everything(read: Reads) -> None:
    config = read(
        """
        [server]
        host = "0.0.0.0"
        port = 9000
        memory = "16GB"
        load = "use"
        idle_unload = "10m"
        step_timeout = 30
        isolation = "thread"
        max_batch = 8
        kv_bits = 8
        queue = 0
        max_token_gap = 80
        api_keys = ["one", "two"]
        cors_origins = ["http://localhost:3000", "https://App.Example"]

        [models.small]
        source = "org/name@main"
        alias = "s"
        kind = "generation"
        pin = true
        load = "start"
        idle_unload = 90
        max_batch = 4
        isolation = "process"
        kv_memory = "2GiB"
        kv_bits = 0
        max_tokens = 512
        tool_format = "mistral"
        reasoning_format = "none"

        [models.small.sampling]
        temperature = 0.7
        top_p = 1
        top_k = -1
        min_p = 0.05
        repetition_penalty = 1.1
        presence_penalty = -2
        frequency_penalty = 2

        [models."Org/Other-2.5"]
        source = "demo"
        alias = ["a", "b"]
        """
    )
    assert config.server == {
        "host": "0.0.0.0",
        "port": 9000,
        "memory": 16 * 10**9,
        "load": "use",
        "idle_unload": 600.0,
        "step_timeout": 30.0,
        "isolation": "thread",
        "max_batch": 8,
        "kv_bits": 8,
        "queue": 0,
        "max_token_gap": 80.0,
        "api_keys": ("one", "two"),
        "cors_origins": ("http://localhost:3000", "https://app.example"),
    }
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.05, "repetition_penalty": 1.1}
    sampling |= {"presence_penalty": -2.0, "frequency_penalty": 2.0}
    assert config.models == (
        ModelSpec(
            source="org/name@main",
            name="small",
            aliases=("s",),
            kind="generation",
            pin=True,
            load="start",
            idle_unload=90.0,
            max_batch=4,
            isolation="process",
            kv_memory=2 * 2**30,
            kv_bits=0,
            max_tokens=512,
            tool_format="mistral",
            reasoning_format="none",
            sampling=tuple(sampling.items()),
        ),
        ModelSpec(source=None, name="Org/Other-2.5", aliases=("a", "b")),
    )
    assert type(dict(config.models[0].sampling)["top_k"]) is int
    Sampling(**dict(config.models[0].sampling))  # type: ignore[arg-type]


def test_what_is_left_out_stays_open(read: Reads) -> None:
    assert read("") == ConfigFile((), {})
    assert read('[models.x]\nsource = "org/x"').models == (ModelSpec("org/x", "x"),)


def test_paths_count_from_the_file(
    read: Reads, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    absolute = tmp_path / "here" / "model"
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))

    def source(text: str) -> str | None:
        return read(f"[models.x]\nsource = {text!r}").models[0].source

    assert source("here/model") == str(absolute)
    assert source("./here/model") == str(absolute)
    assert source("../not/there") == str(tmp_path / "../not/there")
    assert source("./org/name") == str(tmp_path / "org/name")
    assert source(".") == str(tmp_path)
    assert source("org/name") == "org/name"
    assert source("away.gguf") == "away.gguf"
    assert source(str(absolute)) == str(absolute)
    assert source("~/model") == "~/model"
    (tmp_path / "demo").mkdir()
    assert source("demo") is None
    assert source("./demo") == str(tmp_path / "demo")


def test_draft_models_are_named_like_models(read: Reads, tmp_path: Path) -> None:
    config = read(
        """
        [server]
        draft = "./small"

        [models.one]
        source = "org/one"
        draft = "../draft.gguf"
        draft_depth = 3
        speculation = "off"

        [models.two]
        source = "org/two"
        draft = "demo"

        [models.three]
        source = "org/three"
        draft = "none"
        """
    )
    assert config.server["draft"] == str(tmp_path / "./small")
    assert [model.draft for model in config.models] == [str(tmp_path / "../draft.gguf"), "demo", "none"]
    assert (config.models[0].draft_depth, config.models[0].speculation) == (3, "off")


def test_a_relative_file_gives_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ./org/name would turn into org/name, a hub id."""
    monkeypatch.chdir(tmp_path)
    Path("mill.toml").write_text('[server]\napi_key_file = "keys"\n[models.x]\nsource = "./org/name"')
    config = read_config(Path("mill.toml"))
    assert config.models[0].source == str(tmp_path / "org/name")
    assert config.server["api_key_file"] == tmp_path / "keys"


X = '[models.x]\nsource = "org/x"\n'


@pytest.mark.parametrize(
    "text, words",
    [
        ("[server\nport = 1", ["not valid TOML", "line 1"]),
        (X + X, ["not valid TOML", "twice"]),
        ("[modles.x]", ["no table 'modles'", "did you mean 'models'?"]),
        ("[zzz]", ["no table 'zzz'", "Known: models, server"]),
        ("port = 1", ["no option 'port' at the top level", "below a line [server]"]),
        ("server = 3", ["server must be a table"]),
        ("models = ['a']", ["[models.NAME]"]),
        ("[[models]]\nsource = 'a'", ["[models.NAME]"]),
        ("[models]\nx = 'org/x'", ["models.x must be a table", "[models.x]"]),
        ("[models.x]\npin = true", ["[models.x] needs a source", "hub id", '"demo"']),
        ('[models.""]\nsource = "a"', ["empty name"]),
        ("[models.qwen2.5]\nsource = 'a'", ["[models.qwen2] has no table '5'", '[models."qwen2.5"]']),
        (X + "alais = 'y'", ["[models.x] has no option 'alais'", "did you mean 'alias'?", "source, kind, alias, pin"]),
        (X + "[models.x.smapling]", ["no table 'smapling'", "did you mean 'sampling'?"]),
        (X + "[models.x.sampling]\ntemprature = 1", ["[models.x.sampling]", "did you mean 'temperature'?"]),
        (X + "sampling = 1", ["models.x.sampling must be a table"]),
        ("[server]\nprot = 1", ["[server] has no option 'prot'", "did you mean 'port'?"]),
        ("[models.x]\nsource = 5", ["models.x.source: 5 is not a string"]),
        ("[models.x]\nsource = ''", ["models.x.source: '' is not a string", "not empty"]),
        ('[models."a b"]\nsource = 5', ['models."a b".source']),
        (X + "alias = ['y', 1]", ["models.x.alias: 1 is not a string"]),
        (X + "pin = 1", ["models.x.pin: 1 is not true or false"]),
        (X + "load = 'strat'", ["models.x.load: 'strat' is not one of start, use"]),
        (X + "isolation = true", ["models.x.isolation: true is not one of auto, thread, process"]),
        (X + "max_batch = 0", ["models.x.max_batch: 0 is not an integer from 1"]),
        (X + "max_batch = true", ["models.x.max_batch: true is not an integer"]),
        (X + 'tool_format = "hermess"', ["models.x.tool_format: 'hermess' is not one of auto, none, harmony"]),
        (X + "max_tokens = 2.5", ["models.x.max_tokens: 2.5 is not an integer from 1"]),
        (X + "idle_unload = '10 days'", ["models.x.idle_unload: '10 days' is not a duration: use 90s, 10m, 2h"]),
        (X + "idle_unload = -1", ["models.x.idle_unload", "is not a duration"]),
        (X + "idle_unload = nan", ["models.x.idle_unload", "is not a duration"]),
        (X + "idle_unload = true", ["models.x.idle_unload", "is not a duration"]),
        (X + "kv_memory = '2 gigs'", ["models.x.kv_memory: '2 gigs' is not a memory size: use 16GB, 8GiB"]),
        (X + "kind = 'chat'", ["models.x.kind: 'chat' is not one of generation, embedding, rerank"]),
        (X + "kv_bits = 16", ["models.x.kv_bits: 16 is not one of 0, 4, 8"]),
        (X + "kv_bits = '8'", ["models.x.kv_bits: '8' is not one of 0, 4, 8"]),
        (X + "kv_bits = false", ["models.x.kv_bits: false is not one of 0, 4, 8"]),
        (X + "kv_memory = 0", ["models.x.kv_memory", "is not a memory size"]),
        (
            X + "[models.x.sampling]\ntemperature = 2.1",
            ["models.x.sampling.temperature: 2.1 is not a number from 0 to 2"],
        ),
        (X + "[models.x.sampling]\ntemperature = nan", ["nan is not a number from 0 to 2"]),
        (X + "[models.x.sampling]\ntemperature = '1'", ["'1' is not a number"]),
        (X + "[models.x.sampling]\ntop_p = -0.5", ["top_p: -0.5 is not a number from 0 to 1"]),
        (X + "[models.x.sampling]\ntop_k = 1.0", ["top_k: 1.0 is not an integer"]),
        ("[server]\nport = 70000", ["server.port: 70000 is not an integer from 0 to 65535"]),
        ("[server]\ncors_origins = ['http://a.example/']", ["server.cors_origins", "without a path"]),
        ("[server]\ncors_origins = '*'", ["server.cors_origins: must be a list of strings"]),
    ],
)
def test_errors_name_the_file_the_option_and_what_is_right(
    read: Reads, tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        read(text)
    message = caught.value.message
    assert str(tmp_path / "mill.toml") in message
    for part in words:
        assert part in message


@pytest.mark.parametrize("value", ["'secret'", "['secret', 1]", "{ secret = 1 }"])
def test_keys_stand_in_no_error(read: Reads, value: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(f"[server]\napi_keys = {value}")
    assert "server.api_keys: must be a list" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "more, where",
    [
        ("alias = 'x'", "models.x.alias"),
        ("alias = ['y', 'y']", "models.x.alias"),
        ("alias = 'z'\n[models.z]\nsource = 'a'", "models.z"),
        ("alias = 'y'\n[models.z]\nsource = 'a'\nalias = ['w', 'y']", "models.z.alias"),
    ],
)
def test_two_models_of_one_name(read: Reads, more: str, where: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(X + more)
    assert f"{where}: the name " in caught.value.message and "models.x" in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none.toml: No such file"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ModelError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ModelError, match=r"latin.toml is not UTF-8 text: invalid start byte at byte 2"):
        read_config(tmp_path / "latin.toml")
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbf[server]\r\nport = 1\r\n")
    assert read_config(tmp_path / "mark.toml").server == {"port": 1}


@pytest.mark.parametrize("name", SAMPLING)
def test_ranges_are_those_of_the_api(name: str) -> None:
    """Both are asked about values at and around each bound that either could have."""
    near = [bound + step for bound in (-2, -1, 0, 1, 2, 10) for step in (-0.001, 0, 0.001)]
    for value in [*near, 3, 100, 2**31 - 1, 2**31, float("inf"), float("nan"), True, "1"]:
        assert allows(SAMPLING[name], value) == allows(lambda sent: TextRequest.model_validate({name: sent}), value), (
            value
        )


def allows(reader: Callable[[object], object], value: object) -> bool:
    try:
        reader(value)
    except (ArgumentTypeError, ValidationError):
        return False
    return True


def test_options_are_fields() -> None:
    fields = set(ModelSpec.__slots__)
    assert MODEL.keys() - {"alias"} == fields - {"name", "aliases"}
    settings = {option.setting for option in OPTIONS.values()} - {None}
    assert settings == set(Settings.__slots__) - {"models", "api_keys", "tool_servers", "stop_patience"}
    assert SERVER.keys() == OPTIONS.keys() - {"api_key"}
    assert SAMPLING.keys() == set(Sampling.__slots__) - {"seed", "logit_bias"}
