"""Whole updates on a pretend GPU (tests/support/pretend_gpu.py): the CPU's numbers, no mixed devices, no hazards.

`make pretend` runs this file.
"""

import argparse
import json
import os

import pytest
import torch
from conftest import ROOT, run_python
from runs import SWAPPED, metrics

from rewardfl import config
from rewardfl.data.clips import read_video, write_video
from rewardfl.estimate import measure, needs
from rewardfl.training import plan
from rewardfl.training.plan import resolve
from rewardfl.training.workload import make_workload

pytestmark = [pytest.mark.pretend, pytest.mark.slow(400), pytest.mark.usefixtures("trusts_code")]
SUPPORT = ROOT / "tests" / "support"
REWARD_FL = ["train_reward_fl.py", "--trust-code", "--config", "tests/golden/reward_fl.yaml"]
FLOW_GRPO = ["train_flow_grpo.py", "--config", "tests/golden/flow_grpo.yaml", "grpo.inner_epochs=1"]
LOW_NOISE = ["model.trainable_models=dit2", "sample.active_steps=[2, 3]"]
FOUR_STEPS = [
    "sample.num_inference_steps=8", "sample.final_timestep=7", "sample.active_steps=[4, 5, 6, 7]",
    "model.trainable_models=dit2",
]  # fmt: skip
OFFLOAD = ["train.memory.use_gradient_checkpointing=true", "train.memory.use_gradient_checkpointing_offload=true"]
CASES = {
    "reward_fl": REWARD_FL,
    "reward_fl swap": [*REWARD_FL, *LOW_NOISE, *SWAPPED],
    "reward_fl offload": [*REWARD_FL, *OFFLOAD, "train.memory.decode_caches=offload"],
    "reward_fl kept graphs": [*REWARD_FL, *OFFLOAD, "train.memory.active_graphs=keep_on_host"],
    "reward_fl boundary cache": [
        *REWARD_FL, *LOW_NOISE, "train.memory.untrained=boundary_cache", "sample.noises_per_sample=2",
    ],
    "reward_fl photos": [
        *REWARD_FL, "data.file_name=tests/support/photos.csv", "anchor.weight=1", "anchor.target=reference",
        "reward.others={flow: {name: optical_flow, weight: 1}}",
    ],
    "reward_fl bfloat16": [*REWARD_FL, "model.dtype=bfloat16"],
    "flow_grpo": FLOW_GRPO,
    "flow_grpo swap": [*FLOW_GRPO, *SWAPPED],
    "flow_grpo guidance": [*FLOW_GRPO, "sample.guidance_scale=2"],
}  # fmt: skip
PLACES = {
    "replay": [], "swap": [*SWAPPED, *OFFLOAD], "keep_on_device": ["train.memory.active_graphs=keep_on_device"],
    "kept chunks": ["train.memory.active_graphs=keep_on_device", "train.memory.kept_chunks=2"],
    "keep_on_host": [*OFFLOAD, "train.memory.active_graphs=keep_on_host"],
    "base videos": ["reward.motion_reference=base", "reward.others={flow: {name: optical_flow, weight: 1}}"],
}  # fmt: skip


def launch(arguments, folder, *, pretend, **variables):
    command = [SUPPORT / "run_on_pretend_gpu.py", folder / "report.json"] if pretend else []
    settings = ["run.save_steps=2", f"run.output_dir={folder / 'run'}"]
    settings += [] if any("max_steps" in argument for argument in arguments) else ["train.max_steps=2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | ({} if pretend else {"ACCELERATE_USE_CPU": "true"})
    folder.mkdir()
    done = run_python([*command, *arguments, *settings], timeout=580, cwd=ROOT, env=environment | variables)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return metrics(folder / "run")


def check_report(folder):
    """The pretend device saw neither mixed devices nor hazards."""
    report = json.loads((folder / "report.json").read_text())
    assert report["mixed"] == report["hazards"] == report["notes"] == []


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_updates_on_the_pretend_gpu(case, tmp_path):
    pretended, computed = (launch(CASES[case], tmp_path / name, pretend=name == "gpu") for name in ("gpu", "cpu"))
    assert pretended == computed
    check_report(tmp_path / "gpu")


def write_clips(folder, sizes, frames):
    """Write a clip of the tiny world in each size (height, width), forwards and backwards; return the table's path."""
    video = read_video(ROOT / "assets" / "tiny_world" / "train" / "videos" / "000.mp4")
    loop = torch.cat([video, video.flip(0)[1:-1]]).repeat(-(-frames // 16), 1, 1, 1)[:frames]
    for i, (height, width) in enumerate(sizes):
        resized = torch.nn.functional.interpolate(loop.permute(0, 3, 1, 2).float(), (height, width), mode="bilinear")
        write_video(folder / f"{i}.mp4", resized.round().byte().permute(0, 2, 3, 1), 8)
    names = [f'{i}.mp4,"a person with long dark hair, silent, turning left"' for i in range(len(sizes))]
    (folder / "clips.csv").write_text("\n".join(["video,prompt", *names]))
    return folder / "clips.csv"


def planned_memory(arguments, sizes):
    """Return the plan's memory for clips of these sizes (height, width)."""
    i = arguments.index("--config") + 1
    cfg = config.load(ROOT / arguments[i], arguments[i + 1 :], config.RewardFlConfig)
    backbone = plan.open_model(cfg)
    work = make_workload(
        resolve(cfg, backbone, 1), backbone, [argparse.Namespace(size=size, offers=("clip",)) for size in sizes]
    )
    return needs.memory(measure.measure(work.video), work)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case, more",
    [
        ("reward_fl offload", ["train.memory.decode_caches=offload"]),
        ("reward_fl offload", ["train.memory.decode_caches=segment"]),
        ("reward_fl kept graphs", FOUR_STEPS),
    ],
)
def test_clips_of_four_sizes_take_the_host_memory_of_the_plan(case, more, tmp_path):
    sizes = [(64, 64), (128, 64), (64, 128), (192, 64)]
    settings = [
        f"data.file_name={write_clips(tmp_path, sizes, frames=9)}", "data.max_pixels=2304", "data.num_frames=9",
        "train.max_steps=4", "reward.kl_gradient=reference_constant",
    ]  # fmt: skip
    arguments = [*CASES[case], *settings, *more]
    launch(arguments, tmp_path / "gpu", pretend=True, PAGE_BYTES="2048")
    taken = json.loads((tmp_path / "gpu" / "report.json").read_text())["host_bytes"]
    planned = planned_memory(arguments, sizes).host
    assert taken == pytest.approx(sum(planned.values()), rel=0.05), planned


@pytest.mark.nightly
@pytest.mark.parametrize("mode", PLACES)
def test_a_gpu_holds_what_the_plan_says(mode, tmp_path):
    """The reward's activations are not planned."""
    clips = write_clips(tmp_path, [(128, 128)], frames=9)
    size = [f"data.file_name={clips}", "data.num_frames=9", "data.height=128", "data.width=128"]
    arguments = [*REWARD_FL, *FOUR_STEPS, *PLACES[mode], *size, "reward.kl_gradient=reference_constant"]
    launch(arguments, tmp_path / "gpu", pretend=True, PAGE_BYTES="2048")
    peaks = json.loads((tmp_path / "gpu" / "report.json").read_text())["peaks"]
    memory = planned_memory(arguments, [(128, 128)])
    for phase in ("rollout", "decode", "replay"):
        planned = max(memory.of(part) for part in memory.phases if part.startswith(phase))  # decode, and its VJP
        assert peaks[phase] == pytest.approx(planned, rel=0.05), (phase, memory.phases)
    assert peaks["start"] <= 1.05 * memory.peak  # with the base videos


@pytest.mark.slow(8)
def test_planted_faults_are_seen():
    done = run_python([SUPPORT / "planted_faults.py"])
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) > 25
    assert [name for name, value in seen.items() if value == name.startswith("fine")] == []
