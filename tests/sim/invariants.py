"""What must hold after every step of a world. Each function looks, raises ``InvariantError``, and changes nothing."""

from collections.abc import Iterable, Sequence

from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.ledger import BlockState, Ledger
from tests.sim.hook_order import InvariantError
from tests.sim.scripted import Content, DeviceTransfer, JobHook, Payload, RunningJob


def check_limits(state: State) -> None:
    """Rows lent to cascades and promotions, and jobs left unanswered, are within their limits (C21, C28, C31)."""
    over = [name for name, tier in state.tiers.items() if tier.cascade_rows > tier.max_cascade_rows]
    if over or state.cascade_rows > state.limits.max_cascade_rows:
        raise InvariantError(
            f"too many rows are pinned for cascades, to {over or 'all tiers together'} (C28)"
        )
    if state.promoting_rows > state.limits.max_promotion_rows:
        raise InvariantError(f"{state.promoting_rows} rows are reserved for promotions (C21)")
    if state.promoting_rows + state.quarantined_rows > state.limits.max_loading_rows:
        raise InvariantError(
            f"{state.promoting_rows} rows are reserved for promotions while overdue loads hold "
            f"{state.quarantined_rows} (C31)"
        )
    # Each store has a row at least, so that no more than this can have been under way when the last was allowed.
    owing = {
        name: tier.stores.unanswered
        for name, tier in state.tiers.items()
        if tier.stores.unanswered >= tier.stores.max_unanswered + tier.max_cascade_rows
    }
    if owing:
        raise InvariantError(f"tiers got stores though they left so many unanswered: {owing} (C31)")


def check_lent(tier: TierRecord, before: int) -> None:
    """A lookup before which *tier* was lent *before* rows for loads lent no more than it may be trusted with (C31)."""
    lent = tier.loading_rows + tier.quarantined_rows
    if lent > max(before, tier.max_quarantined_rows) and not tier.loads_in_time:
        raise InvariantError(
            f"{tier.name}, which has not shown that its loads come in time, was lent {lent - before} more rows, "
            f"{lent} in all, of which {tier.quarantined_rows} are overdue (C31)"
        )
    if lent > before and tier.quarantined_rows >= tier.max_quarantined_rows:
        raise InvariantError(f"{tier.name} was lent more rows though its quarantine is full (C31)")


def check_rows_in_use(running: Iterable[RunningJob], transfers: Iterable[DeviceTransfer]) -> None:
    """A row that one transfer writes is touched by no other, quarantined loads counted in (C31, C36).

    What has arrived of a load is only read, until its tier has answered: it may look at it, or check it.
    A cascade that was given up may still read: its proof gives the changed bytes away (C28).
    """
    written: set[int] = set()
    read: set[int] = set()
    for job in running:
        if job.hook is JobHook.LOAD:
            _claim(written, [row for key, row in job.rows_by_key() if key not in job.arrived], job)
            read.update(row for key, row in job.rows_by_key() if key in job.arrived)
        elif job.hook is JobHook.STORE and not job.is_cancelled:
            read.update(job.job.rows)
    for transfer in transfers:
        if transfer.is_store:
            _claim(written, transfer.prepared.rows, transfer)
        else:
            read.update(transfer.prepared.rows)
    if not written.isdisjoint(read):
        raise InvariantError(f"rows {sorted(written & read)} are read by one job and written by another")


def _claim(written: set[int], rows: Sequence[int], owner: object) -> None:
    if not written.isdisjoint(rows):
        raise InvariantError(f"{owner} writes rows that another job writes")
    written.update(rows)


def check_hits(ledger: Ledger, rows: Sequence[Content], epoch: int) -> None:
    """Every block that answers HIT has exactly its own bytes of *epoch*, (C03, C12)."""
    for block in ledger.blocks:
        if block.state is not BlockState.READY:
            continue
        name = Payload(block.key, epoch)
        content = rows[block.row]
        if content.payload != name:
            raise InvariantError(f"{block} answers HIT in epoch {epoch} but its row holds {content}")


def check_pending_answers(state: State) -> None:
    """No remembered answer is pending though every block of it has come (C21)."""
    for request in state.requests.values():
        if request.pending is None or not state.is_pending(request):
            continue
        asked, answer = request.pending.asked, request.pending.answer
        blocks = state.ledger.find_all([key for of_group in asked for key in of_group])
        if all(block is not None and block.state is BlockState.READY for block in blocks):
            raise InvariantError(
                f"{request.info.request_id} would be told {answer} of blocks that are all there"
            )


def check_at_rest(state: State) -> None:
    """No job, no request, every count zero, every row free or evictable (C13, K3-O4)."""
    if state.jobs or state.requests:
        raise InvariantError(f"not at rest: {list(state.jobs.values())}, {list(state.requests)}")
    counts = [state.promoting_rows, state.cascade_rows, state.ledger.num_detached]
    for tier in state.tiers.values():
        counts += [tier.quarantined_rows, tier.cascade_rows]
    held = [block for block in state.ledger.blocks if not state.ledger.is_idle(block)]
    if any(counts) or held or state.ledger.leases or state.ledger.room != state.ledger.num_rows:
        raise InvariantError(f"counts at rest: {counts}, held: {held}, room: {state.ledger.room}")
