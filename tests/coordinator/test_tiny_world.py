"""A world of one or two rows and three keys, driven by Hypothesis: small enough to find a shortest failing run."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier_core.coordinator.endpoints import GroupShape
from tests.sim.scripted import MOVE_ANSWERS, Answer, JobHook, TierScript
from tests.sim.world import World, make_keys

REQUESTS = ("r", "s")
PREFIXES = ("a", "ab", "abc", "ac", "b")
GROUPED = {prefix: (tuple(make_keys(prefix, 0)), tuple(make_keys(prefix, 1))) for prefix in PREFIXES}


class TinyWorld(RuleBasedStateMachine):
    """Two requests, three keys in each of two groups, one tier that may do anything."""

    @initialize(num_rows=st.sampled_from((1, 2)), resident=st.booleans(), obeys_reset=st.booleans())
    def begin(self, num_rows, resident, obeys_reset):
        self.world = World(
            num_rows,
            [TierScript(name="t", resident=resident, obeys_reset=obeys_reset)],
            groups=(GroupShape(), GroupShape(window=1)),
        )
        self.life = 0
        self.names = {}
        for request in REQUESTS:
            self.renew(request)

    def renew(self, request):
        self.life += 1
        self.names[request] = f"{request}{self.life}"
        self.world.new_request(self.names[request])

    @rule(request=st.sampled_from(REQUESTS), prefix=st.sampled_from(PREFIXES), tokens=st.integers(0, 3))
    def find_end_point(self, request, prefix, tokens):
        self.world.find_end_point(self.names[request], GROUPED[prefix], tokens)

    @rule(request=st.sampled_from(REQUESTS), prefix=st.sampled_from(PREFIXES), tokens=st.integers(0, 3))
    def load_groups(self, request, prefix, tokens):
        self.world.load_end_point(self.names[request], GROUPED[prefix], tokens)

    @rule(request=st.sampled_from(REQUESTS))
    def ask_for_whole(self, request):
        self.world.ask_for_whole("t", self.names[request])

    @rule(request=st.sampled_from(REQUESTS), prefix=st.sampled_from(PREFIXES))
    def load(self, request, prefix):
        self.world.prepare_load(self.names[request], make_keys(prefix))

    @rule(request=st.sampled_from(REQUESTS), prefix=st.sampled_from(PREFIXES), group=st.integers(0, 1))
    def store(self, request, prefix, group):
        self.world.prepare_store(self.names[request], make_keys(prefix, group))

    @precondition(lambda self: self.world.transfers)
    @rule(index=st.integers(0, 3), success=st.booleans())
    def end_transfer(self, index, success):
        jobs = list(self.world.transfers)
        job_id = jobs[index % len(jobs)]
        if self.world.transfers[job_id].is_store:
            self.world.complete_store(job_id, success=success)
        else:
            self.world.complete_load(job_id)

    @precondition(lambda self: self.world.running)
    @rule(index=st.integers(0, 3), answer=st.sampled_from(MOVE_ANSWERS))
    def answer(self, index, answer):
        jobs = list(self.world.running)
        job_id = jobs[index % len(jobs)]
        is_lookup = self.world.running[job_id].hook is JobHook.LOOKUP
        self.world.answer(job_id, Answer.OK if is_lookup and answer is Answer.CORRUPT else answer)

    @rule()
    def end_step(self):
        self.world.end_step()

    @rule(seconds=st.sampled_from((1.0, 30.0, 60.0)))
    def advance(self, seconds):
        self.world.advance(seconds)

    @rule(request=st.sampled_from(REQUESTS))
    def finish(self, request):
        self.world.finish(self.names[request])
        self.renew(request)

    @rule(tiers=st.booleans(), ready=st.booleans())
    def reset(self, tiers, ready):
        self.world.reset(tiers=tiers, ready=ready)

    @invariant()
    def nobody_has_waited_for_ever(self):
        """Whoever has pending work has a deadline for it, or a step or a device to wait for."""
        if hasattr(self, "world") and self.world.coordinator.has_pending_work:
            coordinator = self.world.coordinator
            planned = bool(coordinator.state.planned)
            assert planned or self.world.transfers or coordinator.next_deadline() is not None

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check_at_rest()


TestTinyWorld = TinyWorld.TestCase
TestTinyWorld.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
