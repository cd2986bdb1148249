"""Reward feedback learning: train a LoRA by back-propagating a reward through the sampler of a video model.

One update, for every sample of the batch:

    1. roll out noise -> latents without a graph, keeping the latents before the active steps    (reward_flow.rollout)
    2. decode, score, and take the loss's gradient with respect to the frames alone    (rewards, autograd)
    3. pull it back through the decoder, chunk by chunk: dL/dx0    (backbones: Decoder.vjp)
    4. replay the active steps from last to first, one graph at a time; LoRA gradients add up    (reward_flow.replay)
    5. with a data anchor: the flow-matching loss on the real clips; alone, supervised fine-tuning    (run.anchors)

    accelerate launch train_reward_fl.py --config configs/tiny_face.yaml [--dry-run] [section.key=value ...]
"""

import rewardfl  # noqa: F401, I001  before torch: it sets how OpenMP's threads wait (rewardfl/machine.py)

import math
import sys
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, reward_flow
from rewardfl.memory import offload
from rewardfl.backbones.protocol import Velocity
from rewardfl.config import RewardFlConfig
from rewardfl.optim import averaged
from rewardfl.rewards import build_terms
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.scoring import score_terms
from rewardfl.run import checks, invariants, prepare, start, work
from rewardfl.run.checkpoint import RunFolder
from rewardfl.run.monitor import Timer, peak_memory_gb
from rewardfl.run.signals import Interruption


def train(cfg: RewardFlConfig, dry_run: bool, interruption: Interruption, run_folder: RunFolder) -> int:
    """Train; the process's exit code: 2 for a dry run that does not fit the GPU that is there, 128 + a signal's."""
    # ---------------------------------------------------------------------------------- what will be done, checked
    backbone = start.open_model(cfg)  # headers alone: what does not fit is refused before anything loads
    active, coupling = configuration.active_steps(cfg), configuration.resolved_coupling(cfg)
    work.check_active_experts(cfg, backbone)
    wanted = start.find_rewards(cfg, backbone)
    job = start.open_job(cfg)
    accumulation, batch_size = cfg.train.gradient_accumulation_steps, cfg.train.per_device_train_batch_size
    supervised = configuration.is_supervised(cfg)
    job.backwards = accumulation * ((0 if supervised else len(active)) + work.anchor_draws(cfg))  # the last one reduces
    per_process = accumulation * batch_size  # what a loss is divided by here; the processes are averaged over
    global_batch = checks.check_batch(cfg, job.world)
    checks.check_graphs(cfg, job.world)
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
    store = start.open_cache(cfg)
    samples = start.find_samples(cfg, rows.train, terms, store, job)
    sizes = [sample.size for sample in samples]  # one forward pass takes clips of one
    order = data.Order(sizes, batch_size, accumulation, job.world, cfg.run.seed)
    batches = {"global_batch": global_batch, "one_shape_batch": batch_size if len(set(sizes)) > 1 else None}
    resumed = start.resume(cfg, opened, job, backbone, terms, samples, batches=batches)
    steps = work.steps_of_run(cfg, len(samples), job.world)
    if start.is_finished(cfg, opened, steps, job):
        return 0
    start.try_rewards(cfg, job, terms, samples)

    # ---------------------------------------------------------------------------------- what the cache lacks
    conditions = start.conditions_of(cfg, backbone, opened.base, store)
    negative = start.fill_conditions(cfg, conditions, samples, job)
    anchors = start.make_anchors(cfg, backbone, conditions, samples, job)
    starts = start.make_starts(cfg, backbone, conditions, samples, job)

    # ---------------------------------------------------------------------------------- model, adapter, optimizer
    decoder = backbone.load_decoder(job.device)
    with_graph = offload.InputsOnHost(job.device).whole_graph if cfg.train.active_graphs == "keep_on_host" else None
    model, trained = start.load_experts(cfg, backbone, job, conditions, samples)
    start.fill_adapters(model, trained, backbone, resumed)
    learner = start.make_learner(cfg, job, backbone, model, trained, steps, resumed)
    policy, optimizer, scheduler = learner.policy, learner.optimizer, learner.scheduler
    average = start.make_average(cfg.train.ema_decay, learner.parameters, resumed) if cfg.train.ema_decay else None
    ascent = cfg.sample.endpoint_length if cfg.sample.gradient_mode == "endpoint" else None  # how far up the reward
    log = start.open_log(cfg, job, run_folder, resumed, steps)

    def velocity_of(network: nn.Module, batch: prepare.Batch) -> Velocity:
        guidance, both = cfg.sample.guidance_scale, cfg.sample.guidance_gradient == "both"
        return Velocity(backbone, network, batch.conditioning, batch.schedule, negative, guidance, both)

    def generate(row: int) -> tuple[int, Tensor]:
        """(row, its video (3, F, H, W)) as the weights are now, always from the same noise."""
        batch = starts.batch([(-1, row)])
        velocity, sigmas = velocity_of(model, batch), batch.schedule.sigmas
        x0 = reward_flow.rollout(velocity, batch.x, sigmas, keep=(), start=batch.start).x0
        return batch.rows[0], decoder.decode(x0, batch.conditioning)[0]

    def save(done: int, last: bool) -> None:
        """A checkpoint and sample videos. On all processes, which may hold parts of the weights and moments."""
        # `best` is by the steps since the last save that the configuration asks for: a resumed run finds the same
        since = (done - 1) // cfg.run.save_steps * cfg.run.save_steps
        judged = log.score_for_best(done, since, ["reward/held_out", "reward/mean"])
        state = start.state_of(job, learner, resumed, log, done) | batches
        if average is not None:
            state |= start.state_of_average(average, learner.parameters)
        with averaged(average, learner.parameters):
            start.save(cfg, job, backbone, learner, log, state, judged, last)
            if not interruption.number:  # who sent a signal may not wait for videos
                log.show_samples(done, start.sample_videos(cfg, samples, generate, job, done))

    floor = start.find_floor(job, starts, partial(velocity_of, policy), active, cfg.reward.kl_weight, cfg.model.dtype)

    # ---------------------------------------------------------------------------------- Go!
    interruption.listen()
    done, stopped = resumed.step, ""
    progress = tqdm(range(done, steps), initial=done, total=steps, disable=not job.accelerator.is_local_main_process)
    for step in progress:
        start.seed_generators(cfg.run.seed, step, job.rank)
        timer, seen, judgements = Timer(job.device), [], []
        with timer("step"), job.one_update():
            for micro in range(accumulation):
                with timer("encode"):
                    batch = starts.batch(order.micro_batch(step, micro, job.rank))
                    sigmas = batch.schedule.sigmas
                    velocity = velocity_of(policy, batch)

                # 0. The data anchor: towards the real clips, whatever a reward says of videos.
                with timer("anchor"):
                    anchor_loss, has_clip = anchors.accumulate(job, policy, batch, step, 1 / per_process)
                outcome = {
                    "row": torch.tensor(batch.rows, device=job.device),
                    "replaced": torch.tensor(batch.replaced, device=job.device),
                    "anchor_loss": anchor_loss,
                    "has_clip": has_clip,
                    "signal": anchor_loss > 0,  # whether the sample has something to teach
                    "finite": anchor_loss.isfinite(),
                }
                seen.append(outcome)
                if supervised:
                    continue

                # 1. Noise -> latents; of the active steps the latents before them are kept, or their graphs.
                with timer("rollout"), averaged(average if ascent else None, learner.parameters):
                    trajectory = reward_flow.rollout(velocity, batch.x, sigmas, active, batch.start, with_graph)

                # 2. loss = -reward + kl_weight * KL, the mean over samples; here the gradient of -reward by the frames.
                with timer("decode"):
                    decoded = decoder.decode_with_caches(trajectory.x0, cfg.train.decode_caches, batch.conditioning)
                with timer("reward"):
                    video = decoded.video.float().requires_grad_()  # (B, 3, F, H, W) in [-1, 1]
                    judged = score_terms(terms, video, [samples[row].references for row in batch.rows])
                    normalised = [
                        term.weight * (one.output.score - term.mean) / term.std * one.output.valid
                        for term, one in zip(terms, judged, strict=True)
                        if term.weight > 0
                    ]
                    reward = torch.stack(normalised).sum(0)  # (B,)
                    (grad_video,) = torch.autograd.grad(-reward.sum() / per_process, video)
                    grad_video, norms = reward_flow.limited(grad_video, cfg.train.max_sample_norm, per_process)
                    reward, judged = reward.detach(), [one.at_rest() for one in judged]
                    del video, normalised  # up to 2 GB that nothing has a use for

                # 3. Back through the decoder.
                with timer("decode"):
                    grad_x0 = decoder.vjp(trajectory.x0, grad_video, decoded, batch.conditioning)
                del decoded, grad_video  # up to 38 GB that replay has no use for

                # 4. Back through the active steps, each forward pass anew unless its graph was kept; here the KL joins.
                with timer("replay"):
                    per_step = partial(job.micro_batch, policy)
                    inputs = (velocity, trajectory, sigmas, active, grad_x0, coupling)
                    replayed = (
                        reward_flow.replay_endpoint(
                            velocity, trajectory, sigmas, grad_x0, ascent, 1 / per_process, job.backward, per_step
                        )
                        if ascent
                        else reward_flow.replay(
                            *inputs,
                            reference=velocity.reference,
                            kl_weight=cfg.reward.kl_weight / per_process,
                            kl_gradient=cfg.reward.kl_gradient,
                            backward=job.backward,
                            micro_batch=per_step,
                        )
                    )
                    kl = replayed.kl  # (B,)
                outcome["signal"] |= grad_x0.flatten(1).any(1) | (kl > 0)
                outcome["finite"] &= (trajectory.x0 + grad_x0).flatten(1).isfinite().all(1) & kl.isfinite()
                outcome |= {
                    "reward": reward,
                    "kl": kl,
                    "cotangent": replayed.cotangents * per_process,  # (B, K) of the sample's own loss
                    "valid": judged[0].output.valid.float().to(job.device),
                    "sample_norm": norms,
                }
                judgements.append(judged)

        # 5. One step of AdamW on the gradients of all samples of all processes.
        with timer("step"):
            seen = job.gather({name: torch.cat([one[name] for one in seen]) for name in seen[0]})  # (samples,) each
            judgements = job.gather_lists(judgements)  # objects: rewards name their parts as they like
            with timer("optimizer"):
                rate = float(scheduler.get_last_lr()[0])
                norm = job.step(optimizer, learner.parameters, cfg.train.max_grad_norm)
                if average is not None and math.isfinite(norm):
                    average.step(learner.parameters)
                scheduler.step()
        done = step + 1
        metrics = anchors.metrics(seen["anchor_loss"], seen["has_clip"])
        if not supervised:
            metrics["actor/loss"] += float(cfg.reward.kl_weight * seen["kl"].mean() - seen["reward"].mean())
            metrics |= {"actor/kl_loss": float(seen["kl"].mean()), "reward/valid_fraction": float(seen["valid"].mean())}
            metrics["reward/failed"] = reward_metrics.failed_fraction(judgements)
            metrics["train/sample_norm"] = float(seen["sample_norm"].median())
            metrics |= reward_metrics.means(terms, judgements, "reward", metrics, score="mean")
            sizes = seen["cotangent"].mean(0).tolist()
            metrics |= {f"grad_norm/step_{i}": size for i, size in zip(active, sizes, strict=True)}
        metrics |= {"grad_norm": norm, "lr": rate, "data/replaced": float(seen["replaced"].sum())}
        metrics |= {"train/no_signal": invariants.no_signal(done, norm, seen["signal"])}
        if done in (1, steps) or done % cfg.run.save_steps == 0:
            metrics |= anchors.data_loss(job, model)
        stopped = log.early_stop(done, metrics)
        last = interruption.agreed(job.largest) or done == steps or stopped != ""
        due = last or done % cfg.run.save_steps == 0
        if step == resumed.step or due:
            with timer("invariants"):
                learner.watched.check(done)
        metrics |= {"memory/peak_gb": peak_memory_gb(job.device)} | floor
        metrics |= {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
        progress.set_postfix(loss=f"{metrics['actor/loss']:.3f}", score=f"{metrics.get('reward/mean', math.nan):.3f}")

        why = reward_metrics.why_nothing_was_judged(terms, judgements)
        log.count(norm, why)
        log.write(done, metrics)
        log.say_skipped(done, norm, [samples[row].row.id for row in seen["row"].tolist()], seen["finite"])
        if why:
            log.say(done, f"not one sample could be judged ({log.skipped_in_a_row} in a row); {why}")
        problems = reward_metrics.problems(terms, judgements)
        log.say_once(done, [f"{one}; it is only measured, so the run goes on (reward/failed)" for one in problems])
        log.stop_if_stuck(done, why)
        if due:
            save(done, last)
        if last:
            break
    return start.close_run(cfg, job, interruption, done, stopped)


def main() -> int:
    """The command line; the exit code."""
    return start.main(__doc__, RewardFlConfig, train)


if __name__ == "__main__":
    sys.exit(main())
