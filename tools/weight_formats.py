#!/usr/bin/env python3
"""What weights in fewer bits cost: the relative L2 error of the encoder's result and of the first scores, against the same engine and dtype
with plain weights.

    tools/random_checkpoint.py nano /tmp/nano
    tools/weight_formats.py /tmp/nano assets/samples/digits-1.wav

The scores' error includes the encoder's. Needs NumPy and build/tests/dump_stages.
"""

import argparse
import pathlib
import subprocess
import tempfile

import numpy as np


def stages(arguments, weights):
    """The encoder's result and the first scores."""
    with tempfile.TemporaryDirectory() as folder:
        command = [arguments.program, arguments.checkpoint, arguments.audio, arguments.device, arguments.dtype, folder]
        subprocess.run(command + [weights], check=True)
        return [np.load(pathlib.Path(folder) / f"{stage}.npy").astype(np.float64).ravel() for stage in ("encoder", "logits")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("audio")
    parser.add_argument("--weights", nargs="+", default=["int8", "fp8", "int4:32", "int4:32:zeros", "int4:128", "int4:128:zeros"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--program", default="build/tests/dump_stages")
    arguments = parser.parse_args()

    exact = stages(arguments, "plain")
    print("| weights | encoder | first scores | same likeliest token |\n|---|---|---|---|", flush=True)
    for weights in arguments.weights:
        found = stages(arguments, weights)
        errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact)]
        same = "yes" if found[1].argmax() == exact[1].argmax() else "no"
        print(f"| {weights} | {errors[0]:.4f} | {errors[1]:.4f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
