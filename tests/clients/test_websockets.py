"""A WebSocket library, speaking OpenAI's realtime transcription."""

import asyncio
import base64
import json
import time
import wave

import pytest
import websockets
from conftest import SAMPLES, SPOKEN

FILES = [SAMPLES / f"digits-{i}.wav" for i in (1, 2)]
RATE = 16000  # of the samples


def pcm(file):
    with wave.open(str(file)) as opened:
        assert (opened.getframerate(), opened.getnchannels(), opened.getsampwidth()) == (RATE, 1, 2)
        return opened.readframes(opened.getnframes())


def connect(server, **options):
    return websockets.connect(f"{server.replace('http', 'ws', 1)}/v1/realtime?intent=transcription", proxy=None, **options)


def update(turn_detection):
    session = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": turn_detection}}}
    return json.dumps({"type": "session.update", "session": {"type": "transcription", **session}})


def append(audio):
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(audio).decode()})


async def until(socket, wanted, events=None):
    """The first event of that type; all of them go to `events`."""
    async with asyncio.timeout(30):
        while True:
            event = json.loads(await socket.recv())
            if events is not None:
                events.append((time.monotonic(), event))
            if event["type"] == "error" and wanted != "error":
                raise AssertionError(event)
            if event["type"] == wanted:
                return event


COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


def test_commits_of_the_client(server):
    async def talk():
        async with connect(server) as socket:
            assert (await until(socket, "session.created"))["session"]
            await socket.send(update(None))
            await until(socket, "session.updated")
            texts = []
            for file in FILES:
                audio = pcm(file)
                await socket.send(append(audio[:10000]))
                await socket.send(append(audio[10000:]))
                await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
                texts.append((await until(socket, COMPLETED))["transcript"])
            return texts

    assert asyncio.run(talk()) == [SPOKEN[file] for file in FILES]


def test_clear(server):
    async def talk():
        async with connect(server) as socket:
            await socket.send(update(None))
            await socket.send(append(pcm(FILES[0])))
            await socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
            await until(socket, "input_audio_buffer.cleared")
            await socket.send(append(pcm(FILES[1])))
            await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
            return (await until(socket, COMPLETED))["transcript"]

    assert asyncio.run(talk()) == SPOKEN[FILES[1]]


def test_partial_text_in_time(server):
    """At the speed of speech: text is there before the speaker stops, and soon after the end the whole of it."""

    async def talk():
        events = []
        async with connect(server) as socket:
            await socket.send(update({"type": "server_vad", "silence_duration_ms": 1000}))
            await until(socket, "session.updated")
            listening = asyncio.create_task(until(socket, COMPLETED, events))
            begin = time.monotonic()
            audio = pcm(FILES[0]) + bytes(2 * 2 * RATE)
            step = RATE // 10 * 2
            for i in range(0, len(audio), step):
                await asyncio.sleep(max(0, begin + i / (2 * RATE) - time.monotonic()))
                await socket.send(append(audio[i : i + step]))
            await listening
        return begin, events

    begin, events = asyncio.run(talk())
    kinds = [event["type"] for _, event in events]
    assert kinds.index("input_audio_buffer.speech_started") < kinds.index("input_audio_buffer.speech_stopped") < kinds.index(COMPLETED)
    assert events[-1][1]["transcript"] == SPOKEN[FILES[0]]
    started = next(event for _, event in events if event["type"] == "input_audio_buffer.speech_started")
    first = min(at for at, event in events if event["type"] == DELTA)
    speech = begin + started["audio_start_ms"] / 1000
    print(f"first text {first - speech:.2f} s after the beginning of speech")
    assert first < begin + len(pcm(FILES[0])) / (2 * RATE), "no text before the end of the recording"


def test_sixteen_sockets(server):
    """Each gets its own text."""

    async def talk(file):
        async with connect(server) as socket:
            await socket.send(update(None))
            await socket.send(append(pcm(file)))
            await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
            return (await until(socket, COMPLETED))["transcript"]

    async def talk_all():
        return await asyncio.gather(*(talk(FILES[i % 2]) for i in range(16)))

    assert asyncio.run(talk_all()) == [SPOKEN[FILES[i % 2]] for i in range(16)]


def test_the_beta_dialect(server):
    async def talk():
        async with connect(server, additional_headers={"OpenAI-Beta": "realtime=v1"}) as socket:
            created = await until(socket, "transcription_session.created")
            assert created["session"]["input_audio_format"] == "pcm16"
            await socket.send(json.dumps({"type": "transcription_session.update", "session": {"turn_detection": None}}))
            await until(socket, "transcription_session.updated")

    asyncio.run(talk())


@pytest.mark.parametrize(
    "message, param",
    [
        ("{", None),
        ("[]", "event"),
        ("{}", "type"),
        ('{"type": "dance"}', "type"),
        ('{"type": "input_audio_buffer.append"}', "audio"),
        ('{"type": "input_audio_buffer.append", "audio": 3}', "audio"),
        ('{"type": "input_audio_buffer.append", "audio": "a"}', "audio"),
        (
            '{"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/mp3"}}}}}',
            "session.audio.input.format.type",
        ),
        (b"binary", None),
    ],
)
def test_bad_events_are_errors_and_the_session_goes_on(server, message, param):
    async def talk():
        async with connect(server) as socket:
            await socket.send(message)
            error = (await until(socket, "error"))["error"]
            assert error["type"] == "invalid_request_error" and error["message"]
            assert error["param"] == param
            await socket.send(update(None))
            await until(socket, "session.updated")

    asyncio.run(talk())


def test_refusals(server):
    async def ask(path):
        try:
            async with websockets.connect(server.replace("http", "ws", 1) + path, proxy=None):
                return 101, None
        except websockets.InvalidStatus as error:
            return error.response.status_code, json.loads(error.response.body)["error"]

    assert asyncio.run(ask("/v1/realtime"))[0] == 400
    status, error = asyncio.run(ask("/v1/realtime?intent=conversation"))
    assert status == 400 and error["param"] == "intent"
    assert asyncio.run(ask("/v1/nothing?intent=transcription"))[0] == 404
