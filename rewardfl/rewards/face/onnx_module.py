"""An ONNX graph as a torch module, so that a published face recogniser can be differentiated to its pixels.

Every node runs as one torch function, in graph order. Weights are buffers: they follow `.to(device, dtype)`, and no
optimizer gets them. Shapes and values computed from them stay on the CPU, off the GPU's queue.
Semantics: https://onnx.ai/onnx/operators/, checked against onnxruntime in tests/rewards/face/test_onnx_module.py.

A function in OPS takes a node's operands, None for one left out, and its attributes by their ONNX names. A setting
(a shape, axes, a bound) has the same name as operand and as the attribute that it is in older opsets.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from google.protobuf.message import DecodeError
from torch import Tensor, nn

from rewardfl.file_kinds import wrong_kind

Attributes = dict[str, Any]
Numbers = list[int] | tuple[int, ...]


def _dtype(data_type: int) -> torch.dtype:
    """Return what an ONNX type becomes: floats follow the module's precision, so half precision runs everywhere."""
    name = onnx.TensorProto.DataType.Name(data_type)
    return torch.float32 if "FLOAT" in name or name == "DOUBLE" else torch.bool if name == "BOOL" else torch.int64


def _tensor(proto: onnx.TensorProto) -> Tensor:
    array, dtype = onnx.numpy_helper.to_array(proto), _dtype(proto.data_type)
    return torch.tensor(array.astype(np.float32) if dtype.is_floating_point else array).to(dtype)


def _pad_argument(begin: Numbers, end: Numbers) -> list[int]:
    """Return torch's padding: (begin, end) pairs from the last axis to the first."""
    return [pad for pair in reversed(list(zip(begin, end, strict=True))) for pad in pair]


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pads: Numbers = (), kernel_shape: Numbers = (),
          **window: Any) -> Tensor:  # fmt: skip
    """Convolve, padded first where begin and end differ."""
    begin, end = pads[:2] or [0, 0], pads[2:] or [0, 0]
    if begin != end:
        x, begin = F.pad(x, _pad_argument(begin, end)), [0, 0]
    return F.conv2d(x, weight, bias, padding=begin, **window)


def _pool(function: Callable[..., Tensor], *flags: str) -> Callable[..., Tensor]:
    def pool(x: Tensor, *, kernel_shape: Numbers, pads: Numbers = (), **window: Any) -> Tensor:
        window |= {flag: bool(window.get(flag)) for flag in flags}
        # torch's default stride is the kernel; _refusals refuses pads that differ at begin and end
        return function(x, kernel_shape, **{"stride": 1, "padding": pads[:2] or 0} | window)

    return pool


def _batch_normalization(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    scale = weight / torch.sqrt(var + epsilon)
    shape = (-1, *[1] * (x.ndim - 2))
    # a multiply-add with constants: unlike F.batch_norm it keeps no activation for the backward pass
    return torch.addcmul((bias - mean * scale).view(shape), x, scale.view(shape))


def _div(x: Tensor, y: Tensor) -> Tensor:
    is_float = x.is_floating_point() or y.is_floating_point()
    return torch.div(x, y, rounding_mode=None if is_float else "trunc")


def _unsqueeze(x: Tensor, axes: Numbers) -> Tensor:
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _slice(
    x: Tensor, starts: Numbers, ends: Numbers, axes: Numbers | None = None, steps: Numbers | None = None
) -> Tensor:
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        # Python clamps the bounds as ONNX does, and torch has no negative steps
        picked = range(x.shape[axis])[start:end:step]
        bounds = (picked.start, picked.stop, picked.step) if picked else (0, 0, 1)
        x = x.index_select(axis, torch.arange(*bounds, device=x.device))  # made on the device: nothing waits
    return x


def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis % x.ndim
    picked = x[(slice(None),) * axis + (indices.flatten(),)]  # an index of one number would be waited for
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _cast(x: Tensor, *, to: int) -> Tensor:
    dtype = _dtype(to)
    return x if x.is_floating_point() and dtype.is_floating_point else x.to(dtype)


def _resize(
    x: Tensor,
    roi: Sequence[float] | None,
    scales: Sequence[float] | None = None,
    sizes: Numbers | None = None,
    **modes: str,
) -> Tensor:
    """Repeat or drop pixels of the spatial axes only, so that sizes frozen at export do not fix the batch.

    Sizes and positions are rounded to float32 as by onnxruntime: 0.7 of 10 is 7, in float64 it would be 6.
    modes: _CHOICES has the only ones.
    """
    outs = sizes or [int(np.float32(scale) * size) for scale, size in zip(scales or (), x.shape, strict=True)]
    for axis in range(2, x.ndim):
        size, out = x.shape[axis], outs[axis]
        scale = scales[axis] if scales else float(np.float32(out) / np.float32(size))
        x = x.index_select(axis, _nearest(size, out, scale, x.device))
    return x


@cache
def _nearest(size: int, out: int, scale: float, device: torch.device) -> Tensor:
    """Return the input index of each of `out` samples, copied to the device once."""
    return (torch.arange(out, dtype=torch.float32) / scale).long().clamp(max=size - 1).to(device)


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, axes=None, keepdims=1: function(x, dim=axes or list(range(x.ndim)), keepdim=bool(keepdims))


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *operands: function(*operands)  # a function whose signature can be read: it has no attributes


# operators without attributes that torch has under the same name
_NAMESAKES = (
    *("Abs", "Add", "Floor", "MatMul", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sub", "Where"),
)

_ZERO = torch.zeros(1)

OPS: dict[str, Callable[..., Tensor]] = {
    **{name: _plain(getattr(torch, name.lower())) for name in _NAMESAKES},
    "AveragePool": _pool(F.avg_pool2d, "ceil_mode", "count_include_pad"),
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Clip": lambda x, min=None, max=None: x.clamp(min, max),
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Constant": lambda **values: torch.as_tensor(*values.values()),  # one attribute: a tensor, a number or a list
    "ConstantOfShape": lambda shape, value=_ZERO: value.expand(shape),
    "Conv": _conv,
    "Div": _div,
    "Dropout": lambda x, ratio=None, training_mode=None: x,
    "Equal": _plain(torch.eq),
    "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, shape)),
    "Flatten": lambda x, axis=1: x.reshape(prod(x.shape[:axis]), -1),
    "Gather": _gather,
    "Gemm": lambda x, y, bias=0.0, alpha=1.0, beta=1.0, transA=0, transB=0: (
        alpha * ((x.mT if transA else x) @ (y.mT if transB else y)) + beta * bias
    ),
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "HardSwish": _plain(F.hardswish),
    "Identity": lambda x: x,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Max": lambda *parts: reduce(torch.maximum, parts),
    "MaxPool": _pool(F.max_pool2d, "ceil_mode"),
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),  # keeps a mask for the backward pass, not x
    "Pad": lambda x, pads, value=None, *, mode="constant": F.pad(
        x, _pad_argument(pads[: x.ndim], pads[x.ndim :]), mode, value
    ),
    "ReduceL2": _reduce(torch.linalg.vector_norm),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Reshape": lambda x, shape: x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)]),
    "Resize": _resize,
    "Shape": lambda x, start=0, end=None: torch.tensor(x.shape)[start:end],
    "Slice": _slice,
    "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(axes)),
    "Transpose": lambda x, perm=None: x.permute(perm or list(range(x.ndim))[::-1]),
    "Unsqueeze": _unsqueeze,
}

# the first operand that is a setting: it is read on the CPU and passed as a number or a list
_FIRST_SETTING = {"ConstantOfShape": 0} | dict.fromkeys(
    ("Clip", "Dropout", "Expand", "Pad", "ReduceL2", "ReduceMean", "ReduceSum", "Reshape", "Resize", "Slice",
     "Squeeze", "Unsqueeze"), 1)  # fmt: skip

# Attributes that change nothing, and the value that changes nothing. BatchNormalization's spatial=0 (mxnet exports
# before opset 9) has statistics per pixel; onnxruntime refuses it. Torch exports cubic_coeff_a in every mode.
_UNUSED = ("cubic_coeff_a", "extrapolation_value", "momentum", "seed", "storage_order")
_NEUTRAL: Attributes = dict.fromkeys(
    ("allowzero", "antialias", "exclude_outside", "noop_with_empty_axes", "training_mode"), 0
)
_NEUTRAL |= {"auto_pad": "NOTSET", "dilations": [1, 1], "keep_aspect_ratio_policy": "stretch", "spatial": 1}

_TORCH_NAMES = {"strides": "stride", "dilations": "dilation", "group": "groups"}  # torch refuses what it does not know

_RESIZE_DEFAULTS = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"}

# the supported values of other attributes; all values where an attribute is not named
_CHOICES: Mapping[str, Collection] = {
    "auto_pad": ("NOTSET",),
    "coordinate_transformation_mode": ("asymmetric",),
    "mode": ("nearest", "constant"),
    "nearest_mode": ("floor",),
}


def _attributes(node: onnx.NodeProto) -> Attributes:
    """Return the attributes of a node that have an effect."""
    attributes: Attributes = dict(_RESIZE_DEFAULTS) if node.op_type == "Resize" else {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, onnx.TensorProto):
            value = _tensor(value)
        elif isinstance(value, bytes):
            value = value.decode()
        if attribute.name not in _UNUSED and (attribute.name not in _NEUTRAL or value != _NEUTRAL[attribute.name]):
            attributes[_TORCH_NAMES.get(attribute.name, attribute.name)] = value
    return attributes


def _op_name(node: onnx.NodeProto, opset: int) -> str:
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type}"
    return "Resize before opset 11" if node.op_type == "Resize" and opset < 11 else node.op_type


def _refusals(op: str, node: onnx.NodeProto, attributes: Attributes, used: Collection[str]) -> list[str]:
    """Return the operator or attributes of this node that cannot be run; [] when it can.

    used: names of values that any node or output reads.
    """
    if op not in OPS:
        return [op]
    choices = {name: value for name, value in attributes.items() if name in _CHOICES}
    refused = [f"{op}({name}={value})" for name, value in choices.items() if value not in _CHOICES[name]]
    refused += [f"{op}(output {i})" for i, name in enumerate(node.output) if i and name in used]
    pads = attributes.get("pads", [])
    if op in ("AveragePool", "MaxPool") and pads[:2] != pads[2:]:
        refused.append(f"{op}(pads={pads})")
    try:
        inspect.signature(OPS[op]).bind(*node.input, **attributes)
    except TypeError as error:
        refused.append(f"{op} ({error})")
    return refused


def read_graph(path: str | Path) -> tuple[onnx.GraphProto, int]:
    """Return the graph of an ONNX file and its opset version.

    Raise FileNotFoundError without such a file, ValueError unless it is a complete ONNX model.
    """
    path = Path(path)
    if path.is_file() and (words := wrong_kind(path)):
        raise ValueError(f"{path} {words}")
    try:
        model = onnx.load(path)
    except (DecodeError, onnx.checker.ValidationError) as error:  # the second: tensors in files outside the folder
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole ONNX file; fetch it again ({error})"
        ) from error
    if not model.graph.output:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) holds no ONNX graph; fetch or export it again")
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    return model.graph, opset


def graph_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that a caller feeds; older files list the weights among them."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def value_shape(value: onnx.ValueInfoProto) -> list[int | None]:
    """Return the declared shape of a graph input or output, None for a dynamic axis."""
    return [axis.dim_value or None for axis in value.type.tensor_type.shape.dim]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One node, ready to run."""

    op: str
    attributes: Attributes
    operands: Sequence[str]  # names; "" for an operand left out
    output: str
    on_cpu: bool  # computed only from shapes and constants

    @property
    def settings(self) -> int:
        """Return the index of the first operand that stays on the CPU."""
        return 0 if self.on_cpu else _FIRST_SETTING.get(self.op, len(self.operands))

    def run(self, operands: Sequence[Tensor | None]) -> Tensor:
        first = _FIRST_SETTING.get(self.op, len(operands))
        settings = [None if value is None else value.tolist() for value in operands[first:]]
        return OPS[self.op](*operands[:first], *settings, **self.attributes)


class OnnxModule(nn.Module):
    """Runs the ONNX graph stored at `path`, differentiably, for any batch size, within 1e-5 of onnxruntime.

    It takes the one graph input and returns its output, or a tuple in graph order if there are several. A graph that
    was exported for a batch of 1 runs image by image, under vmap: as one batch to the operators.

    Attributes: input_shape (None for dynamic axes), output_names, and first_nodes, the names of the first eight nodes,
    from which insightface infers a recogniser's input range.

    Raises FileNotFoundError without a file. Raises ValueError for a damaged file, several inputs, unsupported operators
    and attributes.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        graph, opset = read_graph(path)
        inputs = graph_inputs(graph)
        if len(inputs) != 1:
            raise ValueError(f"{path} has {len(inputs)} inputs ({[i.name for i in inputs]}); OnnxModule runs one")
        self.input_name = inputs[0].name
        self.input_shape = value_shape(inputs[0])
        self.output_names = [value.name for value in graph.output]
        self.first_nodes = [node.name for node in graph.node[:8]]
        self._path = path
        self._steps, constants = _compile(graph, opset, path)
        # a value dies after the last step that names it as an operand or output
        self._last_use = {name: i for i, step in enumerate(self._steps) for name in (*step.operands, step.output)}
        self._last_use |= dict.fromkeys(self.output_names, len(self._steps))
        on_cpu = {name for step in self._steps for name in step.operands[step.settings :]}
        moved = {name for step in self._steps for name in step.operands[: step.settings] if name in constants}
        weights = sorted(name for name in moved if constants[name].is_floating_point())
        self._constants = {name: value for name, value in constants.items() if name in on_cpu or name not in weights}
        self._buffer_names = {name: f"weight_{i}" for i, name in enumerate(weights)}
        for name, buffer in self._buffer_names.items():
            self.register_buffer(buffer, constants[name])

    @torch.no_grad()
    def check_size(self, *shape: int) -> None:
        """Raise ValueError when the graph cannot run on an input of this shape. Nothing is computed."""
        weights = {name: weight.to("meta") for name, weight in self.named_buffers()}
        try:
            torch.func.functional_call(self, weights, torch.empty(shape, device="meta"))
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{self._path} cannot be run on an input of {shape}: {error}") from error

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.input_shape[:1] == [1] and len(x) > 1:
            outputs = torch.vmap(self)(x[:, None])
            return outputs.flatten(0, 1) if isinstance(outputs, Tensor) else tuple(y.flatten(0, 1) for y in outputs)
        values = {**self._constants, self.input_name: x}
        for i, step in enumerate(self._steps):
            values[step.output] = step.run([self._operand(step, k, values, x) for k in range(len(step.operands))])
            for name in (*step.operands, step.output):
                if self._last_use[name] == i:
                    values.pop(name, None)  # it may be an operand twice
        outputs = tuple(values[name] for name in self.output_names)
        return outputs[0] if len(outputs) == 1 else outputs

    def _operand(self, step: _Step, i: int, values: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
        name = step.operands[i]
        if not name:
            return None
        if i >= step.settings:
            return values[name]
        if name in self._buffer_names:
            return self.get_buffer(self._buffer_names[name])
        value = values[name]
        return value.to(x.device, x.dtype if value.is_floating_point() else value.dtype)


def _compile(graph: onnx.GraphProto, opset: int, path: str | Path) -> tuple[list[_Step], dict[str, Tensor]]:
    """Return the steps that depend on the input, and all constants by name. Fold arithmetic on constants.

    Raise ValueError listing every unsupported operator and attribute, and how many nodes need it, and for a weight
    whose bytes do not fill its shape.
    """
    try:
        constants = {tensor.name: _tensor(tensor) for tensor in graph.initializer}
    except ValueError as error:
        raise ValueError(f"{path} holds a damaged tensor ({error}); fetch or export it again") from error
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    refused: Counter[str] = Counter()
    on_cpu: set[str] = set()  # shapes, and results computed only from shapes and constants
    steps = []
    for node in graph.node:
        op, attributes = _op_name(node, opset), _attributes(node)
        if refusals := _refusals(op, node, attributes, used):
            refused.update(refusals)
            continue
        named = {name for name in node.input if name}
        stays_on_cpu = op == "Shape" or named <= on_cpu | constants.keys()
        operands, output = tuple(node.input), node.output[0]
        step = _Step(op=op, attributes=attributes, operands=operands, output=output, on_cpu=stays_on_cpu)
        if named <= constants.keys():
            constants[output] = step.run([constants[name] if name else None for name in operands])
            continue
        if stays_on_cpu:
            on_cpu.add(output)
        steps.append(step)
    if refused:
        listing = ", ".join(f"{refusal} x {count}" for refusal, count in sorted(refused.items()))
        raise ValueError(f"{path} needs what {__name__} does not run: {listing}; add it to OPS there")
    return steps, constants
