"""flash_attn.layers.rotary against rotary embedding in float64, on the CPU and on CUDA."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from flash_reference import ON_ALL, ints, normal, offsets, rotary_tables, turn
from tilewave import flash_attn as fa2
from tilewave.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)


@ON_ALL
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", [None, torch.float32])
def test_rotary(interleaved, table_dtype, device, dtype):
    x = normal(2, 13, 3, 40, device=device, dtype=dtype)
    cos, sin = rotary_tables(50, 24, device, table_dtype or dtype)
    for given, starts in ((0, [0, 0]), (7, [7, 7]), (ints([3, 31], device), [3, 31]), (ints([3, 31], device).long(), [3, 31])):
        wanted = torch.stack([turn(x[b], cos, sin, starts[b] + torch.arange(13), interleaved) for b in range(2)])
        out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
        torch.testing.assert_close(out.cpu(), wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
        changed = x.clone()
        assert apply_rotary_emb(changed, cos, sin, interleaved, True, given) is changed
        assert torch.equal(changed, out)


@ON_ALL
def test_rotary_of_packed_tokens(device, dtype):
    lengths = [4, 0, 7, 1]
    x = normal(sum(lengths), 3, 32, device=device, dtype=dtype)
    cos, sin = rotary_tables(50, 32, device, dtype)
    for given, starts in ((2, [2] * 4), (ints([3, 31, 0, 9], device), [3, 31, 0, 9])):
        positions = torch.cat([starts[b] + torch.arange(lengths[b]) for b in range(4)])
        out = apply_rotary_emb(x, cos, sin, seqlen_offsets=given, cu_seqlens=offsets(lengths, device), max_seqlen=7)
        wanted = turn(x, cos, sin, positions, False)
        torch.testing.assert_close(out.cpu(), wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
        changed = x.clone()
        assert apply_rotary_emb(changed, cos, sin, False, True, given, offsets(lengths, device), 7) is changed
        assert torch.equal(changed, out)


@ON_ALL
def test_rotary_in_place(device, dtype):
    assert apply_rotary_emb_func is apply_rotary_emb
    cos, sin = rotary_tables(50, 24, device, dtype)
    cos_k, sin_k = cos.flip(0).contiguous(), sin.flip(0).contiguous()
    starts = ints([3, 31], device)
    qkv = normal(2, 13, 3, 4, 40, device=device, dtype=dtype)
    heads_together = normal(2, 13, 6 + 2 + 2, 40, device=device, dtype=dtype)
    kv = normal(2, 13, 2, 4, 40, device=device, dtype=dtype)
    for interleaved in (False, True):
        for tables in ((), (cos_k, sin_k)):
            of_k = tables or (cos, sin)
            changed = qkv.clone()
            assert apply_rotary_emb_qkv_(changed, cos, sin, *(tables or (None, None)), interleaved, starts) is changed
            q, k, v = qkv.unbind(2)
            wanted = [apply_rotary_emb(q, cos, sin, interleaved, False, starts), apply_rotary_emb(k, *of_k, interleaved, False, starts), v]
            assert torch.equal(changed, torch.stack(wanted, 2)) and not torch.equal(changed, qkv)
            changed = heads_together.clone()
            assert apply_rotary_emb_qkv_(changed, cos, sin, *(tables or (None, None)), interleaved, 7, num_heads_q=6) is changed
            q, k, v = heads_together.split([6, 2, 2], 2)
            wanted = [apply_rotary_emb(q, cos, sin, interleaved, False, 7), apply_rotary_emb(k, *of_k, interleaved, False, 7), v]
            assert torch.equal(changed, torch.cat(wanted, 2))
        changed = kv.clone()
        assert apply_rotary_emb_kv_(changed, cos, sin, interleaved, starts) is changed
        wanted = [apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, False, starts), kv[:, :, 1]]
        assert torch.equal(changed, torch.stack(wanted, 2))


@ON_ALL
@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, scale_base, device, dtype):
    module = RotaryEmbedding(24, base=5000.0, interleaved=interleaved, scale_base=scale_base, device=device).to(dtype).eval()
    assert not module.state_dict() and module.inv_freq.shape == (12,)
    positions = torch.arange(21).double()
    pairs = torch.arange(0, 24, 2).double()
    angles = positions[:, None] * 5000.0 ** (-pairs / 24)
    power = torch.zeros(21) if scale_base is None else (positions - 21 // 2) / scale_base
    scale = ((pairs + 0.4 * 24) / (1.4 * 24)) ** power[:, None]
    of_q, of_k = (angles.cos() * scale, angles.sin() * scale), (angles.cos() / scale, angles.sin() / scale)

    def wanted(x, tables, starts):
        return torch.stack([turn(x[b], *tables, starts[b] + torch.arange(13), interleaved) for b in range(2)])

    def close(got, exact):
        # Tables and result are rounded to the dtype.
        torch.testing.assert_close(got.cpu().double(), exact, rtol=0, atol=12 * torch.finfo(dtype).eps if dtype != torch.float32 else 3e-5)

    qkv = normal(2, 13, 3, 4, 40, device=device, dtype=dtype)
    changed = qkv.clone()
    assert module(changed, seqlen_offset=8) is changed
    close(changed[:, :, 0], wanted(qkv[:, :, 0], of_q, [8, 8]))
    close(changed[:, :, 1], wanted(qkv[:, :, 1], of_k, [8, 8]))
    assert torch.equal(changed[:, :, 2], qkv[:, :, 2])
    q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    turned, changed = module(q, kv, seqlen_offset=ints([3, 8], device), max_seqlen=21)
    assert turned is q and changed is kv
    close(q, wanted(qkv[:, :, 0], of_q, [3, 8]))
    close(kv[:, :, 0], wanted(qkv[:, :, 1], of_k, [3, 8]))
    assert torch.equal(kv[:, :, 1], qkv[:, :, 2])
    grouped = normal(2, 13, 4 + 2, 40, device=device, dtype=dtype)
    changed = grouped.clone()
    assert module(changed, num_heads_q=2, seqlen_offset=8) is changed
    close(changed[:, :, 2:4], wanted(grouped[:, :, 2:4], of_k, [8, 8]))
    with pytest.raises(ValueError, match="max_seqlen is None"):
        RotaryEmbedding(24)(qkv, seqlen_offset=ints([0, 0], device))


def test_signature_of_rotary_embedding():
    # flash_attn 2.8.3
    import inspect

    def plain(function):
        parameters = list(inspect.signature(function).parameters.values())
        return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))

    assert plain(RotaryEmbedding) == "(dim, base=10000.0, interleaved=False, scale_base=None, device=None)"
    assert plain(RotaryEmbedding.forward) == "(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None)"
    import tilewave.flash_attn.flash_attn_interface as module

    assert module.flash_attn_func is fa2.flash_attn_func and fa2.__version__ == "2.8.3"
