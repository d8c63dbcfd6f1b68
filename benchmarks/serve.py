#!/usr/bin/env python3
"""Load on `tilewave serve`: audio seconds per second, and latency, with 1 to 256 clients.

    python3 benchmarks/serve.py --device cuda --model /tmp/nano --force-tokens 128 --json serve.json   # tools/random_checkpoint.py nano /tmp/nano
    python3 benchmarks/serve.py --device cpu --clients 16 --transcribe                                # and `transcribe --batch` on the same files
    python3 benchmarks/serve.py --url http://host:8080 --clients 64                                   # a server that runs already

Starts the server, and ends it. Each client has one connection and sends its next request when it has the answer to the last one (a closed loop), after
--warmup seconds for --seconds seconds. The clips are the bundled recordings without the silence at their ends, repeated to --clip-seconds: a checkpoint for
windows of 30 s takes each as one segment. All that is not an answer 200 with a text is an
error, and so is, with --transcribe, a text that differs from the one of `tilewave transcribe`. Exit codes: 0 done, 1 errors, 2 wrong usage.

Python's part of a request is under 1 ms (sockets without locks, bodies made once); `generator` in the table is the share of a core that it took.
Needs Python's standard library alone. benchmarks/README.md explains the records.
"""

import argparse
import itertools
import json
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import wave

import records

ROOT = records.ROOT
RATE = 16000
CLIPS = 6  # different ones
# Audio seconds per second that are asked for on an H200 at full size, by the number of clients.
ASKED_FOR = {1: 200, 4: 700, 64: 4000, 256: 6000}


def without_silence(frames):
    """The recording from its first to its last loud sample."""
    samples = memoryview(frames).cast("h")
    loud = [i for i in range(0, len(samples), 16) if abs(samples[i]) > 1000]
    return frames[2 * loud[0] : 2 * loud[-1]]


def clips(seconds):
    """WAV files of that length, as bytes: the bundled recordings in every order, over and over, without pauses that would divide a clip."""
    recordings = []
    for path in sorted((ROOT / "assets/samples").glob("*.wav")):
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2), path
            recordings.append(without_silence(file.readframes(file.getnframes())))
    result = []
    for order in itertools.islice(itertools.permutations(recordings), CLIPS):
        once = b"".join(order)
        size = int(seconds * RATE) * 2
        frames = (once * (size // len(once) + 1))[:size]
        header = b"RIFF" + (size + 36).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little") + (1).to_bytes(2, "little")
        header += (1).to_bytes(2, "little") + RATE.to_bytes(4, "little") + (2 * RATE).to_bytes(4, "little") + (2).to_bytes(2, "little")
        result.append(header + (16).to_bytes(2, "little") + b"data" + size.to_bytes(4, "little") + frames)
    return result


def request_of(clip, host):
    boundary = "tilewave-benchmark-boundary"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n'.encode(),
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="clip.wav"\r\nContent-Type: audio/wav\r\n\r\n'.encode(),
        clip,
        f"\r\n--{boundary}--\r\n".encode(),
    ]
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary={boundary}\r\n"
    return head.encode() + f"Content-Length: {sum(map(len, parts))}\r\n\r\n".encode() + b"".join(parts)


class Connection:
    """One client's."""

    def __init__(self, address):
        self.socket = socket.create_connection(address, timeout=600)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""

    def ask(self, request):
        """The status, and the body."""
        self.socket.sendall(request)
        while b"\r\n\r\n" not in self.rest:
            self._more()
        head, _, body = self.rest.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)[1])
        self.rest = body
        while len(self.rest) < length:
            self._more()
        body, self.rest = self.rest[:length], self.rest[length:]
        return int(head.split(None, 2)[1]), body

    def _more(self):
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise ConnectionError("the server closed the connection")
        self.rest += piece


class Load:
    """What `clients` clients measured."""

    def __init__(self, address, requests, clients, warmup, seconds, texts):
        self.latencies, self.errors, self.sent = [], [], 0
        lock = threading.Lock()
        begin = time.perf_counter() + warmup
        end = begin + seconds

        def client(number):
            connection, finished = None, []
            for i in itertools.count(number):
                before = time.perf_counter()
                if before >= end:
                    break
                error = None
                try:
                    connection = connection or Connection(address)
                    status, body = connection.ask(requests[i % len(requests)])
                    if status != 200:
                        error = f"status {status}: {body[:200].decode(errors='replace')}"
                    else:
                        text = json.loads(body)["text"]
                        if texts and text != texts[i % len(texts)]:
                            error = f"another text: {text!r} instead of {texts[i % len(texts)]!r}"
                except (OSError, ValueError, KeyError, TypeError) as failure:
                    error, connection = repr(failure), None
                after = time.perf_counter()
                finished.append((before, after, error))
            with lock:
                self.sent += len(finished)
                self.errors += [error for _, _, error in finished if error is not None]
                self.latencies += [after - before for before, after, error in finished if error is None and begin <= after < end]

        threads = [threading.Thread(target=client, args=[number]) for number in range(clients)]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.generator = (used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime) / (time.perf_counter() - started)
        self.requests_per_second = len(self.latencies) / seconds


class Server:
    def __init__(self, options):
        self.options, self.process = options, None
        if options.url:
            url = urllib.parse.urlsplit(options.url)
            self.address, self.start_seconds = (url.hostname, url.port or 80), None
            return
        command = [options.program, "serve", "--port", "0", "--device", options.device, "--log-level", "error"]
        command += ["--queue", str(max(256, 2 * max(options.clients)))]
        command += ["--model", options.model] if options.model else []
        command += ["--dtype", options.dtype] if options.dtype else []
        command += ["--batch", str(options.batch)] if options.batch else []
        command += ["--force-tokens", str(options.force_tokens)] if options.force_tokens else []
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        self.start_seconds = time.perf_counter() - begin
        found = re.search(r"http://\[?([^\s\]]+)\]?:(\d+)", line)
        if not found:
            sys.exit(f"the server did not start: {line!r}")
        self.address = (found[1], int(found[2]))

    def end(self):
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        if code != 0:
            sys.exit(f"the server ended with exit code {code}")


def transcribe(options, files):
    """The texts of `tilewave transcribe`, and the seconds that it took without loading the model."""
    command = [options.program, "transcribe", "--device", options.device, "--quiet", "--json", "--batch", str(options.batch or 16)]
    command += ["--model", options.model] if options.model else []
    command += ["--dtype", options.dtype] if options.dtype else []
    begin = time.perf_counter()
    lines = subprocess.run([*command, *files], check=True, stdout=subprocess.PIPE).stdout.splitlines()
    seconds = time.perf_counter() - begin
    answers = [json.loads(line) for line in lines]
    return [answer["text"] for answer in answers], seconds - answers[0]["seconds"]["load"]


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/tilewave"), help="default: build/tilewave")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--model", help="default: the bundled checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--batch", type=int, default=0, help="of the server, and of --transcribe")
    parser.add_argument("--force-tokens", type=int, default=0, help="tokens that the server generates for each segment, for random weights")
    parser.add_argument("--clients", default="1,4,64,256", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--clip-seconds", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--warmup", type=float, default=5)
    parser.add_argument(
        "--transcribe", action="store_true", help="also run `tilewave transcribe --batch` on the same clips, and compare texts"
    )
    parser.add_argument("--rounds", type=int, default=1, help="repetitions, of which the median counts; with --transcribe they take turns")
    parser.add_argument("--files", type=int, default=24, help="for --transcribe")
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--commit", help="the commit to record; default: that of this repository")
    options = parser.parse_args()
    if options.url and (options.transcribe or options.force_tokens or options.model):
        parser.error("--url measures a server as it is: without --transcribe, --force-tokens and --model")
    if min(options.clients) < 1:
        parser.error(f"--clients is {min(options.clients)}; allowed: at least 1")
    return options


def main():
    options = parsed()
    recordings = clips(options.clip_seconds)
    texts, peer_rates = None, []
    server = Server(options)
    requests = [request_of(clip, f"{server.address[0]}:{server.address[1]}") for clip in recordings]
    rounds = {clients: [] for clients in options.clients}
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, clip in enumerate(recordings):
            files.append(str(pathlib.Path(folder) / f"clip-{i}.wav"))
            pathlib.Path(files[-1]).write_bytes(clip)
        try:
            for _ in range(options.rounds):
                if options.transcribe:
                    heard, seconds = transcribe(options, [files[i % len(files)] for i in range(options.files)])
                    texts = heard[: len(files)]
                    peer_rates.append(options.files * options.clip_seconds / seconds)
                for clients in options.clients:
                    rounds[clients].append(Load(server.address, requests, clients, options.warmup, options.seconds, texts))
        finally:
            server.end()

    def middle(values):
        return records.fraction(values, 0.5)

    info = records.library_devices(options.program)
    about = {
        "commit": options.commit or records.find_commit(),
        "date": records.now(),
        "versions": {"tilewave": info.get("version")} if info.get("version") else {},
        "device": options.device,
    }
    tokens = f", {options.force_tokens} tokens" if options.force_tokens else ""
    results, failed = [], False
    print(
        f"{'clients':>8} {'audio s/s':>10} {'requests/s':>10} {'p50 ms':>9} {'p90 ms':>9} {'p99 ms':>9} {'errors':>7} {'generator':>9}  asked for"
    )
    first = None
    for clients in options.clients:
        loads = rounds[clients]
        rate = middle([load.requests_per_second * options.clip_seconds for load in loads])
        latencies = [latency for load in loads for latency in load.latencies]
        errors = [error for load in loads for error in load.errors]
        failed |= bool(errors) or not latencies
        quantiles = [records.fraction(latencies, f) * 1e3 if latencies else float("nan") for f in (0.5, 0.9, 0.99)]
        asked = ASKED_FOR.get(clients, "") if options.device.startswith("cuda") else ""
        generator = max(load.generator for load in loads)
        p50, p90, p99 = quantiles
        print(
            f"{clients:>8} {rate:>10.1f} {rate / options.clip_seconds:>10.2f} {p50:>9.1f} {p90:>9.1f} {p99:>9.1f} {len(errors):>7} {generator:>9.2f}  {asked}"
        )
        for error in sorted(set(errors))[:3]:
            print(f"{'':>8} {error}", file=sys.stderr)
        if clients == 1:
            first = (rate, p99)
        peer = ("1 client", first[0]) if first and clients > 1 else (None, None)
        if peer_rates:
            peer = ("transcribe --batch", middle(peer_rates))
        rates = [load.requests_per_second * options.clip_seconds for load in loads]
        shared = {"family": "serve", "case": f"{clients} clients, {options.clip_seconds:g} s{tokens}", "dtype": options.dtype or "auto"}
        results.append(
            {
                **shared,
                "mode": "closed loop",
                "unit": "audio s/s",
                "ours": records.rounded(rate),
                "peer": peer[0],
                "peer_value": records.rounded(peer[1]) if peer[0] else None,
                "limit": None,
                "ratio": round(rate / peer[1], 4) if peer[0] else None,
                "spread": {"ours": [records.rounded(records.fraction(rates, f)) for f in (0.1, 0.9)], "peer": None},
                "latency_ms": {"p50": round(p50, 2), "p90": round(p90, 2), "p99": round(p99, 2)},
                "requests": sum(len(load.latencies) for load in loads),
                "errors": len(errors),
                "generator_cores": round(generator, 3),
                **about,
            }
        )
        if first and clients > 1:
            print(f"{'':>8} {rate / first[0]:.1f} times the throughput of one client; its p99 {p99 / first[1]:.1f} times")
        if peer_rates:
            print(f"{'':>8} {rate / middle(peer_rates):.2f} of `transcribe --batch` ({middle(peer_rates):.1f} audio s/s)")
    if server.start_seconds is not None:
        print(f"ready {server.start_seconds:.2f} s after the start of the program")
        results.append(
            {
                **{"family": "serve", "case": "start to ready", "dtype": options.dtype or "auto", "mode": "once", "unit": "us"},
                **{"ours": records.rounded(server.start_seconds * 1e6), "peer": None, "peer_value": None, "limit": None, "ratio": None},
                **about,
            }
        )
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
