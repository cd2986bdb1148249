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
    ARGUMENTS = parse_arguments(__doc__)  # before torch is imported: --help prints at once

import torch
from torch import Tensor

from rewardfl import config as configuration
from rewardfl import flow, group_plan, grpo, reward_flow, sde
from rewardfl.backbones import protocol
from rewardfl.config import FlowGrpoConfig
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import cli
from rewardfl.training.run import FlowGrpoRun, read_headers, start
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.samples import Rollout
from rewardfl.training.signals import Interruption
from rewardfl.training.update_metrics import GrpoOutcome, flow_grpo_metrics


def train(run: FlowGrpoRun) -> int:
    """Train, and return the exit code: 128 + the number of a signal."""
    plan, job, policy, geometry = run.plan, run.job, run.policy, run.plan.geometry
    max_std = math.inf if plan.group.max_std is None else plan.group.max_std
    make_kernel = partial(sde.Kernel, plan.group.sde, plan.group.noise_level, max_std=max_std)  # takes the sigmas
    clip_low, clip_high = plan.group.clip_ends
    exact = plan.model.dtype == "float32" and not plan.train.compile_blocks
    tolerance = grpo.ratio_tolerance(clip_low, exact=exact)

    def roll_out_prefix(inputs: Rollout, steps_before: int) -> dict[tuple[int, int], Tensor]:
        """Return {member.start: latents before the window}. Members with equal noise share the prefix."""
        indices = {member.start: i for i, member in enumerate(inputs.members)}
        members, shape = [inputs.members[i] for i in indices.values()], run.latent_shape(inputs.members)
        x = group_plan.draw_start_noise(members, shape, job.device)
        conditioning = protocol.select_rows(inputs.conditioning, [*indices.values()])
        velocity = run.velocity(policy, conditioning, inputs.schedule)
        x = reward_flow.rollout(velocity, x, inputs.schedule.sigmas[: steps_before + 1], keep=()).x0
        return dict(zip(indices, x.split(1), strict=True))

    floor = {}  # the KL that comes only from rounding
    if plan.group.kl_weight != 0 and plan.model.dtype == "bfloat16":
        first = group_plan.Member(row=0, group_id=0, member=0, noise_seed=0, step_seed=0, group_seed=0)
        inputs, seed = run.read_inputs([first]), noise_seed(plan.run.seed, 0, "floor")
        velocity = run.velocity(policy, inputs.conditioning, inputs.schedule)
        x, kernel = draw_noise(run.latent_shape([first]), seed, job.device), make_kernel(inputs.schedule.sigmas)
        floor["policy/kl_floor"] = sde.kl_floor(velocity.reference, x, kernel, plan.window(0))
        job.print(f"note: in bfloat16 this model's KL reads about {floor['policy/kl_floor']:.1e} from rounding alone")

    for step in run.steps():
        timer = step.timer
        if step.begins_epoch:
            # 1. Roll out this process's videos. Only the window's steps are stochastic; they are stored.
            rollouts, pending, plans = [], [], run.plan_epoch(step.epoch)
            prefixes: dict[tuple[int, int], Tensor] = {}
            for members, is_new in zip(plans[job.rank], group_plan.needs_prefix(plans), strict=True):
                if run.is_interrupted():  # nothing changed since the last update
                    break
                with timer("step"):
                    inputs, shape = run.read_inputs(members), run.latent_shape(members)
                    window = plan.window(step.epoch, members[0].group_id)
                    kernel, keep_means = make_kernel(inputs.schedule.sigmas), plan.group.objective == "guard"
                with timer("step"), timer("rollout"):
                    prefixes = roll_out_prefix(inputs, window[0]) if is_new else prefixes
                    x = torch.cat([prefixes[member.start] for member in members])
                    noise = partial(group_plan.draw_step_noise, members, shape, job.device)
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
        outcomes, losses, anchored, part = [], [], [], plan.part(step.update)
        pairs = zip(rollouts[part], scored.advantages[part], strict=True)
        passes = [(rollout, advantage, i) for rollout, advantage in pairs for i in rollout.steps]
        per_update = geometry.forwards_per_update
        with timer("step"), timer("replay"), job.gradient_reduction():
            for rollout, advantage, i in passes:
                kernel, transition = rollout.kernel, rollout.steps[i].to(job.device)
                velocity = run.velocity(policy, rollout.conditioning, rollout.schedule)
                with job.accumulate(policy):
                    reference = velocity.reference if plan.group.kl_weight else None
                    reference_mean = sde.reference_mean(reference, kernel, transition.x, i)  # no graph is alive yet
                    mean, log_prob = sde.score(velocity, transition, i, kernel)
                    ratio = grpo.log_ratio(plan.group.objective, log_prob, mean, transition, kernel.kind).exp()
                    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
                    loss = torch.maximum(-advantage * ratio, -advantage * clipped_ratio).mean()
                    clipped = grpo.clip_mask(ratio, advantage, clip_low, clip_high)  # these have no gradient
                    loss = loss / (abs(kernel.dt(i)) if plan.group.objective == "guard" else 1)  # its gradient has |dt|
                    no_kl = torch.zeros_like(log_prob)  # (B,)
                    kl = no_kl if reference_mean is None else flow.transition_kl(mean, reference_mean, transition.std)
                    loss = loss + plan.group.kl_weight * kl.mean()
                    job.backward(loss / (per_update * len(rollout.steps)))
                losses.append(loss.detach())
                row = rollout.row.to(job.device)
                outcome = GrpoOutcome(
                    row=row, denoising_step=torch.full_like(row, i), advantage=advantage, ratio=ratio.detach(),
                    clipped=clipped, kl=kl.detach(), log_prob=log_prob.detach(), old_log_prob=transition.log_prob,
                )  # fmt: skip
                outcomes.append(outcome)
                if i == max(rollout.steps):
                    share = 1 / (per_update * geometry.batch)  # share of one sample in the loss of this process
                    anchored.append(run.anchors.accumulate(job, policy, rollout, step.index, share))
        with timer("step"):
            seen = run.gather(outcomes)
            if step.begins_epoch:  # nothing was updated since the rollout
                grpo.check_ratio(seen.log_prob, seen.old_log_prob, tolerance, seen.denoising_step)
            run.update_weights(step)

        # 5. Metrics, checks, checkpoint.
        anchors = run.gather(anchored)
        policy_loss = float(job.gather(torch.stack(losses).mean()[None]).mean())
        signal = ((seen.advantage != 0) & ~seen.clipped) | (seen.kl > 0) | (anchors.loss > 0).any()
        metrics = flow_grpo_metrics(run.anchors.metrics(anchors), policy_loss, seen) | scored.metrics | floor
        run.finish_update(
            step, metrics, rows=seen.row, finite=seen.log_prob.isfinite(), replaced=scored.replaced, signal=signal,
            why_nothing=scored.why_nothing,
        )  # fmt: skip
    return run.close()


def main(args: Namespace | None = None) -> int:
    """Run the command line and return the exit code."""
    args = args or parse_arguments(__doc__)
    with cli.exit_codes() as result, Interruption() as interruption, RunFolder() as run_folder:
        cfg = configuration.load(args.config, args.overrides, FlowGrpoConfig)
        headers = read_headers(cfg, None if args.dry_run else run_folder)
        if args.dry_run:
            from rewardfl.estimate import report  # only a dry run needs it

            result.exit_code = report.dry_run(headers.work, headers.job)
        else:
            result.exit_code = train(start(headers, run_folder, interruption))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
