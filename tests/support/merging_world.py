"""Fixtures of tests that merge: a random pipeline, its low-noise expert and LoRAs for it. No test changes them."""

import pytest
from diffusers import WanTransformer3DModel
from lora_dialects import DIALECTS, factors
from pipelines import random_pipeline


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    """The folder of a pipeline with random float32 weights, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("low_noise_world") / "pipeline"
    random_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def expert(pipeline):
    return WanTransformer3DModel.from_pretrained(pipeline / "transformer_2")


@pytest.fixture(scope="session")
def values(expert):
    return factors(expert)


@pytest.fixture(scope="session")
def world(pipeline, values):
    """The folder of the pipeline, beside a LoRA for its low-noise expert in three forms."""
    for dialect in ("d1", "d3", "d5"):
        DIALECTS[dialect](pipeline.parent, values)
    return pipeline.parent
