"""Measure the velocity error of an expert with 8-bit weights, on the run's own input."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import ModelMixin
from torch import Tensor

from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Experts, Schedule
from rewardfl.memory import offload


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One clip's noise and conditioning, the input of an expert at its first step."""

    backbone: Backbone
    schedule: Schedule
    noise: Tensor  # (1, C, T, h, w)
    conditioning: Conditioning
    device: torch.device

    @torch.no_grad()
    def velocity(self, name: str, expert: ModelMixin) -> Tensor:
        """Return the velocity (1, C, T, h, w) of the expert `name` on the device."""
        step = self.schedule.experts.index(name)
        conditioning = protocol.move_to(self.conditioning, self.device)
        return self.backbone.velocity(
            Experts({name: expert}), self.noise.to(self.device), step, self.schedule, conditioning
        )

    def exact(self, name: str, load: Callable[[], ModelMixin]) -> Tensor:
        """Return the velocity of the expert that `load` returns. Its blocks are on the device one at a time."""
        expert = offload.move_expert(load(), "cpu_swap", self.device, self.backbone.block_classes)
        return self.velocity(name, expert)

    def note(self, name: str, expert: ModelMixin, exact: Tensor) -> str:
        """Return a note on the relative error of the expert's velocity."""
        step = self.schedule.experts.index(name)
        error = float((self.velocity(name, expert) - exact).norm() / exact.norm())
        return (
            f"note: with its weights in 8 bits (fp8) the {name} expert's velocity is {error:.2%} away from the "
            f"exact one's, in the first clip at step {step}: the run knows another base than the adapter is merged into"
        )
