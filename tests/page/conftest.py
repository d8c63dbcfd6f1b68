"""A server, a browser, and pages that fail a test if anything goes wrong that the test does not look at."""

import os
import pathlib
import re
import shutil
import subprocess
import threading

import pytest
from playwright.sync_api import expect, sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "assets/samples"
TEXTS = dict(line.split("\t") for line in (SAMPLES / "transcripts.txt").read_text().splitlines())
SPOKEN = "digits-2.wav"  # what the microphone hears: the shortest sample

expect.set_options(timeout=20_000)  # under the sanitizers everything is slow


class Server:
    """`tilewave serve` with the bundled checkpoint, on a port of its own."""

    def __init__(self, *arguments):
        binary = os.environ.get("TILEWAVE_BINARY", ROOT / "build/tilewave")
        command = [binary, "serve", "--model", ROOT / "assets/digits", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                self.url = found[0]
                break
        else:
            raise RuntimeError(f"tilewave serve ended: {''.join(self.said)}")
        # A full pipe would stop the server.
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stdout))
        self.reader.start()

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.reader.join()
        assert self.process.returncode == 0, "".join(self.said)


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def browser():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    arguments = [
        "--no-sandbox",  # for tests that run as root
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={SAMPLES / SPOKEN}%noloop",
        "--autoplay-policy=no-user-gesture-required",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """open_page(url, before, expected_messages, **options of the context): a new page, prepared by `before`.

    Messages on its console that are not expected, and requests to others, are failures.
    """
    contexts, problems = [], []

    def open_page(url=server.url, before=None, expected_messages="", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "color_scheme": "light", **options})
        contexts.append(context)
        page = context.new_page()

        def hear(message):
            if not (expected_messages and re.search(expected_messages, message.text)):
                problems.append(f"console: {message.text}")

        def watch(request):
            if not request.url.startswith((url, "blob:" + url, "data:")):
                problems.append(f"request to {request.url}")

        def watch_socket(socket):
            if not socket.url.startswith(url.replace("http", "ws")):
                problems.append(f"WebSocket to {socket.url}")

        page.on("console", hear)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", watch)
        page.on("websocket", watch_socket)
        if before:
            before(page)
        page.goto(url + "/")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def page(open_page):
    return open_page()


def transcript(page):
    """The locator of the text; without the times."""
    return page.locator("#transcript .text")


def text_of(page):
    return " ".join(text.strip() for text in transcript(page).all_inner_texts())


def wait_until_done(page):
    """Until the page has transcribed something, and could do more."""
    expect(page.locator("#copy")).to_have_attribute("aria-disabled", "false")
