#!/usr/bin/env python3
"""Clients that break every rule, and clients that keep them, at the same time.

usage: serve_faults.py PROGRAM [--minutes N]

Starts `PROGRAM serve` with the bundled checkpoint, and opens 256 connections at a time: 64 send or read one byte after another, 64 are cut in the middle of a request, 32 send garbage, 32 send more
than is allowed, and 64 send recordings. These must get exactly the text that a recording gets alone, the server must give back its memory and descriptors, and its log must be plain text. At the end
the server is told to end (SIGTERM) while it has requests: each must be answered, and the server must exit with 0. One round, or rounds for N minutes.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLOW, CUT, GARBAGE, OVERSIZE, GOOD = 64, 64, 32, 32, 64
LAST = 24  # requests that the server has when it is told to end
MAX_UPLOAD = 1 << 20
MAX_AUDIO_SECONDS = 20
BOUNDARY = "----boundary"
slowness = 1  # how much longer everything may take


def multipart(audio):
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n'
    head += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head.encode() + audio + f"\r\n--{BOUNDARY}--\r\n".encode()


def request_for(audio, headers=""):
    body = multipart(audio)
    return f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def silence(seconds):
    """A WAV file."""
    size = int(seconds * 16000) * 2
    return b"RIFF" + (36 + size).to_bytes(4, "little") + b"WAVEfmt " + bytes.fromhex("10000000 0100 0100 803e0000 007d0000 0200 1000") + b"data" + size.to_bytes(4, "little") + bytes(size)


class Server:
    def __init__(self, program, *arguments):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [program, "serve", "--model", ROOT / "assets/digits", "--device", "cpu", "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        line = self.process.stdout.readline()
        if not (found := re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)):
            raise SystemExit(f"{program} serve did not start: {line}{self.said().decode()}")
        self.port = int(found[1])

    def resident_mib(self):
        return int(re.search(r"VmRSS:\s*(\d+) kB", pathlib.Path(f"/proc/{self.process.pid}/status").read_text())[1]) / 1024

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def end(self):
        """Waits for its end. Returns the exit code and the log."""
        return self.process.wait(timeout=60 * slowness), self.said()


class Connection:
    """Of the server's port; closed, or reset, at the end of `async with`."""

    def __init__(self, port, reset=False, receive_buffer=None):
        self.port, self.reset, self.receive_buffer = port, reset, receive_buffer

    async def __aenter__(self):
        peer = socket.socket()
        peer.setblocking(False)
        if self.receive_buffer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        if self.reset:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", self.port))
        self.reader, self.writer = await asyncio.open_connection(sock=peer, limit=1 << 16)
        return self

    async def __aexit__(self, *_):
        self.writer.transport.abort() if self.reset else self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    async def send(self, data):
        """Returns False where the server has closed the connection."""
        try:
            self.writer.write(data)
            await self.writer.drain()
            return True
        except OSError:
            return False

    async def answer(self):
        """(status, body); (0, b"") where there is none."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\nContent-Length: (\d+)\r\n", head)
            return int(head[9:12]), await self.reader.readexactly(int(length[1])) if length else b""
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return 0, b""

    async def until_closed(self):
        try:
            while await self.reader.read(1 << 16):
                pass
        except OSError:
            pass


def expect(holds, message):
    if not holds:
        raise AssertionError(message)


async def transcribe(server, audio, headers=""):
    async with Connection(server.port) as connection:
        await connection.send(request_for(audio, headers))
        status, body = await connection.answer()
        expect(status == 200, f"a good request was answered with {status}: {body}")
        return json.loads(body)["text"]


async def slow(server, number, recordings):
    """A request, or the reading of an answer, byte by byte, until the server has had enough."""
    audio = random.choice(recordings)
    if number % 4 == 3:  # the page, a hundred times in a row, unread
        async with Connection(server.port, receive_buffer=2048) as connection:
            await connection.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
            for _ in range(20):
                await asyncio.sleep(0.1)
                try:
                    await connection.reader.read(1)
                except OSError:
                    return
        return
    data = request_for(audio)
    async with Connection(server.port) as connection:
        at = 0
        if number % 2:  # the headers at once, and too little of the body
            at = data.index(b"\r\n\r\n") + 4
            await connection.send(data[:at])
            data = data[: at + 40]
        while at < len(data) and await connection.send(data[at : at + 1]):
            at += 1
            try:
                head = await asyncio.wait_for(connection.reader.read(12), 0.05 * slowness)
            except asyncio.TimeoutError:
                continue
            except OSError:
                return
            expect(head in (b"", b"HTTP/1.1 408"), f"a slow request was answered with {head}")
            break
        await connection.until_closed()


async def cut(server, number, recordings):
    """A request of which the end, or the answer, is not awaited."""
    data = request_for(random.choice(recordings), "X-Request-Id: cut\r\n")
    for _ in range(4):
        async with Connection(server.port, reset=number % 2 == 0) as connection:
            if random.random() < 0.5:
                await connection.send(data)
                await asyncio.sleep(random.choice((0, 0.01, 0.1)))
            else:
                await connection.send(data[: random.randrange(len(data))])
        await asyncio.sleep(random.random() * 0.2)


async def garbage(server, number, recordings):
    """What is no request, or no message of a WebSocket."""
    for _ in range(6):
        async with Connection(server.port) as connection:
            data = bytearray(random.choice((request_for(random.choice(recordings)), b"GET /%0aforged HTTP/1.1\r\nHost: a\r\n\r\n", random.randbytes(3000))))
            if number % 2:
                upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                await connection.send(b"GET /v1/realtime?intent=transcription HTTP/1.1\r\nHost: a\r\n" + upgrade)
                status, _ = await connection.answer()
                expect(status == 101, f"an upgrade was answered with {status}")
                data = bytearray(b"\x81\xfe" + (2000).to_bytes(2, "big") + bytes(4) + random.randbytes(2000)) if random.random() < 0.5 else data
            else:
                for _ in range(random.randrange(1, 20)):
                    data[random.randrange(min(len(data), 400))] = random.randrange(256)
            await connection.send(bytes(data))
            await asyncio.sleep(0.05)


async def oversize(server, number, recordings):
    """More of something than is allowed."""
    kinds = (
        (413, b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n" + bytes(2_000_000)),
        (413, b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" * 1 + (bytes(65536) + b"\r\n10000\r\n") * 30),
        (431, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"),
        (400, request_for(silence(MAX_AUDIO_SECONDS + 1))),
    )
    for _ in range(4):
        expected, data = kinds[number % len(kinds)]
        number += 1
        async with Connection(server.port) as connection:
            sent = await connection.send(data)
            status, body = await connection.answer()
            expect(status == expected or not sent, f"{len(data)} bytes were answered with {status}: {body}, not {expected}")


async def good(server, number, recordings, texts, loops):
    for i in range(loops):
        at = (number + i) % len(recordings)
        text = await transcribe(server, recordings[at])
        expect(text == texts[at], f"recording {at}: {text!r}, alone {texts[at]!r}")


async def one_round(server, recordings, texts, loops):
    tasks = []
    for count, client in ((SLOW, slow), (CUT, cut), (GARBAGE, garbage), (OVERSIZE, oversize)):
        tasks += [client(server, number, recordings) for number in range(count)]
    tasks += [good(server, number, recordings, texts, loops) for number in range(GOOD)]
    random.shuffle(tasks)
    await asyncio.gather(*tasks)


async def quiet(server, descriptors):
    """Waits until the connections of a round are gone, and until the server has given back its memory, which it does when it is idle for a
    second. Returns the descriptors that are left over."""
    for _ in range(100 * slowness):
        if server.descriptors() <= descriptors:
            break
        await asyncio.sleep(0.1)
    left = server.descriptors() - descriptors
    await asyncio.sleep(2 * slowness)
    return left


async def end_under_load(server, recordings, texts):
    """SIGTERM when all requests have been sent."""
    connections = [Connection(server.port) for _ in range(LAST)]

    async def ask(number, sent):
        async with connections[number] as connection:
            await connection.send(request_for(recordings[number % len(recordings)]))
            sent.set_result(None)
            return await connection.answer()

    all_sent = [asyncio.get_running_loop().create_future() for _ in connections]
    answers = [asyncio.create_task(ask(number, sent)) for number, sent in enumerate(all_sent)]
    await asyncio.gather(*all_sent)
    server.process.send_signal(signal.SIGTERM)
    for number, (status, body) in enumerate(await asyncio.gather(*answers)):
        expect(status == 200, f"request {number} of a server that is told to end: {status} {body}")
        expect(json.loads(body)["text"] == texts[number % len(texts)], f"request {number} of a server that is told to end: {body}")


async def run(server, minutes):
    samples = sorted((ROOT / "assets/samples").glob("*.wav"))
    recordings = [sample.read_bytes() for sample in samples] + [file.read_bytes() for file in sorted((ROOT / "tests/data/digits").glob("*.flac"))[:5]]
    known = dict(line.split("\t") for line in (ROOT / "assets/samples/transcripts.txt").read_text().splitlines())
    texts = [await transcribe(server, recording) for recording in recordings]
    for sample, text in zip(samples, texts):
        expect(text == known[sample.name], f"{sample.name}: {text!r}")
    descriptors = server.descriptors() - 1  # but for the connection that is being closed
    await asyncio.gather(*(transcribe(server, recordings[number % len(recordings)]) for number in range(16)))
    await quiet(server, descriptors)
    descriptors, resident = server.descriptors(), server.resident_mib()
    begin, rounds = time.monotonic(), 0
    while True:
        await one_round(server, recordings, texts, 1 if minutes == 0 else 4)
        rounds += 1
        left = await quiet(server, descriptors)
        now = server.resident_mib()
        print(f"round {rounds}: {time.monotonic() - begin:.1f} s, {now:.0f} MiB (at the start {resident:.0f}), {server.descriptors()} descriptors ({descriptors})", flush=True)
        expect(left <= 0, f"{left} descriptors are left open")
        if time.monotonic() - begin >= 60 * minutes:
            break
    await end_under_load(server, recordings, texts)
    return resident, now


async def end_twice(program):
    """A second signal does not wait. Another server does not take the port of one that runs."""
    server = Server(program)
    try:
        second = subprocess.run([program, "serve", "--port", str(server.port)], capture_output=True, text=True, timeout=60 * slowness)
        expect(second.returncode == 1, f"a second server on one port: exit code {second.returncode}")
        message = f"tilewave: cannot listen on 127.0.0.1:{server.port}: Address already in use\n"
        expect(second.stderr == message and not second.stdout, f"a second server on one port: {second.stderr}{second.stdout}")
        async with Connection(server.port) as connection:
            await connection.send(b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
            await asyncio.sleep(0.1 * slowness)
            server.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.1 * slowness)
            expect(server.process.poll() is None, "the server does not wait for a request")
            server.process.send_signal(signal.SIGINT)
            code, _ = server.end()
            expect(code == 128 + signal.SIGINT, f"a second signal: exit code {code}")
    finally:
        server.process.kill()


def main():
    global slowness
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--minutes", type=float, default=0, help="0: one round")
    parser.add_argument("--slowness", type=int, default=1, help="how much longer everything may take, as under a sanitizer")
    parser.add_argument("--growth", type=float, default=48, help="MiB that the server may have more at the end")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    arguments = parser.parse_args()
    slowness = arguments.slowness
    random.seed(arguments.seed)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    patience = str(3 * slowness)  # with clients as well: hundreds of them share a few cores with the server
    server = Server(arguments.program, "--header-timeout", patience, "--idle-timeout", patience, "--max-upload", str(MAX_UPLOAD), "--max-audio-seconds", str(MAX_AUDIO_SECONDS))
    try:
        resident, now = asyncio.run(run(server, arguments.minutes))
        code, log = server.end()
        expect(code == 0, f"exit code {code}")
        expect(now - resident <= arguments.growth, f"{resident:.0f} MiB at the start, {now:.0f} at the end")
        expect(not re.search(rb"[^\n -~]", log), "the log has bytes that are not printable")
        expect(b"\nforged" not in log, "a client wrote a line of the log")
        for line in log.splitlines():
            expect(re.match(rb"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (info|warning) ", line), f"the log says {line.decode()}")
        asyncio.run(end_twice(arguments.program))
        print("passed")
    except AssertionError as error:
        server.process.kill()
        server.process.wait()
        print(server.said()[-5000:].decode(errors="replace"))
        sys.exit(f"FAILED (--seed {arguments.seed}): {error}")
    finally:
        if server.process.poll() is None:
            server.process.kill()


if __name__ == "__main__":
    main()
