"""Lets SGLang's HiCache run without a GPU: stands in for the pinning of its host memory, and for its copy kernels.

Loaded in each of SGLang's processes by an entry point ``sglang.srt.plugins``. Its tree, controller, threads and host
memory are SGLang's own.
"""


def register():
    """Put the stand-ins in place."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB, which a machine with tests need not have
    common._cuda_host_register = lambda *_: None
    mha.transfer_kv_direct = copy_tokens
    mha.transfer_kv_all_layer_direct_lf_pf = copy_to_pages
    mha.transfer_kv_per_layer_direct_pf_lf = copy_layer_from_pages


def copy_tokens(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy token slots, where both memories have a buffer a layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Copy token slots of all layers into whole pages ``(pages, layers, tokens, ...)`` of K and of V."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // 2
    for index, source in enumerate(src_ptrs):
        target = dst_ptrs[index // layers]
        target[pages, index % layers] = source[src_indices].reshape(len(pages), *target.shape[2:])


def copy_layer_from_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Copy one layer of whole pages into token slots, of K and of V."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(len(dst_indices), *target.shape[1:])
