"""`millstream say` and `millstream transcribe`, against a server with a fake voice, and players that are scripts."""

from __future__ import annotations

import http.server
import io
import os
import sys
import threading
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from millstream.cli import main
from millstream.cli.served_models import ServedModel, choose
from millstream.errors import StepFailed
from millstream.speech_types import SpeechRequest
from support.agent_stage import playing
from support.fake_speech import SENTENCES, FakeSpeechService
from support.heard import heard

SPOKEN = np.concatenate([piece for piece in SENTENCES if not isinstance(piece, Exception)])


@pytest.fixture(scope="module")
def _served() -> Iterator[tuple[str, FakeSpeechService]]:
    service = FakeSpeechService()
    with playing(service) as url:  # type: ignore[arg-type]
        yield url, service


@pytest.fixture
def speaker(_served: tuple[str, FakeSpeechService]) -> FakeSpeechService:
    service = _served[1]
    service.pieces = SENTENCES
    service.requests.clear()
    return service


@pytest.fixture
def url(_served: tuple[str, FakeSpeechService], speaker: FakeSpeechService) -> str:
    return _served[0]


@pytest.fixture
def no_players(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def player(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(0o755)


# say


def test_a_file_has_the_format_of_its_name(url: str, speaker: FakeSpeechService, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    assert main(["say", "Good", "morning.", "-o", str(path), "--voice", "v", "--speed", "1.5", "--url", url]) == 0
    with wave.open(str(path)) as file:
        assert file.getnframes() == len(SPOKEN)
    assert speaker.requests == [SpeechRequest("", "Good morning.", voice="v", speed=1.5)]
    assert main(["say", "Hi", "-o", str(tmp_path / "speech.FLAC"), "--url", url]) == 0
    assert len(heard((tmp_path / "speech.FLAC").read_bytes(), "flac")[0]) == len(SPOKEN)
    assert sorted(os.listdir(tmp_path)) == ["speech.FLAC", "speech.wav"]


def test_a_piped_text(url: str, speaker: FakeSpeechService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("A story.\n"))
    assert main(["say", "-o", str(tmp_path / "x.pcm"), "--url", url]) == 0
    assert speaker.requests[0].text == "A story.\n"
    assert (tmp_path / "x.pcm").stat().st_size == 2 * len(SPOKEN)


def test_standard_output_is_a_stream(url: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["say", "Hi", "-o", "-", "--url", url]) == 0
    made, rate = heard(capfdbinary.readouterr().out, "wav")
    assert (len(made), rate) == (len(SPOKEN), 24_000)


@pytest.mark.parametrize("name", ["paplay", "aplay", "ffplay", "play"])
def test_a_player_gets_the_samples(url: str, no_players: Path, tmp_path: Path, name: str) -> None:
    player(no_players, name, f"open({str(tmp_path / 'played')!r}, 'wb').write(sys.stdin.buffer.read())")
    assert main(["say", "Hi", "--url", url]) == 0
    assert (tmp_path / "played").stat().st_size == 2 * len(SPOKEN)


def test_a_player_of_files(url: str, no_players: Path, tmp_path: Path) -> None:
    player(no_players, "afplay", f"open({str(tmp_path / 'played')!r}, 'wb').write(open(sys.argv[1], 'rb').read())")
    assert main(["say", "Hi", "--url", url]) == 0
    with wave.open(str(tmp_path / "played")) as file:
        assert file.getnframes() == len(SPOKEN)


def test_a_player_that_fails(
    url: str, speaker: FakeSpeechService, no_players: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker.pieces = (np.zeros(10**6, np.float32),) * 2  # more than a pipe holds
    player(no_players, "aplay", "sys.exit(3)")
    assert main(["say", "Hi", "--url", url]) == 1
    assert "aplay ended with code 3" in capsys.readouterr().err


@pytest.mark.usefixtures("no_players")
def test_without_a_player(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["say", "Hi", "--url", url]) == 1
    assert "No player was found" in capsys.readouterr().err


def test_a_speech_that_breaks_off_leaves_no_file(
    url: str, speaker: FakeSpeechService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker.pieces = (SENTENCES[0], StepFailed("The model failed."))
    assert main(["say", "Hi", "-o", str(tmp_path / "x.wav"), "--url", url]) == 1
    assert "The model failed." in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_stream_that_breaks_off_is_an_error(
    url: str, speaker: FakeSpeechService, capfd: pytest.CaptureFixture[str]
) -> None:
    speaker.pieces = (SENTENCES[0], StepFailed("The model failed."))
    assert main(["say", "Hi", "-o", "-", "--url", url]) == 1
    assert "broke" in capfd.readouterr().err


def test_voices(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["say", "--voices", "--url", url]) == 0
    assert capsys.readouterr().out == "af_heart\ten-us\tfemale\nplain\n"
    assert main(["say", "--voices", "-m", "no/such", "--url", url]) == 1
    assert "There is no model 'no/such'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["-o", "x.wav"], "nothing to say"),
        (["Hi", "-o", "x.doc"], "must end with one of .wav, .mp3"),
        (["Hi", "-o", "no/such/folder/x.wav"], "cannot be written"),
        (["Hi", "-o", "x.wav", "--speed", "9"], "speed must be at most 4"),
    ],
)
def test_what_cannot_be_said(
    url: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["say", *arguments, "--url", url]) == 1
    assert says in capsys.readouterr().err


# transcribe


class Ear(http.server.BaseHTTPRequestHandler):
    """Answers with what the form had."""

    forms: ClassVar[list[tuple[str, dict[str, bytes]]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        head = f"content-type: {self.headers['content-type']}\r\n\r\n".encode()
        parts = BytesParser().parsebytes(head + body).get_payload()
        form = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts}  # type: ignore[union-attr]
        self.forms.append((self.path, form))  # type: ignore[arg-type]
        status = 400 if form["file"] == b"noise" else 200
        answer = b'{"error": {"message": "this is not audio"}}' if status == 400 else b"And so, my fellow Americans\n"
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening() -> Iterator[str]:
    Ear.forms.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Ear) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_an_audio_file_is_transcribed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audio = tmp_path / 'my "talk".wav'
    audio.write_bytes(b"RIFF\r\n--\x00\xff")
    with listening() as url:
        assert main(["transcribe", str(audio), "--url", url, "--language", "en", "-m", "tiny"]) == 0
        assert main(["transcribe", str(audio), "--url", url, "-o", str(tmp_path / "a.srt"), "--translate"]) == 0
    assert capsys.readouterr().out == "And so, my fellow Americans\n"
    assert (tmp_path / "a.srt").read_text() == "And so, my fellow Americans\n"
    first, second = Ear.forms
    assert first == (
        "/v1/audio/transcriptions",
        {"response_format": b"text", "model": b"tiny", "language": b"en", "file": b"RIFF\r\n--\x00\xff"},
    )
    assert second == ("/v1/audio/translations", {"response_format": b"srt", "file": b"RIFF\r\n--\x00\xff"})


def test_what_cannot_be_transcribed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audio = tmp_path / "talk.wav"
    audio.write_bytes(b"noise")
    with listening() as url:
        assert main(["transcribe", str(audio), "--url", url]) == 1
        assert main(["transcribe", str(tmp_path / "none.wav"), "--url", url]) == 1
        assert main(["transcribe", str(audio), "-o", "x.doc", "--url", url]) == 1
    said = capsys.readouterr().err
    assert "this is not audio" in said and "none.wav cannot be read" in said and "--format" in said


def test_chats_choose_no_model_that_cannot_chat() -> None:
    voice, chat = ServedModel("voice", "ready", capabilities=("speech",)), ServedModel("chat", "unloaded")
    assert choose([voice, chat], None) is chat
    assert choose([voice], None) is voice, "its error says what it is"
