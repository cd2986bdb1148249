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

import sys
from argparse import Namespace
from functools import partial

from rewardfl.training.arguments import parse_arguments

if __name__ == "__main__":
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help prints at once

import torch
from torch import Tensor

from rewardfl import forward_rl, group_plan, reward_flow
from rewardfl.config import ForwardRlConfig
from rewardfl.script import open_command
from rewardfl.training import invariants
from rewardfl.training.forward_draws import ForwardDraw, keep_trained, make_draws
from rewardfl.training.run import ForwardRlRun
from rewardfl.training.update_metrics import ForwardOutcome, forward_rl_metrics


def train(run: ForwardRlRun) -> int:
    """Train, and return the exit code: 128 + the number of a signal."""
    plan, job, policy, forward = run.plan, run.job, run.policy, run.plan.group
    training = plan.training
    anchor_share = 1 / (training.forwards_per_update * training.batch)  # a sample's, in the loss of this process
    get_velocity = partial(run.velocity, policy, guidance=1.0)  # an update is without guidance, as in DiffusionNFT

    def policy_loss(draw: ForwardDraw, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective's loss (B,) and AWM's ratio of likelihoods (B,), 1 for the other objectives."""
        advantage = draw.advantage
        ratio, scaled = torch.ones_like(advantage), plan.advantage_scale * advantage
        if forward.objective == "best":  # as data; the advantage is 0 without a best video, else 1
            return advantage * forward_rl.distance(velocity, draw.target), ratio
        if forward.objective == "rvm":
            return forward_rl.rvm_loss(velocity, draw.target, scaled), ratio
        if forward.objective == "dpo":  # towards the better video of a pair, and away from the worse
            return forward_rl.dpo_loss(velocity, draw.target, advantage, draw.logit, forward.beta), ratio
        if draw.old is None or forward.objective not in ("nft", "awm"):
            raise ValueError(f"forward.objective {forward.objective} has no loss here")
        if forward.objective == "nft":
            loss = forward_rl.nft_loss(
                velocity, draw.old, draw.x, draw.x0, draw.sigma, advantage,
                mix=forward.mix, largest=forward.advantage.clip,
            )  # fmt: skip
            return loss, ratio
        log_prob = partial(forward_rl.awm_log_prob, target=draw.target, sigma=draw.sigma, weighting=forward.weighting)
        log_ratio = log_prob(velocity) - log_prob(draw.old)
        return forward_rl.awm_loss(log_ratio, scaled, forward.clip_range), log_ratio.exp()

    for step in run.steps():
        timer = step.timer
        if step.begins_epoch:
            # 1. Roll out this process's videos by the old policy. Only their clean latents are stored.
            rollouts, pending = [], []
            for members, _ in run.plan_epoch(step.epoch):
                if run.is_interrupted():  # nothing changed since the last update
                    break
                if plan.pairs:  # dpo without a reward: the table's clips, and no rollout
                    rollouts.append(run.read_pair(members))
                    continue
                with timer("step"), timer("rollout"), run.rollout_weights():
                    inputs = run.read_inputs(members)
                    velocity = run.velocity(policy, inputs.conditioning, inputs.schedule)
                    x = group_plan.draw_start_noise(members, inputs.shape, job.device)
                    x0 = reward_flow.rollout(velocity, x, inputs.schedule.sigmas, keep=()).x0

                # 2. Decode and score. A slow reward runs while the next videos are rolled out.
                with timer("step"), timer("decode"):
                    video = run.decoder.decode(x0, inputs.conditioning).float()  # (B, 3, F, H, W) in [-1, 1]
                with timer("step"), timer("reward"):
                    pending.append(run.submit_rewards(members, video))
                rollouts.append(inputs.with_latents(x0, run.rollouts_on))
                del video, inputs, x0, velocity  # the updates do not need them
            if run.interruption.number:
                break

            # 3. Advantages: how much better than its group a video is, over all processes.
            scored = run.score_epoch(step, pending, rollouts)
            rollouts, scored = keep_trained(job, plan, rollouts, scored)  # best: one video of each group; dpo: two

        # 4. Noise this update's videos at its moments. The velocities of the other policies: no graph is alive yet.
        weights, rest = run.share_update(step, scored.trained_groups)
        with timer("step"), timer("old_policy"):
            draws, old_velocity = make_draws(
                plan, step.index, [rollouts[n] for n in weights], [scored.advantages[n] for n in weights], get_velocity,
                run.rollout_weights, run.reference_weights, job.device,
            )  # fmt: skip

        # 5. Update: towards the videos of positive advantage, and away from videos of negative.
        outcomes, anchored = [], []
        draw_weights = [weight for weight in weights.values() for _ in range(plan.draws)]
        with timer("step"), timer("replay"), job.gradient_reduction(skip=step.skips):
            for draw, weight in zip(draws, draw_weights, strict=True):
                with job.accumulate(policy):
                    velocity = draw.velocity(draw.x)
                    loss, ratio = policy_loss(draw, velocity)
                    none = torch.zeros_like(loss)  # (B,)
                    from_old = none if draw.old is None else forward_rl.distance(velocity, draw.old)
                    from_base = none if draw.base is None else forward_rl.distance(velocity, draw.base)
                    loss = loss + forward.old_policy.anchor * from_old + forward.base_anchor * from_base
                    job.backward((weight * loss).mean() / len(draws))
                outcome = ForwardOutcome(
                    row=draw.rollout.row.to(job.device), weight=weight, loss=loss.detach(), advantage=draw.advantage,
                    misfit=forward_rl.distance(velocity, draw.target).detach(), from_old=from_old.detach(),
                    from_base=from_base.detach(), ratio=ratio.detach(), reference=draw.reference, logit=draw.logit,
                )  # fmt: skip
                outcomes.append(outcome)
                if draw.is_last:
                    anchored.append(run.anchors.accumulate(job, policy, draw.rollout, step.index, anchor_share))
            for n in rest:
                anchored.append(run.anchors.accumulate(job, policy, rollouts[n], step.index, anchor_share))
        with timer("step"):
            seen = run.gather(outcomes)
            run.update_weights(step)
            with timer("old_policy"):
                deviation = float(job.gather(draws[0].deviation(old_velocity)).mean())
        del draws

        # 6. The old policy follows. Metrics, checks, checkpoint.
        if step.ends_epoch:
            run.old_policy.follow(step.number)
        anchors = run.gather(anchored)
        metrics = forward_rl_metrics(run.anchors.metrics(anchors), seen, deviation, plan) | scored.metrics
        learnable = seen.advantage * (seen.logit < 30)  # dpo's gradient fades to 0 for a pair that is told apart
        invariants.check_contrast(step.number, step.norm, deviation, learnable)
        run.finish_update(
            step, metrics, rows=seen.row, finite=seen.misfit.isfinite(), replaced=scored.replaced,
            signal=(learnable != 0) | (anchors.loss > 0).any(), why_nothing=scored.why_nothing,
        )  # fmt: skip
    return run.close()


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with open_command(args, ForwardRlConfig) as command:
        command.exit_code = train(command.start())
    return command.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
