"""A plugin for SGLang: its own layers serve on any CPU, where SGLang has them for CPUs with AMX or for GPUs alone.

Attention is SGLang's for CPUs, on the kernels of ``site/sgl_kernel``: torch's, which SGLang takes without AMX, reads
the pages of a sliding window by the numbers of other pages. The convolution of a recurrent layer is plain torch.
"""

import torch
from torch.nn.functional import conv1d


def register() -> None:
    """Called in each of SGLang's processes."""
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layers = "sglang.srt.layers.attention"
    for target, ours in {
        f"{layers}.torch_native_backend.TorchNativeAttnBackend": IntelAMXAttnBackend,
        f"{layers}.mamba.causal_conv1d.causal_conv1d_fn": _convolve,
        f"{layers}.mamba.causal_conv1d.causal_conv1d_update": _convolve_one,
    }.items():
        HookRegistry.register(target, ours, HookType.REPLACE)


def _convolve(x, weight, bias, *, query_start_loc, cache_indices, has_initial_state, conv_states, activation):
    """Prompts one after another, ``(channels, tokens)``. Each leaves its last tokens as the state of its slot."""
    assert activation is None
    bounds = query_start_loc.tolist()
    out = torch.empty_like(x)
    for begin, end, slot, goes_on in zip(
        bounds[:-1], bounds[1:], cache_indices.tolist(), has_initial_state.tolist(), strict=True
    ):
        before = conv_states[slot] if goes_on else torch.zeros_like(conv_states[slot])
        out[:, begin:end] = _step(before, x[:, begin:end], weight, bias, conv_states[slot])
    return out


def _convolve_one(x, conv_state, weight, bias, *, activation, conv_state_indices):
    """The next token of each prompt, ``(prompts, channels)``."""
    assert activation is None
    slots = conv_state_indices.tolist()
    steps = [
        _step(conv_state[slot], row[:, None], weight, bias, conv_state[slot])
        for row, slot in zip(x, slots, strict=True)
    ]
    return torch.cat(steps, dim=1).T


def _step(before, x, weight, bias, state):
    """The convolution of *x*, ``(channels, tokens)``, behind the tokens *before*; *state* gets the last ones."""
    tokens = torch.cat([before, x], dim=1)
    state.copy_(tokens[:, -state.shape[1] :])
    return conv1d(tokens[None], weight[:, None], bias, groups=len(weight))[0]
