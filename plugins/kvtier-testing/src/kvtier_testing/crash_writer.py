"""Run as a program by ``power_loss``: one writer in a process of its own, whose calls are recorded.

``python -m kvtier_testing.crash_writer ORDER``: ORDER is JSON with the tier's settings and the round's number.
"""

import json
import sys

from kvtier_core.plugins import class_of_tier, load_tier_type
from kvtier_testing.crash_processes import write
from kvtier_testing.subjects import Subject


def main() -> None:
    """Write what a writer of that round writes."""
    order = json.loads(sys.argv[1])
    tier_type = load_tier_type(order["settings"]["type"])
    settings = tier_type.cls.Settings.model_validate(order["settings"])
    write(
        Subject(cls=class_of_tier(tier_type, settings), settings=settings),
        order["number"],
        lambda _told: None,
    )


if __name__ == "__main__":
    main()
