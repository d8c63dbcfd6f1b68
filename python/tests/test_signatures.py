"""FlashAttention's, FlashMLA's, DeepGEMM's, flash-linear-attention's and mamba_ssm's functions keep their names, order of arguments and
defaults: calls written for them mean the same here. Needs no PyTorch."""

import inspect
import re
import subprocess
import sys

import pytest

from tilewave import deep_gemm, fla, flash_attn, flash_attn_interface, flash_mla, mamba_ssm, nsa
from tilewave.flash_attn import bert_padding
from tilewave.flash_attn.layers import rotary

# flash_attn 2.8.3.
FLASH_ATTN_2 = """
flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False)
flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False)
flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False)
flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None)
flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
    alibi_slopes=None, num_splits=0, return_softmax_lse=False)
"""

BERT_PADDING = """
index_first_axis(input, indices)
index_put_first_axis(values, indices, first_axis_dim)
pad_input(hidden_states, indices, batch, seqlen)
unpad_input(hidden_states, attention_mask, unused_mask=None)
unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length)
"""

ROTARY = """
apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)
apply_rotary_emb_func(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)
apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0)
apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)
"""

# hopper/flash_attn_interface.py of commit 01afd16d248c4c7d0f9aed1914084f16c490eaed; there qkv_dtype=torch.bfloat16.
FLASH_ATTN_3 = """
flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False)
flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1,
    -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False)
get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=None,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False,
    window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)
"""

FLASH_MLA = """
get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None)
flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
    extra_topk_length=None)
flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None)
"""

# csrc/apis/attention.hpp of DeepGEMM, commit 0274ad7b911b99b4eb6f8d796403811cf1e18f3d.
DEEP_GEMM = """
fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0)
fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None)
get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None)
"""

# fla/ops of flash-linear-attention in 2026, without what tilewave.fla does not take.
FLASH_LINEAR_ATTENTION = """
chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None)
fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None)
chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
    return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, A_log=None, dt_bias=None)
fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None,
    state_v_first=False, cu_seqlens=None)
chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, head_first=False)
chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, head_first=False)
chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None)
fused_chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, head_first=False)
fused_recurrent_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=False, head_first=False)
fused_recurrent_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None)
fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None)
"""

# native_sparse_attention/ops/parallel.py of fla-org's native-sparse-attention, commit 8cddc2ef86094cb745a85887f7657da43f92e761, and fla's mean_pooling.
NSA = """
mean_pooling(x, chunk_size, cu_seqlens=None, head_first=False)
parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, block_indices=None, block_counts=16, block_size=64, window_size=0, scale=None, cu_seqlens=None,
    head_first=False)
parallel_nsa_compression(q, k, v, block_size=64, scale=None, offsets=None)
parallel_nsa_topk(q, k, lse, block_counts, block_size=64, scale=None, offsets=None)
"""

# mamba_ssm/ops/triton of mamba_ssm 2.2.
MAMBA_SSM = """
mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, return_varlen_states=False)
selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None)
_chunk_cumsum_fwd(dt, A, chunk_size, dt_bias=None, dt_softplus=False, dt_limit=(0.0, inf))
_chunk_state_fwd(B, x, dt, dA_cumsum, seq_idx=None, states=None, states_in_fp32=True)
_state_passing_fwd(states, dA_chunk_cumsum, initial_states=None, seq_idx=None, chunk_size=None, out_dtype=None)
_bmm_chunk_fwd(a, b, chunk_size, seq_idx=None, causal=False, output_dtype=None)
_chunk_scan_fwd(cb, x, dt, dA_cumsum, C, states, D=None, z=None, seq_idx=None)
"""

MODULES = {
    deep_gemm: DEEP_GEMM,
    fla: FLASH_LINEAR_ATTENTION,
    flash_attn: FLASH_ATTN_2,
    flash_attn.flash_attn_interface: FLASH_ATTN_2,
    bert_padding: BERT_PADDING,
    rotary: ROTARY,
    flash_attn_interface: FLASH_ATTN_3,
    flash_mla: FLASH_MLA,
    mamba_ssm: MAMBA_SSM,
    nsa: NSA,
}


def signature_text(module, name: str) -> str:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    plain = inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])
    return f"{name}{plain}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_signatures(module):
    wanted = [" ".join(function.split()) for function in re.split(r"\n(?=\S)", MODULES[module].strip())]
    functions = set(module.__all__) - {"RotaryEmbedding"}  # whose class needs PyTorch
    assert sorted(signature_text(module, name) for name in functions) == sorted(wanted)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_imports_without_torch(module):
    # None in sys.modules makes every import of torch fail, wherever torch is installed.
    code = f"import sys; sys.modules['torch'] = None; import {module.__name__}"
    subprocess.run([sys.executable, "-c", code], check=True)
