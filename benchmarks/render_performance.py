#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from benchmarks/results/<device>/<family>.json, and links to the plots in docs/plots.

    python3 benchmarks/render_performance.py            # rewrites the tables
    python3 benchmarks/render_performance.py --check    # exit code 1, and the difference, when they or the plots do not agree with the results

Only what stands between the two marker lines is written; the text around them is by hand. plot_performance.py draws the plots. Exit codes: 0 done, 1 failed or different, 2 wrong usage.
"""

import argparse
import difflib
import json
import math
import pathlib
import sys

import plotted

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "<!-- tables: begin (written by benchmarks/render_performance.py) -->"
END = "<!-- tables: end -->"
REQUIRED = ("family", "case", "dtype", "mode", "unit", "ours", "peer", "peer_value", "limit", "commit", "date", "versions")
PEER_NAMES = {
    "cublasLt": "cuBLASLt",
    "openblas": "OpenBLAS",
    "cudnn": "cuDNN",
    "flash_attention_2": "FlashAttention 2",
    "mem_efficient": "memory-efficient",
    "triton": "Triton",
    "cublas": "cuBLAS",
    "pytorch": "PyTorch",
    "transformers": "transformers",
    "transformers_compiled": "transformers, compiled",
}
TIME = "us"  # the unit of records that are times: less is better
NONE = "There are no results yet: `make gpu-bench` on a machine with a GPU writes them.\n"


class BadResults(Exception):
    pass


def load(path):
    """The records of one file. Raises BadResults that names what is wrong."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadResults(f"{path}: {error}") from error
    if not isinstance(records, list):
        raise BadResults(f"{path}: is not a list of records")
    for index, record in enumerate(records):
        missing = [field for field in REQUIRED if not isinstance(record, dict) or field not in record]
        if missing:
            raise BadResults(f"{path}: record {index} has no {', '.join(missing)}")
    return records


def number(value):
    """Three or four digits, as figures with +-1 % deserve; an absent one is a dash."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def quotient(a, b):
    valid = isinstance(a, (int, float)) and isinstance(b, (int, float)) and b > 0
    return f"{a / b:.2f}" if valid else "–"


def read_folder(folder):
    """The files of a device with records, by name: (path, records). A file `x_peer.json` without figures of ours, whose peers were measured by a program
    of their own, joins `x.json`: its records share the rows of those."""
    files = {path.stem: (path, load(path)) for path in sorted(folder.glob("*.json"))}
    for stem, (_, records) in list(files.items()):
        sibling = stem.removesuffix("_peer")
        if sibling != stem and sibling in files and all(r["ours"] is None for r in records):
            files[sibling][1].extend(records)
            del files[stem]
    return [(path, records) for path, records in files.values() if records]


def spread(record):
    values = (record.get("spread") or {}).get("ours")
    return f"{number(values[0])}–{number(values[1])}" if values else "–"


def unique(values):
    return list(dict.fromkeys(values))


def table(records):
    """Records of one family, device, group and unit. A record per peer shares its row with those of the same case, dtype and mode."""
    of_time = records[0]["unit"] == TIME
    has_bound = any(r.get("bound") for r in records)
    by_other_program = unique(r["peer"] for r in records if r["peer"] and r["ours"] is None)
    peers = unique(r["peer"] for r in records if r["peer"])
    rows = {}
    for record in records:
        rows.setdefault((record["case"], record["dtype"], record["mode"]), []).append(record)
    heads = ["case", "dtype", "mode"]
    numbers = ["µs"] if has_bound else []
    numbers += ["ours", "p10–p90"]
    for peer in peers:
        # How many times the time of a peer ours takes says nothing where the peer is part of the limit.
        has_ratio = not of_time or peer in by_other_program
        numbers += [PEER_NAMES.get(peer, peer), "ratio"] if has_ratio else [PEER_NAMES.get(peer, peer)]
    by_blocks = any("ratio_by_blocks" in r for r in records)
    numbers += ["ratio by blocks"] if by_blocks else []
    numbers += ["limit", "of the limit"] + (["bound by"] if has_bound else [])
    lines = [f"| {' | '.join(heads + numbers)} |", f"|{'|'.join(['---'] * len(heads) + ['---:'] * len(numbers))}|"]
    for (case, dtype, mode), group in rows.items():
        first = group[0]
        cells = [case, dtype, mode]
        cells += [number(first.get("time_us"))] if has_bound else []
        cells += [number(first["ours"]), spread(first)]
        for peer in peers:
            of_peer = next((r for r in group if r["peer"] == peer), {})
            value = of_peer.get("peer_value")
            if peer in by_other_program:
                cells += [number(value), quotient(value, first["ours"]) if of_time else quotient(first["ours"], value)]
            else:
                cells += [number(value)] if of_time else [number(value), quotient(of_peer.get("ours"), value)]
        cells += [number(first.get("ratio_by_blocks"))] if by_blocks else []
        cells += [number(first["limit"]), quotient(first["ours"], first["limit"])]
        cells += [first.get("bound") or "–"] if has_bound else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def origin(records):
    """Where the figures come from, in one line."""
    versions = unique(f"{name} {version}" for r in records for name, version in sorted(r["versions"].items()) if version)
    return (
        f"Commit {', '.join(unique(r['commit'] for r in records))}; {', '.join(unique(r['date'] for r in records))}; {', '.join(versions)}."
    )


def stale_plots(results, plots):
    """Those in the folder `plots` that were not drawn from what lies below the folder `results`."""
    current = set()
    for folder in results.glob("*"):
        for _, name, _, records in plotted.of_device(folder, load):
            if (plots / name).exists() and plotted.is_current(plots / name, records):
                current.add(name)
    return [path for path in sorted(plots.glob("*.svg")) if path.name not in current]


def render(results, plots):
    """The tables of everything below the folder `results`, each device's after links to those of its plots that are in the folder `plots`, beside the page."""
    lines = []
    device = None
    for path, records in (file for folder in sorted(results.glob("*/")) for file in read_folder(folder)):
        if path.parent.name != device:
            device = path.parent.name
            lines += [f"## {records[0].get('device') or device}", ""]
            for _, name, title, _ in plotted.of_device(path.parent, load):
                if (plots / name).exists():
                    lines += [f"![{title}]({plots.name}/{name})", ""]
        for group, unit in unique((r.get("group"), r["unit"]) for r in records):
            title = f"{records[0]['family']}, {group}" if group else records[0]["family"]
            lines += [f"### {title} ({'µs' if unit == TIME else unit})", ""]
            lines += [*table([r for r in records if (r.get("group"), r["unit"]) == (group, unit)]), ""]
        lines += [origin(records), ""]
    return "\n".join(lines) if lines else NONE


def with_tables(text, tables, name):
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BadResults(f"{name}: must hold each of these lines once, in this order: {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{rest.split(END)[1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 and the difference when the tables are not those of the results"
    )
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks/results", help="default: benchmarks/results")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/performance.md", help="default: docs/performance.md")
    options = parser.parse_args()
    try:
        plots = options.page.parent / "plots"
        stale = stale_plots(options.results, plots)
        old = options.page.read_text(encoding="utf-8")
        new = with_tables(old, render(options.results, plots), options.page)
        for path in stale:
            print(f"{path} was not drawn from {options.results}; run benchmarks/plot_performance.py")
        if options.check:
            if old != new:
                sys.stdout.writelines(
                    difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(options.page), "from the results")
                )
                print(f"{options.page} does not agree with {options.results}; run benchmarks/render_performance.py")
            return 1 if stale or old != new else 0
        if old != new:
            options.page.write_text(new, encoding="utf-8")
    except (BadResults, OSError) as error:
        print(f"render_performance.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
