"""Attention as SGLang's build for CPUs has it, in plain torch: with sliding windows and sinks.

Every key and value is read from the KV memory, so that an answer shows what is there.
"""

import torch

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_KV = "Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale"
_WHERE = "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens"
_HOW = "float scaling, float logit_cap, bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks"
_DECODE = f"""decode_attention_cpu(
    Tensor q, {_KV}, Tensor o, Tensor k, Tensor v, Tensor loc, Tensor logits, {_WHERE}, {_HOW}
) -> ()"""
_EXTEND = f"""extend_attention_cpu(
    Tensor q, Tensor k, Tensor v, Tensor o, {_KV}, {_WHERE}, Tensor extend_lens, Tensor extend_starts,
    int max_extend_len, {_HOW}, Tensor? tree_mask, bool is_causal
) -> ()"""


def _attend(query, keys, values, scaling, window, sinks):
    """The last ``len(query)`` tokens of a prompt, each ``(heads, numbers)``, look at all of its tokens."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, 1).float() for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scaling
    key_at = torch.arange(len(keys))
    query_at = key_at[len(keys) - len(query) :, None]
    hidden = key_at > query_at
    if window > 0:
        hidden |= key_at <= query_at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def _decode(q, k_buffer, v_buffer, *rest):
    _k_scale, _v_scale, o, k, v, loc, _logits, req_to_token, requests, lens, scaling, *how = rest
    _cap, _is_cross, window, _encoder_lens, sinks = how
    k_buffer[loc], v_buffer[loc] = k.view(-1, *k_buffer.shape[1:]), v.view(-1, *v_buffer.shape[1:])
    for row, (request, length) in enumerate(zip(requests.tolist(), lens.tolist(), strict=True)):
        slots = req_to_token[request, :length].long()
        o[row] = _attend(q[row : row + 1], k_buffer[slots], v_buffer[slots], scaling, window, sinks)[0]


def _extend(q, _k, _v, o, k_buffer, v_buffer, *rest):
    _k_scale, _v_scale, req_to_token, requests, lens, extend_lens, starts, _longest, scaling, *how = rest
    _cap, _is_cross, window, _encoder_lens, sinks, _tree_mask, _is_causal = how
    for request, length, count, start in zip(
        requests.tolist(), lens.tolist(), extend_lens.tolist(), starts.tolist(), strict=True
    ):
        slots = req_to_token[request, :length].long()
        part = slice(start, start + count)
        o[part] = _attend(q[part], k_buffer[slots], v_buffer[slots], scaling, window, sinks)


for _schema, _kernel in ((_DECODE, _decode), (_EXTEND, _extend)):
    LIBRARY.define(" ".join(_schema.split()))
    LIBRARY.impl(_schema.partition("(")[0], _kernel, "CPU")
