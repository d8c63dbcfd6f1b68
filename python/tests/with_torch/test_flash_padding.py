"""flash_attn.bert_padding: tokens of a padded batch one after another, and back."""

import pytest

torch = pytest.importorskip("torch")

from flash_reference import ON_ALL, attention, check_out, normal
from tilewave import flash_attn as fa2
from tilewave.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)


def test_concatenated_sequences():
    hidden = normal(3, 6, 2, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert longest == 6 and type(longest) is int
    assert torch.equal(tokens, hidden.flatten(0, 1)[indices])
    values = normal(2, 3).requires_grad_()
    put = index_put_first_axis(values, torch.tensor([3, 0]), 5)
    assert torch.equal(put[[3, 0]], values) and (put[[1, 2, 4]] == 0).all()
    put.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


def test_bert_padding():
    hidden = normal(3, 5, 2, 4)
    used = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    for of_mask in (used, used.bool()):
        tokens, indices, cu_seqlens, longest, seqused = unpad_input(hidden, of_mask)
        assert indices.tolist() == [0, 1, 5, 6, 7, 8, 9, 13]
        assert torch.equal(tokens, hidden[used.bool()])
        assert cu_seqlens.tolist() == [0, 2, 7, 8] and cu_seqlens.dtype == torch.int32
        assert longest == 5 and type(longest) is int
        assert seqused.tolist() == [2, 5, 1] and seqused.dtype == torch.int32
        assert torch.equal(pad_input(tokens, indices, 3, 5), hidden * used[..., None, None])

        tokens, indices, cu_seqlens, longest, seqused = unpad_input(hidden, of_mask, unused.to(of_mask.dtype))
        assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 13, 14]
        assert cu_seqlens.tolist() == [0, 3, 8, 10] and longest == 5
        assert seqused.tolist() == [2, 5, 1]
    assert torch.equal(index_first_axis(hidden, torch.tensor([2, 0, 2])), hidden[[2, 0, 2]])
    hidden.requires_grad_()
    tokens, indices, *_ = unpad_input(hidden, used)
    (pad_input(2 * tokens, indices, 3, 5)).sum().backward()
    assert torch.equal(hidden.grad, 2.0 * used[..., None, None].expand_as(hidden))


@ON_ALL
def test_unpad_and_varlen_give_what_each_sequence_gives(device, dtype):
    mask = torch.zeros(3, 11, dtype=torch.bool)
    lengths = [4, 11, 1]
    for b, length in enumerate(lengths):
        mask[b, :length] = True
    hidden = normal(3, 11, 3, 4, 32, device=device, dtype=dtype)
    tokens, indices, cu_seqlens, longest, _ = unpad_input(hidden, mask.to(device))
    out = pad_input(fa2.flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, longest, causal=True), indices, 3, 11)
    for b, length in enumerate(lengths):
        q, k, v = hidden[b, :length].unbind(1)
        wanted, _ = attention(q, k, v, causal=True)
        naive, _ = attention(q, k, v, causal=True, rounded=dtype)
        check_out(out[b, :length], wanted, naive)
        assert (out[b, length:] == 0).all()
