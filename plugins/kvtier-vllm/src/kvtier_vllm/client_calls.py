"""What a client has vLLM do to weights and adapters while the engine runs, of which a connector is told nothing (C02).

Weights change by ``collective_rpc``, ``/update_weights`` included, which the engine core passes on to the workers.
Sleep of level 2 throws them away. Adapters come with ``add_lora`` and with requests. This module stands in the way of
these calls, in the engine core's process. It decides whether weights have changed, or may have; what to do then is the
holders'.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from kvtier_core.engine import TierManager
from kvtier_vllm.adapters import Adapter, Adapters
from kvtier_vllm.weights_look import look_at_weights

_log = logging.getLogger("kvtier.vllm")


class Holder:
    """What one engine's tiers hold, which its weights and adapters made."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self.holds_nothing = False
        """Whether all was left behind, and no request has come since."""
        self.adapters = Adapters()
        self._arriving: dict[str, tuple[Adapter | None, Sequence[bytes]]] = {}
        """By the ids of requests that begin: the adapter, and the hashes of the prompt."""

    def arrive(self, request: Any) -> None:
        """*request* is about to begin."""
        adapter = request.lora_request
        met = None if adapter is None else self.adapters.meet(adapter)
        self._arriving[request.request_id] = met, request.block_hashes

    def has_arrived(self, request: Any) -> None:
        """It has begun, or failed to."""
        self._arriving.pop(request.request_id, None)

    def adapter_of(self, request_id: str) -> Adapter | None:
        """The adapter of the request that begins, ``None`` for the model alone. One not seen coming has a stranger."""
        adapter, _ = self._arriving.get(request_id, (self.adapters.stranger, ()))
        return adapter

    def hashes_of(self, request_id: str) -> Sequence[bytes]:
        """The hashes of the prompt of the request that begins, none of one not seen coming."""
        _, hashes = self._arriving.get(request_id, (None, ()))
        return hashes

    def leave_behind(self, why: str) -> None:
        """Nothing stored so far answers any more, and what is stored from now on is for this run alone."""
        if self.holds_nothing:
            return
        self.holds_nothing = True
        self.adapters.distrust_all(why)
        _log.warning(
            "%s: nothing stored before is loaded any more, from any tier, and no other run is given what is stored "
            "from now on. Call reset_prefix_cache(reset_connector=True) after each such change: vLLM's own cache is as "
            "old",
            why,
        )
        self._tiers.reset_cache(everywhere=True)


class ClientCalls:
    """Tells every holder in this process what has changed. Used by the engine core's thread."""

    def __init__(self) -> None:
        self._holders: WeakSet[Holder] = WeakSet()
        self._is_watching = False

    def watch(self, tiers: TierManager) -> Holder:
        """What *tiers* hold is told from now on, as long as the holder is referenced."""
        holder = Holder(tiers)
        self._holders.add(holder)
        if not self._is_watching:
            self._is_watching = True
            _wrap("collective_rpc", self._around_rpc)
            _wrap("sleep", self._around_sleep)
            _wrap("add_request", self._around_request)
            _wrap("add_lora", self._around_adapter)
        return holder

    def unwatch(self, holder: Holder) -> None:
        """Its tiers are about to shut down. Twice is fine."""
        self._holders.discard(holder)
        holder.adapters.close()

    def _leave_behind(self, why: str) -> None:
        for holder in self._holders:
            holder.leave_behind(why)

    def _around_rpc(
        self, call: Callable[..., Any], core: EngineCore, method: Any, *rest: Any, **named: Any
    ) -> Any:
        if all(holder.holds_nothing for holder in self._holders):
            return call(method, *rest, **named)
        before = _look(core)
        try:
            return call(method, *rest, **named)
        finally:
            if before is None or before != _look(core):
                name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
                self._leave_behind(
                    f"collective_rpc({name!r}) has changed weights or adapters, or they can't be told"
                )

    def _around_sleep(
        self, call: Callable[..., Any], core: EngineCore, level: int = 1, *rest: Any, **named: Any
    ) -> Any:
        if level > 1:
            self._leave_behind(f"sleep of level {level} throws the weights away")
        return call(level, *rest, **named)

    def _around_request(
        self, call: Callable[..., Any], core: EngineCore, request: Any, *rest: Any, **named: Any
    ) -> Any:
        for holder in self._holders:
            holder.arrive(request)
        try:
            return call(request, *rest, **named)
        finally:
            for holder in self._holders:
                holder.has_arrived(request)

    def _around_adapter(self, call: Callable[..., Any], core: EngineCore, lora_request: LoRARequest) -> Any:
        for holder in self._holders:
            holder.adapters.meet(lora_request).may_be_read()
        return call(lora_request)


CALLS = ClientCalls()
"""Those of this process."""


def _wrap(name: str, around: Callable[..., Any]) -> None:
    original = getattr(EngineCore, name)

    @wraps(original)
    def method(core: EngineCore, *arguments: Any, **named: Any) -> Any:
        return around(partial(original, core), core, *arguments, **named)

    setattr(EngineCore, name, method)


def _look(core: EngineCore) -> list[str] | None:
    """Stands for the weights of each worker; ``None`` where they can't be read, as in an engine that sleeps."""
    if core.model_executor.is_sleeping:
        return None
    try:
        looks: list[str] = core.model_executor.collective_rpc(look_at_weights)
    except Exception as error:  # noqa: BLE001 - a weight of an unheard-of kind must not stop the engine
        _log.warning("can't look at the model's weights, and takes them for changed: %s", error)
        return None
    return looks
