"""What GPUs reach in practice, by type of operation: an estimate's seconds are FLOPs and bytes by these rates."""

from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from rewardfl.command_line import option_type
from rewardfl.config.schema import Positive

Operation = Literal["matmul", "attention", "convolution"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """TFLOP/s in bfloat16, with the pointwise work between; GB/s to page-locked host memory, in one direction."""

    matmul: float
    attention: float
    convolution: float
    copies: float

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {getattr(self, name):g}" for name in OPERATIONS)
        return f"TFLOP/s: {speeds}; {self.copies:g} GB/s to and from the host"


RATES = {
    "H100": Rates(
        matmul=600,  # an estimate: 3/4 of the best product's 794.5 (stas00/ml-engineering, compute/accelerator)
        attention=535,  # cuDNN's 595 forward, 516 backward at 16k tokens (FlashAttention-3, arXiv 2407.08608)
        convolution=100,  # an estimate: an H200's 170 in channels_last_3d (sgl-project/sglang, pull 34125), less norms
        copies=50,  # an estimate: 9/10 of what nvbandwidth's manual shows for PCIe 5.0 x16
    ),
    "RTX 4090": Rates(
        matmul=130,  # an estimate: 4/5 of 160 (zzc0721/torch-performance-test-data, issue 78)
        attention=150,  # an estimate: FlashAttention-2's 161 is forward (SageAttention2++, arXiv 2505.21136)
        convolution=20,  # an estimate: the H100's by the cards' memory would be 30, by their peaks 17
        copies=25,  # an estimate: 4/5 of PCIe 4.0 x16
    ),
}


def parse_rates(text: str) -> Rates:
    """Return the rates of a GPU, an H100 if none is named, with single ones: `RTX 4090,attention=140,copies=12`.

    One number is the rate of all computing. Raise ArgumentTypeError for other words.
    """
    rates = RATES["H100"]
    for word in text.split(","):
        name, _, rate = word.rpartition("=")
        if word in RATES:
            rates = RATES[word]
        elif name in ("", *asdict(rates)):
            rates = replace(rates, **dict.fromkeys([name] if name else OPERATIONS, option_type(Positive)(rate)))
        else:
            raise ArgumentTypeError(f"must name {', '.join([*RATES, *asdict(rates)])}, got {name!r}")
    return rates
