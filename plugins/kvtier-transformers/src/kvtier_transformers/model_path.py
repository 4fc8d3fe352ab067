"""Whether there may be a model at a path, told before anything heavy is imported."""

from pathlib import Path

from kvtier_core import ConfigError


def check_path(path: Path) -> None:
    """Raise ``ConfigError`` unless *path* is a file or a directory with a ``config.json``."""
    if path.is_file():
        return
    if not path.exists():
        raise ConfigError(f"{path}: no such model: give a directory with config.json or a .gguf file")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: the directory has no config.json, so it is no transformers model")
