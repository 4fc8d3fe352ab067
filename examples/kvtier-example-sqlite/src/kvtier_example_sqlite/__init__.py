"""An example of a tier on the blocking interface: blocks in one SQLite file, over restarts."""

from kvtier_example_sqlite.tier import SqliteSettings, SqliteTier

__all__ = ["SqliteSettings", "SqliteTier"]
