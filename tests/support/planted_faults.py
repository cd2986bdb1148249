"""Faults that the pretend GPU must see, and right code that it must not complain about: prints {name: seen} as JSON.

python planted_faults.py, in another process than the tests: the pretend device patches torch.
"""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

import diffusers  # noqa: F401, E402  before torch is patched
import pretend_gpu  # noqa: E402
import torch  # noqa: E402
from pretend_gpu import MixedDevices, PretendDevice, ledger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pretend_gpu.install()

from rewardfl.memory import offload, swap  # noqa: E402

seen: dict[str, bool] = {}


@contextlib.contextmanager
def counts(name: str, counter):
    """Record whether the counter rises within the block."""
    before = sum(counter.values())
    yield
    seen[name] = sum(counter.values()) > before


@contextlib.contextmanager
def refuses(name: str):
    try:
        yield
        seen[name] = False
    except (MixedDevices, TypeError, RuntimeError):
        seen[name] = True


MIXED = {
    "add": lambda device, host: device + host,
    "matmul": lambda device, host: device @ host,
    "cat": lambda device, host: torch.cat([device, host]),
    "host index of index_select": lambda device, host: device.index_select(0, torch.tensor([1])),
    "device index of a host tensor": lambda device, host: host[torch.tensor([1], device="cuda")],
    "numpy": lambda device, host: device.numpy(),
    "host generator": lambda device, host: torch.randn(2, generator=torch.Generator(), device="cuda"),
}


def mixed_devices() -> None:
    device, host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    for name, mix in MIXED.items():
        with refuses(f"refused: {name}"):
            mix(device, host)
    with refuses("fine: host scalars and indices"):
        device * torch.tensor(2.0)
        device[torch.tensor([1])]
        device.new_zeros(2) + device.to("cpu").to("cuda")[0, :2]


def waits() -> None:
    device, locked = torch.ones(4, 4, device="cuda"), torch.ones(1024, pin_memory=True)
    locked.to("cuda", non_blocking=True)
    with counts("hazard: host writes under a copy", ledger.hazards):
        locked.add_(1)
    torch.cuda.synchronize()
    with counts("fine: host writes after a wait", ledger.hazards):
        locked.add_(1)
    arriving = torch.empty(4, 4, pin_memory=True).copy_(device, non_blocking=True)
    with counts("hazard: numpy before the copy has ended", ledger.hazards):
        arriving.numpy()
    torch.cuda.current_stream().synchronize()
    with counts("fine: numpy after the stream", ledger.hazards):
        arriving.numpy()


def streams() -> None:
    side = torch.cuda.Stream()
    tensor = torch.ones(8, device="cuda")
    with counts("hazard: no wait_stream", ledger.hazards), torch.cuda.stream(side):
        tensor + 1
    tensor = torch.ones(16, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with counts("fine: wait_stream", ledger.hazards), torch.cuda.stream(side):
        result = tensor + 1
    with counts("hazard: no event", ledger.hazards):
        result + 1
    torch.cuda.current_stream().wait_event(side.record_event())
    with counts("fine: event", ledger.hazards):
        result + 1
    torch.cuda.synchronize()

    def free_early(*, recorded: bool) -> None:
        tensor = torch.ones(777, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor + 1
        if recorded:
            tensor.record_stream(side)
        del tensor
        torch.zeros(777, device="cuda")  # the allocator gives the same memory again

    for name, recorded in {"hazard: no record_stream": False, "fine: record_stream": True}.items():
        with counts(name, ledger.hazards):
            free_early(recorded=recorded)
        torch.cuda.synchronize()


def registered_memory() -> None:
    cudart = torch.cuda.cudart()
    with counts("fine: register, unregister, register", ledger.notes):
        cudart.cudaHostRegister(4096, 4096, 0)
        cudart.cudaHostUnregister(4096)
        cudart.cudaHostRegister(4096, 8192, 0)
    with counts("hazard: registered twice", ledger.notes):
        cudart.cudaHostRegister(8192, 4096, 0)
    ledger.registered.clear()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.lora = nn.Linear(64, 64).requires_grad_(requires_grad=False), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.lora(torch.tanh(self.frozen(x)))


def update(*, swapped: bool, inputs_on_host: bool) -> list[torch.Tensor]:
    """Return the gradients of a small network whose blocks wait in host memory, or the inputs of its blocks do."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    blocks = nn.ModuleList(Block() for _ in range(5))
    if swapped:
        blocks.swap = [swap.BlockSwap(blocks, device)]
        for block in blocks:
            block.lora.to(device)
    else:
        blocks.to(device)
    host = offload.InputsOnHost(device) if inputs_on_host else None
    for _ in range(2):
        x = torch.ones(3, 64, device="cuda", requires_grad=True) * 1
        for block in blocks:
            x = host(block, x) if host else checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        x.sum().backward()
    return [block.lora.weight.grad.cpu() for block in blocks]


def package() -> None:
    """Run the package's streams, complete and without one line."""
    swapped, on_host = {"swapped": True, "inputs_on_host": False}, {"swapped": False, "inputs_on_host": True}
    right = update(swapped=False, inputs_on_host=False)
    for name, how in {"swap": swapped, "inputs on host": on_host}.items():
        with counts(f"fine: {name}", ledger.hazards):
            gradients = update(**how)
        seen[f"equal: {name}"] = all(torch.equal(a, b) for a, b in zip(right, gradients, strict=True))
        for owner, method in (
            (pretend_gpu.Stream, "wait_event"), (pretend_gpu.Stream, "wait_stream"), (torch.Tensor, "record_stream"),
        ):  # fmt: skip
            if method == "record_stream" and how is swapped:
                continue  # its buffers stay
            torch.cuda.synchronize()
            left_out = mock.patch.object(owner, method, lambda self, other: None)
            with counts(f"hazard: {name} without {method}", ledger.hazards), left_out:
                update(**how)


if __name__ == "__main__":
    with PretendDevice():
        for plant in (mixed_devices, waits, streams, registered_memory, package):
            plant()
    print(json.dumps(seen))
