"""Flow-GRPO and DanceGRPO for Wan2.2 image-to-video: train a LoRA by policy gradient, with any reward.

One epoch:

    1. roll out `group_size` videos of each of `groups` clips; the steps of the window are stochastic    (sde.rollout)
    2. decode and judge them; no gradient is asked of a reward, and slow ones go on meanwhile    (rewards.blackbox)
    3. advantage = how much better than its group a video is, over all processes    (grpo.advantages)
    4. score the window's steps again, with a graph, and update    (sde.score, grpo.policy_loss)

    accelerate launch train_flow_grpo.py --config configs/tiny_flow_grpo.yaml [--dry-run] [section.key=value ...]
"""

import itertools
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object as gather_lists
from diffusers.training_utils import EMAModel
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, groups, grpo, lora, reward_flow, sde, sharding
from rewardfl.backbones import seam
from rewardfl.backbones.seam import Backbone, Conditioning, Velocity
from rewardfl.backbones.wan import load as wan_load
from rewardfl.config import FlowGrpoConfig
from rewardfl.data.cache import Cache
from rewardfl.optim import averaged, learning_rate_factor
from rewardfl.rewards import RewardError, blackbox, build_terms
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.run import checkpoint, invariants, prepare, work
from rewardfl.run import job as distributed
from rewardfl.run import start as setup
from rewardfl.run.monitor import Timer, alarms, peak_memory_gb, suspects, total_memory
from rewardfl.run.signals import Interruption
from rewardfl.run.trackers import open_tracker


def main() -> int:
    args = setup.command_line(__doc__)
    try:
        with Interruption() as interruption, checkpoint.RunFolder() as run_folder:
            cfg = configuration.load(args.config, args.overrides, FlowGrpoConfig)
            return train(cfg, args.dry_run, interruption, run_folder)
    except (*setup.REFUSALS, grpo.RatioError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except invariants.InvariantError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def train(cfg: FlowGrpoConfig, dry_run: bool, interruption: Interruption, run_folder: checkpoint.RunFolder) -> int:
    """Train; the process's exit code: 2 for a dry run that does not fit the GPU that is there, 128 + a signal's."""
    # ---------------------------------------------------------------------------------- what will be done, checked
    backbone = setup.open_model(cfg)  # headers alone: what does not fit is refused before anything loads
    schedule = work.schedule_of(cfg, backbone.boundary)
    sigmas = schedule.sigmas
    eval_steps = cfg.evaluation.eval_inference_steps or cfg.sample.num_inference_steps
    eval_schedule = backbone.schedule(eval_steps, cfg.sample.shift)
    windows = work.windows_of(cfg, schedule.experts)
    window_size = len(groups.window(windows, 0, cfg.run.seed))  # of every epoch
    tolerance = grpo.ratio_tolerance(cfg.grpo.ratio_tolerance, cfg.model.dtype, cfg.grpo.clip_range)
    kernel = sde.Kernel(cfg.grpo.sde, cfg.grpo.noise_level, sigmas)
    accelerator = distributed.make_accelerator(cfg, 1)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    geometry = work.geometry_of(cfg, world)
    per_update, per_epoch = geometry.forwards_per_update, work.updates_of_epoch(cfg)
    # accelerate counts backwards: every scored step is a micro-batch, and the last one of an update synchronises
    accelerator.gradient_accumulation_steps = per_update * window_size
    if device.type == "cpu":
        torch.set_num_threads(cfg.run.cpu_threads or max(1, os.cpu_count() // world))
    share = prepare.Share(rank, world, not accelerator.is_main_process)
    rows, said = setup.look_at_rows(cfg, data.load_metadata(cfg.data.file_name), share, gather_lists)
    eval_rows = []
    if cfg.evaluation.eval_clips:
        found = data.load_metadata(cfg.evaluation.eval_clips, "evaluation.eval_clips")
        eval_rows, more_said = setup.look_at_rows(cfg, found, share, gather_lists)
        said += more_said
    steps = work.total_steps(cfg, len(rows), world)
    say = accelerator.print
    for line in [
        *(f"note: {note}" for note in wan_load.differences(backbone.files, backbone.boundary, cfg.sample.shift)),
        *said,
    ]:
        say(line)
    say(configuration.dump(cfg))
    say(work.overview(cfg, schedule, len(rows), steps, world))
    if dry_run:
        from rewardfl.estimate.report import estimate  # training must not need what it measures with

        asked = work.work_of(cfg, backbone.files.configs, len(rows), steps, world, distributed.sharding(accelerator))
        text, fits = estimate(asked, total_memory(device))
        say(text)
        return 0 if fits else 2
    weights = setup.base_model(cfg, backbone.files)
    opened = setup.open_run(cfg, run_folder, accelerator, weights)

    # ---------------------------------------------------------------------------------- clips and rewards
    store = Cache(cfg.data.cache_dir or f"{cfg.run.output_dir}/cache")
    terms = build_terms(configuration.wanted_rewards(cfg), device)
    places = blackbox.places(terms, cfg.reward.reward_timeout)
    part_weights = {"coverage": cfg.reward.coverage_weight, "motion": cfg.reward.motion_weight}
    part_weights = {name: weight for name, weight in part_weights.items() if weight > 0}
    find = partial(setup.find_samples, cfg, terms=terms, store=store, device=device, share=share, gather=gather_lists)
    samples, problems = find(rows)
    held_out, more_problems = find(eval_rows) if eval_rows else ([], [])
    for problem in problems + more_problems:
        say(f"skipped: {problem}")
    if len({sample.size for sample in samples}) > 1 and cfg.grpo.group_size % cfg.train.per_device_train_batch_size:
        raise configuration.ConfigError(
            "train.per_device_train_batch_size must divide grpo.group_size where clips differ in size: one forward "
            "pass takes videos of one size"
        )
    hashes, described = setup.check_face_packs(cfg, terms, samples, device, share, gather_lists)
    for line in described:
        say(line)
    steps = work.total_steps(cfg, len(samples), world)
    init = setup.init_adapters(cfg, backbone.files)
    content = setup.content_of(samples, held_out, hashes, init)
    state, changes = setup.load_state(cfg, opened, content)

    # ---------------------------------------------------------------------------------- what the cache lacks
    conditions = setup.conditions_of(cfg, backbone, weights, store)
    guidance, negative = cfg.sample.guidance_scale, None
    away = [cfg.sample.negative_prompt] if guidance != 1 else []
    conditions.fill([*samples, *held_out], device, share, away)
    accelerator.wait_for_everyone()
    if away:
        negative = seam.to(conditions.text_of(cfg.sample.negative_prompt), device)

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    decoder = backbone.load_decoder(device)
    model, trained = setup.load_experts(cfg, backbone, device, distributed.home(accelerator))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if opened.path is None:
        setup.start_adapters(trained, init)
    else:
        for parameter, value in zip(parameters, state["parameters"], strict=True):
            parameter.data.copy_(value)
    optimizer = torch.optim.AdamW(parameters, lr=cfg.train.learning_rate, weight_decay=cfg.train.weight_decay)
    # a plain scheduler: accelerate's steps once per process
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, learning_rate_factor(cfg.train.lr_scheduler_type, cfg.train.warmup_steps, steps)
    )
    invariants.check_loaded(accelerator, model)
    policy, optimizer, parameters = distributed.prepare(accelerator, model, optimizer)
    weights_watched = invariants.Weights(accelerator, model)
    average = EMAModel(parameters, decay=cfg.grpo.ema_decay)

    # ---------------------------------------------------------------------------------- who rolls out what
    plan_of = partial(
        groups.plan, geometry=geometry, sample_ids=[sample.row.id for sample in samples], seed=cfg.run.seed
    )
    sampler = groups.DistributedGroupSampler(partial(plan_of, rank=rank))
    loaded = Rows(samples, conditions, cfg.data.skip_bad_rows)
    batches = DataLoader(loaded, batch_sampler=sampler, collate_fn=partial(together, backbone))
    groups.check_loader(batches, sampler)  # never prepared: the plan is this process's own

    # ---------------------------------------------------------------------------------- where an earlier run stopped
    metrics_file = checkpoint.MetricsFile(Path(cfg.run.output_dir) / "metrics.jsonl")
    first_step, skipped_in_a_row, history = 0, 0, []
    if opened.path is not None:
        distributed.load_optimizer_state(accelerator, optimizer, parameters, state["optimizer"])
        setup.load_schedule(scheduler, state["scheduler"], cfg.train)
        average.load_state_dict(state["average"])
        average.shadow_params = list(map(sharding.placed, average.shadow_params, parameters))
        first_step, skipped_in_a_row = state["step"], state["skipped_in_a_row"]
        say(f"resuming from {opened.path} at step {first_step}")
    del state  # what it holds of weights and moments is theirs now
    for note in setup.notes_on_changes(cfg.run.resume_with_changes, changes):
        say(note)
    last_line = -1 if opened.path is None else first_step
    begin = partial(setup.begin_run, cfg, run_folder, metrics_file, last_line, weights, content, changes)
    distributed.by_main(accelerator, begin, checkpoint.CheckpointError)
    if accelerator.is_main_process:
        history = metrics_file.read()
    shown_by = cfg.run.log_with if accelerator.is_main_process else "none"
    tracker = open_tracker(shown_by, cfg.run.output_dir, configuration.flat(cfg), first_step)

    # ---------------------------------------------------------------------------------- the pieces of an epoch
    def largest(number: int) -> int:
        return int(accelerator.gather(torch.tensor([number], device=device)).max())

    def shape_of(sample: prepare.Sample) -> tuple[int, ...]:
        """(1, C, T, h, w) of its latents."""
        return (1, *backbone.latent_shape(*sample.size, cfg.data.num_frames))

    def velocity_of(conditioning: Conditioning) -> Velocity:
        return Velocity(backbone, policy, conditioning, schedule, negative, guidance)

    def roll_out(epoch: int, window: tuple[int, ...], timer: Timer) -> tuple[list[Rollout], list[blackbox.Pending]]:
        """This process's videos of the epoch: what the replay needs of them, and the rewards, maybe still at work."""
        sampler.set_epoch(epoch)
        new = groups.new_starts([plan_of(epoch, rank=other) for other in range(world)])
        rollouts, judging, starts = [], [], {}
        for (members, conditioning, found), is_new in zip(batches, new, strict=True):
            if interruption.agreed(largest):  # nothing was updated since the last epoch: nothing is lost
                break
            conditioning = seam.to(conditioning, device)
            shape = shape_of(samples[members[0].row])
            with timer("rollout"):
                if is_new:  # up to the window, members that start from the same noise are one
                    first = list({member.start: i for i, member in enumerate(members)}.values())
                    x = torch.cat([groups.noise(shape, members[i].noise_seed, device) for i in first])
                    velocity = velocity_of(seam.rows(conditioning, first))
                    x = reward_flow.rollout(velocity, x, sigmas[: window[0] + 1], keep=()).x0
                    starts = {members[i].start: x[n : n + 1] for n, i in enumerate(first)}
                x0, kept = sde.rollout(
                    velocity_of(conditioning), torch.cat([starts[member.start] for member in members]),
                    kernel, window, partial(groups.step_noise, members, shape, device), start=window[0],
                    keep_means=cfg.grpo.objective == "guard",
                )  # fmt: skip
            with timer("decode"):
                video = decoder.decode(x0).float()  # (B, 3, F, H, W) in [-1, 1]
            with timer("reward"):
                references = [samples[member.row].references for member in members]
                judging.append(blackbox.begin(terms, video, references, places))
            place = device if cfg.grpo.samples_on == "gpu" else torch.device("cpu")
            steps_kept = {i: step.to(place) for i, step in kept.items()}
            rollouts.append(Rollout(members, seam.to(conditioning, place), found, steps_kept))
        return rollouts, judging

    def advantages_of(
        rollouts: list[Rollout], judging: list[blackbox.Pending], timer: Timer
    ) -> tuple[list[Tensor], dict[str, float], str]:
        """The advantages of each rollout's members, (B,), what is logged of all processes' rewards, and why not one
        sample of the epoch could be judged, "" where one was."""
        with timer("reward"):
            judged = [blackbox.finish(pending) for pending in judging]
        columns, valid, weights = zip(*(blackbox.weighed(terms, each, part_weights) for each in judged), strict=True)
        group_ids = torch.tensor([member.group_id for rollout in rollouts for member in rollout.members])
        found = torch.cat([rollout.found for rollout in rollouts])  # one that stands in for another is in no group
        parts = (torch.cat(columns), group_ids, torch.cat(valid) & found, ~found)
        everyones = accelerator.gather([part.to(device) for part in parts])
        rewards, group_ids, is_valid, replaced = (part.cpu() for part in everyones)
        values, logged = grpo.advantages(
            rewards, group_ids, group_size=cfg.grpo.group_size, std=cfg.grpo.advantage_std,
            combine=cfg.grpo.advantage_of, weights=weights[0], clip=cfg.grpo.advantage_clip, valid=is_valid,
        )  # fmt: skip
        judged = gather_lists(judged)
        for problem, count in reward_metrics.problems(terms, judged).items():
            say(f"{problem} ({count} samples)")
        logged |= {"reward/failed": reward_metrics.failed_fraction(judged), "data/replaced": float(replaced.sum())}
        logged |= reward_metrics.means(terms, judged, "reward", logged)
        why = "" if is_valid.any() else reward_metrics.why_nothing_was_judged(terms, judged)
        own = values[rank * len(found) : (rank + 1) * len(found)].to(device)
        return list(own.split(cfg.train.per_device_train_batch_size)), logged, why

    def score_again(rollout: Rollout, i: int, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of step i of a rollout, and (B,) tensors to log."""
        step, velocity = rollout.steps[i].to(device), velocity_of(seam.to(rollout.conditioning, device))
        reference_mean = None
        if cfg.grpo.kl_weight != 0:  # before the policy's forward: no graph is alive yet
            with torch.no_grad():
                reference_mean, _ = kernel.transition(velocity.reference, step.x, i)
        mean, log_prob = sde.score(velocity, step, i, kernel)
        loss, logged = grpo.policy_loss(
            cfg.grpo.objective, log_prob, step.log_prob, advantage, clip_low=cfg.grpo.clip_range,
            clip_high=cfg.grpo.clip_range_high or cfg.grpo.clip_range, mean=mean, old_mean=step.mean, std=step.std,
            dt=kernel.dt(i), normalised=cfg.grpo.sde != "cps", reference_mean=reference_mean,
            kl_weight=cfg.grpo.kl_weight,
        )  # fmt: skip
        rows = torch.tensor([member.row for member in rollout.members], device=device)
        return loss, logged | {"log_prob": log_prob.detach(), "old_log_prob": step.log_prob, "row": rows}

    def update(
        rollouts: list[Rollout], advantages: list[Tensor], window: tuple[int, ...], step: int, check: bool, timer: Timer
    ) -> dict[str, float]:
        """One optimizer update from a part of the epoch. check: nothing was updated since it was rolled out."""
        logged, losses = [], []
        with timer("replay"), distributed.one_update(accelerator):
            for rollout, advantage in zip(rollouts, advantages, strict=True):
                for i in window:
                    with accelerator.accumulate(policy):
                        loss, seen = score_again(rollout, i, advantage)
                        distributed.backward(accelerator, loss / accelerator.gradient_accumulation_steps)
                    losses.append(loss.detach())
                    logged.append(seen)
        everyones = accelerator.gather({name: torch.cat([seen[name] for seen in logged]) for name in logged[0]})
        if check:
            now, then = (
                everyones[name].view(-1, len(window), cfg.train.per_device_train_batch_size).transpose(0, 1).flatten(1)
                for name in ("log_prob", "old_log_prob")
            )
            grpo.check_ratio(now, then, tolerance, window)
        with timer("optimizer"):
            rate = scheduler.get_last_lr()[0]
            norm = distributed.step(accelerator, optimizer, parameters, cfg.train.max_grad_norm)
            if math.isfinite(norm):
                average.step(parameters)
            scheduler.step()
        taught = (everyones["advantage"] != 0) & ~everyones["clipped"] | (everyones["kl"] > 0)
        without = invariants.no_signal(step, norm, taught)
        ids = [samples[row].row.id for row in everyones.pop("row").tolist()]
        if not math.isfinite(norm):
            found = suspects(ids, everyones["log_prob"].isfinite().tolist())
            say(f"step {step}: gradient norm {norm}, update skipped; it became so {found}")
        loss = float(accelerator.gather(torch.stack(losses).mean()[None]).mean())
        logged = {"actor/loss": loss, "grad_norm": norm, "lr": rate, "train/no_signal": without}
        return logged | grpo.policy_statistics(everyones)

    def sample_clean(clips: list[prepare.Sample], row: int, n: int = 0) -> tuple[int, Tensor]:
        """(row, its video (3, F, H, W) by the ODE) of the weights as they are now; n: which of its noises."""
        row, conditioning = conditions.readable(clips, row, cfg.data.skip_bad_rows)
        seed = groups.noise_seed(cfg.run.seed, -1, clips[row].row.id, n)
        x = groups.noise(shape_of(clips[row]), seed, device)
        velocity = Velocity(backbone, model, seam.to(conditioning, device), eval_schedule, negative, guidance)
        x0 = reward_flow.rollout(velocity, x, eval_schedule.sigmas, keep=()).x0
        return row, decoder.decode(x0)[0].float()

    def evaluate() -> dict[str, float]:
        """eval/*: the held-out clips under every reward, each process judging its share."""
        wanted = itertools.product(range(len(held_out)), range(cfg.evaluation.eval_noises))
        with averaged(average, parameters), torch.no_grad():
            judged = []
            for (row, n), mine in share.rounds(wanted):
                row, video = sample_clean(held_out, row, n)
                if mine:
                    pending = blackbox.begin(terms, video[None], [held_out[row].references], places)
                    judged.append(blackbox.finish(pending))
        judged = gather_lists(judged)
        own = {"eval/failed": reward_metrics.failed_fraction(judged)}
        own |= reward_metrics.deviations(terms, judged, "eval")
        return own | reward_metrics.means(terms, judged, "eval", own)

    def save(step: int, judged: float | None) -> None:
        """A checkpoint of the averaged weights, with all that going on takes, and sample videos.

        On all processes, which may hold parts of the weights and of their moments.
        """
        state = {
            "step": step, "skipped_in_a_row": skipped_in_a_row, "content": content,
            "scheduler": scheduler.state_dict(),
            "parameters": sharding.gathered(parameters),  # not the averaged ones
            "average": average.state_dict() | {"shadow_params": sharding.gathered(average.shadow_params)},
            "optimizer": distributed.optimizer_state(accelerator, optimizer, parameters),
        }  # fmt: skip
        with averaged(average, parameters):
            adapters = {name: lora.adapter_state(expert) for name, expert in trained.items()}
            if accelerator.is_main_process:
                with checkpoint.tolerant(say, step, last=step == steps or interruption.number != 0):
                    run_folder.keep()
                    checkpoint.save_checkpoint(
                        cfg.run.output_dir, step, partial(setup.save_adapters, trained, adapters), state, judged,
                        cfg.run.keep_last,
                    )  # fmt: skip
            if interruption.number:  # who sent a signal may not wait for videos
                return
            shown = held_out or samples
            folder = setup.sample_videos(cfg, shown, partial(sample_clean, shown), share, step)
        accelerator.wait_for_everyone()
        tracker.videos(step, folder)

    def log(step: int, metrics: dict[str, float]) -> None:
        if not accelerator.is_main_process:
            return
        history.append({"step": step} | metrics)
        with checkpoint.tolerant(say, step, last=step == steps):
            run_folder.keep()
            metrics_file.append(step, metrics)
        if step % cfg.run.logging_steps == 0:
            tracker.log(step, metrics)
        for warning in alarms(history, cfg.reward.motion_alarm):
            tqdm.write(f"step {step}: {warning}")

    floor = {}
    if cfg.grpo.kl_weight != 0 and cfg.model.dtype == "bfloat16":
        row, conditioning = conditions.readable(samples, 0, cfg.data.skip_bad_rows)
        x = groups.noise(shape_of(samples[row]), groups.noise_seed(cfg.run.seed, 0, "floor"), device)
        reference = velocity_of(seam.to(conditioning, device)).reference
        floor = {"policy/kl_floor": sde.kl_floor(reference, x, kernel, groups.window(windows, 0, cfg.run.seed))}
        say(f"note: in bfloat16 this model's KL reads about {floor['policy/kl_floor']:.1e} from rounding alone")

    # ---------------------------------------------------------------------------------- Go!
    interruption.listen()
    quiet = not accelerator.is_local_main_process
    progress = tqdm(range(first_step, steps), initial=first_step, total=steps, disable=quiet)
    score = None
    if held_out and opened.path is None:
        log(0, evaluate())
    for epoch in range(first_step // per_epoch, steps // per_epoch):
        window, timer, done = groups.window(windows, epoch, cfg.run.seed), Timer(), epoch * per_epoch
        setup.seed_generators(cfg.run.seed, done, rank)
        with timer("step"):  # of an epoch's first update: with all that it takes to get there
            rollouts, judging = roll_out(epoch, window, timer)
            if interruption.number:
                break
            advantages, judged, why = advantages_of(rollouts, judging, timer)
            if why:
                if epoch == first_step // per_epoch:  # a reward that has not worked since the start is not waited for
                    raise RewardError(f"not one sample of the epoch could be judged; {why}")
                say(f"epoch {epoch}: not one sample could be judged; {why}")
        for n in range(per_epoch):
            with timer("step"):
                part = n % cfg.grpo.updates_per_epoch
                chosen = slice(part * per_update, (part + 1) * per_update)
                done += 1
                metrics = update(rollouts[chosen], advantages[chosen], window, done, check=n == 0, timer=timer)
            progress.update()
            if not math.isfinite(metrics["grad_norm"]) or (why and n == 0):
                skipped_in_a_row += 1
            elif not why:
                skipped_in_a_row = 0
            metrics |= judged | floor | {"epoch": epoch, "memory/peak_gb": peak_memory_gb(device)}
            last = n == per_epoch - 1
            due = last and (interruption.agreed(largest) or reached(done, per_epoch, cfg.run.save_steps, steps))
            if due or done == first_step + 1:
                with timer("invariants"):
                    weights_watched.check(done)
            if last and held_out and reached(done, per_epoch, cfg.evaluation.eval_steps, steps):
                metrics |= evaluate()
            metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
            log(done, metrics)
            timer = Timer()
            if why and skipped_in_a_row > cfg.train.max_nonfinite:
                raise RewardError(f"stopped at step {done}: {skipped_in_a_row} epochs in a row taught nothing; {why}")
            if skipped_in_a_row > cfg.train.max_nonfinite:
                raise SystemExit(f"stopped at step {done}: {skipped_in_a_row} updates in a row were not finite")
        progress.set_postfix(reward=f"{judged['reward/mean']:.3f}", spread=f"{judged['reward/std_in_group']:.3f}")
        # `best` is the checkpoint with the highest score among those whose own weights were evaluated
        score = metrics.get("eval/score")
        if interruption.number:
            break
        if due:
            save(done, score)
            accelerator.wait_for_everyone()
    if interruption.number:  # after an epoch, or in the rollouts of one, which have changed nothing
        if largest(int(done > 0 and not checkpoint.folder_of(cfg.run.output_dir, done).exists())):
            weights_watched.check(done)
            save(done, score)
        accelerator.wait_for_everyone()
    tracker.close()
    accelerator.end_training()
    if interruption.number:
        say(f"{interruption.name}: stopped after step {done}; the same command goes on from there")
        return interruption.exit_code
    say(f"done: {cfg.run.output_dir}/checkpoints/latest")
    return 0


# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """One forward pass's members, and what scoring them again takes."""

    members: list[groups.Member]
    conditioning: Conditioning
    found: Tensor  # (B,) bool: the conditioning is the member's; another clip's stands in for one that is lost
    steps: dict[int, sde.Step]


@dataclass(frozen=True)
class Rows(Dataset):
    """The conditioning of the plan's members."""

    samples: list[prepare.Sample]
    conditions: prepare.Conditions
    skip: bool  # data.skip_bad_rows

    def __getitem__(self, member: groups.Member) -> tuple[groups.Member, Conditioning, bool]:
        row, conditioning = self.conditions.readable(self.samples, member.row, self.skip)
        return member, conditioning, row == member.row


def together(backbone: Backbone, items: list) -> tuple[list[groups.Member], Conditioning, Tensor]:
    members, conditionings, found = zip(*items, strict=True)
    return list(members), backbone.collate(conditionings), torch.tensor(found)


def reached(done: int, per_epoch: int, every: int, steps: int) -> bool:
    """Whether the epoch that ends with step `done` has a multiple of `every` in it, or is the last."""
    return done // every > (done - per_epoch) // every or done == steps


if __name__ == "__main__":
    sys.exit(main())
