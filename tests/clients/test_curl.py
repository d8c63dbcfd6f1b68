"""curl, as OpenAI's documentation uses it."""

import json
import os
import shutil
import subprocess

import pytest
from conftest import SAMPLES, SPOKEN

FIRST = SAMPLES / "digits-1.wav"
TEXT = SPOKEN[FIRST]

if shutil.which("curl") is None:
    pytest.skip("curl is not installed", allow_module_level=True)


def curl(*arguments, **options):
    return subprocess.run(["curl", "--silent", "--show-error", *arguments], capture_output=True, timeout=60, check=True, **options).stdout


def test_as_documented(server):
    answer = curl(
        f"{server}/v1/audio/transcriptions",
        *("-H", "Authorization: Bearer $OPENAI_API_KEY", "-H", "Content-Type: multipart/form-data"),
        *("-F", f"file=@{FIRST}", "-F", "model=gpt-4o-transcribe"),
    )
    assert json.loads(answer)["text"] == TEXT


def test_verbose_json_as_documented(server):
    answer = curl(
        f"{server}/v1/audio/transcriptions",
        *("-F", f"file=@{FIRST}", "-F", "timestamp_granularities[]=segment", "-F", "model=whisper-1", "-F", "response_format=verbose_json"),
    )
    answer = json.loads(answer)
    assert answer["task"] == "transcribe" and answer["text"] == TEXT and len(answer["segments"]) == 1


def test_streaming_as_documented(server):
    answer = curl(
        "--no-buffer",
        f"{server}/v1/audio/transcriptions",
        *("-F", f"file=@{FIRST}", "-F", "model=gpt-4o-mini-transcribe", "-F", "stream=true"),
    ).decode()
    blocks = answer.strip().split("\n\n")
    assert all(block.startswith("data: ") for block in blocks) and blocks[-1] == "data: [DONE]"
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    assert events[-1]["type"] == "transcript.text.done" and events[-1]["text"] == TEXT


def test_a_body_without_a_length(server):
    """From a pipe curl sends chunks; and it asks for 100 Continue first."""
    answer = curl(
        f"{server}/v1/audio/transcriptions",
        *("-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue", "-F", "file=@-;filename=a.wav", "-F", "model=digits"),
        input=FIRST.read_bytes(),
    )
    assert json.loads(answer)["text"] == TEXT


def test_status_and_headers(server):
    answer = curl("-i", f"{server}/v1/audio/transcriptions", "-F", "model=digits").decode()
    head, body = answer.split("\r\n\r\n", 1)
    assert head.startswith("HTTP/1.1 400 ") and "x-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert error["param"] == "file" and error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{server}/v1/nothing") == b"404"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{server}/v1/audio/transcriptions") == b"405"
    for path in ("/health", "/ready", "/"):
        assert curl("-o", "/dev/null", "-w", "%{http_code}", server + path) == b"200"
    if "TILEWAVE_TEST_URL" not in os.environ:  # a proxy in front keeps it for itself (docs/deploy/nginx.conf)
        assert b"tilewave_requests_total" in curl(f"{server}/metrics")


def test_one_connection_for_several_requests(server):
    form = ["-F", f"file=@{FIRST}", "-F", "model=digits", "-w", "\n%{num_connects}\n"]
    url = f"{server}/v1/audio/transcriptions"
    answer = curl(url, *form, "--next", "--silent", url, *form).decode()
    assert [line for line in answer.splitlines() if line in ("0", "1")] == ["1", "0"]
