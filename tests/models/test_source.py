"""Model arguments, and the model or error that each resolves to."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import ModelError
from millstream.models import hub, source
from millstream.models.hub import HubModel
from millstream.models.source import ModelSource, name_of, resolve


def quiet(line: str) -> None:
    pass


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder for the test, without access to the hub or a package index."""

    def refuse(*args: object, **kwargs: object) -> Path:
        raise AssertionError("the network was used")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", refuse)
    monkeypatch.setattr(source, "demo_model", refuse)
    return tmp_path


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_bytes(b"GGUF....")
    return path


def test_a_folder(here: Path) -> None:
    path = make_folder(here / "models" / "small", "config.json", "model.safetensors")
    expected = ModelSource("small", "folder", path)
    assert resolve(str(path), report=quiet) == expected
    assert resolve("./models/small", report=quiet) == expected
    assert resolve("models/small", report=quiet) == expected


def test_the_working_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_folder(here / "small", "config.json", "weights.00.safetensors")
    monkeypatch.chdir(path)
    assert resolve(".", report=quiet) == ModelSource("small", "folder", path)


def test_the_home_folder_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    path = make_folder(here / "small", "config.json", "model.safetensors")
    assert resolve("~/small", report=quiet).path == path


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), r"no config\.json and no \*\.safetensors.*A model folder has"),
        (("config.json",), r"no \*\.safetensors"),
        (("model.safetensors",), r"no config\.json\."),
        (("config.json", "pytorch_model.bin"), "converted"),
        (("a.gguf", "b.gguf"), r"give the path of one of them: a\.gguf, b\.gguf"),
    ],
)
def test_a_folder_that_is_not_a_model(here: Path, files: tuple[str, ...], words: str) -> None:
    path = make_folder(here / "folder", *files)
    with pytest.raises(ModelError, match=words):
        resolve(str(path), report=quiet)


def test_a_gguf_file_and_a_folder_with_only_one(here: Path) -> None:
    path = make_folder(here / "folder", "small.q4.gguf") / "small.q4.gguf"
    expected = ModelSource("small.q4", "gguf", path)
    assert resolve(str(path), report=quiet) == expected
    assert resolve("./folder", report=quiet) == expected


def test_a_file_of_another_kind_is_refused(here: Path) -> None:
    (here / "small.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve("small.gguf", report=quiet)


@pytest.mark.parametrize("spec", ["./org/name", "/org/name", "~/name", "../org/name", "org/name.gguf", "NAME.GGUF"])
def test_a_missing_path_is_never_searched_on_the_hub(spec: str) -> None:
    with pytest.raises(ModelError, match="no such folder or file"):
        resolve(spec, report=quiet)


@pytest.mark.parametrize("spec", ["name", "", "a/b/c", "org/na me", "org/name@", "https://x/y"])
def test_an_invalid_argument(spec: str) -> None:
    with pytest.raises(ModelError, match=r"no such folder or file: .*a hub id would look like org/name"):
        resolve(spec, report=quiet)


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        ("org/name-1.5B_4bit", HubModel("org/name-1.5B_4bit")),
        ("org/name@main", HubModel("org/name", "main")),
        ("org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        ("hf.co/org/name", HubModel("org/name")),
        ("https://huggingface.co/org/name@v1", HubModel("org/name", "v1")),
    ],
)
def test_a_hub_id(here: Path, monkeypatch: pytest.MonkeyPatch, spec: str, model: HubModel) -> None:
    path = make_folder(here / "snapshot", "config.json", "model.safetensors")
    asked: list[tuple[HubModel, Path | None]] = []

    def download(model: HubModel, *, cache_dir: Path | None, **_: object) -> Path:
        asked.append((model, cache_dir))
        return path

    monkeypatch.setattr(hub, "download", download)
    assert resolve(spec, report=quiet) == ModelSource(model.repo, "folder", path)
    resolve(spec, cache_dir=here, report=quiet)
    assert asked == [(model, None), (model, here / "hub")]


def test_a_hub_model_without_weights_is_refused_by_its_id(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_folder(here / "snapshot", "config.json")
    monkeypatch.setattr(hub, "download", lambda *args, **kwargs: path)
    with pytest.raises(ModelError, match=r"the hub's org/name is not a model folder: it has no \*\.safetensors"):
        resolve("org/name", report=quiet)


def test_none_means_the_demo_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "demo_model", lambda *, cache_dir, **_: cache_dir / "demo.gguf")
    expected = ModelSource("smollm2-135m-instruct", "gguf", here / "demo.gguf")
    assert resolve(None, cache_dir=here, report=quiet) == expected


def test_the_name_is_known_before_the_model_is_resolved(here: Path) -> None:
    make_folder(here / "small", "config.json", "model.safetensors")
    make_folder(here / "files", "small.q4.gguf")
    for spec in ("small", "./small", "files", "files/small.q4.gguf"):
        assert name_of(spec) == resolve(spec, report=quiet).name
    assert name_of(None) == "smollm2-135m-instruct"
    assert name_of("org/name@main") == "org/name"
    assert name_of("./org/name") == "./org/name"
    assert name_of("") == ""


@pytest.mark.parametrize(
    ("spec", "model", "name"),
    [
        ("org/name:Q4_K_M", HubModel("org/name", tag="Q4_K_M"), "org/name:Q4_K_M"),
        ("hf.co/org/name:q8_0@v1", HubModel("org/name", "v1", tag="q8_0"), "org/name:q8_0"),
        ("org/name/small-Q8_0.gguf", HubModel("org/name", file="small-Q8_0.gguf"), "small-Q8_0"),
        ("org/name/sub/small.GGUF@v1", HubModel("org/name", "v1", file="sub/small.GGUF"), "small"),
    ],
)
def test_a_gguf_file_of_the_hub(
    here: Path, monkeypatch: pytest.MonkeyPatch, spec: str, model: HubModel, name: str
) -> None:
    file = make_folder(here / "blobs", "0123") / "0123"
    link = here / "small.gguf"
    link.symlink_to(file)
    asked: list[HubModel] = []

    def download(model: HubModel, **_: object) -> Path:
        asked.append(model)
        return link

    monkeypatch.setattr(hub, "download", download)
    assert resolve(spec, report=quiet) == ModelSource(name, "gguf", link)
    assert name_of(spec) == name
    assert asked == [model]


@pytest.mark.parametrize("spec", ["org/name/../x.gguf", "org/name/.hidden.gguf", "org/name:", "org/name:a/b"])
def test_a_file_of_the_hub_with_an_impossible_name(spec: str) -> None:
    with pytest.raises(ModelError, match="no such folder or file"):
        resolve(spec, report=quiet)


def test_the_demo_model_has_names_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "demo_model", lambda *, cache_dir, **_: cache_dir / "demo.gguf")
    expected = ModelSource("smollm2-135m-instruct", "gguf", here / "demo.gguf")
    assert resolve("demo", cache_dir=here, report=quiet) == expected
    assert name_of("demo") == name_of("smollm2-135m-instruct") == expected.name
    folder = make_folder(here / "demo", "config.json", "model.safetensors")
    assert resolve("demo", cache_dir=here, report=quiet) == ModelSource("demo", "folder", folder)
