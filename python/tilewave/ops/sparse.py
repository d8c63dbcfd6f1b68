"""Products with sparse matrices: 2:4 sparse, of every four neighbours in a row at most two are not zero; and sparse by blocks."""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import define
from .products import _activation, gemm_dtype

_prune_2_4 = _library.bind("tw_prune_2_4", out="y")
_compress_2_4 = _library.bind("tw_compress_2_4")
_decompress_2_4 = _library.bind("tw_decompress_2_4", out="dense")
_sparse_gemm = _library.bind("tw_sparse_gemm", out="d")
_sparse_linear = _library.bind("tw_sparse_linear", out="y")
_block_sparse_gemm = _library.bind("tw_block_sparse_gemm", out="d")


def prune_2_4(x: Array, *, out: Array | None = None) -> Array:
    """x with zeros instead of all but the two elements of largest magnitude in every four neighbours of a row.

    x: [m, k] of f16, bf16, fp8 (float8_e4m3fn) or int8, k a multiple of 4. Of equal magnitudes the first are kept; NaN counts as the
    largest. `out` may be x.
    """
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().prune_2_4(x))
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape)
    _prune_2_4(of_x, tensor("out", out, written=True), _arrays.stream(x))
    return out


def compress_2_4(dense: Array, *, refused: Array | None = None, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """A matrix [m, k] with at most two nonzeros in every four neighbours of a row as (values, metadata).

    values: [m, k / 2], the kept elements; metadata: uint8, in the order of the tensor cores' registers. On the CPU a matrix with more
    nonzeros is an error. On a GPU `refused`, int32 [1], is then set to 1 and otherwise left as it is; without it the two of largest
    magnitude are kept. It does not work under torch.compile().
    """
    if _dispatch.through_operator(dense):
        if refused is not None:
            raise NotImplementedError("refused is given; under torch.compile() it is not supported")
        return _dispatch.into(out, _dispatch.compiled_ops().compress_2_4(dense))
    of_dense = tensor("dense", dense)
    if out is None:
        out = _empty_2_4(dense)
    _compress_2_4(
        of_dense,
        tensor("out[0]", out[0], written=True),
        tensor("out[1]", out[1], written=True),
        optional("refused", refused),
        _arrays.stream(dense),
    )
    return out


def metadata_2_4_shape(rows: int, columns: int, dtype: str) -> tuple:
    """The shape of the metadata of a matrix [rows, columns]."""
    block = 256 if dtype in ("int8", "float8_e4m3fn") else 128
    return (-(-columns // block), -(-rows // 16) * (block // 64), 128)


def _empty_2_4(dense: Array) -> tuple[Array, Array]:
    _arrays.require_dims(2, dense=dense)
    rows, columns = dense.shape
    metadata = metadata_2_4_shape(rows, columns, _arrays.dtype_name(dense))
    return _arrays.empty(dense, (rows, columns // 2)), _arrays.empty(dense, metadata, "uint8")


def decompress_2_4(values: Array, metadata: Array, *, out: Array | None = None) -> Array:
    """The matrix [m, k] that compress_2_4() made values and metadata of."""
    if _dispatch.through_operator(values, metadata):
        return _dispatch.into(out, _dispatch.compiled_ops().decompress_2_4(values, metadata))
    of_values, of_metadata = tensor("values", values), tensor("metadata", metadata)
    if out is None:
        out = _arrays.empty(values, _dense_shape(values))
    _decompress_2_4(of_values, of_metadata, tensor("out", out, written=True), _arrays.stream(values))
    return out


def _dense_shape(values: Array) -> tuple:
    _arrays.require_dims(2, values=values)
    return (values.shape[0], 2 * values.shape[1])


def sparse_gemm(
    values: Array,
    metadata: Array,
    b: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    residual: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """activation(alpha a b + beta out + bias) + residual, where a [m, k] is the 2:4 sparse matrix of values and metadata.

    b: [k, n], any strides; bias: [n]; residual: the result's shape. activation: none, relu, gelu_erf, gelu_tanh or silu. f16 and bf16 give
    their own dtype, fp8 (float8_e4m3fn) bf16, int8 int32. a_scale, b_scale: f32 [1] factors of fp8, both or none. beta needs `out`, and
    does not work under torch.compile(). See compress_2_4().
    """
    code = _activation(activation)
    if _dispatch.through_operator(values, metadata, b, bias, residual, a_scale, b_scale):
        _refuse_beta(beta)
        compiled = _dispatch.compiled_ops().sparse_gemm
        return _dispatch.into(out, compiled(values, metadata, b, bias, activation, residual, alpha, a_scale, b_scale))
    arguments = tensor("values", values), tensor("metadata", metadata), tensor("b", b)
    if out is None:
        _require_out(beta)
        out = _arrays.empty(values, sparse_gemm_shape(values, b), gemm_dtype(values))
    options = _options(code, bias, residual, alpha, beta, a_scale, b_scale)
    _sparse_gemm(*arguments, tensor("out", out, written=True), _library.byref(options), _arrays.stream(values))
    return out


def sparse_gemm_shape(values: Array, b: Array) -> tuple:
    """The shape of sparse_gemm()'s result."""
    _arrays.require_dims(2, values=values, b=b)
    return (values.shape[0], b.shape[1])


def sparse_linear(
    x: Array,
    values: Array,
    metadata: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    residual: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """activation(alpha x w^T + beta out + bias) + residual, where w [n, k] is the 2:4 sparse matrix of values and metadata.

    x: [m, k]; bias: [n]; a_scale and b_scale: the factors of w and of x. All else as in sparse_gemm().
    """
    code = _activation(activation)
    if _dispatch.through_operator(x, values, metadata, bias, residual, a_scale, b_scale):
        _refuse_beta(beta)
        compiled = _dispatch.compiled_ops().sparse_linear
        return _dispatch.into(out, compiled(x, values, metadata, bias, activation, residual, alpha, a_scale, b_scale))
    arguments = tensor("x", x), tensor("values", values), tensor("metadata", metadata)
    if out is None:
        _require_out(beta)
        out = _arrays.empty(x, sparse_linear_shape(x, values), gemm_dtype(x))
    options = _options(code, bias, residual, alpha, beta, a_scale, b_scale)
    _sparse_linear(*arguments, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return out


def sparse_linear_shape(x: Array, values: Array) -> tuple:
    """The shape of sparse_linear()'s result."""
    _arrays.require_dims(2, x=x, values=values)
    return (x.shape[0], values.shape[0])


def _refuse_beta(beta):
    if beta != 0:
        raise NotImplementedError(f"beta is {beta}; under torch.compile() only 0 is supported")


def _require_out(beta):
    if beta != 0:
        raise ValueError(f"beta is {beta}, but no out is given")


def _options(activation, bias, residual, alpha, beta, a_scale, b_scale):
    return _library.SparseGemmOptions(
        has_alpha=1,
        alpha=float(alpha),
        beta=float(beta),
        activation=activation,
        bias=optional("bias", bias),
        residual=optional("residual", residual),
        a_scale=optional("a_scale", a_scale),
        b_scale=optional("b_scale", b_scale),
    )


def block_sparse_gemm(
    a: Array,
    b: Array,
    *,
    block: int = 128,
    a_mask: Array | None = None,
    b_mask: Array | None = None,
    d_mask: Array | None = None,
    product_mask: Array | None = None,
    alpha: float = 1.0,
    bias: Array | None = None,
    activation: str = "none",
    out: Array | None = None,
) -> Array:
    """activation(alpha a b + bias) without the blocks that masks hide, which are not read.

    a: [m, k]; b: [k, n]; f16 or bf16, any strides. block: 64, 128 or 256 rows and columns. Masks, of uint8 or bool, have an element for each
    block, which is kept if it is not 0: a_mask [m, k], b_mask [k, n] and d_mask [m, n] in blocks; product_mask [m, n, k] in blocks says which
    products of blocks are summed. Blocks of the result that d_mask hides become 0. bias: [n]. activation: as in sparse_gemm().
    """
    code = _activation(activation)
    masks = a_mask, b_mask, d_mask, product_mask
    if _dispatch.through_operator(a, b, bias):
        compiled = _dispatch.compiled_ops().block_sparse_gemm
        return _dispatch.into(out, compiled(a, b, block, *masks, alpha, bias, activation))
    of_a, of_b = tensor("a", a), tensor("b", b)
    if out is None:
        out = _arrays.empty(a, block_sparse_gemm_shape(a, b))
    options = _library.BlockSparseGemmOptions(
        block=_arrays.int32("block", block),
        has_alpha=1,
        alpha=float(alpha),
        activation=code,
        a_mask=optional("a_mask", a_mask),
        b_mask=optional("b_mask", b_mask),
        d_mask=optional("d_mask", d_mask),
        product_mask=optional("product_mask", product_mask),
        bias=optional("bias", bias),
    )
    _block_sparse_gemm(of_a, of_b, tensor("out", out, written=True), _library.byref(options), _arrays.stream(a))
    return out


def block_sparse_gemm_shape(a: Array, b: Array) -> tuple:
    """The shape of block_sparse_gemm()'s result."""
    _arrays.require_dims(2, a=a, b=b)
    return (a.shape[0], b.shape[1])


# As operators of PyTorch. Results are contiguous, as those of the eager functions.

define("prune_2_4(Tensor x) -> Tensor", lambda x: prune_2_4(x), lambda x: x.new_empty(x.shape))
define("compress_2_4(Tensor dense) -> (Tensor, Tensor)", lambda dense: compress_2_4(dense), lambda dense: _empty_2_4(dense))
define(
    "decompress_2_4(Tensor values, Tensor metadata) -> Tensor",
    lambda values, metadata: decompress_2_4(values, metadata),
    lambda values, metadata: values.new_empty(_dense_shape(values)),
)
define(
    "sparse_gemm(Tensor values, Tensor metadata, Tensor b, Tensor? bias, str activation, Tensor? residual, float alpha, Tensor? a_scale, "
    "Tensor? b_scale) -> Tensor",
    lambda values, metadata, b, bias, activation, residual, alpha, a_scale, b_scale: sparse_gemm(
        values, metadata, b, bias=bias, activation=activation, residual=residual, alpha=alpha, a_scale=a_scale, b_scale=b_scale
    ),
    lambda values, metadata, b, *rest: _arrays.empty(values, sparse_gemm_shape(values, b), gemm_dtype(values)),
)
define(
    "sparse_linear(Tensor x, Tensor values, Tensor metadata, Tensor? bias, str activation, Tensor? residual, float alpha, Tensor? a_scale, "
    "Tensor? b_scale) -> Tensor",
    lambda x, values, metadata, bias, activation, residual, alpha, a_scale, b_scale: sparse_linear(
        x, values, metadata, bias=bias, activation=activation, residual=residual, alpha=alpha, a_scale=a_scale, b_scale=b_scale
    ),
    lambda x, values, *rest: _arrays.empty(x, sparse_linear_shape(x, values), gemm_dtype(x)),
)
define(
    "block_sparse_gemm(Tensor a, Tensor b, SymInt block, Tensor? a_mask, Tensor? b_mask, Tensor? d_mask, Tensor? product_mask, float alpha, "
    "Tensor? bias, str activation) -> Tensor",
    lambda a, b, block, a_mask, b_mask, d_mask, product_mask, alpha, bias, activation: block_sparse_gemm(
        a,
        b,
        block=block,
        a_mask=a_mask,
        b_mask=b_mask,
        d_mask=d_mask,
        product_mask=product_mask,
        alpha=alpha,
        bias=bias,
        activation=activation,
    ),
    lambda a, b, *rest: a.new_empty(block_sparse_gemm_shape(a, b)),
)
