#!/usr/bin/env python3
"""Draws docs/plots/<device>-*.svg from benchmarks/results/<device>/*_peer.json.

    python3 benchmarks/plot_performance.py     # then: python3 benchmarks/render_performance.py

What there are no results of is left out. The same results give the same file. Needs matplotlib. Exit codes: 0 done, 1 failed or something is missing, 2 wrong usage.
"""

import argparse
import math
import pathlib
import sys

import plotted
from render_performance import PEER_NAMES, ROOT, BadResults, load, unique

try:
    import matplotlib as mpl
except ImportError as error:
    sys.exit(f"plot_performance.py: {error}")
mpl.use("svg")
from matplotlib import pyplot as plt

OURS = "tilewave"
PAGED = "tilewave, pages of 64"
NAMES = {OURS: "Tilewave", PAGED: "Tilewave, pages of 64", "copy": "copy", **PEER_NAMES}
# Colour, line, marker. Ours stands out; the peers are told apart by more than their greys.
STYLES = {
    OURS: ("#c2410c", "-", "o"),
    PAGED: ("#f0a988", "-", "o"),
    "cudnn": ("#374151", "-", "s"),
    "cublas": ("#374151", "-", "s"),
    "pytorch": ("#6b7280", "-", "s"),
    "triton": ("#64809c", "--", "^"),
    "flash_attention_2": ("#9ca3af", "-", "D"),
    "mem_efficient": ("#b6bcc6", ":", "v"),
    "copy": ("#d1d5db", "-", "s"),
}
TEXT, LINES = "#1f2937", "#e5e7eb"
SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tilewave",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINES,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "ytick.left": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
}


def values(records):
    """{case: {name: its value}}; ours is that of the first record."""
    found = {}
    for record in records:
        of_case = found.setdefault(record["case"], {})
        of_case.setdefault(OURS, record["ours"])
        if record["peer"]:
            of_case[record["peer"]] = record["peer_value"]
    return found


def in_order(of_cases):
    """The names that have values, ours first, as STYLES lists them."""
    names = {name for of_case in of_cases for name in of_case}
    return [name for name in STYLES if name in names]


def thousands(n):
    return f"{n // 1024}k" if n >= 1024 else str(n)


def bars(axis, of_cases):
    """A group of bars for each {label: {name: value}}, with our values above ours."""
    labels, of_cases = list(of_cases), list(of_cases.values())
    names = in_order(of_cases)
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        heights = [of_case.get(name, math.nan) for of_case in of_cases]
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(labels))]
        drawn = axis.bar(places, heights, width * 0.92, color=STYLES[name][0], label=NAMES[name])
        if name == OURS:
            axis.bar_label(drawn, fmt=lambda x: f"{x:.2f}" if x < 10 else f"{x:.0f}", fontsize=7, color=STYLES[OURS][0], padding=1)
    axis.set_xticks(range(len(labels)), labels)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.6, len(labels) - 0.4)


def forward(records):
    """Small multiples: a column for each head dimension, full above causal."""
    panels = {}
    for case, of_case in values(records).items():
        head_dim, seqlen, mask = case.split("-")  # d128-s4096-causal
        panels.setdefault((mask, int(head_dim[1:])), {})[int(seqlen[1:])] = of_case
    masks, head_dims = (sorted({key[n] for key in panels}, reverse=n == 0) for n in (0, 1))
    names = in_order([of_case for panel in panels.values() for of_case in panel.values()])
    seqlens = sorted({seqlen for panel in panels.values() for seqlen in panel})
    shape = {"figsize": (1.2 + 2.8 * len(head_dims), 1.0 + 2.3 * len(masks)), "sharex": True, "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(masks), len(head_dims), **shape)
    for row, mask in zip(axes, masks):
        row[0].set_ylabel("TFLOP/s")
        for axis, head_dim in zip(row, head_dims):
            panel = panels.get((mask, head_dim), {})
            for name in reversed(names):  # ours on top
                points = [(seqlen, panel[seqlen][name]) for seqlen in seqlens if name in panel.get(seqlen, {})]
                if points:
                    colour, line, marker = STYLES[name]
                    axis.plot(*zip(*points), line, marker=marker, color=colour, label=NAMES[name])
            axis.set_title(f"head dimension {head_dim}, {mask}")
            axis.set_xscale("log", base=2)
            axis.set_xticks(seqlens, [thousands(seqlen) for seqlen in seqlens])
            axis.minorticks_off()
    axes[0, 0].set_ylim(bottom=0)  # of all, once all lines are there
    for axis in axes[-1]:
        axis.set_xlabel("sequence length, tokens")
    return figure, names


def decode(records):
    """What part of a large read's bandwidth is reached."""
    of_cases = {}
    for case, of_case in values(records).items():
        _, batch, seqlen, *paged = case.split("-")  # decode-b16-32k, decode-b16-32k-paged64
        read = of_case.pop("read")
        parts = of_cases.setdefault(f"{batch[1:]} × {seqlen}", {})
        for name, value in of_case.items():
            parts[PAGED if paged and name == OURS else name] = value / read
    figure, axis = plt.subplots(figsize=(9.6, 3.2))
    bars(axis, of_cases)
    axis.set_ylim(0, max(1.0, 1.05 * max(value for parts in of_cases.values() for value in parts.values())))
    axis.set_xlabel("sequences × keys of each")
    axis.set_ylabel("part of the read bandwidth")
    return figure, in_order(of_cases.values())


def panels_of_bars(panels, unit, width):
    """`panels`: {title: {label: {name: value}}}, side by side; `width` inches for a group of bars."""
    counts = [len(panel) for panel in panels.values()]
    shape = {"figsize": (1.0 + width * sum(counts), 3.2), "sharey": True, "squeeze": False}
    figure, (axes,) = plt.subplots(1, len(panels), gridspec_kw={"width_ratios": counts}, **shape)
    for axis, (title, panel) in zip(axes, panels.items()):
        bars(axis, panel)
        axis.set_title(title)
    axes[0].set_ylabel(unit)
    return figure, in_order([of_case for panel in panels.values() for of_case in panel.values()])


def gemm(records):
    """A panel for each dtype."""
    panels = {}
    for dtype in unique(r["dtype"] for r in records):
        of_cases = values([r for r in records if r["dtype"] == dtype])
        panels[dtype] = {case.removeprefix("nt-").replace("x", "\n× "): of_case for case, of_case in of_cases.items()}
    return panels_of_bars(panels, "TFLOP/s", 1.1)


def norms(records):
    """A panel for each operation."""
    panels = {}
    for case, of_case in values(records).items():
        operation, shape = case.rsplit("-", 1)  # rms-norm-32768x4096
        panels.setdefault(operation.replace("-", " "), {})[shape.replace("x", "\n× ")] = of_case
    return panels_of_bars(panels, "GB/s", 0.66)


DRAW = {
    "attention-forward-hot": forward,
    "attention-forward-cool": forward,
    "attention-decode": decode,
    "gemm-hot": gemm,
    "gemm-cool": gemm,
    "norms": norms,
}


def draw(plot, title, records, path):
    figure, names = DRAW[plot.name](records)
    by_name = {}
    for axis in figure.axes:
        by_name |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    labels = [NAMES[name] for name in names]
    top = 1 - 0.55 / figure.get_figheight()  # title and legend above the panels
    figure.suptitle(title, x=0.01, y=0.995, ha="left", va="top", fontsize=11, fontweight="bold").set_in_layout(False)
    where = {"loc": "lower left", "bbox_to_anchor": (0, top - 0.01), "ncols": len(names), "columnspacing": 1.4, "handletextpad": 0.5}
    figure.legend([by_name[label] for label in labels], labels, **where)
    figure.tight_layout(rect=(0, 0, 1, top))
    metadata = {"Date": None, "Creator": "benchmarks/plot_performance.py", "Title": title, "Description": plotted.description(records)}
    figure.savefig(path, format="svg", facecolor="white", metadata=metadata)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks/results", help="default: benchmarks/results")
    parser.add_argument("--plots", type=pathlib.Path, default=ROOT / "docs/plots", help="default: docs/plots")
    options = parser.parse_args()
    try:
        options.plots.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(SETTINGS):
            for folder in sorted(options.results.glob("*")):
                for plot, name, title, records in plotted.of_device(folder, load):
                    draw(plot, title, records, options.plots / name)
    except (BadResults, OSError) as error:
        print(f"plot_performance.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
