"""Runs the rules by pytest on a configured tier, and keeps what came of each.

Decides what pytest is let do: no plugin of the machine's, no file of its own, no output.
"""

import contextlib
import io
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier_core.errors import KvtierError
from kvtier_core.masking import mask_text
from kvtier_core.proof import row_bytes_for
from kvtier_testing.configured import ConfiguredTier
from kvtier_testing.fixtures import Spaces
from kvtier_testing.rows import RowMaker

PATIENCE_S = 30.0
"""How long a call may take before its rule has failed."""
PAYLOAD_BYTES = 5000
_TESTS = Path(__file__).with_name("tried.py")
_OPTIONS = (
    *("-c", os.devnull, "--rootdir", str(_TESTS.parent), "--confcutdir", str(_TESTS.parent)),
    *("-p", "no:cacheprovider", "-p", "no:faulthandler", "--import-mode=importlib", "--tb=short", "-q"),
)
_PASSED, _FAILED, _SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, kw_only=True)
class RuleReport:
    """What came of one rule. ``status`` is passed, failed or skipped; ``message`` says why, but for one that passed."""

    number: str
    name: str
    status: str
    message: str | None = None


class Run:
    """One check of one tier; a plugin of pytest. *tell* is given each rule's report when it is over."""

    def __init__(
        self, tier: ConfiguredTier, timeout_s: float, tell: Callable[[RuleReport], None] | None
    ) -> None:
        self.tier = tier
        self.prefix = f"kvtier-check-{secrets.token_hex(6)}"
        """How the names of all its namespaces begin."""
        self._spaces: list[Spaces] = []
        """Of tests that are not over."""
        self.reports: list[RuleReport] = []
        self.left_behind: dict[str, str] = {}
        """Why a namespace could not be removed."""
        self._timeout_s = timeout_s
        self._give_up = time.monotonic() + timeout_s
        self._tell = tell
        self._problems: dict[str, str] = {}
        """The first of each test, by its id."""
        self._ended_by: BaseException | None = None

    @property
    def is_well(self) -> bool:
        """Whether no rule failed, and time was enough for all."""
        return all(report.status != _FAILED for report in self.reports)

    def work(self) -> None:
        """Try to open the tier, then every rule.

        Raises ``TierOpenError``, ``ConfigError``, or what ended the process meanwhile (``KeyboardInterrupt``).
        """
        spaces = self.new_spaces()
        hush = _Hush(self._mask)
        handlers = list(logging.getLogger("kvtier").handlers)
        for handler in handlers:
            handler.addFilter(hush)
        try:
            self.tier.try_to_store(RowMaker(spaces(), PAYLOAD_BYTES))
            self._try_rules()
        finally:
            for spaces in list(self._spaces):
                self.remove(spaces)
            for handler in handlers:
                handler.removeFilter(hush)

    def _try_rules(self) -> None:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), _without_plugins():
            status = pytest.main([*_OPTIONS, str(_TESTS)], plugins=[self])
        if self._ended_by is not None:
            raise self._ended_by
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise KvtierError(f"pytest could not try the rules: {output.getvalue().strip()}")

    def new_spaces(self) -> Spaces:
        """Namespaces that nobody else has."""
        spaces = Spaces(f"{self.prefix}-{len(self.reports)}")
        self._spaces.append(spaces)
        return spaces

    def remove(self, spaces: Spaces) -> None:
        """Remove what was stored there; what can't be is kept in ``left_behind``."""
        left = self.tier.remove(spaces.used, row_bytes_for(PAYLOAD_BYTES))
        self.left_behind |= {name: self._mask(why) for name, why in left.items()}
        self._spaces.remove(spaces)

    def _mask(self, text: str) -> str:
        return mask_text(text, self.tier.secrets)

    # For pytest.

    @pytest.fixture
    def run(self) -> "Run":
        """This run."""
        return self

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin no rule when time is over."""
        if time.monotonic() > self._give_up:
            pytest.fail(f"not tried: {self._timeout_s:g} s are over; give it more with --timeout")

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Keep the first problem of a test, in its setup, its call or its teardown."""
        if call.excinfo is None:
            return
        error = call.excinfo.value
        if not isinstance(error, Exception | pytest.skip.Exception | pytest.fail.Exception):
            # Pytest takes what a signal raised for a failure of the test, and would go on.
            self._ended_by = error
            raise KeyboardInterrupt
        is_skip = isinstance(error, pytest.skip.Exception)
        text = str(error) if isinstance(error, AssertionError) or is_skip else call.excinfo.exconly()
        self._problems.setdefault(item.nodeid, f"{_SKIPPED if is_skip else _FAILED} {self._mask(text)}")

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """A signal came between two tests."""
        if not isinstance(excinfo.value, Exception):
            self._ended_by = excinfo.value

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C, or what ``pytest_runtest_makereport`` makes of another end."""
        self._ended_by = self._ended_by or excinfo.value

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The test is over."""
        status, _, message = self._problems.get(nodeid, _PASSED).partition(" ")
        number, _, name = nodeid.rpartition("::test_")[2].partition("_")
        report = RuleReport(
            number=number.upper(), name=name.replace("_", " "), status=status, message=message or None
        )
        self.reports.append(report)
        if self._tell is not None:
            self._tell(report)


class _Hush(logging.Filter):
    """Lets no warning through, because the rules provoke them, and at debug level all, without secrets."""

    def __init__(self, mask: Callable[[str], str]) -> None:
        super().__init__()
        self._mask = mask

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._mask(record.getMessage()), ()
        return logging.getLogger("kvtier").isEnabledFor(logging.DEBUG)


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Let pytest load no plugin that happens to be installed: one may end tests, or forbid connections."""
    names = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        del os.environ[names[0]]
        os.environ.update({name: value for name, value in before.items() if value is not None})
