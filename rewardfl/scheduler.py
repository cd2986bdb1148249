"""FlowMatchSDEScheduler: the transitions of flow.py as a diffusers scheduler, for any stock flow pipeline.

    pipe.scheduler = FlowMatchSDEScheduler.from_config(pipe.scheduler.config, noise_level=0.7, noise_window=[0, 1])

has the pipeline's own sigmas; FlowMatchSDEScheduler(shift=5.0) has `flow.linear_sigmas`, as Wan2.2-Lightning has.
For log-probabilities, replay the latents of `callback_on_step_end`: step(velocity, t, x, step_index=i,
next_sample=x_next).
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from rewardfl import flow

# arguments of FlowMatchEulerDiscreteScheduler that change its sigmas in other ways than a shift
NOT_LINEAR = (
    "use_dynamic_shifting", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas",
)  # fmt: skip


@dataclass(kw_only=True)
class FlowMatchSDEOutput(BaseOutput):
    """prev_sample (B, ...): x_next, in the dtype of the step's sample. mean (B, ...) float32 and std: the transition's.

    log_prob: (B,) float64 of prev_sample as it is stored, after rounding to its dtype; None for a deterministic step.
    """

    prev_sample: Tensor
    mean: Tensor
    std: float
    log_prob: Tensor | None


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """Steps in the noise window are drawn from `flow.transition`, the others are Euler steps of the ODE.

    kind, noise_level: as in flow.py. noise_window: indices of inference steps, None for all but the last, whose noise
    nothing would remove. schedule: for a pipeline that gives no sigmas, `stock` makes FlowMatchEulerDiscreteScheduler's
    and `linear` makes `flow.linear_sigmas`, for a config with only a shift. The other arguments are
    FlowMatchEulerDiscreteScheduler's. Steps are counted from 0 or from `set_begin_index`, never looked up by timestep.
    """

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float = 0.5,
        max_shift: float = 1.15,
        base_image_seq_len: int = 256,
        max_image_seq_len: int = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: str = "exponential",
        stochastic_sampling: bool = False,
        kind: flow.Kind = "flow",
        noise_level: float = 0.7,
        noise_window: Sequence[int] | None = None,
        schedule: Literal["linear", "stock"] = "linear",
    ):
        if invert_sigmas or stochastic_sampling:
            raise ValueError("invert_sigmas and stochastic_sampling are another flow and another noise: not supported")
        # by keyword: diffusers takes a positional argument for a default, and drops it from the saved config
        stock = inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters
        super().__init__(**{name: self.config[name] for name in stock if name != "self"})
        self.num_inference_steps = None
        self.noise_window: tuple[int, ...] = ()  # window of the schedule that set_timesteps makes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Self:
        """Make the scheduler of a config; one of FlowMatchEulerDiscreteScheduler keeps its schedule.

        kwargs: arguments that replace the config's. Raise ValueError for the config of another scheduler.
        """
        name = config.get("_class_name", FlowMatchEulerDiscreteScheduler.__name__)
        if name not in (FlowMatchEulerDiscreteScheduler.__name__, FlowMatchSDEScheduler.__name__, cls.__name__):
            raise ValueError(
                f"{name} makes its sigmas in another way than FlowMatchSDEScheduler; give it the "
                "config of a FlowMatchEulerDiscreteScheduler, or make FlowMatchSDEScheduler(shift=...) directly"
            )
        schedule = "stock" if name == FlowMatchEulerDiscreteScheduler.__name__ else "linear"
        return super().from_config({"schedule": schedule, **config}, return_unused_kwargs, **kwargs)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
    ) -> None:
        """Make the schedule, as the argument `schedule` says.

        sigmas: as diffusers' image pipelines pass them, without the last 0 and before shifting. mu: their shift by
        resolution, used with use_dynamic_shifting. Sigmas stay on the CPU: they are read as numbers.
        """
        super().set_timesteps(num_inference_steps, sigmas=sigmas, mu=mu)
        linear = self.config.schedule == "linear" and not any(self.config[key] for key in NOT_LINEAR)
        if linear and sigmas is None and num_inference_steps is not None:
            self.sigmas = flow.linear_sigmas(num_inference_steps, self.shift)
            self.timesteps = self.config.num_train_timesteps * self.sigmas[:-1]
        if not (self.sigmas[0] <= 1 and (self.sigmas.diff() < 0).all()):  # so for one step with shift_terminal: nan
            raise ValueError(f"the sigmas {self.sigmas.tolist()} do not walk down from at most 1: take more steps")
        self.timesteps = self.timesteps.to(device)
        self.noise_window = self._checked_window()

    def _checked_window(self) -> tuple[int, ...]:
        if self.config.kind == "ode" or self.config.noise_level == 0:
            return ()
        steps = range(len(self.timesteps))
        chosen = self.config.noise_window
        window = tuple(steps[:-1] if chosen is None else chosen)
        for i in window:
            if i not in steps:
                raise ValueError(f"noise_window {list(window)}: there are steps 0 to {steps[-1]}")
            if flow.coefficients(self.config.kind, *self._arguments(i)).std == 0:
                raise ValueError(f"noise_window {list(window)}: {self.config.kind} makes step {i} deterministic")
        return window

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        *,
        next_sample: Tensor | None = None,
        step_index: int | None = None,
    ) -> FlowMatchSDEOutput | tuple[Tensor, Tensor, float, Tensor | None]:
        """Step from sample (B, ...) by the velocity model_output (B, ...), in float32.

        timestep: must be the schedule's at this step. generator: of the noise, one or one per sample; None is torch's
        global one. next_sample: score this instead of drawing. step_index: take this step and leave the count
        unchanged; by default the next one.
        """
        next_index = self.step_index if self.step_index is not None else self.begin_index or 0
        index = next_index if step_index is None else step_index
        expected = float(self.timesteps[index])
        if float(timestep) != expected:
            raise ValueError(
                f"step {index} is timestep {expected:g}, got {float(timestep):g}: steps are counted; "
                "start elsewhere with set_begin_index or name the step with step_index"
            )
        if next_sample is not None and index not in self.noise_window:
            raise ValueError(f"step {index} is deterministic: next_sample has no density, leave it out")
        kind: flow.Kind = self.config.kind if index in self.noise_window else "ode"
        mean, std = flow.transition(kind, sample.float(), model_output.float(), *self._arguments(index))
        if kind == "ode":
            next_sample = mean.to(sample.dtype)
        elif next_sample is None:
            noise = randn_tensor(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            next_sample = flow.sample(mean, std, noise).to(sample.dtype)
        log_prob = None if kind == "ode" else flow.log_prob(kind, next_sample.float(), mean, std)
        if step_index is None:
            self._step_index = index + 1
        output = FlowMatchSDEOutput(prev_sample=next_sample, mean=mean, std=std, log_prob=log_prob)
        return output if return_dict else (next_sample, mean, std, log_prob)

    def _arguments(self, index: int) -> tuple[Tensor, Tensor, float, Tensor]:
        """Return sigma, sigma_next, noise_level, sigma_cap of a step."""
        return self.sigmas[index], self.sigmas[index + 1], self.config.noise_level, self.sigmas[1]
