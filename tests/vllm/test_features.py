"""What production servers turn on, in real vLLM: right answers from pool and disk, or a refusal by name."""

import json
import re
import subprocess
import sys

import pytest

from tests.vllm.engines import needs_vllm
from tests.vllm.features import FEATURES, PAGE, describe, lines_of


@needs_vllm
@pytest.mark.timeout(7200)
def test_v8_v11_v14_every_feature_answers_as_without_connector_or_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.features", "--json"],
        cwd=PAGE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["wrong"], report["faults"]) == (0, 0), done.stderr[-3000:]
    assert report["refused"].keys() == {name for name, feature in FEATURES.items() if feature.refused}
    assert len(report["served"]) >= 20


def test_v8_the_page_has_a_line_about_every_feature_with_the_day_it_was_tried():
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("## ")[1:])
    for title, is_refused in (("Served", False), ("Refused", True)):
        names = re.findall(r"^\| (.+?) \| .* \| \d{4}-\d\d-\d\d \|$", sections[title], re.MULTILINE)
        assert names == [name for name, feature in FEATURES.items() if bool(feature.refused) == is_refused]


def test_v8_features_that_are_tried_by_themselves_leave_the_lines_of_the_others():
    page = PAGE.read_text()
    lines = lines_of(page)
    one = "| plain | 1 | 2 | 3 | 2001-02-03 |"
    changed = describe({**lines, "plain": one, "of long ago": "| of long ago | 4 |"})
    assert changed == page.replace(lines["plain"], one) != page
