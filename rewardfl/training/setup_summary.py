"""Print what a run will do: batch arithmetic, sigma table, rewards, notes."""

import math
from collections.abc import Sequence

from rewardfl import flow
from rewardfl.backbones.protocol import Backbone, Schedule
from rewardfl.config.schema import GrpoConfig
from rewardfl.data import Row
from rewardfl.training.distributed import Distributed
from rewardfl.training.plan import AnyPlan, FlowGrpoPlan, ForwardRlPlan, GroupPlan, RewardFlPlan, largest_size
from rewardfl.training.samples import Rows


def print_run_summary(settings: str, plan: AnyPlan, backbone: Backbone, rows: Rows, job: Distributed) -> None:
    """Print notes, the configuration, the rewards, the arithmetic and the sigmas. settings: of config.dump."""
    specs, steps = plan.rewards, plan.count_steps(len(rows.train))
    trained = [f"{spec.weight:g} x {spec.label} ({spec.name})" for spec, _ in specs if spec.weight > 0]
    if isinstance(plan, GroupPlan):
        trained += [f"{weight:g} x {part}" for part, weight in plan.part_weights.items()]
    trained += [f"{plan.anchor.weight:g} x the data anchor"] if plan.anchor.weight else []
    measured = [f"{spec.label} ({spec.name})" for spec, _ in specs if spec.weight == 0]
    rewards = f"trained on {' + '.join(trained)}; only measured: {', '.join(measured) or 'nothing'}"
    if plan.supervised:
        rewards = "supervised fine-tuning: trained on the clips alone, without rollouts; no reward is computed"
    if plan.pairs:
        rewards = f"trained on the table's pairs, without rollouts; only measured: {', '.join(measured) or 'nothing'}"
    notes = [f"note: {note}" for note in backbone.differences(plan.sample.shift, plan.sample.guidance_scale)]
    if plan.train.warmup_steps > steps:
        notes.append(f"note: train.warmup_steps {plan.train.warmup_steps} do not end within the run's {steps} steps")
    arithmetic = overview(plan, backbone, rows.train)
    for line in [*notes, *rows.messages, settings, rewards, arithmetic]:
        job.print(line)


def overview(plan: AnyPlan, backbone: Backbone, rows: Sequence[Row] | None) -> str:
    """Return the arithmetic of batches, steps and gradients, and the sigmas of the largest clips.

    rows: the clips to train on; None where they are not known.
    """
    size = largest_size(plan.data, [row.size for row in rows or ()])
    schedule = plan.schedule(backbone.latent_shape(*size, plan.data.num_frames))
    clips, anchor = None if rows is None else len(rows), plan.anchor
    steps = plan.train.steps if clips is None else plan.count_steps(clips)
    if isinstance(plan, FlowGrpoPlan):
        lines = _group_arithmetic(plan, clips, steps)
        table = sigma_table(schedule, plan.active, plan.group)
    elif isinstance(plan, ForwardRlPlan):
        lines = _forward_arithmetic(plan, clips, steps)
        table = sigma_table(schedule, plan.active)
    else:
        lines = _batch_arithmetic(plan, clips, steps)
        table = sigma_table(schedule, plan.active, graphs_of=plan.graphs_of)
    if anchor.weight:
        moments = "any moment of" if anchor.sigmas == "trained_range" else "in turn"
        target = "the velocity without the adapter" if anchor.target == "reference" else "the clips"
        lines.append(
            f"data anchor: weight {anchor.weight:g}, {anchor.draws} draws per sample, {moments} steps "
            f"{list(plan.anchor_steps)}, fitted to {target}"
        )
    return "\n".join([*lines, "", *table, ""])


def _batch_arithmetic(plan: RewardFlPlan, clips: int | None, steps: int | None) -> list[str]:
    train, sample, at_once = plan.train, plan.sample, plan.clips_at_once
    split = f" / {train.context_parallel} of a clip" if train.context_parallel > 1 else ""
    lines = [
        f"batch: {train.per_device_train_batch_size} per process x {train.gradient_accumulation_steps} accumulation x "
        f"{plan.processes} processes{split} = {at_once} clips per step",
        f"gradient: {sample.gradient_mode} through steps {list(plan.active)}, coupling "
        f"{plan.coupling:g}, KL weight {plan.reward.kl_weight:g} ({plan.reward.kl_gradient}) at "
        f"{list(plan.kl_steps)}",
        f"untrained expert: {plan.memory.untrained}; decoder caches: {plan.memory.decode_caches}",
    ]
    if sample.verdict is not None:
        lengths, guards = len(sample.lengths), ", ".join(sample.verdict.pareto) or "no term"
        lines.append(
            f"verdict: {lengths} moves of each video are decoded and scored, and the video again; tau "
            f"{sample.verdict.tau:g}, keep {sample.verdict.keep:g}; {guards} may not fall"
        )
    if plan.supervised:
        lines = lines[:1]
    if plan.forwards_per_velocity > 1:
        lines.append(f"guidance: {sample.guidance_scale:g}, gradient of {sample.guidance_gradient}")
    if clips is not None and steps is not None:
        samples = steps * at_once
        lines.insert(1, f"steps: {steps} = {samples} samples = {samples / clips:.2f} x {clips} rows")
    return lines


def _group_arithmetic(plan: FlowGrpoPlan, clips: int | None, steps: int | None) -> list[str]:
    grpo, drawn = plan.group, plan.draw_windows(steps)
    window = f"{list(plan.active)}"
    if grpo.window.rule != "list":
        owner = "by each group" if grpo.window.per_group else "in each epoch"
        first = ", ".join(str(list(window)) for window in drawn[:3])
        window = f"{max(map(len, drawn))} of {window}, drawn {owner}: {first}, ..."
    sde = f"SDE: {grpo.sde}, noise level {grpo.noise_level:g}, window {window}"
    return [*_epoch_lines(plan), sde, *_run_lines(plan, steps, clips)]


def _forward_arithmetic(plan: ForwardRlPlan, clips: int | None, steps: int | None) -> list[str]:
    forward = plan.group
    moments = "any sigma of" if plan.whole_range else "in turn"
    chosen = {"best": "group's best sample and of no other", "dpo": "group's best and worst sample and of no other"}
    sample, factor = chosen.get(forward.objective, "sample"), f"advantage x {plan.advantage_scale:g}"
    if forward.objective == "dpo":
        factor = f"beta {forward.beta:g}, against {'lora.init_from' if plan.keeps_start else 'no adapter'}"
    return [
        *_epoch_lines(plan),
        f"draws: {plan.draws} of each {sample}, {moments} steps {list(plan.active)}",
        f"objective: {forward.objective}, {factor}, the old policy keeps up to "
        f"{plan.old_decay:g} of itself per epoch; anchors: old policy {forward.old_policy.anchor:g}, base "
        f"{forward.base_anchor:g}",
        *_run_lines(plan, steps, clips),
    ]


def _epoch_lines(plan: GroupPlan) -> list[str]:
    geometry, processes, inner = plan.geometry, plan.processes, plan.group.inner_epochs
    return [
        f"an epoch: {geometry.groups} groups x {geometry.group_size} = {geometry.samples} samples = "
        f"{geometry.forwards} forwards x {geometry.batch} batch x {processes} process{'es' if processes > 1 else ''}",
        f"updates: {geometry.updates} per epoch x {inner} inner epochs = {plan.updates_per_epoch}, each of "
        f"{plan.training.samples // geometry.updates} samples",
    ]


def _run_lines(plan: GroupPlan, steps: int | None, clips: int | None) -> list[str]:
    if steps is None:
        return []
    epochs = steps // plan.updates_per_epoch
    groups = epochs * plan.geometry.groups
    visits = f" = {groups / clips:.2f} x {clips} clips" if clips else ""
    return [f"the run: {steps} updates = {epochs} epochs = {groups} groups{visits}"]


def sigma_table(
    schedule: Schedule, trained: Sequence[int], grpo: GrpoConfig | None = None, graphs_of: Sequence[int] = ()
) -> list[str]:
    """Return a table by step: sigma, timestep, expert, and whether it is trained, or drawn in windows.

    graphs_of: trained steps whose graphs are the rollout's.

    Flow-GRPO adds of each stochastic step its std, gradient weight (`flow.gradient_weight`) and noise left over
    sigma_next (`flow.noise_scale_error`).
    """
    role, word, heads, sigmas = "gradient", "replayed", "", schedule.sigmas.tolist()
    if grpo is not None:
        role, word = "window ", "trained" if grpo.window.rule == "list" else "drawn"
        heads = f"{grpo.sde + ' std':>11s}{'weight':>8s}{'noise':>7s}"
    lines = [f"step   sigma   timestep  expert      {role}{heads}".rstrip()]
    for i, (sigma, sigma_next) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        cells = "" if grpo is None else _cells(grpo, sigma, sigma_next, sigmas[1])
        mark = f"{'kept' if i in graphs_of else word if i in trained else '-':{len(role)}s}"
        lines.append(f"{i:4d}  {sigma:6.4f}  {1000 * sigma:9.3f}  {schedule.experts[i]:10s}  {mark}{cells}".rstrip())
    if grpo is not None:
        lines.append(
            "weight: of the step's gradient, |dmean/dv| / std (cps: 2 |dmean/dv| std). noise: what one step leaves / "
            "sigma of the next, 1 is exact"
        )
    return lines


def _cells(grpo: GrpoConfig, sigma: float, sigma_next: float, sigma_max: float) -> str:
    """Format std, gradient weight and noise-scale error; - where one is not defined."""
    limit = math.inf if grpo.max_std is None else grpo.max_std
    step = flow.coefficients(grpo.sde, sigma, sigma_next, grpo.noise_level, sigma_max, limit)
    weight = f"{flow.gradient_weight(grpo.sde, step):.4f}" if step.std > 0 else "-"
    noise = f"{flow.noise_scale_error(step, sigma, sigma_next):.3f}" if sigma_next > 0 else "-"
    return f"{step.std:11.4f}{weight:>8s}{noise:>7s}"
