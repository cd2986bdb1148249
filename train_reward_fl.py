"""Reward feedback learning for Wan2.2 image-to-video: train a LoRA by back-propagating a reward through the sampler.

One update, for every sample of the batch:

    1. roll out noise -> latents without a graph, keeping the latents before the active steps    (reward_flow.rollout)
    2. decode, score, and take the reward's gradient with respect to the frames alone    (rewards, autograd)
    3. pull it back through the VAE, chunk by chunk: dR/dx0    (decode.decode_vjp)
    4. replay the active steps from last to first, one graph at a time; LoRA gradients add up    (reward_flow.replay)

    accelerate launch train_reward_fl.py --config configs/tiny_face.yaml [--dry-run] [section.key=value ...]
"""

import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object as gather_lists
from torch import Tensor
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, groups, lora, reward_flow
from rewardfl.backbones import seam
from rewardfl.backbones.seam import Conditioning, Velocity
from rewardfl.backbones.wan import load as wan_load
from rewardfl.config import RewardFlConfig
from rewardfl.data.cache import Cache
from rewardfl.optim import learning_rate_factor
from rewardfl.rewards import RewardError, build_terms
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.terms import Judged, Term, check_trainable, score, total
from rewardfl.run import checkpoint, checks, invariants, prepare, work
from rewardfl.run import job as distributed
from rewardfl.run import start as setup
from rewardfl.run.monitor import Timer, alarms, peak_memory_gb, recent_mean, suspects, total_memory
from rewardfl.run.signals import Interruption
from rewardfl.run.trackers import open_tracker


def main() -> int:
    args = setup.command_line(__doc__)
    try:
        with Interruption() as interruption, checkpoint.RunFolder() as run_folder:
            cfg = configuration.load(args.config, args.overrides, RewardFlConfig)
            return train(cfg, args.dry_run, interruption, run_folder)
    except setup.REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except invariants.InvariantError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def train(cfg: RewardFlConfig, dry_run: bool, interruption: Interruption, run_folder: checkpoint.RunFolder) -> int:
    """Train; the process's exit code: 2 for a dry run that does not fit the GPU that is there, 128 + a signal's."""
    # ---------------------------------------------------------------------------------- what will be done, checked
    backbone = setup.open_model(cfg)  # headers alone: what does not fit is refused before anything loads
    schedule = work.schedule_of(cfg, backbone.boundary)
    sigmas = schedule.sigmas
    active, coupling = configuration.active_steps(cfg), configuration.resolved_coupling(cfg)
    checks.check_active_experts(active, schedule.experts, configuration.trainable_experts(cfg), coupling)
    accumulation = cfg.train.gradient_accumulation_steps
    # each replayed step is a micro-batch, and the last one of an update synchronises
    accelerator = distributed.make_accelerator(cfg, accumulation * len(active))
    device = accelerator.device
    if device.type == "cpu":
        torch.set_num_threads(cfg.run.cpu_threads or max(1, os.cpu_count() // accelerator.num_processes))
    global_batch = checks.check_batch(cfg, accelerator.num_processes)
    share = prepare.Share(accelerator.process_index, accelerator.num_processes, not accelerator.is_main_process)
    rows, said = setup.look_at_rows(cfg, data.load_metadata(cfg.data.file_name), share, gather_lists)
    steps = work.total_steps(cfg, len(rows), accelerator.num_processes)
    say = accelerator.print
    for line in [
        *(f"note: {note}" for note in wan_load.differences(backbone.files, backbone.boundary, cfg.sample.shift)),
        *said,
    ]:
        say(line)
    say(configuration.dump(cfg))
    say(work.overview(cfg, schedule, len(rows), steps, accelerator.num_processes))
    if dry_run:
        from rewardfl.estimate.report import estimate  # training must not need what it measures with

        sharding = distributed.sharding(accelerator)
        asked = work.work_of(cfg, backbone.files.configs, len(rows), steps, accelerator.num_processes, sharding)
        text, fits = estimate(asked, total_memory(device))
        say(text)
        return 0 if fits else 2
    weights = setup.base_model(cfg, backbone.files)
    opened = setup.open_run(cfg, run_folder, accelerator, weights)

    # ---------------------------------------------------------------------------------- clips and rewards
    store = Cache(cfg.data.cache_dir or f"{cfg.run.output_dir}/cache")
    terms = build_terms(configuration.wanted_rewards(cfg), device)
    check_trainable(terms)
    samples, problems = setup.find_samples(cfg, rows, terms, store, device, share, gather_lists)
    for problem in problems:
        say(f"skipped: {problem}")
    several_sizes = len({sample.size for sample in samples}) > 1
    one_shape_batch = cfg.train.per_device_train_batch_size if several_sizes else None
    hashes, described = setup.check_face_packs(cfg, terms, samples, device, share, gather_lists)
    for line in described:
        say(line)
    steps = work.total_steps(cfg, len(samples), accelerator.num_processes)
    init = setup.init_adapters(cfg, backbone.files)
    content = setup.content_of(samples, (), hashes, init)
    state, changes = setup.load_state(cfg, opened, content, global_batch, one_shape_batch)

    # ---------------------------------------------------------------------------------- what the cache lacks
    conditions = setup.conditions_of(cfg, backbone, weights, store)
    conditions.fill(samples, device, share)
    cached = cfg.experts.untrained == "boundary_cache"
    start = schedule.experts.count("high_noise") if cached else 0
    if cached:
        noises = noise_seeds(cfg, samples)
        conditions.fill_boundary(noises, schedule, device, share)
    accelerator.wait_for_everyone()

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    decoder = backbone.load_decoder(device)
    away = ["high_noise"] if cached else []
    model, trained = setup.load_experts(cfg, backbone, device, distributed.home(accelerator), skip=away)
    if opened.path is None:
        setup.start_adapters(trained, init)
    else:
        setup.load_adapters(trained, opened.path)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=cfg.train.learning_rate, weight_decay=cfg.train.weight_decay,
    )  # fmt: skip
    # a plain scheduler: accelerate's steps once per process
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, learning_rate_factor(cfg.train.lr_scheduler_type, cfg.train.warmup_steps, steps)
    )
    invariants.check_loaded(accelerator, model)
    policy, optimizer, parameters = distributed.prepare(accelerator, model, optimizer)
    weights_watched = invariants.Weights(accelerator, model)

    # ---------------------------------------------------------------------------------- where an earlier run stopped
    metrics_file = checkpoint.MetricsFile(Path(cfg.run.output_dir) / "metrics.jsonl")
    first_step, skipped_in_a_row, history = 0, 0, []
    if opened.path is not None:
        distributed.load_optimizer_state(accelerator, optimizer, parameters, state["optimizer"])
        setup.load_schedule(scheduler, state["scheduler"], cfg.train)
        first_step, skipped_in_a_row = state["step"], state["skipped_in_a_row"]
        say(f"resuming from {opened.path} at step {first_step}")
    del state  # what it holds of weights and moments is theirs now
    for note in setup.notes_on_changes(cfg.run.resume_with_changes, changes):
        say(note)
    begin = partial(setup.begin_run, cfg, run_folder, metrics_file, first_step, weights, content, changes)
    distributed.by_main(accelerator, begin, checkpoint.CheckpointError)
    if accelerator.is_main_process:
        history = metrics_file.read()
    shown_by = cfg.run.log_with if accelerator.is_main_process else "none"
    tracker = open_tracker(shown_by, cfg.run.output_dir, configuration.flat(cfg), first_step)

    # ---------------------------------------------------------------------------------- the pieces of a step
    per_process = accumulation * cfg.train.per_device_train_batch_size  # DDP averages over the processes

    def inputs(epoch: int, row: int) -> tuple[Conditioning, Tensor]:
        """All that is read of a sample: its conditioning and the latents that the rollout starts from.

        It starts from noise, or from what the high-noise expert makes of it. Epoch -1 is that of the sample videos.
        """
        sample, name = samples[row], samples[row].row.id
        conditioning = seam.to(conditions.conditioning(sample), device)
        seed = noise_seed(cfg, name, epoch)
        if start:
            return conditioning, conditions.boundary_latents(sample, seed, schedule).to(device)
        return conditioning, groups.noise((1, *backbone.latent_shape(*sample.size, cfg.data.num_frames)), seed, device)

    def read(epoch: int, row: int) -> tuple[int, tuple[Conditioning, Tensor]]:
        """(row, inputs), of another row where the cache lost this one's and data.skip_bad_rows."""
        return prepare.readable(samples, row, partial(inputs, epoch), cfg.data.skip_bad_rows, tqdm.write)

    def micro_step(step: int, micro: int, timer: Timer) -> tuple[dict[str, Tensor], list[Judged]]:
        """Add the gradients of one micro-batch; what is logged of its samples, (B,) tensors, and of their rewards."""
        batch = data.micro_batch(
            step, micro, accelerator.process_index, batch_size=cfg.train.per_device_train_batch_size,
            accumulation=accumulation, processes=accelerator.num_processes, num_rows=len(samples), seed=cfg.run.seed,
            shapes=[sample.size for sample in samples],  # one forward pass takes clips of one size
        )  # fmt: skip
        with timer("encode"):
            rows, found = zip(*(read(epoch, row) for epoch, row in batch), strict=True)
            conditionings, latents = zip(*found, strict=True)
            velocity = Velocity(backbone, policy, backbone.collate(conditionings), schedule)
            x = torch.cat(latents)
        with timer("rollout"):
            trajectory = reward_flow.rollout(velocity, x, sigmas, active, start)
        with timer("decode"):
            decoded = decoder.decode_with_caches(trajectory.x0, cfg.train.decode_caches)
        with timer("reward"):
            video = decoded.video.float().requires_grad_()  # (B, 3, F, H, W) in [-1, 1]
            judged = score(terms, video, [samples[row].references for row in rows])
            gained = total(terms, judged)  # (B,)
            (grad_video,) = torch.autograd.grad(-gained.sum() / per_process, video)
        with timer("decode"):
            grad_x0 = decoder.vjp(trajectory.x0, grad_video, decoded)
        del decoded, video, grad_video  # up to 38 GB that replay has no use for
        with timer("replay"):
            kl = reward_flow.replay(
                velocity, trajectory, sigmas, active, grad_x0, coupling,
                reference=velocity.reference, kl_weight=cfg.reward.kl_weight / per_process,
                kl_gradient=cfg.reward.kl_gradient, backward=partial(distributed.backward, accelerator),
                micro_batch=partial(accelerator.accumulate, policy),
            )  # fmt: skip
        finite = (trajectory.x0 + grad_x0).flatten(1).isfinite().all(1) & kl.isfinite()
        signal = grad_x0.flatten(1).any(1) | (kl > 0)  # what the sample has to teach
        replaced = [row != wanted for row, (_, wanted) in zip(rows, batch, strict=True)]
        logged = {"valid": judged[0].output.valid.float(), "total": gained.detach(), "kl": kl.detach()}
        logged |= {"finite": finite, "signal": signal, "replaced": torch.tensor(replaced, device=device)}
        logged |= {"row": torch.tensor(rows, device=device)}
        return logged, [one.at_rest() for one in judged]

    def largest(number: int) -> int:
        return int(accelerator.gather(torch.tensor([number], device=device)).max())

    def generate(row: int) -> tuple[int, Tensor]:
        """(row, its video (3, F, H, W)) as the weights are now, always from the same noise."""
        row, (conditioning, x) = read(-1, row)
        x0 = reward_flow.rollout(Velocity(backbone, model, conditioning, schedule), x, sigmas, keep=(), start=start).x0
        return row, decoder.decode(x0)[0]

    def save(done: int) -> None:
        """A checkpoint and sample videos. On all processes, which may hold parts of the weights and moments."""
        state = {
            "step": done, "skipped_in_a_row": skipped_in_a_row, "content": content,
            "global_batch": global_batch, "one_shape_batch": one_shape_batch, "scheduler": scheduler.state_dict(),
            "optimizer": distributed.optimizer_state(accelerator, optimizer, parameters),
        }  # fmt: skip
        adapters = {name: lora.adapter_state(expert) for name, expert in trained.items()}
        # judged by the steps since the last save that the configuration asks for, so that a resumed run finds the same
        since = (done - 1) // cfg.run.save_steps * cfg.run.save_steps
        judged = recent_mean(history, since, ["reward/held_out", "reward/mean"])
        if accelerator.is_main_process:
            with checkpoint.tolerant(say, done, last=done == steps or interruption.number != 0):
                run_folder.keep()
                checkpoint.save_checkpoint(
                    cfg.run.output_dir, done, partial(setup.save_adapters, trained, adapters), state, judged,
                    cfg.run.keep_last,
                )  # fmt: skip
        if interruption.number:  # who sent a signal may not wait for videos
            return
        folder = setup.sample_videos(cfg, samples, generate, share, done)
        accelerator.wait_for_everyone()
        tracker.videos(done, folder)

    floor = {}
    if cfg.reward.kl_weight != 0 and cfg.model.dtype == "bfloat16":
        _, (conditioning, x) = read(0, 0)
        reference = Velocity(backbone, policy, conditioning, schedule).reference
        floor = {"actor/kl_floor": reward_flow.kl_floor(reference, x, sigmas, active, start)}
        say(f"note: in bfloat16 this model's KL reads about {floor['actor/kl_floor']:.1e} from rounding alone")

    # ---------------------------------------------------------------------------------- Go!
    interruption.listen()
    quiet = not accelerator.is_local_main_process
    told: set[str] = set()  # of rewards that failed: once per cause
    progress = tqdm(range(first_step, steps), initial=first_step, total=steps, disable=quiet)
    for step in progress:
        setup.seed_generators(cfg.run.seed, step, accelerator.process_index)
        timer = Timer()
        with timer("step"):
            with distributed.one_update(accelerator):
                logged, judged = zip(*(micro_step(step, micro, timer) for micro in range(accumulation)), strict=True)
            logged = accelerator.gather({name: torch.cat([part[name] for part in logged]) for name in logged[0]})
            judged = gather_lists(list(judged))  # objects: rewards name their parts as they like
            metrics = summary(cfg, terms, logged, judged)
            with timer("optimizer"):
                rate = scheduler.get_last_lr()[0]
                norm = distributed.step(accelerator, optimizer, parameters, cfg.train.max_grad_norm)
                scheduler.step()
        seen = [samples[row].row.id for row in logged.pop("row").tolist()]
        finite = logged.pop("finite").tolist()
        done = step + 1
        metrics |= {"train/no_signal": invariants.no_signal(done, norm, logged["signal"])}
        due = interruption.agreed(largest) or done % cfg.run.save_steps == 0 or done == steps
        if step == first_step or due:
            with timer("invariants"):
                weights_watched.check(done)
        metrics |= {"grad_norm": norm, "lr": rate, "memory/peak_gb": peak_memory_gb(device)} | floor
        metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
        progress.set_postfix(loss=f"{metrics['actor/loss']:.3f}", score=f"{metrics['reward/mean']:.3f}")

        why = "" if reward_metrics.any_judged(terms, judged) else reward_metrics.why_nothing_was_judged(terms, judged)
        skipped_in_a_row = 0 if math.isfinite(norm) and not why else skipped_in_a_row + 1
        if accelerator.is_main_process:
            history.append({"step": done} | metrics)
            with checkpoint.tolerant(say, done, last=done == steps):
                run_folder.keep()
                metrics_file.append(done, metrics)
            if not math.isfinite(norm):
                say(f"step {done}: gradient norm {norm}, update skipped ({skipped_in_a_row} in a row); it became so "
                    f"{suspects(seen, finite)}")  # fmt: skip
            if why:
                say(f"step {done}: not one sample could be judged ({skipped_in_a_row} in a row); {why}")
            new = [problem for problem in reward_metrics.problems(terms, judged) if problem not in told]
            for problem in new:
                say(f"step {done}: {problem}; it is only measured, so the run goes on (reward/failed counts)")
            told.update(new)
            if done % cfg.run.logging_steps == 0:
                tracker.log(done, metrics)
            for warning in alarms(history, cfg.reward.motion_alarm):
                tqdm.write(f"step {done}: {warning}")
        if why and skipped_in_a_row > cfg.train.max_nonfinite:
            raise RewardError(f"stopped at step {done}: {skipped_in_a_row} updates in a row taught nothing; {why}")
        if skipped_in_a_row > cfg.train.max_nonfinite:
            raise SystemExit(f"stopped at step {done}: {skipped_in_a_row} updates in a row had a non-finite gradient")
        if due:
            save(done)
            accelerator.wait_for_everyone()
        if interruption.number:
            break
    tracker.close()
    accelerator.end_training()
    if interruption.number:
        say(f"{interruption.name}: stopped after step {done}; the same command goes on from there")
        return interruption.exit_code
    say(f"done: {cfg.run.output_dir}/checkpoints/latest")
    return 0


# --------------------------------------------------------------------------------------------------------------------


def noise_seed(cfg: RewardFlConfig, sample_id: str, epoch: int) -> int:
    """The seed of the noise that a sample is trained on in an epoch; epoch -1 is that of its sample videos."""
    if epoch < 0:
        return groups.noise_seed(cfg.run.seed, epoch, sample_id)
    return groups.training_noise_seed(cfg.run.seed, epoch, sample_id, cfg.sample.noises_per_sample)


def noise_seeds(cfg: RewardFlConfig, samples: list[prepare.Sample]) -> list[tuple[prepare.Sample, int]]:
    """Every sample with each of the noises it is trained on, and the first ones with that of their sample videos."""
    epochs = range(cfg.sample.noises_per_sample)
    trained = [(sample, noise_seed(cfg, sample.row.id, epoch)) for sample in samples for epoch in epochs]
    return trained + [(sample, noise_seed(cfg, sample.row.id, -1)) for sample in samples[: cfg.run.sample_videos]]


def summary(
    cfg: RewardFlConfig, terms: list[Term], logged: dict[str, Tensor], judged: list[list[Judged]]
) -> dict[str, float]:
    """Metrics of a step from what was logged of each sample, and what its rewards said, by micro-batch and term."""
    own = {
        "actor/loss": float(cfg.reward.kl_weight * logged["kl"].mean() - logged["total"].mean()),
        "actor/kl_loss": float(logged["kl"].mean()),
        "reward/valid_fraction": float(logged["valid"].mean()),
        "reward/failed": reward_metrics.failed_fraction(judged),
        "data/replaced": float(logged["replaced"].sum()),
    }
    return own | reward_metrics.means(terms, judged, "reward", own, score="mean")


if __name__ == "__main__":
    sys.exit(main())
