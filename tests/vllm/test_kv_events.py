"""vLLM's publisher tells what kvtier's pool and tiers hold: a replay gives their contents (C16, C61)."""

from collections import defaultdict

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


class Subscriber:
    """Replays what an engine publishes, by medium."""

    def __init__(self):
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.contents = defaultdict(set)

    def take(self):
        """Wait for one batch and take it in."""
        import msgspec

        _, _, payload = self.socket.recv_multipart()
        for kind, hashes, *rest in msgspec.msgpack.decode(payload)[1]:
            if kind == "BlockStored":
                self.contents[rest[4]].update(map(str, hashes))
            elif kind == "BlockRemoved":
                self.contents[rest[0]].difference_update(map(str, hashes))

    def close(self):
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def subscriber():
    subscriber = Subscriber()
    yield subscriber
    subscriber.close()


def test_c16_c61_events_replay_into_pool_and_disk(start, tmp_path, subscriber):
    engine = start(
        connector(disk(tmp_path, pool="1MiB")),  # 28 rows
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{subscriber.port}",
        },
    )
    for number in range(6):
        engine.store(prompt(number, blocks=5))
        engine.call("settle")
    for number in range(20):  # each step tells what has changed by then
        engine.generate([1, 2, number + 1])
    in_pool = set(engine.call("hashes_in_pool"))
    on_disk = {str(int(file.stem[48:64], 16)) for file in tmp_path.rglob("*.kv")}
    assert len(in_pool) == 28
    assert len(on_disk) == 30
    while (subscriber.contents["CPU"], subscriber.contents["STORAGE"]) != (in_pool, on_disk):
        subscriber.take()
    engine.close()
