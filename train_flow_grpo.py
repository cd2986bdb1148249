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

import sys
from argparse import Namespace
from functools import partial

from rewardfl.training.arguments import parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help prints at once

import torch

from rewardfl import flow, group_plan, grpo, sde
from rewardfl.config import FlowGrpoConfig
from rewardfl.script import open_command
from rewardfl.training.run import FlowGrpoRun
from rewardfl.training.update_metrics import GrpoOutcome, flow_grpo_metrics


def train(run: FlowGrpoRun) -> int:
    """Train, and return the exit code: 128 + the number of a signal."""
    plan, job, policy, geometry = run.plan, run.job, run.policy, run.plan.geometry
    clip_low, clip_high = plan.group.clip_ends

    for step in run.steps():
        timer = step.timer
        if step.begins_epoch:
            # 1. Roll out this process's videos. Only the window's steps are stochastic; they are stored.
            rollouts, pending = [], []
            for members, is_new in run.plan_epoch(step.epoch):
                if run.is_interrupted():  # nothing changed since the last update
                    break
                with timer("step"):
                    inputs, window = run.read_inputs(members), plan.window(step.epoch, members[0].group_id)
                    kernel, keep_means = plan.kernel(inputs.schedule.sigmas), plan.group.objective == "guard"
                with timer("step"), timer("rollout"):
                    x = run.roll_out_prefix(inputs, window[0], is_new=is_new)  # once for members of equal noise
                    noise = partial(group_plan.draw_step_noise, members, inputs.shape, job.device)
                    velocity = run.velocity(policy, inputs.conditioning, inputs.schedule)
                    x0, steps = sde.rollout(velocity, x, kernel, window, noise, window[0], keep_means=keep_means)

                # 2. Decode and score. A slow reward runs while the next videos are rolled out.
                with timer("step"), timer("decode"):
                    video = run.decoder.decode(x0, inputs.conditioning).float()  # (B, 3, F, H, W) in [-1, 1]
                with timer("step"), timer("reward"):
                    pending.append(run.submit_rewards(members, video))
                rollouts.append(inputs.with_steps(kernel, steps, run.rollouts_on))
                del video, inputs, x0, steps, velocity  # the updates do not need them
            if run.interruption.number:
                break

            # 3. Advantages: how much better than its group a video is, over all processes.
            scored = run.score_epoch(step, pending, rollouts)

        # 4. Update: score the window's steps of this part of the rollouts again, with a graph.
        outcomes, losses, anchored = [], [], []
        weights, rest = run.share_update(step, scored.trained_groups)
        passes = [(rollouts[n], scored.advantages[n], weights[n], i) for n in weights for i in rollouts[n].steps]
        anchor_share = 1 / (geometry.forwards_per_update * geometry.batch)  # a sample's, in the loss of this process
        with timer("step"), timer("replay"), job.gradient_reduction(skip=step.skips):
            for rollout, advantage, weight, i in passes:
                kernel, transition = rollout.kernel, rollout.steps[i].to(job.device)
                velocity = run.velocity(policy, rollout.conditioning, rollout.schedule)
                with job.accumulate(policy):
                    reference = velocity.reference if plan.group.kl_weight else None
                    reference_mean = sde.reference_mean(reference, kernel, transition.x, i)  # no graph is alive yet
                    mean, log_prob = sde.score(velocity, transition, i, kernel)
                    ratio = grpo.log_ratio(plan.group.objective, log_prob, mean, transition, kernel.kind).exp()
                    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
                    loss = (weight * torch.maximum(-advantage * ratio, -advantage * clipped_ratio)).mean()
                    clipped = grpo.clip_mask(ratio, advantage, clip_low, clip_high)  # these have no gradient
                    loss = loss / (abs(kernel.dt(i)) if plan.group.objective == "guard" else 1)  # its gradient has |dt|
                    no_kl = torch.zeros_like(log_prob)  # (B,)
                    kl = no_kl if reference_mean is None else flow.transition_kl(mean, reference_mean, transition.std)
                    loss = loss + plan.group.kl_weight * (weight * kl).mean()
                    job.backward(loss / len(passes))
                losses.append(loss.detach())
                row = rollout.row.to(job.device)
                outcome = GrpoOutcome(
                    row=row, weight=weight, denoising_step=torch.full_like(row, i), advantage=advantage,
                    ratio=ratio.detach(), clipped=clipped, kl=kl.detach(), log_prob=log_prob.detach(),
                    old_log_prob=transition.log_prob,
                )  # fmt: skip
                outcomes.append(outcome)
                if i == max(rollout.steps):
                    anchored.append(run.anchors.accumulate(job, policy, rollout, step.index, anchor_share))
            for n in rest:
                anchored.append(run.anchors.accumulate(job, policy, rollouts[n], step.index, anchor_share))
        with timer("step"):
            seen = run.gather(outcomes)
            if step.begins_epoch:  # nothing was updated since the rollout
                grpo.check_ratio(seen.log_prob, seen.old_log_prob, plan.ratio_tolerance, seen.denoising_step)
            run.update_weights(step)

        # 5. Metrics, checks, checkpoint.
        anchors = run.gather(anchored)
        policy_loss = float(job.gather(torch.stack(losses).mean()[None]).mean())
        signal = ((seen.advantage != 0) & ~seen.clipped) | (seen.weight * seen.kl > 0) | (anchors.loss > 0).any()
        metrics = flow_grpo_metrics(run.anchors.metrics(anchors), policy_loss, seen) | scored.metrics
        run.finish_update(
            step, metrics, rows=seen.row, finite=seen.log_prob.isfinite(), replaced=scored.replaced, signal=signal,
            why_nothing=scored.why_nothing,
        )  # fmt: skip
    return run.close()


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with open_command(args, FlowGrpoConfig) as command:
        command.exit_code = train(command.start())
    return command.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
