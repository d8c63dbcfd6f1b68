"""Layers whose work is linear in the sequence's length: causal convolutions of a few time steps, and the gated delta rule."""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define

_causal_conv1d = _library.bind("tw_causal_conv1d", out="y")
_causal_conv1d_update = _library.bind("tw_causal_conv1d_update", out="y")
_causal_conv1d_backward = _library.bind("tw_causal_conv1d_backward")
_gated_delta_rule = _library.bind("tw_gated_delta_rule", out="o")
_gated_delta_rule_step = _library.bind("tw_gated_delta_rule_step", out="o")
_gated_delta_rule_backward = _library.bind("tw_gated_delta_rule_backward")


def _is_silu(activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation is {activation!r}; None, 'silu' and 'swish' are taken")
    return activation is not None


def _sequences(x: Array, cu_seqlens: Array | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _state_shape(x: Array, weight: Array, cu_seqlens: Array | None) -> tuple:
    return (_sequences(x, cu_seqlens), x.shape[2], weight.shape[1] - 1)


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    initial_state: Array | None = None,
    return_final_state: bool = False,
    cu_seqlens: Array | None = None,
    out: Array | None = None,
):
    """Depthwise causal convolution: y[b, t, c] = bias[c] + sum of weight[c, k] x[b, t - width + 1 + k, c] over k, or silu of that.

    x: [batch, seqlen, channels] of f32, f16 or bf16; weight: [channels, width], of width 2 to 4, of x's dtype or f32; bias: [channels], of
    the weight's dtype. activation: None, "silu" or "swish", the same. initial_state: [sequences, channels, width - 1] of x's dtype, the
    inputs before x, the oldest first; default: zeros. return_final_state: also returns the last inputs of each sequence, in that shape.
    cu_seqlens: int32 [sequences + 1], where each sequence begins; then batch is 1. PyTorch's autograd differentiates with respect to x,
    weight, bias and initial_state, with the same bits in every run.
    """
    silu = _is_silu(activation)
    _arrays.require_dims(3, x=x)
    _arrays.require_dims(2, weight=weight)
    if _dispatch.through_operator(x, weight, bias, initial_state):
        y, state = _dispatch.compiled_ops().causal_conv1d(x, weight, bias, initial_state, cu_seqlens, silu, return_final_state)
        y = _dispatch.into(out, y)
        return (y, state) if return_final_state else y
    given = tensor("x", x), tensor("weight", weight)
    state = _arrays.empty(x, _state_shape(x, weight, cu_seqlens)) if return_final_state else None
    if out is None:
        out = _arrays.empty(x, x.shape)
    options = _library.CausalConv1dOptions(
        bias=optional("bias", bias),
        initial_state=optional("initial_state", initial_state),
        final_state=optional("final_state", state, written=True),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
        silu=silu,
    )
    _causal_conv1d(*given, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return (out, state) if return_final_state else out


def causal_conv1d_update(
    x: Array, state: Array, weight: Array, bias: Array | None = None, *, activation: str | None = None, out: Array | None = None
) -> Array:
    """causal_conv1d() of the next tokens of a batch, in generation: x [batch, channels], or [batch, seqlen, channels] with up to 16 tokens.

    state: [batch, channels, width - 1] of x's dtype, the last inputs, which is updated in place.
    """
    silu = _is_silu(activation)
    if _dispatch.through_operator(x, state, weight, bias):
        return _dispatch.into(out, _dispatch.compiled_ops().causal_conv1d_update(x, state, weight, bias, silu))
    if out is None:
        out = _arrays.empty(x, x.shape)
    with_time = [array[:, None] if len(x.shape) == 2 else array for array in (x, out)]
    _causal_conv1d_update(
        tensor("x", with_time[0]),
        tensor("state", state, written=True),
        tensor("weight", weight),
        optional("bias", bias),
        tensor("out", with_time[1], written=True),
        silu,
        _arrays.stream(x),
    )
    return out


def causal_conv1d_backward(
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    initial_state: Array | None = None,
    d_final_state: Array | None = None,
    cu_seqlens: Array | None = None,
) -> tuple:
    """The gradients of causal_conv1d() for dy, that of its result: (dx, d_weight, d_bias, d_initial_state).

    d_bias is None without a bias, d_initial_state without an initial state. d_final_state: the gradient of the final state, if that was
    used.
    """
    silu = _is_silu(activation)
    if _dispatch.through_operator(dy, x, weight, bias, initial_state, d_final_state):
        results = _dispatch.compiled_ops().causal_conv1d_backward(dy, x, weight, bias, initial_state, d_final_state, cu_seqlens, silu)
        return _present(results, bias, initial_state)
    given = tensor("dy", dy), tensor("x", x), tensor("weight", weight), optional("d_final_state", d_final_state)
    dx, d_weight = _arrays.empty(x, x.shape), _arrays.empty(weight, weight.shape)
    d_bias = None if bias is None else _arrays.empty(bias, bias.shape)
    d_state = None if initial_state is None else _arrays.empty(initial_state, initial_state.shape)
    options = _library.CausalConv1dOptions(
        bias=optional("bias", bias),
        initial_state=optional("initial_state", initial_state),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
        silu=silu,
    )
    _causal_conv1d_backward(
        *given,
        tensor("dx", dx, written=True),
        tensor("d_weight", d_weight, written=True),
        optional("d_bias", d_bias, written=True),
        optional("d_initial_state", d_state, written=True),
        _library.byref(options),
        _arrays.stream(x),
    )
    return dx, d_weight, d_bias, d_state


def _present(gradients, bias: Array | None, initial_state: Array | None) -> tuple:
    """The operator's results, where those without an input are empty."""
    dx, d_weight, d_bias, d_state = gradients
    return dx, d_weight, None if bias is None else d_bias, None if initial_state is None else d_state


def _delta_options(kind, g, scale, use_qk_l2norm_in_kernel, **states):
    return kind(
        g=optional("g", g),
        has_scale=scale is not None,
        scale=0.0 if scale is None else float(scale),
        normalise_qk=bool(use_qk_l2norm_in_kernel),
        **states,
    )


def _delta_state_shape(q: Array, v: Array, cu_seqlens: Array | None) -> tuple:
    return (_sequences(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    g: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    return_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    out: Array | None = None,
):
    """The gated delta rule: S = (I - beta k k^T) exp(g) S + beta k v^T, o = scale S^T q, from token to token of each sequence and head.

    q, k: [batch, seqlen, heads of keys, dim], dim up to 256, with gates of channels 128; v: [batch, seqlen, heads, values], of one dtype, f32, f16 or bf16; heads is a
    multiple of the heads of keys. beta: [batch, seqlen, heads], of that dtype or f32. g: f32, of that shape, at most 0; default: zeros, the
    delta rule. With g [batch, seqlen, heads, dim] each row of S decays by a gate of its own: Kimi Delta Attention. scale: default dim^-0.5. initial_state: f32 [sequences, heads, dim, values]; default: zeros. return_final_state: also returns
    the states after the last tokens. use_qk_l2norm_in_kernel: divides queries and keys by sqrt(|x|^2 + 1e-6). cu_seqlens: int32
    [sequences + 1], where each sequence begins; then batch is 1. PyTorch's autograd differentiates both results with respect to q, k, v,
    beta, g and initial_state by gated_delta_rule_backward().
    """
    _arrays.require_dims(4, q=q, v=v)
    if _dispatch.through_operator(q, k, v, beta, g, initial_state):
        o, state = _dispatch.compiled_ops().gated_delta_rule(
            q, k, v, beta, g, scale, initial_state, return_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )
        o = _dispatch.into(out, o)
        return (o, state) if return_final_state else o
    given = tensor("q", q), tensor("k", k), tensor("v", v), tensor("beta", beta)
    state = _arrays.empty(q, _delta_state_shape(q, v, cu_seqlens), "float32") if return_final_state else None
    if out is None:
        out = _arrays.empty(v, v.shape)
    options = _delta_options(
        _library.GatedDeltaOptions,
        g,
        scale,
        use_qk_l2norm_in_kernel,
        initial_state=optional("initial_state", initial_state),
        final_state=optional("final_state", state, written=True),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
    )
    _gated_delta_rule(*given, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return (out, state) if return_final_state else out


def gated_delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    state: Array,
    *,
    g: Array | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    out: Array | None = None,
) -> Array:
    """gated_delta_rule() of the next tokens of a batch, in generation. state: f32 [batch, heads, dim, values], updated in place."""
    _arrays.require_dims(4, q=q, v=v)
    if _dispatch.through_operator(q, k, v, beta, state, g):
        result = _dispatch.compiled_ops().gated_delta_rule_step(q, k, v, beta, state, g, scale, use_qk_l2norm_in_kernel)
        return _dispatch.into(out, result)
    given = tensor("q", q), tensor("k", k), tensor("v", v), tensor("beta", beta), tensor("state", state, written=True)
    if out is None:
        out = _arrays.empty(v, v.shape)
    options = _delta_options(_library.GatedDeltaOptions, g, scale, use_qk_l2norm_in_kernel)
    _gated_delta_rule_step(*given, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return out


def gated_delta_rule_backward(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    d_o: Array,
    *,
    g: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    d_final_state: Array | None = None,
) -> tuple:
    """Gradients of gated_delta_rule(): (dq, dk, dv, d_beta, dg, d_initial_state); the last two are None if g or initial_state is.

    q, k, v, beta and the options are those of the gated_delta_rule() call; dim up to 256, with gates of channels dim and values up to 128, on a GPU
    f16 and bf16. d_o is the gradient of o, and d_final_state that of the final state; None is 0. Of tokens that belong to no sequence all gradients are 0. The same bits in every run.
    """
    if _dispatch.through_operator(q, k, v, beta, d_o, g, initial_state, d_final_state):
        *gradients, dg, d_initial = _dispatch.compiled_ops().gated_delta_rule_backward(
            q, k, v, beta, d_o, g, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, d_final_state
        )
        return (*gradients, None if g is None else dg, None if initial_state is None else d_initial)
    inputs = [tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta), ("d_o", d_o))]
    new = _arrays.empty if cu_seqlens is None else lambda like, shape, dtype=None: _arrays.full(like, shape, 0.0, dtype)
    outputs = [new(x, x.shape) for x in (q, k, v, beta)]
    dg = None if g is None else new(q, g.shape, "float32")
    d_initial = None if initial_state is None else _arrays.empty(q, _delta_state_shape(q, v, cu_seqlens), "float32")
    options = _delta_options(
        _library.GatedDeltaBackwardOptions,
        g,
        scale,
        use_qk_l2norm_in_kernel,
        initial_state=optional("initial_state", initial_state),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
        d_final_state=optional("d_final_state", d_final_state),
        dg=optional("dg", dg, written=True),
        d_initial_state=optional("d_initial_state", d_initial, written=True),
    )
    of_outputs = [tensor(name, x, written=True) for name, x in zip(("dq", "dk", "dv", "d_beta"), outputs)]
    _gated_delta_rule_backward(*inputs, *of_outputs, _library.byref(options), _arrays.stream(q))
    return (*outputs, dg, d_initial)


# Operators of PyTorch. A result that was not asked for is empty.


def _operator_conv(x, weight, bias, initial_state, cu_seqlens, silu, return_final_state):
    activation = "silu" if silu else None
    given = {"activation": activation, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if return_final_state:
        return causal_conv1d(x, weight, bias, **given, return_final_state=True)
    return causal_conv1d(x, weight, bias, **given), _arrays.empty(x, (0,))


def _fake_conv(x, weight, bias, initial_state, cu_seqlens, silu, return_final_state):
    return x.new_empty(x.shape), x.new_empty(_state_shape(x, weight, cu_seqlens) if return_final_state else (0,))


def _keep_conv(ctx, inputs, output):
    x, weight, bias, initial_state, cu_seqlens, ctx.silu, ctx.has_final_state = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)


def _differentiate_conv(ctx, dy, d_final_state):
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    d_final_state = d_final_state if ctx.has_final_state else None
    gradients = _dispatch.compiled_ops().causal_conv1d_backward(dy, x, weight, bias, initial_state, d_final_state, cu_seqlens, ctx.silu)
    return *_present(gradients, bias, initial_state), None, None, None


def _operator_conv_backward(dy, x, weight, bias, initial_state, d_final_state, cu_seqlens, silu):
    dx, d_weight, d_bias, d_state = causal_conv1d_backward(
        dy, x, weight, bias, activation="silu" if silu else None, initial_state=initial_state, d_final_state=d_final_state, cu_seqlens=cu_seqlens
    )
    return dx, d_weight, _arrays.empty(x, (0,)) if bias is None else d_bias, _arrays.empty(x, (0,)) if initial_state is None else d_state


def _fake_conv_backward(dy, x, weight, bias, initial_state, *_):
    of_optional = (x.new_empty((0,)) if given is None else given.new_empty(given.shape) for given in (bias, initial_state))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *of_optional


def _operator_delta(q, k, v, beta, g, scale, initial_state, return_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    given = {"g": g, "scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    given["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    if return_final_state:
        return gated_delta_rule(q, k, v, beta, **given, return_final_state=True)
    return gated_delta_rule(q, k, v, beta, **given), _arrays.empty(q, (0,), "float32")


def _fake_delta(q, k, v, beta, g, scale, initial_state, return_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    shape = _delta_state_shape(q, v, cu_seqlens) if return_final_state else (0,)
    return v.new_empty(v.shape), _arrays.empty(q, shape, "float32")


def _keep_delta(ctx, inputs, output):
    q, k, v, beta, g, ctx.scale, initial_state, ctx.has_final_state, ctx.normalise, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, beta, g, initial_state, cu_seqlens)


def _differentiate_delta(ctx, d_o, d_final_state):
    q, k, v, beta, g, initial_state, cu_seqlens = ctx.saved_tensors
    d_final_state = d_final_state if ctx.has_final_state else None
    *gradients, dg, d_initial = _dispatch.compiled_ops().gated_delta_rule_backward(
        q, k, v, beta, d_o, g, ctx.scale, initial_state, ctx.normalise, cu_seqlens, d_final_state
    )
    return *gradients, None if g is None else dg, None, None if initial_state is None else d_initial, None, None, None


def _operator_delta_backward(q, k, v, beta, d_o, g, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, d_final_state):
    *gradients, dg, d_initial = gated_delta_rule_backward(
        q,
        k,
        v,
        beta,
        d_o,
        g=g,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        d_final_state=d_final_state,
    )
    none = [_arrays.empty(q, (0,), "float32") for _ in range(2)]
    return (*gradients, none[0] if dg is None else dg, none[1] if d_initial is None else d_initial)


def _fake_delta_backward(q, k, v, beta, d_o, g, scale, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, d_final_state):
    return (
        *(x.new_empty(x.shape) for x in (q, k, v, beta)),
        _arrays.empty(q, (0,) if g is None else g.shape, "float32"),
        _arrays.empty(q, (0,) if initial_state is None else _delta_state_shape(q, v, cu_seqlens), "float32"),
    )


define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu, bool return_final_state) "
    "-> (Tensor, Tensor)",
    _operator_conv,
    _fake_conv,
    Gradient(_keep_conv, _differentiate_conv),
)
define(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? d_final_state, "
    "Tensor? cu_seqlens, bool silu) -> (Tensor, Tensor, Tensor, Tensor)",
    _operator_conv_backward,
    _fake_conv_backward,
)
define(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool silu) -> Tensor",
    lambda x, state, weight, bias, silu: causal_conv1d_update(x, state, weight, bias, activation="silu" if silu else None),
    lambda x, *_: x.new_empty(x.shape),
)
define(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, float? scale, Tensor? initial_state, bool return_final_state, "
    "bool use_qk_l2norm_in_kernel, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    _operator_delta,
    _fake_delta,
    Gradient(_keep_delta, _differentiate_delta),
)
define(
    "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor d_o, Tensor? g, float? scale, Tensor? initial_state, "
    "bool use_qk_l2norm_in_kernel, Tensor? cu_seqlens, Tensor? d_final_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_delta_backward,
    _fake_delta_backward,
)
define(
    "gated_delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor(a!) state, Tensor? g, float? scale, "
    "bool use_qk_l2norm_in_kernel) -> Tensor",
    lambda q, k, v, beta, state, g, scale, normalise: gated_delta_rule_step(
        q, k, v, beta, state, g=g, scale=scale, use_qk_l2norm_in_kernel=normalise
    ),
    lambda q, k, v, *_: v.new_empty(v.shape),
)
