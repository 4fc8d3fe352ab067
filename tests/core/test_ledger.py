"""The ledger by itself: rows, pins, leases, and which block may be evicted (C11 to C13)."""

import pytest

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.ledger import Block, BlockState, Ledger
from kvtier_core.policies import make_policy


def key(name: str) -> OffloadKey:
    """A key that shares its prefix with every other."""
    return make_offload_key(name.encode().rjust(32, b"."), 0)


def ledger(num_rows: int = 2) -> Ledger:
    """An empty ledger."""
    return Ledger(num_rows, make_policy("lru", num_rows))


def arriving(book: Ledger, name: str) -> Block:
    """A block whose writer is at work."""
    reserved = book.reserve([key(name)])
    assert reserved is not None
    return reserved.blocks[0]


def ready(book: Ledger, name: str) -> Block:
    """A block that can be read."""
    block = arriving(book, name)
    book.make_ready([block])
    return block


@pytest.fixture
def book():
    """A ledger of two rows, checked at the end."""
    book = ledger()
    yield book
    book.check()


def test_c11_every_row_is_handed_out_once(book):
    blocks, rows, evicted = book.reserve([key("a"), key("b")])
    assert [block.row for block in blocks] == list(rows)
    assert set(rows) == {0, 1}
    assert (evicted, book.num_free, book.room) == ([], 0, 0)


def test_c11_what_cannot_be_had_changes_nothing(book):
    block = ready(book, "a")
    assert book.reserve([key("x"), key("y"), key("z")]) is None
    assert book.reserve([key("x"), key("y")], keep=[book.find(key("a"))]) is None
    assert (book.find(key("a")), book.num_free, book.room) == (block, 1, 2)


def test_c12_a_block_is_found_while_it_arrives_and_can_be_evicted_only_when_ready(book):
    arriving(book, "a")
    assert book.find(key("a")).state is BlockState.ARRIVING
    assert book.reserve([key("x"), key("y")]) is None
    book.make_ready([book.find(key("a"))])
    assert book.reserve([key("x"), key("y")]).evicted == [key("a")]
    assert book.find(key("a")) is None


@pytest.mark.parametrize(
    "holds", [("pin",), ("lease",), ("pin", "lease"), ("pin", "pin"), ("lease", "lease")]
)
def test_c13_a_block_is_idle_only_when_every_pin_and_lease_is_gone(book, holds):
    block = ready(book, "a")
    for hold in holds:
        getattr(book, hold)([block])
        book.check()
    for hold in holds:
        assert not book.is_idle(block)
        assert book.reserve([key("x"), key("y")]) is None
        getattr(book, f"un{hold}")([block])
        book.check()
    assert book.is_idle(block)
    assert book.room == 2


def test_c13_a_lease_taken_while_arriving_holds_the_ready_block(book):
    block = arriving(book, "a")
    book.lease([block])
    book.make_ready([block])
    assert book.room == 1
    book.unlease([block])
    assert book.room == 2


def test_c36_a_detached_row_waits_for_its_last_pin(book):
    block = ready(book, "a")
    book.pin([block])
    book.pin([block])
    book.detach([block])
    assert (book.find(key("a")), book.num_detached, book.num_free) == (None, 1, 1)
    book.unpin([block])
    assert book.num_free == 1
    book.unpin([block])
    assert (book.num_detached, book.num_free) == (0, 2)


def test_c36_a_detached_block_without_pins_is_free_at_once(book):
    book.detach([ready(book, "a")])
    assert (book.num_detached, book.num_free) == (0, 2)


def test_c36_leases_do_not_hold_a_detached_row(book):
    block = ready(book, "a")
    book.lease([block])
    book.detach([block])
    assert book.num_free == 2
    book.unlease([block])
    assert book.num_free == 2


def test_c23_a_key_may_live_in_another_row_while_its_old_row_is_detached(book):
    old = arriving(book, "a")
    book.detach([old])
    new = ready(book, "a")
    assert (book.find(key("a")), new.row != old.row) == (new, True)
    book.unpin([old])
    assert book.find(key("a")) is new
    assert book.num_free == 1


@pytest.mark.parametrize("break_it", ["unpin", "unlease"])
def test_c13_giving_back_what_is_not_held_is_our_own_mistake(book, break_it):
    block = ready(book, "a")
    with pytest.raises(AssertionError):
        getattr(book, break_it)([block])


def test_c13_an_arriving_block_cannot_be_read(book):
    with pytest.raises(AssertionError):
        book.pin([arriving(book, "a")])


def test_the_check_sees_a_lost_row():
    book = ledger()
    block = arriving(book, "a")
    del book._blocks[block.key]
    with pytest.raises(AssertionError, match="lost"):
        book.check()


def test_the_check_sees_a_pinned_candidate():
    book = ledger()
    ready(book, "a").pins = 1
    with pytest.raises(AssertionError, match="count of idle"):
        book.check()
