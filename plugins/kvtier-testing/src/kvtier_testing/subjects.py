"""A persistent tier that is tried by force, in processes of its own: killed (``crash``), or with its files damaged.

Decides which settings a tier gets for that, and how its processes are made: forked from one that never opens the tier
and has no threads.
"""

import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier_core.errors import ConfigError
from kvtier_core.plugins import class_of_tier, load_tier_type
from kvtier_core.tier_settings import TierSettings
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker

PATIENCE_S = 120.0
"""How long a process may take to answer."""
_MAKER = RowMaker("crash", 60_000)
_PLACES: Mapping[str, Callable[[Path], object]] = {
    "root": lambda root: root,
    "url": lambda root: f"file://{root}",
    "path": lambda root: root / "blocks",
}
"""Settings by which tiers name their place, and how one below a directory is written there."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The tier that is tried, and the rows it is tried with."""

    cls: type[Any]
    settings: TierSettings
    maker: RowMaker = _MAKER

    def open(self) -> TierDriver:
        """Open it as the core does."""
        return TierDriver(
            self.cls,
            self.settings,
            row_bytes=self.maker.row_bytes,
            namespace=self.maker.namespace,
            capacity_bytes=self.settings.capacity,
        )

    def at(self, root: Path) -> "Subject":
        """The same with its data below *root*. Raises ``ConfigError`` for a tier whose place is not known."""
        fields = type(self.settings).model_fields
        places = {name: place(root) for name, place in _PLACES.items() if name in fields}
        if not places:
            raise ConfigError(
                f"tier type {self.settings.type!r} has none of the settings {', '.join(_PLACES)}: where its files are "
                "is not known"
            )
        if "path" in places:
            root.mkdir(parents=True, exist_ok=True)
        return replace(self, settings=self.settings.model_copy(update=places))

    @property
    def code(self) -> str:
        """The directory of the plugin's code."""
        return str(Path(sys.modules[self.cls.__module__].__file__ or "").parent)


def make_subject(
    type_name: str, root: Path, given: Sequence[str], *, maker: RowMaker = _MAKER, **defaults: object
) -> Subject:
    """The tier of this type with its data at *root*.

    Its settings are those *given* as ``name=value``, then *defaults* as far as it has settings of these names, and a
    small capacity. Raises ``ConfigError`` for settings it refuses, and for a tier that keeps nothing.
    """
    tier_type = load_tier_type(type_name)
    fields = tier_type.cls.Settings.model_fields
    places = {name: str(place(root)) for name, place in _PLACES.items()}
    known: dict[str, object] = {**places, "capacity": "8MiB", **defaults}
    values: dict[str, object] = {"type": tier_type.name}
    values |= {name: value for name, value in known.items() if name in fields}
    values |= dict(item.split("=", 1) for item in given)
    try:
        settings: TierSettings = tier_type.cls.Settings.model_validate(values)
    except ValueError as error:
        raise ConfigError(
            f"tier type {tier_type.name!r}: {error}; give what is missing as --set NAME=VALUE"
        ) from None
    if "path" in fields:
        root.mkdir(parents=True, exist_ok=True)
    cls = class_of_tier(tier_type, settings)
    if not cls.info.persistent:
        raise ConfigError(f"tier type {type_name!r} is not persistent: nothing of it survives a process")
    return Subject(cls=cls, settings=settings, maker=maker)


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Run *work* in a child that may write to a pipe; returns the child and the pipe's other end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        work(writing)
        status = 0
    except BaseException:  # noqa: BLE001 - a child must not return into its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def read_all(fd: int) -> bytes:
    """Everything up to the pipe's end, or what came within a long time. Closes the pipe."""
    found = b""
    give_up = time.monotonic() + PATIENCE_S
    while select.select([fd], [], [], max(0.0, give_up - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            break
        found += part
    os.close(fd)
    return found
