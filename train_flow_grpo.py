"""Flow-GRPO and DanceGRPO: train a LoRA on a video model by policy gradient, with any reward.

One epoch:

    1. roll out `group_size` videos of each of `groups` clips; the steps of the window are stochastic    (sde.rollout)
    2. decode and score them, without a gradient; slow rewards run meanwhile    (rewards.async_scoring)
    3. advantage = how much better than its group a video is, over all processes    (grpo.advantages)
    4. score the window's steps again, with a graph, and update; ratio, clip, KL and loss are inline    (sde.score)
    5. with a data anchor: the flow-matching loss on the real clips' latents, in the same update    (training.anchors)

    accelerate launch train_flow_grpo.py --config configs/tiny_flow_grpo.yaml [--dry-run] [section.key=value ...]
"""

import rewardfl  # noqa: F401, I001  before torch: it sets how OpenMP's threads wait (rewardfl/machine.py)

import math
import sys
from argparse import Namespace
from functools import partial

from rewardfl.training.arguments import parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help answers at once

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import flow, group_plan, grpo, reward_flow, sde
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Conditioning, Schedule, Velocity
from rewardfl.config import FlowGrpoConfig
from rewardfl.epoch_order import due_this_epoch
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.optim import averaged
from rewardfl.rewards import async_scoring, build_terms
from rewardfl.training import cli, evaluation, saving, setup_data, setup_model, setup_rewards
from rewardfl.training.checkpoint import checkpoint_dir
from rewardfl.training.epoch_scores import score_epoch
from rewardfl.training.learner import make_average, make_learner, seed_generators
from rewardfl.training.plan import check_sizes, resolve
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.samples import StochasticRollout
from rewardfl.training.setup_processes import connect_processes
from rewardfl.training.setup_run import is_finished, open_log, open_run, resume
from rewardfl.training.setup_summary import print_run_summary
from rewardfl.training.setup_workload import make_workload
from rewardfl.training.signals import Interruption
from rewardfl.training.timer import Timer
from rewardfl.training.update_metrics import common_metrics, flow_grpo_metrics

STATISTICS = (
    "advantage",
    "ratio",
    "clipped",
    "kl",
    "log_prob",
    "old_log_prob",
    "row",
    "denoising_step",
)  # of each sample and step


def train(cfg: FlowGrpoConfig, interruption: Interruption, run_folder: RunFolder, *, dry_run: bool) -> int:
    """Train, and return the exit code: 2 for a dry run that does not fit the GPU, 128 + the number of a signal."""
    # ---------------------------------------------------------------------------------- plan: headers alone are read
    backbone = setup_model.open_model(cfg)
    job = connect_processes(cfg)
    plan = resolve(cfg, backbone, job.world)
    geometry, per_update, per_epoch = plan.geometry, plan.geometry.forwards_per_update, plan.updates_per_epoch
    job.reduce_in_backward(plan.backwards_per_update)
    rows = setup_data.scan_rows(cfg, job, backbone, plan.rewards)
    print_run_summary(cfg, plan, backbone, rows, job)
    resume_point = open_run(cfg, None if dry_run else run_folder, job, backbone)
    if dry_run:
        from rewardfl.estimate import report  # only a dry run needs it

        return report.dry_run(make_workload(cfg, plan, backbone, rows.train, job.sharding), job)

    # ---------------------------------------------------------------------------------- data, rewards, resume
    terms = build_terms(plan.rewards, job.device)
    pool = async_scoring.make_worker_pools(terms, cfg.reward.reward_timeout)
    part_weights = configuration.part_weights(cfg)
    store = setup_data.open_cache(cfg)
    samples = setup_data.find_samples(cfg, rows.train, terms, store, job)
    held_out = setup_data.find_samples(cfg, rows.held_out, terms, store, job)
    check_sizes(cfg, [sample.size for sample in samples])
    ids = [sample.row.id for sample in samples]
    state, restored = resume(cfg, plan, resume_point, job, terms, samples, held_out)
    steps = plan.count_steps(len(samples))
    if is_finished(cfg, resume_point, steps, job):
        return 0
    setup_rewards.check_rewards(cfg, job, terms, samples)

    # ---------------------------------------------------------------------------------- fill the cache
    conditions = setup_data.make_conditions(cfg, backbone, resume_point.base, store)
    negative = setup_data.fill_conditions(cfg, conditions, [*samples, *held_out], job)
    setup_data.fill_clip_latents(cfg, conditions, samples, job)

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    decoder = backbone.load_decoder(job.device)
    scales = evaluation.find_scales(cfg.data, job, terms, conditions, decoder, held_out)
    model, trained = setup_model.load_experts(cfg, plan, backbone, job)
    setup_model.fill_adapters(model, trained, backbone, plan.init, resume_point, restored)
    learner = make_learner(cfg.train, job, backbone, model, trained, steps, restored)
    policy, optimizer, scheduler, parameters = learner.policy, learner.optimizer, learner.scheduler, learner.parameters
    average = make_average(cfg.grpo.ema_decay, parameters, restored)
    log = open_log(cfg, job, run_folder, state, restored, steps)
    del restored  # up to four copies of the adapters
    sampler = setup_data.make_sampler(cfg, job, conditions, decoder, model, negative)
    base = sampler.base
    samples, held_out = setup_data.add_base_motion(cfg, job, store, terms, resume_point, base, samples, held_out)
    anchors = setup_data.make_anchors(cfg, plan, conditions, samples, job.device)
    max_std = math.inf if cfg.grpo.max_std is None else cfg.grpo.max_std
    make_kernel = partial(sde.Kernel, cfg.grpo.sde, cfg.grpo.noise_level, max_std=max_std)  # of a schedule's sigmas
    rollouts_on = {"gpu": job.device, "cpu": torch.device("cpu")}[cfg.grpo.samples_on]

    def get_velocity(network: nn.Module, conditioning: Conditioning, schedule: Schedule) -> Velocity:
        return Velocity(
            backbone=backbone, model=network, conditioning=protocol.move_to(conditioning, job.device),
            schedule=schedule, negative=negative, guidance=cfg.sample.guidance_scale,
        )  # fmt: skip

    def roll_out_prefix(
        members: list[group_plan.Member], conditioning: Conditioning, schedule: Schedule, steps_before: int
    ) -> dict[tuple[int, int], Tensor]:
        """Return {member.start: latents before the window}. Members with equal noise share the prefix."""
        first = list({member.start: i for i, member in enumerate(members)}.values())
        shape = (1, *conditions.latent_shape(samples[members[0].row]))
        x = torch.cat([draw_noise(shape, members[i].noise_seed, job.device) for i in first])
        velocity = get_velocity(policy, protocol.select_rows(conditioning, first), schedule)
        x = reward_flow.rollout(velocity, x, schedule.sigmas[: steps_before + 1], keep=()).x0
        return {members[i].start: x[n : n + 1] for n, i in enumerate(first)}

    def evaluate() -> dict[str, float]:
        """Return eval/*: the scores of the held-out clips under the averaged weights."""
        generate = partial(sampler.generate, held_out)
        with averaged(average, parameters):
            return evaluation.evaluate(cfg.evaluation.eval_noises, job, terms, pool, held_out, generate, scales)

    def save(done: int, *, last: bool) -> None:
        """Save a checkpoint of the averaged weights, and sample videos. All processes call it."""
        content = saving.collect_state(job, learner, average, state, log, done)
        score = log.score_for_best(done, done - 1, ["eval/held_out", "eval/score"])  # of the weights now saved
        with averaged(average, parameters):
            saving.save(cfg.run, job, backbone, learner, log, content, score, last=last)
            if not interruption.number:  # shutting down: skip the videos
                shown = held_out or samples
                generate = partial(sampler.generate, shown)
                log.show_samples(done, saving.sample_videos(cfg.run, cfg.data, backbone, shown, generate, job, done))

    floor = {}  # of the KL that rounding alone shows
    if cfg.grpo.kl_weight != 0 and cfg.model.dtype == "bfloat16":
        row, conditioning = conditions.read_or_substitute(samples, 0, skip=cfg.data.skip_bad_rows)
        shape, seed = conditions.latent_shape(samples[row]), noise_seed(cfg.run.seed, 0, "floor")
        velocity = get_velocity(policy, conditioning, plan.schedule(shape))
        x, kernel = draw_noise((1, *shape), seed, job.device), make_kernel(velocity.schedule.sigmas)
        floor["policy/kl_floor"] = sde.kl_floor(velocity.reference, x, kernel, plan.window(0))
        job.print(f"note: in bfloat16 this model's KL reads about {floor['policy/kl_floor']:.1e} from rounding alone")

    # ---------------------------------------------------------------------------------- train
    interruption.listen()
    done, stopped = state.step, ""
    progress = tqdm(range(done, steps), initial=done, total=steps, disable=not job.accelerator.is_local_main_process)
    clip_low, clip_high = cfg.grpo.clip_range, cfg.grpo.clip_range_high or cfg.grpo.clip_range
    exact = cfg.model.dtype == "float32" and not cfg.train.compile_blocks
    tolerance = grpo.ratio_tolerance(cfg.grpo.ratio_tolerance, clip_low, exact=exact)
    if held_out and resume_point.path is None:
        log.write(0, evaluate())
    for step in progress:
        (epoch, update), timer = divmod(step, per_epoch), Timer(job.device)  # with the rollouts in the first update
        if update == 0:
            # 1. Roll out this process's videos. Only the window's steps are stochastic; they are stored.
            seed_generators(cfg.run.seed, step, job.rank)
            plans = [group_plan.plan(epoch, rank, geometry, ids, cfg.run.seed) for rank in range(job.world)]
            rollouts, pending = [], []
            prefixes: dict[tuple[int, int], Tensor] = {}
            for members, is_new in zip(plans[job.rank], group_plan.needs_prefix(plans), strict=True):
                if interruption.any_signal(job.all_reduce_max):  # nothing changed since the last update
                    break
                with timer("step"):
                    conditioning, ok = conditions.batch(samples, [m.row for m in members], skip=cfg.data.skip_bad_rows)
                    conditioning = protocol.move_to(conditioning, job.device)
                    shape = (1, *conditions.latent_shape(samples[members[0].row]))
                    schedule = plan.schedule(shape[1:])
                    window = plan.window(epoch, members[0].group_id)
                    kernel, keep_means = make_kernel(schedule.sigmas), cfg.grpo.objective == "guard"
                with timer("step"), timer("rollout"):
                    prefixes = roll_out_prefix(members, conditioning, schedule, window[0]) if is_new else prefixes
                    x = torch.cat([prefixes[member.start] for member in members])
                    noise = partial(group_plan.draw_step_noise, members, shape, job.device)
                    velocity = get_velocity(policy, conditioning, schedule)
                    x0, stored = sde.rollout(velocity, x, kernel, window, noise, window[0], keep_means=keep_means)

                # 2. Decode and score. A slow reward runs while the next videos are rolled out.
                with timer("step"), timer("decode"):
                    video = decoder.decode(x0, conditioning).float()  # (B, 3, F, H, W) in [-1, 1]
                with timer("step"), timer("reward"):
                    references = [samples[member.row].references for member in members]
                    pending.append(async_scoring.submit(terms, video, references, pool))
                del video  # the updates do not need it
                stored = {i: transition.to(rollouts_on) for i, transition in stored.items()}
                rollout = StochasticRollout(
                    members=members, is_requested=ok, conditioning=protocol.move_to(conditioning, rollouts_on),
                    schedule=schedule, kernel=kernel, steps=stored,
                )  # fmt: skip
                rollouts.append(rollout)
            if interruption.number:
                break

            # 3. Advantages: how much better than its group a video is, over all processes.
            with timer("step"), timer("reward"):
                results = [async_scoring.collect(calls) for calls in pending]
            first = step == state.step
            scored = score_epoch(job, terms, results, rollouts, cfg.grpo, part_weights, epoch, first=first)

        # 4. Update: score the window's steps of this part of the rollouts again, with a graph.
        part = slice(update % geometry.updates * per_update, (update % geometry.updates + 1) * per_update)
        statistics, losses, anchored = [], [], []
        pairs = zip(rollouts[part], scored.advantages[part], strict=True)
        passes = [(rollout, advantage, i) for rollout, advantage in pairs for i in rollout.steps]
        with timer("step"), timer("replay"), job.gradient_reduction():
            for rollout, advantage, i in passes:
                kernel, transition = rollout.kernel, rollout.steps[i].to(job.device)
                velocity = get_velocity(policy, rollout.conditioning, rollout.schedule)
                with job.accumulate(policy):
                    reference = velocity.reference if cfg.grpo.kl_weight else None
                    reference_mean = sde.reference_mean(reference, kernel, transition.x, i)  # no graph is alive yet
                    mean, log_prob = sde.score(velocity, transition, i, kernel)
                    ratio = grpo.log_ratio(cfg.grpo.objective, log_prob, mean, transition, kernel.kind).exp()
                    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
                    loss = torch.maximum(-advantage * ratio, -advantage * clipped_ratio).mean()
                    clipped = grpo.clip_mask(ratio, advantage, clip_low, clip_high)  # these have no gradient
                    loss = loss / (abs(kernel.dt(i)) if cfg.grpo.objective == "guard" else 1)  # its gradient has |dt|
                    no_kl = torch.zeros_like(log_prob)  # (B,)
                    kl = no_kl if reference_mean is None else flow.transition_kl(mean, reference_mean, transition.std)
                    loss = loss + cfg.grpo.kl_weight * kl.mean()
                    job.backward(loss / (per_update * len(rollout.steps)))
                losses.append(loss.detach())
                row = torch.tensor([member.row for member in rollout.members], device=job.device)
                values = (advantage, ratio, clipped, kl, log_prob, transition.log_prob, row, torch.full_like(row, i))
                statistics.append([value.detach() for value in values])
                if i == max(rollout.steps):
                    anchored.append(anchors.accumulate(job, policy, rollout, step, 1 / (per_update * geometry.batch)))
        with timer("step"):
            seen = job.gather(dict(zip(STATISTICS, map(torch.cat, zip(*statistics, strict=True)), strict=True)))  # (N,)
            if update == 0:  # nothing was updated since the rollout
                grpo.check_ratio(seen["log_prob"], seen["old_log_prob"], tolerance, seen["denoising_step"])
            with timer("optimizer"):
                rate = float(scheduler.get_last_lr()[0])
                norm = job.step(optimizer, parameters, cfg.train.max_grad_norm)
                if math.isfinite(norm):
                    average.step(parameters)
                scheduler.step()
        done = step + 1

        # 5. Metrics, checks, checkpoint.
        policy_loss = float(job.gather(torch.stack(losses).mean()[None]).mean())
        anchor_loss, has_clip = map(job.gather, map(torch.cat, zip(*anchored, strict=True)))  # (N,) each
        signal = (seen["advantage"] != 0) & ~seen["clipped"] | (seen["kl"] > 0) | (anchor_loss > 0).any()
        metrics = flow_grpo_metrics(anchors.metrics(anchor_loss, has_clip), policy_loss, seen) | scored.metrics | floor
        metrics |= common_metrics(job.device, done, norm, rate, scored.replaced, signal)
        if update == 0 or not scored.why_nothing:  # count a failed epoch once, not per update
            log.count(norm, scored.why_nothing)
        log.print_skipped(done, norm, [samples[i].row.id for i in seen["row"].tolist()], seen["log_prob"].isfinite())
        ends_epoch = update == per_epoch - 1
        stopped = log.early_stop(done, metrics) if ends_epoch else ""
        save_due = due_this_epoch(done, per_epoch, cfg.run.save_steps, steps) or stopped != ""
        due = ends_epoch and (interruption.any_signal(job.all_reduce_max) or save_due)
        if due or step == state.step:
            with timer("invariants"):
                learner.weights.check(done)
        if done == 1 or (ends_epoch and save_due):
            metrics |= anchors.data_loss(job, model)
        eval_due = due_this_epoch(done, per_epoch, cfg.evaluation.eval_steps, steps) or stopped != ""
        if ends_epoch and held_out and eval_due:
            metrics |= evaluate()
        log.write(done, metrics | timer.metrics())
        log.stop_if_stuck(done, scored.why_nothing)
        progress.set_postfix(reward=f"{metrics['reward/mean']:.3f}", spread=f"{metrics['reward/std_in_group']:.3f}")
        if due and not interruption.number:
            save(done, last=done == steps or stopped != "")
        if interruption.number or stopped:
            break
    if interruption.number:  # the weights are those of the last update
        if job.all_reduce_max(int(done > 0 and not checkpoint_dir(cfg.run.output_dir, done).exists())):
            learner.weights.check(done)
            save(done, last=True)
        job.wait()
    return saving.close_run(cfg.run, job, interruption, done, stopped)


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with cli.exit_codes() as result, Interruption() as interruption, RunFolder() as run_folder:
        cfg = configuration.load(args.config, args.overrides, FlowGrpoConfig)
        result.exit_code = train(cfg, interruption, run_folder, dry_run=args.dry_run)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
