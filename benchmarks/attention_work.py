"""What attention has to do: pairs of a query and a key, floating-point operations, bytes. No PyTorch in here."""


def seen_by(query, seqlen_q, seqlen_k, causal, window_left):
    """The keys, as a half-open range, that a query sees. Query i stands beside key i + seqlen_k - seqlen_q; window_left None: no window."""
    beside = query + seqlen_k - seqlen_q
    begin = 0 if window_left is None else max(beside - window_left, 0)
    end = min(beside + 1, seqlen_k) if causal else seqlen_k
    return begin, max(end, begin)


def visible_pairs(seqlen_q, seqlen_k, causal=False, window_left=None):
    """Pairs that are not masked; half of all for a causal square, as the FlashAttention papers count."""
    if not causal and window_left is None:
        return seqlen_q * seqlen_k
    if window_left is None and seqlen_q == seqlen_k:
        return seqlen_q * seqlen_k / 2
    total = 0
    for query in range(seqlen_q):
        begin, end = seen_by(query, seqlen_q, seqlen_k, causal, window_left)
        total += end - begin
    return total


def touched_pairs(seqlen_q, seqlen_k, causal=False, window_left=None, block=128):
    """Pairs in those blocks of `block` queries and keys that have a visible one: what a kernel computes that skips the others."""
    total = 0
    for first in range(0, seqlen_q, block):
        last = min(first + block, seqlen_q) - 1
        begin, _ = seen_by(first, seqlen_q, seqlen_k, causal, window_left)
        _, end = seen_by(last, seqlen_q, seqlen_k, causal, window_left)
        if end > begin:
            total += (-(-end // block) - begin // block) * block * block
    return total


def teraflop(pairs, heads, head_dim):
    """Two products, a multiplication and an addition each. `pairs`: of all sequences."""
    return 4 * pairs * heads * head_dim * 1e-12


def cache_bytes(batch, seqlen, kv_heads, head_dim, element_bytes=2):
    """Keys and values, once."""
    return 2 * batch * seqlen * kv_heads * head_dim * element_bytes
