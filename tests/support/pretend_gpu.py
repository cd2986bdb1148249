"""Pretend that a CPU build of torch has one GPU, to find faults that only a GPU shows.

Tensors stay CPU tensors and compute the real numbers. Every storage gets a tag, host or device. `Tensor.device` of a
device storage is `cuda:0`, so the package's own branches for a GPU run. The pretend device

- refuses operators that mix host and device where CUDA refuses them, numpy of a device tensor, and host generators for
  device noise;
- orders streams and events by vector clocks, and reuses freed memory by stream as CUDA's caching allocator does, and so
  reports a read or write without an order;
- reports host memory that is registered twice, or written while a copy may still read it;
- measures the bytes of the tensors that live on the device, their peak by phase.

It does not see the kernels' own rounding, determinism and workspaces, what the allocator adds, NCCL or time.

`install()` patches torch, never the package; call it after third parties are imported and before the package is. Work
then runs within `with PretendDevice():`. `ledger` holds what was seen.
"""

import collections
import contextlib
import os
import sys
import threading
import types
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

ROOT = str(Path(__file__).parent.parent.parent)
HERE = __file__
DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
TOTAL_MEMORY = 80 * 10**9
storage_of, real_device, real_to = Tensor.untyped_storage, Tensor.device, Tensor.to
aten = torch.ops.aten


class MixedDevices(RuntimeError):
    """An operator got tensors of the host and of the device."""


class Memory:
    """A piece of device or page-locked host memory, with its last uses: (stream, clock)."""

    def __init__(self, size: int):
        self.size, self.last_write, self.reads = size, None, {}


class Tag:
    """Where a storage lives: "host" or "device"."""

    def __init__(self, place: str, memory: Memory | None = None, stream: str = ""):
        self.place, self.memory, self.stream = place, memory, stream  # memory: of the host if it is page-locked
        self.recorded_streams: set[str] = set()


class Ledger:
    """All that the pretend device has seen. Counters are keyed by what and source line, the first two by phase, too."""

    def __init__(self):
        self.tags = WeakIdKeyDictionary()
        self.placing = threading.local()  # .stack: where tensors that a factory makes now belong
        self.phases = ["start"]
        self.mixed, self.hazards, self.notes = (collections.Counter() for _ in range(3))
        self.living, self.peaks = 0, collections.Counter()  # bytes of device storages: now, and the highest by phase
        self.registered: dict[int, int] = {}  # address -> bytes, of cudaHostRegister
        self.clock = {"host": 0, "main": 0}
        self.seen = {"host": collections.Counter(), "main": collections.Counter()}  # vector clocks
        self.free = collections.defaultdict(list)  # (stream, bytes) -> memory that the allocator may give again
        self.thread = threading.local()  # .stream: the current stream of a thread

    @property
    def phase(self) -> str:
        return self.phases[-1]

    @property
    def stream(self) -> str:
        return getattr(self.thread, "stream", "main")

    def live(self, size: int) -> None:
        """Count `size` bytes more on the device, or fewer."""
        self.living += size
        self.peaks[self.phase] = max(self.peaks[self.phase], self.living)

    def launch(self, stream: str) -> None:
        """Count one more operation on a stream; it comes after all that the host has waited for."""
        self.clock[stream] += 1
        self.order(stream, self.seen["host"])
        self.seen[stream]["host"] = max(self.seen[stream]["host"], self.clock["host"])
        self.seen[stream][stream] = self.clock[stream]

    def order(self, later: str, earlier: collections.Counter) -> None:
        """Put what comes next on the stream `later` behind all that the vector clock `earlier` has seen."""
        for name, value in earlier.items():
            self.seen[later][name] = max(self.seen[later][name], value)

    def wait(self) -> None:
        """Let the host wait for the current stream."""
        self.order("host", self.seen[self.stream])

    def touch(self, memory: Memory | None, stream: str, *, writes: bool, what: str) -> None:
        """Report a hazard if another stream may still use the memory; then note this use."""
        if memory is None:
            return
        uses = {} if memory.last_write is None else {memory.last_write[0]: memory.last_write[1]}
        if writes:
            uses = {k: max(uses.get(k, 0), memory.reads.get(k, 0)) for k in uses.keys() | memory.reads.keys()}
        for other, clock in uses.items():
            if self.seen[stream][other] < clock:
                verb = "writes" if writes else "reads"
                self.hazards[self.phase, f"{what} {verb} on {stream} while {other} may use it", source_line()] += 1
        if writes:
            memory.last_write, memory.reads = (stream, self.clock[stream]), {}
        else:
            memory.reads[stream] = self.clock[stream]


ledger = Ledger()


def source_line() -> str:
    """Return file:line of the innermost frame in the project, this file left out."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and name != HERE and "/.venv/" not in name:
            return f"{os.path.relpath(name, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# ---- tags


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside what torch.func's transforms wrap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_meta(tensor: Tensor) -> bool:
    return real_device.__get__(tensor).type == "meta"


def tag_of(tensor: Tensor) -> Tag | None:
    tensor = unwrapped(tensor)
    if tensor.layout is not torch.strided or is_meta(tensor):
        return None
    return ledger.tags.get(storage_of(tensor))


def place_of(tensor: Tensor) -> str:
    tag = tag_of(tensor)
    return "host" if tag is None else tag.place


def set_tag(tensor: Tensor, place: str) -> Tag:
    """Give the tensor's storage a tag if it has none.

    Device memory comes from the stream's own freed pieces first, in units of 512 bytes.
    """
    storage = storage_of(unwrapped(tensor))
    tag = ledger.tags.get(storage)
    if tag is None and place == "host":
        tag = Tag("host")
    elif tag is None:
        size, stream = max(512, -(-storage.nbytes() // 512) * 512), ledger.stream
        pieces = ledger.free[stream, size]
        tag = Tag("device", pieces.pop() if pieces else Memory(size=size), stream)
        weakref.finalize(storage, free_device, tag, storage.nbytes())
        ledger.live(storage.nbytes())
    ledger.tags[storage] = tag
    return tag


def free_device(tag: Tag, size: int) -> None:
    """Give the memory back to its stream; the allocator itself waits only for streams named by record_stream."""
    memory = tag.memory
    ledger.live(-size)
    for stream in tag.recorded_streams:
        memory.reads.pop(stream, None)
        if memory.last_write and memory.last_write[0] == stream:
            memory.last_write = None
    ledger.free[tag.stream, memory.size].append(memory)


def lock(tensor: Tensor) -> None:
    """Make a host tensor page-locked."""
    tag = set_tag(tensor, "host")
    tag.memory = tag.memory or Memory(size=0)


def is_locked(tensor: Tensor) -> bool:
    """Return whether the host tensor is in page-locked or registered memory."""
    address = unwrapped(tensor).data_ptr()
    if any(start <= address < start + size for start, size in ledger.registered.items()):
        lock(tensor)
    tag = tag_of(tensor)
    return tag is not None and tag.memory is not None


# ---- copies between host and device


def note_copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
    """Order a copy on the current stream; the host waits unless it is asynchronous from or to page-locked memory."""
    to_device = place_of(target) == "device"
    direction, host = ("to device", source) if to_device else ("to host", target)
    stream, locked = ledger.stream, is_locked(host)
    ledger.launch(stream)
    ledger.touch(tag_of(host).memory if locked else None, stream, writes=not to_device, what=f"copy {direction}")
    ledger.touch(tag_of(target if to_device else source).memory, stream, writes=to_device, what=f"copy {direction}")
    if non_blocking and not locked and not to_device:
        ledger.notes["non_blocking copy to host memory that is not page-locked", source_line()] += 1
    if not (non_blocking and locked):
        ledger.wait()


def moved(tensor: Tensor, device, dtype=None, *, non_blocking=False, copy=False, memory_format=None) -> Tensor:
    """Return what `Tensor.to` returns; a copy between host and device is ordered."""
    # channels stay where they are: with others a CPU's bfloat16 gradients round otherwise
    layout = {"memory_format": memory_format} if memory_format is torch.contiguous_format else {}
    device = as_device(device)
    if is_meta(tensor) or (device is not None and device.type == "meta"):
        places = [] if device is None else [device]
        return real_to(tensor, *places, dtype=dtype or tensor.dtype, copy=copy, **layout)
    place = place_of(tensor)
    target = place if device is None else "device" if device.type == "cuda" else "host"
    dtype = dtype or tensor.dtype
    if target == place:
        return real_to(tensor, dtype=dtype, copy=copy, **layout)
    with placing(target):
        result = real_to(tensor, dtype=dtype, copy=True, **layout)
    set_tag(result, target)
    note_copy(result, tensor, non_blocking=non_blocking)
    return result


# ---- operators

WAITING = {  # operators whose result's shape or value the host needs
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount", "is_nonzero",
    "_linalg_check_errors",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# CUDA takes host tensors of no dimension here, and in pointwise operators
TAKES_HOST_SCALARS = INDEXING | {
    "copy_", "masked_fill", "masked_fill_", "fill_", "where", "lerp", "lerp_", "add_", "mul_", "pow", "lift_fresh",
    "_foreach_add", "_foreach_add_", "_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_", "_foreach_sub_",
    "_foreach_lerp_", "_foreach_addcdiv_", "_foreach_addcmul_", "slice_scatter", "select_scatter", "result_type",
}  # fmt: skip
WITHOUT_VALUES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}


def tensors_in(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class PretendDevice(TorchDispatchMode):
    """Watch every operator: refuse mixed places, tag results, order accesses."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        if any(is_meta(t) for t in inputs) or str(kwargs.get("device", "")) == "meta":
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        places = [place_of(t) for t in inputs]
        if name == "copy_" and {"host", "device"} == set(places[:2]):
            result = func(*args, **kwargs)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            note_copy(inputs[0], inputs[1], non_blocking=non_blocking)
            return result
        on_device = "device" in places
        if name == "_local_scalar_dense":
            if on_device:
                ledger.launch(ledger.stream)
                ledger.touch(tag_of(inputs[0]).memory, ledger.stream, writes=False, what="item")
                ledger.wait()
            return func(*args, **kwargs)
        if on_device and "host" in places:
            refuse_mixed(func, name, args, inputs, places)
        by_mask = name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
        if on_device and (name in WAITING or by_mask):
            ledger.wait()
        result = func(*args, **kwargs)
        fresh = tag_results(result, inputs, places)
        on_device = on_device or any(tag.place == "device" for tag in fresh)
        note_uses(func, name, args, kwargs, inputs, fresh, on_device=on_device)
        return result


def refuse_mixed(func, name: str, args, inputs: list[Tensor], places: list[str]) -> None:
    """Raise MixedDevices if CUDA would refuse the host tensors among the inputs."""
    pointwise = torch.Tag.pointwise in func.tags
    indices = {id(t) for t in tensors_in(args[1:2])} if name in INDEXING and places[0] == "device" else set()
    wrong = []
    for tensor, place in zip(inputs, places, strict=True):
        if place != "host" or (tensor.dim() == 0 and (pointwise or name in TAKES_HOST_SCALARS)):
            continue
        if id(tensor) in indices:
            ledger.wait()
        else:
            wrong.append(f"{tuple(tensor.shape)} {tensor.dtype}")
    if wrong:
        ledger.mixed[ledger.phase, f"{func}: {wrong} on the host", source_line()] += 1
        raise MixedDevices(f"pretend GPU: expected all tensors on one device, {func} got {wrong} on the host")


def tag_results(result, inputs: list[Tensor], places: list[str]) -> list[Tag]:
    """Tag the storages that an operator has made; return their tags."""
    stack = getattr(ledger.placing, "stack", [])
    place = stack[-1] if stack else "device" if "device" in places else "host"
    old = {id(storage_of(unwrapped(t))) for t in inputs}
    fresh = []
    for tensor in tensors_in(result):
        if tensor.layout is torch.strided:
            storage = storage_of(tensor)
            if id(storage) not in old and storage not in ledger.tags:
                fresh.append(set_tag(tensor, place))
    return fresh


def is_view(func) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def written_by(func, args, kwargs) -> set[int]:
    """Return the ids of the tensors that the operator writes in place."""
    written = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {id(t) for t in tensors_in(value)}
    return written


def note_uses(func, name: str, args, kwargs, inputs: list[Tensor], fresh: list[Tag], *, on_device: bool) -> None:
    """Note what an operator reads and writes, on the current stream or on the host."""
    if is_view(func) and not fresh:
        return
    written = written_by(func, args, kwargs)
    if on_device:
        ledger.launch(ledger.stream)
    for tensor in inputs:
        tag = tag_of(tensor)
        if tag is None or tag.memory is None:
            continue
        if tag.place == "device":
            ledger.touch(tag.memory, ledger.stream, writes=id(tensor) in written, what=name)
        elif not on_device:
            touch_from_host(tensor, writes=id(tensor) in written, what=f"host {name}")
    for tag in fresh:
        if tag.place == "device" and name not in WITHOUT_VALUES:
            ledger.touch(tag.memory, ledger.stream, writes=True, what=name)


def touch_from_host(tensor: Tensor, *, writes: bool, what: str) -> None:
    ledger.clock["host"] += 1
    ledger.seen["host"]["host"] = ledger.clock["host"]
    ledger.touch(tag_of(tensor).memory, "host", writes=writes, what=what)


# ---- patches


def as_device(value) -> torch.device | None:
    if value is None or isinstance(value, torch.device):
        return value
    return DEVICE if isinstance(value, int) else torch.device(value)


@contextlib.contextmanager
def placing(place: str):
    """Tag what is made within as `place`."""
    if "stack" not in ledger.placing.__dict__:
        ledger.placing.stack = []
    ledger.placing.stack.append(place)
    yield
    ledger.placing.stack.pop()


def factory(real, name: str):
    """Return torch.empty, torch.randn and so on with a `device` that may be the pretend one."""

    def make(*args, **kwargs):
        device, locked = as_device(kwargs.get("device")), kwargs.pop("pin_memory", False)
        template = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        like = name.endswith("_like")
        if (device is not None and device.type == "meta") or (device is None and like and is_meta(template)):
            return real(*args, **kwargs)
        modes = map(type, torch.overrides._get_current_function_mode_stack())
        if device is None and not like and any(mode.__name__ == "DeviceContext" for mode in modes):
            return real(*args, **kwargs)
        place = "host" if device is None or device.type != "cuda" else "device"
        if device is None and like:
            place = place_of(template)
        if device is not None:
            kwargs["device"] = HOST
        if name in RANDOM and place == "device" and kwargs.get("generator") is not None:
            raise RuntimeError("pretend GPU: expected a 'cuda' device type for generator but found 'cpu'")
        with placing(place):
            result = real(*args, **kwargs)
        set_tag(result, place)
        if locked:
            lock(result)
        if name in ("tensor", "scalar_tensor") and place == "device":
            ledger.wait()
        return result

    return make


FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace", "eye",
    "tensor", "scalar_tensor", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "randint_like",
)  # fmt: skip
NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor")


def new_method(real, name: str):
    def make(self, *args, **kwargs):
        device = as_device(kwargs.pop("device", None))
        if is_meta(self) or (device is not None and device.type == "meta"):
            return real(self, *args, **kwargs, **({} if device is None else {"device": device}))
        place = place_of(self) if device is None else "device" if device.type == "cuda" else "host"
        with placing(place):
            result = real(self, *args, **kwargs)
        set_tag(result, place)
        if name == "new_tensor" and place == "device":
            ledger.wait()
        return result

    return make


def patched_to(self, *args, **kwargs):
    copy, first = kwargs.pop("copy", False), args[0] if args else kwargs.pop("other", None)
    if isinstance(first, Tensor):
        non_blocking = args[1] if len(args) > 1 else kwargs.get("non_blocking", False)
        return moved(self, first.device, first.dtype, non_blocking=non_blocking, copy=copy)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return moved(self, device, dtype, non_blocking=non_blocking, copy=copy, memory_format=memory_format)


def patch_tensor() -> None:
    """Replace what Python code asks tensors: where they are, copies, and values on the host."""
    real_tolist, real_numpy = Tensor.tolist, Tensor.numpy

    def device(self):
        real = real_device.__get__(self)
        return DEVICE if real.type == "cpu" and place_of(self) == "device" else real

    def tolist(self):
        return real_tolist(moved(self.detach(), HOST))

    def numpy(self, *, force=False):  # Tensor.__array__ calls it, too
        if place_of(self) == "device":
            raise TypeError("pretend GPU: can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
        if is_locked(self):
            touch_from_host(self, writes=False, what="numpy")
        return real_numpy(self, force=force)

    def pin_memory(self, device=None):
        if place_of(self) == "device":
            raise RuntimeError("pretend GPU: cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned")
        if is_locked(self):
            return self
        result = self.clone()
        lock(result)
        return result

    def record_stream(self, stream):
        if place_of(self) != "device":
            raise NotImplementedError("pretend GPU: aten::record_stream has no CPU kernel")
        tag_of(self).recorded_streams.add(stream.name)

    Tensor.device, Tensor.is_cuda = property(device), property(lambda self: self.device.type == "cuda")
    Tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    Tensor.get_device = lambda self: 0 if self.is_cuda else -1
    Tensor.to = patched_to
    Tensor.cpu = lambda self, memory_format=None: moved(self, HOST, memory_format=memory_format)
    Tensor.tolist, Tensor.numpy, Tensor.record_stream, Tensor.pin_memory = tolist, numpy, record_stream, pin_memory
    Tensor.is_pinned = lambda self, device=None: place_of(self) == "host" and is_locked(self)
    for name in NEW:
        setattr(Tensor, name, new_method(getattr(Tensor, name), name))


# ---- torch.cuda


class Event:
    def __init__(self, *args, **kwargs):
        self.seen = collections.Counter()

    def record(self, stream=None):
        self.seen = collections.Counter(ledger.seen[stream.name if stream else ledger.stream])


class Stream:
    def __init__(self, device=None, priority=0, name=""):
        self.name = name or f"side{len(ledger.clock) - 1}"
        ledger.clock.setdefault(self.name, 0)
        ledger.seen.setdefault(self.name, collections.Counter())
        self.device = DEVICE

    def wait_stream(self, other):
        ledger.order(self.name, ledger.seen[other.name])

    def wait_event(self, event):
        ledger.order(self.name, event.seen)

    def synchronize(self):
        ledger.order("host", ledger.seen[self.name])

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


@contextlib.contextmanager
def current(stream):
    before = ledger.stream
    ledger.thread.stream = before if stream is None else stream.name
    try:
        yield
    finally:
        ledger.thread.stream = before


class Cudart:
    """The two calls of the CUDA runtime that the package makes, with CUDA's error for overlapping memory."""

    def cudaHostRegister(self, address, size, flags):
        for start, length in ledger.registered.items():
            if start < address + size and address < start + length:
                ledger.notes["cudaHostRegister of memory that is registered already (error 712)", source_line()] += 1
                return 712
        ledger.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        return 0 if ledger.registered.pop(address, None) else 713


def synchronize(device=None):
    for name in list(ledger.clock)[1:]:
        ledger.order("host", ledger.seen[name])


def check_error(code):
    if code != 0:
        raise RuntimeError(f"pretend GPU: CUDA error {code}")


def patch_cuda() -> None:
    properties = types.SimpleNamespace(name="pretend GPU", total_memory=TOTAL_MEMORY, major=9, minor=0)
    replacements = dict(
        _lazy_init=lambda: None, is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda device: None, synchronize=synchronize, Stream=Stream, Event=Event, stream=current,
        current_stream=lambda device=None: Stream(name=ledger.stream), empty_cache=lambda: None,
        max_memory_allocated=lambda device=None: 0, reset_peak_memory_stats=lambda device=None: None,
        mem_get_info=lambda device=None: (TOTAL_MEMORY, TOTAL_MEMORY),
        get_device_properties=lambda device=None: properties, get_device_name=lambda device=None: properties.name,
        get_device_capability=lambda device=None: (9, 0), is_bf16_supported=lambda *a, **k: True,
        manual_seed_all=lambda seed: None, cudart=Cudart, check_error=check_error,
        get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8), set_rng_state=lambda *a: None,
        get_rng_state_all=lambda: [], set_rng_state_all=lambda *a: None,
    )  # fmt: skip
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


def install() -> None:
    """Patch torch so that `cuda:0` exists."""
    torch.utils._device._device_constructors()  # caches the real factories, which it looks up by name
    patch_tensor()
    for name in FACTORIES:
        setattr(torch, name, factory(getattr(torch, name), name))
    real_as_tensor = torch.as_tensor

    def as_tensor(data, dtype=None, device=None):
        if isinstance(data, Tensor):
            return moved(data, device, dtype)
        result = real_as_tensor(data, dtype=dtype)
        return result if as_device(device) is None else moved(result, device)

    torch.as_tensor = as_tensor
    patch_cuda()
    real_run = threading.Thread.run

    def run(self):
        with PretendDevice():
            real_run(self)

    threading.Thread.run = run


# ---- phases of the package


def watch_phases(timer_class) -> None:
    """Name the ledger's phases by the timer of the scripts (rewardfl.training.timer.Timer), without its own wait."""
    real_call = timer_class.__call__

    @contextlib.contextmanager
    def timed(self, name):
        ledger.phases.append(name)
        ledger.live(0)
        try:
            with real_call(self, name):
                yield
        finally:
            ledger.phases.pop()

    timer_class.__call__ = timed
