"""The ledger by itself: rows, pins, leases, and which block may be evicted (C11 to C13)."""

import pytest

from kvtier_core.errors import PluginError
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.ledger import Block, BlockState, Ledger
from kvtier_core.policies import CheckedPolicy, EvictionPolicy, make_policy
from tests.sim.books import check_ledger


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


def held_by(book: Ledger, kind: str, block: Block) -> object:
    """What the methods of a kind of hold are given: a pin is on a block, a lease on a key."""
    return [block] if kind.endswith("pin") else {block.key}


@pytest.fixture
def book():
    """A ledger of two rows, checked at the end."""
    book = ledger()
    yield book
    check_ledger(book)


def test_c11_every_row_is_handed_out_once(book):
    blocks, rows, evicted = book.reserve([key("a"), key("b")])
    assert [block.row for block in blocks] == list(rows)
    assert set(rows) == {0, 1}
    assert (evicted, book.num_free, book.room) == ([], 0, 0)


def test_c11_a_row_begins_anew_with_each_block(book):
    old = ready(book, "a")
    old.uses, old.source, old.is_sealed = 3, "cold", True
    ready(book, "b")
    (new,), rows, evicted = book.reserve([key("c")], keep=[key("b")], writer=7)
    assert (rows, evicted) == ((old.row,), [key("a")])
    assert (new.key, new.row, new.state, new.pins) == (key("c"), old.row, BlockState.ARRIVING, 1)
    assert (new.uses, new.source, new.is_sealed, new.writer) == (0, "", False, 7)


def test_c11_what_cannot_be_had_changes_nothing(book):
    block = ready(book, "a")
    assert book.reserve([key("x"), key("y"), key("z")]) is None
    assert book.reserve([key("x"), key("y")], keep=[key("a")]) is None
    assert (book.find(key("a")), book.num_free, book.room) == (block, 1, 2)
    assert not book.leases


def test_c11_what_was_kept_from_one_eviction_can_leave_in_the_next(book):
    ready(book, "a")
    ready(book, "b")
    reserved = book.reserve([key("x")], keep=[key("a")])
    assert (reserved.evicted, book.room, book.leases) == ([key("b")], 1, set())
    assert book.reserve([key("y")]).evicted == [key("a")]


def test_c13_nothing_stays_promised_when_a_policy_breaks_its_word():
    policy: EvictionPolicy[Block] = make_policy("lru", 2)
    book = Ledger(2, CheckedPolicy(policy, "lru", "a test"))
    blocks = [ready(book, "a"), ready(book, "b")]
    policy.remove(blocks)  # it gives fewer than it is asked for now
    with pytest.raises(PluginError, match="was asked for 1"):
        book.reserve([key("x")], keep=[key("a")])
    assert (book.leases, book.room) == (set(), 2)


@pytest.mark.parametrize("method", ["insert", "release", "remove", "evict"])
def test_c13_a_policy_that_falls_over_leaves_the_books_whole_and_is_named_at_the_next_eviction(
    monkeypatch, method
):
    policy: EvictionPolicy[Block] = make_policy("lru", 3)

    def fall_over(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(policy, method, fall_over)
    book = Ledger(3, CheckedPolicy(policy, "mine", "a test"))
    blocks = [ready(book, name) for name in "abc"]
    book.pin(blocks)
    book.unpin(blocks)
    book.detach(blocks[2:])
    ready(book, "d")
    with pytest.raises(PluginError, match=f"'mine' of a test raised ZeroDivisionError in {method} "):
        book.reserve([key("x")], keep=[key("a")])
    check_ledger(book)
    assert (book.leases, book.room) == (set(), 3)


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
        getattr(book, hold)(held_by(book, hold, block))
        check_ledger(book)
    for hold in holds:
        assert not book.is_idle(block)
        assert book.reserve([key("x"), key("y")]) is None
        getattr(book, f"un{hold}")(held_by(book, hold, block))
        check_ledger(book)
    assert book.is_idle(block)
    assert book.room == 2


@pytest.mark.parametrize("first", ["pin", "lease"])
def test_c13_a_block_pinned_and_leased_is_counted_once_in_whatever_order_both_end(book, first):
    block = ready(book, "a")
    book.lease({block.key})
    book.pin([block])
    for hold in (first, "lease" if first == "pin" else "pin"):
        assert book.room == 1
        getattr(book, f"un{hold}")(held_by(book, hold, block))
        check_ledger(book)
    assert book.room == 2


def test_c13_a_lease_taken_while_arriving_holds_the_ready_block(book):
    block = arriving(book, "a")
    book.lease({block.key})
    book.make_ready([block])
    assert book.room == 1
    book.unlease([block.key])
    assert book.room == 2


def test_c13_leases_of_one_key_end_apart(book):
    ready(book, "a")
    ready(book, "b")
    book.lease({key("a")})
    for _ in range(2):
        book.lease({key("b"), key("a")})
    assert [book.num_leases(key(name)) for name in "abx"] == [3, 2, 0]
    book.unlease([key("a")])
    book.unlease([key("a")])
    assert book.room == 0
    book.unlease([key("a"), key("b")])
    assert (book.leases, book.room) == ({key("b")}, 1)
    book.unlease([key("b")])
    assert (book.leases, book.room) == (set(), 2)


def test_c10_a_prefix_is_ready_up_to_the_first_block_that_is_not():
    book = ledger(5)
    blocks = [ready(book, name) for name in "abd"]
    book.pin(blocks[:1])
    assert book.ready_prefix([key(name) for name in "abxd"]) == [key("a"), key("b")]
    late = arriving(book, "c")
    assert book.ready_prefix([key(name) for name in "abcd"]) == [key("a"), key("b")]
    assert book.are_ready([key(name) for name in "abcdx"]) == [True, True, False, True, False]
    book.make_ready([late])
    assert book.ready_prefix([key(name) for name in "abcd"]) == [key(name) for name in "abcd"]


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
    book.lease({block.key})
    assert book.detach([block]) == [block.key]
    assert (book.num_free, book.leases) == (2, set())


def test_c13_c23_the_pins_of_a_detached_block_say_nothing_about_the_next_one_of_its_key(book):
    old = ready(book, "a")
    book.pin([old])
    assert book.detach([old]) == []
    new = ready(book, "a")
    book.lease({key("a")})
    book.unpin([old])
    check_ledger(book)
    assert (book.room, book.is_idle(new)) == (1, False)
    book.unlease([key("a")])
    assert (book.room, book.is_idle(new)) == (2, True)


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
    with pytest.raises((AssertionError, KeyError)):
        getattr(book, break_it)(held_by(book, break_it, block))


def test_c13_an_arriving_block_cannot_be_read(book):
    with pytest.raises(AssertionError):
        book.pin([arriving(book, "a")])


def test_the_check_sees_a_lost_row():
    book = ledger()
    block = arriving(book, "a")
    del book._blocks[block.key]
    with pytest.raises(AssertionError, match="lost"):
        check_ledger(book)


def test_the_check_sees_a_free_row_in_use():
    book = ledger()
    block = arriving(book, "a")
    book._free.append(block)
    with pytest.raises(AssertionError, match="free row"):
        check_ledger(book)


def test_the_check_sees_a_pinned_candidate():
    book = ledger()
    ready(book, "a").pins = 1
    with pytest.raises(AssertionError, match="count of idle"):
        check_ledger(book)


@pytest.mark.parametrize("books", ["_arriving", "_pinned"])
def test_the_check_sees_a_key_in_the_wrong_book(books):
    book = ledger()
    ready(book, "a")
    getattr(book, books).add(key("a"))
    with pytest.raises(AssertionError, match="keys of"):
        check_ledger(book)
