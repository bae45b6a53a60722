"""Realtime sessions step by step: the order of events, interruption at every stage, and that all work ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from millstream.errors import BadRequest, ContextOverflow, ItemNotFound, Overloaded, SessionStateError, StepFailed
from millstream.realtime_types import (
    AudioDelta,
    AudioFormat,
    InputTranscriptCompleted,
    InputTranscriptDelta,
    InputTranscriptFailed,
    InputTranscription,
    Item,
    ItemAdded,
    ItemTruncated,
    OutputItemDone,
    Part,
    ResponseDone,
    ResponseOptions,
    SessionConfig,
    SessionError,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnDetection,
)
from millstream.service.realtime import conversation, utterance
from millstream.service.realtime.secrets import MAX_SECRETS, ClientSecrets
from millstream.service.realtime.service import RealtimeSessions
from millstream.service.realtime.session import Session, SessionServices
from millstream.types import CallDelta, Delta, FinishReason
from support.realtime import (
    END,
    FakeGenerations,
    FakeModels,
    FakeOutbox,
    FakeSpeeches,
    FakeTranscriptions,
    pcm16,
    said,
    segment,
    settle,
    sound,
    until,
)
from support.spoken import pause, spoken

RATE16 = AudioFormat("pcm16", 16_000)
MANUAL = SessionConfig(
    input_format=RATE16, turn_detection=None, transcription=InputTranscription(), instructions="Be brief."
)
BY_VOICE = replace(MANUAL, turn_detection=TurnDetection())
PHRASE = pcm16(np.concatenate([pause(0.3), spoken(1.5), pause(1.0)]))
SPEECH = pcm16(np.concatenate([pause(0.3), spoken(1.5)]))


@dataclass
class Stage:
    ears: FakeTranscriptions = field(default_factory=FakeTranscriptions)
    brain: FakeGenerations = field(default_factory=FakeGenerations)
    voice: FakeSpeeches = field(default_factory=FakeSpeeches)
    out: FakeOutbox = field(default_factory=FakeOutbox)
    sessions: RealtimeSessions = field(init=False)
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = RealtimeSessions(FakeModels(), SessionServices(self.brain, self.ears, self.voice), limit=2)  # type: ignore[arg-type]

    @property
    def idle(self) -> bool:
        return self.ears.all_cancelled and self.brain.all_cancelled and self.voice.all_cancelled

    async def hear(self, text: str) -> None:
        """A whole phrase, with its transcript."""
        await self.session.append(PHRASE)
        work = await self.ears.work(len(self.ears.requests) - 1 if self.ears.requests else 0)
        work.push(segment(text), None)

    def history(self) -> list[tuple[str, str]]:
        items = self.session._conversation.items
        return [(item.role, "".join(part.text or "" for part in item.parts)) for item in items]


@asynccontextmanager
async def stage(config: SessionConfig = BY_VOICE, **fakes: Any) -> AsyncIterator[Stage]:
    made = Stage(**fakes)
    made.session = made.sessions.open(config, made.out)
    try:
        yield made
    finally:
        await made.session.close()
        assert made.idle, "work goes on after the session"
        assert made.sessions.count == 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"


def run(coroutine: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await coroutine

    asyncio.run(limited())


def test_a_phrase_becomes_a_transcript() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            await it.session.append(PHRASE)
            work = await it.ears.work(0)
            assert it.ears.requests[0].model == "ears"
            work.push(segment(" Hello"), segment(" there."), None)
            done = await it.out.wait(InputTranscriptCompleted)
            assert done.transcript == "Hello there."
            assert [event.delta for event in it.out.of(InputTranscriptDelta)] == ["Hello", " there."]
            assert it.out.names == [
                "SessionCreated", "SpeechStarted", "SpeechStopped", "BufferCommitted", "ItemAdded", "ItemDone",
                "InputTranscriptDelta", "InputTranscriptDelta", "InputTranscriptCompleted",
            ]  # fmt: skip
            started, stopped = it.out.of(SpeechStarted)[0], it.out.of(SpeechStopped)[0]
            assert started.item_id == stopped.item_id == done.item_id
            assert 0 <= started.audio_start_ms <= 400 and 1700 <= stopped.audio_end_ms <= 2400
            assert not it.brain.requests

    run(play())


def test_a_conversation_is_spoken_sentence_by_sentence() -> None:
    async def play() -> None:
        async with stage() as it:
            await it.hear(" What time is it?")
            brain = await it.brain.work(0)
            messages = it.brain.requests[0].prompts[0].messages
            assert messages == (
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What time is it?"},
            )
            brain.push([said("It is noon. ")])
            voice = await it.voice.work(0)
            assert it.voice.requests[0].text == "It is noon."
            voice.push(sound(0.2), None)
            await it.out.wait(AudioDelta)
            brain.push([said("Time to eat something"), END], None)
            (await it.voice.work(1)).push(sound(0.3), None)
            done = (await it.out.wait(ResponseDone)).response
            assert (done.status, done.usage.prompt_tokens) == ("completed", 7)  # type: ignore[union-attr]
            assert it.history() == [("user", "What time is it?"), ("assistant", "It is noon. Time to eat something")]
            audio = b"".join(event.audio for event in it.out.of(AudioDelta))
            assert len(audio) == 24_000
            names = [name for name in it.out.names if name not in ("AudioDelta", "SpokenTextDelta")]
            assert names[names.index("ResponseCreated") :] == [
                "ResponseCreated", "OutputItemAdded", "ItemAdded", "PartAdded", "AudioDone", "SpokenTextDone",
                "PartDone", "ItemDone", "OutputItemDone", "ResponseDone",
            ]  # fmt: skip

    run(play())


STAGES = ("transcript", "start", "text", "speech", "audio")


@pytest.mark.parametrize("when", STAGES)
@pytest.mark.parametrize("how", ["voice", "client", "close"])
def test_interruption_at_every_stage(when: str, how: str) -> None:
    """Nothing of the response is sent after it, all work is cancelled, and the conversation holds what was said."""

    async def play() -> None:
        async with stage() as it:
            await it.session.append(PHRASE)
            if when == "transcript":
                it.session.create_response(ResponseOptions(it.session.config))
                await it.ears.work(0)
            else:
                (await it.ears.work(0)).push(segment("Hi"), None)
                if when != "start":
                    (await it.brain.work(0)).push([said("One two. "), said("Three four. ")])
                    await it.voice.work(0)
                else:
                    await until(lambda: it.brain.requests)
                if when == "audio":
                    it.voice.works[0].push(sound(0.4))
                    await it.out.wait(AudioDelta)
            if how == "voice":
                await it.session.append(SPEECH)
                assert it.out.of(SpeechStarted)[1:]
            elif how == "client":
                it.session.cancel_response(None)
            else:
                await it.session.close()
            before = len(it.out.events)
            done = it.out.of(ResponseDone)[0].response
            assert done.status == "cancelled"
            assert done.reason == ("turn_detected" if how == "voice" else "client_cancelled")
            for work in (*it.brain.works, *it.voice.works):
                work.push([said("More. ")] if work in it.brain.works else sound(0.1))
            await settle()
            assert len(it.out.events) == before, "something was sent after the interruption"
            assert it.brain.all_cancelled and it.voice.all_cancelled
            spoken_part = [("assistant", "One two.")] if when == "audio" else []
            assert [line for line in it.history() if line[0] == "assistant" and line[1]] == spoken_part

    run(play())


def test_after_an_interruption_the_next_phrase_is_answered() -> None:
    async def play() -> None:
        async with stage() as it:
            await it.hear("Tell me all.")
            (await it.brain.work(0)).push([said("All of it. "), said("And more. ")])
            (await it.voice.work(0)).push(sound(0.4))
            await it.out.wait(AudioDelta)
            await it.session.append(PHRASE)
            (await it.ears.work(1)).push(segment("Stop."), None)
            await it.brain.work(1)
            messages = it.brain.requests[1].prompts[0].messages
            assert [message["content"] for message in messages[1:]] == ["Tell me all.", "All of it.", "Stop."]

    run(play())


def test_truncation_keeps_the_words_that_were_heard() -> None:
    async def play() -> None:
        async with stage() as it:
            await it.hear("Count.")
            (await it.brain.work(0)).push([said("One two three. "), said("Four five six. "), END], None)
            for number in range(2):
                (await it.voice.work(number)).push(sound(1.0), None)
            done = (await it.out.wait(ResponseDone)).response
            item_id = done.output[0].id
            with pytest.raises(BadRequest, match="2000 ms long"):
                it.session.truncate_item(item_id, 0, 2500)
            it.session.truncate_item(item_id, 0, 1700)
            assert it.out.of(ItemTruncated) == [ItemTruncated(item_id, 0, 1700)]
            assert it.history()[-1] == ("assistant", "One two three. Four five")
            it.session.truncate_item(item_id, 0, 0)
            assert it.history()[-1] == ("assistant", "")
            with pytest.raises(ItemNotFound):
                it.session.truncate_item("item_nope", 0, 0)

    run(play())


def test_a_phrase_without_words_gets_no_answer() -> None:
    async def play() -> None:
        async with stage() as it:
            await it.session.append(PHRASE)
            (await it.ears.work(0)).push(None)
            assert (await it.out.wait(InputTranscriptCompleted)).transcript == ""
            await settle()
            assert not it.brain.requests

    run(play())


def test_without_interruption_the_answer_goes_on_and_the_next_follows() -> None:
    turns = TurnDetection(interrupt_response=False)
    config = replace(BY_VOICE, turn_detection=turns, speaks=False)

    async def play() -> None:
        async with stage(config) as it:
            await it.hear("First.")
            first = await it.brain.work(0)
            await it.session.append(PHRASE)
            (await it.ears.work(1)).push(segment("Second."), None)
            await it.out.wait(InputTranscriptCompleted, 2)
            await settle()
            assert len(it.brain.works) == 1
            first.push([said("Yes."), END], None)
            await it.brain.work(1)
            assert it.out.of(ResponseDone)[0].response.status == "completed"

    run(play())


def test_errors_of_models_leave_the_session_alive() -> None:
    async def play() -> None:
        async with stage() as it:
            it.ears.error = StepFailed("The ears broke.")
            await it.session.append(PHRASE)
            assert (await it.out.wait(InputTranscriptFailed)).error.message == "The ears broke."
            it.ears.error = None
            await it.session.append(PHRASE)
            (await it.ears.work(0)).push(segment("Again."), None)
            it.voice.error = BadRequest("no such voice")
            (await it.brain.work(0)).push([said("One sentence. ")])
            brain = it.brain.works[0]
            await until(lambda: it.voice.requests)
            brain.push([said("Another one. ")])
            failed = (await it.out.wait(ResponseDone)).response
            assert (failed.status, failed.error.message) == ("failed", "no such voice")  # type: ignore[union-attr]
            it.voice.error = None
            it.session.create_response(ResponseOptions(replace(it.session.config, speaks=False)))
            (await it.brain.work(1)).push(StepFailed("The brain broke."))
            failed = (await it.out.wait(ResponseDone, 2)).response
            assert failed.error.message == "The brain broke."  # type: ignore[union-attr]
            it.session.create_response(ResponseOptions(replace(it.session.config, speaks=False)))
            (await it.brain.work(2)).push([said("Fine."), END], None)
            assert (await it.out.wait(ResponseDone, 3)).response.status == "completed"

    run(play())


def test_a_defect_of_a_service_is_told_without_details() -> None:
    async def play() -> None:
        async with stage(replace(MANUAL, speaks=False)) as it:
            it.brain.error = RuntimeError("secret path")
            it.session.create_response(ResponseOptions(it.session.config))
            failed = (await it.out.wait(ResponseDone)).response
            assert failed.error is not None and "secret" not in failed.error.message

    run(play())


def test_calls_become_items_and_their_outputs_are_answered() -> None:
    tool = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}

    async def play() -> None:
        async with stage(replace(MANUAL, speaks=False, tools=(tool,))) as it:
            await it.session.create_item(Item("", parts=(Part("input_text", "Time?"),)), None)
            it.session.create_response(ResponseOptions(it.session.config))
            brain = await it.brain.work(0)
            assert it.brain.requests[0].tools.tools == (tool,)
            bad = (CallDelta(1, "c2", "clock", "{"), CallDelta(1, void=True))
            brain.push([said("Let me look."), Delta(0, calls=(CallDelta(0, "c1", "clock", '{"a"'), *bad))])
            brain.push([Delta(0, calls=(CallDelta(0, arguments=": 1}"),), finish_reason=FinishReason.TOOL_CALLS)], None)
            done = (await it.out.wait(ResponseDone)).response
            assert [item.kind for item in done.output] == ["message", "function_call"]
            call = done.output[1]
            assert (call.call_id, call.name, call.arguments) == ("c1", "clock", '{"a": 1}')
            assert [event.item.id for event in it.out.of(OutputItemDone)] == [item.id for item in done.output]
            await it.session.create_item(Item("", "function_call_output", call_id="c1", output="noon"), None)
            it.session.create_response(ResponseOptions(it.session.config))
            await it.brain.work(1)
            messages = it.brain.requests[1].prompts[0].messages[1:]
            assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
            assert messages[1]["content"] == "Let me look."
            assert messages[1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"a": 1}'}
            assert messages[2] == {"role": "tool", "content": "noon", "tool_call_id": "c1"}

    run(play())


def test_manual_commit_clear_and_their_errors() -> None:
    async def play() -> None:
        async with stage(MANUAL) as it:
            with pytest.raises(SessionStateError) as empty:
                it.session.commit()
            assert empty.value.code == "input_audio_buffer_commit_empty"
            await it.session.append(pcm16(pause(1.0)))
            it.session.clear()
            with pytest.raises(SessionStateError):
                it.session.commit()
            await it.session.append(pcm16(spoken(1.0)))
            it.session.commit()
            (await it.ears.work(0)).push(segment("By hand."), None)
            await it.out.wait(InputTranscriptCompleted)
            assert len(it.ears.requests[0].audio) == 16_000
            await settle()
            assert not it.brain.requests, "a commit by the client asks for no response"
            with pytest.raises(SessionStateError) as none:
                it.session.cancel_response(None)
            assert none.value.code == "response_cancel_not_active"
            it.session.create_response(ResponseOptions(it.session.config))
            with pytest.raises(SessionStateError) as two:
                it.session.create_response(ResponseOptions(it.session.config))
            assert two.value.code == "conversation_already_has_active_response"

    run(play())


def test_clear_ends_the_phrase_that_is_spoken() -> None:
    async def play() -> None:
        async with stage() as it:
            await it.session.append(SPEECH)
            await it.out.wait(SpeechStarted)
            it.session.clear()
            await it.session.append(pcm16(pause(2.0)))
            await settle()
            assert not it.ears.requests and not it.out.of(ItemAdded)

    run(play())


async def _stream(session: Session, samples: Any) -> None:
    """As a microphone does: a tenth of a second at a time."""
    for start in range(0, len(samples), 1600):
        await session.append(pcm16(samples[start : start + 1600]))
        await settle()


def test_transcription_begins_in_the_pause_before_the_end_is_sure() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            await _stream(it.session, np.concatenate([pause(0.3), spoken(1.5), pause(0.4)]))
            guess = await it.ears.work(0)
            guess.push(segment(" Guessed."), None)
            await settle()
            assert not it.out.of(SpeechStopped) and not it.out.of(InputTranscriptDelta)
            await _stream(it.session, pause(0.6))
            assert (await it.out.wait(InputTranscriptCompleted)).transcript == "Guessed."
            assert it.out.of(SpeechStopped) and len(it.ears.requests) == 1

    run(play())


def test_a_guess_is_dropped_if_somebody_speaks_on() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            await _stream(it.session, np.concatenate([pause(0.3), spoken(1.5), pause(0.4)]))
            guess = await it.ears.work(0)
            guess.push(segment(" Half"))
            await _stream(it.session, spoken(1.5))
            await until(lambda: guess.cancelled)
            assert not it.out.of(SpeechStopped)
            await _stream(it.session, pause(1.0))
            await until(lambda: it.out.of(SpeechStopped))
            last = it.ears.works[-1]
            last.push(segment(" Half and half."), None)
            assert (await it.out.wait(InputTranscriptCompleted)).transcript == "Half and half."
            assert len(it.ears.requests[-1].audio) > 3 * 16_000
            assert [event.delta for event in it.out.of(InputTranscriptDelta)] == ["Half and half."]

    run(play())


def test_a_slow_model_is_not_asked_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utterance, "SLOW_SECONDS", -1.0)

    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            await _stream(it.session, np.concatenate([pause(0.3), spoken(1.5), pause(0.4)]))
            assert it.out.of(SpeechStarted) and not it.ears.requests

    run(play())


def test_a_guess_that_fails_fails_the_phrase_alone() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            it.ears.error = StepFailed("broken")
            await _stream(it.session, np.concatenate([pause(0.3), spoken(1.5), pause(1.0)]))
            assert (await it.out.wait(InputTranscriptFailed)).error.message == "broken"

    run(play())


def test_a_long_phrase_is_transcribed_while_it_is_spoken() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            await it.session.append(pcm16(np.concatenate([pause(0.3), np.tile(spoken(5.0), 4)])))
            (await it.ears.work(0)).push(segment(" The first part"), None)
            await it.out.wait(InputTranscriptDelta)
            assert not it.out.of(SpeechStopped)
            await it.session.append(pcm16(pause(1.0)))
            (await it.ears.work(1)).push(segment(" and the rest."), None)
            done = await it.out.wait(InputTranscriptCompleted)
            assert done.transcript == "The first part and the rest."
            assert it.ears.requests[1].prompt == "The first part"
            lengths = [len(request.audio) / 16_000 for request in it.ears.requests]
            assert lengths[0] <= 12 and sum(lengths) == pytest.approx(20.6, abs=0.5)
            assert [event.item_id for event in it.out.of(InputTranscriptDelta)] == [done.item_id] * 2

    run(play())


def test_a_prompt_that_is_too_long_loses_its_oldest_items() -> None:
    class Small(FakeGenerations):
        async def start(self, request: Any) -> Any:
            if len(request.prompts[0].messages) > 4:
                self.requests.append(request)
                raise ContextOverflow("too long")
            return await super().start(request)

    async def play() -> None:
        async with stage(replace(MANUAL, speaks=False), brain=Small()) as it:
            for number in range(8):
                await it.session.create_item(Item("", parts=(Part("input_text", str(number)),)), None)
            it.session.create_response(ResponseOptions(it.session.config))
            await it.brain.work(0)
            contents = [message["content"] for message in it.brain.requests[-1].prompts[0].messages]
            assert contents == ["Be brief.", "5", "6", "7"]
            it.session.cancel_response(None)
            strict = replace(it.session.config, truncates=False)
            it.session.create_response(ResponseOptions(strict))
            failed = (await it.out.wait(ResponseDone, 2)).response
            assert isinstance(failed.error, ContextOverflow)

    run(play())


def test_items_are_placed_deleted_and_retrieved() -> None:
    async def play() -> None:
        async with stage(MANUAL) as it:
            for name, previous in (("b", None), ("a", "root"), ("c", "a")):
                await it.session.create_item(Item(name, parts=(Part("input_text", name),)), previous)
            assert [line[1] for line in it.history()] == ["a", "c", "b"]
            assert [event.previous_item_id for event in it.out.of(ItemAdded)] == [None, None, "a"]
            it.session.delete_item("c")
            assert [line[1] for line in it.history()] == ["a", "b"]
            for wrong in (it.session.delete_item, it.session.retrieve_item):
                with pytest.raises(ItemNotFound):
                    wrong("c")
            with pytest.raises(BadRequest, match="already"):
                await it.session.create_item(Item("a"), None)

    run(play())


def test_a_full_conversation_forgets_its_oldest_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_ITEMS", 3)

    async def play() -> None:
        async with stage(replace(BY_VOICE, speaks=False)) as it:
            for number in range(3):
                await it.session.create_item(Item(str(number), parts=(Part("input_text", str(number)),)), None)
            with pytest.raises(BadRequest, match="is full"):
                await it.session.create_item(Item("more"), None)
            await it.hear("Spoken.")
            (await it.brain.work(0)).push([said("Answered."), END], None)
            assert (await it.out.wait(ResponseDone)).response.status == "completed"
            assert [line[1] for line in it.history()] == ["2", "Spoken.", "Answered."]

    run(play())


def test_an_item_with_audio_is_transcribed_before_the_answer() -> None:
    async def play() -> None:
        async with stage(replace(MANUAL, speaks=False)) as it:
            audio = Part("input_audio", audio=pcm16(spoken(0.5)))
            await it.session.create_item(Item("x", parts=(audio,)), None)
            it.session.create_response(ResponseOptions(it.session.config))
            ears = await it.ears.work(0)
            await settle()
            assert not it.brain.requests
            ears.push(segment("Sent."), None)
            await it.brain.work(0)
            assert it.brain.requests[0].prompts[0].messages[-1]["content"] == "Sent."

    run(play())


def test_a_response_beside_the_conversation_leaves_no_trace() -> None:
    async def play() -> None:
        async with stage(replace(MANUAL, speaks=False)) as it:
            await it.session.create_item(Item("x", parts=(Part("input_text", "Hi."),)), None)
            about = (Item("y", parts=(Part("input_text", "Other."),)),)
            it.session.create_response(ResponseOptions(it.session.config, input=about, in_conversation=False))
            (await it.brain.work(0)).push([said("Aside."), END], None)
            await it.out.wait(ResponseDone)
            assert [event.delta for event in it.out.of(TextDelta)] == ["Aside."]
            assert it.history() == [("user", "Hi.")]
            assert it.brain.requests[0].prompts[0].messages[-1]["content"] == "Other."

    run(play())


def test_output_that_is_cut_is_incomplete() -> None:
    async def play() -> None:
        async with stage(replace(MANUAL, speaks=False, max_output_tokens=5)) as it:
            it.session.create_response(ResponseOptions(it.session.config))
            (await it.brain.work(0)).push([Delta(0, "Cut", finish_reason=FinishReason.LENGTH)], None)
            done = (await it.out.wait(ResponseDone)).response
            assert (done.status, done.reason) == ("incomplete", "max_output_tokens")
            assert it.brain.requests[0].max_tokens == 5

    run(play())


def test_a_client_that_does_not_read_stops_the_work() -> None:
    async def play() -> None:
        async with stage(replace(MANUAL, speaks=True)) as it:
            it.session.create_response(ResponseOptions(it.session.config))
            (await it.brain.work(0)).push([said("A sentence. ")])
            voice = await it.voice.work(0)
            it.out.full = True
            voice.push(sound(30.0))
            await it.out.wait(AudioDelta)
            await settle()
            assert len(it.out.of(AudioDelta)) == 1

    run(play())


def test_audio_waits_while_transcription_is_behind() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, kind="transcription")) as it:
            long = pcm16(np.concatenate([np.tile(spoken(10.0), 4), pause(1.0)]))
            feeding = asyncio.create_task(_feed(it.session, [long] * 5))
            await it.ears.work(0)
            await settle()
            assert not feeding.done()
            it.ears.steps = (None,)
            it.ears.works[0].push(None)
            await feeding
            await it.out.wait(InputTranscriptCompleted, 5)

    async def _feed(session: Session, pieces: list[bytes]) -> None:
        for piece in pieces:
            await session.append(piece)

    run(play())


def test_two_sessions_do_not_mix_and_a_third_is_refused() -> None:
    async def play() -> None:
        async with stage() as it:
            other_out = FakeOutbox()
            german = InputTranscription(language="de")
            other = it.sessions.open(replace(BY_VOICE, kind="transcription", transcription=german), other_out)
            with pytest.raises(Overloaded):
                it.sessions.open(BY_VOICE, FakeOutbox())
            await asyncio.gather(it.session.append(PHRASE), other.append(PHRASE))
            for number in range(2):
                work = await it.ears.work(number)
                work.push(segment("other" if it.ears.requests[number].language else "mine"), None)
            assert (await it.out.wait(InputTranscriptCompleted)).transcript == "mine"
            assert (await other_out.wait(InputTranscriptCompleted)).transcript == "other"
            await other.close()
            await it.brain.work(0)
            assert len(it.brain.works) == 1

    run(play())


def test_without_an_order_transcripts_are_not_sent_but_failures_are() -> None:
    async def play() -> None:
        async with stage(replace(BY_VOICE, transcription=None, speaks=False)) as it:
            await it.hear("Quietly.")
            await it.brain.work(0)
            it.session.cancel_response(None)
            it.ears.error = StepFailed("broken")
            await it.session.append(PHRASE)
            assert (await it.out.wait(SessionError)).error.message == "broken"
            assert not it.out.of(InputTranscriptCompleted) and not it.out.of(InputTranscriptDelta)

    run(play())


def test_keys_for_browsers_expire_and_the_oldest_give_way() -> None:
    now = [1000.0]
    keys = ClientSecrets(lambda: now[0])
    first = keys.issue(MANUAL, 60)
    assert keys.find(first.value) == MANUAL and keys.find("ek_other") is None
    assert first.value not in repr(first)
    now[0] += 61
    assert keys.find(first.value) is None
    old = keys.issue(MANUAL, 60)
    for _ in range(MAX_SECRETS):
        keys.issue(BY_VOICE, 60)
    assert keys.find(old.value) is None


def test_models_are_found_by_what_they_can_do() -> None:
    async def play() -> None:
        async with stage() as it:
            config = it.session.config
            assert (config.model, config.transcriber, config.speech_model) == ("chat", "ears", "voice")
            assert config.transcription is not None and config.transcription.model == "ears"
            with pytest.raises(BadRequest, match="no transcription model"):
                it.sessions.resolve(replace(config, transcription=InputTranscription("chat")))
            deaf = RealtimeSessions(FakeModels(FakeModels().cards[:1]), it.sessions._services)  # type: ignore[arg-type]
            session = deaf.open(BY_VOICE, FakeOutbox())
            assert not session.config.speaks
            with pytest.raises(BadRequest, match="cannot hear"):
                await session.append(PHRASE)
            await session.close()

    run(play())
