"""The server program, started for the tests of clients."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "assets/samples"
DIGITS = ROOT / "tests/data/digits"
PROGRAM = pathlib.Path(os.environ.get("TILEWAVE_PROGRAM", ROOT / "build/tilewave"))

# The clients speak to this machine.
for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
    os.environ.pop(name, None)


def spoken(folder):
    lines = (folder / "transcripts.txt").read_text().splitlines()
    return {folder / name: text for name, text in (line.split(None, 1) for line in lines)}


#: The text of every recording.
SPOKEN = {**spoken(SAMPLES), **spoken(DIGITS)}


@contextlib.contextmanager
def serving(*arguments, exit_code=0):
    """A server's address. It must end without an error when it is told to."""
    command = [PROGRAM, "serve", "--port", "0", "--device", "cpu", "--log-level", "warning", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"{line!r}: {process.stderr.read() if process.poll() is not None else ''}"
        yield found.group().rstrip("/")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == exit_code, errors
        assert "Sanitizer" not in errors, errors
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="session")
def server():
    """TILEWAVE_TEST_URL names one that runs already, such as one behind a proxy."""
    if "TILEWAVE_TEST_URL" in os.environ:
        yield os.environ["TILEWAVE_TEST_URL"].rstrip("/")
        return
    with serving() as address:
        yield address
