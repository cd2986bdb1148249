"""Reward feedback learning for Wan2.2 image-to-video: train a LoRA by back-propagating a reward through the sampler.

One update, for every sample of the batch:

    1. roll out noise -> latents without a graph, keeping the latents before the active steps
    (reward_flow.rollout) 2. decode, score, and take the reward's gradient with respect to the frames alone
    (rewards, autograd) 3. pull it back through the VAE, chunk by chunk: dR/dx0
    (decode.decode_vjp) 4. replay the active steps from last to first, one graph at a time; LoRA gradients add
    up    (reward_flow.replay)

    accelerate launch train_reward_fl.py --config configs/tiny_face.yaml [--dry-run] [section.key=value ...]
"""

import argparse
import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, ProjectConfiguration
from torch import Tensor
from tqdm import tqdm

from rewardfl import checkpoint, data, decode, flow, lora, reward_flow, rewards, wan, wan_load
from rewardfl import config as configuration
from rewardfl import plan as planning
from rewardfl.config import RunConfig
from rewardfl.shards import Refused

VERSIONED = ("torch", "accelerate", "diffusers", "transformers", "peft", "safetensors", "onnx", "numpy", "av")


@dataclass(frozen=True)
class Sample:
    """What training needs of one clip of the data; the clip itself is not kept."""

    id: str
    prompt: str
    image: Tensor  # (3, H, W) in [-1, 1]
    reference: object  # what the reward keeps of the real clip
    held_out_reference: object | None  # what the judge keeps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and stop before loading weights"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    try:
        return train(configuration.load(args.config, args.overrides), args.dry_run)
    except (configuration.ConfigError, data.DataError, checkpoint.CheckpointError, Refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def train(cfg: RunConfig, dry_run: bool) -> int:
    """Train; the process's exit code, 2 for a dry run that does not fit the GPU that is there."""
    # ---------------------------------------------------------------------------------- what will be done, checked
    configuration.check_paths(cfg)
    layout = wan_load.find(
        cfg.model.model_paths, cfg.model.tokenizer_path, cfg.model.model_id_with_origin_paths, cfg.model.allow_download
    )
    spatial, temporal = configuration.vae_factors(layout.configs)
    configuration.check_geometry(cfg.data.height, cfg.data.width, cfg.data.num_frames, spatial, temporal)
    boundary = cfg.model.min_timestep_boundary
    boundary = configuration.boundary_ratio(layout.configs) if boundary is None else boundary
    schedule = flow.linear_sigmas(cfg.sample.num_inference_steps, cfg.sample.shift)
    sigmas = reward_flow.until_final_step(schedule, cfg.sample.final_timestep)
    experts = configuration.trainable_experts(cfg)
    active, coupling = configuration.active_steps(cfg), configuration.resolved_coupling(cfg)
    configuration.check_active_experts(active, sigmas.tolist(), boundary, experts)
    accumulation = cfg.train.gradient_accumulation_steps
    # accelerate counts backwards: each replayed step is a micro-batch, and the last one of an update synchronises
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation * len(active), sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=len(experts) > 1)],
        log_with=None if cfg.run.log_with == "none" else cfg.run.log_with,
        project_config=ProjectConfiguration(logging_dir=f"{cfg.run.output_dir}/logs"),
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(cfg.run.cpu_threads or max(1, os.cpu_count() // accelerator.num_processes))
    global_batch = configuration.check_batch(cfg, accelerator.num_processes)
    rows = data.load_metadata(cfg.data.file_name)
    steps = data.total_steps(len(rows), global_batch, cfg.train.num_train_epochs, cfg.train.max_steps)
    say = accelerator.print
    for difference in wan_load.differences(layout, boundary, cfg.sample.shift):
        say(f"note: {difference}")
    say(plan(cfg, sigmas, boundary, active, coupling, len(rows), global_batch, steps, accelerator))
    if dry_run:
        costs, run = planning.costs_of(cfg, layout.configs), planning.run_of(cfg, layout.configs, len(rows), steps)
        gpu_memory = total_memory(accelerator.device)
        say("\n" + planning.report(costs, run, planning.TFLOPS, gpu_memory))
        return 0 if gpu_memory is None or planning.fits(costs, run, gpu_memory) else 2
    if accelerator.is_main_process:
        checkpoint.prepare_output_dir(cfg.run.output_dir, configuration.to_dict(cfg), cfg.run.resume_from_checkpoint)
    accelerator.wait_for_everyone()
    resume = checkpoint.find_checkpoint(cfg.run.output_dir, cfg.run.resume_from_checkpoint)

    # ---------------------------------------------------------------------------------- data and reward, before weights
    rows, problems = data.check_rows(rows, cfg.data.num_frames, cfg.data.skip_bad_rows)
    device = accelerator.device
    reward = face_reward(cfg, cfg.reward.reward_model_path).to(device)
    judge = face_reward(cfg, cfg.reward.held_out_model_path).to(device) if cfg.reward.held_out_model_path else None
    samples, faceless = load_samples(cfg, rows, reward, judge, device)
    for problem in problems + faceless:
        say(f"skipped: {problem}")
    steps = data.total_steps(len(samples), global_batch, cfg.train.num_train_epochs, cfg.train.max_steps)

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    distilled = wan_load.read_distilled(cfg.model.distill_lora_high, cfg.model.distill_lora_low)
    fused = distilled if cfg.model.distill_lora_mode == "fuse" else []
    pipe = wan_load.load_pipeline(layout, wan.DTYPES[cfg.model.dtype], fused).to(device)
    model = wan.Experts(pipe.transformer, pipe.transformer_2, boundary)
    trained = {expert: model.get_submodule(expert) for expert in experts}
    for update in distilled if cfg.model.distill_lora_mode == "adapter" else []:
        lora.attach_frozen(model.get_submodule(update.expert), update)
    for expert in trained.values():
        lora.inject(
            expert, cfg.lora.lora_rank, cfg.lora.lora_alpha or cfg.lora.lora_rank,
            lora.target_modules(cfg.lora.lora_target_modules), cfg.run.seed,
        )  # fmt: skip
        if cfg.train.use_gradient_checkpointing:
            expert.enable_gradient_checkpointing()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.train.learning_rate, weight_decay=cfg.train.weight_decay)
    # a plain scheduler: accelerate's steps once per process
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(cfg, steps))
    policy, optimizer = accelerator.prepare(model, optimizer)

    # ---------------------------------------------------------------------------------- where an earlier run stopped
    metrics_file = checkpoint.MetricsFile(Path(cfg.run.output_dir) / "metrics.jsonl")
    first_step, skipped_in_a_row, history = 0, 0, []
    if resume is not None:
        for name, expert in trained.items():
            lora.load_adapter(expert, resume / wan.PARTS[name])
        state = checkpoint.load_state(resume)
        if state["samples"] != len(samples):
            raise checkpoint.CheckpointError(
                f"{resume} was trained on {state['samples']} clips, data.file_name now gives {len(samples)}: their "
                "order would change; restore the data or set run.output_dir to a new folder"
            )
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_step, skipped_in_a_row = state["step"], state["skipped_in_a_row"]
        say(f"resuming from {resume} at step {first_step}")
    if accelerator.is_main_process:
        metrics_file.cut_back(first_step)
        history = metrics_file.read() if first_step else []
        checkpoint.write_run_json(
            cfg.run.output_dir, configuration.to_dict(cfg), sys.argv, checkpoint.library_versions(VERSIONED),
            checkpoint.git_commit(Path(__file__).parent),
        )  # fmt: skip
    accelerator.init_trackers("rewardfl", config={k: str(v) for k, v in flat(configuration.to_dict(cfg)).items()})

    # ---------------------------------------------------------------------------------- the pieces of a step
    conditioning_of: dict[int, wan.Conditioning] = {}

    def conditioning(row: int) -> wan.Conditioning:
        if row not in conditioning_of:
            conditioning_of[row] = wan.encode(pipe, samples[row].prompt, samples[row].image, cfg.data.num_frames)
        return conditioning_of[row]

    shape = wan.latent_shape(pipe, cfg.data.height, cfg.data.width, cfg.data.num_frames)
    per_process = accumulation * cfg.train.per_device_train_batch_size  # DDP averages over the processes
    reward_scale = cfg.reward.reward_weight / cfg.reward.reward_std

    def backward(loss: Tensor) -> None:
        # accelerator.backward divides by the accumulation count, and so would the cotangent that replay reads from x_i
        accelerator.backward(loss * accelerator.gradient_accumulation_steps)

    def micro_step(step: int, micro: int, timer: "Timer") -> dict[str, Tensor]:
        """Add the gradients of one micro-batch; what is logged of each of its samples, (B,) tensors."""
        batch = data.micro_batch(
            step, micro, accelerator.process_index, batch_size=cfg.train.per_device_train_batch_size,
            accumulation=accumulation, processes=accelerator.num_processes, num_rows=len(samples), seed=cfg.run.seed,
        )  # fmt: skip
        with timer("encode"):
            velocity = wan.Velocity(policy, wan.Conditioning.stack([conditioning(row) for _, row in batch]))
        seeds = [
            data.training_noise_seed(cfg.run.seed, epoch, samples[row].id, cfg.sample.noises_per_sample)
            for epoch, row in batch
        ]
        x = torch.cat([data.noise(shape, seed, device) for seed in seeds])  # (B, 16, T, h, w)
        with timer("rollout"):
            trajectory = reward_flow.rollout(velocity, x, sigmas, active)
        with timer("decode"):
            decoded = decode.decode_with_caches(pipe.vae, trajectory.x0)
        with timer("reward"):
            video = decoded.video.float().requires_grad_()  # (B, 3, F, H, W) in [-1, 1]
            out = reward(video, [samples[row].reference for _, row in batch])
            (grad_video,) = torch.autograd.grad(-reward_scale / per_process * out.score.sum(), video)
            with torch.no_grad():
                judged = judge(video, [samples[row].held_out_reference for _, row in batch]) if judge else None
        with timer("decode"):
            grad_x0 = decode.decode_vjp(pipe.vae, trajectory.x0, grad_video, decoded)
        with timer("replay"):
            kl = reward_flow.replay(
                velocity, trajectory, sigmas, active, grad_x0, coupling,
                reference=velocity.reference, kl_weight=cfg.reward.kl_weight / per_process,
                kl_gradient=cfg.reward.kl_gradient, backward=backward,
                micro_batch=lambda: accelerator.accumulate(policy),
            )  # fmt: skip
        logged = {"score": out.score.detach(), "valid": out.valid.float(), "kl": kl} | out.parts
        return logged | ({"held_out": judged.parts["face_score"]} if judged else {})

    # ---------------------------------------------------------------------------------- Go!
    quiet = not accelerator.is_local_main_process
    progress = tqdm(range(first_step, steps), initial=first_step, total=steps, disable=quiet)
    for step in progress:
        timer = Timer()
        with timer("step"):
            logged = [micro_step(step, micro, timer) for micro in range(accumulation)]
            logged = accelerator.gather({name: torch.cat([part[name] for part in logged]) for name in logged[0]})
            with timer("optimizer"):
                norm = float(accelerator.clip_grad_norm_(parameters, cfg.train.max_grad_norm))
                rate = scheduler.get_last_lr()[0]
                if math.isfinite(norm):
                    optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        metrics = summary(cfg, logged) | {
            "grad_norm": norm,
            "lr": rate,
            "memory/peak_gb": peak_memory_gb(device),
        }
        metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
        progress.set_postfix(loss=f"{metrics['actor/loss']:.3f}", score=f"{metrics['actor/face_score']:.3f}")

        skipped_in_a_row = 0 if math.isfinite(norm) else skipped_in_a_row + 1
        done = step + 1
        if accelerator.is_main_process:
            metrics_file.append(done, metrics)
            history.append(metrics)
            if skipped_in_a_row:
                say(f"step {done}: gradient norm {norm}, update skipped ({skipped_in_a_row} in a row)")
            if done % cfg.run.logging_steps == 0:
                accelerator.log(metrics, step=done)
                for warning in alarms(cfg, history):
                    tqdm.write(f"step {done}: {warning}")
        if skipped_in_a_row > cfg.train.max_nonfinite:
            raise SystemExit(f"stopped at step {done}: {skipped_in_a_row} updates in a row had a non-finite gradient")
        if done % cfg.run.save_steps == 0 or done == steps:
            if accelerator.is_main_process:
                state = {
                    "step": done, "skipped_in_a_row": skipped_in_a_row, "samples": len(samples),
                    "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                }  # fmt: skip
                checkpoint.save_checkpoint(
                    cfg.run.output_dir, done, lambda folder: save_adapters(trained, folder), state
                )
                save_videos(cfg, rows, samples, pipe, model, conditioning, sigmas, done)
            accelerator.wait_for_everyone()
    accelerator.end_training()
    say(f"done: {cfg.run.output_dir}/checkpoints/latest")
    return 0


# --------------------------------------------------------------------------------------------------------------------


def plan(cfg, sigmas, boundary, active, coupling, num_rows, global_batch, steps, accelerator) -> str:
    """The resolved configuration, the batch arithmetic and the sigma table, for people."""
    train = cfg.train
    lines = [
        configuration.dump(cfg).rstrip(),
        "",
        f"batch: {train.per_device_train_batch_size} per process x {train.gradient_accumulation_steps} accumulation x "
        f"{accelerator.num_processes} processes = {global_batch} clips per step ({accelerator.distributed_type.value})",
        f"steps: {steps} = {steps * global_batch} samples = {steps * global_batch / num_rows:.2f} x {num_rows} rows",
        f"gradient: {cfg.sample.gradient_mode}, coupling {coupling:g}, "
        f"KL weight {cfg.reward.kl_weight:g} ({cfg.reward.kl_gradient})",
        "",
        "step   sigma   timestep  expert      gradient",
    ]
    for i, sigma in enumerate(sigmas[:-1].tolist()):
        expert = wan.expert_at(sigma, boundary)
        lines.append(f"{i:4d}  {sigma:6.4f}  {1000 * sigma:9.3f}  {expert:10s}  {'replayed' if i in active else '-'}")
    return "\n".join(lines)


def face_reward(cfg: RunConfig, pack: str) -> rewards.Reward:
    settings = {"cap": cfg.reward.cap, "det_size": cfg.reward.det_size, "chunk": cfg.reward.recogniser_chunk}
    return rewards.build(cfg.reward.name, {"pack_dir": pack} | settings)


def load_samples(cfg, rows, reward, judge, device) -> tuple[list[Sample], list[str]]:
    """The usable samples and a line about each row whose clip shows no face; DataError unless skip_bad_rows."""
    samples, faceless = [], []
    for row in rows:
        example = data.load_example(row, cfg.data.height, cfg.data.width, cfg.data.num_frames)
        video = example.video.to(device)
        reference = reward.reference(video)
        if reference is None:
            faceless.append(f"line {row.line}: no face was found in {row.video}")
            continue
        held_out = judge.reference(video) if judge else None
        samples.append(Sample(row.id, row.prompt, example.image, reference, held_out))
    if faceless and not cfg.data.skip_bad_rows:
        listing = "\n".join(faceless)
        raise data.DataError(
            f"data.file_name: {len(faceless)} of {len(rows)} clips show no face that reward.reward_model_path can "
            f"find; remove them or set data.skip_bad_rows: true\n{listing}"
        )
    if not samples:
        raise data.DataError("\n".join(["data.file_name: no clip shows a face", *faceless]))
    return samples, faceless


def learning_rate_factor(cfg: RunConfig, steps: int):
    """step (from 0) -> factor on the learning rate: linear warmup, then constant or a cosine down to 0."""
    warmup, cosine = cfg.train.warmup_steps, cfg.train.lr_scheduler_type == "cosine"

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if cosine else 1.0

    return factor


def summary(cfg: RunConfig, logged: dict[str, Tensor]) -> dict[str, float]:
    """Metrics of a step from what was logged of each sample; means are over valid samples."""
    valid = logged["valid"].bool()

    def mean(name: str) -> float:
        return float(logged[name][valid].nanmean())  # nan where no sample is valid

    normalised = (logged["score"] - cfg.reward.reward_mean) / cfg.reward.reward_std
    loss = (
        -cfg.reward.reward_weight * (normalised * logged["valid"]).mean() + cfg.reward.kl_weight * logged["kl"].mean()
    )
    metrics = {
        "actor/loss": float(loss),
        "actor/face_score": mean("face_score"),
        "actor/kl_loss": float(logged["kl"].mean()),
        "reward/mean": mean("score"),
        "reward/cap": mean("cap"),
        "reward/coverage": mean("coverage"),
        "reward/motion": mean("motion"),
        "reward/motion_speed": mean("motion_speed"),
        "reward/motion_nonrigid": mean("motion_nonrigid"),
        "reward/valid_fraction": float(logged["valid"].mean()),
    }
    return metrics | ({"reward/held_out": mean("held_out")} if "held_out" in logged else {})


def alarms(cfg: RunConfig, history: list[dict[str, float]], window: int = 10) -> Iterator[str]:
    """Warnings about the last `window` steps: the faces freeze, or the reward's gain is not seen by the judge."""
    if len(history) < 2 * window or len(history) % window:
        return

    def mean(key: str, steps: list[dict[str, float]]) -> float:
        values = [step[key] for step in steps if step.get(key) is not None and math.isfinite(step[key])]
        return sum(values) / len(values) if values else math.nan

    first, last = history[:window], history[-window:]
    motion = mean("reward/motion", last)
    if motion < cfg.reward.motion_alarm:
        yield f"motion is {motion:.2f} of the real clips', below reward.motion_alarm {cfg.reward.motion_alarm:g}"
    gain = mean("actor/face_score", last) - mean("actor/face_score", first)
    judged = mean("reward/held_out", last) - mean("reward/held_out", first)
    if gain > 0.05 and judged < 0.5 * gain:
        yield f"the face score gained {gain:.3f} but the held-out judge saw {judged:.3f}: the reward may be hacked"


def save_adapters(trained: dict[str, torch.nn.Module], folder: Path) -> None:
    for name, expert in trained.items():
        lora.save_adapter(expert, folder / wan.PARTS[name])


@torch.no_grad()
def save_videos(cfg, rows, samples, pipe, model, conditioning, sigmas, step: int) -> None:
    """samples/step-*/<row>.mp4: the real clip beside the generated one, always from the same noise (of epoch -1)."""
    folder = Path(cfg.run.output_dir) / "samples" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    shape = wan.latent_shape(pipe, cfg.data.height, cfg.data.width, cfg.data.num_frames)
    by_id = {row.id: row for row in rows}
    for i, sample in enumerate(samples[: cfg.run.sample_videos]):
        real = data.load_example(by_id[sample.id], cfg.data.height, cfg.data.width, cfg.data.num_frames).video
        noise = data.noise(shape, data.noise_seed(cfg.run.seed, -1, sample.id), pipe.vae.device)
        x0 = reward_flow.rollout(wan.Velocity(model, conditioning(i)), noise, sigmas, keep=()).x0
        pair = torch.cat([real, decode.decode(pipe.vae, x0)[0].float().cpu()], -1)
        data.write_video(folder / f"{i:02d}.mp4", pair, fps=data.frame_rate(by_id[sample.id].video))


class Timer:
    """Seconds by name: `with timer("decode"): ...` adds up."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def peak_memory_gb(device: torch.device) -> float:
    """Peak of the device's allocator, or of the process's memory on the CPU, in 1e9 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def total_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def flat(sections: dict[str, dict]) -> dict[str, object]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


if __name__ == "__main__":
    sys.exit(main())
