"""How much memory may be taken, read from made-up /proc and /sys/fs/cgroup trees."""

from pathlib import Path

import pytest

from kvtier_core.transfer.memory import find_memory_limit

_GIB = 2**30


class _Machine:
    """A machine with 8 GiB available and whatever control groups a test gives it."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * _GIB // 1024} kB\n")

    def join_groups(self, lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text(lines)

    def add_v2(self, group: str, limit: str, usage: int, stat: str = "anon 1\n") -> None:
        self._add(self.cgroup / group, "memory.max", "memory.current", limit, usage, stat)

    def add_v1(self, group: str, limit: str, usage: int, stat: str = "cache 1\n") -> None:
        folder = self.cgroup / "memory" / group
        self._add(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", limit, usage, stat)

    def _add(self, folder: Path, limit_name: str, usage_name: str, limit: str, usage: int, stat: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(f"{limit}\n")
        (folder / usage_name).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(stat)

    def find(self) -> tuple[int, str]:
        limit = find_memory_limit(self.proc, self.cgroup)
        return limit.bytes, limit.source


@pytest.fixture
def machine(tmp_path: Path) -> _Machine:
    return _Machine(tmp_path)


def test_without_control_groups_the_machine_is_the_limit(machine: _Machine) -> None:
    assert machine.find() == (8 * _GIB, f"{machine.proc}/meminfo (MemAvailable)")


def test_a_group_without_a_limit_sets_none(machine: _Machine) -> None:
    machine.join_groups("0::/a\n")
    machine.add_v2("a", "max", 5)
    assert machine.find()[0] == 8 * _GIB


def test_a_groups_limit_less_its_usage_binds(machine: _Machine) -> None:
    machine.join_groups("0::/a\n")
    machine.add_v2("a", str(4 * _GIB), 3 * _GIB)
    assert machine.find() == (1 * _GIB, f"{machine.cgroup}/a/memory.max")


def test_file_pages_of_a_group_can_be_taken_back(machine: _Machine) -> None:
    machine.join_groups("0::/a\n")
    machine.add_v2("a", str(4 * _GIB), 3 * _GIB, f"inactive_file {_GIB}\nactive_file {_GIB // 2}\nanon 9\n")
    assert machine.find()[0] == 2 * _GIB + _GIB // 2


def test_the_tightest_parent_binds(machine: _Machine) -> None:
    machine.join_groups("0::/a/b/c\n")
    machine.add_v2("a", str(2 * _GIB), _GIB)
    machine.add_v2("a/b/c", str(6 * _GIB), 0)
    assert machine.find() == (_GIB, f"{machine.cgroup}/a/memory.max")


def test_a_container_sees_its_limit_at_the_root(machine: _Machine) -> None:
    machine.join_groups("0::/\n")
    machine.add_v2("", str(3 * _GIB), _GIB)
    assert machine.find()[0] == 2 * _GIB


def test_version_1_groups_bind_too(machine: _Machine) -> None:
    machine.join_groups("9:name=systemd:/\n4:cpu,memory:/a\n1:cpu:/b\n")
    machine.add_v1("a", str(4 * _GIB), 3 * _GIB, f"total_inactive_file {_GIB}\n")
    assert machine.find() == (2 * _GIB, f"{machine.cgroup}/memory/a/memory.limit_in_bytes")


def test_a_group_beyond_its_limit_leaves_nothing(machine: _Machine) -> None:
    machine.join_groups("0::/a\n")
    machine.add_v2("a", str(_GIB), 2 * _GIB)
    assert machine.find()[0] == 0


def test_this_machine_has_an_answer() -> None:
    limit = find_memory_limit()
    assert 0 < limit.bytes < 2**50
    assert limit.source
