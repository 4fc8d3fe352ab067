"""What stands for an image in a block's hash, by vLLM's own code: its content, or a name from the client (C01).

That images are served, and none takes another's blocks, is shown in ``features``.
"""

import pytest

from tests.vllm.engines import needs_vllm
from tests.vllm.models import SIDE

pytestmark = needs_vllm


def identity(colour, name=None, **factors):
    from PIL import Image
    from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
    from vllm.multimodal.processing.inputs import ProcessorInputs

    image = Image.new("RGB", (SIDE, SIDE), colour)
    inputs = ProcessorInputs(
        prompt=[],
        mm_data_items=MultiModalDataParser().parse_mm_data({"image": image}),
        mm_uuid_items=parse_mm_uuids(name and {"image": name}),
        **factors,
    )
    return inputs.get_mm_hashes("model", "blake3")["image"]


@pytest.mark.parametrize("factors", [{}, {"hf_processor_mm_kwargs": {"do_resize": False}}])
def test_c01_an_image_counts_by_its_content_and_by_how_it_is_processed(factors):
    assert identity("red", **factors) == identity("red", **factors) != identity("blue", **factors)
    assert (identity("red", **factors) == identity("red")) == (not factors)


def test_c01_a_name_that_a_client_gives_stands_for_the_image():
    assert identity("red", "mine") == identity("blue", "mine") != identity("red")
