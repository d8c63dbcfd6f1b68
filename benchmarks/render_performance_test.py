#!/usr/bin/env python3
"""Tests of render_performance.py."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import plotted

SCRIPT = pathlib.Path(__file__).resolve().parent / "render_performance.py"
PAGE = """# Page

Text before.

<!-- tables: begin (written by benchmarks/render_performance.py) -->
<!-- tables: end -->

Text after.
"""


def record(**changes):
    return {
        "family": "gemm", "case": "nt-4096", "dtype": "bf16", "mode": "hot", "unit": "TFLOP/s", "ours": 712.34, "peer": "cublasLt", "peer_value": 700.0,
        "limit": 989, "ratio": 1.0176, "spread": {"ours": [708.1, 715.0], "peer": [690, 705]}, "commit": "abc", "date": "2026-01-01T00:00:00Z",
        "versions": {"driver": "13.0"}, "device": "NVIDIA H200", **changes,
    }  # fmt: skip


class RenderPerformance(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.page = self.folder / "performance.md"
        self.page.write_text(PAGE, encoding="utf-8")

    def write(self, records, device="nvidia-h200", family="gemm"):
        path = self.folder / "results" / device / f"{family}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(records if isinstance(records, str) else json.dumps(records), encoding="utf-8")

    def run_script(self, *arguments):
        command = [sys.executable, SCRIPT, "--results", self.folder / "results", "--page", self.page, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def rendered(self):
        done = self.run_script()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.run_script("--check").returncode, 0)
        return self.page.read_text(encoding="utf-8")

    def test_peers_of_another_program_share_the_rows(self):
        ours = record(family="speech", case="decode-1", unit="us", ours=900, peer=None, peer_value=None, limit=700, ratio=None)
        lost = record(family="speech", case="decode-64", unit="us", ours=None, peer=None, peer_value=None, limit=None, ratio=None, spread=None)
        peer = record(family="speech", case="decode-1", unit="us", ours=None, peer="transformers", peer_value=2700, limit=None, spread=None)
        compiled = {**peer, "peer": "transformers_compiled", "peer_value": None}
        self.write([ours, lost], family="speech")
        self.write([peer, compiled], family="speech_peer")
        text = self.rendered()
        self.assertEqual(text.count("### speech"), 1)
        self.assertIn("| transformers | ratio | transformers, compiled | ratio |", text)
        self.assertIn("| decode-1 | bf16 | hot | 900 | 708–715 | 2700 | 3.00 | – | – | 700 | 1.29 |", text)
        self.assertIn("| decode-64 | bf16 | hot | – | – | – | – | – | – | – | – |", text)

    def test_a_peer_file_alone_keeps_its_table(self):
        self.write([record(ours=None, ratio=None, spread=None)], family="speech_peer")
        self.assertIn("| nt-4096 | bf16 | hot | – | – | 700 |", self.rendered())

    def test_without_results_says_so(self):
        text = self.rendered()
        self.assertIn("no results yet", text)
        self.assertTrue(text.startswith("# Page\n\nText before.") and text.endswith("Text after.\n"))

    def test_figures_and_origin(self):
        self.write([record(), record(mode="cool", ours=780, peer_value=790)])
        text = self.rendered()
        self.assertIn("## NVIDIA H200", text)
        self.assertIn("| nt-4096 | bf16 | hot | 712 | 708–715 | 700 | 1.02 | 989 | 0.72 |", text)
        self.assertIn("| nt-4096 | bf16 | cool | 780 |", text)
        self.assertIn("Commit abc; 2026-01-01T00:00:00Z; driver 13.0.", text)

    def test_several_peers_share_a_row(self):
        self.write([record(peer="cudnn", peer_value=600), record(peer="flash_attention_2", peer_value=300)])
        self.assertIn("| 712 | 708–715 | 600 | 1.19 | 300 | 2.37 |", self.rendered())

    def test_absent_values_are_dashes(self):
        self.write([record(peer=None, peer_value=None, limit=None, spread={"ours": None, "peer": None})])
        self.assertIn("| nt-4096 | bf16 | hot | 712 | – | – | – |", self.rendered())

    def test_bandwidth_and_times_have_tables_of_their_own(self):
        large = record(
            family="softmax",
            case="32768x4096",
            unit="GB/s",
            ours=3900,
            peer="copy",
            peer_value=4100,
            limit=4800,
            spread={"ours": [3890, 3950]},
        )
        small = record(
            family="softmax",
            case="1x2048",
            mode="graph",
            unit="us",
            ours=1.5,
            peer="empty kernel",
            peer_value=1.02,
            limit=1.2,
            spread={"ours": [1.4, 1.6]},
        )
        self.write([large, small], family="softmax")
        text = self.rendered()
        self.assertIn("### softmax (GB/s)", text)
        self.assertIn("| case | dtype | mode | ours | p10–p90 | copy | ratio | limit | of the limit |", text)
        self.assertIn("| 32768x4096 | bf16 | hot | 3900 | 3890–3950 | 4100 | 0.95 | 4800 | 0.81 |", text)
        self.assertIn("### softmax (µs)", text)
        self.assertIn("| case | dtype | mode | ours | p10–p90 | empty kernel | limit | of the limit |", text)
        self.assertIn("| 1x2048 | bf16 | graph | 1.50 | 1.40–1.60 | 1.02 | 1.20 | 1.25 |", text)
        self.assertEqual(text.count("Commit abc"), 1)

    def test_what_bounds_an_op_is_shown_with_its_time(self):
        self.write([record(peer=None, peer_value=None, time_us=12.5, bound="arithmetic")], family="exercise")
        text = self.rendered()
        self.assertIn("| case | dtype | mode | µs | ours | p10–p90 | limit | of the limit | bound by |", text)
        self.assertIn("| nt-4096 | bf16 | hot | 12.5 | 712 | 708–715 | 989 | 0.72 | arithmetic |", text)

    def test_groups_have_tables_of_their_own(self):
        feature = record(group="features", case="d128-window", peer="tilewave plain", peer_value=800, ratio_by_blocks=0.951)
        self.write(
            [
                record(peer="cudnn", peer_value=600),
                feature,
                record(group="memory", mode="once", unit="MiB", ours=8, peer=None, peer_value=None, limit=64),
            ]
        )
        text = self.rendered()
        self.assertIn("### gemm (TFLOP/s)", text)
        self.assertIn("### gemm, features (TFLOP/s)", text)
        self.assertIn("| case | dtype | mode | ours | p10–p90 | tilewave plain | ratio | ratio by blocks | limit | of the limit |", text)
        self.assertIn("| d128-window | bf16 | hot | 712 | 708–715 | 800 | 0.89 | 0.95 | 989 | 0.72 |", text)
        self.assertIn("### gemm, memory (MiB)", text)

    def test_check_shows_the_difference(self):
        self.write([record()])
        self.rendered()
        self.write([record(ours=500)])
        done = self.run_script("--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("+| nt-4096 | bf16 | hot | 500 |", done.stdout)
        self.assertIn("| 712 |", self.page.read_text(encoding="utf-8"))

    def write_plot(self, records, name="nvidia-h200-attention-forward-hot.svg"):
        path = self.folder / "plots" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<svg><metadata>{plotted.description(records)}</metadata></svg>", encoding="utf-8")

    def test_plots_that_are_there_are_shown_before_the_tables(self):
        plain = record(family="attention", group="plain", case="d128-s4096-full", peer="cudnn")
        self.write([plain, record(group="features"), {**plain, "mode": "cool"}], family="attention_peer")
        self.write_plot([plain])
        link = "![NVIDIA H200: attention forward, bf16, hot](plots/nvidia-h200-attention-forward-hot.svg)"
        text = self.rendered()
        self.assertIn(f"## NVIDIA H200\n\n{link}\n\n### ", text)
        self.assertEqual(text.count("!["), 1)

    def test_check_names_plots_that_are_not_of_the_results(self):
        plain = record(family="attention", group="plain", case="d128-s4096-full", peer="cudnn")
        self.write([plain], family="attention_peer")
        self.write_plot([plain])
        self.rendered()
        self.write([{**plain, "date": "2026-01-02T00:00:00Z", "ours": 500}], family="attention_peer")
        self.assertEqual(self.run_script().returncode, 0)
        done = self.run_script("--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("nvidia-h200-attention-forward-hot.svg was not drawn from", done.stdout)
        self.assertIn("plot_performance.py", done.stdout)
        self.write_plot(json.loads((self.folder / "results/nvidia-h200/attention_peer.json").read_text(encoding="utf-8")))
        self.assertEqual(self.run_script("--check").returncode, 0)
        self.write_plot([plain], "nvidia-h100-attention-forward-hot.svg")
        done = self.run_script("--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("nvidia-h100-attention-forward-hot.svg", done.stdout)

    def test_bad_results(self):
        without_peer = record()
        del without_peer["peer"]
        for bad, word in (("{", "gemm.json"), ('{"a": 1}', "list"), ([without_peer], "peer"), ([3], "record 0")):
            self.write(bad)
            done = self.run_script()
            self.assertEqual(done.returncode, 1)
            self.assertIn(word, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
            self.assertEqual(self.page.read_text(encoding="utf-8"), PAGE)

    def test_page_without_markers(self):
        self.page.write_text("# Page\n", encoding="utf-8")
        done = self.run_script()
        self.assertEqual(done.returncode, 1)
        self.assertIn("must hold", done.stderr)


if __name__ == "__main__":
    unittest.main()
