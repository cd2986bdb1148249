"""Tools and fixtures of tests that merge: a random pipeline, its low-noise expert and LoRAs. No test changes them."""

import pytest
from conftest import run_tool
from diffusers import WanTransformer3DModel
from lora_dialects import DIALECTS, factors
from pipelines import random_pipeline

from rewardfl_tools import convert_lora, merge_lora, merge_shards


def merge(*arguments, expect=0):
    """Run tools/merge_lora.py; return what it printed."""
    return run_tool(merge_lora.main, *arguments, expect=expect)


def convert(*arguments, expect=0):
    """Run tools/convert_lora.py; return what it printed."""
    return run_tool(convert_lora.main, *arguments, expect=expect)


def join(*arguments, expect=0):
    """Run tools/merge_shards.py; return what it printed."""
    return run_tool(merge_shards.main, *arguments, expect=expect)


def refuse(tool, out, *arguments):
    """Run a tool, which must refuse in one line and leave no file; return the line."""
    before = sorted(out.parent.rglob("*"))
    text = tool(*arguments, "--out", out, expect=2)
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in text and len(line) < 2100
    assert sorted(out.parent.rglob("*")) == before
    return line


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    """Return the folder of a pipeline with random float32 weights, as diffusers saves it."""
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
    """Return the folder with the pipeline and a LoRA for its low-noise expert in three forms."""
    for dialect in ("d1", "d3", "d5"):
        DIALECTS[dialect](pipeline.parent, values)
    return pipeline.parent
