"""A run that was begun by an earlier commit, with the older names of keys, resumes.

The archive has run.json and the checkpoint at step 4 of each script, made in a worktree of f5189f3b with SETTINGS and
train.max_steps=4. A commit that changes assets/tiny_world makes it again, as the runs refuse other weights.
"""

import json
import os
import zipfile

import pytest
from conftest import ROOT, run_python

pytestmark = pytest.mark.slow(30)
SAVED = ROOT / "tests/integration/runs_f5189f3b.zip"
# on top of tests/golden/*.yaml
SETTINGS = ["lora.lora_rank=1", "lora.lora_target_modules=q", "train.lr_scheduler_type=constant", "run.save_steps=4"]


@pytest.mark.parametrize("script", ["reward_fl", "flow_grpo", "forward_rl"])
def test_a_run_of_an_earlier_commit_resumes(tmp_path, script):
    with zipfile.ZipFile(SAVED) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith(script)])
    checkpoints = tmp_path / script / "checkpoints"
    for link in checkpoints.iterdir():
        if link.is_file():  # zipfile extracts a link as a file with its target
            target = link.read_text()
            link.unlink()
            link.symlink_to(target)
    command = [ROOT / f"train_{script}.py", "--config", ROOT / f"tests/golden/{script}.yaml", "--trust-code"]
    places = [f"run.output_dir={tmp_path / script}", f"data.cache_dir={tmp_path / 'cache'}"]
    arguments = [*command, *SETTINGS, *places, "train.max_steps=8"]
    done = run_python(arguments, cwd=ROOT, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stdout and "at step 4" in done.stdout
    lines = (tmp_path / script / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-4:] == [5, 6, 7, 8]
