"""Distil the tiny world's pipeline into a sampler of four steps: a LoRA for each expert, in Wan2.2-Lightning's layout.

The teacher is the pipeline itself. From the student's own state before each of its steps the teacher takes SUBSTEPS
Euler steps to the next sigma. The student's velocity is fitted to the straight line between the two states.
"""

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rewardfl import backbones, data, epoch_order, flow, lora, reward_flow
from rewardfl.backbones.protocol import Backbone, Conditioning, Experts, Source, Velocity
from rewardfl.backbones.wan.variants import LAYERS
from rewardfl.merging import conversion, writing
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.weights import lora_files
from tiny_world.people import NUM_FRAMES, SIZE
from tiny_world.video import SHIFT

STEPS, SUBSTEPS = 4, 4
RANK = 12  # both files together are below 1 MB
BATCH, LEARNING_RATE = 2, 2e-3
CPU = torch.device("cpu")


def find_target(teacher: Velocity, x: Tensor, step: int) -> Tensor:
    """Return the velocity from x (B, ...) before the student's `step` to the teacher's state after it."""
    sigmas, first, end = teacher.schedule.sigmas, step * SUBSTEPS, (step + 1) * SUBSTEPS
    goal = reward_flow.rollout(teacher.reference, x, sigmas[: end + 1], keep=(), start=first).x0
    return (goal - x) / (sigmas[end] - sigmas[first])


def fit_steps(student: Velocity, teacher: Velocity, x: Tensor) -> list[float]:
    """Accumulate the gradients of the squared misfits along the student's path from noise x; return the misfits."""
    sigmas, misfits = student.schedule.sigmas, []
    for i in range(STEPS):
        target = find_target(teacher, x, i)
        velocity = student(x, i)
        loss = (velocity - target).square().mean()
        loss.backward()
        misfits.append(float(loss.detach()))
        x = flow.euler_step(x, velocity.detach(), sigmas[i], sigmas[i + 1])
    return misfits


def read_conditioning(backbone: Backbone, table: Path) -> list[Conditioning]:
    """Encode each row of a table: its prompt and its clip's first frame."""
    encode_text, encode_image = backbone.text_encoder(CPU), backbone.image_encoder(CPU)
    rows = data.load_metadata(table)
    images = [data.load_example(row, SIZE, SIZE, NUM_FRAMES).video[:, 0] for row in rows]
    return [encode_text(row.prompt) | encode_image(image, NUM_FRAMES) for row, image in zip(rows, images, strict=True)]


def distil(world: Path, updates: int, seed: int, log: Callable[[str], None]) -> None:
    """Train on the people of `world`/train and write `world`/lightning/{high,low}_noise_model.safetensors."""
    backbone = backbones.open("wan2_2", Source(model_paths=str(world / "pipeline"), dtype="float32"))
    conditioning = read_conditioning(backbone, world / "train" / "metadata.csv")
    experts = Experts({name: backbone.load_expert(name) for name in backbone.experts})
    for expert in experts.inside.values():
        lora.inject(expert, RANK, RANK, list(LAYERS.values()), seed)
    trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0)
    shape, start = backbone.latent_shape(SIZE, SIZE, NUM_FRAMES), time.time()
    schedules = [backbone.schedule(count, SHIFT, shape) for count in (STEPS, STEPS * SUBSTEPS)]
    for update in range(updates):
        rate = LEARNING_RATE * min(1, (update + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * update / updates))
        optimizer.param_groups[0]["lr"] = rate
        rows = [epoch_order.sample_at(update * BATCH + i, len(conditioning), seed)[1] for i in range(BATCH)]
        x = draw_noise((BATCH, *shape), noise_seed(seed, update, "distil"))
        batch = backbone.collate([conditioning[row] for row in rows])
        student, teacher = (
            Velocity(backbone=backbone, model=experts, conditioning=batch, schedule=schedule) for schedule in schedules
        )
        misfits = fit_steps(student, teacher, x)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log(f"distil {update} {time.time() - start:.0f}s misfit {' '.join(f'{misfit:.4f}' for misfit in misfits)}")
    write_loras(backbone, experts, world / "lightning")


def write_loras(backbone: Backbone, experts: Experts, folder: Path) -> None:
    """Write the adapters as Wan2.2-Lightning's files, in float16."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as checkpoint:
        for name, expert in experts.inside.items():
            backbone.save_adapter(name, expert, Path(checkpoint), lora.adapter_state(expert))
        for adapter in lora_files.read_lora(checkpoint):
            state, metadata = conversion.convert(adapter, "comfy", torch.float16)
            path = folder / f"{adapter.expert}_model.safetensors"
            weights = writing.TensorFile(
                parts=[conversion.make_part(*item) for item in state.items()], metadata=metadata
            )
            with path.open("wb") as file:
                writing.write_file(file, weights, lambda count: None)
