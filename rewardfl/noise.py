"""Seeds and draws of noise: a stable hash of run seed, epoch, sample and member, on any number of processes."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def noise_seed(run_seed: int, epoch: int, sample_id: str, member: int = 0) -> int:
    """Return the seed (63 bits) of a sample's noise; `member` counts its noises within an epoch."""
    return stable_hash(f"noise/{run_seed}/{epoch}/{member}/{sample_id}")


def training_noise_seed(run_seed: int, epoch: int, sample_id: str, noises_per_sample: str | int) -> int:
    """Return noise_seed for a sample's visit in `epoch`: new in each ("fresh", epoch -1), or the same n in turn (n)."""
    if isinstance(noises_per_sample, str) or epoch < 0:
        return noise_seed(run_seed, epoch, sample_id)
    return noise_seed(run_seed, 0, sample_id, epoch % noises_per_sample)


def draw_noise(shape: Sequence[int], seed: int, device: str | torch.device = "cpu") -> Tensor:
    """Draw standard normal float32 noise, on the CPU so that it is the same for every device."""
    locked = torch.device(device).type == "cuda"  # page-locked: its copy does not wait
    noise = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), pin_memory=locked)
    return noise.to(device, non_blocking=locked)


def stable_hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # Python's own hash() differs from process to process
