"""A tiny model for SGLang."""

from pathlib import Path

import pytest

from tests.sglang.engines import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))
