"""Reward feedback learning: train a LoRA by back-propagating a reward through the sampler of a video model.

One update, for every sample of the batch:

    1. roll out noise -> latents without a graph, keeping the latents before the active steps    (reward_flow.rollout)
    2. decode, score, and take the loss's gradient with respect to the frames alone    (rewards, autograd)
    3. pull it back through the decoder, chunk by chunk: dL/dx0    (backbones: Decoder.vjp)
    4. replay the active steps from last to first, one graph at a time; LoRA gradients add up    (reward_flow.replay)
       or move x0 up the reward, decode and score each move, and fit the policy to those that gain    (verdict)
    5. with a data anchor: the flow-matching loss on the real clips; alone, supervised fine-tuning    (training.anchors)

    accelerate launch train_reward_fl.py --config configs/tiny_face.yaml [--dry-run] [section.key=value ...]
"""

import rewardfl  # noqa: F401, I001  before torch: it sets how OpenMP's threads wait (rewardfl/machine.py)

import sys
from argparse import Namespace
from functools import partial

from rewardfl.training.arguments import parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help prints at once

import torch

from rewardfl import reward_flow
from rewardfl.config import RewardFlConfig
from rewardfl.script import open_command
from rewardfl.training.run import RewardFlRun
from rewardfl.training.update_metrics import Outcome, Rewarded, reward_fl_metrics


def train(run: RewardFlRun) -> int:
    """Train, and return the exit code: 128 + the number of a signal."""
    plan, job, policy, terms, decoder, active = run.plan, run.job, run.policy, run.terms, run.decoder, run.plan.active
    accumulation = plan.train.gradient_accumulation_steps
    per_process = accumulation * plan.train.per_device_train_batch_size  # loss denominator of this process
    micro_batch, verifies = partial(job.accumulate, policy), plan.sample.verdict is not None
    ascends = plan.sample.gradient_mode == "endpoint" and not verifies
    # The LoRA gradients of the active steps. The KL to the reference joins the reward here.
    replay = partial(
        reward_flow.replay, coupling=plan.coupling, kl_weight=plan.reward.kl_weight / per_process,
        kl_gradient=plan.reward.kl_gradient, kl_steps=plan.kl_steps, backward=job.backward, micro_batch=micro_batch,
    )  # fmt: skip
    ascend = partial(
        reward_flow.replay_endpoint, length=plan.sample.lengths[0], share=1 / per_process, backward=job.backward,
        micro_batch=micro_batch,
    )  # fmt: skip
    replayed_steps = () if verifies else active

    for step in run.steps():
        timer, outcomes, anchored, rewarded, results, waiting = step.timer, [], [], [], [], []
        with timer("step"), job.gradient_reduction():
            for micro in range(accumulation):
                with timer("encode"):
                    batch = run.read_batch(step, micro)
                    sigmas, velocity = batch.schedule.sigmas, run.velocity(policy, batch.conditioning, batch.schedule)

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
                with timer("rollout"), run.rollout_weights():
                    trajectory = reward_flow.rollout(velocity, batch.x, sigmas, active, batch.start_step, run.graphs)

                # 2. loss = -reward + kl_weight * KL, a mean over samples. Here: the gradient of -reward by the frames.
                with timer("decode"):
                    decoded = decoder.decode_with_caches(
                        trajectory.x0, batch.conditioning, plan.memory.decode_caches, plan.memory.kept_chunks
                    )
                with timer("reward"):
                    video = decoded.video.float().requires_grad_()  # (B, 3, F, H, W) in [-1, 1]
                    scored = run.score(batch.rows, video)
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
                    replayed = (
                        ascend(velocity, trajectory, sigmas, grad_x0)
                        if ascends
                        else replay(velocity, trajectory, sigmas, replayed_steps, grad_x0, reference=velocity.reference)
                    )
                outcome.signal |= replayed.cotangents.any(1) | (replayed.kl > 0)
                outcome.finite &= (trajectory.x0 + grad_x0).flatten(1).isfinite().all(1) & replayed.kl.isfinite()
                cotangents = replayed.cotangents * per_process  # (B, K) of the sample's own loss
                valid = scored[0].output.valid.float().to(job.device)
                rewarded.append(
                    Rewarded(reward=reward, kl=replayed.kl, cotangent=cotangents, valid=valid, sample_norm=norms)
                )
                results.append(scored)
                if verifies:
                    waiting.append((outcome, batch, velocity, trajectory, grad_x0))

            # With a verdict: move x0 up the reward by several lengths, decode and score x0 and each move, choose one.
            moves = []
            for outcome, batch, velocity, trajectory, grad_x0 in waiting:
                with timer("verdict"):
                    shifts, rises = run.verdict.moves(trajectory.x0, grad_x0, 1 / per_process)  # (1 + K, B, ...)
                    scores = torch.stack([run.verdict.score(batch, trajectory.x0 + shift) for shift in shifts])
                    move = run.verdict.choose(batch, velocity, trajectory, shifts, scores, rises)
                outcome.signal |= move.choice.accepted
                moves.append(move)

            # One regression for all samples: towards x0 + shift, and of the others towards x0.
            if moves:
                choices = run.gather([move.choice for move in moves])
                step.rests = run.verdict.rests(choices)
            for move in moves:
                with timer("replay"), micro_batch():
                    weights = run.verdict.loss_weights(move.choice, choices)  # (B,)
                    error = (move.change() - move.shift).square().flatten(1).mean(1)
                    job.backward(job.data_world * (weights * error).sum())

        # 5. One AdamW step on the gradients of all samples of all processes.
        with timer("step"):
            gathered = run.gather(outcomes)
            update_results = run.gather_results(results)
            run.update_weights(step)
            verdict_metrics = run.verdict.finish(moves, choices) if moves else {}

        # 6. Metrics, checks, checkpoint.
        metrics = run.anchors.metrics(run.gather(anchored)) | verdict_metrics
        if not plan.supervised:
            weight, samples = plan.reward.kl_weight, run.gather(rewarded)
            metrics |= reward_fl_metrics(metrics, terms, update_results.by_pass, samples, replayed_steps, weight)
        run.finish_update(
            step, metrics, rows=gathered.row, finite=gathered.finite, replaced=gathered.replaced,
            signal=gathered.signal, problems=update_results.problems, why_nothing=update_results.why_nothing,
        )  # fmt: skip
    return run.close()


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with open_command(args, RewardFlConfig) as command:
        command.exit_code = train(command.start())
    return command.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
