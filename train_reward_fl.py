"""Reward feedback learning: train a LoRA by back-propagating a reward through the sampler of a video model.

One update, for every sample of the batch:

    1. roll out noise -> latents without a graph, keeping the latents before the active steps    (reward_flow.rollout)
    2. decode, score, and take the loss's gradient with respect to the frames alone    (rewards, autograd)
    3. pull it back through the decoder, chunk by chunk: dL/dx0    (backbones: Decoder.vjp)
    4. replay the active steps from last to first, one graph at a time; LoRA gradients add up    (reward_flow.replay)
    5. with a data anchor: the flow-matching loss on the real clips; alone, supervised fine-tuning    (training.anchors)

    accelerate launch train_reward_fl.py --config configs/tiny_face.yaml [--dry-run] [section.key=value ...]
"""

import rewardfl  # noqa: F401, I001  before torch: it sets how OpenMP's threads wait (rewardfl/machine.py)

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from rewardfl.training.arguments import parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help answers at once

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, reward_flow
from rewardfl.backbones.protocol import Velocity
from rewardfl.config import RewardFlConfig
from rewardfl.memory import offload
from rewardfl.optim import averaged
from rewardfl.rewards import build_terms
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.scoring import score_terms
from rewardfl.training import cli, saving, setup_data, setup_model, setup_rewards
from rewardfl.training.batches import measure_kl_floor
from rewardfl.training.learner import make_average, make_learner, seed_generators
from rewardfl.training.plan import resolve
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.samples import Batch, Sample
from rewardfl.training.setup_processes import connect_processes
from rewardfl.training.setup_run import is_finished, open_log, open_run, resume
from rewardfl.training.setup_summary import print_run_summary
from rewardfl.training.setup_workload import make_workload
from rewardfl.training.signals import Interruption
from rewardfl.training.state import Batching
from rewardfl.training.timer import Timer
from rewardfl.training.update_metrics import common_metrics, reward_fl_metrics


def train(cfg: RewardFlConfig, interruption: Interruption, run_folder: RunFolder, *, dry_run: bool) -> int:
    """Train, and return the exit code: 2 for a dry run that does not fit the GPU, 128 + the number of a signal."""
    # ---------------------------------------------------------------------------------- plan: headers alone are read
    backbone = setup_model.open_model(cfg)
    job = connect_processes(cfg)
    plan = resolve(cfg, backbone, job.world)
    job.reduce_in_backward(plan.backwards_per_update)
    rows = setup_data.scan_rows(cfg, job, backbone, plan.rewards)
    print_run_summary(cfg, plan, backbone, rows, job)
    resume_point = open_run(cfg, None if dry_run else run_folder, job, backbone)
    if dry_run:
        from rewardfl.estimate import report  # only a dry run needs it

        return report.dry_run(make_workload(cfg, plan, backbone, rows.train, job.sharding), job)

    # ---------------------------------------------------------------------------------- data, rewards, resume
    terms = build_terms(plan.rewards, job.device)
    store = setup_data.open_cache(cfg)
    samples = setup_data.find_samples(cfg, rows.train, terms, store, job)
    sizes, per_pass = [sample.size for sample in samples], cfg.train.per_device_train_batch_size
    batching = Batching(plan.clips_at_once, per_pass if len(set(sizes)) > 1 else None)
    state, restored = resume(cfg, plan, resume_point, job, terms, samples, batching=batching)
    if is_finished(cfg, resume_point, steps := plan.count_steps(len(samples)), job):
        return 0
    setup_rewards.check_rewards(cfg, job, terms, samples)

    # ---------------------------------------------------------------------------------- fill the cache
    conditions = setup_data.make_conditions(cfg, backbone, resume_point.base, store)
    negative = setup_data.fill_conditions(cfg, conditions, samples, job)
    setup_data.fill_clip_latents(cfg, conditions, samples, job)
    builder = setup_data.make_batch_builder(cfg, plan, conditions, samples, job)

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    decoder, decoding = backbone.load_decoder(job.device), (cfg.train.decode_caches, cfg.train.kept_chunks)
    graphs = plan.graphs_of, offload.graph_context(cfg.train.active_graphs, job.device)
    model, trained = setup_model.load_experts(cfg, plan, backbone, job)
    setup_model.fill_adapters(model, trained, backbone, plan.init, resume_point, restored)
    learner = make_learner(cfg.train, job, backbone, model, trained, steps, restored)
    policy, optimizer, scheduler = learner.policy, learner.optimizer, learner.scheduler
    micro_batch = partial(job.accumulate, policy)
    average = make_average(cfg.train.ema_decay, learner.parameters, restored) if cfg.train.ema_decay else None
    ascent = cfg.sample.endpoint_length if cfg.sample.gradient_mode == "endpoint" else None  # length of the cotangent
    log = open_log(cfg, job, run_folder, state, restored, steps)
    del restored  # up to three copies of the adapters
    active, accumulation = plan.active, cfg.train.gradient_accumulation_steps
    per_process = accumulation * cfg.train.per_device_train_batch_size  # loss denominator of this process

    def get_velocity(network: nn.Module, batch: Batch) -> Velocity:
        return Velocity(
            backbone=backbone, model=network, conditioning=batch.conditioning, schedule=batch.schedule,
            negative=negative, guidance=cfg.sample.guidance_scale, guidance_gradient=cfg.sample.guidance_gradient,
        )  # fmt: skip

    def replay(
        velocity: Velocity, trajectory: reward_flow.Trajectory, sigmas: Tensor, active: Sequence[int], grad_x0: Tensor
    ) -> reward_flow.Replayed:
        """Accumulate the LoRA gradients of the active steps. The KL to the reference joins the reward here."""
        if ascent:
            return reward_flow.replay_endpoint(
                velocity, trajectory, sigmas, grad_x0, ascent, 1 / per_process, job.backward, micro_batch
            )
        return reward_flow.replay(
            velocity, trajectory, sigmas, active, grad_x0, plan.coupling, reference=velocity.reference,
            kl_weight=cfg.reward.kl_weight / per_process, kl_gradient=cfg.reward.kl_gradient, kl_steps=plan.kl_steps,
            backward=job.backward, micro_batch=micro_batch,
        )  # fmt: skip

    def generate(_: Sequence[Sample], row: int, noise: int = -1, *, base: bool = False) -> tuple[int, Tensor, Tensor]:
        """Return (row, its video (3, F, H, W), its latents), by the base if asked, from the noise of an epoch."""
        batch = builder.batch([(noise, row)])
        velocity = get_velocity(model, batch).reference if base else get_velocity(model, batch)
        x0 = reward_flow.rollout(velocity, batch.x, batch.schedule.sigmas, keep=(), start=batch.start_step).x0
        return batch.rows[0], decoder.decode(x0, batch.conditioning)[0], x0

    def save(done: int, *, last: bool) -> None:
        """Save a checkpoint and sample videos. All processes call it: each may hold parts of the weights."""
        since = (done - 1) // cfg.run.save_steps * cfg.run.save_steps  # the last scheduled save: a resumed run agrees
        score = log.score_for_best(done, since, ["reward/held_out", "reward/mean"])
        content = saving.collect_state(job, learner, average, state, log, done, batching)
        with averaged(average, learner.parameters):
            saving.save(cfg.run, job, backbone, learner, log, content, score, last=last)
            if not interruption.number:  # shutting down: skip the videos
                show = partial(generate, samples)
                log.show_samples(done, saving.sample_videos(cfg.run, cfg.data, backbone, samples, show, job, done))

    (samples,) = setup_data.add_base_motion(cfg, job, store, terms, resume_point, partial(generate, base=True), samples)
    anchors = setup_data.make_anchors(cfg, plan, conditions, samples, job.device)
    floor = measure_kl_floor(job, builder, partial(get_velocity, policy), plan.kl_steps, cfg.model.dtype)

    # ---------------------------------------------------------------------------------- train
    interruption.listen()
    done, stopped = state.step, ""
    progress = tqdm(range(done, steps), initial=done, total=steps, disable=not job.accelerator.is_local_main_process)
    for step in progress:
        seed_generators(cfg.run.seed, step, job.data_rank)
        timer, outcomes, results = Timer(job.device), [], []
        with timer("step"), job.gradient_reduction():
            for micro in range(accumulation):
                with timer("encode"):
                    index = (step * accumulation + micro) * job.data_world + job.data_rank
                    batch = builder.batch(data.one_shape_batch(index, per_pass, sizes, cfg.run.seed))
                    sigmas, velocity = batch.schedule.sigmas, get_velocity(policy, batch)

                # 0. The data anchor: the flow-matching loss on the real clips.
                with timer("anchor"):
                    anchor_loss, has_clip = anchors.accumulate(job, policy, batch, step, 1 / per_process)
                outcome = {
                    "row": torch.tensor(batch.rows, device=job.device),
                    "replaced": torch.tensor(batch.replaced, device=job.device),
                    "anchor_loss": anchor_loss,
                    "has_clip": has_clip,
                    "signal": anchor_loss > 0,  # whether the sample has a gradient
                    "finite": anchor_loss.isfinite(),
                }
                outcomes.append(outcome)
                if plan.supervised:
                    continue

                # 1. Noise -> latents. The latents before the active steps are kept, or these steps' graphs.
                with timer("rollout"), averaged(average if ascent else None, learner.parameters):
                    trajectory = reward_flow.rollout(velocity, batch.x, sigmas, active, batch.start_step, *graphs)

                # 2. loss = -reward + kl_weight * KL, a mean over samples. Here: the gradient of -reward by the frames.
                with timer("decode"):
                    decoded = decoder.decode_with_caches(trajectory.x0, batch.conditioning, *decoding)
                with timer("reward"):
                    video = decoded.video.float().requires_grad_()  # (B, 3, F, H, W) in [-1, 1]
                    scored = score_terms(terms, video, [samples[row].references for row in batch.rows])
                    normalised = [
                        term.weight * (result.output.score - term.mean) / term.std * result.output.valid
                        for term, result in zip(terms, scored, strict=True)
                        if term.weight > 0
                    ]
                    reward = torch.stack(normalised).sum(0)  # (B,)
                    (grad_video,) = torch.autograd.grad(-reward.sum() / per_process, video)
                    norms = per_process * torch.linalg.vector_norm(grad_video.flatten(1), dim=1)  # (B,)
                    reward, scored = reward.detach(), [result.at_rest() for result in scored]
                    del video, normalised  # up to 2 GB

                # 3. Back through the decoder.
                with timer("decode"):
                    grad_x0 = job.broadcast_in_clip(decoder.vjp(trajectory.x0, grad_video, decoded, batch.conditioning))
                del decoded, grad_video  # up to 38 GB

                # 4. Back through the active steps: one forward pass each, unless its graph was kept.
                with timer("replay"):
                    replayed = replay(velocity, trajectory, sigmas, active, grad_x0)
                outcome["signal"] |= grad_x0.flatten(1).any(1) | (replayed.kl > 0)
                outcome["finite"] &= (trajectory.x0 + grad_x0).flatten(1).isfinite().all(1) & replayed.kl.isfinite()
                outcome |= {
                    "reward": reward,
                    "kl": replayed.kl,  # (B,)
                    "cotangent": replayed.cotangents * per_process,  # (B, K) of the sample's own loss
                    "valid": scored[0].output.valid.float().to(job.device),
                    "sample_norm": norms,
                }
                results.append(scored)

        # 5. One AdamW step on the gradients of all samples of all processes.
        with timer("step"):
            gathered = job.gather({name: torch.cat([each[name] for each in outcomes]) for name in outcomes[0]})  # (N,)
            results = job.gather_lists(results if job.first_of_clip else [])
            with timer("optimizer"):
                rate = float(scheduler.get_last_lr()[0])
                norm = job.step(optimizer, learner.parameters, cfg.train.max_grad_norm)
                if average is not None and math.isfinite(norm):
                    average.step(learner.parameters)
                scheduler.step()
        done = step + 1

        # 6. Metrics, checks, checkpoint.
        metrics = anchors.metrics(gathered["anchor_loss"], gathered["has_clip"])
        if not plan.supervised:
            metrics = reward_fl_metrics(metrics, terms, results, gathered, active, cfg.reward.kl_weight)
        metrics |= common_metrics(job.device, done, norm, rate, gathered["replaced"], gathered["signal"]) | floor
        if done in (1, steps) or done % cfg.run.save_steps == 0:
            metrics |= anchors.data_loss(job, model)
        stopped = log.early_stop(done, metrics)
        last = interruption.any_signal(job.all_reduce_max) or done == steps or stopped != ""
        due = last or done % cfg.run.save_steps == 0
        if step == state.step or due:
            with timer("invariants"):
                learner.weights.check(done)
        progress.set_postfix(loss=f"{metrics['actor/loss']:.3f}", score=f"{metrics.get('reward/mean', math.nan):.3f}")
        why = reward_metrics.explain_no_judged_sample(terms, results, by_all=False)
        log.count(norm, why)
        log.write(done, metrics | timer.metrics())
        log.print_skipped(done, norm, [samples[row].row.id for row in gathered["row"].tolist()], gathered["finite"])
        log.print_problems(done, why, reward_metrics.count_problems(terms, results))
        log.stop_if_stuck(done, why)
        if due:
            save(done, last=last)
        if last:
            break
    return saving.close_run(cfg.run, job, interruption, done, stopped)


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with cli.exit_codes() as result, Interruption() as interruption, RunFolder() as run_folder:
        cfg = configuration.load(args.config, args.overrides, RewardFlConfig)
        result.exit_code = train(cfg, interruption, run_folder, dry_run=args.dry_run)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
