"""Eviction policies written down naively, over lists, one key at a time: what the real ones are compared with."""

from itertools import groupby


class Chain:
    """Keys that leave together, the last first. Chain 0 stands for none: one is made for every call."""

    def __init__(self, number):
        self.number = number
        self.keys: list[int] = []


class Oracle:
    """Common to all: lists of chains, the first to leave in front; keys met while held are set aside.

    A key is its own depth: of one chain the highest leaves first.
    """

    def __init__(self, *queues):
        self.queues: dict[str, list[Chain]] = {name: [] for name in queues}
        self.aside: dict[int, str] = {}
        self.uses: dict[int, int] = {}
        self.chains: dict[int, int] = {}

    def home(self, key):
        """The queue and the chain that *key* has its place in."""
        for name, queue in self.queues.items():
            for chain in queue:
                if key in chain.keys:
                    return name, chain
        return self.aside.get(key), None

    def is_astray(self, key):
        _, chain = self.home(key)
        return chain is None or chain.number != self.chains[key]

    def forget(self, key):
        for queue in self.queues.values():
            for chain in list(queue):
                if key in chain.keys:
                    chain.keys.remove(key)
                if not chain.keys:
                    queue.remove(chain)
        self.aside.pop(key, None)

    def move(self, keys, name):
        """To the end of a queue, as one call: of its chains the last leaves first."""
        for key in keys:
            self.forget(key)
        queue = self.queues[name]
        for number, new in reversed([(n, list(new)) for n, new in groupby(keys, self.chains.get)]):
            chain = next((chain for chain in queue if chain.number == number), None) if number else None
            if chain is None:
                chain = Chain(number)
            else:
                queue.remove(chain)
            queue.append(chain)
            chain.keys += new
            if number:
                chain.keys.sort()

    def length(self, name):
        return sum(len(chain.keys) for chain in self.queues[name]) + list(self.aside.values()).count(name)

    def first(self, name, held):
        """The first key that may be looked at, or ``None``; held ones on the way are set aside."""
        while self.queues[name]:
            key = self.queues[name][0].keys[-1]
            if key not in held:
                return key
            self.forget(key)
            self.aside[key] = name
        return None

    def remove(self, keys):
        for key in keys:
            self.forget(key)

    def insert(self, keys):
        raise NotImplementedError

    def release(self, keys):
        raise NotImplementedError

    def next(self, held):
        raise NotImplementedError

    def evict(self, n, held):
        return [key for key in (self.next(held) for _ in range(n)) if key is not None]


class NaiveLRU(Oracle):
    def __init__(self, _capacity):
        super().__init__("all")

    def insert(self, keys):
        self.uses.update(dict.fromkeys(keys, 0))
        self.move(keys, "all")

    def release(self, keys):
        moving = [key for key in keys if self.uses[key] or self.is_astray(key)]
        self.uses.update(dict.fromkeys(moving, 0))
        self.move(moving, "all")

    def next(self, held):
        key = self.first("all", held)
        if key is not None:
            self.forget(key)
        return key


class NaiveARC(Oracle):
    def __init__(self, capacity):
        super().__init__("recent", "frequent")
        self.capacity = capacity
        self.target = 0.0
        self.ghosts: dict[str, list[int]] = {"recent": [], "frequent": []}

    def insert(self, keys):
        self.uses.update(dict.fromkeys(keys, 0))
        homes = {key: self.home_of(key) for key in keys}
        for side in ("recent", "frequent"):
            self.move([key for key in keys if homes[key] == side], side)

    def home_of(self, key):
        recent, frequent = self.ghosts["recent"], self.ghosts["frequent"]
        if key in recent:
            self.target = min(self.target + max(1, len(frequent) / len(recent)), self.capacity)
            recent.remove(key)
        elif key in frequent:
            self.target = max(self.target - max(1, len(recent) / len(frequent)), 0)
            frequent.remove(key)
        else:
            return "recent"
        return "frequent"

    def release(self, keys):
        moving: dict[str, list[int]] = {"recent": [], "frequent": []}
        for key in keys:
            side, _ = self.home(key)
            if self.uses[key]:
                self.uses[key] = 0
                moving["frequent"].append(key)
            elif self.is_astray(key):
                moving[side].append(key)
        for side, moved in moving.items():
            self.move(moved, side)

    def next(self, held):
        sides = ["frequent", "recent"]
        if self.length("recent") > int(self.target):
            sides.reverse()
        for side in sides:
            key = self.first(side, held)
            if key is not None:
                self.forget(key)
                # Only the newest of a call matter: what is trimmed in between would be trimmed in the end.
                self.ghosts[side] = [*self.ghosts[side], key][-self.capacity :]
                return key
        return None


class NaiveS3FIFO(Oracle):
    def __init__(self, capacity):
        super().__init__("small", "main")
        self.max_small = max(1, capacity // 10)
        self.max_ghosts = max(1, capacity - self.max_small)
        self.ghosts: list[int] = []

    def insert(self, keys):
        self.uses.update(dict.fromkeys(keys, 0))
        self.move([key for key in keys if key not in self.ghosts], "small")
        self.move([key for key in keys if key in self.ghosts], "main")
        self.ghosts = [key for key in self.ghosts if key not in keys]

    def release(self, keys):
        moving: dict[str, list[int]] = {"small": [], "main": []}
        for key in keys:
            if key in self.aside:
                moving["main"].append(key)
            elif self.is_astray(key) and not self.uses[key]:
                moving[self.home(key)[0]].append(key)
        for queue, moved in moving.items():
            self.move(moved, queue)

    def next(self, held):
        while True:
            key = None
            if self.length("small") > self.max_small:
                key = self.first("small", held)
            if key is None:
                main = self.first("main", held)
                if main is not None:
                    if not self.uses[main]:
                        self.forget(main)
                        return main
                    self.uses[main] = min(self.uses[main], 3) - 1
                    self.move([main], "main")
                    continue
                key = self.first("small", held)
            if key is None:
                return None
            if not self.uses[key]:
                self.forget(key)
                self.ghosts = [*self.ghosts, key][-self.max_ghosts :]
                return key
            self.uses[key] = 0
            self.move([key], "main")


ORACLES = {"lru": NaiveLRU, "arc": NaiveARC, "s3fifo": NaiveS3FIFO}
