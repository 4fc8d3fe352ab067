"""Renders a new tier of each kind, and lints, types, installs and tests it: ``nox -s template`` runs this.

A program for an environment with the wheels of the core, the kit and the command line.
"""

import subprocess
import sys
import tempfile
from pathlib import Path


def run(place: Path, *command: str) -> None:
    """Run a module of this interpreter in *place*."""
    print("+", *command, flush=True)
    subprocess.run([sys.executable, "-m", *command], cwd=place, check=True)


def main() -> None:
    """Both kinds."""
    for name, options in (("shelf", ()), ("depot", ("--hooks", "--licence", "mit"))):
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), "kvtier.main", "new-tier", name, *options)
            place = Path(folder, f"kvtier-{name}")
            run(place, "ruff", "check", ".")
            run(place, "ruff", "format", "--check", ".")
            run(place, "mypy", "--strict", "src")
            run(place, "pip", "install", "-q", ".")
            run(place, "pytest", "-W", "error", "-q", "--timeout=300")


if __name__ == "__main__":
    main()
