"""Forward-process reinforcement: train a LoRA by advantage-weighted regression on the model's own clean videos.

One epoch:

    1. roll out `group_size` videos of each of `groups` clips by the old policy, as deployed    (reward_flow.rollout)
    2. decode and score them, without a gradient; slow rewards run meanwhile    (rewards.async_scoring)
    3. advantage = how much better than its group a video is, over all processes    (training.epoch_scores)
    4. noise the clean latents; fit the velocity there, or repel it: the objective is inline    (forward_rl)
    5. with a data anchor: the flow-matching loss on the real clips' latents, in the same update    (training.anchors)
    6. the old policy follows the trained one

    accelerate launch train_forward_rl.py --config configs/tiny_forward.yaml [--dry-run] [section.key=value ...]
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
from torch import Tensor
from tqdm import tqdm

from rewardfl import anchor, forward_rl, group_plan, reward_flow
from rewardfl import config as configuration
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Conditioning, Schedule, Velocity
from rewardfl.config import ForwardRlConfig
from rewardfl.epoch_order import due_this_epoch
from rewardfl.noise import draw_noise
from rewardfl.optim import averaged
from rewardfl.rewards import async_scoring, build_terms
from rewardfl.training import cli, evaluation, invariants, saving, setup_data, setup_model, setup_rewards
from rewardfl.training.checkpoint import checkpoint_dir
from rewardfl.training.epoch_scores import score_epoch
from rewardfl.training.forward_draws import ForwardDraw, keep_trained, make_draws, measure_deviation
from rewardfl.training.learner import make_average, make_learner, make_old_policy, seed_generators
from rewardfl.training.plan import check_sizes, resolve
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.samples import CleanRollout
from rewardfl.training.setup_processes import connect_processes
from rewardfl.training.setup_run import is_finished, open_log, open_run, resume
from rewardfl.training.setup_summary import print_run_summary
from rewardfl.training.setup_workload import make_workload
from rewardfl.training.signals import Interruption
from rewardfl.training.timer import Timer
from rewardfl.training.update_metrics import common_metrics, forward_rl_metrics

STATISTICS = ("loss", "advantage", "misfit", "from_old", "from_base", "ratio", "row")  # of each video and draw


def train(cfg: ForwardRlConfig, interruption: Interruption, run_folder: RunFolder, *, dry_run: bool) -> int:
    """Train, and return the exit code: 2 for a dry run that does not fit the GPU, 128 + the number of a signal."""
    # ---------------------------------------------------------------------------------- plan: headers alone are read
    backbone = setup_model.open_model(cfg)
    job = connect_processes(cfg)
    plan = resolve(cfg, backbone, job.world)
    forward, geometry, training = cfg.forward, plan.geometry, plan.training
    per_update, per_epoch = training.forwards_per_update, plan.updates_per_epoch
    job.reduce_in_backward(plan.backwards_per_update)
    rows = setup_data.scan_rows(cfg, job, backbone, plan.rewards)
    print_run_summary(cfg, plan, backbone, rows, job)
    resume_point = open_run(cfg, None if dry_run else run_folder, job, backbone)
    if dry_run:
        from rewardfl.estimate import report  # only a dry run needs it

        return report.dry_run(make_workload(cfg, plan, backbone, rows.train, job.sharding), job)

    # ---------------------------------------------------------------------------------- data, rewards, resume
    terms = build_terms(plan.rewards, job.device)
    pool, weights = async_scoring.make_worker_pools(terms, cfg.reward.reward_timeout), configuration.part_weights(cfg)
    store = setup_data.open_cache(cfg)
    samples = setup_data.find_samples(cfg, rows.train, terms, store, job)
    held_out = setup_data.find_samples(cfg, rows.held_out, terms, store, job)
    check_sizes(cfg, [sample.size for sample in samples])
    ids = [sample.row.id for sample in samples]
    state, restored = resume(cfg, plan, resume_point, job, terms, samples, held_out)
    if is_finished(cfg, resume_point, steps := plan.count_steps(len(samples)), job):
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
    average = make_average(forward.ema_decay, parameters, restored)
    old = make_old_policy(forward, plan.old_decay, parameters, restored)
    log = open_log(cfg, job, run_folder, state, restored, steps)
    del restored  # up to five copies of the adapters
    sampler = setup_data.make_sampler(cfg, job, conditions, decoder, model, negative)
    base = sampler.base
    samples, held_out = setup_data.add_base_motion(cfg, job, store, terms, resume_point, base, samples, held_out)
    anchors = setup_data.make_anchors(cfg, plan, conditions, samples, job.device)
    rollouts_on = {"gpu": job.device, "cpu": torch.device("cpu")}[forward.samples_on]

    def get_velocity(conditioning: Conditioning, schedule: Schedule, guidance: float = 1.0) -> Velocity:
        """Return the policy's velocity. An update is without guidance, as in DiffusionNFT."""
        return Velocity(
            backbone=backbone, model=policy, conditioning=protocol.move_to(conditioning, job.device),
            schedule=schedule, negative=negative, guidance=guidance,
        )  # fmt: skip

    def policy_loss(draw: ForwardDraw, velocity: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective's loss (B,) and AWM's ratio of likelihoods (B,), 1 for the other objectives."""
        ratio, scaled = torch.ones_like(advantage), plan.advantage_scale * advantage
        if forward.objective == "best":  # as data; the advantage is 0 without a best video, else 1
            return advantage * forward_rl.distance(velocity, draw.target), ratio
        if forward.objective == "rvm":
            return forward_rl.rvm_loss(velocity, draw.target, scaled), ratio
        if draw.old is None or forward.objective not in ("nft", "awm"):
            raise ValueError(f"forward.objective {forward.objective} has no loss here")
        if forward.objective == "nft":
            settings = {"mix": forward.mix, "largest": forward.advantage_clip}
            return forward_rl.nft_loss(velocity, draw.old, draw.x, draw.x0, draw.sigma, advantage, **settings), ratio
        log_prob = partial(forward_rl.awm_log_prob, target=draw.target, sigma=draw.sigma, weighting=forward.weighting)
        log_ratio = log_prob(velocity) - log_prob(draw.old)
        return forward_rl.awm_loss(log_ratio, scaled, forward.clip_range), log_ratio.exp()

    def evaluate() -> dict[str, float]:
        """Return eval/*: the scores of the held-out clips under the averaged weights."""
        generate = partial(sampler.generate, held_out)
        with averaged(average, parameters):
            return evaluation.evaluate(cfg.evaluation.eval_noises, job, terms, pool, held_out, generate, scales)

    def save(done: int, *, last: bool) -> None:
        """Save a checkpoint of the averaged weights, and sample videos. All processes call it."""
        content = saving.collect_state(job, learner, average, state, log, done, old_policy=old)
        score = log.score_for_best(done, done - 1, ["eval/held_out", "eval/score"])  # of the weights now saved
        with averaged(average, parameters):
            saving.save(cfg.run, job, backbone, learner, log, content, score, last=last)
            if not interruption.number:  # shutting down: skip the videos
                shown = held_out or samples
                generate = partial(sampler.generate, shown)
                log.show_samples(done, saving.sample_videos(cfg.run, cfg.data, backbone, shown, generate, job, done))

    # ---------------------------------------------------------------------------------- train
    interruption.listen()
    done, stopped = state.step, ""
    progress = tqdm(range(done, steps), initial=done, total=steps, disable=not job.accelerator.is_local_main_process)
    if held_out and resume_point.path is None:
        log.write(0, evaluate())
    for step in progress:
        (epoch, update), timer = divmod(step, per_epoch), Timer(job.device)  # with the rollouts in the first update
        if update == 0:
            # 1. Roll out this process's videos by the old policy. Their clean latents alone are stored.
            seed_generators(cfg.run.seed, step, job.rank)
            rollouts, pending = [], []
            for members in group_plan.plan(epoch, job.rank, geometry, ids, cfg.run.seed):
                if interruption.any_signal(job.all_reduce_max):  # nothing changed since the last update
                    break
                with timer("step"), timer("rollout"), averaged(old, parameters):
                    conditioning, ok = conditions.batch(samples, [m.row for m in members], skip=cfg.data.skip_bad_rows)
                    conditioning = protocol.move_to(conditioning, job.device)
                    shape = (1, *conditions.latent_shape(samples[members[0].row]))
                    schedule = plan.schedule(shape[1:])
                    x = torch.cat([draw_noise(shape, member.noise_seed, job.device) for member in members])
                    velocity = get_velocity(conditioning, schedule, cfg.sample.guidance_scale)
                    x0 = reward_flow.rollout(velocity, x, schedule.sigmas, keep=()).x0

                # 2. Decode and score. A slow reward runs while the next videos are rolled out.
                with timer("step"), timer("decode"):
                    video = decoder.decode(x0, conditioning).float()  # (B, 3, F, H, W) in [-1, 1]
                with timer("step"), timer("reward"):
                    references = [samples[member.row].references for member in members]
                    pending.append(async_scoring.submit(terms, video, references, pool))
                del video  # the updates do not need it
                conditioning, x0 = protocol.move_to(conditioning, rollouts_on), x0.to(rollouts_on)
                rollouts.append(
                    CleanRollout(members=members, is_requested=ok, conditioning=conditioning, schedule=schedule, x0=x0)
                )
            if interruption.number:
                break

            # 3. Advantages: how much better than its group a video is, over all processes.
            with timer("step"), timer("reward"):
                results = [async_scoring.collect(calls) for calls in pending]
            scored = score_epoch(job, terms, results, rollouts, forward, weights, epoch, first=step == state.step)
            rollouts, scored = keep_trained(job, rollouts, scored, training)  # best: one video of each group

        # 4. Noise this update's videos at its moments. The velocities of the other policies: no graph is alive yet.
        part = slice(update % geometry.updates * per_update, (update % geometry.updates + 1) * per_update)
        with timer("step"), timer("old_policy"):
            moments = anchor.draw_moments(plan.draws, plan.active, cfg.run.seed, step, whole_range=plan.whole_range)
            draws, old_velocity = make_draws(
                rollouts[part], moments, step, get_velocity, partial(averaged, old, parameters), job.device,
                needs_old=plan.needs_old, needs_base=plan.needs_base,
            )  # fmt: skip

        # 5. Update: towards the videos of positive advantage, and away from those of negative.
        statistics, anchored, share = [], [], 1 / (per_update * training.batch)  # a sample's part
        advantages = [advantage for advantage in scored.advantages[part] for _ in moments]
        with timer("step"), timer("replay"), job.gradient_reduction():
            for draw, advantage in zip(draws, advantages, strict=True):
                with job.accumulate(policy):
                    velocity = draw.velocity(draw.x)
                    loss, ratio = policy_loss(draw, velocity, advantage)
                    none = torch.zeros_like(loss)  # (B,)
                    from_old = none if draw.old is None else forward_rl.distance(velocity, draw.old)
                    from_base = none if draw.base is None else forward_rl.distance(velocity, draw.base)
                    loss = loss + forward.old_anchor * from_old + forward.base_anchor * from_base
                    job.backward(loss.mean() / (per_update * plan.draws))
                row = torch.tensor([member.row for member in draw.rollout.members], device=job.device)
                misfit = forward_rl.distance(velocity, draw.target)
                statistics.append([x.detach() for x in (loss, advantage, misfit, from_old, from_base, ratio, row)])
                if draw.is_last:
                    anchored.append(anchors.accumulate(job, policy, draw.rollout, step, share))
        with timer("step"):
            seen = job.gather(dict(zip(STATISTICS, map(torch.cat, zip(*statistics, strict=True)), strict=True)))  # (N,)
            with timer("optimizer"):
                rate = float(scheduler.get_last_lr()[0])
                norm = job.step(optimizer, parameters, cfg.train.max_grad_norm)
                if math.isfinite(norm):
                    average.step(parameters)
                scheduler.step()
            with timer("old_policy"):
                deviation = measure_deviation(job, draws[0], old_velocity)
        del draws
        done = step + 1

        # 6. The old policy follows. Metrics, checks, checkpoint.
        ends_epoch = update == per_epoch - 1
        if ends_epoch:
            old.follow(parameters, done)
        anchor_loss, has_clip = map(job.gather, map(torch.cat, zip(*anchored, strict=True)))  # (N,) each
        signal = (seen["advantage"] != 0) | (anchor_loss > 0).any()
        metrics = forward_rl_metrics(anchors.metrics(anchor_loss, has_clip), seen, deviation, plan.measured)
        metrics |= scored.metrics | common_metrics(job.device, done, norm, rate, scored.replaced, signal)
        invariants.check_contrast(done, norm, deviation, seen["advantage"])
        if update == 0 or not scored.why_nothing:  # count a failed epoch once, not per update
            log.count(norm, scored.why_nothing)
        log.print_skipped(done, norm, [samples[i].row.id for i in seen["row"].tolist()], seen["misfit"].isfinite())
        stopped = log.early_stop(done, metrics) if ends_epoch else ""
        save_due = due_this_epoch(done, per_epoch, cfg.run.save_steps, steps) or stopped != ""
        due = ends_epoch and (interruption.any_signal(job.all_reduce_max) or save_due)
        if due or step == state.step:
            with timer("invariants"):
                learner.weights.check(done)
        if done == 1 or (ends_epoch and save_due):
            metrics |= anchors.data_loss(job, model)
        if ends_epoch and held_out and (due_this_epoch(done, per_epoch, cfg.evaluation.eval_steps, steps) or stopped):
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
        cfg = configuration.load(args.config, args.overrides, ForwardRlConfig)
        result.exit_code = train(cfg, interruption, run_folder, dry_run=args.dry_run)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
