"""Stands in for what SGLang's build for CPUs compiles: the kernels that the tests' models call, in plain torch."""

from sgl_kernel import attention as attention

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Note for each request the slots of its new tokens."""
    taken = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was not needed until now: write it here in plain torch")

    return kernel
