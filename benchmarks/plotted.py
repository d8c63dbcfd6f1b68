"""Which records each plot in docs/plots shows, and which it was drawn from. No matplotlib in here."""

import hashlib
import json
import re
from typing import NamedTuple

DIGEST = re.compile(r"records sha256:([0-9a-f]{64})")


class Plot(NamedTuple):
    """`name`: of the file, after the device's; `results`: the file of records, of which those of `group`, `mode` and `unit` are shown."""

    name: str
    title: str
    results: str
    group: str
    mode: str
    unit: str


PLOTS = (
    Plot("attention-forward-hot", "attention forward, bf16, hot", "attention_peer.json", "plain", "hot", "TFLOP/s"),
    Plot("attention-forward-cool", "attention forward, bf16, cool", "attention_peer.json", "plain", "cool", "TFLOP/s"),
    Plot("attention-decode", "attention, decode, bf16, graph", "attention_peer.json", "decode", "graph", "GB/s"),
    Plot("gemm-hot", "matrix products, hot", "gemm_peer.json", "Python", "hot", "TFLOP/s"),
    Plot("gemm-cool", "matrix products, cool", "gemm_peer.json", "Python", "cool", "TFLOP/s"),
    Plot("norms", "norms, softmax and SwiGLU, bf16, hot", "norms_peer.json", "Python", "hot", "GB/s"),
)


def of_device(folder, load):
    """(plot, file name, title, records) of each plot that the results in `folder` allow. `load` gives the records of a file."""
    for plot in PLOTS:
        path = folder / plot.results
        records = load(path) if path.exists() else []
        records = [r for r in records if (r.get("group"), r["mode"], r["unit"]) == (plot.group, plot.mode, plot.unit)]
        if records:
            yield plot, f"{folder.name}-{plot.name}.svg", f"{records[0].get('device') or folder.name}: {plot.title}", records


def digest(records):
    """Of the records that a plot shows; it stands in the plot, as DIGEST finds it."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def description(records):
    return f"records sha256:{digest(records)}"


def is_current(svg, records):
    """Whether the plot in the file was drawn from these records."""
    found = DIGEST.search(svg.read_text(encoding="utf-8"))
    return found is not None and found[1] == digest(records)
