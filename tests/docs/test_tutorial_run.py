"""The tutorial's last step: a model uses the tier, twice. Apart from the other steps because it needs torch."""

import re

import pytest

from tests.docs.test_tutorial import TIMEOUT_S, output_of, type_in, workplace
from tests.transformers.tiny import save_model, tiny_model

__all__ = ["workplace"]

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def test_c52_k7_o1_a_second_process_restores_what_the_first_one_stored(workplace):
    save_model(tiny_model(), workplace / "MODEL")
    done = type_in(workplace, "environment", "package", "install", "use")
    assert done.returncode == 0, done.stdout + done.stderr
    said = output_of(done, "use")
    assert re.search(r'tiers\.books\.path +"blocks\.sqlite"', said)
    restored = re.findall(r"\[line 1\] \d+ prompt tokens, (\d+) restored(.*)", said)
    assert restored[0][0] == "0", said
    assert int(restored[1][0]) > 0, said
    assert "books" in restored[1][1]
