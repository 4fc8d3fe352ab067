"""What kvtier refuses when an engine starts, and the reason it gives: one list, and whom each part of it is for.

``WORKERS`` holds for everybody who takes rows that several workers fill, ``VLLMS_ROWS`` for the tier behind vLLM's own
tiering alone, whose rows vLLM lays out, ``KV`` for the spec, which copies vLLM's pages itself, ``LASTING`` where blocks
outlive the engine, and ``RESET`` where they outlive a reset. The README lists the same, in the same words. Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtier_core import UnsupportedModelError
from kvtier_vllm.facts import EngineFacts, Workers

CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")
SUPPORTED_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "MambaSpec", "SlidingWindowSpec")
NEED_PREFIX_CACHING = ("MLAAttentionSpec", "MambaSpec")
_TOKENS_OF_WORKERS = "which worker keeps which tokens is not part of a block's name"


def _pipeline(workers: Workers) -> Iterator[str]:
    if workers.pipeline > 1:
        yield (
            f"pipeline_parallel_size = {workers.pipeline}: each stage keeps layers of its own, in pages of its own "
            "size, and vLLM's own tiering lets one stage overwrite another's; use KvtierSpec"
        )


def _prefill_context(workers: Workers) -> Iterator[str]:
    if workers.prefill_context > 1:
        yield f"prefill_context_parallel_size = {workers.prefill_context}: {_TOKENS_OF_WORKERS}"


def _foreign(workers: Workers) -> Iterator[str]:
    expected = workers.tensor * workers.pipeline * workers.prefill_context
    if workers.count != expected:
        yield f"vLLM counts {workers.count} workers where one engine has {expected}: start each engine by itself"


def _hosts(workers: Workers) -> Iterator[str]:
    if workers.hosts > 1:
        yield f"its workers run on {workers.hosts} hosts: they must share one host's memory"
    if workers.unseen:
        yield (
            f"{workers.unseen} of its {workers.count} workers do not have vLLM's shared memory on this host: they must "
            "share one host's memory and process ids"
        )


def _kinds(facts: EngineFacts) -> Iterator[str]:
    for group in facts.groups:
        for kind in sorted(set(group.kinds) - set(SUPPORTED_KINDS)):
            yield f"its layer {group.layers[group.kinds.index(kind)]!r} keeps {kind}, a layout kvtier does not know"


def _without_prefix_caching(facts: EngineFacts) -> Iterator[str]:
    for group in facts.groups if not facts.has_prefix_caching else ():
        for kind in sorted(set(group.kinds) & set(NEED_PREFIX_CACHING)):
            yield (
                f"its layer {group.layers[group.kinds.index(kind)]!r} keeps {kind}, and vLLM's prefix caching is off: "
                "without it vLLM keeps no state to go on from, and on some CPUs turns it off for MLA because answers "
                "after cached tokens differ there; set enable_prefix_caching"
            )


def _joined_windows(facts: EngineFacts) -> Iterator[str]:
    if facts.blocks_per_chunk > 1 and any(group.window is not None for group in facts.groups):
        yield (
            f"blocks_per_chunk = {facts.blocks_per_chunk} with sliding windows: vLLM stores a joined block also when "
            "the window has let go of its first blocks, and does not say which; leave blocks_per_chunk out"
        )


def _canonical(facts: EngineFacts) -> Iterator[str]:
    for group in facts.groups:
        if group.uncertain is not None:
            yield (
                f"canonical_layout with its layer {group.uncertain!r}: vLLM is not certain that its bytes are "
                "the same under every tensor-parallel size; leave canonical_layout out"
            )


def _speculation(facts: EngineFacts) -> Iterator[str]:
    if facts.strange_speculation is not None:
        yield (
            f"speculative_config has {facts.strange_speculation}: its tokens or its KV may be others than the model's; "
            "use a method that only proposes tokens, such as ngram, draft_model, eagle3 or mtp"
        )


def _overwriting_drafter(facts: EngineFacts) -> Iterator[str]:
    if (prefix := facts.layers_by_first_table) is None:
        return
    for layer in (name for group in facts.groups if group.group_id > 0 for name in group.layers):
        if layer.startswith(prefix):
            yield (
                f"vLLM would write its draft model's layer {layer!r} over the model's own KV, and answer wrong without "
                "kvtier as well: that layer is not in the first KV group; use a draft model whose layers look back as "
                "far as the model's, or another method, such as eagle3"
            )
            return


def _weak_hash(facts: EngineFacts, tiers: str) -> Iterator[str]:
    if facts.hash_algorithm not in CRYPTOGRAPHIC_HASHES:
        yield (
            f"prefix_caching_hash_algo = {facts.hash_algorithm!r} is not cryptographic: blocks of other runs in "
            f"{tiers} could be taken for this one's; choose one of {', '.join(CRYPTOGRAPHIC_HASHES)}"
        )


def _weights_elsewhere(facts: EngineFacts, tiers: str) -> Iterator[str]:
    if facts.weights_elsewhere is not None and facts.identity is None:
        yield (
            f"{facts.weights_elsewhere}: kvtier does not see which weights vLLM loads, and {tiers} would serve the KV "
            "of others; load them from the model's own files, set kvtier_identity to a text that no other weights "
            "have, or use tiers that end with the engine"
        )


def _silent_weights(facts: EngineFacts) -> Iterator[str]:
    if facts.silent_weights is not None:
        yield (
            f'on_reset = "pool" with {facts.silent_weights}: weights may arrive unseen, and such a reset would keep '
            'the blocks of the old ones; use on_reset = "all"'
        )


WORKERS: Mapping[str, Callable[[Workers], Iterator[str]]] = {
    "prefill context parallelism": _prefill_context,
    "workers of several engines that count as one's (an external launcher with data parallelism)": _foreign,
    "workers of one engine on several hosts": _hosts,
}
VLLMS_ROWS: Mapping[str, Callable[[Workers], Iterator[str]]] = {"pipeline parallelism": _pipeline}
KV: Mapping[str, Callable[[EngineFacts], Iterator[str]]] = {
    "layers that keep neither full, sliding-window or latent attention nor a state": _kinds,
    "latent attention and states without vLLM's prefix caching": _without_prefix_caching,
    "sliding windows in blocks joined into larger ones": _joined_windows,
    "layers that vLLM's canonical layout leaves uncertain": _canonical,
    "speculative decoding that is not lossless, or by code that kvtier does not know": _speculation,
    "a draft model whose layers are not in the model's first KV group": _overwriting_drafter,
}
LASTING: Mapping[str, Callable[[EngineFacts, str], Iterator[str]]] = {
    "a prefix hash that is not cryptographic": _weak_hash,
    "weights from elsewhere than the model's own files": _weights_elsewhere,
}
RESET: Mapping[str, Callable[[EngineFacts], Iterator[str]]] = {
    "weights that may change without a call that kvtier sees": _silent_weights,
}


def check_workers(model: str, workers: Workers) -> None:
    """Raise ``UnsupportedModelError``, with every reason, when kvtier can't keep vLLM's rows that *workers* fill."""
    of_rows = [reason for objections in VLLMS_ROWS.values() for reason in objections(workers)]
    _refuse(model, [*_of_workers(workers), *of_rows])


def check_engine(facts: EngineFacts) -> None:
    """Raise ``UnsupportedModelError``, with every reason, when kvtier can't keep this engine's KV."""
    of_kv = [reason for objections in KV.values() for reason in objections(facts)]
    _refuse(facts.model, [*_of_workers(facts.workers), *of_kv])


def check_persistence(facts: EngineFacts, lasting: Sequence[str]) -> None:
    """Raise ``UnsupportedModelError`` when blocks that outlive the engine could be taken for others.

    *lasting* are the names of the tiers that keep blocks which other runs or processes see.
    """
    if lasting:
        names = f"tier{'s' if len(lasting) > 1 else ''} {', '.join(map(repr, lasting))}"
        _refuse(facts.model, [text for objections in LASTING.values() for text in objections(facts, names)])


def check_reset(facts: EngineFacts, *, keeps_tiers: bool) -> None:
    """Raise ``UnsupportedModelError`` when a reset that *keeps_tiers* could keep blocks that other weights made."""
    if keeps_tiers:
        _refuse(facts.model, [text for objections in RESET.values() for text in objections(facts)])


def _of_workers(workers: Workers) -> list[str]:
    return [reason for objections in WORKERS.values() for reason in objections(workers)]


def _refuse(model: str, reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedModelError(f"kvtier can't serve model {model!r}: {'; '.join(reasons)}")
