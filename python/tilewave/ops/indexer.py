"""The lightning indexer of DeepSeek-V3.2: scores of every key for every query, from which topk() chooses the keys that mla_sparse() sees.
include/tilewave/indexer.hpp has the details.

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, tensor
from .._operators import define

_indexer_scores = _library.bind("tw_indexer_scores", out="scores")
_indexer_scores_paged = _library.bind("tw_indexer_scores_paged", out="scores")


def indexer_scores(
    q: Array,
    k: Array,
    weights: Array,
    *,
    k_scale: Array | None = None,
    starts: Array | None = None,
    ends: Array | None = None,
    causal: bool = False,
    clear: bool = True,
    num_splits: int = 0,
    out: Array | None = None,
) -> Array:
    """scores[i, j] = k_scale[j] * sum over heads h of weights[i, h] * max(0, q[i, h] . k[j]) for starts[i] <= j < ends[i], otherwise -inf.

    q: [queries, heads, 128], up to 128 heads; k: [keys, 128], both float8_e4m3fn, bfloat16 or float16; weights: float32 [queries, heads].
    Gives scores: float32 [queries, keys]. k_scale: float32 [keys], for float8_e4m3fn only, which needs it.

    starts, ends: int32 [queries], default 0 and `keys`; any order, clipped to the keys. causal: query i also sees at most the first keys -
    queries + i + 1 keys. clear: without it scores of keys that a query does not see are left as they are. num_splits: splits of the keys
    that run in parallel; 0: the library's choice. out: the scores' memory. There is no gradient.
    """
    if _dispatch.through_operator(q, k, weights):
        scores = _dispatch.compiled_ops().indexer_scores(q, k, weights, k_scale, starts, ends, causal, clear, num_splits)
        return _dispatch.into(out, scores)
    of_q, of_k = tensor("q", q), tensor("k", k)
    _arrays.require_dims(3, q=q)
    _arrays.require_dims(2, k=k)
    if out is None:
        out = _arrays.empty(q, (q.shape[0], k.shape[0]), "float32")
    options = _library.IndexerOptions(causal=causal, no_clear=not clear, num_splits=_arrays.int32("num_splits", num_splits))
    for name, array in (("k_scale", k_scale), ("starts", starts), ("ends", ends)):
        if array is not None:
            setattr(options, name, tensor(name, array))
    of_weights = tensor("weights", weights)
    _indexer_scores(of_q, of_k, of_weights, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return out


def indexer_scores_paged(
    q: Array,
    k_cache: Array,
    weights: Array,
    block_table: Array,
    *,
    seqlens: Array | None = None,
    columns: int | None = None,
    causal: bool = True,
    clear: bool = True,
    num_splits: int = 0,
    out: Array | None = None,
) -> Array:
    """indexer_scores() for decoding, with keys in pages of 64: scores[b, i, j] for query i and key j of sequence b.

    q: float8_e4m3fn [batch, seqlen_q, heads, 128]; weights: float32 [batch, seqlen_q, heads]; k_cache: uint8 or float8_e4m3fn [pages, 64,
    132]; a page holds 64 keys of 128 bytes, then their 64 scales in float32. block_table: int32 [batch, pages of a sequence]. Gives scores:
    float32 [batch, seqlen_q, columns], by default as many columns as the table has keys.

    seqlens: int32 [batch], keys of each sequence, the new ones included, or [batch, seqlen_q], those that each query sees; default: as many
    as fit. causal: query i of a sequence sees the first seqlen - seqlen_q + i + 1 keys, else all. Keys on pages that do not exist, and keys
    that a query does not see, have -inf; without `clear` these are left as they are. num_splits, out: as in indexer_scores().
    """
    if _dispatch.through_operator(q, k_cache, weights):
        scores = _dispatch.compiled_ops().indexer_scores_paged(
            q, k_cache, weights, block_table, seqlens, columns, causal, clear, num_splits
        )
        return _dispatch.into(out, scores)
    of_q, of_cache = tensor("q", q), tensor("k_cache", k_cache)
    _arrays.require_dims(4, q=q)
    _arrays.require_dims(2, block_table=block_table)
    if out is None:
        out = _arrays.empty(q, _paged_shape(q, block_table, columns), "float32")
    elif columns is not None and out.shape[-1] != columns:
        raise ValueError(f"columns is {columns}; out has {out.shape[-1]}")
    options = _library.IndexerPagedOptions(
        not_causal=not causal, no_clear=not clear, num_splits=_arrays.int32("num_splits", num_splits)
    )
    if seqlens is not None:
        options.seqlens = tensor("seqlens", seqlens)
    of_weights, table = tensor("weights", weights), tensor("block_table", block_table)
    _indexer_scores_paged(of_q, of_cache, of_weights, table, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return out


def _paged_shape(q: Array, block_table: Array, columns: int | None) -> tuple[int, int, int]:
    return q.shape[0], q.shape[1], block_table.shape[1] * 64 if columns is None else columns


# As operators of PyTorch.


def _operator_indexer_scores(q, k, weights, k_scale, starts, ends, causal, clear, num_splits):
    return indexer_scores(
        q, k, weights, k_scale=k_scale, starts=starts, ends=ends, causal=causal, clear=clear, num_splits=num_splits
    )


def _fake_indexer_scores(q, k, *rest):
    if q.dim() != 3 or k.dim() != 2:
        raise ValueError(f"q and k have shapes {tuple(q.shape)} and {tuple(k.shape)}; they must have 3 and 2 dimensions")
    return _arrays.empty(q, (q.shape[0], k.shape[0]), "float32")


define(
    "indexer_scores(Tensor q, Tensor k, Tensor weights, Tensor? k_scale, Tensor? starts, Tensor? ends, bool causal, bool clear, "
    "SymInt num_splits) -> Tensor",
    _operator_indexer_scores,
    _fake_indexer_scores,
)


def _operator_indexer_scores_paged(q, k_cache, weights, block_table, seqlens, columns, causal, clear, num_splits):
    return indexer_scores_paged(
        q, k_cache, weights, block_table, seqlens=seqlens, columns=columns, causal=causal, clear=clear, num_splits=num_splits
    )


def _fake_indexer_scores_paged(q, k_cache, weights, block_table, seqlens, columns, *rest):
    if q.dim() != 4 or block_table.dim() != 2:
        raise ValueError(
            f"q and block_table have shapes {tuple(q.shape)} and {tuple(block_table.shape)}; they must have 4 and 2 dimensions"
        )
    return _arrays.empty(q, _paged_shape(q, block_table, columns), "float32")


define(
    "indexer_scores_paged(Tensor q, Tensor k_cache, Tensor weights, Tensor block_table, Tensor? seqlens, SymInt? columns, bool causal, "
    "bool clear, SymInt num_splits) -> Tensor",
    _operator_indexer_scores_paged,
    _fake_indexer_scores_paged,
)
