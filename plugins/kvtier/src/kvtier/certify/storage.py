"""The tiers' storage while an engine is certified: directories of our own, copied, put back and damaged.

Decides which settings give a tier a place of its own, so that nothing of the operator's is touched, and which stored
rows change places. Knows no tier's format: a row is found by the proof at its end.
"""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kvtier_core.engine import lasting_tiers
from kvtier_core.errors import ConfigError
from kvtier_core.proof import PROOF_BYTES, ROW_ALIGNMENT, read_proof, row_bytes_for
from kvtier_core.settings import Settings
from kvtier_core.tier import TierSettings

DEFAULT_TIER = "disk"
_AT_DEFAULT = ("read_only", "publish", "store_threshold", "ttl", "compression")
"""Settings that stay at their default here: ours is an empty directory that takes each block at once, and keeps it."""
_FIRST_ROW_S = 10.0
_LOOK_S = 0.001


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """Where a row is, and what its proof says of it."""

    path: Path
    start: int
    length: int
    namespace: bytes
    key: bytes

    def read(self) -> bytes:
        """All of it."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.length)

    def write(self, content: bytes) -> None:
        """In place."""
        with self.path.open("r+b") as file:
            file.seek(self.start)
            file.write(content)


class Storage:
    """What the tiers of *settings* keep, in *directory*, which is empty."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        """Raises ``ConfigError`` for a tier whose storage can't be elsewhere."""
        self._tiers = directory / "tiers"
        self._saved = directory / "saved"
        self.overrides = {"pool": _defaults_of(settings.pool), **_places_of_our_own(settings, self._tiers)}
        self.lasting = lasting_tiers(settings) if settings.enabled_tiers else [DEFAULT_TIER]
        """The tiers whose blocks outlive the engine."""
        self.clear()

    def clear(self) -> None:
        """Remove everything that is stored."""
        shutil.rmtree(self._tiers, ignore_errors=True)
        self._tiers.mkdir()

    def save(self, name: str) -> None:
        """Remember what is stored now."""
        shutil.copytree(self._tiers, self._saved / name)

    def has(self, name: str) -> bool:
        """Whether that was remembered."""
        return (self._saved / name).exists()

    def restore(self, name: str, *tiers: str) -> None:
        """Put back what was remembered, of these *tiers* alone if some are named."""
        self.clear()
        for saved in (self._saved / name).iterdir():
            if not tiers or saved.name in tiers:
                shutil.copytree(saved, self._tiers / saved.name)

    def wait_for_a_row(self) -> None:
        """Return when a first row is written, or after a while."""
        deadline = time.monotonic() + _FIRST_ROW_S
        while time.monotonic() < deadline and next(find_rows(self._tiers), None) is None:
            time.sleep(_LOOK_S)

    def swap_rows(self) -> int:
        """Let rows in the middle change places in pairs; how many did."""
        rows = _middle(list(find_rows(self._tiers)))
        pairs = [
            pair for pair in zip(rows[::2], rows[1::2], strict=False) if pair[0].length == pair[1].length
        ]
        for one, other in pairs:
            content = one.read()
            one.write(other.read())
            other.write(content)
        return 2 * len(pairs)

    def put_others_rows(self, name: str) -> int:
        """Overwrite rows that were remembered under *name* by those stored since then for the same keys; how many."""
        known = {row.namespace for row in find_rows(self._saved / name)}
        rows = list(find_rows(self._tiers))
        others = {(row.key, row.length): row for row in rows if row.namespace not in known}
        pairs = [
            (row, others[row.key, row.length])
            for row in _middle([row for row in rows if row.namespace in known])
            if (row.key, row.length) in others
        ]
        for row, other in pairs:
            row.write(other.read())
        return len(pairs)


def _middle(rows: Sequence[StoredRow]) -> Sequence[StoredRow]:
    """A third of the rows, two at least: the blocks before them can be restored, whichever way they were written."""
    outside = max(0, min(len(rows) // 3, (len(rows) - 2) // 2))
    return rows[outside : len(rows) - outside]


def _places_of_our_own(settings: Settings, directory: Path) -> dict[str, Any]:
    if not settings.enabled_tiers:
        return {"tiers": {DEFAULT_TIER: {"type": "disk", "root": str(directory / DEFAULT_TIER)}}}
    tiers: dict[str, dict[str, Any]] = {}
    lasting = lasting_tiers(settings)
    for name, tier in settings.enabled_tiers.items():
        place: dict[str, Any] = {}
        if hasattr(tier, "root"):
            place = {"root": str(directory / name)}
        elif hasattr(tier, "url"):
            place = {"url": (directory / name).as_uri()}
        tiers[name] = _defaults_of(tier) | place
        if (not place and name in lasting) or not _may_have(tier, tiers[name]):
            raise ConfigError(
                f"tiers.{name} (type {tier.type!r}) can't keep its blocks in a directory that is its root or url, and "
                "certifying damages what is stored: name a configuration without it"
            )
    return {"tiers": tiers}


def _may_have(tier: TierSettings, changed: Mapping[str, Any]) -> bool:
    """Whether the tier's type takes these values in place of its own. An address may have to be a server's."""
    try:
        type(tier).model_validate({**tier.model_dump(), **changed})
    except ValidationError:
        return False
    return True


def _defaults_of(part: BaseModel) -> dict[str, Any]:
    fields = type(part).model_fields
    return {name: fields[name].get_default() for name in _AT_DEFAULT if name in fields}


def reason_of(error: OSError) -> str:
    """What went wrong, in one line: an error of ``copytree`` has a list with one for each file."""
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][2])
    return str(error)


def find_rows(directory: Path) -> Iterator[StoredRow]:
    """Every whole row in the files below *directory*, in order."""
    for path in sorted(directory.rglob("*")):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:  # an engine at work has removed it
            continue
        for end in range(ROW_ALIGNMENT, len(content) + 1, ROW_ALIGNMENT):
            proof = read_proof(content[end - PROOF_BYTES : end])
            if proof is not None and (start := end - row_bytes_for(proof.payload_bytes)) >= 0:
                yield StoredRow(
                    path=path, start=start, length=end - start, namespace=proof.namespace, key=proof.key
                )
