"""Sizes and times as people write them: ``"8GiB"``, ``"512 MB"``, ``"30s"``, ``"250ms"``.

A bare number is bytes or seconds. Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (KB, MB, GB,
TB) powers of 1000, as IEC 80000-13 has them. Negative, infinite and unit-less nonsense is a ``ValueError`` that
shows what would be right.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator

from kvtier_core.transfer.memory import format_size
from kvtier_core.transfer.waiting import LONGEST_S

__all__ = ["Duration", "Size", "exact_size", "format_size", "parse_duration", "parse_size"]

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": (1024 if infix else 1000) ** power
    for power, letter in enumerate("kmgt", start=1)
    for infix in ("i", "")
}
_TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LARGEST_SIZE = 1 << 62
_QUANTITY = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def _parse(value: object, units: dict[str, float] | dict[str, int], example: str, limit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a quantity such as {example}")  # noqa: TRY004 - pydantic collects ValueErrors
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None or match[2].lower() not in units:
            raise ValueError(f"expected a quantity such as {example}")
        value = float(match[1]) * units[match[2].lower()]
    if not 0 <= value < limit:  # a NaN is refused too
        raise ValueError(f"expected a quantity of at least 0, and not beyond all measure, such as {example}")
    return value


def parse_size(value: object) -> int:
    """Bytes from ``"8GiB"``, ``"1.5 MB"`` or a number. Raises ``ValueError``."""
    example = '"8GiB" or "512MB", in B, KB, KiB, MB, MiB, GB, GiB, TB or TiB'
    number = _parse(value, _SIZE_UNITS, example, _LARGEST_SIZE)
    if number != int(number):
        raise ValueError('expected a whole number of bytes, such as "8GiB" or "512MB"')
    return int(number)


def parse_duration(value: object) -> float:
    """Seconds from ``"30s"``, ``"250ms"``, ``"2h"`` or a number. Raises ``ValueError``."""
    return float(_parse(value, _TIME_UNITS, '"30s" or "250ms", in ms, s, m, h or d', LONGEST_S))


def exact_size(count: int) -> str:
    """Bytes in the largest binary unit that needs no fraction, so that nothing is rounded: ``"1536MiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return f"{count}B"


Size = Annotated[int, BeforeValidator(parse_size)]
"""A field type: a number of bytes."""

Duration = Annotated[float, BeforeValidator(parse_duration)]
"""A field type: a number of seconds."""
