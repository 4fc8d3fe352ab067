"""LoRA adapters, known by what their files hold for as long as these stay as they are (C02).

vLLM reads an adapter's files when it needs them, and again once it has evicted it, and says nothing of that. So they
are looked at when a request comes, before vLLM can read them, when it asks for blocks, and when its blocks are stored:
vLLM has read them by then. Looks that are all the same mean that what it read is what was digested. Decides which
adapters may store and load. Names no vLLM type.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from kvtier_core.engine import OffloadKey
from kvtier_weights import digest_weights, is_settled, look_at_file

_log = logging.getLogger("kvtier.vllm")

_IDENTITY_BYTES = 12
"""With vLLM's hash of 32 bytes and the group's number a key has 48 then, the most that kvtier-disk takes."""
_GROUP_BYTES = 4
_FILES = "adapter_*"
"""What vLLM reads: ``adapter_config.json`` and one of ``adapter_model.safetensors``, ``.bin`` and ``.pt``."""
_MOMENT_S = 0.1
"""How long the request that brings an adapter waits for its digest: what is small or remembered is there by then."""
_MAX_ADAPTERS = 10_000
"""That one engine's clients may name, of 1 KiB each. None is forgotten: vLLM may hold what it once read."""
_ALL_OF_ITS_OWN = "a path, a name and a number of its own"
_RESTART = "Start the engine again to have them kept"

KeyName = Callable[[OffloadKey], OffloadKey]
"""Gives kvtier's key for vLLM's."""


def vllms_own(key: OffloadKey) -> OffloadKey:
    """The name of a block that no adapter made: the one that it has in vLLM."""
    return key


class KeyNames:
    """What blocks are called: by vLLM's key, in engines with LoRA with the adapter's identity before the group."""

    def __init__(self, *, has_lora: bool) -> None:
        self._size = _IDENTITY_BYTES if has_lora else 0

    def of(self, adapter: "Adapter | None") -> KeyName | None:
        """For a request with *adapter*, or with none; ``None`` where nothing says what the adapter is."""
        identity = bytes(self._size) if adapter is None else adapter.identity
        if identity is None:
            return None
        if not identity:
            return vllms_own
        return lambda key: OffloadKey(key[:-_GROUP_BYTES] + identity + key[-_GROUP_BYTES:])

    def vllms(self, key: OffloadKey) -> OffloadKey:
        """Gives vLLM's key for kvtier's."""
        if not self._size:
            return key
        return OffloadKey(key[: -_GROUP_BYTES - self._size] + key[-_GROUP_BYTES:])


class Adapter:
    """What a name and a path stand for. Trusted until a doubt arises, and never again after that."""

    def __init__(self, about: str, directory: Path, kind: object = None) -> None:
        self._about = about
        self._directory = directory
        self.kind = kind
        """What, beside the files, makes its weights."""
        self._looks: list[list[int | str]] | None = None
        """The first looks at its files."""
        self._identity: Future[bytes] | None = None
        self._is_trusted = True

    @property
    def identity(self) -> bytes | None:
        """Stands for what its files hold; ``None`` while that is not known, and when it is not trusted."""
        if not self._is_trusted or self._identity is None or not self._identity.done():
            return None
        if error := self._identity.exception():
            self.distrust(f"its files can't be read ({error})", "Make them readable, at another path")
            return None
        return self._identity.result()

    def is_unchanged(self) -> bool:
        """Whether its files are as they were at first. Cost: each of them is opened."""
        if not self._is_trusted:
            return False
        try:
            looks = [look_at_file(path) for path in self._files()]
        except OSError:
            looks = []
        known = [look for look in looks if look is not None]
        if not looks:
            self.distrust("kvtier sees no files of it there", "Give vLLM the path of a local directory")
        elif len(known) < len(looks):
            self.distrust(
                "it is in a read-only image, whose times don't tell it from another", "Copy it to a directory"
            )
        elif self._looks is None:
            self._looks = known
        elif known != self._looks:
            self.distrust(
                "its files have changed since it was first used", f"Give what has changed {_ALL_OF_ITS_OWN}"
            )
        return self._is_trusted

    def identify(self, reader: ThreadPoolExecutor) -> None:
        """Have *reader* read its files, once their times tell of every change. Waits a moment for that."""
        if self._identity is None and self._looks is not None and all(map(is_settled, self._looks)):
            self._identity = reader.submit(self._read)
            wait([self._identity], _MOMENT_S)

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.glob(_FILES) if path.is_file())

    def _read(self) -> bytes:
        content = json.dumps([digest_weights(self._files()), self.kind])
        return hashlib.sha256(content.encode()).digest()[:_IDENTITY_BYTES]

    def distrust(self, why: str, instead: str) -> None:
        """From now on its blocks are neither stored nor loaded."""
        if self._is_trusted:
            self._is_trusted = False
            _log.warning("%s: %s. Its blocks are neither stored nor loaded. %s", self._about, why, instead)


class Adapters:
    """Those of one engine. Used by the engine core's thread.

    vLLM's own cache tells them apart by name and path, and its workers by number alone.
    """

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, str], Adapter] = {}
        self._by_number: dict[int, Adapter] = {}
        self.stranger = Adapter("an adapter", Path())
        """One of which nothing is known."""
        self._reader = ThreadPoolExecutor(1, "kvtier-adapters")
        self._doubt: str | None = None

    def meet(self, request: Any) -> Adapter:
        """The adapter of vLLM's ``LoRARequest``, whose files vLLM may read from now on."""
        name, path, number = request.lora_name, request.lora_path, request.lora_int_id
        if (name, path) not in self._by_place:
            if len(self._by_place) >= _MAX_ADAPTERS:
                self.stranger.distrust(f"{_MAX_ADAPTERS} came before it", _RESTART)
                return self.stranger
            about = f"the adapter {name!r} from {path!r}"
            kind = request.is_3d_lora_weight
            self._by_place[name, path] = Adapter(about, Path(path).expanduser(), kind)
        adapter = self._by_place[name, path]
        other = self._by_number.setdefault(number, adapter)
        if self._doubt is not None:
            adapter.distrust(self._doubt, _RESTART)
        elif other is not adapter or adapter.kind != request.is_3d_lora_weight:
            for one in (adapter, other):
                one.distrust(
                    f"its number, {number}, stands for another one as well", f"Give each {_ALL_OF_ITS_OWN}"
                )
        elif adapter.is_unchanged():
            adapter.identify(self._reader)
        return adapter

    def distrust_all(self, why: str) -> None:
        """Something has changed in the engine's workers, and nothing says which adapters they have by now."""
        self._doubt = why
        for adapter in self._by_place.values():
            adapter.distrust(why, _RESTART)

    def close(self) -> None:
        """Read no more files. Does not wait for the one that is being read."""
        self._reader.shutdown(wait=False, cancel_futures=True)
