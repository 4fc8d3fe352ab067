"""The index of a root: which slot of which extent holds which block, for all namespaces and processes together.

Every method is one transaction (large removals are several, each whole). A slot is *free*, *claimed* (its owner is
writing into it) or holds a block; it changes hands only here. ``changes`` tells other processes what happened.
Decides nothing: what to remove, and when, comes from outside. Every method raises ``OSError``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from kvtier_core.tier import OffloadKey
from kvtier_disk.extents.census import count
from kvtier_disk.extents.change_log import ChangeLog
from kvtier_disk.extents.contents import Pair
from kvtier_disk.extents.database import Database
from kvtier_disk.extents.form import MAX_SLOTS, extent_of, place_of
from kvtier_disk.extents.room import Census
from kvtier_disk.extents.slot_runs import (
    CLAIM_RUN,
    FREE_RUN,
    PUBLISH_RUN,
    change,
    lowest_held,
    pairs_at,
    take_free,
)
from kvtier_disk.extents.statements import Statements
from kvtier_disk.extents.tables import (
    CHUNK,
    READY,
    SCHEMA,
    VERSION,
    ExtentRow,
    Namespace,
    chunks,
    read_extents,
)

NOBODY = 0
"""No namespace's and no owner's number."""
_EVER, _NEVER = float("-inf"), float("inf")
_MAKING, _LEAVING = 0, 2
_place = itemgetter(1)


class Index:
    """The tables. Safe from any thread; other processes use the same file."""

    @classmethod
    def make(cls, database: Database, root: int) -> "Index":
        """Make the tables in a new database, for the root of this number. Raises ``OSError``."""
        with database.transaction() as connection:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {root}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        return cls(database, root)

    def __init__(self, database: Database, root: int) -> None:
        """On a database with these tables, for the root of this number.

        Raises ``IndexDamagedError`` for one of another form, and for the index of another root.
        """
        self.database = database
        self.root = root
        self._log = ChangeLog()
        with database.reading() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (found,) = connection.execute("PRAGMA application_id").fetchone()
        if version != VERSION:
            raise database.damaged(
                f"it was cut short, or another version of kvtier made it: its form is {version}, and not {VERSION}"
            )
        if found != root:
            raise database.damaged("it is the index of another root")

    # Namespaces and owners.

    def add_namespace(self, name: str, row_bytes: int, now: float) -> Namespace:
        """The namespace of this name and size of block, made if it is new; it is used now."""
        with self.database.transaction() as connection:
            (id_,) = connection.execute(
                "INSERT INTO namespaces (name, row_bytes, used) VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET used = excluded.used RETURNING id",
                (name, row_bytes, now),
            ).fetchone()
        return Namespace(id=id_, name=name, row_bytes=row_bytes)

    def namespaces(self) -> dict[int, Namespace]:
        """All namespaces, by id."""
        with self.database.reading() as connection:
            rows = connection.execute("SELECT id, name, row_bytes FROM namespaces").fetchall()
        return {id_: Namespace(id=id_, name=name, row_bytes=size) for id_, name, size in rows}

    def find_namespace(self, name: str, row_bytes: int) -> Namespace:
        """The namespace of this name and size of block; one that holds nothing when there is none."""
        nothing = Namespace(id=NOBODY, name=name, row_bytes=row_bytes)
        return next(
            (n for n in self.namespaces().values() if (n.name, n.row_bytes) == (name, row_bytes)), nothing
        )

    def mark_used(self, namespace: int, now: float) -> None:
        """The namespace was used, and none later than now: a clock that was put back lets none stay in use for ever."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE namespaces SET used = ?1 WHERE id = ?2 OR used > ?1", (now, namespace))

    def empty_namespaces(self) -> list[Namespace]:
        """The namespaces that have neither an extent nor an owner."""
        with self.database.reading() as connection:
            return self._empty_namespaces(connection)

    def remove_namespaces(self) -> list[Namespace]:
        """Forget the namespaces that have neither an extent nor an owner; returns them."""
        with self.database.transaction() as connection:
            empty = self._empty_namespaces(connection)
            connection.executemany("DELETE FROM namespaces WHERE id = ?", ((space.id,) for space in empty))
        return empty

    def add_owner(self, lock: str, namespace: int) -> int:
        """A process whose life is shown by the file *lock* works on a namespace."""
        with self.database.transaction() as connection:
            self._check_numbers(connection)
            id_ = connection.execute(
                "INSERT INTO owners (lock, namespace) VALUES (?, ?)", (lock, namespace)
            ).lastrowid
        assert id_ is not None
        return id_

    def restore_owner(self, owner: int, lock: str, namespace: int) -> None:
        """Another process took this owner for dead and removed it: from now on it may claim again."""
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO owners (id, lock, namespace) VALUES (?, ?, ?)",
                (owner, lock, namespace),
            )

    def owners(self) -> list[tuple[int, str]]:
        """Every owner and its lock."""
        with self.database.reading() as connection:
            return connection.execute("SELECT id, lock FROM owners").fetchall()

    def remove_owner(self, owner: int) -> None:
        """This owner is dead or gone: what it claimed is free, what it was making or removing is nobody's."""
        with self.database.transaction() as connection:
            connection.execute("UPDATE slots SET owner = NULL WHERE owner = ?", (owner,))
            connection.execute("UPDATE extents SET owner = NULL WHERE owner = ?", (owner,))
            connection.execute("DELETE FROM owners WHERE id = ?", (owner,))

    # Slots.

    def claim(
        self, namespace: int, owner: int, count: int, victims: Callable[[int], Sequence[Pair]] | None = None
    ) -> list[int]:
        """Make up to *count* slots the owner's: free ones, then those of *victims*, which are evicted by that.

        *victims* is asked for as many blocks as there are free slots too few; what it gives beyond leaves free slots.
        It is asked again where others have evicted those, until it gives none. Returns places in order.
        """
        with self.database.transaction() as connection:
            places = take_free(connection, namespace, owner, count)
            while victims is not None and (missing := count - len(places)):
                evicted = sorted(victims(missing), key=_place)
                if not evicted:
                    break
                places += change(connection, CLAIM_RUN, evicted[:missing], owner=owner)
                change(connection, FREE_RUN, evicted[missing:])
                self._log.record(connection, namespace, owner, stored=False, pairs=evicted)
                if len(places) < count:
                    places += take_free(connection, namespace, owner, count - len(places))
        return sorted(places)

    def publish(
        self, namespace: int, owner: int, stored: Sequence[Pair], replaced: Sequence[Pair], now: float
    ) -> list[bool]:
        """Rows are written and synced: their slots hold blocks from now on, those they replace are free.

        False for a slot that is no longer the owner's. Cheap where *stored* are neighbours, in order.
        """
        with self.database.transaction() as connection:
            mine = set(change(connection, PUBLISH_RUN, stored, owner=owner, now=now))
            pairs = [pair for pair in stored if pair[1] in mine]
            keys = {key for key, _ in pairs}
            self._forget(connection, namespace, owner, [pair for pair in replaced if pair[0] in keys])
            self._log.record(connection, namespace, owner, stored=True, pairs=pairs)
        return [place in mine for _, place in stored]

    def unclaim(self, owner: int, places: Iterable[int]) -> None:
        """The owner does not write into these slots after all."""
        with self.database.transaction() as connection:
            connection.executemany(
                "UPDATE slots SET owner = NULL WHERE place = ? AND owner = ?",
                ((place, owner) for place in places),
            )

    def forget(self, namespace: int, owner: int, pairs: Sequence[Pair]) -> None:
        """Free these slots, as far as they hold these blocks."""
        for chunk in chunks(pairs):
            with self.database.transaction() as connection:
                self._forget(connection, namespace, owner, chunk)

    def keep_one(
        self, namespace: int, owner: int, doubles: Mapping[OffloadKey, Collection[int]]
    ) -> list[Pair]:
        """Of the places in *doubles* that still hold their block, keep the lowest and free the others.

        Returns what is kept. All processes keep the same one, so that they never free each other's.
        """
        with self.database.transaction() as connection:
            kept, others = lowest_held(connection, doubles)
            self._forget(connection, namespace, owner, others)
        return kept

    def pairs_at(self, places: Sequence[int], since: float = _EVER) -> set[Pair]:
        """What blocks these places hold now, of those stored *since*. Cheap where they are neighbours."""
        with self.database.reading() as connection:
            return pairs_at(connection, sorted(places), since)

    def pairs_of(self, namespace: int, since: float = _EVER, before: float = _NEVER) -> Iterator[Pair]:
        """Every block of a namespace stored *since* and *before*, in order of place.

        Read in parts, so that no writer's journal has to wait.
        """
        after = -1
        while True:
            with self.database.reading() as connection:
                rows = connection.execute(
                    "SELECT key, place FROM slots WHERE place > ? AND namespace = ? AND key IS NOT NULL"
                    " AND time >= ? AND time < ? ORDER BY place LIMIT 20000",
                    (after, namespace, since, before),
                ).fetchall()
            if not rows:
                return
            yield from rows
            after = rows[-1][1]

    def by_use(self, namespace: int, within_s: float) -> list[Pair]:
        """The longest unused blocks first; of those used in the same *within_s* the last stored. Reads all slots.

        So the end of a prompt comes before its beginning.
        """
        with self.database.reading() as connection:
            return connection.execute(
                "SELECT key, place FROM slots WHERE namespace = ? AND key IS NOT NULL"
                " ORDER BY CAST(ifnull(used, time) / ? AS INTEGER), time DESC, place DESC",
                (namespace, within_s),
            ).fetchall()

    def mark_blocks_used(self, marks: Mapping[Pair, float], *, are_new: bool) -> None:
        """The requests that used these blocks, as far as they are in these places, began then.

        Those that *are_new* nobody used before; of the others the latest time counts.
        """
        mark = "?" if are_new else "max(ifnull(used, time), ?)"
        for chunk in chunks(sorted(marks, key=_place)):
            with self.database.transaction() as connection:
                connection.executemany(
                    f"UPDATE slots SET used = {mark} WHERE place = ? AND key = ?",  # noqa: S608 - one of two
                    ((marks[key, place], place, key) for key, place in chunk),
                )

    def set_times_back(self, namespace: int, now: float) -> None:
        """Let what seems to have been stored later than *now* have been stored now: the clock was put back."""
        with self.database.transaction() as connection:
            connection.execute(
                "UPDATE slots SET time = min(time, ?1), used = min(used, ?1)"
                " WHERE namespace = ?2 AND key IS NOT NULL AND (time > ?1 OR used > ?1)",
                (now, namespace),
            )

    # Changes.

    def last_change(self) -> int:
        """The number of the last change."""
        with self.database.reading() as connection:
            return self._log.last(connection)

    def changes_since(
        self, number: int, namespace: int, owner: int
    ) -> tuple[int, list[tuple[bool, list[Pair]]]] | None:
        """The last change, and what was stored (or removed) since *number* where others did any of it, in order.

        ``None`` when that is lost.
        """
        with self.database.view() as connection:
            return self._log.since(connection, number, namespace, owner)

    # Extents.

    def census(self, journal_bytes: int) -> Census:
        """What the root holds, and who has used it when. The journal counts as *journal_bytes*, or as what it takes."""
        with self.database.view() as connection:
            rows = read_extents(connection)
            busy = {
                extent_of(place)
                for (place,) in connection.execute("SELECT place FROM slots WHERE owner IS NOT NULL")
            }
            used = dict(connection.execute("SELECT id, used FROM namespaces"))
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
        return count(rows, busy, used, pages, max(journal_bytes, self.database.journal_size()))

    def extents(self) -> list[ExtentRow]:
        """All extents."""
        with self.database.reading() as connection:
            return read_extents(connection)

    def begin_extent(self, namespace: int, owner: int, slots: int, size: int) -> int:
        """An extent is about to be made: it counts from now on. Returns its id, which nobody had before."""
        with self.database.transaction() as connection:
            self._check_numbers(connection)
            id_ = connection.execute(
                "INSERT INTO extents (namespace, bytes, slots, state, owner) VALUES (?, ?, ?, ?, ?)",
                (namespace, size, slots, _MAKING, owner),
            ).lastrowid
        assert id_ is not None
        assert slots <= MAX_SLOTS
        return id_

    def adopt_extent(
        self, id_: int, namespace: int, slots: int, size: int, blocks: Sequence[tuple[OffloadKey, int, float]]
    ) -> None:
        """An extent that the index did not know, with the *blocks* (key, place, time) found in it."""
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT INTO extents (id, namespace, bytes, slots, state) VALUES (?, ?, ?, ?, ?)",
                (id_, namespace, size, slots, READY),
            )
            self._add_slots(connection, id_, namespace, slots)
            connection.executemany(
                "UPDATE slots SET key = ?, time = ? WHERE place = ?",
                ((key, time, place) for key, place, time in blocks),
            )

    def finish_extent(self, id_: int) -> bool:
        """The extent is there: its slots are free. False when it was taken away meanwhile."""
        with self.database.transaction() as connection:
            row = connection.execute(
                "UPDATE extents SET state = ?, owner = NULL WHERE id = ? AND state = ? RETURNING namespace, slots",
                (READY, id_, _MAKING),
            ).fetchone()
            if row is not None:
                self._add_slots(connection, id_, *row)
        return row is not None

    def empty_extent(self, id_: int, owner: int | None, *, only_idle: bool) -> bool:
        """Take an extent's slots away, whatever is in them; it still counts. False if somebody is writing into it."""
        first, last = place_of(id_, 0), place_of(id_, MAX_SLOTS - 1)
        with self.database.transaction() as connection:
            busy = connection.execute(
                "SELECT 1 FROM slots WHERE place BETWEEN ? AND ? AND owner IS NOT NULL LIMIT 1", (first, last)
            ).fetchone()
            if only_idle and busy:
                return False
            connection.execute("UPDATE extents SET state = ?, owner = ? WHERE id = ?", (_LEAVING, owner, id_))
            # What is free must not be claimed any more; the rest goes in parts.
            connection.execute("DELETE FROM slots WHERE place BETWEEN ? AND ? AND key IS NULL", (first, last))
        while True:
            with self.database.transaction() as connection:
                rows = connection.execute(
                    "DELETE FROM slots WHERE place IN"
                    " (SELECT place FROM slots WHERE place BETWEEN ? AND ? LIMIT ?) RETURNING namespace, key, place",
                    (first, last, CHUNK),
                ).fetchall()
                if rows:
                    pairs = [(OffloadKey(key), place) for _, key, place in rows if key is not None]
                    self._log.record(connection, rows[0][0], NOBODY, stored=False, pairs=pairs)
            if not rows:
                return True

    def drop_extent(self, id_: int) -> None:
        """The file of an emptied extent is gone: it counts no more."""
        with self.database.transaction() as connection:
            connection.execute("DELETE FROM extents WHERE id = ?", (id_,))

    # Inside a transaction.

    @staticmethod
    def _check_numbers(connection: Statements) -> None:
        """Raises ``IndexDamagedError`` where the numbers to come have no end: SQLite would speak of a full disk."""
        connection.execute("SELECT seq AS id FROM sqlite_sequence")

    @staticmethod
    def _empty_namespaces(connection: Statements) -> list[Namespace]:
        rows = connection.execute(
            "SELECT id, name, row_bytes FROM namespaces WHERE id IN (SELECT id FROM namespaces"
            " EXCEPT SELECT namespace FROM extents EXCEPT SELECT namespace FROM owners)"
        )
        return [Namespace(id=id_, name=name, row_bytes=size) for id_, name, size in rows]

    def _add_slots(self, connection: Statements, id_: int, namespace: int, slots: int) -> None:
        connection.executemany(
            "INSERT INTO slots (place, namespace) VALUES (?, ?)",
            ((place_of(id_, slot), namespace) for slot in range(slots)),
        )

    def _forget(self, connection: Statements, namespace: int, owner: int, pairs: Sequence[Pair]) -> None:
        change(connection, FREE_RUN, pairs)
        self._log.record(connection, namespace, owner, stored=False, pairs=pairs)
