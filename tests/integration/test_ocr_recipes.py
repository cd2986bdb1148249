"""Dry runs of the presets that train on rendered text, and rows that quote none."""

import pytest
from conftest import ROOT, run_tool
from image_pipelines import random_sd3
from pipelines import random_variant

import train_flow_grpo
import train_forward_rl

pytestmark = pytest.mark.slow(30)

PRESETS = {
    "ocr_sd35": (train_flow_grpo, random_sd3),
    "ocr_sd35_nft": (train_forward_rl, random_sd3),
    "ocr_wan21_t2v": (train_flow_grpo, lambda: random_variant("wan2_1_t2v")),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_dry_run_of_a_preset_and_of_rows_without_text(name, tmp_path):
    """Without the reward's engine: a plan is for another machine."""
    script, make = PRESETS[name]
    make().save_pretrained(tmp_path / "model")
    (tmp_path / "held_out.txt").write_text('a cup that says "TEA"\n')
    (tmp_path / "prompts.txt").write_text('a sign that says "OPEN"\na sign\na "wide\n')
    words = [
        "--config", ROOT / f"configs/presets/{name}.yaml", "--dry-run", f"model.model_paths={tmp_path / 'model'}",
        f"run.output_dir={tmp_path / 'run'}", f"data.file_name={tmp_path / 'prompts.txt'}",
        f"evaluation.eval_clips={tmp_path / 'held_out.txt'}", "data.height=32", "data.width=32",
        "train.per_device_train_batch_size=8",
    ]  # fmt: skip
    out = run_tool(script.main, *words, expect=2)
    assert "2 of 3 rows cannot be used; mend them or set data.skip_bad_rows: true\nline 2: reward.terms.score: " in out
    assert (
        "\nline 3: reward.terms.score: the prompt has a quotation mark without a partner; " in out
        and "'a \"wide'" in out
    )
    out = run_tool(script.main, *words, "data.skip_bad_rows=true")
    assert "skipped: line 3: reward.terms.score: the prompt" in out and "trained on 1 x score (ocr)" in out
    assert "\nreward.terms.score: ocr looks for 'OPEN' in the first rows of data.file_name (" in out
