"""Whoever follows vLLM's publisher learns what kvtier's pool and tiers hold (C16, C61)."""

import time
from collections import defaultdict

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt

PATIENCE_S = 60.0

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def published(endpoint):
    """All events so far, from vLLM's replay socket: the request and its answers are as a REQ socket has them."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while socket.poll(PATIENCE_S * 1000):
            _, _topic, _number, payload = socket.recv_multipart()
            if not payload:
                return
            yield from msgspec.msgpack.decode(payload, type=KVEventBatch).events
    raise AssertionError("vLLM's publisher does not answer")


def contents_after(events):
    """What each medium holds, as somebody has it who was told only this."""
    contents: defaultdict[str, set[str]] = defaultdict(set)
    for event in events:
        hashes = set(map(str, event.block_hashes))
        if type(event).__name__ == "BlockStored":
            contents[event.medium] |= hashes
        else:
            assert type(event).__name__ == "BlockRemoved"
            assert contents[event.medium] >= hashes
            contents[event.medium] -= hashes
    return contents


@pytest.mark.parametrize(
    "lora", [{}, {"enable_lora": True, "max_lora_rank": 8}], ids=["plain", "v8 with LoRA"]
)
@pytest.mark.filterwarnings("ignore")  # what vLLM imports is its own affair
def test_c16_c61_v8_events_replay_into_pool_and_disk(start, tmp_path, lora):
    replay = f"ipc://{tmp_path}/replay"
    engine = start(
        connector(disk(tmp_path / "root", pool="1MiB", layout="files")),  # 28 rows, and a file a block
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": replay,
        },
        **lora,
    )
    for number in range(6):
        engine.store(prompt(number, blocks=5))
        engine.call("settle")
    for number in range(3):  # each step tells what has changed by then
        engine.generate([1, 2, number + 1])
    in_pool = set(engine.call("hashes_in_pool"))
    on_disk = {str(int(file.stem[48:64], 16)) for file in tmp_path.rglob("*.kv")}
    assert len(in_pool) == 28
    assert len(on_disk) == 30
    give_up = time.monotonic() + PATIENCE_S
    while True:  # the publisher has a queue and a thread
        contents = contents_after(published(replay))
        if (contents["CPU"], contents["STORAGE"]) == (in_pool, on_disk):
            break
        assert time.monotonic() < give_up, contents
        time.sleep(0.1)
    engine.close()
