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

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from rewardfl.training.arguments import parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help prints at once

import torch
from torch import Tensor

from rewardfl import config as configuration
from rewardfl import data, reward_flow
from rewardfl.backbones.protocol import Velocity
from rewardfl.config import RewardFlConfig
from rewardfl.memory import offload
from rewardfl.optim import averaged
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.scoring import score_terms
from rewardfl.training import cli
from rewardfl.training.batches import measure_kl_floor
from rewardfl.training.run import RewardFlRun, read_headers, start
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.samples import Batch
from rewardfl.training.signals import Interruption
from rewardfl.training.update_metrics import Outcome, Rewarded, reward_fl_metrics


def train(run: RewardFlRun) -> int:
    """Train, and return the exit code: 128 + the number of a signal."""
    plan, job, policy, average = run.plan, run.job, run.policy, run.average
    terms, samples, decoder, builder = run.terms, run.samples, run.decoder, run.sampler.builder
    active, per_pass = plan.active, plan.train.per_device_train_batch_size
    accumulation = plan.train.gradient_accumulation_steps
    per_process = accumulation * per_pass  # loss denominator of this process
    ascends = plan.sample.gradient_mode == "endpoint"
    graph_context = offload.graph_context(plan.memory.active_graphs, job.device)
    sizes, micro_batch = [sample.size for sample in samples], partial(job.accumulate, policy)

    def get_velocity(batch: Batch) -> Velocity:
        return run.velocity(policy, batch.conditioning, batch.schedule)

    def replay(
        velocity: Velocity, trajectory: reward_flow.Trajectory, sigmas: Tensor, active: Sequence[int], grad_x0: Tensor
    ) -> reward_flow.Replayed:
        """Accumulate the LoRA gradients of the active steps. The KL to the reference joins the reward here."""
        if ascends:
            length = plan.sample.endpoint_length
            return reward_flow.replay_endpoint(
                velocity, trajectory, sigmas, grad_x0, length, 1 / per_process, job.backward, micro_batch
            )
        return reward_flow.replay(
            velocity, trajectory, sigmas, active, grad_x0, plan.coupling, reference=velocity.reference,
            kl_weight=plan.reward.kl_weight / per_process, kl_gradient=plan.reward.kl_gradient, kl_steps=plan.kl_steps,
            backward=job.backward, micro_batch=micro_batch,
        )  # fmt: skip

    floor = measure_kl_floor(job, builder, get_velocity, plan.kl_steps, plan.model.dtype)
    for step in run.steps():
        timer, outcomes, anchored, rewarded, results = step.timer, [], [], [], []
        with timer("step"), job.gradient_reduction():
            for micro in range(accumulation):
                with timer("encode"):
                    index = (step.index * accumulation + micro) * job.data_world + job.data_rank
                    batch = builder.batch(data.one_shape_batch(index, per_pass, sizes, plan.run.seed))
                    sigmas, velocity = batch.schedule.sigmas, get_velocity(batch)

                # 0. The data anchor: the flow-matching loss on the real clips.
                with timer("anchor"):
                    anchor = run.anchors.accumulate(job, policy, batch, step.index, 1 / per_process)
                outcome = Outcome(
                    row=torch.tensor(batch.rows, device=job.device), signal=anchor.loss > 0,
                    replaced=torch.tensor(batch.replaced, device=job.device), finite=anchor.loss.isfinite(),
                )  # fmt: skip
                outcomes.append(outcome)
                anchored.append(anchor)
                if plan.supervised:
                    continue

                # 1. Noise -> latents. The latents before the active steps are kept, or these steps' graphs.
                with timer("rollout"), averaged(average if ascends else None, run.learner.parameters):
                    trajectory = reward_flow.rollout(
                        velocity, batch.x, sigmas, active, batch.start_step, plan.graphs_of, graph_context
                    )

                # 2. loss = -reward + kl_weight * KL, a mean over samples. Here: the gradient of -reward by the frames.
                with timer("decode"):
                    decoded = decoder.decode_with_caches(
                        trajectory.x0, batch.conditioning, plan.memory.decode_caches, plan.memory.kept_chunks
                    )
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
                outcome.signal |= grad_x0.flatten(1).any(1) | (replayed.kl > 0)
                outcome.finite &= (trajectory.x0 + grad_x0).flatten(1).isfinite().all(1) & replayed.kl.isfinite()
                cotangents = replayed.cotangents * per_process  # (B, K) of the sample's own loss
                valid = scored[0].output.valid.float().to(job.device)
                rewarded.append(
                    Rewarded(reward=reward, kl=replayed.kl, cotangent=cotangents, valid=valid, sample_norm=norms)
                )
                results.append(scored)

        # 5. One AdamW step on the gradients of all samples of all processes.
        with timer("step"):
            gathered = run.gather(outcomes)
            results = job.gather_lists(results if job.first_of_clip else [])
            run.update_weights(step)

        # 6. Metrics, checks, checkpoint.
        metrics = run.anchors.metrics(run.gather(anchored)) | floor
        if not plan.supervised:
            metrics |= reward_fl_metrics(metrics, terms, results, run.gather(rewarded), active, plan.reward.kl_weight)
        run.finish_update(
            step, metrics, rows=gathered.row, finite=gathered.finite, replaced=gathered.replaced,
            signal=gathered.signal, problems=reward_metrics.count_problems(terms, results),
            why_nothing=reward_metrics.explain_no_judged_sample(terms, results, by_all=False),
        )  # fmt: skip
    return run.close()


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with cli.exit_codes() as result, Interruption() as interruption, RunFolder() as run_folder:
        cfg = configuration.load(args.config, args.overrides, RewardFlConfig)
        headers = read_headers(cfg, None if args.dry_run else run_folder)
        if args.dry_run:
            from rewardfl.estimate import report  # only a dry run needs it

            result.exit_code = report.dry_run(headers.work, headers.job)
        else:
            result.exit_code = train(start(headers, run_folder, interruption))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
