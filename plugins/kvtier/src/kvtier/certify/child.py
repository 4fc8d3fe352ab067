"""A program: one engine in a process of its own. It answers what ``process`` asks over a connection.

``python -m kvtier.certify.child DESCRIPTOR``. It ends when the other end of the connection does.
"""

import sys
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import Connection

from kvtier.certify.drivers import Driver, Engine, Opening, SupportsReset
from kvtier.certify.process import Facts
from kvtier.engines import find_engine, load_engine
from kvtier_core.errors import KvtierError
from kvtier_core.masking import mask_text
from kvtier_core.plugins.discovery import CERTIFY_GROUP


def main() -> None:
    """Open the engine, then answer until there is nobody to answer."""
    with Connection(int(sys.argv[1])) as connection, suppress(EOFError, BrokenPipeError):
        engine = _open(connection)
        if engine is not None:
            _serve(connection, engine)


def _open(connection: Connection) -> Engine | None:
    name, blocked, opening = _order(connection)
    try:
        driver: Driver = load_engine(find_engine(CERTIFY_GROUP, name, blocked))
        engine = driver(opening)
    except KvtierError as error:
        connection.send(_as_known(error))
        return None
    facts = Facts(
        tokens_per_block=engine.tokens_per_block,
        vocab_size=engine.vocab_size,
        dtype=engine.dtype,
        can_reset=isinstance(engine, SupportsReset),
    )
    connection.send(facts)
    return engine


def _order(connection: Connection) -> tuple[str, Collection[str], Opening]:
    order: tuple[str, Collection[str], Opening] = connection.recv()
    return order


def _as_known(error: KvtierError) -> KvtierError:
    """The same error, of a class that the other process knows, and without what must not be shown."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == KvtierError.__module__]
    known: KvtierError = kinds[0](mask_text(str(error)))
    return known


def _serve(connection: Connection, engine: Engine) -> None:
    method = ""
    try:
        while method != "close":
            method, arguments = connection.recv()
            try:
                answer = getattr(engine, method)(*arguments)
            except KvtierError as error:
                answer = _as_known(error)
            connection.send(answer)
    except EOFError:
        engine.close()


if __name__ == "__main__":
    main()
