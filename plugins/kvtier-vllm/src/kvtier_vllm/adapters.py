"""LoRA adapters, known by what their files hold for as long as these stay as they are (C02).

vLLM reads an adapter's files when it needs them, and again once it has evicted it, and says nothing of that. So they
are looked at when a request comes, while it waits, and when its blocks are stored: vLLM has read them by then. Looks
that are all the same mean that what it read is what was digested. Decides which adapters may store and load. Opens no
file and names no vLLM type.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from kvtier_core.engine import OffloadKey
from kvtier_vllm.adapter_files import IDENTITY_BYTES, AdapterFiles, Looks
from kvtier_weights import is_settled

_log = logging.getLogger("kvtier.vllm")

_GROUP_BYTES = 4
PATIENCE_S = 1.0
"""How long a request, or a store, waits for its adapter's files. A look at them takes 1 ms on a network."""
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
        self._size = IDENTITY_BYTES if has_lora else 0

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

    def __init__(self, about: str, files: AdapterFiles, path: str | None, kind: object = None) -> None:
        self._about = about
        self._files = files
        self._path = path
        self.kind = kind
        """What, beside the files, makes its weights."""
        self._under_way: deque[Future[Looks]] = deque()
        """At most two looks: one that runs, and one that has not begun."""
        self._asked = 0
        """How many looks were asked for. Each goes by its number."""
        self._judged = 0
        self._first: Looks | None = None
        self._digest: Future[tuple[bytes, Looks]] | None = None
        self._identity: bytes | None = None
        self._is_trusted = True
        self._was_late = False

    @property
    def identity(self) -> bytes | None:
        """Stands for what its files hold; ``None`` while that is not known, and when it is not trusted."""
        return self._identity if self._is_trusted else None

    @property
    def is_being_digested(self) -> bool:
        """Whether its files are being read, so that its identity may be known soon."""
        return self._is_trusted and self._digest is not None

    @property
    def is_trusted(self) -> bool:
        """Whether its files are what they were, by all looks that are over."""
        return self._is_trusted

    def look(self) -> int:
        """Have its files looked at, not before now. Gives the number of that look."""
        self.take()
        # One that has not begun serves all who ask. The order matters: what is over does not run any more.
        is_waiting = self._under_way and not self._under_way[-1].running() and not self._under_way[-1].done()
        if self._path is None:
            self.distrust("kvtier did not see it come", _RESTART)
        elif self._is_trusted and not is_waiting:
            self._under_way.append(self._files.look(self._path))
            self._asked += 1
        return self._asked

    def has_looked(self, number: int) -> bool:
        """Whether that look is over. Nothing is looked at any more once it is not trusted."""
        self.take()
        return self._judged >= number or not self._is_trusted

    def may_be_read(self) -> None:
        """VLLM may read its files from now on.

        Waits for the first look, which must be over by then. vLLM itself stops for these files, to read them.
        """
        if self._first is None and self._is_trusted:
            self.look()
            wait(list(self._under_way)[:1], PATIENCE_S)
            self.take()
            if self._first is None:
                self.distrust(
                    f"its files did not open within {PATIENCE_S:g} s, and vLLM reads them before kvtier could look at "
                    "them",
                    _RESTART,
                )

    def take(self) -> None:
        """Judge by what is over by now. Nothing else changes what is known of it."""
        while self._is_trusted and self._under_way and self._under_way[0].done():
            look = self._under_way.popleft()
            self._judge([] if look.exception() else look.result())
            self._judged += 1
        if self._is_trusted and self._digest is not None and self._digest.done():
            self._learn(self._digest)
            self._digest = None

    def _judge(self, looks: Looks) -> None:
        """All looks, in their order."""
        if not looks:
            self.distrust("kvtier sees no files of it there", "Give vLLM the path of a local directory")
        elif None in looks:
            self.distrust(
                "it is in a read-only image, whose times don't tell it from another", "Copy it to a directory"
            )
        elif self._first is None:
            self._first = looks
        elif looks != self._first:
            self.distrust(
                "its files have changed since it was first used", f"Give what has changed {_ALL_OF_ITS_OWN}"
            )
        is_settled_now = all(is_settled(look) for look in looks if look is not None)
        if self._is_trusted and self._identity is None and self._digest is None and is_settled_now:
            assert self._path is not None
            self._digest = self._files.digest(self._path, self.kind)

    def _learn(self, digest: Future[tuple[bytes, Looks]]) -> None:
        if error := digest.exception():
            self.distrust(f"its files can't be read ({error})", "Make them readable, at another path")
            return
        self._identity, looks = digest.result()
        self._judge(looks)

    def be_late(self) -> None:
        """A look takes longer than requests and stores wait for it. Logged once."""
        if not self._was_late:
            self._was_late = True
            _log.warning(
                "%s: a look at its files takes more than %g s. Until it is over, its blocks are neither stored nor "
                "loaded. Move its files to a storage that answers sooner",
                self._about,
                PATIENCE_S,
            )

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
        self._files = AdapterFiles()
        self.stranger = Adapter("an adapter", self._files, None)
        """One of which nothing is known."""
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
            self._by_place[name, path] = Adapter(about, self._files, path, kind)
        adapter = self._by_place[name, path]
        other = self._by_number.setdefault(number, adapter)
        if self._doubt is not None:
            adapter.distrust(self._doubt, _RESTART)
        elif other is not adapter or adapter.kind != request.is_3d_lora_weight:
            for one in (adapter, other):
                one.distrust(
                    f"its number, {number}, stands for another one as well", f"Give each {_ALL_OF_ITS_OWN}"
                )
        adapter.look()
        return adapter

    def distrust_all(self, why: str) -> None:
        """Something has changed in the engine's workers, and nothing says which adapters they have by now."""
        self._doubt = why
        for adapter in self._by_place.values():
            adapter.distrust(why, _RESTART)

    def close(self) -> None:
        """Begin to read no more files. Does not wait for the one that is being read."""
        self._files.close()
