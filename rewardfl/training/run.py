"""The set-up of a run, in the one order that works, and the end of an update. The three scripts share both.

run = command.start()    # rewardfl/script.py
for step in run.steps():
    ...                             # the algorithm: rollouts, rewards, loss, `run.job.backward`
    run.update_weights(step)        # one AdamW step
    run.finish_update(step, ...)    # metrics, alarms, evaluation, checkpoint, early stop
return run.close()
"""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, group_plan, lora, reward_flow, sde
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Decoder, Experts, Schedule, Velocity
from rewardfl.config import AnyConfig
from rewardfl.config.schema import SampleConfig
from rewardfl.epoch_order import due_this_epoch
from rewardfl.memory import offload, sharding
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.optim import Average, OldPolicy, averaged
from rewardfl.rewards import async_scoring, build_terms, scoring
from rewardfl.rewards.async_scoring import Call, WorkerPool
from rewardfl.rewards.face.identity_kept import Scale
from rewardfl.rewards.scoring import RewardResult, Term
from rewardfl.training import evaluation, plan, saving, setup_data, setup_model, setup_rewards
from rewardfl.training.anchors import Anchors
from rewardfl.training.batches import TrainingSampler
from rewardfl.training.checkpoint import checkpoint_dir
from rewardfl.training.conditions import Conditions, read_or_substitute
from rewardfl.training.distributed import Distributed
from rewardfl.training.epoch_scores import EpochScores, UpdateResults, explain_results, score_epoch
from rewardfl.training.evaluation import DeployedSampler
from rewardfl.training.learner import Learner, make_average, make_learner, make_old_policy, seed_generators
from rewardfl.training.logger import Log
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.samples import Batch, CleanRollout, Rollout, Rows, Sample
from rewardfl.training.setup_processes import connect_processes
from rewardfl.training.setup_run import is_finished, open_log, open_run, resume
from rewardfl.training.setup_summary import print_run_summary
from rewardfl.training.signals import Interruption
from rewardfl.training.state import Batching, ResumePoint, RunState, TrainState
from rewardfl.training.timer import Timer
from rewardfl.training.update_metrics import common_metrics
from rewardfl.training.verdicts import MoveJudge
from rewardfl.training.workload import Workload, make_workload
from rewardfl.verdict import ADAM_EPSILON

PlanT = TypeVar("PlanT", bound=plan.AnyPlan)
SamplerT = TypeVar("SamplerT", bound=DeployedSampler | TrainingSampler)
OutcomeT = TypeVar("OutcomeT")  # a dataclass

_SHOWN = {"loss": "actor/loss", "score": "reward/mean", "spread": "reward/std_in_group"}  # next to the progress bar


class RunEnded(Exception):
    """The end of a command without training: after a dry run, or where nothing is left to train."""

    def __init__(self, exit_code: int = 0):
        self.exit_code = exit_code


@dataclass(kw_only=True)
class TrainStep:
    """One update. In a script with groups an epoch begins with new rollouts; otherwise each update is an epoch."""

    index: int  # number of the update in the run, from 0
    epoch: int
    update: int  # number of the update in the epoch, from 0
    ends_epoch: bool
    timer: Timer  # seconds by phase; the rollouts count in the epoch's first update
    norm: float = math.nan  # the gradient's before clipping; nan or inf where the update was skipped
    rate: float = math.nan  # learning rate
    left_out: float = 0.0  # share of its samples whose groups are left out
    skips: bool = False  # whether nothing is left to learn from
    rests: bool = False  # whether the gradient is 0, and Adam's moments must not move the weights either

    @property
    def number(self) -> int:
        """Return the updates done after this one."""
        return self.index + 1

    @property
    def begins_epoch(self) -> bool:
        return self.update == 0


@dataclass(kw_only=True)
class Run(Generic[PlanT, SamplerT]):
    """All that the loop of a script needs, and the end of an update."""

    plan: PlanT
    backbone: Backbone
    job: Distributed
    interruption: Interruption
    terms: Sequence[Term]
    worker_pools: Sequence[WorkerPool | None]  # for slow rewards
    samples: Sequence[Sample]
    held_out: Sequence[Sample]  # the samples of evaluation.eval_clips
    scales: Mapping[int, Scale]  # scales of identity kept, for held_out
    state: RunState
    batching: Batching
    conditions: Conditions
    negative: Conditioning | None  # the negative prompt's, with guidance
    decoder: Decoder
    model: Experts
    learner: Learner
    average: Average | None
    old_policy: OldPolicy  # for forward-process reinforcement; without parameters elsewhere
    start_policy: EMAModel  # DPO's reference of lora.init_from; without parameters elsewhere
    graphs: reward_flow.KeptGraphs  # kept by the rollouts of reward feedback learning
    sampler: SamplerT
    anchors: Anchors
    verdict: MoveJudge  # on the moves of gradient_mode endpoint, used with sample.verdict
    log: Log
    last_step: int
    done: int = 0  # updates
    stopped: str = ""  # why train.early_stop ended the run
    progress: tqdm = field(init=False)
    kl_floor: dict[str, float] = field(init=False)  # {metric: the KL that comes only from rounding}
    prefixes: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # see roll_out_prefix

    @property
    def policy(self) -> nn.Module:
        """Return the experts as accelerate wraps them."""
        return self.learner.policy

    def velocity(
        self, network: nn.Module, conditioning: Conditioning, schedule: Schedule, guidance: float | None = None
    ) -> Velocity:
        """Return the velocity of a network, with guidance (None: sample.guidance_scale)."""
        sample = self.plan.sample
        return Velocity(
            backbone=self.backbone, model=network, conditioning=protocol.move_to(conditioning, self.job.device),
            schedule=schedule, negative=self.negative, guidance=sample.guidance_scale if guidance is None else guidance,
            guidance_gradient=sample.guidance_gradient if isinstance(sample, SampleConfig) else "both",
        )  # fmt: skip

    def steps(self) -> Iterator[TrainStep]:
        """Yield the updates, until the last one, a signal or train.early_stop. A new run is evaluated before them."""
        self.kl_floor = self._measure_kl_floor()
        self.interruption.listen()
        if self.held_out and self.state.resume_point.path is None:
            self.log.write(0, self.evaluate())
        per_epoch, hidden = self.plan.updates_per_epoch, not self.job.accelerator.is_local_main_process
        self.progress = tqdm(range(self.done, self.last_step), initial=self.done, total=self.last_step, disable=hidden)
        for index in self.progress:
            epoch, update = divmod(index, per_epoch)
            if update == 0:
                seed_generators(self.plan.run.seed, index, self.job.data_rank)
            timer = Timer(self.job.device)
            yield TrainStep(index=index, epoch=epoch, update=update, ends_epoch=update == per_epoch - 1, timer=timer)
            if self.stopped or self.interruption.number:
                return

    def rollout_weights(self) -> contextlib.AbstractContextManager:
        """Swap in the weights that roll out: the old policy's, with gradient_mode endpoint the average, or none."""
        source: EMAModel | None = self.old_policy if isinstance(self.plan, plan.ForwardRlPlan) else None
        if isinstance(self.plan, plan.RewardFlPlan) and self.plan.sample.gradient_mode == "endpoint":
            source = self.average
        return averaged(source, self.learner.parameters)

    def reference_weights(self) -> contextlib.AbstractContextManager:
        """Swap in the weights at the start of the run: no adapter, or a copy of lora.init_from's."""
        start = self.start_policy
        return averaged(start, self.learner.parameters) if start.shadow_params else lora.reference(self.policy)

    def is_interrupted(self) -> bool:
        """Return whether any process got a signal. Collective."""
        return self.interruption.any_signal(self.job.all_reduce_max)

    def gather(self, outcomes: Sequence[OutcomeT]) -> OutcomeT:
        """Return the outcomes of all passes of all processes as one. Collective.

        outcomes: records of one type, whose fields are tensors (B, ...) without a graph.
        """
        names = [each.name for each in fields(cast(Any, outcomes[0]))]
        columns = {name: torch.cat([getattr(outcome, name) for outcome in outcomes]) for name in names}
        return type(outcomes[0])(**self.job.gather(columns))

    def read_batch(self, step: TrainStep, micro: int) -> Batch:
        """Return the inputs of forward pass `micro` of an update of reward feedback learning, on the device."""
        assert isinstance(self.plan, plan.RewardFlPlan) and isinstance(self.sampler, TrainingSampler)
        train, sizes = self.plan.train, [sample.size for sample in self.samples]
        index = (step.index * train.gradient_accumulation_steps + micro) * self.job.data_world + self.job.data_rank
        visits = data.one_shape_batch(index, train.per_device_train_batch_size, sizes, self.plan.run.seed)
        return self.sampler.builder.batch(visits)

    def score(self, rows: Sequence[int], video: Tensor) -> list[RewardResult]:
        """Return the result of each reward for the videos (B, 3, F, H, W) in [-1, 1] of rows, with their graph."""
        return scoring.score_terms(self.terms, video, [self.samples[row].references for row in rows])

    def gather_results(self, results: Sequence[Sequence[RewardResult]]) -> UpdateResults:
        """Return the rewards' results of all passes of all processes. results: by pass and term. Collective."""
        return explain_results(self.terms, self.job.gather_lists([*results] if self.job.first_of_clip else []))

    def plan_epoch(self, epoch: int) -> list[tuple[list[group_plan.Member], bool]]:
        """Return this process's forward passes of an epoch: (members, whether a process needs new prefixes)."""
        assert isinstance(self.plan, plan.GroupPlan)
        ids, seed = [sample.row.id for sample in self.samples], self.plan.run.seed
        plans = [group_plan.plan(epoch, rank, self.plan.geometry, ids, seed) for rank in range(self.job.world)]
        return list(zip(plans[self.job.rank], group_plan.needs_prefix(plans), strict=True))

    def read_pair(self, members: list[group_plan.Member]) -> CleanRollout:
        """Return a clip of the table in the place of a rollout: the chosen one for member 0, the rejected one for 1."""
        skip, (member,) = self.plan.data.skip_bad_rows, members
        row, (conditioning, latents) = read_or_substitute(
            self.samples, member.row, lambda i: self.conditions.pair(self.samples[i]), skip=skip
        )
        shape = self.conditions.latent_shape(self.samples[row])
        inputs = Rollout(
            members=members, is_requested=torch.tensor([row == member.row]), schedule=self.plan.schedule(shape),
            conditioning=self.backbone.collate([conditioning]), shape=(1, *shape),
        )  # fmt: skip
        return inputs.with_latents(latents[member.member], self.rollouts_on)

    def read_inputs(self, members: list[group_plan.Member]) -> Rollout:
        """Return the inputs of a forward pass of members of groups, on the device."""
        rows = [member.row for member in members]
        conditioning, ok = self.conditions.batch(self.samples, rows, skip=self.plan.data.skip_bad_rows)
        conditioning = protocol.move_to(conditioning, self.job.device)
        shape = self.conditions.latent_shape(self.samples[rows[0]])  # a forward pass has videos of one size
        return Rollout(
            members=members, is_requested=ok, conditioning=conditioning, schedule=self.plan.schedule(shape),
            shape=(1, *shape),
        )  # fmt: skip

    def roll_out_prefix(self, inputs: Rollout, steps: int, *, is_new: bool) -> Tensor:
        """Return the latents (B, C, T, h, w) after the first `steps` steps. Members with equal noise share them.

        is_new: of plan_epoch. False: no process has noise that its previous pass had not, and its latents are kept.
        """
        if is_new:
            indices = {member.start: i for i, member in enumerate(inputs.members)}
            members = [inputs.members[i] for i in indices.values()]
            x = group_plan.draw_start_noise(members, inputs.shape, self.job.device)
            conditioning = protocol.select_rows(inputs.conditioning, [*indices.values()])
            velocity = self.velocity(self.policy, conditioning, inputs.schedule)
            x = reward_flow.rollout(velocity, x, inputs.schedule.sigmas[: steps + 1], keep=()).x0
            self.prefixes = dict(zip(indices, x.split(1), strict=True))
        return torch.cat([self.prefixes[member.start] for member in inputs.members])

    def submit_rewards(self, members: Sequence[group_plan.Member], video: Tensor) -> list[Call]:
        """Submit videos (B, 3, F, H, W) in [-1, 1] to all rewards. Slow ones are computed meanwhile."""
        references = [self.samples[member.row].references for member in members]
        return async_scoring.submit(self.terms, video, references, self.worker_pools)

    def score_epoch(
        self, step: TrainStep, pending: Sequence[Sequence[Call]], rollouts: Sequence[Rollout]
    ) -> EpochScores:
        """Wait for the rewards of an epoch's rollouts, and compare each video with its group. Collective."""
        assert isinstance(self.plan, plan.GroupPlan)
        if self.plan.pairs:  # the advantage of a chosen clip is 1, and of a rejected one -1
            advantages = [torch.tensor([1.0 - 2 * each.members[0].member], device=self.job.device) for each in rollouts]
            replaced = self.job.gather(~torch.cat([each.is_requested for each in rollouts]).to(self.job.device)).cpu()
            return EpochScores(
                advantages=advantages, replaced=replaced, metrics={"epoch": step.epoch}, why_nothing="",
                trained_groups=torch.ones(self.plan.geometry.groups, dtype=torch.bool),
            )  # fmt: skip
        with step.timer("step"), step.timer("reward"):
            results = [async_scoring.collect(calls) for calls in pending]
        group, weights, first = self.plan.group, self.plan.part_weights, step.index == self.state.step
        return score_epoch(self.job, self.terms, results, rollouts, group, weights, step.epoch, first=first)

    def share_update(self, step: TrainStep, trained_groups: Tensor) -> tuple[dict[int, Tensor], list[int]]:
        """Return ({forward pass: weights (B,)}, passes for the data anchor only) of this process in an update.

        trained_groups: (groups,) bool. A pass of other groups is made only if another process has more to train on. No
        sample travels: an epoch's latents could fill a process's memory. Fill step.left_out, skips.
        """
        assert isinstance(self.plan, plan.GroupPlan)
        run_plan, part, anchor = self.plan, self.plan.part(step.update), self.plan.anchor
        weights, rest, step.left_out = group_plan.passes_to_train(
            run_plan.training, self.job.rank, part, trained_groups
        )
        anchor_draws = anchor.draws if anchor.weight else 0
        policy_draws = run_plan.backwards_per_update // run_plan.training.forwards_per_update - anchor_draws
        self.job.reduce_in_backward(run_plan.backwards_per_update - policy_draws * len(rest))
        step.skips = step.left_out == 1 and not anchor_draws
        if step.left_out == 1:
            spread = f"advantage.smallest_spread {run_plan.group.advantage.smallest_spread:g}"
            self.log.print(step.number, f"no group's best and worst differ by {spread}: nothing to learn; lower it")
        return {n: weight.to(self.job.device) for n, weight in weights.items()}, rest

    def update_weights(self, step: TrainStep) -> None:
        """Take one AdamW step on the gradients of all processes, if they are finite, or skip. Fill step.norm, rate."""
        learner = self.learner
        with step.timer("optimizer"):
            step.rate = float(learner.scheduler.get_last_lr()[0])
            step.norm = 0.0
            for group in learner.optimizer.param_groups if step.rests else ():
                group["lr"] = 0.0  # until the scheduler's next value
            if not step.skips:
                step.norm = self.job.step(learner.optimizer, learner.parameters, self.plan.train.max_grad_norm)
            if self.average is not None and math.isfinite(step.norm) and not step.skips:
                self.average.step(learner.parameters)
            learner.scheduler.step()

    def finish_update(
        self,
        step: TrainStep,
        metrics: Mapping[str, float],
        *,
        rows: Tensor,
        finite: Tensor,
        replaced: Tensor,
        signal: Tensor,
        why_nothing: str = "",
        problems: Collection[str] = (),
    ) -> None:
        """Check the update; write its metrics; evaluate and save where it is due. Collective.

        metrics: of the algorithm. Of all samples of all processes: rows (N,), their indices; finite (N,), whether their
        values before the backward pass were; replaced and signal (N,), as common_metrics takes them. why_nothing: why
        no sample was judged. problems: of rewards that are only measured.
        """
        self.done, done, timer = step.number, step.number, step.timer
        common = common_metrics(self.job.device, done, step.norm, step.rate, replaced, signal)
        metrics = {**metrics, **self.kl_floor, **common}
        if isinstance(self.plan, plan.GroupPlan) and self.plan.group.advantage.smallest_spread:
            metrics["group/left_out"] = step.left_out
        if step.begins_epoch or not why_nothing:  # count a failed epoch once, not per update
            self.log.count(step.norm, why_nothing)
        saves = step.ends_epoch and self._is_due(done, self.plan.run.save_steps)
        if done == 1 or saves:
            metrics |= self.anchors.data_loss(self.job, self.model)
        if step.ends_epoch:
            self.stopped = self.log.early_stop(done, metrics)
        saves = saves or self.stopped != ""
        if (step.ends_epoch and self.is_interrupted()) or saves or step.index == self.state.step:
            with timer("invariants"):
                self.learner.weights.check(done)
        if isinstance(self.plan, plan.GroupPlan) and self.held_out and step.ends_epoch:
            is_due = self.stopped != "" or self._is_due(done, self.plan.evaluation.eval_steps)
            metrics |= self.evaluate() if is_due else {}
        self.log.write(done, metrics | timer.metrics())
        self.log.print_skipped(done, step.norm, [self.samples[row].row.id for row in rows.tolist()], finite)
        self.log.print_problems(done, why_nothing if step.begins_epoch else "", problems)
        self.log.stop_if_stuck(done, why_nothing)
        self.progress.set_postfix({name: f"{metrics[key]:.3f}" for name, key in _SHOWN.items() if key in metrics})
        if saves and not self.interruption.number:
            self.save(last=done == self.last_step or self.stopped != "")

    def evaluate(self) -> dict[str, float]:
        """Return eval/*: the scores of the held-out clips under the averaged weights. Collective."""
        assert isinstance(self.plan, plan.GroupPlan)
        generate, noises = partial(self.sampler.generate, self.held_out), self.plan.evaluation.eval_noises
        with averaged(self.average, self.learner.parameters):
            return evaluation.evaluate(
                noises, self.job, self.terms, self.worker_pools, self.held_out, generate, self.scales
            )

    def save(self, *, last: bool) -> None:
        """Save a checkpoint of the averaged weights, and sample videos. All processes call it: each may hold parts."""
        settings, job, log, done, learner = self.plan.run, self.job, self.log, self.done, self.learner
        if isinstance(self.plan, plan.GroupPlan):
            score = log.score_for_best(done, done - 1, ["eval/held_out", "eval/score"])  # score of weights now saved
        else:  # a mean since the last scheduled save: a resumed run agrees
            since = (done - 1) // settings.save_steps * settings.save_steps
            score = log.score_for_best(done, since, ["reward/held_out", "reward/mean"])
        copies = {"old_policy": self.old_policy, "start_policy": self.start_policy}
        state = saving.collect_state(job, learner, self.average, self.state, log, done, self.batching, copies)
        with averaged(self.average, learner.parameters):
            saving.save(settings, job, self.backbone, learner, log, state, score, last=last)
            if not self.interruption.number:  # shutting down: skip the videos
                shown = self.held_out or self.samples
                generate = partial(self.sampler.generate, shown)
                videos = saving.sample_videos(settings, self.plan.data, self.backbone, shown, generate, job, done)
                log.show_samples(done, videos)

    def close(self) -> int:
        """Save what a signal has left unsaved, close the run, and return the exit code. Collective."""
        if self.interruption.number:  # the weights are the last update's
            unsaved = self.done > 0 and not checkpoint_dir(self.plan.run.output_dir, self.done).exists()
            if self.job.all_reduce_max(int(unsaved)):
                self.learner.weights.check(self.done)
                self.save(last=True)
            self.job.wait()
        return saving.close_run(self.plan.run, self.job, self.interruption, self.done, self.stopped)

    @property
    def rollouts_on(self) -> torch.device:
        """Return the device of an epoch's rollouts between their rewards and their updates."""
        assert isinstance(self.plan, plan.GroupPlan)
        return {"gpu": self.job.device, "cpu": torch.device("cpu")}[self.plan.memory.samples_on]

    def _measure_kl_floor(self) -> dict[str, float]:
        """Return the metric of the KL that comes only from rounding, and print it; {} in float32 or without a KL."""
        if self.plan.model.dtype != "bfloat16":
            return {}
        if isinstance(self.plan, plan.RewardFlPlan) and self.plan.kl_steps:
            assert isinstance(self.sampler, TrainingSampler)
            batch, steps = self.sampler.builder.batch([(0, 0)]), self.plan.kl_steps
            reference = self.velocity(self.policy, batch.conditioning, batch.schedule).reference
            floor = reward_flow.kl_floor(reference, batch.x, batch.schedule.sigmas, steps, batch.start_step)
            name = "actor/kl_floor"
        elif isinstance(self.plan, plan.FlowGrpoPlan) and self.plan.group.kl_weight != 0:
            member = group_plan.Member(row=0, group_id=0, member=0, noise_seed=0, step_seed=0, group_seed=0)
            inputs, seed = self.read_inputs([member]), noise_seed(self.plan.run.seed, 0, "floor")
            reference = self.velocity(self.policy, inputs.conditioning, inputs.schedule).reference
            x, kernel = draw_noise(inputs.shape, seed, self.job.device), self.plan.kernel(inputs.schedule.sigmas)
            floor = sde.kl_floor(reference, x, kernel, self.plan.window(0))
            name = "policy/kl_floor"
        else:
            return {}
        self.job.print(f"note: in bfloat16 this model's KL reads about {floor:.1e} from rounding alone")
        return {name: floor}

    def _is_due(self, done: int, every: int) -> bool:
        return due_this_epoch(done, self.plan.updates_per_epoch, every, self.last_step)


RewardFlRun = Run[plan.RewardFlPlan, TrainingSampler]
FlowGrpoRun = Run[plan.FlowGrpoPlan, DeployedSampler]
ForwardRlRun = Run[plan.ForwardRlPlan, DeployedSampler]


@dataclass(frozen=True, kw_only=True)
class Headers:
    """What a run reads before it loads weights or clips."""

    settings: dict[str, dict[str, Any]]  # the result of config.to_dict
    backbone: Backbone
    job: Distributed
    plan: plan.AnyPlan
    rows: Rows
    resume_point: ResumePoint

    @property
    def work(self) -> Workload:
        """Return the work of the run, for the estimate."""
        return make_workload(self.plan, self.backbone, self.rows.train, self.job.sharding)


def read_headers(cfg: AnyConfig, run_folder: RunFolder | None) -> Headers:
    """Resolve a run from the headers of its files, print its summary, and lock its folder (None: a dry run).

    What cannot train is refused here, by the errors of script.REFUSALS.
    """
    settings, per_clip = configuration.to_dict(cfg), configuration.processes_per_clip(cfg)
    backbone = plan.open_model(cfg)
    job = connect_processes(cfg.run, cfg.model, cfg.train, per_clip)
    run_plan = plan.resolve(cfg, backbone, job.world)
    job.reduce_in_backward(run_plan.backwards_per_update)
    rows = setup_data.scan_rows(run_plan, job, backbone)
    print_run_summary(configuration.dump(cfg), run_plan, backbone, rows, job)
    point = open_run(settings, run_folder, job, backbone)
    return Headers(settings=settings, backbone=backbone, job=job, plan=run_plan, rows=rows, resume_point=point)


def start(headers: Headers, run_folder: RunFolder, interruption: Interruption) -> Run[Any, Any]:
    """Make all that a run needs, new or resumed. Raise RunEnded if nothing is left to train."""
    backbone, job, run_plan, resume_point = headers.backbone, headers.job, headers.plan, headers.resume_point
    # data, rewards, resume
    terms = build_terms(run_plan.rewards, job.device)
    store = setup_data.open_cache(run_plan)
    samples = setup_data.find_samples(run_plan.data, headers.rows.train, [] if run_plan.pairs else terms, store, job)
    held_out = setup_data.find_samples(run_plan.data, headers.rows.held_out, terms, store, job)
    batching = plan.make_batching(run_plan, [sample.size for sample in samples])
    state, restored = resume(run_plan, resume_point, job, terms, samples, held_out, batching)
    last_step = run_plan.count_steps(len(samples))
    if is_finished(run_plan, resume_point, last_step, job):
        raise RunEnded
    setup_rewards.check_rewards(run_plan, job, terms, (held_out or samples) if run_plan.pairs else samples)

    pools: list[WorkerPool | None] = []
    if isinstance(run_plan, plan.GroupPlan):
        pools = async_scoring.make_worker_pools(terms)

    # encode: the first weights are loaded, and freed
    conditions = setup_data.make_conditions(run_plan, backbone, resume_point.base, store)
    negative = setup_data.fill_conditions(run_plan.sample, conditions, [*samples, *held_out], job)
    setup_data.fill_clip_latents(run_plan, conditions, samples, job)
    builder = setup_data.make_batch_builder(run_plan, conditions, samples, job)

    # model, adapter, optimizer
    decoder = backbone.load_decoder(job.device)
    scales = evaluation.find_scales(run_plan.data, job, terms, conditions, decoder, held_out)
    model, trained = setup_model.load_experts(run_plan, backbone, job)
    setup_model.fill_adapters(model, trained, backbone, run_plan.init, resume_point, restored)
    sample = run_plan.sample if isinstance(run_plan.sample, SampleConfig) else SampleConfig()
    epsilon = 1e-8 if sample.verdict is None else ADAM_EPSILON
    learner = make_learner(run_plan.train, job, backbone, model, trained, last_step, restored, epsilon)
    average, old_policy, start_policy = _make_averages(run_plan, learner, restored)
    log = open_log(run_plan, headers.settings, job, run_folder, state, restored, last_step)
    del restored  # up to five copies of the adapters
    sampler = setup_data.make_sampler(run_plan, job, conditions, decoder, model, negative, builder)
    samples, held_out = setup_data.add_base_motion(
        run_plan, job, store, terms, resume_point, sampler.base, samples, held_out
    )
    return Run(
        plan=run_plan, backbone=backbone, job=job, interruption=interruption, terms=terms, samples=samples,
        held_out=held_out, scales=scales, state=state, batching=batching, conditions=conditions, negative=negative,
        decoder=decoder, model=model, learner=learner, average=average, old_policy=old_policy, sampler=sampler, log=log,
        start_policy=start_policy, last_step=last_step, done=state.step, worker_pools=pools,
        graphs=_kept_graphs(run_plan, job), anchors=setup_data.make_anchors(run_plan, conditions, samples, job.device),
        verdict=MoveJudge(
            sample=sample, samples=samples, state=state.verdict, decode=decoder.decode, job=job,
            terms={i: term for i, term in enumerate(terms) if term.decides},
            always_learns=average is not None or run_plan.anchor.weight > 0,
        ),
    )  # fmt: skip


def _kept_graphs(run_plan: plan.AnyPlan, job: Distributed) -> reward_flow.KeptGraphs:
    if not isinstance(run_plan, plan.RewardFlPlan):
        return reward_flow.KeptGraphs()
    return reward_flow.KeptGraphs(run_plan.graphs_of, offload.graph_context(run_plan.memory.active_graphs, job.device))


def _make_averages(
    run_plan: plan.AnyPlan, learner: Learner, restored: TrainState | None
) -> tuple[Average | None, OldPolicy, EMAModel]:
    """Return the moving average of the adapters, if the run has one, the old policy, and DPO's start, mostly empty."""
    parameters = learner.parameters
    decay = run_plan.group.ema_decay if isinstance(run_plan, plan.GroupPlan) else run_plan.train.ema_decay or None
    average = None if decay is None else make_average(decay, parameters, restored)
    start = EMAModel(parameters if run_plan.keeps_start and restored is None else [])
    if restored is not None and restored.start_policy is not None:
        start.shadow_params = list(map(sharding.shard_like, restored.start_policy, parameters))
    if isinstance(run_plan, plan.ForwardRlPlan):
        return average, make_old_policy(run_plan.group, run_plan.old_decay, parameters, restored), start
    return average, OldPolicy([], lambda _: 0.0), start
