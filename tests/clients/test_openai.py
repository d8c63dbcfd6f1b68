"""OpenAI's own package, without a change but its address."""

import asyncio
import base64
import io
import json
import math
import threading
import wave

import numpy as np
import openai
import pytest
from conftest import DIGITS, SAMPLES, SPOKEN, serving

FIRST = SAMPLES / "digits-1.wav"
TEXT = SPOKEN[FIRST]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def seconds(file):
    with wave.open(str(file)) as opened:
        return opened.getnframes() / opened.getframerate()


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == ["digits"]
    model = client.models.retrieve("digits")
    assert (model.id, model.object, model.owned_by) == ("digits", "model", "tilewave") and model.created > 0
    with pytest.raises(openai.NotFoundError, match="nothing") as raised:
        client.models.retrieve("nothing")
    assert raised.value.code == "model_not_found"


def test_json(client):
    with open(FIRST, "rb") as file:
        answer = client.audio.transcriptions.create(model="digits", file=file)
    assert isinstance(answer, openai.types.audio.Transcription)
    assert answer.text == TEXT
    assert answer.usage.type == "tokens" and answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0


@pytest.mark.parametrize(
    "file",
    [
        FIRST,  # a path
        ("upload.wav", FIRST.read_bytes()),
        ("upload", FIRST.read_bytes(), "application/octet-stream"),
        FIRST.read_bytes(),
        DIGITS / "digits-2.flac",
    ],
)
def test_files(client, file):
    wanted = SPOKEN.get(file, TEXT) if not isinstance(file, (tuple, bytes)) else TEXT
    assert client.audio.transcriptions.create(model="whisper-1", file=file).text == wanted


def test_text(client):
    answer = client.audio.transcriptions.create(model="digits", file=FIRST, response_format="text")
    assert answer == TEXT + "\n"


def test_verbose_json(client):
    answer = client.audio.transcriptions.create(
        model="digits", file=FIRST, response_format="verbose_json", language="en", temperature=0, timestamp_granularities=["segment"]
    )
    assert isinstance(answer, openai.types.audio.TranscriptionVerbose)
    assert answer.text == TEXT and answer.language == "english" and abs(answer.duration - seconds(FIRST)) < 0.01
    (segment,) = answer.segments
    assert (segment.id, segment.text.strip()) == (0, TEXT)
    assert 0 <= segment.start < segment.end <= answer.duration
    assert segment.tokens and segment.temperature == 0 and segment.compression_ratio > 0
    assert -1 < segment.avg_logprob <= 0  # the checkpoint is sure of these
    assert answer.usage.type == "duration" and answer.usage.seconds > 0


def test_subtitles(client):
    srt = client.audio.transcriptions.create(model="digits", file=FIRST, response_format="srt")
    number, times, text = srt.strip().split("\n")
    assert (number, text) == ("1", TEXT) and " --> " in times and "," in times
    vtt = client.audio.transcriptions.create(model="digits", file=FIRST, response_format="vtt")
    head, empty, times, text = vtt.strip().split("\n")
    assert (head, empty, text) == ("WEBVTT", "", TEXT) and " --> " in times and "." in times


def test_logprobs(client):
    answer = client.audio.transcriptions.create(model="digits", file=FIRST, include=["logprobs"])
    assert "".join(each.token for each in answer.logprobs).strip() == TEXT
    assert b"".join(bytes(map(int, each.bytes)) for each in answer.logprobs).decode().strip() == TEXT
    assert all(-5 < each.logprob <= 0 for each in answer.logprobs)
    assert math.exp(sum(each.logprob for each in answer.logprobs)) > 0.5


@pytest.mark.parametrize("include", [[], ["logprobs"]])
def test_streams(client, include):
    with client.audio.transcriptions.create(model="digits", file=FIRST, stream=True, include=include) as stream:
        events = list(stream)
    *deltas, done = events
    assert [event.type for event in events] == ["transcript.text.delta"] * len(deltas) + ["transcript.text.done"]
    assert len(deltas) > 1, "the text comes in one piece"
    assert "".join(event.delta for event in deltas).strip() == done.text == TEXT
    assert done.usage.total_tokens > 0
    assert bool(done.logprobs) == bool(include)


def test_a_stream_that_is_left(client):
    """Its place is free for others, and the connection can be used again."""
    for _ in range(6):
        with client.audio.transcriptions.create(model="digits", file=FIRST, stream=True) as stream:
            next(iter(stream))
    assert client.audio.transcriptions.create(model="digits", file=FIRST).text == TEXT


@pytest.mark.parametrize(
    "fields, exception, param",
    [
        ({"model": "nothing"}, openai.NotFoundError, "model"),
        ({"response_format": "csv"}, openai.BadRequestError, "response_format"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"temperature": "warm"}, openai.BadRequestError, "temperature"),
        ({"language": "klingon"}, openai.BadRequestError, "language"),
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, openai.BadRequestError, "timestamp_granularities"),
        ({"timestamp_granularities": ["line"], "response_format": "verbose_json"}, openai.BadRequestError, "timestamp_granularities"),
        ({"include": ["everything"]}, openai.BadRequestError, "include"),
        ({"file": b"not a recording"}, openai.BadRequestError, "file"),
        ({"file": b""}, openai.BadRequestError, "file"),
        ({"file": FIRST.read_bytes()[:-1000]}, openai.BadRequestError, "file"),
    ],
)
def test_errors(client, fields, exception, param):
    with pytest.raises(exception) as raised:
        client.audio.transcriptions.create(**{"model": "digits", "file": FIRST, **fields})
    error = raised.value
    assert error.param is not None and error.param.removesuffix("[]") == param
    assert error.type == "invalid_request_error" and error.body["message"] and error.request_id
    assert client.audio.transcriptions.create(model="digits", file=FIRST).text == TEXT


def test_sixteen_at_a_time(server):
    """Nothing is lost, and every client gets its own texts in its order."""
    files = list(SPOKEN)

    async def ask(client, i):
        mine = [files[(i * 5 + j) % len(files)] for j in range(4)]
        return [(file, (await client.audio.transcriptions.create(model="digits", file=file)).text) for file in mine]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    for answers in asyncio.run(ask_all()):
        assert len(answers) == 4
        for file, text in answers:
            assert text == SPOKEN[file]


def test_async_streams(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            stream = await client.audio.transcriptions.create(model="digits", file=FIRST, stream=True)
            return [event async for event in stream]

    assert asyncio.run(ask())[-1].text == TEXT


def long_recording(repetitions):
    """The first sample a number of times, as a WAV file."""
    with wave.open(str(FIRST)) as file:
        rate, frames = file.getframerate(), file.readframes(file.getnframes())
    result = io.BytesIO()
    with wave.open(result, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(frames * repetitions)
    return result.getvalue()


def test_a_timeout_of_the_client(server, client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).audio.transcriptions.create(model="digits", file=("long.wav", long_recording(100)))
    assert client.audio.transcriptions.create(model="digits", file=FIRST).text == TEXT  # and not after the long one


def test_retries_when_the_queue_is_full():
    recording = ("long.wav", long_recording(4))
    with serving("--batch", "1", "--queue", "1") as server:
        client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
        outcomes = []

        def ask(client):
            try:
                outcomes.append(client.audio.transcriptions.create(model="digits", file=recording).text)
            except openai.RateLimitError as error:
                outcomes.append(error)

        def ask_six(client):
            outcomes.clear()
            threads = [threading.Thread(target=ask, args=[client]) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return list(outcomes)

        refused = [each for each in ask_six(client) if isinstance(each, openai.RateLimitError)]
        assert 0 < len(refused) < 6
        for error in refused:
            assert error.type == "rate_limit_error" and int(error.response.headers["Retry-After"]) >= 1
        assert ask_six(client.with_options(max_retries=20)) == [" ".join([TEXT] * 4)] * 6


def test_api_keys(tmp_path):
    (tmp_path / "keys").write_text("right-key-1\nright-key-2\n")
    with serving("--api-keys", tmp_path / "keys") as server:
        for key in ("right-key-1", "right-key-2"):
            with openai.OpenAI(base_url=f"{server}/v1", api_key=key, max_retries=0) as client:
                assert client.audio.transcriptions.create(model="digits", file=FIRST).text == TEXT
        with openai.OpenAI(base_url=f"{server}/v1", api_key="right-key-3", max_retries=0) as client:
            for call in (client.models.list, lambda: client.audio.transcriptions.create(model="digits", file=FIRST)):
                with pytest.raises(openai.AuthenticationError) as raised:
                    call()
                assert raised.value.code == "invalid_api_key"


def pcm(file, rate=24000):
    """16-bit samples at `rate` Hz."""
    with wave.open(str(file)) as opened:
        samples = np.frombuffer(opened.readframes(opened.getnframes()), np.int16).astype(np.float64)
        given = opened.getframerate()
    count = round(len(samples) * rate / given)
    spectrum = np.fft.rfft(samples)
    resampled = np.zeros(count // 2 + 1, complex)
    resampled[: min(len(spectrum), len(resampled))] = spectrum[: len(resampled)]
    return np.clip(np.fft.irfft(resampled, count) * (count / len(samples)), -32768, 32767).astype("<i2").tobytes()


def test_realtime(server):
    """The package's realtime client: voice activity detection cuts, text comes while one speaks."""

    async def talk():
        events = []
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
                await connection.session.update(
                    session={
                        "type": "transcription",
                        "audio": {
                            "input": {
                                "format": {"type": "audio/pcm", "rate": 24000},
                                "transcription": {"model": "digits", "language": "en"},
                                "turn_detection": {"type": "server_vad", "silence_duration_ms": 1000},
                            }
                        },
                    }
                )
                audio = pcm(FIRST) + bytes(2 * 24000 * 2)
                for begin in range(0, len(audio), 9600):
                    await connection.input_audio_buffer.append(audio=base64.b64encode(audio[begin : begin + 9600]).decode())
                async with asyncio.timeout(30):
                    async for event in connection:
                        events.append(event)
                        if event.type == "conversation.item.input_audio_transcription.completed":
                            return events

    events = asyncio.run(talk())
    types = [event.type for event in events]
    assert types[:2] == ["session.created", "session.updated"], types
    for name in ("input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed"):
        assert types.count(name) == 1, types
    assert events[-1].transcript == TEXT
    item = events[-1].item_id
    deltas = [event for event in events if event.type == "conversation.item.input_audio_transcription.delta"]
    assert "".join(event.delta for event in deltas).strip() == TEXT
    assert {event.item_id for event in deltas} == {item}


def test_realtime_errors_name_the_field(server):
    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
                await connection.send({"type": "input_audio_buffer.append", "audio": "!!!", "event_id": "mine"})
                async with asyncio.timeout(10):
                    async for event in connection:
                        if event.type == "error":
                            return event.error

    error = asyncio.run(talk())
    assert (error.type, error.param, error.event_id) == ("invalid_request_error", "audio", "mine")
    assert json.dumps(error.to_dict())
