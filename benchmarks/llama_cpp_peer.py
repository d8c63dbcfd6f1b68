#!/usr/bin/env python3
"""Times a decoding step on the CPU, for one sequence, against llama.cpp with the same weights in the same formats.

    python3 tools/random_checkpoint.py nano --decoder /tmp/nano-decoder      GLM-ASR-Nano's decoder; `small` for a quick try
    python3 benchmarks/llama_cpp_peer.py /tmp/nano-decoder --json benchmarks/results/amd-epyc-avx512/llama_cpp_peer.json

Needs the command line `tilewave`, and llama-cpp-python, gguf and NumPy from PyPI. The first run writes the checkpoint as GGUF files to its folder
gguf/: BF16.gguf by gguf, the others by llama.cpp's own llama_model_quantize. There all linear layers have the format in the file's name, except for
the vocabulary's of Q4_0 and Q4_K, which is Q8_0, as ours is in int8.

    llama.cpp   ours
    Q8_0        --weights int8: a scale for each row
    Q4_0        --weights int4: groups of 32 with a scale
    Q4_K        --weights int4:32:zeros: groups of 32 with a scale and a zero point
    BF16, F16   --dtype bf16, f16; otherwise ours computes in f32

Both sides are processes bound to as many cores as they have threads, and take turns: one of each in a round. Each loads the model, processes a prompt of
128 tokens, and then times 64 steps from the wall clock; its figure is their mean. A step ends with the choice of the likeliest token, which is the next
step's input. Ours is `tilewave bench generate`, the peer llama_decode() of one token through llama-cpp-python, with that library's defaults otherwise, and
NumPy's argmax of the scores. Figures are medians over the rounds. The limit is the read bandwidth that `bench generate` measures, with the same threads,
divided by the bytes of weights that a step of ours reads. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import records

PROMPT, STEPS = 128, 64
WANTED = 1.1  # of llama.cpp's rate with quantised weights
WANTED_OF_LIMIT = 0.7


class Format(NamedTuple):
    arguments: list  # of `tilewave bench generate`
    dtype: str  # of our weights
    file_type: str  # llama.cpp's name


FORMATS = {
    "Q8_0": Format(["--weights", "int8"], "int8", "LLAMA_FTYPE_MOSTLY_Q8_0"),
    "Q4_0": Format(["--weights", "int4"], "int4", "LLAMA_FTYPE_MOSTLY_Q4_0"),
    "Q4_K": Format(["--weights", "int4:32:zeros"], "int4:32:zeros", "LLAMA_FTYPE_MOSTLY_Q4_K_S"),
    "BF16": Format(["--dtype", "bf16"], "bf16", "LLAMA_FTYPE_MOSTLY_BF16"),
    "F16": Format(["--dtype", "f16"], "f16", "LLAMA_FTYPE_MOSTLY_F16"),
}


def checkpoint_tensors(checkpoint):
    """(name, bits of bf16) of every tensor of model.safetensors."""
    import numpy

    data = numpy.memmap(checkpoint / "model.safetensors", mode="r")
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:begin].tobytes())
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        yield name, data[begin + first : begin + last].view("<u2").reshape(tensor["shape"])


def write_bf16(checkpoint, file):
    import gguf
    import numpy

    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, bits in checkpoint_tensors(checkpoint):
        stored = names.get_name(name, try_suffixes=(".weight",))
        if bits.ndim == 1:  # llama.cpp takes norms in f32
            writer.add_tensor(stored, (bits.astype(numpy.uint32) << 16).view(numpy.float32))
            continue
        for projection, count in heads.items():
            if projection in name:  # the two members of a rotated pair are neighbours in the file
                bits = bits.reshape(count, 2, -1, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)
        writer.add_tensor(stored, numpy.ascontiguousarray(bits).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_file(checkpoint, name):
    """The checkpoint in a format, written unless it is there."""
    import llama_cpp

    file = checkpoint / "gguf" / f"{name}.gguf"
    if file.exists():
        return file
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    if name == "BF16":
        write_bf16(checkpoint, part)
    else:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, FORMATS[name].file_type)
        parameters.pure = True
        if name.startswith("Q4"):
            parameters.output_tensor_type = llama_cpp.GGML_TYPE_Q8_0
        source = os.fsencode(gguf_file(checkpoint, "BF16"))
        if llama_cpp.llama_model_quantize(source, os.fsencode(part), ctypes.byref(parameters)) != 0:
            raise RuntimeError(f"llama.cpp cannot write {part}")
    part.rename(file)
    return file


def bytes_per_step(file):
    """Of the tensors that a step reads whole: all but the embedding table."""
    import gguf

    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors if tensor.name != "token_embd.weight")


def run_peer(file, threads):
    """Prints the seconds of a step of llama.cpp, in a process of its own."""
    import llama_cpp
    import numpy

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = PROMPT + STEPS
    parameters.n_threads = parameters.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, parameters)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def next_token(tokens):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch points to it
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            sys.exit(f"llama.cpp cannot decode {file}")
        return int(numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocabulary,)).argmax())

    token = next_token([i * 7919 % vocabulary for i in range(PROMPT)])
    begin = time.perf_counter()
    for _ in range(STEPS):
        token = next_token([token])
    seconds = (time.perf_counter() - begin) / STEPS
    print(json.dumps({"seconds": seconds, "system": llama_cpp.llama_print_system_info().decode()}))


def run_bound(command, threads):
    """The JSON that a command prints, on the first `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout)


def run_case(options, shared, name, threads):
    file, form = gguf_file(options.checkpoint, name), FORMATS[name]
    ours_command = [options.tilewave, "bench", "generate", "--model", options.checkpoint, "--device", "cpu", "--json", *form.arguments,
                    "--prompt-tokens", PROMPT, "--tokens", STEPS + 1, "--warmup", 0, "--runs", 1]  # fmt: skip
    peer_command = [sys.executable, __file__, "--peer", file, "--threads", threads]
    ours, peers = [], []
    for _ in range(options.rounds):
        ours.append(run_bound([str(each) for each in ours_command], threads))
        peers.append(run_bound([str(each) for each in peer_command], threads))
    size, peer_size = ours[0]["bytes"]["step"], bytes_per_step(file)
    bandwidth = records.fraction([run["read_bandwidth"] for run in ours], 0.5)
    return records.make_record(
        {**shared, "versions": {**shared["versions"], "llama.cpp": peers[0]["system"].strip()}},
        f"{name}, {PROMPT} to {PROMPT + STEPS} tokens",
        form.dtype,
        "one-thread" if threads == 1 else f"{threads} threads",
        "tokens/s",
        (1, [run["seconds"]["token"] * 1e3 for run in ours]),
        ("llama.cpp", 1, [run["seconds"] * 1e3 for run in peers]),
        limit=records.rounded(bandwidth / size),
        bound="memory",
        group="CPU",
        bytes=size,
        peer_bytes=peer_size,
        read_bandwidth=records.rounded(bandwidth),
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    available = len(os.sched_getaffinity(0))
    parser.add_argument("checkpoint", type=pathlib.Path, nargs="?", help="a folder that tools/random_checkpoint.py --decoder wrote")
    parser.add_argument("--tilewave", type=pathlib.Path, default=records.ROOT / "build/tilewave", help="default: build/tilewave")
    parser.add_argument("--threads", type=int, nargs="+", default=[available], help="of both; default: all cores of this process")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides the cases that are measured")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    parser.add_argument("--peer", type=pathlib.Path, help=argparse.SUPPRESS)  # time llama.cpp with this file in this process
    options = parser.parse_args()
    if not options.peer and not options.checkpoint:
        parser.error("the checkpoint is missing")
    if not all(1 <= threads <= available for threads in options.threads) or options.rounds < 1:
        parser.error(f"--threads and --rounds must be at least 1; this process may use {available} cores")
    return options


def main():
    options = parse_arguments()
    if options.peer:
        run_peer(options.peer, options.threads[0])
        return 0
    try:
        import llama_cpp

        versions = {package: importlib.metadata.version(package) for package in ("llama-cpp-python", "gguf", "numpy")}
    except ImportError as error:
        sys.exit(f"llama_cpp_peer.py: {error}")
    silent = llama_cpp.llama_log_callback(lambda *_: None)  # lives as long as it may be called
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    found = records.library_devices(options.tilewave)
    cpu = next((device for device in found.get("devices", []) if device.get("device") == "cpu"), {})
    shared = {"family": "generate", "commit": options.commit or records.find_commit(), "date": records.now(),
              "versions": {**versions, "tilewave isa": cpu.get("isa")}, "device": cpu.get("name") or "CPU"}  # fmt: skip
    made, status = [], 0
    print("load average: " + " ".join(f"{load:.1f}" for load in os.getloadavg()), flush=True)
    for threads in options.threads:
        for name in options.format:
            try:
                record = run_case(options, shared, name, threads)
            except (OSError, RuntimeError, ValueError) as error:
                status = 1
                print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
                continue
            made.append(record)
            share, quantised = record["ours"] / record["limit"], name.startswith("Q")
            missed = " MISSED" if quantised and (record["ratio"] < WANTED or share < WANTED_OF_LIMIT) else ""
            print(f"  {name:5} {record['mode']:11} {record['ours']:7.2f} tokens/s, {share:.2f} of the read bandwidth; "
                  f"llama.cpp {record['peer_value']:7.2f}, ratio {record['ratio']:.2f}{missed}", flush=True)  # fmt: skip
            if options.json:  # a long run that is stopped keeps what it has
                options.json.parent.mkdir(parents=True, exist_ok=True)
                records.write(options.json, [record], options.append or len(made) > 1)
    return status


if __name__ == "__main__":
    sys.exit(main())
