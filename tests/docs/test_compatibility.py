"""The page of releases is made from what is kept, and says of each release what was found."""

import pytest

from tests.compatibility import HEAD, PAGE, current_page, page, read


@pytest.mark.needs_torch  # kvtier_vllm is installed only where torch is
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == current_page(), "python -m tests.compatibility page"


def test_every_engine_was_validated_in_a_release_that_kvtier_takes():
    validated = {one["engine"] for one in read() if one["verdict"] == "validated"}
    assert validated == {"llama.cpp", "sglang", "transformers", "vllm"}


@pytest.mark.parametrize(
    ("release", "verdict", "expected"),
    [
        ("0.32.0", "validated", "validated"),
        ("0.33.0", "interface checked", "interface checked, refused"),
        ("0.34.0", "differs", "differs, refused"),
    ],
)
def test_a_release_that_the_plugin_refuses_is_said_to_be_refused(release, verdict, expected):
    one = {
        "engine": "vllm",
        "release": release,
        "verdict": verdict,
        "what": {"names": 3},
        "date": "2026-11-30",
    }
    text = page([one], ("0.32",), "transformers>=4", ("2026.10",), ("0.5.23",))
    assert text.startswith(HEAD)
    assert f"| vllm | {release} | {expected} | - | names: 3 (2026-11-30) |" in text
    assert "other than 0.32" in text
