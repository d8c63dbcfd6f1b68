"""Figures of the Python benchmarks as records: see README.md."""

import datetime
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def fraction(values, f):
    """The value that a fraction f of them lies below."""
    values = sorted(values)
    position = f * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])


def rounded(x):
    return float(f"{x:.5g}")


def find_commit():
    try:
        text = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        return text or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def library_devices(library):
    """What `tilewave devices --json` says, if the command line is beside the library; else nothing: figures are good without it."""
    try:
        tool = pathlib.Path(library).resolve().parent / "tilewave"
        return json.loads(subprocess.run([tool, "devices", "--json"], capture_output=True, check=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def shared_on_cpu(family, commit, library, torch):
    """What all records of a comparison with PyTorch on the CPU have in common."""
    cpu = next((device for device in library_devices(library).get("devices", []) if device.get("device") == "cpu"), {})
    return {
        "family": family,
        "commit": commit or find_commit(),
        "date": now(),
        "versions": {"torch": torch.__version__, "torch isa": torch.backends.cpu.get_cpu_capability(), "tilewave isa": cpu.get("isa")},
        "device": cpu.get("name") or "CPU",
    }


def rates(work, samples):
    """Work over milliseconds, per second: [low, median, high], where a tenth of the samples lie beyond low and high."""
    return [work / (fraction(samples, f) * 1e-3) for f in (0.9, 0.5, 0.1)]


def make_record(shared, case, dtype, mode, unit, ours, peer=None, limit=None, **more):
    """`ours`: (work, samples in milliseconds); `peer`: (name, work, samples) or None; `shared`: family, commit, date, versions, device; `more`: further
    fields."""
    low, mid, high = rates(*ours)
    peer_low, peer_mid, peer_high = rates(*peer[1:]) if peer else (None, None, None)
    return {
        "family": shared["family"],
        "case": case,
        "dtype": dtype,
        "mode": mode,
        "unit": unit,
        "ours": rounded(mid),
        "peer": peer[0] if peer else None,
        "peer_value": rounded(peer_mid) if peer else None,
        "limit": limit,
        "ratio": round(mid / peer_mid, 4) if peer else None,
        "spread": {"ours": [rounded(low), rounded(high)], "peer": [rounded(peer_low), rounded(peer_high)] if peer else None},
        "time_us": rounded(fraction(ours[1], 0.5) * 1e3),
        **more,
        **{key: shared[key] for key in ("commit", "date", "versions", "device")},
    }


def merged(before, after):
    """The records of two runs: of the cases that both have, the second's. A case's peers take turns with ours, so none is kept from another run."""

    def key(record):
        return tuple(record.get(field) for field in ("family", "group", "case", "dtype", "mode", "unit"))

    later = {}
    for record in after:
        later.setdefault(key(record), []).append(record)
    measured = set(later)
    records = []
    for record in before:
        records += later.pop(key(record), []) if key(record) in measured else [record]
    return records + [record for case in later.values() for record in case]


def write(path, records, append):
    """Writes the list; `append`: keeps what the file had besides."""
    before = json.loads(path.read_text() or "[]") if append and path.exists() else []
    path.write_text(json.dumps(merged(before, records), indent=2) + "\n")
