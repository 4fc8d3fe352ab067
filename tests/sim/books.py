"""Whether the coordinator's books agree with one another: what must hold of its state after every call."""

from collections import Counter

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.state import State
from kvtier_core.ledger import ARRIVING, DETACHED, READY, Ledger
from tests.sim.holding import check_holds


def check_books(state: State) -> None:
    """Assert that they do. Cost: proportional to the pool."""
    check_ledger(state.ledger)
    live = [job for job in state.jobs.values() if not job.overdue]
    assert state.jobs.num_awaited == len(live)
    assert state.jobs.storing_rows == sum(len(j.blocks) for j in live if j.kind is JobKind.DEVICE_STORE)
    planned = [b for by_tier in state.planned.values() for blocks in by_tier.values() for b in blocks]
    loading = [b for job in live if job.kind is JobKind.TIER_LOAD for b in job.blocks]
    assert state.promoting_rows == len(loading) + len(planned)
    assert state.quarantined_rows == sum(tier.quarantined_rows for tier in state.tiers.values())
    cascading = [b for job in live if job.kind is JobKind.TIER_STORE for b in job.blocks]
    assert state.cascade_rows == len(set(cascading))
    for name, tier in state.tiers.items():
        mine = [job for job in state.jobs.values() if job.tier == name]
        stores = [j for j in mine if j.kind is JobKind.TIER_STORE and not j.overdue]
        assert tier.cascade_rows == sum(len(j.blocks) for j in stores)
        quarantined = [j for j in mine if j.kind is JobKind.TIER_LOAD and j.overdue]
        assert tier.quarantined_rows == sum(len(j.blocks) for j in quarantined)
        owed = Counter(j.kind for j in mine if j.overdue)
        assert tier.lookups.unanswered == owed[JobKind.LOOKUP]
        assert tier.stores.unanswered == owed[JobKind.TIER_STORE]
        assert tier.loads.unanswered == owed[JobKind.TIER_LOAD]
        assert tier.loading_rows == sum(b.source == name for b in (*loading, *planned))
    assert set(state.planned) <= set(state.requests.values())
    assert all(state.planned.values())
    assert all(r.pending.events for r in state.requests.values() if r.pending is not None)
    assert all(b.state is ARRIVING for b in state.following)
    late = Counter(r for requests in state.following.values() for r in requests)
    late.update(r for tier in state.tiers.values() for r, _ in tier.late)
    assert late == Counter({r: r.late for r in state.requests.values() if r.late})
    granted = Counter(key for request in state.requests.values() for key in request.leases)
    granted.update(state.holds.by_key.keys())
    check_holds(state)
    assert state.ledger.leases == granted.keys(), "what is promised is not what requests were promised"
    assert all(state.ledger.num_leases(key) == count for key, count in granted.items())
    assert all(request.leases <= set(request.promised) for request in state.requests.values())


def check_ledger(ledger: Ledger) -> None:
    """Assert every invariant of the ledger. Cost: proportional to the pool."""
    rows = [block.row for block in (*ledger._free, *ledger._blocks.values(), *ledger._detached)]
    assert not any(block.pins or block.cascades for block in ledger._free), "a free row is in use"
    assert sorted(rows) == list(range(ledger.num_rows)), "a row is lost or held twice"
    assert ledger.leases <= ledger._blocks.keys(), "a key without a block is promised"
    assert ledger._more_leases.keys() <= ledger.leases, "a key is promised more than once, but not once"
    idle = 0
    for key, block in ledger._blocks.items():
        assert block.key == key, block
        assert block.state is not DETACHED, block
        assert block.state is READY or block.pins == 1, block
        idle += ledger.is_idle(block)
    assert idle == ledger._idle, "the count of idle blocks is wrong"
    of_state = {
        state: {block.key for block in ledger._blocks.values() if block.state is state and block.pins}
        for state in (ARRIVING, READY)
    }
    assert ledger._arriving == of_state[ARRIVING], "the keys of arriving blocks are wrong"
    assert ledger._pinned == of_state[READY], "the keys of pinned blocks are wrong"
    assert all(b.state is DETACHED and b.pins > 0 for b in ledger._detached)
