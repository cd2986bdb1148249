"""How far an expert whose weights are stored in 8 bits is from the exact one, on the run's own input."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import ModelMixin
from torch import Tensor

from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Experts, Schedule
from rewardfl.memory import offload


@dataclass(frozen=True)
class Probe:
    """One clip's noise and conditioning, of which an expert is asked for the velocity at its first step."""

    backbone: Backbone
    schedule: Schedule
    noise: Tensor  # (1, C, T, h, w)
    conditioning: Conditioning
    device: torch.device

    @torch.no_grad()
    def velocity(self, name: str, expert: ModelMixin) -> Tensor:
        """(1, C, T, h, w) of the expert called `name`, which answers on the device."""
        step, given = self.schedule.experts.index(name), protocol.move_to(self.conditioning, self.device)
        return self.backbone.velocity(Experts({name: expert}), self.noise.to(self.device), step, self.schedule, given)

    def exact(self, name: str, load: Callable[[], ModelMixin]) -> Tensor:
        """The velocity of the network that `load` gives, whose blocks come to the device one at a time."""
        expert = offload.move_expert(load(), "cpu_swap", self.device, self.backbone.block_classes)
        return self.velocity(name, expert)

    def note(self, name: str, expert: ModelMixin, exact: Tensor) -> str:
        """What is said of the expert as it is placed."""
        step = self.schedule.experts.index(name)
        away = float((self.velocity(name, expert) - exact).norm() / exact.norm())
        return (
            f"note: with its weights in 8 bits (fp8) the {name} expert's velocity is {away:.2%} away from the "
            f"exact one's, in the first clip at step {step}: the run knows another base than the adapter is merged into"
        )
