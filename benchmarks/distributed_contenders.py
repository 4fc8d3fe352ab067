"""Those that ``distributed.py`` compares: a tier behind the whole manager, and the store's client without kvtier.

All store from the rows of one pool and load into them. Decides how each is driven.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import valkey

from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.keys import OffloadKey
from kvtier_core.manager import TierBuild, TierManager
from kvtier_core.manager.blocking import BlockingTier
from kvtier_core.manager.guard import TierIdentity
from kvtier_core.manager.hook_tier import HookTier
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.policies import make_policy
from kvtier_core.tier import BlockTier
from kvtier_core.transfer import Pool
from kvtier_core.values import LookupState, RequestInfo
from kvtier_testing.bench.rows import Measured, Rows, timed

_PATIENCE_S = 120.0
_PROMPTS = 4


@contextmanager
def managed(
    tier_class: type[Any], settings: dict[str, object], pool: Pool, payload_bytes: int
) -> Iterator[TierManager]:
    """A manager with one tier, over *pool*, which it takes to be empty."""
    whole = {"max_quarantined": 1.0, "max_cascade": 1.0}  # one prompt may take the whole pool
    chosen = tier_class.Settings.model_validate({"type": "bench", "limits": whole, **settings})
    group = GroupSpec(layers=("0",), block_bytes=payload_bytes)
    rows = pool.geometry.num_rows
    manager = TierManager(
        pool=pool,
        namespace=Namespace(
            model="bench",
            kv_dtype="float32",
            tokens_per_block=16,
            groups=(group,),
            layout="bench",
            weights_digest="bench",
        ),
        tiers=[
            TierBuild(
                name="far",
                identity=TierIdentity(name="far", type="bench", distribution="bench", version="0"),
                info=tier_class.info,
                limits=chosen.limits,
                capacity_bytes=None,
                make_port=partial(BlockingTier, tier_class, chosen)
                if issubclass(tier_class, BlockTier)
                else partial(HookTier, lambda context: tier_class(chosen, context)),
            )
        ],
        policy=make_policy("lru", rows),
        reset_tiers=False,
        limits=PoolLimits(max_promotion_rows=rows, max_cascade_rows=rows, device_timeout_s=_PATIENCE_S),
    )
    try:
        manager.open(_PATIENCE_S)
        yield manager
    finally:
        manager.shutdown(_PATIENCE_S)


def settle(manager: TierManager, is_done: Callable[[], bool]) -> None:
    """Step as an engine does, until *is_done*."""
    while not is_done():
        manager.end_step()
        manager.wait(_PATIENCE_S)


def store_all(manager: TierManager, keys: Sequence[OffloadKey]) -> None:
    """Store blocks with these keys, of what is in the pool's rows, and wait for them."""
    for name, part in _prompts(keys):
        manager.new_request(RequestInfo(request_id=name))
        prepared = manager.reserve_store(name, part)
        if prepared is None:
            raise RuntimeError("no room in the pool")
        manager.commit_store(prepared.job_id, success=True)
        manager.request_finished(name)
    settle(manager, lambda: not manager.has_pending_work)


class Managed:
    """A tier behind a manager that stores, and behind another one that loads, as two servers that run for long.

    So the one that loads has to ask for each block. Proofs are made and checked meanwhile. There are four prompts, and
    the next one is looked up while the one before loads, as in an engine with a queue.
    """

    def __init__(self, name: str, tier_class: type[Any], settings: dict[str, object]) -> None:
        self.name = name
        self._tier_class = tier_class
        self._settings = settings
        self._managers: dict[str, TierManager] = {}
        self._exits = ExitStack()

    def _manager(self, what: str, rows: Rows) -> TierManager:
        """The one for *what*, with nothing in the pool."""
        if what not in self._managers:
            made = managed(self._tier_class, self._settings, rows.pool, rows.payload_bytes)
            self._managers[what] = self._exits.enter_context(made)
        self._managers[what].reset_cache()
        return self._managers[what]

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        keys, manager = rows.keys(number), self._manager("store", rows)
        before = manager.counters.tiers["far"].stored
        measured = timed(lambda: store_all(manager, keys))
        if manager.counters.tiers["far"].stored != before + len(keys):
            raise RuntimeError(f"not all blocks were stored: {manager.figures()}")
        return measured

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        keys, manager = rows.keys(number), self._manager("load", rows)
        rows.wipe()
        return timed(lambda: self._load(manager, keys))

    def _load(self, manager: TierManager, keys: Sequence[OffloadKey]) -> None:
        going_on: dict[str, tuple[OffloadKey, ...]] = {}
        for name, part in _prompts(keys):
            manager.new_request(RequestInfo(request_id=name))
            going_on[name] = part
            settle(manager, partial(_are_loading, manager, going_on))
        settle(manager, lambda: _are_loading(manager, going_on) and not going_on)

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """End both."""
        self._exits.close()


def _are_loading(manager: TierManager, going_on: dict[str, tuple[OffloadKey, ...]]) -> bool:
    """End those of the requests *going_on* whose blocks are there. Whether those of all others are on their way."""
    are_loading = True
    for name, keys in list(going_on.items()):
        answer = manager.lookup(name, (keys,))
        if answer.is_settled:
            prepared = manager.reserve_load(name, keys)
            if len(prepared.keys) < len(keys):
                raise RuntimeError(f"{len(keys) - len(prepared.keys)} blocks did not come back right")
            manager.commit_load(prepared.job_id)
            manager.request_finished(name)
            del going_on[name]
        elif answer.state is not LookupState.HIT_PENDING:
            are_loading = False
    return are_loading


def _prompts(keys: Sequence[OffloadKey]) -> Iterator[tuple[str, tuple[OffloadKey, ...]]]:
    size = -(-len(keys) // _PROMPTS)
    for begin in range(0, len(keys), size):
        yield f"from {begin}", tuple(keys[begin : begin + size])


class Threads:
    """What contenders without kvtier share: one thread a connection, each with every so manieth batch of rows."""

    batch_bytes = 4 << 20
    """Bytes under way on a connection: as many as one call of our tier moves."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def _each(self, rows: Rows, move: Callable[[int, Sequence[int]], None]) -> Measured:
        size = max(1, self.batch_bytes // rows.row_bytes)
        batches = [range(begin, min(begin + size, rows.count)) for begin in range(0, rows.count, size)]

        def work(number: int) -> None:
            for batch in batches[number :: self._threads]:
                move(number, batch)

        return timed(lambda: list(self._pool.map(work, range(self._threads))))


class BareSockets(Threads):
    """The shortest loop on sockets: known lengths alone, no time-outs, and any surprise ends it.

    With *proves* it makes each row's proof before it sends the row, and checks it after it has received the row.
    """

    def __init__(self, port: int, threads: int, *, proves: bool = False) -> None:
        super().__init__(threads)
        self.name = "proven" if proves else "bare"
        self._proves = proves
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(threads)]
        for one in self._sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        keys = rows.keys(number)
        if not self._proves:
            rows.seal(keys)

        def move(thread: int, batch: Sequence[int]) -> None:
            if self._proves:
                rows.seal(keys, batch)
            one, size = self._sockets[thread], rows.row_bytes
            parts: list[bytes | memoryview] = []
            for index in batch:
                name = self._name(keys[index])
                parts += (
                    b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size),
                    rows.view(index),
                    b"\r\n",
                )
            _send(one, parts)
            _expect(one, b"+OK\r\n" * len(batch))

        return self._each(rows, move)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        keys = rows.keys(number)
        rows.wipe()
        begin = b"$%d\r\n" % rows.row_bytes

        def move(thread: int, batch: Sequence[int]) -> None:
            one = self._sockets[thread]
            names = [self._name(keys[index]) for index in batch]
            one.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names))
            for index in batch:
                _expect(one, begin)
                one.recv_into(rows.view(index), rows.row_bytes, socket.MSG_WAITALL)
                _expect(one, b"\r\n")
            if self._proves:
                rows.check(keys, batch)

        measured = self._each(rows, move)
        if not self._proves:
            rows.check(keys)
        return measured

    def _name(self, key: OffloadKey) -> bytes:
        return self.name.encode() + b":" + key

    def clear(self) -> None:
        """Empty the server: the contenders together would fill its memory."""
        self._sockets[0].sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        _expect(self._sockets[0], b"+OK\r\n")

    def close(self) -> None:
        """End the connections."""
        self._pool.shutdown()
        for one in self._sockets:
            one.close()


def _send(one: socket.socket, parts: list[bytes | memoryview]) -> None:
    """Large pieces as they are, the small ones before each in the same call."""
    for index in range(0, len(parts), 3):
        head, row, tail = parts[index : index + 3]
        sent = one.sendmsg([head, row, tail])
        whole = len(head) + len(row) + len(tail)
        if sent < whole:
            left = (
                memoryview(row)[max(0, sent - len(head)) :] if sent < whole - len(tail) else memoryview(b"")
            )
            if sent < len(head):
                one.sendall(head[sent:])
            one.sendall(left)
            one.sendall(tail[max(0, sent - len(head) - len(row)) :])


def _expect(one: socket.socket, words: bytes) -> None:
    if (got := one.recv(len(words), socket.MSG_WAITALL)) != words:
        raise RuntimeError(f"the server answered {got!r}")


class OrdinaryClient(Threads):
    """The client library as its manual shows it: one ``set`` or ``get`` a block."""

    name = "client"

    def __init__(self, port: int, threads: int) -> None:
        super().__init__(threads)
        self._client = valkey.Valkey(port=port)

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        keys = rows.keys(number)
        rows.seal(keys)

        def move(_thread: int, batch: Sequence[int]) -> None:
            for index in batch:
                self._client.set(b"client:" + keys[index], rows.view(index))

        return self._each(rows, move)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        keys = rows.keys(number)
        rows.wipe()

        def move(_thread: int, batch: Sequence[int]) -> None:
            for index in batch:
                rows.view(index)[:] = self._client.get(b"client:" + keys[index])

        measured = self._each(rows, move)
        rows.check(keys)
        return measured

    def clear(self) -> None:
        """Empty the server."""
        self._client.flushall()

    def close(self) -> None:
        """End the connections."""
        self._pool.shutdown()
        self._client.close()
