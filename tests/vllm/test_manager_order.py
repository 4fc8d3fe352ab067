"""Of a prompt the end leaves before its beginning in vLLM's manager, with one KV group and several (C14).

Needs vLLM's types, and no engine: the real manager, coordinator and pool.
"""

from itertools import count

import pytest

from kvtier_core import load_settings
from kvtier_core.engine import open_manager, plan_geometry
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.transfer import Pool
from tests.vllm.engines import needs_vllm

pytestmark = [
    needs_vllm,
    # The first import of vLLM's manager compiles with torch, which warns of itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

ROW = 4096
TOKENS = 16
PATIENCE_S = 60.0


class Scheduler:
    """What vLLM's scheduler asks of the manager, for requests of which every group has as many chunks."""

    def __init__(self, rows, groups, policy, *, has_lora=False):
        from kvtier_vllm.manager import KvtierManager

        settings = load_settings(
            overrides={
                "pool": {"capacity": rows * ROW, "policy": policy, "prefault": False},
                "tiers": {},
                "lookup_order": [],
            },
            environ={},
        )
        namespace = Namespace(
            model="test",
            kv_dtype="float32",
            tokens_per_block=TOKENS,
            groups=tuple(GroupSpec(layers=(str(group),), block_bytes=512) for group in range(groups)),
            layout="test",
            weights_digest="w",
        )
        self.groups = range(groups)
        self.pool = Pool.create(plan_geometry(settings, namespace))
        tiers = open_manager(settings, namespace, self.pool)
        self.manager = KvtierManager(
            tiers, self.pool, {}, PATIENCE_S, tokens_per_hash=TOKENS, has_lora=has_lora
        )
        self.numbers = count(1)

    def keys(self, name, chunks):
        """The keys of a prompt, group by group."""
        from vllm.v1.kv_offload.base import make_offload_key

        names = [f"{name}-{chunk}".encode().rjust(32, b".") for chunk in range(chunks)]
        return [[make_offload_key(of, group) for of in names] for group in self.groups]

    def named(self):
        """The name of a request that comes."""
        return f"r{next(self.numbers)}"

    def begin(self, keys):
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(self.named())
        for group in keys:
            for chunk, key in enumerate(group, 1):
                context.set_offload_key_position(key, chunk * TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self, context):
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext([context.req_id], []))

    def store(self, context, keys, piece):
        """Store all chunks, so many of each group at a time."""
        for begin in range(0, len(keys[0]), piece):
            wanted = [key for group in keys for key in group[begin : begin + piece]]
            output = self.manager.prepare_store(wanted, context)
            assert output is not None
            assert list(output.keys_to_store) == wanted, "vLLM counts on its own order"
            self.step(context)
            self.manager.complete_store(output.keys_to_store, context)

    def write(self, keys, piece):
        context = self.begin(keys)
        self.store(context, keys, piece)
        self.manager.on_request_finished(context)

    def hits(self, context, keys):
        """How many chunks of the prompt can be loaded, by the answers for its first group."""
        from vllm.v1.kv_offload.base import LookupResult

        answers = [self.manager.lookup(key, context) for key in keys[0]]
        assert set(answers) <= {LookupResult.HIT, LookupResult.MISS}
        return answers.count(LookupResult.HIT)

    def read(self, keys):
        """Load what there is of a prompt; the chunks."""
        context = self.begin(keys)
        found = self.hits(context, keys)
        if found:
            wanted = [key for group in keys for key in group[:found]]
            rows = self.manager.prepare_load(wanted, context).block_ids.tolist()
            assert len(set(rows)) == len(wanted)
            self.step(context)
            self.manager.complete_load(wanted, context)
        self.manager.on_request_finished(context)
        return found


@pytest.fixture
def make():
    schedulers = []

    def start(rows, groups=1, policy="lru"):
        schedulers.append(Scheduler(rows, groups, policy))
        return schedulers[-1]

    yield start
    for scheduler in schedulers:
        scheduler.manager.shutdown()


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_r3_of_500_and_600_unread_blocks_in_1000_rows_the_first_prompt_gives_6300_tokens_back(make, policy):
    vllm = make(1000, policy=policy)
    first = vllm.keys("first", 500)
    vllm.write(first, 16)
    vllm.write(vllm.keys("second", 600), 16)
    assert vllm.read(first) * TOKENS >= 6_300


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_r3_the_end_leaves_first_in_all_groups_of_one_store(make, policy):
    vllm = make(40, groups=2, policy=policy)
    first = vllm.keys("first", 10)
    vllm.write(first, 10)
    vllm.write(vllm.keys("second", 13), 13)
    assert vllm.read(first) == 7


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_r3_the_end_leaves_first_in_all_groups_of_one_load(make, policy):
    vllm = make(40, groups=2, policy=policy)
    first = vllm.keys("first", 10)
    vllm.write(first, 1)
    assert vllm.read(first) == 10
    vllm.write(vllm.keys("second", 13), 13)
    assert vllm.read(first) == 7


def test_r3_rows_of_several_groups_go_back_in_the_order_that_vllm_asked_in(make):
    vllm = make(40, groups=2)
    keys = vllm.keys("first", 5)
    context = vllm.begin(keys)
    wanted = [*keys[0], *keys[1]]
    stored = vllm.manager.prepare_store(wanted, context)
    row_of = dict(zip(stored.keys_to_store, stored.store_spec.block_ids.tolist(), strict=True))
    vllm.step(context)
    vllm.manager.complete_store(stored.keys_to_store, context)
    vllm.manager.on_request_finished(context)
    reader = vllm.begin(keys)
    assert vllm.hits(reader, keys) == 5
    asked = [*keys[1], *keys[0]]
    assert vllm.manager.prepare_load(asked, reader).block_ids.tolist() == [row_of[key] for key in asked]
    vllm.manager.complete_load(asked, reader)
    vllm.manager.on_request_finished(reader)
