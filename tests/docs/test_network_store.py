"""The tier of the page on network stores passes the kit, on a server that speaks its few words."""

import importlib.util
import socketserver
import sys
import threading
from pathlib import Path

import pytest

from kvtier_core.tier import TierContext
from kvtier_testing import TierTests
from kvtier_testing.rows import RowMaker, similar_keys
from tests.docs.tutorial import files

PAGE = Path(__file__).parents[2] / "docs/howto/network-store.md"
MAKER = RowMaker("space", 5000)


class Answer(socketserver.StreamRequestHandler):
    """One connection."""

    server: "Server"

    def handle(self) -> None:
        self.server.connections += 1
        while words := self.rfile.readline().split():
            self.answer(*words)
            self.wfile.flush()

    def answer(self, word: bytes, name: bytes = b"", size: bytes = b"0") -> None:
        blocks = self.server.blocks
        block = self.rfile.read(int(size))
        if self.server.refusals:
            self.wfile.write(self.server.refusals.pop())
        elif word == b"PING":
            self.wfile.write(b"+pong\n")
        elif word == b"HAS":
            self.wfile.write(b"+%d\n" % (name in blocks))
        elif word == b"PUT":
            blocks[name] = block
            self.wfile.write(b"+stored\n")
        elif word == b"GET":
            found = blocks.get(name)
            self.wfile.write(b"+-1\n" if found is None else b"+%d\n" % len(found) + found)
        elif word == b"DEL":
            blocks.pop(name, None)
            self.wfile.write(b"+gone\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.blocks: dict[bytes, bytes] = {}
        self.refusals: list[bytes] = []
        self.connections = 0


@pytest.fixture
def server():
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "kvtier_depot_of_the_page.py"
    file.write_text(files(PAGE)["tier.py"])
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[file.stem]


class TestDepot(TierTests):
    @pytest.fixture
    def tier_class(self, module):
        return module.DepotTier

    @pytest.fixture
    def tier_settings(self, server):
        return {"port": server.server_address[1]}

    @pytest.fixture
    def unusable_settings(self):
        return {"port": 1}


@pytest.fixture
def tier(module, server):
    settings = module.DepotTier.Settings(type="depot", port=server.server_address[1])
    tier = module.DepotTier(settings, TierContext(name="far", namespace="space", row_bytes=MAKER.row_bytes))
    tier.open()
    yield tier
    tier.close()


def test_i21_connections_are_kept_between_calls(tier, server):
    (key,) = similar_keys(1)
    for _ in range(5):
        assert tier.contains([key]) == [False]
    assert server.connections == 1


def test_i21_a_connection_with_half_an_answer_is_not_used_again(tier, server):
    key, other = similar_keys(2)
    tier.store(key, memoryview(MAKER.make(key)))
    tier.store(other, memoryview(MAKER.make(other)))
    server.refusals = [b"+8192\nhalf of a block\n"]
    row = bytearray(MAKER.row_bytes)
    with pytest.raises(TimeoutError):
        tier.load(key, memoryview(row))
    assert tier.load(other, memoryview(row))
    assert bytes(row) == MAKER.make(other)
    assert server.connections == 2


def test_i21_what_passes_is_named_and_what_does_not_is_not(tier, server, module):
    (key,) = similar_keys(1)
    server.refusals = [b"-no such word\n", b"-busy, come again\n"]
    with pytest.raises(module.BusyError):
        tier.contains([key])
    with pytest.raises(module.ServerError):
        tier.contains([key])
    assert module.BusyError in module.DepotTier.transient
    assert tier.contains([key]) == [False]
    assert server.connections == 1
