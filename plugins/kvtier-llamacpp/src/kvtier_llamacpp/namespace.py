"""What makes a llama.cpp model's KV bytes interchangeable (C02): the file, the build, and how the context is set up."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvtier_core import ConfigError
from kvtier_core.engine import GroupSpec, Namespace
from kvtier_weights import digest_weights

_PART = re.compile(r"(?P<begin>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_files(path: Path) -> Sequence[Path]:
    """The files of a GGUF model: *path*, or all its parts where it is the first of several.

    Raises ``ConfigError`` when one is missing, or *path* is another part.
    """
    match = _PART.fullmatch(path.name)
    if match and not 1 == int(match["number"]) <= int(match["count"]):
        raise ConfigError(
            f"{path}: give the first part of a model in several files: {match['begin']}-00001-of-..."
        )
    names = (
        [
            f"{match['begin']}-{number:05}-of-{match['count']}.gguf"
            for number in range(1, int(match["count"]) + 1)
        ]
        if match
        else [path.name]
    )
    files = [path.with_name(name) for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{file}: no such file: give the path of a GGUF file, of several parts the first"
            )
    return files


def namespace_for(
    files: Sequence[Path],
    *,
    setup: str,
    kv_dtype: str,
    tokens_per_block: int,
    groups: tuple[GroupSpec, ...],
) -> Namespace:
    """The namespace of the model in *files*, of which *groups* are kept.

    The content of all files counts. *setup* says what else does: the build, because llama.cpp promises the format of
    its states to no other, and how the context is set up. The number of threads is part of it, because what is computed
    token by token rounds differently with it. Rope and all that the file says of the model are in its content. Raises
    ``OSError`` when a file can't be read. Cost: as ``digest_weights``.
    """
    return Namespace(
        model=files[0].stem,
        weights_digest=digest_weights(files),
        kv_dtype=kv_dtype,
        tokens_per_block=tokens_per_block,
        groups=groups,
        layout=f"{setup}, state of one sequence, unified",
    )
