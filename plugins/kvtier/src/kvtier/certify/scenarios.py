"""The scenarios: which engine processes run one after another, on which storage, and what each has to restore.

Decides the order of events. Compares nothing itself. A scenario in which an engine ends by itself has failed; the
others go on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from kvtier.certify.document import Document, least_tokens, make_document
from kvtier.certify.drivers import Answer, Opening
from kvtier.certify.process import EngineProcess, end_of
from kvtier.certify.storage import Storage
from kvtier.certify.verdicts import NOTHING_RESTORED, Expected, Reference, Row, judge, make_reference
from kvtier_core.errors import ConfigError, KvtierError, UnsupportedModelError

_STORED = "stored"
_WITH_OTHER_WEIGHTS = "stored, and by other weights"
VARIANTS = ("rope", "dtype", "weights", "tp2")
"""What drivers can change of a model."""
SCENARIOS = ("pool", "restart", "kill", "reset", *VARIANTS, "swapped", "stale")
"""In the order in which they run. ``pool`` always does: the others need what it stores."""


class Certification:
    """One engine, one model, one configuration."""

    def __init__(
        self,
        engine: str,
        blocked: Collection[str],
        opening: Opening,
        storage: Storage,
        *,
        resets_all: bool,
        say: Callable[[str], None],
    ) -> None:
        """*opening* is that of the model as it is. *resets_all*: a reset empties the tiers as well as the pool."""
        self._engine = engine
        self._blocked = blocked
        self._opening = opening
        self._storage = storage
        self._resets_all = resets_all
        self._say = say
        self._starts = 0
        self._log = opening.workplace / "log"
        """Of the engine that was opened last."""
        self.reference: Reference
        self.dtype = ""
        """Of the model as it is; known with the reference."""
        self._has_run = False
        """Whether the engine has opened with kvtier."""

    def run(self, chosen: Collection[str]) -> Iterator[Row]:
        """The rows of the report, each as soon as it is known.

        Raises ``KvtierError`` when the engine does not open, with kvtier or without.
        """
        self.reference = self._make_reference(self._opening)
        if not self.reference.can_tell:
            yield Row(
                scenario="wrong KV shows",
                verdict="FAIL",
                why=f"not certified: other KV in one block changes the answers by {self.reference.control:.3g}, which "
                f"may be rounding (up to {self.reference.tolerance:.3g}): use a larger dtype, or trained weights",
            )
        for name in SCENARIOS:
            if name in chosen or name == "pool":
                yield from self._attempt(name, self._scenario(name))

    def _scenario(self, name: str) -> Callable[[], Iterator[Row]]:
        if name in VARIANTS:
            return lambda: self._variant(name)
        scenarios: Mapping[str, Callable[[], Iterator[Row]]] = {
            "pool": self._pool,
            "restart": self._restart,
            "kill": self._kill,
            "reset": self._reset,
            "swapped": self._swapped,
            "stale": self._stale,
        }
        return scenarios[name]

    def _attempt(self, name: str, scenario: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        if name != "pool" and not self._storage.lasting:
            yield _skipped(name, "no tier outlives the engine")
            return
        if name != "pool" and not self._storage.has(_STORED):
            yield _skipped(name, "nothing was stored")
            return
        self._say(f"{name} ...")
        try:
            for row in scenario():
                yield replace(row, why=self._with_log(row.why)) if row.why == NOTHING_RESTORED else row
        except KvtierError as error:
            if not self._has_run:
                raise
            if name in VARIANTS and isinstance(error, UnsupportedModelError):
                yield _skipped(name, str(error))
            else:
                yield Row(scenario=name, verdict="FAIL", why=str(error))

    # -- the scenarios

    def _pool(self) -> Iterator[Row]:
        with self._open() as engine:
            self._has_run = True
            yield judge("empty tiers", self.reference, self._ask_longest(engine), "nothing")
            engine.settle()
            yield judge("pool", self.reference, self._ask_all(engine))
            engine.settle()
        self._storage.save(_STORED)

    def _restart(self) -> Iterator[Row]:
        tiers = self._storage.lasting
        for tier in tiers:  # alone: of several that hold a block, only the first would be asked for it
            self._storage.restore(_STORED, tier)
            with self._open() as engine:
                name = "restart" if len(tiers) == 1 else f"restart from {tier}"
                yield judge(name, self.reference, self._ask_all(engine))

    def _kill(self) -> Iterator[Row]:
        self._storage.clear()
        with self._open() as engine:
            self._ask_longest(engine)
            self._storage.wait_for_a_row()
            engine.kill()
        with self._open() as engine:
            yield judge("kill", self.reference, self._ask_all(engine), "anything")

    def _reset(self) -> Iterator[Row]:
        self._storage.restore(_STORED)
        with self._open() as engine:
            if not engine.facts.can_reset:
                yield _skipped("reset", f"{self._engine} has no reset")
                return
            self._ask_longest(engine)
            engine.reset()
            expected: Expected = "nothing" if self._resets_all else "something"
            yield judge("reset", self.reference, self._ask_longest(engine), expected)
            engine.settle()
            yield judge("reset again", self.reference, self._ask_all(engine))

    def _variant(self, name: str) -> Iterator[Row]:
        self._storage.restore(_STORED)
        opening = replace(self._opening, variant=name)
        reference = self._make_reference(opening)
        with self._open(opening) as engine:
            yield judge(name, reference, self._ask_longest(engine), "nothing")
            engine.settle()
            yield judge(f"{name} again", reference, self._ask_all(engine))
            engine.settle()
        if name == "weights":
            self._storage.save(_WITH_OTHER_WEIGHTS)

    def _swapped(self) -> Iterator[Row]:
        self._storage.restore(_STORED)
        if not self._storage.swap_rows():
            yield _skipped("swapped", "the tiers' files hold no two rows")
            return
        with self._open() as engine:
            yield judge("swapped", self.reference, self._ask_all(engine), "anything")

    def _stale(self) -> Iterator[Row]:
        if not self._storage.has(_WITH_OTHER_WEIGHTS):
            yield _skipped("stale", "needs the rows that the scenario weights stores")
            return
        self._storage.restore(_WITH_OTHER_WEIGHTS)
        if not self._storage.put_others_rows(_STORED):
            yield _skipped("stale", "the tiers' files hold no rows of one key by two models")
            return
        with self._open() as engine:
            yield judge("stale", self.reference, self._ask_all(engine), "anything")

    # -- engines and answers

    def _with_log(self, why: str) -> str:
        """*why*, and what the engine said last: a tier that takes no blocks says so there."""
        said = end_of(self._log)
        return f"{why}; the engine's log ends:\n{said}" if said else why

    def _open(self, opening: Opening | None = None) -> EngineProcess:
        self._starts += 1
        opening = opening or self._opening
        workplace = opening.workplace / f"start-{self._starts}"
        workplace.mkdir()
        opening = replace(opening, workplace=workplace)
        self._log = workplace / "log"
        return EngineProcess(self._engine, self._blocked, opening, self._log)

    def _make_reference(self, opening: Opening) -> Reference:
        self._say(f"{opening.variant or 'the model'}, without kvtier ...")
        with self._open(replace(opening, has_kvtier=False)) as engine:
            if opening.variant is None:
                self.dtype = engine.facts.dtype
            document = self._document(engine)
            late = [cut for cut in document.cuts if document.restorable(cut)]
            return make_reference(
                document,
                engine.facts.dtype,
                {cut: engine.ask(document.prompt(cut))[0] for cut in document.cuts},
                {cut: engine.ask(document.prompt(cut), document.restorable(cut))[0] for cut in late},
                {cut: engine.ask(document.with_other_block(cut))[0] for cut in late},
            )

    def _document(self, engine: EngineProcess) -> Document:
        per_block = engine.facts.tokens_per_block
        num_tokens = self._opening.max_tokens
        if num_tokens < least_tokens(per_block):
            raise ConfigError(
                f"--tokens {num_tokens}: at least {least_tokens(per_block)} are needed, for two blocks of {per_block}"
            )
        return make_document(num_tokens, per_block, engine.facts.vocab_size)

    def _ask_longest(self, engine: EngineProcess) -> dict[int, Answer]:
        document = self.reference.document
        engine.forget_device()
        return {document.cuts[-1]: engine.ask(document.prompt(document.cuts[-1]))}

    def _ask_all(self, engine: EngineProcess) -> dict[int, Answer]:
        document, answers = self.reference.document, {}
        for cut in reversed(
            document.cuts
        ):  # the longest first: what it computes is in the pool for the others
            engine.forget_device()
            answers[cut] = engine.ask(document.prompt(cut))
        return answers


def _skipped(name: str, why: str) -> Row:
    return Row(scenario=name, verdict="skipped", why=why)
