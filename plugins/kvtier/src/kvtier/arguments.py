"""Arguments that several commands take."""

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A number of at least 1, for ``argparse``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which engine runs which model with which settings."""
    parser.add_argument(
        "--engine",
        default="transformers",
        metavar="NAME",
        help="llama.cpp, transformers, or a plugin's (default transformers)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a .gguf file, or a directory (transformers)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="kvtier's settings (default: $KVTIER_CONFIG)"
    )
