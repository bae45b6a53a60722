"""Downloads from a local stand-in for the hub: the cache, offline use, and every kind of refusal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import LoadCancelled, ModelError
from millstream.models.hub import HubModel, cached, download
from millstream.models.hub_child import Reporter
from millstream.models.hub_fetch import Repository, fetch
from support.hub_server import COMMIT, FILES, GGUF_FILES, GGUF_REPO, HALF_GATED, REPO, HubServer

WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def reports() -> list[str]:
    return []


def test_it_downloads_the_needed_files_only(hub: HubServer, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    assert {path.name for path in folder.iterdir()} == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert reports == [f"downloading {REPO} from the hub..."]
    reports.clear()
    assert download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url) == folder
    assert reports == []


def test_without_the_hub_the_cache_is_used_and_reported(hub: HubServer, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO, "v1"), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    hub.stop()
    reports.clear()
    assert download(HubModel(REPO, "v1"), report=reports.append, cache_dir=tmp_path, endpoint=hub.url) == folder
    assert len(reports) == 1
    assert "cannot be reached" in reports[0]
    assert "copy in the cache" in reports[0]


def test_without_the_hub_an_incomplete_snapshot_is_not_used(hub: HubServer, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    hub.stop()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be reached"):
        download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


def test_a_hub_that_never_answers_counts_as_out_of_reach(
    hub: HubServer, tmp_path: Path, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.models.hub.ANSWER_SECONDS", 0.2)
    hub.silent = True
    with pytest.raises(ModelError, match=r"cannot be reached.*[Tt]imeout"):
        download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


def test_without_the_hub_and_a_snapshot(hub: HubServer, tmp_path: Path, reports: list[str]) -> None:
    hub.stop()
    with pytest.raises(ModelError, match="cannot be reached"):
        download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (HubModel("mill/none"), "no model 'mill/none'"),
        (HubModel("mill/gated"), "gated.*HF_TOKEN"),
        (HubModel(HALF_GATED), "gated.*HF_TOKEN"),
        (HubModel("mill/locked"), "401.*HF_TOKEN"),
        (HubModel("mill/private"), "HF_TOKEN"),
        (HubModel("mill/broken"), "501"),
        (HubModel("mill/two--dashes"), "not a valid model name on the hub"),
        (HubModel(REPO, "v9"), "no revision 'v9'"),
    ],
)
def test_refusals(hub: HubServer, tmp_path: Path, reports: list[str], model: HubModel, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        download(model, report=reports.append, cache_dir=tmp_path, endpoint=hub.url)


OFFLINE = """
import sys
from pathlib import Path
from millstream.errors import ModelError
from millstream.models.hub import HubModel, download
try:
    print(download(HubModel(sys.argv[1]), report=print, cache_dir=Path(sys.argv[2])))
except ModelError as error:
    print("refused:", error.message)
"""


def test_offline_mode_uses_the_cache_only(hub: HubServer, tmp_path: Path, reports: list[str]) -> None:
    folder = download(HubModel(REPO), report=reports.append, cache_dir=tmp_path, endpoint=hub.url)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url}

    def start(repo: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OFFLINE, repo, str(tmp_path)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    here, missing = start(REPO), start("mill/other")
    assert here.communicate()[0].splitlines() == [f"offline: serving {REPO} from the cache", str(folder)]
    assert "refused: mill/other is not in the cache, and HF_HUB_OFFLINE is set" in missing.communicate()[0]


BLOBS = "models--mill--stream/blobs"


def download_here(hub: HubServer, folder: Path) -> tuple[Path, list[tuple[int, int]]]:
    """Without the child process."""
    told: list[tuple[int, int]] = []
    repository = Repository(REPO, None, COMMIT, ("*.json", "*.safetensors"), ("consolidated*",))
    path = fetch(repository, progress=lambda *each: told.append(each), cache_dir=folder, endpoint=hub.url)
    return path, told


def test_progress_counts_the_bytes_of_all_files(hub: HubServer, tmp_path: Path) -> None:
    _, told = download_here(hub, tmp_path)
    total = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_download_that_stalls_shows_how_far_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """The bytes of chunks that came shortly after others, and behind which nothing comes."""
    told = ""
    deadline = time.monotonic() + 60
    with Reporter() as progress:
        progress(0, 100)
        progress(10, 100)
        while '"done": 10,' not in told and time.monotonic() < deadline:
            time.sleep(0.01)
            told += capfd.readouterr().out
        progress(60, 100)
    assert '{"done": 10, "total": 100}' in told
    assert '{"done": 60, "total": 100}' in capfd.readouterr().out


def test_a_partial_file_is_continued(hub: HubServer, tmp_path: Path) -> None:
    folder, _ = download_here(hub, tmp_path)
    weights = FILES["model.safetensors"]
    blob = (folder / "model.safetensors").resolve()
    (folder / "model.safetensors").unlink()
    blob.unlink()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(weights[:300])
    hub.sent.clear()
    again, told = download_here(hub, tmp_path)
    assert again == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.sent == {"model.safetensors": len(weights) - 300}
    assert told[0][0] == told[-1][1] - (len(weights) - 300)
    assert not list((tmp_path / BLOBS).glob("*.incomplete"))


def test_a_hub_that_ignores_ranges_sends_all_of_it(hub: HubServer, tmp_path: Path) -> None:
    folder, _ = download_here(hub, tmp_path)
    weights = FILES["model.safetensors"]
    blob = (folder / "model.safetensors").resolve()
    (folder / "model.safetensors").unlink()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    os.truncate(blob.with_name(f"{blob.name}.incomplete"), 300)
    hub.ranges = False
    _, told = download_here(hub, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert told[-1][0] == told[-1][1]


def test_a_damaged_partial_file_is_found_and_not_kept(hub: HubServer, tmp_path: Path) -> None:
    folder, _ = download_here(hub, tmp_path)
    blob = (folder / "model.safetensors").resolve()
    (folder / "model.safetensors").unlink()
    blob.unlink()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(b"x" * 300)
    with pytest.raises(ModelError, match="arrived damaged"):
        download_here(hub, tmp_path)
    assert (download_here(hub, tmp_path)[0] / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_disk_that_is_too_small_is_told_before_the_download(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 600, 400))
    with pytest.raises(ModelError, match=r"needs 725 bytes .* has 400 bytes free: 325 bytes are missing") as caught:
        download_here(hub, tmp_path / "not" / "yet")
    assert "millstream list" in caught.value.message
    assert hub.sent == {}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (HubModel(GGUF_REPO, tag="q4_k_m"), "model-Q4_K_M.gguf"),
        (HubModel(GGUF_REPO, file="model-Q8_0.gguf"), "model-Q8_0.gguf"),
    ],
)
def test_one_gguf_file_of_a_repository(hub: HubServer, tmp_path: Path, model: HubModel, name: str) -> None:
    path = download(model, report=print, cache_dir=tmp_path, endpoint=hub.url)
    assert (path.name, path.read_bytes()) == (name, GGUF_FILES[name])
    assert set(hub.sent) == {name, "README.md"}
    assert cached(model, tmp_path) == path
    assert cached(HubModel(GGUF_REPO), tmp_path) == path, "the only file in the cache"
    assert cached(HubModel(GGUF_REPO, tag="Q2_K"), tmp_path) is None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (HubModel(GGUF_REPO), "several GGUF files; choose one of: mill/quants:Q4_K_M, mill/quants:Q8_0$"),
        (HubModel(GGUF_REPO, tag="Q2_K"), "no GGUF file with Q2_K; choose one of: mill/quants:Q4_K_M"),
        (HubModel(GGUF_REPO, file="other.gguf"), "no GGUF file other.gguf; choose one of"),
        (HubModel(REPO, tag="Q4_0"), "mill/stream has no GGUF file"),
    ],
)
def test_a_gguf_file_that_is_not_there(hub: HubServer, tmp_path: Path, model: HubModel, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        download(model, report=print, cache_dir=tmp_path, endpoint=hub.url)


def test_a_stopped_download_ends_at_once_and_the_next_one_continues(hub: HubServer, tmp_path: Path) -> None:
    hub.hold_after = 300
    with pytest.raises(LoadCancelled):
        download(HubModel(REPO), report=print, cache_dir=tmp_path, endpoint=hub.url, cancelled=hub.held.is_set)
    assert not (tmp_path / "models--mill--stream" / "snapshots").exists()
    assert cached(HubModel(REPO), tmp_path) is None
    hub.release()
    hub.sent.clear()
    folder = download(HubModel(REPO), report=print, cache_dir=tmp_path, endpoint=hub.url)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not list((tmp_path / BLOBS).glob("*.incomplete"))


def test_a_snapshot_that_another_program_began_is_completed(hub: HubServer, tmp_path: Path) -> None:
    folder, _ = download_here(hub, tmp_path)
    shutil.rmtree(tmp_path / "models--mill--stream" / "trees", ignore_errors=True)
    (folder / "model.safetensors").unlink()
    again = download(HubModel(REPO), report=print, cache_dir=tmp_path, endpoint=hub.url)
    assert again == folder
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
