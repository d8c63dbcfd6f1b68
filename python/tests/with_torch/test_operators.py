"""Every operator of PyTorch against the eager function that it stands for, in a graph without breaks, and its fake against what it gives."""

import pytest

torch = pytest.importorskip("torch")

import tilewave.ops as ops  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def half(*shape):
    return normal(*shape).to(torch.bfloat16)


def cases():
    x, w = normal(3, 5, 24), normal(24)
    ids = torch.tensor([[1, 0], [6, 3]])
    table = normal(10, 4)
    image, filters = normal(2, 9, 8, 3), normal(4, 3, 2, 3)
    yield "add", lambda a, b: ops.add(a, b), (x, normal(5, 1))
    yield "add-out", lambda a, b, o: ops.add(a, b, out=o), (x, x, torch.empty_like(x))
    yield "mul", lambda a, b: ops.mul(a, b), (w, x)
    yield "swiglu", lambda a, b: ops.swiglu(a, b), (x, x)
    yield "swiglu_interleaved", lambda a: ops.swiglu_interleaved(a), (x,)
    yield "silu", lambda a: ops.silu(a), (x.transpose(0, 1),)
    yield "gelu_erf", lambda a: ops.gelu_erf(a), (x,)
    yield "gelu_tanh", lambda a: ops.gelu_tanh(a), (x,)
    yield "cast", lambda a: ops.cast(a, "float16"), (x,)
    yield "transpose", lambda a: ops.transpose(a), (x,)
    yield "embedding", lambda t, i: ops.embedding(t, i, scale=2.0), (table, ids)
    yield "gemm", lambda a, b, c: ops.gemm(a, b, bias=c, activation="swiglu", alpha=0.5), (normal(7, 24), normal(24, 10), normal(10))
    yield "gemm-batch", lambda a, b: ops.gemm(a, b.T), (x, normal(6, 24))
    series, filter, states = normal(2, 9, 8), normal(8, 4), normal(2, 8, 3)
    conv = lambda a, w, b, s: ops.causal_conv1d(a, w, b, activation="silu", initial_state=s, return_final_state=True)  # noqa: E731
    yield "causal_conv1d", conv, (series, filter, normal(8), states)
    yield "causal_conv1d-plain", lambda a, w: ops.causal_conv1d(a, w), (series, filter)
    yield "causal_conv1d_update", lambda a, s, w: ops.causal_conv1d_update(a, s.clone(), w), (series[:, 0], states, filter)
    conv_backward = lambda d, a, w, s: ops.causal_conv1d_backward(d, a, w, initial_state=s)[:2]  # noqa: E731
    yield "causal_conv1d_backward", conv_backward, (series, series, filter, states)
    q, v, betas = normal(2, 9, 1, 8), normal(2, 9, 2, 16), torch.rand(2, 9, 2)
    delta = lambda a, b, c, g: ops.gated_delta_rule(a, a, b, c, g=g, return_final_state=True, use_qk_l2norm_in_kernel=True)  # noqa: E731
    yield "gated_delta_rule", delta, (q, v, betas, -torch.rand(2, 9, 2))
    yield "gated_delta_rule-channels", delta, (q, v, betas, -torch.rand(2, 9, 2, 8))
    yield "gated_delta_rule-plain", lambda a, b, c: ops.gated_delta_rule(a, a, b, c, scale=0.1), (q, v, betas)

    def delta_backward(a, b, c, d, g, first, last):  # f32 is for the CPU
        a, b, c, d = (x.bfloat16() for x in (a, b, c, d))
        return ops.gated_delta_rule_backward(a, a, b, c, d, g=g, initial_state=first, d_final_state=last, use_qk_l2norm_in_kernel=True)

    of_states = normal(2, 2, 8, 16), normal(2, 2, 8, 16)
    yield "gated_delta_rule_backward", delta_backward, (q, v, betas, torch.ones_like(v), -torch.rand(2, 9, 2), *of_states)
    yield "gated_delta_rule_backward-channels", delta_backward, (q, v, betas, torch.ones_like(v), -torch.rand(2, 9, 2, 8), *of_states)
    step = lambda a, b, c, s: ops.gated_delta_rule_step(a, a, b, c, s.clone())  # noqa: E731
    yield "gated_delta_rule_step", step, (q[:, :1], v[:, :1], betas[:, :1], normal(2, 2, 8, 16))
    offsets = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    grouped = lambda a, b, o, c: ops.grouped_gemm(a, b, o, bias=c, activation="swiglu", zeros=True)  # noqa: E731
    yield "grouped_gemm", grouped, (half(9, 16), half(3, 16, 8), offsets, half(3, 8))
    yield "k_grouped_gemm", lambda a, b, o: ops.k_grouped_gemm(a.T, b, o, dtype="float32"), (half(9, 16), half(9, 8), offsets)
    pruned = ops.prune_2_4(half(20, 72))
    sparse = ops.compress_2_4(pruned)
    yield "prune_2_4", lambda a: ops.prune_2_4(a), (half(9, 16),)
    yield "compress_2_4", lambda a: ops.compress_2_4(a), (pruned,)
    yield "decompress_2_4", lambda v, m: ops.decompress_2_4(v, m), sparse
    yield "sparse_gemm", lambda v, m, b, c: ops.sparse_gemm(v, m, b.T, bias=c, activation="silu"), (*sparse, half(9, 72), half(9))
    yield "sparse_linear", lambda a, v, m, c: ops.sparse_linear(a, v, m, bias=c, alpha=0.5), (half(9, 72), *sparse, half(20))
    mask = torch.tensor([[True, False], [True, True]])
    masked = lambda a, b, m, c: ops.block_sparse_gemm(a, b.T, block=64, a_mask=m, bias=c, activation="relu")  # noqa: E731
    yield "block_sparse_gemm", masked, (half(70, 72), half(20, 72), mask, half(20))
    quantized = ops.quantize(normal(10, 64), "int4", zero_points=True)
    biased = lambda a, v, s, z, c: ops.dequant_gemm(a, v, s, z, bias=c, activation="relu")  # noqa: E731
    yield "dequant_gemm", biased, (normal(20, 64), *quantized, normal(10))
    gated = lambda a, v, s, z: ops.dequant_gemm(a, v, s, z, activation="swiglu")  # noqa: E731
    yield "dequant_gemm", gated, (normal(20, 64), *quantized)
    of_integers = lambda a, t, v, s, z: ops.dequant_gemm(a, v, s, z, x_scales=t, dtype="bfloat16")  # noqa: E731
    yield "dequant_gemm", of_integers, (*ops.quantize_activations(normal(20, 64)), *quantized)
    yield "dequantize", lambda v, s, z: ops.dequantize(v, s, z, dtype="bfloat16"), quantized
    ternary = ops.quantize_ternary(normal(10, 64))
    yield "quantize_ternary", lambda a: ops.quantize_ternary(a), (normal(10, 64),)
    yield "unpack_ternary", lambda v, s: ops.unpack_ternary(v, s), ternary
    yield "quantize_activations", lambda a: ops.quantize_activations(a), (normal(20, 64),)
    integers = ops.quantize_activations(normal(20, 64))
    scaled = lambda a, t, v, s, c: ops.ternary_gemm(a, t, v, s, bias=c, dtype="float32")  # noqa: E731
    yield "ternary_gemm", scaled, (*integers, *ternary, normal(10))
    yield "bit_linear", lambda a, v, s, c: ops.bit_linear(a, v, s, bias=c), (normal(20, 64), *ternary, normal(10))
    latent, lengths = half(2, 40, 576), torch.tensor([40, 13], dtype=torch.int32)
    mla = lambda a, c, n: ops.mla_decode(a, c, seqlens=n, scale=0.1, return_lse=True)  # noqa: E731
    yield "mla_decode", mla, (half(2, 2, 4, 576), latent, lengths)
    yield "mla_decode-without-lse", lambda a, c: ops.mla_decode(a, c, causal=False), (half(2, 2, 4, 576), latent)
    lists = torch.tensor([[3, -1, 8], [0, 50, 39]], dtype=torch.int32)
    sparse = lambda a, c, i, s: ops.mla_sparse(a, c, i, sink=s, return_lse=True, return_max_logits=True)  # noqa: E731
    yield "mla_sparse", sparse, (half(2, 4, 576), half(40, 576), lists, normal(4))
    yield "mla_sparse-without-lse", lambda a, c, i: ops.mla_sparse(a, c, i, num_splits=2), (half(2, 4, 576), half(40, 576), lists)
    backward = lambda a, c, i, r, n, g: ops.mla_sparse_backward(a, c, i, r, n, g, deterministic=True)  # noqa: E731
    yield "mla_sparse_backward", backward, (half(2, 4, 576), half(40, 576), lists, half(2, 4, 512), normal(2, 4), half(2, 4, 512))
    append = lambda a, b, c, n: ops.mla_append(a, b, c, seqlens=n)  # noqa: E731
    yield "mla_append", append, (half(2, 3, 512), half(2, 3, 64), half(2, 40, 576), torch.tensor([4, 20], dtype=torch.int32))
    of_slashes = half(1, 100, 4, 16), half(1, 100, 2, 16), half(1, 100, 2, 24), *torch.randint(0, 100, (2, 1, 4, 5), dtype=torch.int32)
    slashes = lambda a, b, c, v, s, n: ops.vertical_slash_attention(  # noqa: E731
        a, b, c, v, s, query_block=128, seqlens=n, return_lse=True
    )
    yield "vertical_slash_attention", slashes, (*of_slashes, torch.tensor([80], dtype=torch.int32))
    yield "vertical_slash_attention-plain", lambda *a: ops.vertical_slash_attention(*a, scale=0.1), of_slashes
    yield "vertical_slash_index", lambda v, s: ops.vertical_slash_index(v, s, 100), of_slashes[3:]
    codes = [normal(*shape).to(torch.float8_e4m3fn) for shape in ((3, 16, 128), (40, 128))]
    ranges = torch.tensor([[0, 5, 30], [40, 6, 9]], dtype=torch.int32)
    indexer = lambda a, b, w, s, r: ops.indexer_scores(a, b, w, k_scale=s, starts=r[0], ends=r[1])  # noqa: E731
    yield "indexer_scores", indexer, (*codes, normal(3, 16), normal(40), ranges)
    yield "indexer_scores-plain", lambda a, b, w: ops.indexer_scores(a, b, w, causal=True), (half(3, 7, 128), half(40, 128), normal(3, 7))
    pages = torch.randint(0, 100, (3, 64, 132), dtype=torch.uint8)
    paged = lambda a, c, w, t, n: ops.indexer_scores_paged(a, c, w, t, seqlens=n, columns=90)  # noqa: E731
    of_pages = (codes[0].reshape(1, 3, 16, 128), pages, normal(1, 3, 16), torch.tensor([[2, 0]], dtype=torch.int32))
    yield "indexer_scores_paged", paged, (*of_pages, torch.tensor([80], dtype=torch.int32))
    yield "indexer_scores_paged-plain", lambda a, c, w, t: ops.indexer_scores_paged(a, c, w, t, causal=False), of_pages
    chosen = torch.tensor([[0, -1, 2], [1, 0, 9]], dtype=torch.int32)[torch.arange(70) % 2][None, :, None].repeat(1, 1, 2, 1)
    counts, packed = torch.full((1, 70, 2), 2, dtype=torch.int32), torch.tensor([0, 33, 70], dtype=torch.int32)
    selected = lambda a, b, c, i, n, o: ops.nsa_selected(  # noqa: E731
        a, b, c, i, block_counts=n, cu_seqlens=o, block_size=32, scale=0.1, return_lse=True
    )
    of_nsa = half(1, 70, 8, 16), half(1, 70, 2, 16), half(1, 70, 2, 24)
    yield "nsa_selected", selected, (*of_nsa, chosen, counts, packed)
    yield "nsa_selected-plain", lambda a, b, c, i: ops.nsa_selected(a, b, c, i, block_size=32), (*of_nsa, chosen)
    compressed = lambda a, b, c: ops.nsa_compressed(a, b, c, block_size=32, return_lse=True)  # noqa: E731
    yield "nsa_compressed", compressed, (of_nsa[0], half(1, 3, 2, 16), half(1, 3, 2, 24))
    yield "nsa_select", lambda a, b, n: ops.nsa_select(a, b, n, 2, block_size=32), (of_nsa[0], half(1, 3, 2, 16), normal(1, 70, 8))
    weighted = lambda a, g, b, h: ops.nsa_combine((a, None, b), (g, None, h))  # noqa: E731
    yield "nsa_combine", weighted, (half(1, 5, 2, 16), half(1, 5, 2), half(1, 5, 2, 16), half(1, 5, 2))
    of_o = half(1, 70, 8, 24), normal(1, 70, 8), half(1, 70, 8, 24)
    backward = lambda a, b, c, i, *r: ops.nsa_selected_backward(a, b, c, i, *r, block_size=32)  # noqa: E731
    yield "nsa_selected_backward", backward, (*of_nsa, chosen, *of_o)
    compressed_backward = lambda a, b, c, *r: ops.nsa_compressed_backward(a, b, c, *r, block_size=32)  # noqa: E731
    yield "nsa_compressed_backward", compressed_backward, (of_nsa[0], half(1, 3, 2, 16), half(1, 3, 2, 24), *of_o)
    yield "conv1d", lambda a, b: ops.conv1d(a, b, stride=2, padding=1), (image[:, :, 0], filters[:, :, 0])
    yield "conv2d", lambda a, b: ops.conv2d(a, b, stride=(1, 2), padding=1, activation="relu"), (image, filters)
    yield "layer_norm", lambda a, b: ops.layer_norm(a, b, b), (x, w)
    yield "rms_norm", lambda a, b, r, s: (ops.rms_norm(a, b, residual=r, sum_out=s), s), (x, w, x, torch.empty_like(x))
    yield "softmax", lambda a: ops.softmax(a, scale=0.5), (x,)
    yield "hadamard", lambda a, f: ops.hadamard(a, scale=0.5, factors=f), (normal(5, 24), normal(24))
    yield "rope_table", lambda p: ops.rope_table(p, 8, dtype="float16"), (torch.arange(5, dtype=torch.int32),)
    yield "rope", lambda a, c, s: ops.rope(a, c, s, interleaved=True, offset=3), (normal(2, 5, 3, 8), table, table)
    yield "reduce", lambda a: (ops.reduce(a, "max", dim=0), ops.reduce(a, "sum", dim=-2, keepdim=True)), (x,)
    yield "argmax", lambda a: ops.argmax(a, dtype="int32"), (x,)
    yield "topk", lambda a: ops.topk(a, 3, largest=False), (x,)
    route = {"score": "sigmoid", "groups": 4, "groups_taken": 2, "group_score": "sum_of_two", "renormalise": True}
    yield "moe_route", lambda a, b: ops.moe_route(a, 3, bias=b, scale=2.5, **route), (normal(5, 8), normal(8))
    experts = torch.tensor([[2, 0], [1, 3], [3, 2]], dtype=torch.int32)
    yield "moe_permutation", lambda e: ops.moe_permutation(e, 3, first_expert=1), (experts,)
    places, tokens = torch.tensor([[3, 0], [1, 5], [4, 2]], dtype=torch.int32), normal(3, 16)
    yield "moe_dispatch", lambda a, p: ops.moe_dispatch(a, p), (tokens, places)
    yield "moe_combine", lambda a, p, v, r: ops.moe_combine(a, p, v, addend=r), (normal(6, 16), places, normal(3, 2), tokens)
    weights = normal(4, 24, 16).bfloat16(), normal(4, 16, 12).bfloat16()
    shared = {"shared_gate_up": normal(8, 16).bfloat16(), "shared_down": normal(16, 4).bfloat16()}
    yield (
        "moe_experts",
        lambda a, v, e, g, d, s, t: ops.moe_experts(a, v, e, g, d, first_expert=1, shared_gate_up=s, shared_down=t, addend=a),
        (tokens.bfloat16(), normal(3, 2), experts, *weights, *shared.values()),
    )
    yield (
        "fused_moe",
        lambda a, r, g, d: ops.fused_moe(a, r, 2, g, d, renormalise=True),
        (tokens.bfloat16(), normal(3, 4), *weights),
    )
    scaled = [ops.cast_fp8_blocks(w) for w in (normal(256, 128), normal(128, 128))]
    gate_up, down, shared = scaled[0][0].expand(4, 256, 128), scaled[1][0].expand(4, 128, 128), [w for w, _ in scaled]
    scales = scaled[0][1].expand(4, 2, 1), scaled[1][1].expand(4, 1, 1), *(s for _, s in scaled)
    names = ("gate_up_scale", "down_scale", "shared_gate_up_scale", "shared_down_scale")
    yield (
        "fused_moe-fp8",
        lambda a, r, g, d, s, t, *scales: ops.fused_moe(a, r, 2, g, d, shared_gate_up=s, shared_down=t, **dict(zip(names, scales))),
        (normal(3, 128).bfloat16(), normal(3, 4), gate_up, down, *shared, *scales),
    )
    (gate_up, gate_up_scale, _), (down, down_scale, _) = (ops.quantize(normal(*shape), "mxfp4") for shape in ((4 * 256, 128), (4 * 128, 128)))
    yield (
        "fused_moe-mxfp4",
        lambda a, r, g, d, s, t: ops.fused_moe(a, r, 2, g, d, gate_up_scale=s, down_scale=t),
        (
            normal(3, 128).bfloat16(),
            normal(3, 4),
            gate_up.view(4, 256, 64),
            down.view(4, 128, 64),
            gate_up_scale.view(4, 256, 4),
            down_scale.view(4, 128, 4),
        ),
    )
    recurrent = half(2, 5, 2, 8), half(2, 5, 2, 8), half(2, 5, 4, 16)
    gates, states = -torch.rand(2, 5, 4), normal(2, 4, 8, 16)
    yield (
        "linear_attention",
        lambda a, b, c, g, s: ops.linear_attention(a, b, c, g=g, initial_state=s, return_state=True),
        (*recurrent, gates, states),
    )
    yield "linear_attention_step", lambda a, b, c, g, s: (ops.linear_attention_step(a, b, c, s, g=g), s), (*recurrent, gates, states)
    yield (
        "linear_attention_backward",
        lambda a, b, c, d, g, s: ops.linear_attention_backward(a, b, c, d, g=g, initial_state=s, d_state=s),
        (*recurrent, half(2, 5, 4, 16), gates, states),
    )
    selective = half(2, 5, 4, 8), half(2, 5, 4), -torch.rand(4), half(2, 5, 2, 16), half(2, 5, 2, 16)
    skip, gate, bias, of_scan = normal(4, 8), half(2, 5, 4, 8), normal(4), normal(2, 4, 8, 16)
    yield (
        "mamba2",
        lambda *a: ops.mamba2(*a[:5], D=a[5], z=a[6], dt_bias=a[7], dt_softplus=True, initial_states=a[8], return_final_states=True),
        (*selective, skip, gate, bias, of_scan),
    )
    yield "mamba2-plain", lambda *a: ops.mamba2(*a, dt_limit=(0.1, 1.0)), selective
    yield (
        "mamba2_step",
        lambda *a: (ops.mamba2_step(*a[:6], D=a[6], z=a[7], dt_softplus=True), a[5]),
        (*selective, of_scan, skip, gate),
    )
    yield (
        "mamba2_backward",
        lambda *a: ops.mamba2_backward(*a[:6], D=a[6], z=a[7], dt_bias=a[8], initial_states=a[9], d_final_states=a[9]),
        (*selective, half(2, 5, 4, 8), skip, gate, bias, of_scan),
    )
    sizes, sums = torch.rand(2, 4, 2, 16), -torch.rand(2, 4, 2, 16).cumsum(-1)
    in_chunks = half(2, 20, 4, 8), half(2, 20, 2, 16), half(2, 20, 2, 16), normal(2, 2, 4, 8, 16), half(2, 2, 4, 8, 16)
    cumsum = lambda d, a, b: ops.mamba2_chunk_cumsum(d, a, 16, dt_bias=b, dt_softplus=True, dt_limit=(0.1, 1.0))  # noqa: E731
    yield "mamba2_chunk_cumsum", cumsum, (half(2, 20, 4), -torch.rand(4), bias)
    yield "mamba2_chunk_state", lambda *a: ops.mamba2_chunk_state(*a), (in_chunks[1], in_chunks[0], sizes, sums)
    passing = lambda s, d, i: ops.mamba2_state_passing(s, d, initial_states=i, dtype="bfloat16")  # noqa: E731
    yield "mamba2_state_passing", passing, (in_chunks[3], sums[..., -1], of_scan)
    yield "mamba2_bmm_chunk", lambda c, b: ops.mamba2_bmm_chunk(c, b, 16, causal=True), in_chunks[1:3]
    scanned = normal(2, 2, 2, 16, 16), in_chunks[0], sizes, sums, in_chunks[2], in_chunks[4]
    yield "mamba2_chunk_scan", lambda *a: ops.mamba2_chunk_scan(*a), scanned
    gated = lambda *a: ops.mamba2_chunk_scan(*a[:6], D=a[6], z=a[7], return_ungated=True)  # noqa: E731
    yield "mamba2_chunk_scan-gated", gated, (*scanned, skip, half(2, 20, 4, 8))
    yield (
        "mamba2_chunk_cumsum_backward",
        lambda d, a, s, t, b: ops.mamba2_chunk_cumsum_backward(d, a, s, t, dt_bias=b, dt_softplus=True),
        (half(2, 20, 4), -torch.rand(4), sums, sizes, bias),
    )
    yield (
        "mamba2_chunk_state_backward",
        lambda *a: ops.mamba2_chunk_state_backward(*a),
        (in_chunks[1], in_chunks[0], sizes, sums, in_chunks[3]),
    )
    passing = lambda s, d, e, f: ops.mamba2_state_passing_backward(s, d, e, d_final_states=f)  # noqa: E731
    yield "mamba2_state_passing_backward", passing, (in_chunks[4], sums[..., -1], in_chunks[3], of_scan)
    products = lambda c, b, d: ops.mamba2_bmm_chunk_backward(c, b, d, causal=True)  # noqa: E731
    yield "mamba2_bmm_chunk_backward", products, (*in_chunks[1:3], scanned[0])
    gated = lambda *a: ops.mamba2_chunk_scan_backward(*a[:7], D=a[7], z=a[8], ungated=a[9])  # noqa: E731
    yield "mamba2_chunk_scan_backward", gated, (*scanned, half(2, 20, 4, 8), skip, half(2, 20, 4, 8), half(2, 20, 4, 8))
    yield "moe_dispatch_fp8", lambda a, p: ops.moe_dispatch_fp8(a, p), (normal(3, 256), places)
    yield "cast_fp8_swiglu", lambda a, b: ops.cast_fp8_swiglu(a, b), (normal(3, 300), normal(3, 300))
    yield "cast_fp8", lambda a: ops.cast_fp8(a, powers_of_two=True), (normal(3, 300),)
    yield "cast_fp8_blocks", lambda a: ops.cast_fp8_blocks(a), (normal(130, 300),)
    yield "cast_fp8_grouped", lambda a, n: ops.cast_fp8_grouped(a, n, 6), (normal(9, 140), torch.tensor([4, 5], dtype=torch.int32))


def flat(result):
    return [t for part in result for t in flat(part)] if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, function, arguments", list(cases()), ids=lambda x: x if isinstance(x, str) else "")
def test_compiled(name, function, arguments, device):
    torch._dynamo.reset()
    arguments = [a.to(device) for a in arguments]
    wanted = flat(function(*(a.clone() for a in arguments)))
    got = flat(torch.compile(function, fullgraph=True, backend="aot_eager")(*(a.clone() for a in arguments)))
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_beta_is_refused_where_it_would_be_lost():
    torch._dynamo.reset()
    a, out = normal(4, 4), normal(4, 4)
    with pytest.raises(Exception, match="beta is 2.0"):
        torch.compile(lambda: ops.gemm(a, a, beta=2.0, out=out), fullgraph=True, backend="aot_eager")()
