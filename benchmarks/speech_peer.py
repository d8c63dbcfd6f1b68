#!/usr/bin/env python3
"""Times transformers on the rows of `tilewave bench transcribe --stages`, eagerly and compiled with a static cache.

    python3 tools/random_checkpoint.py nano /tmp/nano
    build/tilewave bench transcribe --stages --model /tmp/nano --device cuda --output speech.json
    python3 benchmarks/speech_peer.py /tmp/nano --device cuda --json speech_peer.json

Both files in one folder of benchmarks/results make one table in docs/performance.md. Records as in benchmarks/README.md: `ours` is null. Needs
PyTorch and transformers. Each time is the median of --samples after a warm-up; a row that takes over two minutes has fewer samples. Rows
that do not fit the memory have null as `peer_value` and the reason in `peer_variant`.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import records
import torch
import transformers
from transformers import GlmAsrForConditionalGeneration, StaticCache, WhisperFeatureExtractor

CONTEXT, NEW_TOKENS, LONG_CONTEXT = 421, 200, 4000
WARM_UP, MOST_SECONDS = 3, 120
WINDOW = 30 * 16000
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PEERS = {"eager": "transformers", "compiled": "transformers_compiled"}


def measure(work, samples, count, synchronize):
    """Milliseconds of each sample, one call of which does `count` units."""

    def milliseconds():
        begin = time.perf_counter()
        work()
        synchronize()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(2):  # these may compile, the second for what the first has changed
        work()
    one = milliseconds()
    for _ in range(WARM_UP):
        if one * (samples + WARM_UP) > MOST_SECONDS * 1e3:
            break
        one = milliseconds()
    taken = []
    while len(taken) < samples and (not taken or sum(taken) + one < MOST_SECONDS * 1e3):
        taken.append(milliseconds())
    return [each / count for each in taken]


class Stages:
    """The model's stages, as the rows call them. `way`: eager or compiled."""

    def __init__(self, model, way):
        self.model, self.device, self.dtype = model, model.device, model.dtype
        inner = model.model
        self.decoder, self.head = inner.language_model, model.lm_head
        self.embeddings = self.decoder.get_input_embeddings()

        def tower(features):
            hidden = inner.audio_tower(features).last_hidden_state
            return inner.multi_modal_projector(hidden.reshape(hidden.shape[0], -1, hidden.shape[-1] * 4))

        def forward(embeddings, position, cache):
            hidden = self.decoder(
                inputs_embeds=embeddings, position_ids=position[None].expand(embeddings.shape[0], -1), past_key_values=cache, use_cache=True
            ).last_hidden_state
            return self.head(hidden[:, -1])

        compiled = way == "compiled"
        self.tower = torch.compile(tower, dynamic=False) if compiled else tower
        self.prefill_step = torch.compile(forward, dynamic=False) if compiled else forward
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"  # CUDA graphs
        self.decode_step = torch.compile(forward, dynamic=False, mode=mode) if compiled else forward

    def cache(self, batch, tokens):
        config = self.model.config.text_config
        cache = StaticCache(config=config, max_cache_len=tokens)
        # Not at the first update, which is in compiled code.
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache.early_initialization(batch, config.num_key_value_heads, dim, self.dtype, self.device)
        return cache

    def prompt(self, batch, tokens):
        ids = torch.arange(tokens, device=self.device) % self.embeddings.num_embeddings
        return self.embeddings(ids)[None].expand(batch, -1, -1).contiguous()

    def run_prefill(self, embeddings, cache):
        # In one launch, unlike cache.reset(), which also clears keys and values.
        torch._foreach_zero_([layer.cumulative_length for layer in cache.layers])
        return self.prefill_step(embeddings, torch.arange(embeddings.shape[1], device=self.device), cache)

    def encoder(self, windows):
        features = torch.randn(windows, self.model.config.audio_config.num_mel_bins, 3000, device=self.device, dtype=self.dtype)
        return lambda: self.tower(features)

    def prefill(self, tokens):
        cache, embeddings = self.cache(1, tokens), self.prompt(1, tokens)
        return lambda: self.run_prefill(embeddings, cache)

    def decode(self, batch, context, room, steps):
        """`steps` steps from `context` on, after each call further on; after `room` tokens they begin again."""
        cache, embeddings = self.cache(batch, context + room), self.prompt(batch, context)
        token = self.prompt(batch, 1)
        self.run_prefill(embeddings, cache)
        state = {"at": context}

        def work():
            for _ in range(steps):
                if state["at"] == context + room:
                    self.run_prefill(embeddings, cache)
                    state["at"] = context
                self.decode_step(token, torch.tensor([state["at"]], device=self.device), cache)
                state["at"] += 1

        return work

    def whole(self, extractor, audio):
        """Log-mel, encoder, prefill and greedy steps, each token back through the embedding."""
        cache = self.cache(1, CONTEXT + NEW_TOKENS)

        def work():
            features = extractor(audio, sampling_rate=16000, return_tensors="pt").input_features.to(self.device, self.dtype)
            embeddings = self.prompt(1, CONTEXT)
            rows = self.tower(features)
            embeddings[:, : rows.shape[1]] = rows[:, :CONTEXT]
            logits = self.run_prefill(embeddings, cache)
            for step in range(NEW_TOKENS - 1):
                token = self.embeddings(logits.argmax(-1, keepdim=True))
                logits = self.decode_step(token, torch.tensor([CONTEXT + step], device=self.device), cache)
            return int(logits.argmax())

        return work


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--ways", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--case", help="only rows whose name contains this")
    parser.add_argument("--commit", default=None, help="the commit to record; default: git's")
    parser.add_argument("--json", type=pathlib.Path, help="write the records to this file")
    options = parser.parse_args()
    if options.json:
        options.json.touch()  # a path that cannot be written is found early
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    model = GlmAsrForConditionalGeneration.from_pretrained(options.checkpoint, dtype=DTYPES[options.dtype]).to(device).eval()
    extractor = WhisperFeatureExtractor(feature_size=model.config.audio_config.num_mel_bins)
    audio = (torch.rand(WINDOW, generator=torch.Generator().manual_seed(1)).numpy() - 0.5) / 4
    name = torch.cuda.get_device_name(device) if cuda else records_cpu_name()
    shared = {"commit": options.commit or records.find_commit(), "date": records.now(), "device": name,
              "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    results = []

    def row(case, way, make, count=1, mode="hot"):
        if options.case and options.case not in case:
            return
        taken, problem = None, None
        try:
            with torch.no_grad():
                taken = measure(make(), options.samples, count, synchronize)
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            problem = f"does not fit: {str(error).splitlines()[0]}"
        if cuda:
            torch.cuda.empty_cache()
        low, middle, high = (records.rounded(records.fraction(taken, f) * 1e3) for f in (0.1, 0.5, 0.9)) if taken else (None, None, None)
        print(f"{case:34} {PEERS[way]:22} {middle if taken else problem} {'us' if taken else ''}", flush=True)
        spread = {"ours": None, "peer": [low, high] if taken else None}
        record = {"family": "speech", "case": case, "dtype": options.dtype, "mode": mode, "unit": "us", "ours": None, "peer": PEERS[way],
                  "peer_value": middle, "limit": None, "ratio": None, "spread": spread, "time_us": None}  # fmt: skip
        results.append({**record, **({"peer_variant": problem} if problem else {}), **shared})

    threads = len(os.sched_getaffinity(0))
    mel = lambda: lambda: extractor(audio, sampling_rate=16000, return_tensors="pt")  # noqa: E731
    torch.set_num_threads(1)
    row("mel-1", "eager", mel, mode="one-thread")
    torch.set_num_threads(threads)
    row(f"mel-1, {threads} threads", "eager", mel)
    most = model.config.text_config.max_position_embeddings
    for way in options.ways:
        stages = Stages(model, way)
        for windows in options.windows:
            row(f"encoder-{windows}", way, lambda windows=windows: stages.encoder(windows))
        if CONTEXT <= most:
            row(f"prefill-{CONTEXT}", way, lambda: stages.prefill(CONTEXT))
        steps = max(1, NEW_TOKENS // options.samples)
        for batch, context in [*((batch, CONTEXT) for batch in options.batch), (1, LONG_CONTEXT)]:
            if context + NEW_TOKENS <= most:
                make = lambda batch=batch, context=context: stages.decode(batch, context, NEW_TOKENS, steps)  # noqa: E731
                row(f"decode-{batch}, {context} to {context + NEW_TOKENS} tokens", way, make, steps)
        if CONTEXT + NEW_TOKENS <= most:
            row(f"30 s and {NEW_TOKENS} tokens", way, lambda: stages.whole(extractor, audio))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def records_cpu_name():
    """As the engine names the CPU's records: the model's name in /proc/cpuinfo."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "cpu"


if __name__ == "__main__":
    sys.exit(main())
