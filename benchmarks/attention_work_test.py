#!/usr/bin/env python3
"""Tests of attention_work.py and records.py."""

import unittest

import attention_work as work
import records

SHARED = {"family": "attention", "commit": "abc", "date": "2026-01-01T00:00:00Z", "versions": {}, "device": "NVIDIA H200"}


def pairs_by_counting(seqlen_q, seqlen_k, causal, window_left):
    count = 0
    for i in range(seqlen_q):
        beside = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            count += (not causal or j <= beside) and (window_left is None or j >= beside - window_left)
    return count


class AttentionWork(unittest.TestCase):
    def test_pairs_are_those_that_no_mask_hides(self):
        for seqlen_q, seqlen_k in ((1, 1), (5, 9), (9, 5), (12, 12)):
            for causal in (False, True):
                for window_left in (None, 0, 3, 100):
                    if causal and window_left is None and seqlen_q == seqlen_k:
                        continue  # counted as half
                    with self.subTest(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window_left=window_left):
                        expected = pairs_by_counting(seqlen_q, seqlen_k, causal, window_left)
                        self.assertEqual(work.visible_pairs(seqlen_q, seqlen_k, causal, window_left), expected)

    def test_a_causal_square_counts_half(self):
        self.assertEqual(work.visible_pairs(4096, 4096, causal=True), 4096 * 4096 / 2)

    def test_touched_blocks(self):
        self.assertEqual(work.touched_pairs(256, 256), 256 * 256)
        self.assertEqual(work.touched_pairs(256, 256, causal=True), 3 * 128 * 128)
        self.assertEqual(work.touched_pairs(129, 129), 4 * 128 * 128)
        # Of 4 blocks of queries each sees its own block of keys and, but for the first, the one before.
        self.assertEqual(work.touched_pairs(512, 512, causal=True, window_left=128), 7 * 128 * 128)
        for window_left in (None, 0, 64, 300):
            self.assertGreaterEqual(work.touched_pairs(500, 700, True, window_left), work.visible_pairs(500, 700, True, window_left))

    def test_operations_and_bytes(self):
        self.assertAlmostEqual(work.teraflop(1000 * 1000, 2, 64), 4 * 1e6 * 2 * 64 * 1e-12)
        self.assertEqual(work.cache_bytes(4, 8192, 8, 128), 2 * 4 * 8192 * 8 * 128 * 2)


class Records(unittest.TestCase):
    def test_rates_and_ratio(self):
        record = records.make_record(
            SHARED, "c", "bf16", "hot", "GB/s", (10, [2.0, 1.0, 4.0]), ("read", 30, [3.0, 3.0, 3.0]), 4800, group="g"
        )
        self.assertEqual((record["ours"], record["peer_value"], record["ratio"], record["time_us"]), (5000, 10000, 0.5, 2000))
        self.assertEqual(record["spread"]["peer"], [10000, 10000])
        self.assertLess(record["spread"]["ours"][0], record["ours"])
        self.assertEqual((record["family"], record["group"], record["limit"], record["commit"]), ("attention", "g", 4800, "abc"))

    def test_without_a_peer(self):
        record = records.make_record(SHARED, "c", "bf16", "hot", "GB/s", (10, [2.0]))
        self.assertIsNone(record["peer"])
        self.assertIsNone(record["ratio"])

    def test_a_later_run_replaces_its_own_cases_in_their_place(self):
        def made(case, value, peer=None):
            return {**records.make_record(SHARED, case, "bf16", "hot", "GB/s", (value, [1.0]), peer and (peer, 1, [1.0])), "value": value}

        merged = records.merged([made("b", 2), made("b", 2, "left out later"), made("a", 1)], [made("c", 4), made("b", 3, "peer")])
        self.assertEqual([(record["case"], record["value"]) for record in merged], [("b", 3), ("a", 1), ("c", 4)])


if __name__ == "__main__":
    unittest.main()
