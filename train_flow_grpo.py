"""Flow-GRPO and DanceGRPO: train a LoRA on a video model by policy gradient, with any reward.

One epoch:

    1. roll out `group_size` videos of each of `groups` clips; the steps of the window are stochastic    (sde.rollout)
    2. decode and judge them; no gradient is asked of a reward, and slow ones go on meanwhile    (rewards.blackbox)
    3. advantage = how much better than its group a video is, over all processes    (grpo.advantages)
    4. score the window's steps again, with a graph, and update: ratio, clip, KL and loss stand below    (sde.score)
    5. with a data anchor: the flow-matching loss on the real clips' latents, in the same update    (run.anchors)

    accelerate launch train_flow_grpo.py --config configs/tiny_flow_grpo.yaml [--dry-run] [section.key=value ...]
"""

import rewardfl  # noqa: F401, I001  before torch: it sets how OpenMP's threads wait (rewardfl/machine.py)

import math
import sys
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import flow, groups, grpo, reward_flow, sde
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Conditioning
from rewardfl.backbones.protocol import Schedule
from rewardfl.backbones.protocol import Velocity
from rewardfl.config import FlowGrpoConfig
from rewardfl.optim import averaged
from rewardfl.rewards import RewardError, build_terms
from rewardfl.rewards import async_scoring
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.run import evaluation, invariants, prepare, start, work
from rewardfl.run.checkpoint import RunFolder, folder_of
from rewardfl.run.monitor import Timer, peak_memory_gb
from rewardfl.run.signals import Interruption


def train(cfg: FlowGrpoConfig, dry_run: bool, interruption: Interruption, run_folder: RunFolder) -> int:
    """Train; the process's exit code: 2 for a dry run that does not fit the GPU that is there, 128 + a signal's."""
    # ---------------------------------------------------------------------------------- what will be done, checked
    backbone = start.open_model(cfg)  # headers alone: what does not fit is refused before anything loads
    answering, trained_names = work.schedule_of(cfg, backbone).experts, work.trained_experts(cfg, backbone.experts)
    windows = work.windows_of(cfg, answering, trained_names)
    wanted = start.find_rewards(cfg, backbone)
    window_size = len(groups.window(windows, 0, cfg.run.seed))  # of every epoch
    job = start.open_job(cfg)
    geometry = work.geometry_of(cfg, job.world)
    per_update, per_epoch = geometry.forwards_per_update, work.updates_of_epoch(cfg)
    scored = per_update * window_size  # steps of an update; the last of its backward passes synchronises
    job.backwards = scored + per_update * work.anchor_draws(cfg)
    rows = start.look_at_rows(cfg, job, backbone, wanted)
    steps = work.steps_of_run(cfg, len(rows.train), job.world)
    start.say_plan(cfg, backbone, wanted, rows, steps, job)
    opened = start.open_run(cfg, None if dry_run else run_folder, job, backbone)
    if dry_run:
        from rewardfl.estimate import report  # training must not need what it measures with

        asked = work.work_of(cfg, backbone, len(rows.train), steps, job.world, job.sharding)
        return report.dry_run(asked, job)

    # ---------------------------------------------------------------------------------- data, rewards, what was done
    terms = build_terms(wanted, job.device)
    places = async_scoring.make_worker_pool(terms, cfg.reward.reward_timeout)
    parts = configuration.part_weights(cfg)
    store = start.open_cache(cfg)
    samples = start.find_samples(cfg, rows.train, terms, store, job)
    held_out = start.find_samples(cfg, rows.held_out, terms, store, job)
    work.check_sizes(cfg, [sample.size for sample in samples])
    resumed = start.resume(cfg, opened, job, backbone, terms, samples, held_out)
    steps = work.steps_of_run(cfg, len(samples), job.world)
    if start.is_finished(cfg, opened, steps, job):
        return 0
    start.try_rewards(cfg, job, terms, samples)

    # ---------------------------------------------------------------------------------- what the cache lacks
    conditions = start.conditions_of(cfg, backbone, opened.base, store)
    guidance = cfg.sample.guidance_scale
    negative = start.fill_conditions(cfg, conditions, [*samples, *held_out], job)
    anchors = start.make_anchors(cfg, backbone, conditions, samples, job)

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    decoder = backbone.load_decoder(job.device)
    scales = evaluation.find_scales(cfg, job, terms, conditions, decoder, held_out)
    model, trained = start.load_experts(cfg, backbone, job, conditions, samples)
    start.fill_adapters(model, trained, backbone, resumed)
    learner = start.make_learner(cfg, job, backbone, model, trained, steps, resumed)
    policy, optimizer, scheduler, parameters = learner.policy, learner.optimizer, learner.scheduler, learner.parameters
    average = start.make_average(cfg.grpo.ema_decay, parameters, resumed)
    log = start.open_log(cfg, job, run_folder, resumed, steps)

    # ---------------------------------------------------------------------------------- who rolls out what
    def plan_of(epoch: int, rank: int = job.rank) -> list[list[groups.Member]]:
        return groups.plan(epoch, rank, geometry, [sample.row.id for sample in samples], cfg.run.seed)

    kept_on = job.device if cfg.grpo.samples_on == "gpu" else torch.device("cpu")
    keep_means = cfg.grpo.objective == "guard"

    def velocity_of(conditioning: Conditioning, schedule: Schedule) -> Velocity:
        return Velocity(backbone, policy, protocol.move_to(conditioning, job.device), schedule, negative, guidance)

    def kernel_of(schedule: Schedule) -> sde.Kernel:
        return sde.Kernel(cfg.grpo.sde, cfg.grpo.noise_level, schedule.sigmas)

    def sample_clean(clips: list[prepare.Sample], row: int, n: int = 0) -> tuple[int, Tensor]:
        """(row, its video (3, F, H, W) by the ODE) of the weights as they are now; n: which of its noises."""
        row, conditioning = conditions.readable(clips, row, cfg.data.skip_bad_rows)
        shape, seed = conditions.shape_of(clips[row]), groups.noise_seed(cfg.run.seed, -1, clips[row].row.id, n)
        num_steps = cfg.evaluation.eval_inference_steps or cfg.sample.num_inference_steps
        schedule = backbone.schedule(num_steps, cfg.sample.shift, shape)
        conditioning = protocol.move_to(conditioning, job.device)
        velocity = Velocity(backbone, model, conditioning, schedule, negative, guidance)
        x0 = reward_flow.rollout(velocity, groups.noise((1, *shape), seed, job.device), schedule.sigmas, keep=()).x0
        return row, decoder.decode(x0, conditioning)[0].float()

    def evaluate() -> dict[str, float]:
        """eval/*: the held-out clips under every reward, by the averaged weights."""
        with averaged(average, parameters):
            return evaluation.evaluate(cfg, job, terms, places, held_out, partial(sample_clean, held_out), scales)

    def save(done: int, last: bool) -> None:
        """A checkpoint of the averaged weights, with all that going on takes, and sample videos. On all processes."""
        state = start.state_of(job, learner, resumed, log, done)
        state |= start.state_of_average(average, parameters)
        # `best` is the checkpoint with the highest score among those whose own weights were evaluated
        score = log.score_for_best(done, done - 1, ["eval/held_out", "eval/score"])
        with averaged(average, parameters):
            start.save(cfg, job, backbone, learner, log, state, score, last)
            if not interruption.number:  # who sent a signal may not wait for videos
                shown = held_out or samples
                log.show_samples(done, start.sample_videos(cfg, shown, partial(sample_clean, shown), job, done))

    floor = {}
    if cfg.grpo.kl_weight != 0 and cfg.model.dtype == "bfloat16":
        row, conditioning = conditions.readable(samples, 0, cfg.data.skip_bad_rows)
        shape, seed = conditions.shape_of(samples[row]), groups.noise_seed(cfg.run.seed, 0, "floor")
        schedule = work.schedule_of(cfg, backbone, shape)
        x, window = groups.noise((1, *shape), seed, job.device), groups.window(windows, 0, cfg.run.seed)
        reads = sde.kl_floor(velocity_of(conditioning, schedule).reference, x, kernel_of(schedule), window)
        floor["policy/kl_floor"] = reads
        job.say(f"note: in bfloat16 this model's KL reads about {reads:.1e} from rounding alone")

    # ---------------------------------------------------------------------------------- Go!
    interruption.listen()
    done, stopped = resumed.step, ""
    progress = tqdm(range(done, steps), initial=done, total=steps, disable=not job.accelerator.is_local_main_process)
    clip_low, clip_high = cfg.grpo.clip_range, cfg.grpo.clip_range_high or cfg.grpo.clip_range
    exact = cfg.model.dtype == "float32" and not cfg.train.compile_blocks
    tolerance = grpo.ratio_tolerance(cfg.grpo.ratio_tolerance, exact, clip_low)
    if held_out and opened.path is None:
        log.write(0, evaluate())
    for epoch in range(done // per_epoch, steps // per_epoch):
        window, timer = groups.window(windows, epoch, cfg.run.seed), Timer(job.device)
        start.seed_generators(cfg.run.seed, done, job.rank)
        with timer("step"):  # of an epoch's first update: with all that it takes to get there
            # 1. Roll out this process's videos; only the window's steps are stochastic, and kept.
            plans = [plan_of(epoch, rank) for rank in range(job.world)]
            rollouts, pending, starts = [], [], {}
            for members, is_new in zip(plans[job.rank], groups.new_starts(plans), strict=True):
                if interruption.agreed(job.largest):  # nothing was updated since the last epoch: nothing is lost
                    break
                conditioning, own = conditions.batch(samples, [m.row for m in members], cfg.data.skip_bad_rows)
                shape = (1, *conditions.shape_of(samples[members[0].row]))
                schedule = work.schedule_of(cfg, backbone, shape[1:])
                kernel, conditioning = kernel_of(schedule), protocol.move_to(conditioning, job.device)
                with timer("rollout"):
                    if is_new:  # up to the window, members that start from the same noise are one
                        first = list({member.start: i for i, member in enumerate(members)}.values())
                        x = torch.cat([groups.noise(shape, members[i].noise_seed, job.device) for i in first])
                        velocity = velocity_of(protocol.select_rows(conditioning, first), schedule)
                        x = reward_flow.rollout(velocity, x, schedule.sigmas[: window[0] + 1], keep=()).x0
                        starts = {members[i].start: x[n : n + 1] for n, i in enumerate(first)}
                    x = torch.cat([starts[member.start] for member in members])
                    velocity = velocity_of(conditioning, schedule)
                    noise = partial(groups.step_noise, members, shape, job.device)
                    x0, kept = sde.rollout(velocity, x, kernel, window, noise, window[0], keep_means)

                # 2. Decode and judge; a slow reward goes on beside the next rollouts.
                with timer("decode"):
                    video = decoder.decode(x0, conditioning).float()  # (B, 3, F, H, W) in [-1, 1]
                with timer("reward"):
                    references = [samples[member.row].references for member in members]
                    pending.append(async_scoring.submit(terms, video, references, places))
                del video  # the updates have no use for it
                kept = {i: step.to(kept_on) for i, step in kept.items()}
                rollouts.append(
                    prepare.Rollout(members, own, protocol.move_to(conditioning, kept_on), schedule, kernel, kept)
                )
            if interruption.number:
                break

            # 3. Advantages: how much better than its group a video is, over all processes.
            with timer("reward"):
                judged = [async_scoring.collect(one) for one in pending]
            rewards, valid, weights = zip(
                *(async_scoring.stack_rewards(terms, one, parts) for one in judged), strict=True
            )
            own = torch.cat([rollout.own for rollout in rollouts])
            group_ids = torch.tensor([member.group_id for rollout in rollouts for member in rollout.members])
            everyones = (torch.cat(rewards), group_ids, torch.cat(valid) & own, ~own)
            rewards, group_ids, valid, replaced = (x.cpu() for x in job.gather([x.to(job.device) for x in everyones]))
            advantages, of_epoch = grpo.advantages(
                rewards,
                group_ids,
                group_size=cfg.grpo.group_size,
                std=cfg.grpo.advantage_std,
                combine=cfg.grpo.advantage_of,
                weights=weights[0],
                clip=cfg.grpo.advantage_clip,
                valid=valid,
            )
            share = slice(job.rank * len(own), (job.rank + 1) * len(own))
            advantages = advantages[share].to(job.device).split(geometry.batch)
            judged = job.gather_lists(judged)
            for problem, count in reward_metrics.problems(terms, judged).items():
                job.say(f"{problem} ({count} samples)")
            of_epoch |= {"data/replaced": float(replaced.sum()), "epoch": epoch} | floor
            of_epoch |= {"reward/failed": reward_metrics.failed_fraction(judged)}
            of_epoch |= reward_metrics.means(terms, judged, "reward", of_epoch)
            why = "" if valid.any() else reward_metrics.why_nothing_was_judged(terms, judged)
            if why and done == resumed.step:  # a reward that has not worked since the start is not waited for
                raise RewardError(f"not one sample of the epoch could be judged; {why}")
            if why:
                job.say(f"epoch {epoch}: not one sample could be judged; {why}")

        # 4. Update, once per part of the epoch's samples, and the whole inner_epochs times.
        for n in range(per_epoch):
            part = slice(n % geometry.updates * per_update, (n % geometry.updates + 1) * per_update)
            seen, losses, anchored = [], [], []
            with timer("step"):
                with timer("replay"), job.one_update():
                    for rollout, advantage in zip(rollouts[part], advantages[part], strict=True):
                        kernel = rollout.kernel
                        row = torch.tensor([member.row for member in rollout.members], device=job.device)
                        for i in window:
                            step = rollout.steps[i].to(job.device)
                            velocity = velocity_of(rollout.conditioning, rollout.schedule)
                            with job.micro_batch(policy):
                                if cfg.grpo.kl_weight != 0:  # before the policy's forward: no graph is alive yet
                                    with torch.no_grad():
                                        reference_mean, _ = kernel.transition(velocity.reference, step.x, i)
                                mean, log_prob = sde.score(velocity, step, i, kernel)
                                ratio = grpo.log_ratio(cfg.grpo.objective, log_prob, mean, step, kernel.kind).exp()
                                clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
                                loss = torch.maximum(-advantage * ratio, -advantage * clipped_ratio).mean()
                                clipped = grpo.clipped(ratio, advantage, clip_low, clip_high)  # these give no gradient
                                if cfg.grpo.objective == "guard":  # each step's gradient is proportional to |dt|
                                    loss = loss / abs(kernel.dt(i))
                                kl = torch.zeros_like(log_prob)  # (B,)
                                if cfg.grpo.kl_weight != 0:
                                    kl = flow.transition_kl(mean, reference_mean, step.std)
                                    loss = loss + cfg.grpo.kl_weight * kl.mean()
                                job.backward(loss / scored)
                            losses.append(loss.detach())
                            of_step = (advantage, ratio, clipped, kl, log_prob, step.log_prob, row)
                            seen.append([value.detach() for value in of_step])
                        each = 1 / (per_update * geometry.batch)
                        anchored.append(anchors.accumulate(job, policy, rollout, done, each))
                seen = job.gather(dict(zip(SEEN, map(torch.cat, zip(*seen, strict=True)), strict=True)))  # (N,) each
                if n == 0:  # nothing was updated since the rollout
                    grpo.check_ratio(seen["log_prob"], seen["old_log_prob"], tolerance, window, geometry.batch)
                with timer("optimizer"):
                    rate = float(scheduler.get_last_lr()[0])
                    norm = job.step(optimizer, parameters, cfg.train.max_grad_norm)
                    if math.isfinite(norm):
                        average.step(parameters)
                    scheduler.step()
            done += 1
            progress.update()
            taught = (seen["advantage"] != 0) & ~seen["clipped"] | (seen["kl"] > 0)
            metrics = {
                "actor/loss": float(job.gather(torch.stack(losses).mean()[None]).mean()),
                "grad_norm": norm,
                "lr": rate,
            }
            anchor_loss, has_clip = map(job.gather, map(torch.cat, zip(*anchored, strict=True)))  # (N,) each
            policy_loss = metrics["actor/loss"]
            metrics |= anchors.metrics(anchor_loss, has_clip)
            metrics["actor/loss"] += policy_loss
            taught |= (anchor_loss > 0).any()
            metrics |= {"train/no_signal": invariants.no_signal(done, norm, taught)} | grpo.policy_statistics(seen)
            if n == 0 or not why:  # an epoch of which nothing could be judged counts once
                log.count(norm, why)
            ids = [samples[row].row.id for row in seen["row"].tolist()]
            log.say_skipped(done, norm, ids, seen["log_prob"].isfinite())
            metrics |= of_epoch | {"memory/peak_gb": peak_memory_gb(job.device)}
            last = n == per_epoch - 1
            stopped = log.early_stop(done, metrics) if last else ""
            save_due = groups.is_due(done, per_epoch, cfg.run.save_steps, steps) or stopped != ""
            due = last and (interruption.agreed(job.largest) or save_due)
            if due or done == resumed.step + 1:
                with timer("invariants"):
                    learner.watched.check(done)
            eval_due = groups.is_due(done, per_epoch, cfg.evaluation.eval_steps, steps) or stopped != ""
            if done == resumed.step + 1 or (last and save_due):
                metrics |= anchors.data_loss(job, model)
            if last and held_out and eval_due:
                metrics |= evaluate()
            metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
            log.write(done, metrics)
            timer = Timer(job.device)
            log.stop_if_stuck(done, why)
        progress.set_postfix(reward=f"{metrics['reward/mean']:.3f}", spread=f"{metrics['reward/std_in_group']:.3f}")
        if interruption.number:
            break
        if due:
            save(done, last=done == steps or stopped != "")
        if stopped:
            break
    if interruption.number:  # after an epoch, or in the rollouts of one, which have changed nothing
        if job.largest(int(done > 0 and not folder_of(cfg.run.output_dir, done).exists())):
            learner.watched.check(done)
            save(done, last=True)
        job.wait()
    return start.close_run(cfg, job, interruption, done, stopped)


SEEN = ("advantage", "ratio", "clipped", "kl", "log_prob", "old_log_prob", "row")  # of each sample and step


def main() -> int:
    """The command line; the exit code."""
    return start.main(__doc__, FlowGrpoConfig, train)


if __name__ == "__main__":
    sys.exit(main())
