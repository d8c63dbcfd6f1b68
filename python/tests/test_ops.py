"""Every operation on NumPy arrays against its formula in float64; bad input; what DLPack gives."""

import numpy as np
import pytest

import tilewave
from tilewave import ops

SEED = np.random.SeedSequence().entropy


@pytest.fixture
def random(request):
    print(f"seed {SEED}")  # shown where a test fails
    return np.random.default_rng([SEED % 2**32, *request.node.name.encode()])


def normal(random, *shape, dtype=np.float32):
    return random.standard_normal(shape, dtype=np.float32).astype(dtype)


def close(got, wanted, tolerance=2e-6):
    assert got.shape == wanted.shape
    largest = np.abs(wanted, dtype=np.float64).max(initial=0)
    unit = tolerance if got.dtype == np.float32 else 2.0**-10
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=0, atol=unit * max(largest, 1))


def exact(x):
    return x.astype(np.float64)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_elements(random, dtype):
    a, b = normal(random, 3, 17, 5, dtype=dtype), normal(random, 17, 1, dtype=dtype)
    x = exact(a)
    close(ops.add(a, b), x + exact(b))
    close(ops.mul(b, a), x * exact(b))
    sigmoid = 1 / (1 + np.exp(-x))
    close(ops.silu(a), x * sigmoid)
    close(ops.gelu_tanh(a), 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    assert np.abs(ops.gelu_erf(a) - ops.gelu_tanh(a)).max() < 5e-3
    close(ops.swiglu(a, a[::-1]), x * sigmoid * x[::-1])
    close(ops.swiglu_interleaved(a[..., :4]), (x * sigmoid)[..., 0:4:2] * x[..., 1:4:2])
    close(ops.transpose(a), x.transpose(0, 2, 1))
    out = np.full_like(a, np.nan)
    assert ops.add(a, a, out=out) is out
    close(out, 2 * x)
    assert ops.add(np.full((), 3, dtype), np.ones((), dtype)) == 4


def test_cast():
    x = np.array([0.5, 1.5, 2.5, -1.25, 300.0, np.nan], np.float32)
    assert ops.cast(x, "int8").tolist() == [0, 2, 2, -1, 127, 0]
    assert ops.cast(x, "bool").tolist() == [True] * 6
    assert ops.cast(x, "float16").dtype == np.float16
    assert ops.cast(np.arange(5), "float32").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        ops.cast(x, "float64")


def test_embedding(random):
    table, ids = normal(random, 11, 6), np.array([[3, 0], [10, 3], [1, 1]])
    close(ops.embedding(table, ids, scale=2.0), 2 * exact(table)[ids])
    close(ops.embedding(table, ids.astype(np.int32)[0]), exact(table)[ids[0]])
    with pytest.raises(ValueError, match="11"):
        ops.embedding(table, np.array([4, 11]))


def test_gemm(random):
    a, b, bias, residual = normal(random, 13, 37), normal(random, 37, 10), normal(random, 10), normal(random, 13, 10)
    product = exact(a) @ exact(b)
    close(ops.gemm(a, b), product)
    close(ops.gemm(a.T.copy().T, b.T.copy().T), product)
    close(ops.gemm(a, b, bias=bias, activation="relu", residual=residual, alpha=0.5), np.maximum(0.5 * product + bias, 0) + residual)
    gate = product[:, ::2]
    close(ops.gemm(a, b, activation="swiglu"), gate / (1 + np.exp(-gate)) * product[:, 1::2])
    out = np.ones((13, 10), np.float32)
    ops.gemm(a, b, beta=2.0, out=out)
    close(out, product + 2)
    batch = normal(random, 3, 13, 37)
    close(ops.gemm(batch, b), exact(batch) @ exact(b))
    integers = random.integers(-128, 128, (5, 70), dtype=np.int8)
    assert (ops.gemm(integers, integers.T) == integers.astype(np.int32) @ integers.T.astype(np.int32)).all()


def test_gemm_of_fp8(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
    scales = np.full((13, 1), 0.5, np.float32), np.full((1, 10), 3, np.float32)
    for of_a in kinds.values():
        for of_b in kinds.values():
            a, b = normal(random, 13, 36).astype(of_a), normal(random, 36, 10).astype(of_b)
            product = exact(a) @ exact(b)
            assert ops.gemm(a, b).dtype == ml_dtypes.bfloat16
            in_f32 = ops.gemm(a, b, dtype="float32")
            close(in_f32, product)
            close(ops.gemm(a, b, dtype="float32", a_scale=scales[0], b_scale=scales[1]), 1.5 * product)
            for name, kind in kinds.items():
                np.testing.assert_array_equal(ops.gemm(a, b, dtype=name).view(np.uint8), in_f32.astype(kind).view(np.uint8))
    with pytest.raises(ValueError, match="block scales are for fp8_e4m3"):
        ops.gemm(a, b, a_scale=np.ones((13, 2), np.float32), b_scale=np.ones((2, 1), np.float32))


def test_sparse_gemm(random):
    w, x, bias = normal(random, 20, 72).astype(np.float16), normal(random, 9, 72).astype(np.float16), normal(random, 20).astype(np.float16)
    groups = w.reshape(20, 18, 4)
    kept = np.argsort(-np.abs(groups), axis=2, kind="stable")[:, :, :2]
    pruned = np.zeros_like(groups)
    np.put_along_axis(pruned, kept, np.take_along_axis(groups, kept, axis=2), axis=2)
    pruned = pruned.reshape(20, 72)
    assert (ops.prune_2_4(w) == pruned).all()
    values, metadata = ops.compress_2_4(pruned)
    assert values.shape == (20, 36) and metadata.shape == (1, 4, 128)
    assert (ops.decompress_2_4(values, metadata) == pruned).all()
    wanted = exact(x) @ exact(pruned).T
    tolerance = {"rtol": 2e-3, "atol": 2e-2}
    np.testing.assert_allclose(ops.sparse_linear(x, values, metadata, bias=bias, alpha=0.5), 0.5 * wanted + bias, **tolerance)
    np.testing.assert_allclose(ops.sparse_gemm(values, metadata, x.T, activation="relu"), np.maximum(wanted.T, 0), **tolerance)
    out = np.ones((9, 20), np.float16)
    assert ops.sparse_linear(x, values, metadata, beta=2.0, out=out) is out
    np.testing.assert_allclose(out, wanted + 2, **tolerance)
    integers = ops.prune_2_4(random.integers(-128, 128, (17, 264), dtype=np.int8))
    of_x = random.integers(-128, 128, (5, 264), dtype=np.int8)
    product = ops.sparse_linear(of_x, *ops.compress_2_4(integers))
    assert product.dtype == np.int32
    assert (product == of_x.astype(np.int32) @ integers.T.astype(np.int32)).all()
    for call, part in [
        (lambda: ops.compress_2_4(w), "row 0 has"),
        (lambda: ops.prune_2_4(normal(random, 4, 8)), r"x is f32\[4, 8\]"),
        (lambda: ops.sparse_gemm(values, metadata[:, :2], x.T), r"metadata are u8\[1, 2, 128\]"),
        (lambda: ops.sparse_linear(x, values, metadata, beta=1.0), "no out is given"),
        (lambda: ops.sparse_linear(x, values, metadata, activation="tanh"), "activation is 'tanh'"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


def _causal_conv1d(x, weight, bias, silu, initial):
    """[batch, seqlen, channels], by shifted products; and the last inputs."""
    states = weight.shape[1] - 1
    padded = np.concatenate([initial.transpose(0, 2, 1), x], axis=1).astype(np.float64)
    z = sum(padded[:, k : k + x.shape[1]] * weight[:, k] for k in range(states + 1)) + bias
    return (z / (1 + np.exp(-z)) if silu else z), padded[:, x.shape[1] :].transpose(0, 2, 1)


def test_causal_conv1d(random):
    x, weight, bias = normal(random, 2, 9, 5), normal(random, 5, 4), normal(random, 5)
    initial, nothing = normal(random, 2, 5, 3), np.zeros((2, 5, 3), np.float32)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    wanted, last = _causal_conv1d(x, weight, bias, True, initial)
    y, state = ops.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial, return_final_state=True)
    np.testing.assert_allclose(y, wanted, **tolerance)
    np.testing.assert_array_equal(state, last)
    out = np.empty_like(x)
    assert ops.causal_conv1d(x, weight, bias, out=out) is out
    np.testing.assert_allclose(out, _causal_conv1d(x, weight, bias, False, nothing)[0], **tolerance)
    # The same token by token, and from packed sequences.
    state = initial.copy()
    steps = [ops.causal_conv1d_update(x[:, t], state, weight, bias, activation="swish") for t in range(9)]
    np.testing.assert_array_equal(np.stack(steps, axis=1), y)
    np.testing.assert_array_equal(state, last)
    packed = ops.causal_conv1d(x.reshape(1, 18, 5), weight, bias, cu_seqlens=np.array([0, 9, 18], np.int32))
    np.testing.assert_array_equal(packed.reshape(2, 9, 5), out)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        ops.causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match=r"weight is f32\[9, 5\]"):
        ops.causal_conv1d(x, x[0])


def test_causal_conv1d_backward(random):
    x, weight, dy = normal(random, 1, 6, 3), normal(random, 3, 2), normal(random, 1, 6, 3)
    dx, d_weight, d_bias, d_state = ops.causal_conv1d_backward(dy, x, weight)
    assert d_bias is None and d_state is None
    later = np.concatenate([dy[:, 1:], np.zeros((1, 1, 3), np.float32)], axis=1)
    before = np.concatenate([np.zeros((1, 1, 3), np.float32), x[:, :-1]], axis=1)
    np.testing.assert_allclose(dx, dy * weight[:, 1] + later * weight[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_weight, np.stack([(dy * before).sum((0, 1)), (dy * x).sum((0, 1))], axis=1), rtol=1e-5, atol=1e-5)
    bias, initial, d_last = normal(random, 3), normal(random, 1, 3, 1), normal(random, 1, 3, 1)
    dx, d_weight, d_bias, d_state = ops.causal_conv1d_backward(dy, x, weight, bias, initial_state=initial, d_final_state=d_last)
    np.testing.assert_allclose(d_bias, dy.sum((0, 1)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_state[..., 0], dy[:, 0] * weight[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx[:, -1], dy[:, -1] * weight[:, 1] + d_last[..., 0], rtol=1e-5, atol=1e-6)


def _gated_delta_rule(q, k, v, beta, g, scale, state):
    group = v.shape[2] // q.shape[2]
    q, k = (np.repeat(x, group, axis=2).astype(np.float64) for x in (q, k))
    state, results = state.astype(np.float64), []
    for t in range(q.shape[1]):
        decay = np.exp(g[:, t])
        state = state * (decay[..., None] if g.ndim == 4 else decay[..., None, None])
        update = beta[:, t][..., None] * (v[:, t] - np.einsum("bhd,bhdv->bhv", k[:, t], state))
        state = state + np.einsum("bhd,bhv->bhdv", k[:, t], update)
        results.append(scale * np.einsum("bhd,bhdv->bhv", q[:, t], state))
    return np.stack(results, axis=1), state


def test_gated_delta_rule(random):
    q, k, v, initial = normal(random, 2, 70, 1, 8), normal(random, 2, 70, 1, 8), normal(random, 2, 70, 2, 6), normal(random, 2, 2, 8, 6)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta, g = np.abs(np.tanh(normal(random, 2, 70, 2))), -np.abs(normal(random, 2, 70, 2))
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    wanted, last = _gated_delta_rule(q, k, v, beta, g, 8**-0.5, initial)
    o, state = ops.gated_delta_rule(q, k, v, beta, g=g, initial_state=initial, return_final_state=True)
    np.testing.assert_allclose(o, wanted, **tolerance)
    np.testing.assert_allclose(state, last, **tolerance)
    state = initial.copy()
    steps = [ops.gated_delta_rule_step(*(x[:, t : t + 1] for x in (q, k, v, beta)), state, g=g[:, t : t + 1]) for t in range(70)]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), wanted, **tolerance)
    np.testing.assert_allclose(state, last, **tolerance)
    # Without gates, of packed sequences, with keys that the call normalises.
    out, packed = np.empty((1, 140, 2, 6), np.float32), [x.reshape(1, 140, *x.shape[2:]) for x in (q, 3 * k, v, beta)]
    options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True, "cu_seqlens": np.array([0, 70, 140], np.int32)}
    assert ops.gated_delta_rule(*packed, **options, out=out) is out
    unit_q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    wanted, _ = _gated_delta_rule(unit_q, k, v, beta, np.zeros_like(g), 1, np.zeros_like(initial))
    np.testing.assert_allclose(out.reshape(wanted.shape), wanted, **tolerance)
    with pytest.raises(ValueError, match=r"k is f32\[2, 70, 2, 6\]"):
        ops.gated_delta_rule(q, v, v, beta)
    # A gate for each channel of a key.
    gates = -10 * random.random((2, 70, 2, 8)).astype(np.float32) ** 4
    wanted, last = _gated_delta_rule(q, k, v, beta, gates, 8**-0.5, initial)
    o, state = ops.gated_delta_rule(q, k, v, beta, g=gates, initial_state=initial, return_final_state=True)
    np.testing.assert_allclose(o, wanted, **tolerance)
    np.testing.assert_allclose(state, last, **tolerance)
    state = initial.copy()
    steps = [ops.gated_delta_rule_step(*(x[:, t : t + 2] for x in (q, k, v, beta)), state, g=gates[:, t : t + 2]) for t in range(0, 70, 2)]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), wanted, **tolerance)
    np.testing.assert_allclose(state, last, **tolerance)


@pytest.mark.parametrize(("dim", "gates"), [(8, (2,)), (8, (2, 8)), (192, (2,))])  # of heads, and of channels of keys
def test_gated_delta_rule_backward(random, dim, gates):
    q, k, v = normal(random, 1, 70, 1, dim), normal(random, 1, 70, 1, dim), normal(random, 1, 70, 2, 6)
    initial = normal(random, 1, 2, dim, 6)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta, g = np.abs(np.tanh(normal(random, 1, 70, 2))), -np.abs(normal(random, 1, 70, *gates))
    d_o, d_last = normal(random, *v.shape), normal(random, *initial.shape)
    inputs = [x.astype(np.float64) for x in (q, k, v, beta, g, initial)]

    def loss(q, k, v, beta, g, initial):
        o, last = _gated_delta_rule(q, k, v, beta, g, dim**-0.5, initial)
        return (o * d_o).sum() + (last * d_last).sum()

    gradients = ops.gated_delta_rule_backward(q, k, v, beta, d_o, g=g, initial_state=initial, d_final_state=d_last)
    for n, gradient in enumerate(gradients):
        assert gradient.shape == inputs[n].shape
        # Along a random direction, by a central difference.
        direction = random.standard_normal(gradient.shape)
        moved = [[x + side * 1e-5 * direction if i == n else x for i, x in enumerate(inputs)] for side in (1, -1)]
        wanted = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
        np.testing.assert_allclose((exact(gradient) * direction).sum(), wanted, rtol=1e-3, atol=1e-2)
    # Packed sequences: tokens of none have gradients of 0.
    packed = ops.gated_delta_rule_backward(q, k, v, beta, d_o, cu_seqlens=np.array([0, 30, 60], np.int32))
    assert packed[4:] == (None, None)
    assert all((x[:, 60:] == 0).all() and (x[:, :60] != 0).any() for x in packed[:4])
    with pytest.raises(ValueError, match=rf"d_o is f32\[1, 70, 1, {dim}\]"):
        ops.gated_delta_rule_backward(q, k, v, beta, q)


def test_block_sparse_gemm(random):
    a, b, bias = normal(random, 100, 200).astype(np.float16), normal(random, 200, 70).astype(np.float16), normal(random, 70).astype(np.float16)
    mask = np.array([[1, 0, 0, 1], [0, 0, 1, 0]], np.uint8)
    kept = np.kron(mask, np.ones((64, 64)))[:100, :200]
    masked = np.where(kept != 0, a, np.float16(np.nan))
    wanted = (exact(a) * kept) @ exact(b)
    tolerance = {"rtol": 2e-3, "atol": 2e-2}
    np.testing.assert_allclose(ops.block_sparse_gemm(masked, b, block=64, a_mask=mask, bias=bias), wanted + bias, **tolerance)
    hidden = np.array([[True, False], [False, True]])
    result = ops.block_sparse_gemm(a, b, block=64, d_mask=hidden, alpha=0.5, activation="relu")
    shown = np.kron(hidden, np.ones((64, 64)))[:100, :70]
    np.testing.assert_allclose(result, np.maximum(0.5 * exact(a) @ exact(b), 0) * shown, **tolerance)
    with pytest.raises(ValueError, match=r"a_mask is u8\[2, 4\]"):
        ops.block_sparse_gemm(a, b, a_mask=mask)


def test_grouped_gemm(random):
    a, w, bias = normal(random, 20, 37), normal(random, 4, 12, 37), normal(random, 4, 12)
    offsets = np.array([2, 9, 9, 15, 18], np.int32)
    group_of = {r: g for g in range(4) for r in range(offsets[g], offsets[g + 1])}
    wanted = np.zeros((20, 12))
    for r, g in group_of.items():
        wanted[r] = exact(a)[r] @ exact(w)[g].T + bias[g]
    close(ops.grouped_gemm(a, w.transpose(0, 2, 1), offsets, bias=bias, zeros=True), wanted)
    out = np.full((20, 12), 5, np.float32)
    assert ops.grouped_gemm(a, w.transpose(0, 2, 1), offsets, bias=bias, activation="relu", out=out) is out
    inside = np.isin(np.arange(20), list(group_of))
    close(out[inside], np.maximum(wanted[inside], 0))
    assert (out[~inside] == 5).all()
    b = normal(random, 20, 8)
    gradients = np.stack([exact(a)[offsets[g] : offsets[g + 1]].T @ exact(b)[offsets[g] : offsets[g + 1]] for g in range(4)])
    close(ops.k_grouped_gemm(a.T, b, offsets), gradients)
    sums = np.ones((4, 37, 8), np.float32)
    assert ops.k_grouped_gemm(a.T, b, offsets, accumulate=True, out=sums) is sums
    close(sums, gradients + 1)


def test_grouped_gemm_errors(random):
    a, b, offsets = normal(random, 5, 8), normal(random, 2, 8, 6), np.array([0, 2, 5], np.int32)
    for call, part in [
        (lambda: ops.grouped_gemm(a, b, offsets[:2]), r"offsets is i32\[2\]"),
        (lambda: ops.grouped_gemm(a, b, offsets.astype(np.int64)), r"offsets is i64\[3\]"),
        (lambda: ops.grouped_gemm(a, b[:, :7], offsets), r"b is f32\[2, 7, 6\]"),
        (lambda: ops.grouped_gemm(a, b, offsets, activation="tanh"), "activation is 'tanh'"),
        (lambda: ops.grouped_gemm(a, b[0], offsets), "b has 2 dimensions"),
        (lambda: ops.k_grouped_gemm(a.T, a, offsets, accumulate=True), "no out is given"),
        (lambda: ops.k_grouped_gemm(a, a, offsets), r"b is f32\[5, 8\]"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


@pytest.mark.parametrize("format, group, zero_points", [("int8", 32, False), ("int4", 32, False), ("int4", 128, True)])
def test_dequant_gemm(random, format, group, zero_points):
    w, bias = normal(random, 11, 256), normal(random, 11)
    # Rounding to 8 bits, where the processor multiplies such integers, leaves these as they are: each 64 have a 127.
    x = random.integers(-127, 128, (20, 256)).astype(np.float32)
    x[:, ::64] = 127
    values, scales, zeros = ops.quantize(w, format, group=group, zero_points=zero_points)
    assert (zeros is not None) == zero_points
    if format == "int8":
        rounded = exact(values) * exact(scales)[:, None]
        worst = np.abs(exact(w)).max(axis=1, keepdims=True) / 254
    else:
        codes = exact(np.stack([values & 15, values >> 4], axis=-1)).reshape(11, 256 // group, group)
        rounded = ((codes - (exact(zeros)[:, :, None] if zero_points else 8)) * exact(scales)[:, :, None]).reshape(11, 256)
        worst = np.repeat(0.51 * exact(scales), group, axis=1) + 1e-6
    assert (np.abs(rounded - exact(w)) <= worst * 1.001).all()
    close(ops.dequantize(values, scales, zeros), rounded)
    product = exact(x) @ rounded.T
    got = ops.dequant_gemm(x[:3], values, scales, zeros, bias=bias)
    assert got.dtype == np.float32
    close(got, product[:3] + bias)
    close(ops.dequant_gemm(x, values, scales, zeros, bias=bias, activation="relu"), np.maximum(product + bias, 0))
    out = np.ones((20, 11), np.float32)
    assert ops.dequant_gemm(x, values, scales, zeros, accumulate=True, out=out) is out
    close(out, product + 1)
    pairs = values[:10], scales[:10], None if zeros is None else zeros[:10]
    gate, up = (product * 1e-3)[:, 0:10:2], (product * 1e-3)[:, 1:10:2]
    close(ops.dequant_gemm(x[:3] * np.float32(1e-3), *pairs, activation="swiglu"), (gate / (1 + np.exp(-gate)) * up)[:3])


@pytest.mark.parametrize("rows", [3, 20])
def test_dequant_gemm_of_integers(random, rows):
    w, bias = normal(random, 12, 256), normal(random, 12)
    values, scales, zeros = ops.quantize(w, "int4", group=128, zero_points=True)
    integers, x_scales = ops.quantize_activations(normal(random, rows, 256))
    product = (exact(integers) * exact(x_scales)[:, None]) @ exact(ops.dequantize(values, scales, zeros)).T + bias
    got = ops.dequant_gemm(integers, values, scales, zeros, bias=bias, x_scales=x_scales, dtype="float32")
    assert got.dtype == np.float32
    close(got, product)
    gate, up = product[:, ::2], product[:, 1::2]
    gated = ops.dequant_gemm(integers, values, scales, zeros, bias=bias, activation="swiglu", x_scales=x_scales, dtype="float32")
    close(gated, gate / (1 + np.exp(-gate)) * up)
    with pytest.raises(ValueError, match="dtype is None"):
        ops.dequant_gemm(integers, values, scales, zeros, x_scales=x_scales)
    with pytest.raises(ValueError, match=r"x_scales are"):
        ops.dequant_gemm(integers, values, scales, zeros, x_scales=x_scales[:2], dtype="float32")


_NORMAL_FLOATS = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
_NORMAL_FLOATS += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
_FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _ternary_numbers(values):
    return np.stack([values >> place & 3 for place in (0, 2, 4, 6)], axis=-1).reshape(values.shape[0], -1).astype(np.int64) - 2


def test_quantize_ternary(random):
    w = normal(random, 11, 64)
    values, scales = ops.quantize_ternary(w)
    assert values.shape == (11, 16) and values.dtype == np.uint8 and scales.dtype == np.float32
    assert (scales == scales[0]).all() and np.isclose(scales[0], np.abs(exact(w)).mean(), rtol=1e-6)
    numbers = np.clip(np.rint(w / scales[0]), -1, 1)
    np.testing.assert_array_equal(_ternary_numbers(values), numbers)
    np.testing.assert_array_equal(ops.unpack_ternary(values, scales), numbers)


def test_convert_bitnet(random):
    numbers = random.integers(-1, 2, (12, 20))
    packed = sum((numbers[3 * i : 3 * i + 3] + 1) << 2 * i for i in range(4)).astype(np.uint8)
    values, scales = ops.convert_bitnet(packed, 0.25)
    np.testing.assert_array_equal(_ternary_numbers(values), numbers)
    np.testing.assert_array_equal(scales, np.full(12, 0.25, np.float32))


def test_bit_linear(random):
    w, x, bias = normal(random, 11, 64), normal(random, 20, 64), normal(random, 11)
    values, scales = ops.quantize_ternary(w)
    rounded, x_scales = ops.quantize_activations(x)
    largest = np.abs(x).max(axis=1)
    np.testing.assert_array_equal(rounded, np.rint(x * (np.float32(127) / largest)[:, None]))
    np.testing.assert_array_equal(x_scales, largest / np.float32(127))
    sums = rounded.astype(np.int64) @ _ternary_numbers(values).T
    product = sums.astype(np.float32) * x_scales[:, None] * scales
    np.testing.assert_array_equal(ops.ternary_gemm(rounded, x_scales, values, scales, dtype="float32"), product)
    np.testing.assert_array_equal(ops.bit_linear(x, values, scales), product)
    close(ops.bit_linear(x[:3], values, scales, bias=bias), product[:3] + bias)
    out = np.ones((20, 11), np.float32)
    assert ops.bit_linear(x, values, scales, accumulate=True, out=out) is out
    close(out, product + 1)


def test_bit_linear_errors(random):
    w, x = normal(random, 4, 64), normal(random, 3, 64)
    values, scales = ops.quantize_ternary(w)
    for call, part in [
        (lambda: ops.quantize_ternary(w[:, :6]), "6 columns"),
        (lambda: ops.bit_linear(x[:, :60], values, scales), r"\[M, 64\]"),
        (lambda: ops.bit_linear(x, values, scales[:3]), "scales"),
        (lambda: ops.bit_linear(x, values, scales, accumulate=True), "no out is given"),
        (lambda: ops.ternary_gemm(x, scales, values, scales), "values is"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


@pytest.mark.parametrize("format, group", [("int2", 32), ("nf4", 64), ("fp4", 32), ("mxfp4", 32)])
def test_dequant_gemm_of_other_formats(random, format, group):
    w, x = normal(random, 11, 256), normal(random, 20, 256)
    values, scales, zeros = ops.quantize(w, format)
    assert zeros is None and scales.shape == (11, 256 // group)
    bits = 2 if format == "int2" else 4
    codes = np.stack([values >> place & ((1 << bits) - 1) for place in range(0, 8, bits)], axis=-1).reshape(11, 256)
    numbers = {"int2": np.arange(-2, 2), "nf4": _NORMAL_FLOATS}.get(format, _FP4)
    factors = np.exp2(scales.astype(np.float64) - 127) if format == "mxfp4" else exact(scales)
    rounded = np.asarray(numbers)[codes] * np.repeat(factors, group, axis=1)
    assert np.abs(rounded - exact(w)).max() <= np.abs(exact(w)).max() * (0.51 if format == "int2" else 0.26)
    close(ops.dequant_gemm(x, values, scales, format=format), exact(x) @ rounded.T)
    assert ops.dequantize(values, scales, format=format, dtype="float16").dtype == np.float16
    out = np.empty((11, 256), np.float32)
    assert ops.dequantize(values, scales, format=format, out=out) is out
    close(out, rounded)


def test_convert_weight(random):
    codes, zeros = random.integers(0, 16, (24, 64)), random.integers(1, 16, (24, 2))
    scales = normal(random, 24, 2).astype(np.float16)
    exact_weight = exact(scales).repeat(32, axis=1) * (codes - zeros.repeat(32, axis=1))

    def words(numbers, order=range(8)):
        """[..., 8 c] numbers as [..., c] words: the i-th four bits of a word are its number order[i]."""
        parts = numbers.astype(np.uint32).reshape(*numbers.shape[:-1], -1, 8)[..., list(order)]
        return np.ascontiguousarray(np.bitwise_or.reduce(parts << (4 * np.arange(8, dtype=np.uint32)), axis=-1)).view(np.int32)

    awq = [0, 2, 4, 6, 1, 3, 5, 7]
    by_column = np.ascontiguousarray(scales.T)
    published = {
        "awq": (words(codes.T, awq), words(zeros.T, awq), by_column),
        "gptq": (np.ascontiguousarray(words(codes).T), words(zeros.T - 1), by_column),
        "gptq_v2": (np.ascontiguousarray(words(codes).T), words(zeros.T), by_column),
        "compressed-tensors": (words(codes), np.ascontiguousarray(words(zeros.T).T), scales),
    }
    identity = np.eye(64, dtype=np.float32)  # more rows than those whose x is rounded
    for layout, parts in published.items():
        values, to_scales, to_zeros = ops.convert_weight(layout, *parts)
        close(ops.dequant_gemm(identity, values, to_scales, to_zeros), exact_weight.T)
    symmetric = ops.convert_weight("compressed-tensors", published["compressed-tensors"][0], None, scales)
    assert (symmetric[2] == 8).all()
    g_idx = (np.arange(64, dtype=np.int32) // 32)[::-1].copy()
    for call, part in [
        (lambda: ops.convert_weight("marlin", *published["awq"]), "layout is 'marlin'"),
        (lambda: ops.convert_weight("awq", published["awq"][0], None, by_column), "qzeros is null"),
        (lambda: ops.convert_weight("gptq", *published["gptq"], g_idx), r"g_idx\[0\] is 1"),
        (lambda: ops.convert_weight("awq", *published["awq"][:2], normal(random, 3, 24)), "3 groups of 64 inputs"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


def test_dequant_gemm_errors(random):
    w, x = normal(random, 4, 96), normal(random, 2, 96)
    values, scales, _ = ops.quantize(w)
    for call, part in [
        (lambda: ops.quantize(w, "int3"), "format is 'int3'"),
        (lambda: ops.quantize(w, zero_points=True), "only int4 and int2"),
        (lambda: ops.quantize(w, "nf4"), "group is 64, with 96 columns; 64 are allowed"),
        (lambda: ops.dequant_gemm(x, values, scales, format="int3"), "format is 'int3'"),
        (lambda: ops.quantize(w, "int4", group=128), "group is 128, with 96 columns; 32 and 128 are allowed"),
        (lambda: ops.dequant_gemm(x[:, :95], values, scales), r"\[M, 96\]"),
        (lambda: ops.dequant_gemm(x, values, scales[:3]), "scales"),
        (lambda: ops.dequant_gemm(x, values, scales, np.zeros((4, 3), np.uint8)), "zeros are given"),
        (lambda: ops.dequant_gemm(x, x, scales), "values are"),
        (lambda: ops.dequant_gemm(x, values, scales, accumulate=True), "no out is given"),
        (lambda: ops.dequant_gemm(x, values[:3], scales[:3], activation="swiglu"), "swiglu"),
        (lambda: ops.dequantize(values, scales, dtype="int4"), "dtype is 'int4'"),
        (lambda: ops.dequantize(values, scales, dtype="int8"), "out is"),
        (lambda: ops.dequantize(values, scales, format="mxfp4"), "values are|values is"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


@pytest.mark.parametrize("stride, padding, dilation", [(1, 0, 1), (2, 1, 1), ((1, 2), (2, 0), (2, 1))])
def test_convolution(random, stride, padding, dilation):
    x, w, bias = normal(random, 2, 9, 8, 3), normal(random, 4, 3, 2, 3), normal(random, 4)
    got = ops.conv2d(x, w, stride=stride, padding=padding, dilation=dilation, bias=bias)
    (sh, sw), (ph, pw), (dh, dw) = ((n, n) if isinstance(n, int) else n for n in (stride, padding, dilation))
    padded = np.pad(exact(x), ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    height, width = (padded.shape[1] - 2 * dh - 1) // sh + 1, (padded.shape[2] - dw - 1) // sw + 1
    wanted = np.zeros((2, height, width, 4)) + bias
    for i in range(3):
        for j in range(2):
            part = padded[:, i * dh : i * dh + (height - 1) * sh + 1 : sh, j * dw : j * dw + (width - 1) * sw + 1 : sw]
            wanted += np.einsum("nhwc,fc->nhwf", part, exact(w)[:, i, j])
    close(got, wanted)
    line = ops.conv1d(x[:, :, 0], w[:, :, 0], stride=2, padding=1)
    close(line, ops.conv2d(x[:, :, :1], w[:, :, :1], stride=(2, 1), padding=(1, 0))[:, :, 0].astype(np.float64))


@pytest.mark.parametrize(
    ("name", "value"), [("stride", 0), ("stride", -1), ("stride", 2**64 + 1), ("dilation", 0), ("padding", -1), ("padding", 2**64)]
)
def test_convolution_refuses_integers(random, name, value):
    x, w = normal(random, 2, 6, 6, 3), normal(random, 4, 3, 3, 3)
    with pytest.raises(ValueError, match=rf"^{name} is {value}; "):
        ops.conv1d(x[:, :, 0], w[:, :, 0], **{name: value})
    for given in (value, (1, value)):
        with pytest.raises(ValueError, match=rf"^{name} is {value}; "):
            ops.conv2d(x, w, **{name: given})


def test_norms(random):
    x, weight, bias, residual = normal(random, 2, 5, 33), normal(random, 33), normal(random, 33), normal(random, 2, 5, 33)
    h = exact(x) + exact(residual)
    centred = h - h.mean(-1, keepdims=True)
    sums = np.empty_like(x)
    got = ops.layer_norm(x, weight, bias, epsilon=1e-3, residual=residual, sum_out=sums)
    close(got, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * weight + bias)
    close(sums, h)
    close(ops.rms_norm(x, weight), exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5) * weight)


def test_hadamard(random):
    x = normal(random, 3, 7, 16)
    signs = np.where(random.random(16) < 0.5, -1, 1).astype(np.float32)
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    close(ops.hadamard(x, scale=0.25), 0.25 * exact(x) @ h)
    close(ops.hadamard(x, factors=signs), (exact(x) * signs) @ h)
    wide = normal(random, 2, 12 * 64)
    close(ops.hadamard(ops.hadamard(wide), scale=1 / (12 * 64)), exact(wide))


def test_softmax_and_reduce(random):
    x = normal(random, 4, 7, 19)
    close(ops.softmax(x, scale=3.0), softmax(3 * exact(x)))
    for name, f in {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}.items():
        for dim in (-1, 0, 1):
            close(ops.reduce(x, name, dim=dim), f(exact(x), axis=dim))
    close(ops.reduce(x, "abs_max", dim=1, keepdim=True), np.abs(exact(x)).max(1, keepdims=True))


def test_argmax_and_topk(random):
    x = normal(random, 3, 5, 41)
    assert (ops.argmax(x) == x.argmax(-1)).all()
    assert ops.argmax(x, dtype="int32").dtype == np.int32
    values, columns = ops.topk(x, 4)
    assert (columns == np.argsort(-x, axis=-1, kind="stable")[..., :4]).all()
    assert (values == np.take_along_axis(x, columns, -1)).all()
    values, columns = ops.topk(x, 3, largest=False, ends=np.full((3, 5), 2, np.int32))
    assert (columns[..., 2] == -1).all() and np.isposinf(values[..., 2]).all()


def test_moe_route(random):
    logits, bias = normal(random, 9, 12), normal(random, 12)
    weights, experts = ops.moe_route(logits, 3, renormalise=True)
    assert (experts == np.argsort(-logits, axis=-1, kind="stable")[:, :3]).all()
    chosen = np.take_along_axis(softmax(exact(logits)), experts, -1)
    close(weights, chosen / chosen.sum(-1, keepdims=True))
    scores = 1 / (1 + np.exp(-exact(logits)))
    choice = (scores + bias).reshape(9, 4, 3)
    groups = np.sort(choice, -1)[..., 1:].sum(-1)
    closed = np.argsort(np.argsort(-groups, axis=-1), axis=-1) >= 2
    choice = np.where(closed[..., None], -np.inf, choice).reshape(9, 12)
    options = {"score": "sigmoid", "bias": bias, "groups": 4, "groups_taken": 2, "group_score": "sum_of_two", "scale": 2.5}
    weights, experts = ops.moe_route(logits, 2, **options)
    assert weights.dtype == np.float32 and experts.dtype == np.int32
    assert (experts == np.argsort(-choice, axis=-1)[:, :2]).all()
    close(weights, 2.5 * np.take_along_axis(scores, experts, -1))


def test_moe_permutation(random):
    experts = random.integers(0, 7, (11, 3), dtype=np.int32)
    offsets, rows, places = ops.moe_permutation(experts, 5, first_expert=1)
    order = np.argsort(experts.ravel(), kind="stable")
    order = order[(experts.ravel()[order] >= 1) & (experts.ravel()[order] <= 5)]
    assert (offsets == np.searchsorted(experts.ravel()[order], np.arange(1, 7))).all()
    assert (rows[: len(order)] == order // 3).all() and (rows[len(order) :] == -1).all()
    assert (places.ravel()[order] == np.arange(len(order))).all()
    assert ((places == -1) == ((experts < 1) | (experts > 5))).all()
    x, weights, addend = normal(random, 11, 20), normal(random, 11, 3), normal(random, 11, 20)
    y = ops.moe_dispatch(x, places)
    assert y.shape == (33, 20) and (y[: len(order)] == x[order // 3]).all()
    total = np.where(places == -1, 0, weights).sum(-1, dtype=np.float64)[:, None]
    close(ops.moe_combine(y, places, weights, addend=addend), addend + total * x)


def test_fused_moe(random):
    x, logits, addend = normal(random, 9, 16), normal(random, 9, 6), normal(random, 9, 16)
    gate_up, down = normal(random, 6, 2 * 12, 16), normal(random, 6, 16, 12)
    shared_gate_up, shared_down = normal(random, 2 * 8, 16), normal(random, 16, 8)

    def mlp(token, gate_up, down):
        gate, up = exact(gate_up[0::2]) @ token, exact(gate_up[1::2]) @ token
        return exact(down) @ (gate / (1 + np.exp(-gate)) * up)

    weights, experts = ops.moe_route(logits, 2, renormalise=True)
    wanted = addend + np.stack([mlp(token, shared_gate_up, shared_down) for token in x])
    for t, n in np.ndindex(9, 2):
        wanted[t] += weights[t, n] * mlp(x[t], gate_up[experts[t, n]], down[experts[t, n]])
    rest = {"shared_gate_up": shared_gate_up, "shared_down": shared_down, "addend": addend}
    got = ops.fused_moe(x, logits, 2, gate_up, down, renormalise=True, **rest)
    close(got, wanted, 1e-5)
    assert (got == ops.moe_experts(x, weights, experts, gate_up, down, **rest)).all()
    halves = [ops.moe_experts(x, weights, experts, gate_up[e : e + 3], down[e : e + 3], first_expert=e) for e in (0, 3)]
    close(halves[0] + halves[1], exact(ops.moe_experts(x, weights, experts, gate_up, down)), 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(random, interleaved):
    x, positions = normal(random, 2, 6, 3, 20), np.array([4, 9, 0, 2, 5, 7], np.int32)
    cos, sin = ops.rope_table(np.arange(10, dtype=np.int32), 16, theta=100.0)
    angles = np.arange(10)[:, None] * 100.0 ** (-np.arange(8) / 8)
    close(cos, np.cos(angles))
    close(sin, np.sin(angles))
    first, second = (slice(0, 16, 2), slice(1, 16, 2)) if interleaved else (slice(0, 8), slice(8, 16))
    wanted = exact(x)
    c, s = (f(angles)[positions][None, :, None, :] for f in (np.cos, np.sin))
    wanted[..., first], wanted[..., second] = (
        x[..., first] * c - x[..., second] * s,
        x[..., second] * c + x[..., first] * s,
    )
    close(ops.rope(x, cos, sin, interleaved=interleaved, positions=positions), wanted)


def test_cast_fp8(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal(random, 3, 300)
    y, scales = ops.cast_fp8(x)
    assert y.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (3, 3)
    back = y.astype(np.float32) * np.repeat(scales, 128, -1)[:, :300]
    assert np.abs(back - x).max() <= np.abs(x).max() / 16
    gate, up = normal(random, 3, 300), normal(random, 3, 300)
    y, scales = ops.cast_fp8_swiglu(gate, up)
    steps = ops.cast_fp8(ops.swiglu(gate, up))
    assert (y == steps[0]).all() and (scales == steps[1]).all()
    places = np.array([[2, 0], [-1, 1], [3, 4]], np.int32)
    sorted_y, sorted_scales = ops.moe_dispatch_fp8(x[:, :256], places)
    y, scales = ops.cast_fp8(x[:, :256])
    for t, n in np.argwhere(places >= 0):
        assert (sorted_y[places[t, n]] == y[t]).all() and (sorted_scales[places[t, n]] == scales[t]).all()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_cast_fp8_heads(random, rotate, kv_heads):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, signs = normal(random, 2, 9, 4, 64), np.where(random.random(64) < 0.5, -1, 1).astype(np.float32) if rotate else None
    y, scales = ops.cast_fp8_heads(x, kv_heads=kv_heads, rotate=rotate, signs=signs)
    assert y.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (2, kv_heads or 4)
    wanted = ops.hadamard(x, scale=0.125, factors=signs) if rotate else x
    of_head = np.repeat(scales, 4 // scales.shape[1], 1)[:, None, :, None]
    largest = np.abs(wanted).max((1, 3)).reshape(*scales.shape, -1).max(-1)
    np.testing.assert_array_equal(scales, largest / np.float32(448))
    np.testing.assert_array_equal(y, (wanted / of_head).astype(ml_dtypes.float8_e4m3fn))
    out = np.empty_like(y)
    again, same = ops.cast_fp8_heads(x, scales, rotate=rotate, signs=signs, out=out)
    assert again is out and same is scales
    np.testing.assert_array_equal(out, y)
    np.testing.assert_array_equal(ops.head_scales(x, kv_heads=kv_heads, rotate=rotate, signs=signs), scales)
    for parts, refused in (
        ("scales are given; only one", lambda: ops.cast_fp8_heads(x, scales, kv_heads=2)),
        ("x has 4 heads and out 3", lambda: ops.head_scales(x, kv_heads=3)),
        ("signs is given, but rotate is false", lambda: ops.cast_fp8_heads(x, scales, signs=normal(random, 64))),
        ("with rotate its head_dim must be a power of two", lambda: ops.cast_fp8_heads(x[..., :48], rotate=True)),
    ):
        with pytest.raises(ValueError, match=parts):
            refused()


def test_fused_moe_of_fp8(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, logits = normal(random, 9, 128).astype(ml_dtypes.bfloat16), normal(random, 9, 4)
    weights = [(normal(random, 4, *shape) / 11).astype(np.float32) for shape in ((256, 128), (128, 128))]
    (gate_up, gate_up_scale), (down, down_scale) = ([np.stack(part) for part in zip(*map(ops.cast_fp8_blocks, w))] for w in weights)
    got = ops.fused_moe(x, logits, 2, gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale)
    rows = weights[0].reshape(4, 2, 128, 128).swapaxes(1, 2).reshape(4, 256, 128)  # gate and up in turn
    wanted = ops.fused_moe(x.astype(np.float32), logits, 2, np.ascontiguousarray(rows), weights[1])
    assert np.linalg.norm(exact(got) - wanted) <= 0.08 * np.linalg.norm(wanted)
    with pytest.raises(ValueError, match="down_scale is not given"):
        ops.fused_moe(x, logits, 2, gate_up, down, gate_up_scale=gate_up_scale)


@pytest.mark.parametrize(("format", "group"), [("mxfp4", 32), ("int4", 32), ("int4", 128)])
def test_fused_moe_of_packed_weights(random, format, group):
    x, logits = normal(random, 9, 128), normal(random, 9, 4)
    weights = [normal(random, 4, *shape) / 11 for shape in ((256, 128), (128, 128))]
    packed = [[ops.quantize(one, format, group=group) for one in w] for w in weights]
    (gate_up, gate_up_scale), (down, down_scale) = ([np.stack([one[i] for one in w]) for i in range(2)] for w in packed)
    got = ops.fused_moe(x, logits, 2, gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale)
    widened = [np.stack([ops.dequantize(*one[:2], format=format) for one in w]) for w in packed]
    wanted = ops.fused_moe(x, logits, 2, *widened)
    # For int4 x and the gated activations are rounded to 8 bits on the CPU.
    assert np.linalg.norm(exact(got) - wanted) <= (1e-5 if format == "mxfp4" else 0.02) * np.linalg.norm(wanted)
    with pytest.raises(ValueError, match="down_scale is not given"):
        ops.fused_moe(x, logits, 2, gate_up, down, gate_up_scale=gate_up_scale)
    with pytest.raises(ValueError, match="w_down is u8"):
        ops.fused_moe(x, logits, 2, gate_up, gate_up, gate_up_scale=gate_up_scale, down_scale=down_scale)


def reference_attention(
    q, k, v, scale=None, causal=False, window=(-1, -1), attention_chunk=0, softcap=0.0, slopes=None, sink=None, mask=None
):
    """o [seqlen_q, heads, value_dim] and lse [heads, seqlen_q] of one sequence in float64."""
    q, k, v = exact(q), exact(k), exact(v)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    distance = np.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - np.arange(k.shape[0])
    if slopes is not None:
        s = s - slopes[:, None, None] * np.abs(distance)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    left, right = window
    if attention_chunk:
        key = np.arange(k.shape[0])
        s = np.where((distance + key) // attention_chunk == key // attention_chunk, s, -np.inf)
    s = np.where(((distance < 0) & causal) | ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0)), -np.inf, s)
    sums = np.exp(s).sum(-1) + (0 if sink is None else np.exp(exact(sink))[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        o = np.where(sums[..., None] > 0, np.einsum("hij,jhd->hid", np.exp(s), v) / sums[..., None], 0)
        return o.transpose(1, 0, 2), np.log(sums)


CASES = [
    {},
    {"causal": True},
    {"scale": 0.3, "softcap": 2.0},
    {"window": (7, 3)},
    {"causal": True, "window": (4, -1)},
    {"slopes": True, "sink": True},
    {"mask": True},
    {"attention_chunk": 6},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention(random, case, dtype):
    q, k, v = (normal(random, 2, *shape, dtype=dtype) for shape in ((23, 4, 40), (31, 2, 40), (31, 2, 24)))
    case = dict(case)
    slopes = random.uniform(0.1, 0.5, 4).astype(np.float32) if case.pop("slopes", False) else None
    sink = normal(random, 4) if case.pop("sink", False) else None
    mask = random.random((23, 31)) < 0.7 if case.pop("mask", False) else None
    o, lse = ops.attention(q, k, v, alibi_slopes=slopes, sink=sink, mask=mask, return_lse=True, **case)
    for b in range(2):
        wanted, wanted_lse = reference_attention(q[b], k[b], v[b], slopes=slopes, sink=sink, mask=mask, **case)
        close(o[b], wanted, 1e-5)
        np.testing.assert_allclose(lse[b], wanted_lse, atol=1e-3)
    seen = ops.attention(q, k, v, alibi_slopes=slopes, sink=sink, mask=mask, sm_margin=1, **case)
    assert (seen == o).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
def test_attention_fp8(random, case):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fp8 = ml_dtypes.float8_e4m3fn
    q, k, v = (normal(random, 2, *shape).astype(fp8) for shape in ((23, 4, 48), (31, 2, 48), (31, 2, 32)))
    descales = {name: random.uniform(0.3, 1.5, (2, 2)).astype(np.float32) for name in ("q_descale", "k_descale", "v_descale")}
    case = dict(case)
    slopes = random.uniform(0.1, 0.5, 4).astype(np.float32) if case.pop("slopes", False) else None
    sink = normal(random, 4) if case.pop("sink", False) else None
    mask = random.random((23, 31)) < 0.7 if case.pop("mask", False) else None
    o, lse = ops.attention(q, k, v, alibi_slopes=slopes, sink=sink, mask=mask, return_lse=True, **descales, **case)
    assert o.dtype == ml_dtypes.bfloat16
    out = np.empty(o.shape, np.float16)
    assert ops.attention(q, k, v, alibi_slopes=slopes, sink=sink, mask=mask, **descales, **case, out=out) is out
    for b in range(2):
        of_q, of_k, of_v = (descales[name][b][None, :, None] for name in ("q_descale", "k_descale", "v_descale"))
        of_q = np.repeat(of_q, 2, 1)
        inputs = exact(q[b]) * of_q, exact(k[b]) * of_k, exact(v[b]) * of_v
        wanted, wanted_lse = reference_attention(*inputs, slopes=slopes, sink=sink, mask=mask, **case)
        largest = np.abs(wanted).max()
        np.testing.assert_allclose(o[b].astype(np.float64), wanted, rtol=0, atol=largest / 64)
        np.testing.assert_allclose(out[b].astype(np.float64), wanted, rtol=0, atol=largest / 512)
        np.testing.assert_allclose(lse[b], wanted_lse, atol=1e-3)


def finite_differences(f, x, places, step=1e-4):
    """The derivatives of f, which reads x, an array of float64, for x's elements at `places`."""
    flat, derivatives = x.reshape(-1), []
    for place in places:
        at = flat[place]
        flat[place] = at + step
        above = f()
        flat[place] = at - step
        derivatives.append((above - f()) / (2 * step))
        flat[place] = at
    return np.array(derivatives)


GRADIENT_CASES = [
    {},
    {"causal": True},
    {"causal": True, "scale": 0.3, "softcap": 2.0},
    {"window": (2, 1)},
    {"slopes": True, "sink": True},
    {"causal": True, "sink": True, "softcap": 1.0},
    {"mask": "seen"},
    {"mask": "added", "window": (-1, 2)},
    {"mask": "added to keys", "sink": True, "softcap": 2.0},
    {"mask": "added to queries", "causal": True},
]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 7), (7, 3)])  # causal, the second has queries that see no key
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention_backward(random, case, seqlen_q, seqlen_k, dtype):
    q, k, v = (normal(random, 1, *shape, dtype=dtype) for shape in ((seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 16)))
    d_o = normal(random, 1, seqlen_q, 4, 16, dtype=dtype)
    rules = dict(case)
    slopes = random.uniform(0.1, 0.5, 4).astype(np.float32) if rules.pop("slopes", False) else None
    sink = normal(random, 4) if rules.pop("sink", False) else None
    kind, mask = rules.pop("mask", None), None
    if kind is not None:
        shape = {"added to keys": (seqlen_k,), "added to queries": (4, seqlen_q, 1)}.get(kind, (4, seqlen_q, seqlen_k))
        mask = random.random((seqlen_q, seqlen_k)) < 0.7 if kind == "seen" else normal(random, *shape)
    given = {**rules, "alibi_slopes": slopes, "sink": sink, "mask": mask}
    o, lse = ops.attention(q, k, v, return_lse=True, **given)
    given["return_d_mask"] = kind not in (None, "seen")
    gradients = ops.attention_backward(q, k, v, o, lse, d_o, **given)

    inputs = {"dq": exact(q[0]), "dk": exact(k[0]), "dv": exact(v[0])}
    if sink is not None:
        inputs["d_sink"] = exact(sink)
    if given["return_d_mask"]:
        inputs["d_mask"] = exact(mask)

    def loss():
        q, k, v = inputs["dq"], inputs["dk"], inputs["dv"]
        at = {"slopes": slopes, "sink": inputs.get("d_sink"), "mask": inputs.get("d_mask", mask)}
        return (reference_attention(q, k, v, **at, **rules)[0] * exact(d_o[0])).sum()

    assert len(gradients) == len(inputs)
    for (name, x), got in zip(inputs.items(), gradients):
        places = random.permutation(x.size)[:60]
        wanted = finite_differences(loss, x, places)
        assert got.dtype == (np.float32 if name in ("d_sink", "d_mask") else dtype)
        # o, the weights and dS are rounded to the dtype
        tolerance = 1e-5 if dtype == np.float32 else 2.0**-8
        assert got.size == x.size
        np.testing.assert_allclose(got.reshape(-1)[places], wanted, rtol=0, atol=tolerance * max(np.abs(wanted).max(), 1), err_msg=name)
    out = tuple(np.full_like(gradient, np.nan) for gradient in gradients)
    returned = ops.attention_backward(q, k, v, o, lse, d_o, deterministic=True, out=out, **given)
    assert all(a is b for a, b in zip(returned, out))
    assert all((a == b).all() for a, b in zip(out, gradients))


def test_masks_of_sequences_and_caches(random):
    lengths_q, lengths_k = [3, 0, 9], [11, 4, 30]
    q, k, v = normal(random, 12, 4, 16), normal(random, 45, 2, 16), normal(random, 45, 2, 24)
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k))
    mask = random.random((3, 1, 9, 30)) < 0.7
    o, lse = ops.attention_varlen(q, k, v, cu_q, cu_k, mask=mask, causal=True, return_lse=True)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = mask[b, :, : lengths_q[b], : lengths_k[b]]
        wanted, wanted_lse = reference_attention(q[rows], k[keys], v[keys], causal=True, mask=own)
        close(o[rows], wanted, 1e-5)
        np.testing.assert_allclose(lse[:, rows], wanted_lse, atol=1e-3)
    d_o = normal(random, *o.shape)
    gradients = ops.attention_varlen_backward(q, k, v, cu_q, cu_k, o, lse, d_o, mask=mask, causal=True)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = {"mask": np.ascontiguousarray(mask[b : b + 1, :, : lengths_q[b], : lengths_k[b]]), "causal": True}
        if lengths_q[b] == 0:
            continue
        inputs = [np.ascontiguousarray(x[None]) for x in (q[rows], k[keys], v[keys])]
        o_b, lse_b = ops.attention(*inputs, return_lse=True, **own)
        wanted = ops.attention_backward(*inputs, o_b, lse_b, np.ascontiguousarray(d_o[rows][None]), **own)
        for got, part, at in zip(gradients, wanted, (rows, keys, keys)):
            close(got[at], exact(part[0]), 1e-5)
    with pytest.raises(ValueError, match="mask has 8 queries; sequence 2 has 9"):
        ops.attention_varlen(q, k, v, cu_q, cu_k, mask=np.ones((8, 30), bool))
    cache_k, cache_v, seqlens = normal(random, 3, 40, 2, 16), normal(random, 3, 40, 2, 24), np.array([40, 1, 17], np.int32)
    few, seen = normal(random, 3, 2, 4, 16), random.random((3, 1, 1, 40)) < 0.7
    o = ops.attention_decode(few, cache_k, cache_v, seqlens=seqlens, mask=seen)
    for b, length in enumerate(seqlens):
        wanted, _ = reference_attention(few[b], cache_k[b, :length], cache_v[b, :length], mask=seen[b, :, :, :length])
        close(o[b], wanted, 1e-5)
    with pytest.raises(ValueError, match="mask is .*broadcastable to"):
        ops.attention_decode(few, cache_k, cache_v, seqlens=seqlens, mask=seen[..., :39])


def test_attention_backward_refuses(random):
    q, k = normal(random, 1, 5, 4, 8), normal(random, 1, 7, 2, 8)
    o, lse = ops.attention(q, k, k, return_lse=True)

    def call(lse=lse, d_o=o, **options):
        return ops.attention_backward(q, k, k, o, lse, d_o, **options)

    out = [np.empty_like(x) for x in (q, k, k)]
    for error, parts, refused in (
        (ValueError, r"out has 2 arrays; allowed: 3, \(dq, dk, dv\)", lambda: call(out=out[:2])),
        (ValueError, r"out has 3 arrays; allowed: 4, \(dq, dk, dv, d_sink\)", lambda: call(out=out, sink=normal(random, 4))),
        (ValueError, r"out has 3 arrays; allowed: 4, \(dq, dk, dv, d_mask\)", lambda: call(out=out, mask=normal(random, 7), return_d_mask=True)),
        (ValueError, "return_d_mask is True, but mask is None", lambda: call(return_d_mask=True)),
        (ValueError, "only masks that are added have a gradient", lambda: call(mask=np.ones(7, bool), return_d_mask=True, out=(*out, normal(random, 7)))),
        (ValueError, r"dk is f32\[1, 5, 4, 8\] on cpu; it must have k's shape", lambda: call(out=(out[0], np.empty_like(q), out[2]))),
        (ValueError, r"d_o is f32\[1, 7, 2, 8\]", lambda: call(d_o=k)),
        (ValueError, r"lse is f32\[1, 5, 4\]", lambda: call(lse=lse.transpose(0, 2, 1).copy())),
        (TypeError, "lse is a NoneType", lambda: call(lse=None)),
        (ValueError, "softcap is -1.0", lambda: call(softcap=-1.0)),
        (ValueError, "sink is", lambda: call(sink=normal(random, 3))),
        (TypeError, "out must be given", lambda: ops.attention_backward(*map(OnlyDLPack, (q, k, k, o, lse, o)))),
    ):
        with pytest.raises(error, match=parts):
            refused()
    out[1].flags.writeable = False
    with pytest.raises(ValueError, match="dk is read-only"):
        call(out=out)
    out[1].flags.writeable = True
    got = ops.attention_backward(*map(OnlyDLPack, (q, k, k, o, lse, o)), out=out)
    assert all((a == b).all() for a, b in zip(got, call()))


def test_attention_dropout(random):
    q, k, v = (normal(random, 2, rows, heads, 16) for rows, heads in ((37, 4), (70, 2), (70, 2)))
    state = np.array([-5, 7], np.int64)
    kept = ops.attention_dropout_mask(np.empty((2, 4, 37, 70), bool), 0.25, state)
    assert abs(kept.mean() - 0.75) < 0.03
    o, lse = ops.attention(q, k, v, causal=True, dropout=0.25, dropout_state=state, return_lse=True)
    plain, same_lse = ops.attention(q, k, v, causal=True, return_lse=True)
    assert (lse == same_lse).all() and not (o == plain).all()
    for b in range(2):
        for head in range(4):
            scores = exact(q[b, :, head]) @ exact(k[b, :, head // 2]).T / 4
            seen = np.arange(70) <= np.arange(37)[:, None] + 33
            weights = np.where(seen, np.exp(scores - exact(lse[b, head])[:, None]), 0) * kept[b, head] / 0.75
            np.testing.assert_allclose(o[b, :, head], weights @ exact(v[b, :, head // 2]), rtol=0, atol=1e-5)

    d_o = normal(random, *o.shape)
    gradients = ops.attention_backward(q, k, v, o, lse, d_o, causal=True, dropout=0.25, dropout_state=state)
    places = random.permutation(v.size)[:40]  # o is linear in v, so differences are exact

    def loss():
        return (exact(ops.attention(q, k, v, causal=True, dropout=0.25, dropout_state=state)) * d_o).sum()

    wanted = finite_differences(loss, v, places, step=0.5)
    np.testing.assert_allclose(gradients[2].reshape(-1)[places], wanted, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="dropout_state is None"):
        ops.attention(q, k, v, dropout=0.25)
    with pytest.raises(ValueError, match=r"dropout is 1"):
        ops.attention(q, k, v, dropout=1.0, dropout_state=state)
    with pytest.raises(ValueError, match=r"dropout_state is i32\[2\]"):
        ops.attention(q, k, v, dropout=0.5, dropout_state=state.astype(np.int32))


def recurrence(q, k, v, g, scale, state):
    """Linear attention of one sequence, step by step in double: (o, state). q and k have a head for each of v."""
    o = np.empty(v.shape)
    for t in range(q.shape[0]):
        state = np.exp(g[t])[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        o[t] = scale * np.einsum("hd,hde->he", q[t], state)
    return o, state


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("gate", ["none", "heads", "steps"])
def test_linear_attention(random, gate, dtype):
    q, k = normal(random, 2, 70, 2, 8, dtype=dtype), normal(random, 2, 70, 2, 8, dtype=dtype) / np.sqrt(8).astype(dtype)
    v = normal(random, 2, 70, 4, 16, dtype=dtype)
    g = {"none": None, "heads": np.array([-0.5, -1, 0, -20], np.float32), "steps": -random.random((2, 70, 4)).astype(np.float32)}[gate]
    initial = normal(random, 2, 4, 8, 16)
    gates = np.zeros((2, 70, 4)) if g is None else np.broadcast_to(exact(g), (2, 70, 4))
    wide_q, wide_k = (np.repeat(exact(x), 2, axis=2) for x in (q, k))

    def wanted(states, scale, steps=slice(None)):
        of = [recurrence(*(x[b, steps] for x in (wide_q, wide_k, exact(v), gates)), scale, exact(states[b])) for b in range(2)]
        return np.stack([o for o, _ in of]), np.stack([state for _, state in of])

    tolerance = 1e-5 if dtype == np.float32 else 4e-3
    o, state = ops.linear_attention(q, k, v, g=g, initial_state=initial, return_state=True)
    for got, expected in zip((o, state), wanted(initial, 8**-0.5)):
        np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * np.abs(expected).max())
    out = np.full_like(v, np.nan)
    assert ops.linear_attention(q, k, v, g=g, scale=2.0, out=out) is out
    expected = wanted(np.zeros_like(initial), 2)[0]
    np.testing.assert_allclose(exact(out), expected, rtol=0, atol=tolerance * np.abs(expected).max())

    stepped = initial.copy()
    o = ops.linear_attention_step(*(x[:, :2] for x in (q, k, v)), stepped, g=g if gate != "steps" else g[:, :2])
    for got, expected in zip((o, stepped), wanted(initial, 8**-0.5, slice(2))):
        np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * np.abs(expected).max())

    cu = np.array([0, 3, 70], np.int32)
    packed = [x[:1] for x in (q, k, v)]
    o, states = ops.linear_attention(*packed, g=g if gate != "steps" else g[:1], cu_seqlens=cu, initial_state=initial, return_state=True)
    for n, steps in enumerate((slice(3), slice(3, 70))):
        expected = recurrence(*(x[0, steps] for x in (wide_q, wide_k, exact(v), gates)), 8**-0.5, exact(initial[n]))
        np.testing.assert_allclose(exact(o[0, steps]), expected[0], rtol=0, atol=tolerance * max(np.abs(expected[0]).max(), 1))
        np.testing.assert_allclose(states[n], expected[1], rtol=0, atol=tolerance * max(np.abs(expected[1]).max(), 1))


def test_linear_attention_backward(random):
    q, k, v, d_o = normal(random, 1, 9, 1, 4), normal(random, 1, 9, 1, 4), normal(random, 1, 9, 2, 6), normal(random, 1, 9, 2, 6)
    g, initial, d_state = -random.random((1, 9, 2)).astype(np.float32), normal(random, 1, 2, 4, 6), normal(random, 1, 2, 4, 6)
    gradients = ops.linear_attention_backward(q, k, v, d_o, g=g, initial_state=initial, d_state=d_state)
    inputs = [exact(x) for x in (q, k, v, g, initial)]

    def loss():
        wide = [np.repeat(x[0], 2, axis=1) for x in inputs[:2]]
        o, state = recurrence(*wide, inputs[2][0], inputs[3][0], 0.5, inputs[4][0])
        return (o * exact(d_o[0])).sum() + (state * exact(d_state[0])).sum()

    for name, got, x in zip(("dq", "dk", "dv", "dg", "d_initial_state"), gradients, inputs):
        assert got.shape == x.shape and got.dtype == np.float32
        places = random.permutation(x.size)[:40]
        wanted = finite_differences(loss, x, places)
        np.testing.assert_allclose(got.reshape(-1)[places], wanted, rtol=0, atol=2e-5 * max(np.abs(wanted).max(), 1), err_msg=name)
    assert ops.linear_attention_backward(q, k, v, d_o)[3:] == (None, None)


def test_linear_attention_refuses(random):
    q, v = normal(random, 1, 5, 2, 8), normal(random, 1, 5, 4, 6)
    for part, call in (
        (r"k is f32\[1, 5, 2, 4\].*it must have q's shape", lambda: ops.linear_attention(q, q[..., :4], v)),
        (r"g is f32\[3\].*it must be f32\[1, 5, 4\] or f32\[4\]", lambda: ops.linear_attention(q, q, v, g=np.zeros(3, np.float32))),
        (r"cu_seqlens\[1\] is 6.*it must be from 0 to the number of steps, 5", lambda: ops.linear_attention(q, q, v, cu_seqlens=np.array([0, 6], np.int32))),
        (r"state is f32\[1, 4, 6, 8\]", lambda: ops.linear_attention_step(q, q, v, normal(random, 1, 4, 6, 8))),
        (r"d_o is f32\[1, 5, 2, 8\]", lambda: ops.linear_attention_backward(q, q, v, q)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=part):
            call()


def test_flags_are_truth_values(random):
    """Of any size: ctypes would keep the lowest bits."""
    q = normal(random, 1, 5, 2, 16)
    assert (ops.attention(q, q, q, causal=1 << 32) == ops.attention(q, q, q, causal=True)).all()
    assert (ops.attention(q, q, q, causal=np.bool_(True)) == ops.attention(q, q, q, causal=True)).all()
    cos, sin = normal(random, 5, 8), normal(random, 5, 8)
    assert (ops.rope(q, cos, sin, interleaved=1 << 32) == ops.rope(q, cos, sin, interleaved=True)).all()
    assert (ops.topk(q, np.int64(3))[0] == ops.topk(q, 3)[0]).all()


def test_attention_varlen(random):
    q, k, v = (normal(random, 40, heads, 16) for heads in (4, 2, 2))
    cu_q, cu_k = np.array([0, 11, 11, 33], np.int32), np.array([0, 5, 20, 38], np.int32)
    o, lse = ops.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    assert o.shape == q.shape and lse.shape == (4, 40)
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        wanted, wanted_lse = reference_attention(q[rows], k[keys], v[keys], causal=True)
        close(o[rows], wanted, 1e-5)
        np.testing.assert_allclose(lse[:, rows], wanted_lse, atol=1e-3)
    assert (o[33:] == 0).all() and np.isneginf(lse[:, 33:]).all()


@pytest.mark.parametrize("used", [False, True])
def test_attention_varlen_backward(random, used):
    """What each sequence's gradients are; 0 for rows that are not in use."""
    q, k, v, d_o = (normal(random, 40, heads, 16) for heads in (4, 2, 2, 4))
    cu_q, cu_k = np.array([0, 11, 11, 33], np.int32), np.array([0, 5, 20, 38], np.int32)
    used_q, used_k = (np.array(n, np.int32) for n in ([7, 0, 22], [5, 15, 9]))
    sink = normal(random, 4)
    rules = {"causal": True, "sink": sink} | ({"seqused_q": used_q, "seqused_k": used_k} if used else {})
    o, lse = ops.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **rules)
    got = ops.attention_varlen_backward(q, k, v, cu_q, cu_k, o, lse, d_o, **rules)
    wanted = [np.zeros_like(x) for x in (q, k, v, sink)]
    for b in range(3):
        rows = slice(cu_q[b], cu_q[b] + used_q[b] if used else cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b] + used_k[b] if used else cu_k[b + 1])
        alone = [x[None, of] for x, of in ((q, rows), (k, keys), (v, keys))]
        out, lse_alone = ops.attention(*alone, causal=True, sink=sink, return_lse=True)
        *parts, d_sink = ops.attention_backward(*alone, out, lse_alone, d_o[None, rows], causal=True, sink=sink)
        for x, part, of in zip(wanted, parts, (rows, keys, keys)):
            x[of] = part[0]
        wanted[3] += d_sink
    for x, y in zip(got, wanted):
        close(x, y, 1e-5)
        assert (x[y == 0] == 0).all()
    with pytest.raises(ValueError, match="out has 3 arrays; allowed: 4"):
        ops.attention_varlen_backward(q, k, v, cu_q, cu_k, o, lse, d_o, out=got[:3], **rules)


def test_attention_decode(random):
    """Pages in any order, of which those that nobody has are NaN; a token is appended."""
    q, new_k, new_v = normal(random, 2, 1, 4, 16), normal(random, 2, 1, 2, 16), normal(random, 2, 1, 2, 16)
    pages_k, pages_v = (np.full((7, 16, 2, 16), np.nan, np.float32) for _ in range(2))
    table, seqlens = np.array([[5, 2, 0], [1, 6, 3]], np.int32), np.array([20, 33], np.int32)
    tokens = [(normal(random, n, 2, 16), normal(random, n, 2, 16)) for n in seqlens]
    for b, (k, v) in enumerate(tokens):
        for t in range(seqlens[b]):
            pages_k[table[b, t // 16], t % 16], pages_v[table[b, t // 16], t % 16] = k[t], v[t]
    o = ops.attention_decode(q, pages_k, pages_v, seqlens=seqlens, block_table=table, new_k=new_k, new_v=new_v)
    for b, (k, v) in enumerate(tokens):
        wanted, _ = reference_attention(q[b], np.concatenate([k, new_k[b]]), np.concatenate([v, new_v[b]]))
        close(o[b], wanted, 1e-5)
        assert (pages_k[table[b, seqlens[b] // 16], seqlens[b] % 16] == new_k[b, 0]).all()


def reference_mla(q, kv, scale, causal=True):
    """Of one sequence: q [seqlen_q, heads, 576] and all its keys [tokens, 576]; o [seqlen_q, heads, 512] and lse [heads, seqlen_q]."""
    keys, queries = exact(kv), exact(q)
    scores = np.einsum("shd,td->hst", queries, keys) * scale
    if causal:
        hidden = np.arange(len(kv))[None, :] > np.arange(len(q))[:, None] + len(kv) - len(q)
        scores = np.where(hidden, -np.inf, scores)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hst,td->shd", weights / total, keys[:, :512]), (np.log(total) + largest)[..., 0]


def test_mla_decode(random):
    """Pages in any order, of which those that nobody has are NaN."""
    q = normal(random, 2, 2, 4, 576).astype(np.float16)
    pages = np.full((7, 16, 576), np.nan, np.float16)
    table, seqlens = np.array([[5, 2, 0], [1, 6, 3]], np.int32), np.array([20, 33], np.int32)
    tokens = [normal(random, n, 576).astype(np.float16) for n in seqlens]
    for b, kv in enumerate(tokens):
        for t in range(seqlens[b]):
            pages[table[b, t // 16], t % 16] = kv[t]
    o, lse = ops.mla_decode(q, pages, seqlens=seqlens, block_table=table, scale=0.1, return_lse=True)
    assert o.shape == (2, 2, 4, 512) and o.dtype == np.float16 and lse.shape == (2, 4, 2)
    for b, kv in enumerate(tokens):
        wanted, wanted_lse = reference_mla(q[b], kv, 0.1)
        close(o[b], wanted, 2e-3)
        close(lse[b], wanted_lse, 1e-3)
    out = np.empty((2, 2, 4, 512), np.float16)
    full = np.stack([tokens[1], tokens[1]])
    assert ops.mla_decode(q, full, causal=False, num_splits=2, out=out) is out
    close(out[0], reference_mla(q[0], tokens[1], 576**-0.5, causal=False)[0], 2e-3)


def test_mla_sparse(random):
    """Lists with entries that name no token; tokens that no list names are NaN."""
    q = normal(random, 3, 4, 576).astype(np.float16)
    indices = np.array([[3, -1, 8, 3], [0, 50, 6, 1], [-1, 99, 2, 4]], np.int32)
    lengths, sink = np.array([4, 3, 2], np.int32), normal(random, 4)
    listed = [[3, 8, 3], [0, 6], []]
    kv = np.full((10, 576), np.nan, np.float16)
    for token in (0, 3, 6, 8):
        kv[token] = normal(random, 576)
    o, lse, max_logits = ops.mla_sparse(
        q, kv, indices, topk_length=lengths, scale=0.1, sink=sink, return_lse=True, return_max_logits=True
    )
    assert o.shape == (3, 4, 512) and o.dtype == np.float16 and lse.shape == max_logits.shape == (3, 4)
    for i, tokens in enumerate(listed[:2]):
        wanted, wanted_lse = reference_mla(q[i : i + 1], kv[tokens], 0.1, causal=False)
        share = 1 / (1 + np.exp(sink - wanted_lse[:, 0]))
        close(o[i], wanted[0] * share[:, None], 2e-3)
        close(lse[i], wanted_lse[:, 0], 1e-3)
        close(max_logits[i], (exact(q[i]) @ exact(kv[tokens]).T * 0.1).max(-1), 1e-3)
    assert (o[2] == 0).all() and (lse[2] == -np.inf).all() and (max_logits[2] == -np.inf).all()
    pages = kv.reshape(2, 5, 576)
    out = np.empty_like(o)
    assert ops.mla_sparse(q, pages, indices, topk_length=lengths, scale=0.1, sink=sink, out=out) is out
    np.testing.assert_array_equal(out, o)
    _, only_lse = ops.mla_sparse(q, kv, indices, topk_length=lengths, num_splits=2, scale=0.1, return_lse=True)
    close(only_lse[:2], lse[:2], 1e-3)
    _, only_max = ops.mla_sparse(q, kv, indices, topk_length=lengths, num_splits=2, scale=0.1, return_max_logits=True)
    close(only_max[:2], max_logits[:2], 1e-3)
    for call, part in [
        (lambda: ops.mla_sparse(q[0], kv, indices), "q"),
        (lambda: ops.mla_sparse(q, kv[:, :512], indices), r"kv is f16\[10, 1, 512\]"),
        (lambda: ops.mla_sparse(q, kv, indices[:2]), r"indices is i32\[2, 4\]"),
        (lambda: ops.mla_sparse(q, kv, indices, scale=0.0), "scale is 0.0"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


def test_mla_sparse_backward(random):
    q, kv, d_o = (normal(random, *shape).astype(np.float16) for shape in ((3, 4, 576), (10, 576), (3, 4, 512)))
    indices, lengths = np.array([[3, -1, 8, 3], [0, 50, 6, 1], [2, 2, 2, 4]], np.int32), np.array([4, 3, 0], np.int32)
    o, lse = ops.mla_sparse(q, kv, indices, topk_length=lengths, scale=0.05, return_lse=True)
    dq, dkv = ops.mla_sparse_backward(q, kv, indices, o, lse, d_o, topk_length=lengths, scale=0.05, deterministic=True)
    wanted_dq, wanted_dkv = np.zeros((3, 4, 576)), np.zeros((10, 576))
    for i, rows in enumerate([[3, 8, 3], [0, 6]]):
        k = exact(kv[rows])
        scores = exact(q[i]) @ k.T * 0.05
        weights = np.exp(scores - exact(lse[i])[:, None])
        products = exact(d_o[i]) @ k[:, :512].T
        ds = 0.05 * weights * (products - (exact(d_o[i]) * exact(o[i])).sum(-1, keepdims=True))
        wanted_dq[i] = ds @ k
        for n, row in enumerate(rows):
            wanted_dkv[row] += ds[:, n] @ exact(q[i])
            wanted_dkv[row, :512] += weights[:, n] @ exact(d_o[i])
    assert dq.dtype == dkv.dtype == np.float16
    close(dq, wanted_dq, 2e-3)
    close(dkv, wanted_dkv, 2e-3)
    for call, part in [
        (lambda: ops.mla_sparse_backward(q, kv[None], indices, o, lse, d_o), r"kv is f16\[1, 10, 576\]"),
        (lambda: ops.mla_sparse_backward(q, kv, indices, o, lse, d_o, scale=0.0), "scale is 0.0"),
        (lambda: ops.mla_sparse_backward(q, kv, indices, o, lse, d_o, topk_length=lengths[:2]), r"topk_length is i32\[2\]"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


def reference_indexer(q, k, weights, scale):
    """[queries, keys] in float64."""
    products = np.maximum(np.einsum("qhd,kd->qkh", exact(q), exact(k)), 0)
    return np.einsum("qkh,qh->qk", products, exact(weights)) * scale


def test_nsa(random):
    q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in ((1, 70, 4, 16), (1, 70, 2, 16), (1, 70, 2, 24)))
    lists = np.stack([np.full((70, 2), b, np.int32) for b in (1, 0, 0, -1, 5)], -1)[None]
    o, lse = ops.nsa_selected(q, k, v, lists, block_size=32, return_lse=True)
    scores = np.einsum("bthd,bkhd->bthk", q, k.repeat(2, 2)) / 4
    scores[:, np.arange(70)[:, None, None] < np.arange(70) + 0 * np.arange(4)[:, None]] = -np.inf
    scores[..., 64:] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    close(lse, np.log(weights.sum(-1)) + scores.max(-1), 1e-4)
    close(o, np.einsum("bthk,bkhd->bthd", weights / weights.sum(-1, keepdims=True), v.repeat(2, 2)), 1e-4)
    out = np.zeros_like(o)
    counts = np.zeros((1, 70, 2), np.int32)
    assert ops.nsa_selected(q, k, v, lists, block_size=32, block_counts=counts, out=out) is out
    close(out, np.zeros_like(o), 0)
    dq, dk, dv = ops.nsa_selected_backward(q, k, v, lists, o, lse, np.ones_like(o), block_size=32)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    close(dk[:, 64:], np.zeros_like(dk[:, 64:]), 0)

    k_cmp, v_cmp = (x[:, :64].reshape(1, 2, 32, 2, -1).mean(2) for x in (k, v))
    o_cmp, lse = ops.nsa_compressed(q, k_cmp, v_cmp, block_size=32, return_lse=True)
    assert np.all(np.isneginf(lse[:, :31])) and np.all(np.isfinite(lse[:, 31:]))
    close(o_cmp[:, 31:63], np.broadcast_to(v_cmp[:, :1].repeat(2, 2), (1, 32, 4, 24)), 1e-5)
    selected = ops.nsa_select(q, k_cmp, lse, 4, block_size=32)
    assert selected[0, 0, 0].tolist() == [0, -1, -1, -1] and selected[0, 69, 1].tolist() == [2, 0, 1, -1]
    gates = random.standard_normal((2, 1, 70, 4)).astype(np.float32)
    close(ops.nsa_combine((o, o_cmp), tuple(gates)), gates[0][..., None] * o + gates[1][..., None] * o_cmp, 1e-5)
    for call, message in (
        (lambda: ops.nsa_selected(q[0], k, v, lists), "q has 3 dimensions|q is f32"),
        (lambda: ops.nsa_selected(q, k, v, lists[:, :3]), r"block_indices is i32\[1, 3, 2, 5\]"),
        (lambda: ops.nsa_compressed(q, k_cmp, v_cmp, block_size=16), "block_size is 16"),
        (lambda: ops.nsa_select(q, k_cmp, lse, 4, initial_blocks=-1), "initial_blocks is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_vertical_slash(random):
    q, k, v = (normal(random, 1, 150, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, 24)))
    vertical = np.array([[[3, 149, 3, -1]] * 4], np.int32)
    slash = np.array([[[0, 70], [0, 0], [140, 500], [1, 2]]], np.int32)
    lists = ops.vertical_slash_index(vertical, slash, 150)
    block_count, block_offset, column_count, column_index = lists
    assert [x.shape for x in lists] == [(1, 4, 3), (1, 4, 3, 2), (1, 4, 3), (1, 4, 3, 4)]
    # MInference's blocks of the last 64 queries, [128, 192): they end with end - distance, and grow by whole blocks.
    assert [block_offset[0, h, 2, :n].tolist() for h, n in enumerate(block_count[0, :, 2])] == [[58, 128], [128], [0], [126, 190]]
    assert [column_index[0, h, 2, :n].tolist() for h, n in enumerate(column_count[0, :, 2])] == [[3], [3], [149], [3]]
    o, lse = ops.vertical_slash_attention(q, k, v, vertical, slash, return_lse=True)
    seen = np.zeros((4, 150, 150), bool)
    for h in range(4):
        for i in range(150):
            for first in block_offset[0, h, i // 64, : block_count[0, h, i // 64]]:
                seen[h, i, first : first + 64] = True
            seen[h, i, column_index[0, h, i // 64, : column_count[0, h, i // 64]]] = True
    scores = np.where(seen & np.tri(150, dtype=bool), np.einsum("bihd,bjhd->bhij", q, k.repeat(2, 2)) / 4, -np.inf)[0]
    most = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - most)
    sums = weights.sum(-1, keepdims=True)
    none = ~(seen & np.tri(150, dtype=bool)).any(-1)
    assert none.any() and np.array_equal(np.isneginf(lse[0]), none)
    close(lse[0][~none], (np.log(np.maximum(sums, 1e-30)) + most)[..., 0][~none], 1e-4)
    close(o, np.einsum("hij,jhd->ihd", weights / np.maximum(sums, 1e-30), v[0].repeat(2, 1))[None], 1e-4)
    out = np.zeros_like(o)
    options = {"query_block": 128, "scale": 0.1, "seqlens": np.array([100], np.int32)}
    assert ops.vertical_slash_attention(q, k, v, vertical, slash, **options, out=out) is out
    assert out[0, :100].any() and not out[0, 100:].any()
    for call, message in (
        (lambda: ops.vertical_slash_attention(q[0], k, v, vertical, slash), "q has 3 dimensions"),
        (lambda: ops.vertical_slash_attention(q, k, v, vertical[:, :2], slash), r"vertical is i32\[1, 2, 4\]"),
        (lambda: ops.vertical_slash_attention(q, k, v, vertical, slash, query_block=0), "query_block is 0"),
        (lambda: ops.vertical_slash_attention(q, k, v, vertical, slash, scale=0.0), "scale is 0.0"),
        (lambda: ops.vertical_slash_index(vertical, slash[0], 150), "slash has 2 dimensions"),
        (lambda: ops.vertical_slash_index(vertical, slash, -1), "seqlen is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_indexer_scores(random):
    q, k = normal(random, 5, 20, 128).astype(np.float16), normal(random, 70, 128).astype(np.float16)
    weights = normal(random, 5, 20)
    wanted = reference_indexer(q, k, weights, 1)
    close(ops.indexer_scores(q, k, weights), wanted, 1e-5)
    starts, ends = np.array([0, 3, 70, -5, 20], np.int32), np.array([70, 4, 80, 9, 10], np.int32)
    columns = np.arange(70)
    seen = (columns >= starts[:, None]) & (columns < ends[:, None])
    scores = ops.indexer_scores(q, k, weights, starts=starts, ends=ends, num_splits=2)
    assert (scores[~seen] == -np.inf).all()
    close(scores[seen], wanted[seen], 1e-5)
    out = np.full_like(scores, 7)
    assert ops.indexer_scores(q, k, weights, causal=True, clear=False, out=out) is out
    seen = columns < 70 - 5 + 1 + np.arange(5)[:, None]
    assert (out[~seen] == 7).all()
    close(out[seen], wanted[seen], 1e-5)
    for call, part in [
        (lambda: ops.indexer_scores(q[0], k, weights), "q has 2 dimensions"),
        (lambda: ops.indexer_scores(q, k[:, :64], weights), r"k is f16\[70, 64\]"),
        (lambda: ops.indexer_scores(q, k, weights[:, :3]), r"weights is f32\[5, 3\]"),
        (lambda: ops.indexer_scores(q, k, weights, k_scale=normal(random, 70)), "only keys of fp8_e4m3"),
        (lambda: ops.indexer_scores(q, k, weights, ends=ends[:2]), r"ends is i32\[2\]"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


def test_indexer_scores_paged(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fp8 = ml_dtypes.float8_e4m3fn
    q, weights = normal(random, 2, 2, 16, 128).astype(fp8), normal(random, 2, 2, 16)
    keys, scales = normal(random, 4, 64, 128).astype(fp8), normal(random, 4, 64)
    cache = np.concatenate([keys.reshape(4, -1).view(np.uint8), scales.view(np.uint8)], axis=1).reshape(4, 64, 132)
    table, seqlens = np.array([[3, 1], [0, -1]], np.int32), np.array([100, 70], np.int32)
    scores = ops.indexer_scores_paged(q, cache, weights, table, seqlens=seqlens)
    assert scores.shape == (2, 2, 128)
    for b in range(2):
        pages = table[b][table[b] >= 0]
        wanted = reference_indexer(q[b], keys[pages].reshape(-1, 128), weights[b], scales[pages].reshape(-1))
        for i in range(2):
            end = min(seqlens[b] - 1 + i, len(pages) * 64)
            close(scores[b, i, :end], wanted[i, :end], 1e-5)
            assert (scores[b, i, end:] == -np.inf).all()
    of_queries = np.array([[100, 99], [0, 64]], np.int32)
    by_query = ops.indexer_scores_paged(q, cache, weights, table, seqlens=of_queries, columns=110)
    for i in range(2):
        end = of_queries[0, i]
        np.testing.assert_array_equal(by_query[0, i, :99], scores[0, i, :99])
        assert np.isfinite(by_query[0, i, :end]).all() and (by_query[0, i, end:] == -np.inf).all()
    assert (by_query[1, 0] == -np.inf).all()
    out = np.empty_like(scores)
    assert ops.indexer_scores_paged(q, cache.view(fp8), weights, table, seqlens=seqlens, out=out) is out
    np.testing.assert_array_equal(out, scores)
    for call, part in [
        (lambda: ops.indexer_scores_paged(q[0], cache, weights, table), "q has 3 dimensions"),
        (lambda: ops.indexer_scores_paged(q, cache[:, :32], weights, table), r"k_cache is u8\[4, 32, 132\]"),
        (lambda: ops.indexer_scores_paged(q, cache, weights, table, seqlens=seqlens[:1]), r"seqlens is i32\[1\]"),
        (lambda: ops.indexer_scores_paged(q, cache, weights, table, columns=5, out=out), "columns is 5; out has 128"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


def test_mla_append(random):
    latent, rotary = normal(random, 2, 3, 512).astype(np.float16), normal(random, 2, 3, 64).astype(np.float16)
    cos, sin = normal(random, 40, 32), normal(random, 40, 32)
    cache = np.zeros((5, 16, 576), np.float16)
    table, seqlens = np.array([[3, 1], [0, 4]], np.int32), np.array([15, 2], np.int32)
    assert ops.mla_append(latent, rotary, cache, seqlens=seqlens, block_table=table, rotary_cos=cos, rotary_sin=sin) is cache
    wanted = np.zeros_like(cache)
    for b in range(2):
        for i in range(3):
            token = seqlens[b] + i
            x, y = exact(rotary[b, i, ::2]), exact(rotary[b, i, 1::2])
            row = wanted[table[b, token // 16], token % 16]
            row[:512] = latent[b, i]
            row[512::2], row[513::2] = x * cos[token] - y * sin[token], y * cos[token] + x * sin[token]
    close(cache, wanted, 1e-2)
    np.testing.assert_array_equal(cache[..., :512], wanted[..., :512])
    with pytest.raises(ValueError, match=r"seqlens\[0\] is 30"):
        ops.mla_append(latent, rotary, cache, seqlens=np.array([30, 0], np.int32), block_table=table)


def test_mla_decode_errors(random):
    q, kv = np.zeros((2, 1, 4, 576), np.float16), np.zeros((2, 8, 576), np.float16)
    for call, part in [
        (lambda: ops.mla_decode(q[0], kv), "q"),
        (lambda: ops.mla_decode(q, kv[..., :512]), r"kv_cache is f16\[2, 8, 512\]"),
        (lambda: ops.mla_decode(q, kv, scale=0.0), "scale is 0.0"),
        (lambda: ops.mla_decode(q, kv, num_splits=200), "num_splits is 200"),
        (lambda: ops.mla_decode(q, kv, seqlens=np.array([3, 9], np.int32)), r"seqlens\[1\] is 9"),
        (lambda: ops.mla_decode(q, kv, block_table=np.array([[0], [2]], np.int32)), r"block_table\[1, 0\] is 2"),
    ]:
        with pytest.raises(ValueError, match=part):
            call()


class OnlyDLPack:
    """What another library's array looks like."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(random):
    x, y = normal(random, 6, 8), np.empty((8, 6), np.float32)
    ops.add(OnlyDLPack(x.T), OnlyDLPack(x.T), out=y)
    assert (y == 2 * x.T).all()
    with pytest.raises(TypeError, match="out must be given"):
        ops.softmax(OnlyDLPack(x))


@pytest.mark.parametrize(
    "call, error, parts",
    [
        (lambda x: ops.softmax([1.0]), TypeError, "x is a list"),
        (lambda x: ops.softmax(x.astype(np.float64)), TypeError, "x has dtype float64"),
        (lambda x: ops.softmax(x.astype(">f4")), TypeError, "byte order"),
        (lambda x: ops.softmax(np.zeros((1,) * 5, np.float32)), ValueError, "x has 5 dimensions"),
        (lambda x: ops.softmax(x, out=np.empty((4, 5), np.float32)), ValueError, r"out is f32\[4, 5\]"),
        (lambda x: ops.add(x, x[:, :3]), ValueError, "b has shape"),
        (lambda x: ops.gemm(x, x), ValueError, "K, must be equal"),
        (lambda x: ops.gemm(x, x.T, activation="tanh"), ValueError, "activation is 'tanh'"),
        (lambda x: ops.gemm(x, x.T, beta=1.0), ValueError, "beta is 1.0"),
        (lambda x: ops.reduce(x, "median"), ValueError, "reduction is 'median'"),
        (lambda x: ops.reduce(x, "sum", dim=2), ValueError, "dim is 2"),
        (lambda x: ops.topk(x, 3000), ValueError, "k is 3000"),
        (lambda x: ops.moe_route(x, 17), ValueError, "k is 17"),
        (lambda x: ops.moe_route(x, 2, score="relu"), ValueError, "score is 'relu'; allowed: softmax, sigmoid"),
        (lambda x: ops.moe_route(x, 2, groups=0), ValueError, "groups is 0"),
        (lambda x: ops.moe_route(x, 2, groups=3), ValueError, "groups is 3"),
        (lambda x: ops.moe_permutation(x.astype(np.int32), 1 << 32), ValueError, "n_experts is 4294967296"),
        # What ctypes would wrap, or what the C interface takes as a default.
        (lambda x: ops.topk(x, (1 << 32) + 1), ValueError, "k is 4294967297"),
        (lambda x: ops.gemm(x, x.T, num_splits=(1 << 32) + 1), ValueError, "num_splits is 4294967297"),
        (lambda x: ops.gemm(x, x.T, num_splits=1.0), TypeError, "num_splits is 1.0; allowed: an integer"),
        (lambda x: ops.reduce(x, "sum", dim=1 << 32), ValueError, "dim is 4294967296"),
        (lambda x: ops.rope(x[None, :, None], x, x, offset=1 << 64), ValueError, "offset is 18446744073709551616"),
        (lambda x: ops.conv1d(x[None], x[None], stride=0), ValueError, "stride is 0; allowed: 1 to"),
        (lambda x: ops.conv1d(x[None], x[None], dilation=0), ValueError, "dilation is 0; allowed: 1 to"),
        (lambda x: ops.conv1d(x[None], x[None], padding=-1), ValueError, "padding is -1; allowed: 0 to"),
        (lambda x: ops.conv1d(x[None], x[None], stride=(1 << 64) + 1), ValueError, "stride is 18446744073709551617"),
        (lambda x: ops.conv2d(x[None, None], x[None, None], stride=(1, 0)), ValueError, "stride is 0"),
        (lambda x: ops.conv2d(x[None, None], x[None, None], stride=(1, 1, 1)), ValueError, r"stride is \(1, 1, 1\)"),
        (lambda x: ops.attention(*[x[None, :, None]] * 3, window=((1 << 32) + 3, 0)), ValueError, "window is 4294967299"),
        (lambda x: ops.attention(*[x[None, :, None]] * 3, causal_offset=1 << 32), ValueError, "causal_offset is 4294967296"),
        (lambda x: ops.attention(*[x[None, :, None]] * 3, scale=0.0), ValueError, "scale is 0.0; it must be positive"),
        (lambda x: ops.attention(*[x[None, :, None]] * 3, scale=1e-60), ValueError, "scale is 1e-60"),
        (lambda x: ops.attention(*[x[None, :, None]] * 3, softcap=-1.0), ValueError, "softcap is -1.0"),
        (lambda x: ops.attention_decode(*[x[None, :, None]] * 3, num_splits=1 << 32), ValueError, "num_splits is 4294967296"),
        (lambda x: ops.attention(x, x, x), ValueError, "q has 2 dimensions"),
        (lambda x: ops.attention(*[x[None, :, None, :6]] * 3), ValueError, "multiple of 8"),
        (lambda x: ops.attention(*[x[None, :, None]] * 3, window=(-2, 0)), ValueError, "window_left is -2"),
    ],
)
def test_bad_input(random, call, error, parts):
    with pytest.raises(error, match=parts):
        call(normal(random, 5, 8))


def test_read_only_and_odd_strides(random):
    x = normal(random, 3, 4)
    x.flags.writeable = False
    assert ops.softmax(x).shape == (3, 4)
    with pytest.raises(ValueError, match="out is read-only"):
        ops.softmax(x, out=x)
    packed = np.zeros(3, np.dtype([("a", np.uint8), ("b", np.float32)]))
    with pytest.raises(ValueError, match="strides"):
        ops.softmax(packed["b"])


def test_errors_are_what_they_say():
    assert issubclass(tilewave.DeviceError, RuntimeError) and issubclass(tilewave.CompileError, RuntimeError)


def selective_scan(x, dt, A, B, C, D, z, states):
    """Mamba-2, step by step in double, with step sizes as they are used: (y, states). B and C have a head for each of x."""
    y = np.empty(x.shape)
    for t in range(x.shape[1]):
        states = np.exp(dt[:, t] * A)[:, :, None, None] * states + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        y[:, t] = np.einsum("bhpn,bhn->bhp", states, C[:, t]) + D * x[:, t]
    return y * z / (1 + np.exp(-z)), states


def mamba2_operands(random, dtype=np.float32, seqlen=70):
    x, z = normal(random, 2, seqlen, 4, 8, dtype=dtype), normal(random, 2, seqlen, 4, 8, dtype=dtype)
    B, C = (normal(random, 2, seqlen, 2, 16) / 4).astype(dtype), normal(random, 2, seqlen, 2, 16, dtype=dtype)
    A, D = np.array([-0.5, -1, 0, -20], np.float32), normal(random, 4, 8)
    return x, normal(random, 2, seqlen, 4, dtype=dtype) - dtype(1), A, B, C, D, z, normal(random, 4), normal(random, 2, 4, 8, 16)


def step_sizes(dt, bias, limit=(0, np.inf)):
    return np.clip(np.logaddexp(0, exact(dt) + exact(bias)), *limit)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_mamba2(random, dtype):
    x, dt, A, B, C, D, z, bias, initial = mamba2_operands(random, dtype)
    wide = [np.repeat(exact(array), 2, axis=2) for array in (B, C)]

    def wanted(sizes, states, steps=slice(None), batch=slice(None)):
        inputs = [array[batch, steps] for array in (exact(x), sizes, *wide, exact(z))]
        return selective_scan(*inputs[:2], exact(A), *inputs[2:4], exact(D), inputs[4], exact(states))

    def check(got, expected):
        tolerance = 1e-5 if dtype == np.float32 else 4e-3
        for a, b in zip(got, expected):
            np.testing.assert_allclose(exact(a), b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1))

    given = {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True}
    got = ops.mamba2(x, dt, A, B, C, **given, initial_states=initial, return_final_states=True)
    check(got, wanted(step_sizes(dt, bias), initial))
    out = np.full_like(x, np.nan)
    assert ops.mamba2(x, dt, A, B, C, **given, dt_limit=(0.1, 0.4), out=out) is out
    check((out,), wanted(step_sizes(dt, bias, (0.1, 0.4)), np.zeros_like(initial)))

    stepped = initial.copy()
    first = ops.mamba2_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], stepped, **{**given, "z": z[:, 0]})
    rest = ops.mamba2_step(*(array[:, 1:3] for array in (x, dt)), A, B[:, 1:3], C[:, 1:3], stepped, **{**given, "z": z[:, 1:3]})
    check((np.concatenate([first[:, None], rest], 1), stepped), wanted(step_sizes(dt, bias), initial, slice(3)))
    pool = np.stack([np.full_like(initial[0], 7), initial[1], initial[0]])
    y = ops.mamba2_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], pool, **{**given, "z": z[:, 0]}, state_indices=np.array([2, -1], np.int32))
    check((y[:1, None], pool[2:]), wanted(step_sizes(dt, bias), initial[:1], slice(1), slice(1)))
    assert (y[1] == 0).all() and (pool[:2] == np.stack([np.full_like(initial[0], 7), initial[1]])).all()

    packed = [array[:1] for array in (x, dt)] + [A] + [array[:1] for array in (B, C)]
    y, states = ops.mamba2(
        *packed, **{**given, "z": z[:1]}, cu_seqlens=np.array([0, 3, 70], np.int32), initial_states=initial, return_final_states=True
    )
    numbered = ops.mamba2(*packed, **{**given, "z": z[:1]}, seq_idx=np.repeat(np.array([[4, 1]], np.int32), [3, 67], axis=1))
    for n, steps in enumerate((slice(3), slice(3, 70))):
        check((y[:, steps], states[n : n + 1]), wanted(step_sizes(dt, bias), initial[n : n + 1], steps, slice(1)))
        check((numbered[:, steps],), wanted(step_sizes(dt, bias), np.zeros_like(initial[:1]), steps, slice(1)))


def test_mamba2_backward(random):
    x, dt, A, B, C, D, z, bias, initial = mamba2_operands(random, seqlen=9)
    dy, d_states = normal(random, *x.shape), normal(random, *initial.shape)
    given = {"D": D, "z": z, "dt_bias": bias, "initial_states": initial}
    gradients = ops.mamba2_backward(x, dt, A, B, C, dy, **given, dt_softplus=True, d_final_states=d_states)
    inputs = [exact(array) for array in (x, dt, A, B, C, D, z, bias, initial)]

    def loss():
        wide = [np.repeat(array, 2, axis=2) for array in inputs[3:5]]
        y, states = selective_scan(inputs[0], step_sizes(inputs[1], inputs[7]), inputs[2], *wide, *inputs[5:7], inputs[8])
        return (y * exact(dy)).sum() + (states * exact(d_states)).sum()

    for name, got, array in zip(("dx", "d_dt", "dA", "dB", "dC", "dD", "dz", "d_dt_bias", "d_initial_states"), gradients, inputs):
        assert got.shape == array.shape and got.dtype == np.float32
        places = random.permutation(array.size)[:30]
        wanted = finite_differences(loss, array, places)
        np.testing.assert_allclose(got.reshape(-1)[places], wanted, rtol=0, atol=2e-5 * max(np.abs(wanted).max(), 1), err_msg=name)
    assert ops.mamba2_backward(x, dt, A, B, C, dy)[5:] == (None,) * 4
    positive = np.abs(dt)  # step sizes below 0 count as 0, and so do their gradients
    packed = ops.mamba2_backward(x[:1], positive[:1], A, B[:1], C[:1], dy[:1], cu_seqlens=np.array([0, 5], np.int32))
    for gradient in (packed[0], packed[1], packed[3], packed[4]):
        assert (gradient[:, :5] != 0).any() and (gradient[:, 5:] == 0).all()


def test_mamba2_in_five_steps(random):
    x, dt, A, B, C, D, z, bias, initial = mamba2_operands(random, np.float16)
    wide = [np.repeat(exact(array), 2, axis=2) for array in (B, C)]
    sizes = step_sizes(dt, bias, (0.1, 0.4))
    y, last = selective_scan(exact(x), sizes, exact(A), *wide, exact(D), exact(z), exact(initial))

    sums, rounded = ops.mamba2_chunk_cumsum(dt, A, 32, dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 0.4))
    assert sums.shape == rounded.shape == (2, 4, 3, 32) and sums.dtype == np.float32
    padded = np.pad(sizes, ((0, 0), (0, 26), (0, 0))).reshape(2, 3, 32, 4).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(rounded, padded, rtol=1e-5)
    np.testing.assert_allclose(sums, (padded * exact(A)[:, None, None]).cumsum(-1), rtol=1e-5, atol=1e-5)
    added = ops.mamba2_chunk_state(B, x, rounded, sums)
    states, final = ops.mamba2_state_passing(added, sums[..., -1], initial_states=initial, dtype="float16")
    assert states.dtype == np.float16 and states.shape == added.shape == (2, 3, 4, 8, 16)
    np.testing.assert_allclose(final, last, rtol=0, atol=4e-3 * np.abs(last).max())
    CB = ops.mamba2_bmm_chunk(C, B, 32)
    np.testing.assert_allclose(CB[:, 0], np.einsum("bign,bjgn->bgij", exact(C[:, :32]), exact(B[:, :32])), rtol=1e-4, atol=1e-4)
    assert (np.triu(ops.mamba2_bmm_chunk(C, B, 32, causal=True), 1) == 0).all()
    got, ungated = ops.mamba2_chunk_scan(CB, x, rounded, sums, C, states, D=D, z=z, return_ungated=True)
    np.testing.assert_allclose(exact(got), y, rtol=0, atol=4e-3 * np.abs(y).max())
    plain = ops.mamba2_chunk_scan(CB, x, rounded, sums, C, states, D=D)
    np.testing.assert_array_equal(plain, ungated)
    numbered = ops.mamba2_chunk_cumsum(dt, A, 32, seq_idx=np.arange(140, dtype=np.int32).reshape(2, 70))[0]
    assert (numbered[:, :, 0, 1] - numbered[:, :, 0, 0] < -110).all()

    for message, call in (
        (r"chunk_size is 0", lambda: ops.mamba2_bmm_chunk(C, B, 0)),
        (r"multiple of 16", lambda: ops.mamba2_chunk_cumsum(dt, A, 20)),
        (r"dt is f32\[2, 4, 3, 16\]", lambda: ops.mamba2_chunk_state(B, x, rounded[..., :16], sums)),
        (r"states has 4 dimensions", lambda: ops.mamba2_state_passing(added[0], sums[..., -1])),
        (r"dtype is 'int4'", lambda: ops.mamba2_state_passing(added, sums[..., -1], dtype="int4")),
        (r"states is f32\[2, 3, 4, 8, 16\]", lambda: ops.mamba2_chunk_scan(CB, x, rounded, sums, C, added)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_gradients_of_mamba2_in_five_steps(random):
    x, dt, A, B, C, D, z, bias, initial = mamba2_operands(random, np.float16)
    dy = random.standard_normal(x.shape, np.float32).astype(np.float16)
    given = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 0.4)}
    sums, sizes = ops.mamba2_chunk_cumsum(dt, A, 32, **given)
    added = ops.mamba2_chunk_state(B, x, sizes, sums)
    states, _ = ops.mamba2_state_passing(added, sums[..., -1], initial_states=initial, dtype="float16")
    CB = ops.mamba2_bmm_chunk(C, B, 32, causal=True)
    ungated = ops.mamba2_chunk_scan(CB, x, sizes, sums, C, states, D=D)

    scan = ops.mamba2_chunk_scan_backward(CB, x, sizes, sums, C, states, dy, D=D, z=z, ungated=ungated)
    d_CB, dx, d_sizes, d_sums, dC, d_states, dD, dz = scan
    assert ops.mamba2_chunk_scan_backward(CB, x, sizes, sums, C, states, dy)[6:] == (None, None)
    d_added, d_decays, d_initial = ops.mamba2_state_passing_backward(states, sums[..., -1], d_states, d_final_states=initial)
    products = ops.mamba2_bmm_chunk_backward(C, B, d_CB, causal=True)
    dB, dx_of_state, *of_steps = ops.mamba2_chunk_state_backward(B, x, sizes, sums, d_added)
    d_sums[..., -1] += d_decays
    d_dt, dA, d_bias = ops.mamba2_chunk_cumsum_backward(dt, A, d_sums + of_steps[1], d_sizes + of_steps[0], **given)
    assert ops.mamba2_chunk_cumsum_backward(dt, A, d_sums, d_sizes)[2] is None

    got = (dx + dx_of_state, d_dt, dA, dB + products[1], dC + products[0], dD, dz, d_bias, d_initial)
    options = {"D": D, "initial_states": initial, "d_final_states": initial, **given}
    names = ("dx", "d_dt", "dA", "dB", "dC", "dD", "dz", "d_dt_bias", "d_initial_states")
    in_f32 = (array.astype(np.float32) for array in (x, dt, A, B, C, dy))  # in f16 the other form's own error is larger
    for name, a, b in zip(names, got, ops.mamba2_backward(*in_f32, **options, z=z.astype(np.float32))):
        assert a.shape == b.shape and a.dtype == (np.float16 if name in ("dx", "d_dt", "dB", "dC", "dz") else np.float32)
        np.testing.assert_allclose(exact(a), b, rtol=0, atol=1e-2 * max(np.abs(b).max(), 1), err_msg=name)

    for message, call in (
        (r"d_states has 4 dimensions", lambda: ops.mamba2_chunk_state_backward(B, x, sizes, sums, d_added[0])),
        (r"d_CB has 4 dimensions", lambda: ops.mamba2_bmm_chunk_backward(C, B, d_CB[0])),
        (r"ungated is not; it must be given", lambda: ops.mamba2_chunk_scan_backward(CB, x, sizes, sums, C, states, dy, z=z)),
        (r"d_passed is f16", lambda: ops.mamba2_state_passing_backward(states, sums[..., -1], states)),
        (r"d_dA_cumsum is f32\[2, 4, 3, 16\]", lambda: ops.mamba2_chunk_cumsum_backward(dt, A, d_sums[..., :16], d_sizes)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_mamba2_refuses(random):
    x, dt, A, B, C, D, z, bias, initial = mamba2_operands(random, seqlen=5)
    for part, call in (
        (r"dt is f32\[2, 5\].*it must be \[2, 5, 4\]", lambda: ops.mamba2(x, dt[..., 0], A, B, C)),
        (r"A is f32\[3\].*it must be f32\[4\]", lambda: ops.mamba2(x, dt, A[:3], B, C)),
        (r"D is f32\[8\].*it must be f32\[4\] or f32\[4, 8\]", lambda: ops.mamba2(x, dt, A, B, C, D=D[0])),
        (r"dt_max is 1.*at least dt_min, 2", lambda: ops.mamba2(x, dt, A, B, C, dt_limit=(2, 1))),
        (r"states is f32\[2, 4, 16, 8\]", lambda: ops.mamba2_step(x, dt, A, B, C, initial.swapaxes(2, 3))),
        (r"dy is f32\[2, 5, 4, 4\]", lambda: ops.mamba2_backward(x, dt, A, B, C, x[..., :4])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=part):
            call()
