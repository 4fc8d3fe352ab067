"""A tier in memory that does as its orders say: a JSON file that a test rewrites while the engine runs.

``change``: loads return other bytes than were stored. ``blind``: the proof of what is loaded is not checked, in the
whole process. ``fail``: the fraction of stores and loads that raise. ``hang``: loads do not end before the order does.
``slow``: the seconds that each load of a block takes.
"""

import json
import random
import threading
from pathlib import Path
from unittest.mock import patch

from kvtier_core.proof import Sealer
from kvtier_core.tier import BlockTier, TierInfo, TierSettings

_check = Sealer.check


class AwkwardSettings(TierSettings):
    orders: Path


class AwkwardTier(BlockTier):
    Settings = AwkwardSettings
    info = TierInfo(medium="memory", default_capacity=1 << 30)

    settings: AwkwardSettings

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.blocks = {}
        self.random = random.Random(0)

    def order(self, name):
        return json.loads(self.settings.orders.read_text()).get(name, 0)

    def open(self):
        patch.object(Sealer, "check", lambda *arguments: self.order("blind") or _check(*arguments)).start()

    def contains(self, keys):
        return [key in self.blocks for key in keys]

    def trouble(self):
        if self.random.random() < self.order("fail"):
            raise OSError("as ordered")

    def store(self, key, block):
        self.trouble()
        self.blocks[key] = bytes(block)

    def load(self, key, into):
        self.trouble()
        pause = threading.Event()
        pause.wait(self.order("slow"))
        while self.order("hang"):
            pause.wait(0.05)
        block = self.blocks.get(key)
        if block is None:
            return False
        into[:] = bytes(255 - byte for byte in block) if self.order("change") else block
        return True

    def delete(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def close(self):
        self.blocks.clear()
