"""Eviction policies written down naively, over lists, one key at a time: what the real ones are compared with."""


class Oracle:
    """Common to all: lists of keys, the first to leave in front; keys met while held are set aside."""

    def __init__(self, *queues):
        self.queues: dict[str, list[int]] = {name: [] for name in queues}
        self.aside: dict[int, str] = {}
        self.uses: dict[int, int] = {}

    def forget(self, key):
        for queue in self.queues.values():
            if key in queue:
                queue.remove(key)
        self.aside.pop(key, None)

    def move(self, key, name):
        self.forget(key)
        self.queues[name].append(key)

    def length(self, name):
        return len(self.queues[name]) + sum(home == name for home in self.aside.values())

    def first(self, name, held):
        """The first key that may be looked at, or ``None``; held ones on the way are set aside."""
        for key in list(self.queues[name]):
            if key not in held:
                return key
            self.queues[name].remove(key)
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
        for key in reversed(keys):
            self.uses[key] = 0
            self.move(key, "all")

    def release(self, keys):
        for key in reversed(keys):
            if self.uses[key] or key in self.aside:
                self.uses[key] = 0
                self.move(key, "all")

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
        homes = {key: self.home_of(key) for key in keys}
        for key in reversed(keys):
            self.uses[key] = 0
            self.move(key, homes[key])

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
        for key in reversed(keys):
            if self.uses[key] or self.aside.get(key) == "frequent":
                self.uses[key] = 0
                self.move(key, "frequent")
            elif key in self.aside:
                self.move(key, "recent")

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
        for key in reversed(keys):
            self.uses[key] = 0
            self.move(key, "main" if key in self.ghosts else "small")
        self.ghosts = [key for key in self.ghosts if key not in keys]

    def release(self, keys):
        for key in reversed(keys):
            if key in self.aside:
                self.move(key, "main")

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
                    self.move(main, "main")
                    continue
                key = self.first("small", held)
            if key is None:
                return None
            if not self.uses[key]:
                self.forget(key)
                self.ghosts = [*self.ghosts, key][-self.max_ghosts :]
                return key
            self.uses[key] = 0
            self.move(key, "main")


ORACLES = {"lru": NaiveLRU, "arc": NaiveARC, "s3fifo": NaiveS3FIFO}
