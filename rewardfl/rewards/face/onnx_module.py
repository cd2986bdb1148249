"""An ONNX graph as a torch module, so that a published face recogniser can be differentiated to its pixels.

Semantics: https://onnx.ai/onnx/operators/, checked against onnxruntime in tests/rewards/face/test_onnx_module.py.

A function in OPS takes a node's operands, None for one left out, and its attributes by their ONNX names. A setting
(a shape, axes) has the same name as operand and as the attribute that it is in older opsets.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kernel_shape: Numbers = (),
    pads: Numbers = (0, 0, 0, 0),
    strides: Numbers = (1, 1),
    group: int = 1,
) -> Tensor:
    """Convolve, padded first where begin and end differ."""
    top, left, bottom, right = pads
    if (top, left) != (bottom, right):
        x, top, left = F.pad(x, [left, right, top, bottom]), 0, 0
    return F.conv2d(x, weight, bias, strides, (top, left), groups=group)


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
    index = [slice(None)] * x.ndim
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


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
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    """Repeat pixels of the spatial axes only, so that sizes frozen at export do not fix the batch."""
    if (modes := (mode, coordinate_transformation_mode, nearest_mode)) != ("nearest", "asymmetric", "floor"):
        raise ValueError(f"Resize by {', '.join(modes)}, where only nearest, asymmetric, floor is known")
    for axis in range(2, x.ndim):
        size = x.shape[axis]
        factor = sizes[axis] / size if sizes else (scales or ())[axis]
        if factor < 1 or factor != int(factor):
            raise ValueError(f"Resize by a factor of {factor:g}, which is not an integer")
        x = x.index_select(axis, torch.arange(size * int(factor), device=x.device) // int(factor))
    return x


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *operands: function(*operands)  # a function whose signature can be read: it has no attributes


# operators without attributes that torch has under the same name
_NAMESAKES = ("Abs", "Add", "Floor", "MatMul", "Mul", "Relu", "Sigmoid", "Sqrt", "Sub", "Where")
OPS: dict[str, Callable[..., Tensor]] = {
    **{name: _plain(getattr(torch, name.lower())) for name in _NAMESAKES},
    "AveragePool": lambda x, *, kernel_shape, pads=(0, 0), strides=1, ceil_mode=0, count_include_pad=0: F.avg_pool2d(
        x, kernel_shape, strides, pads[:2], bool(ceil_mode), bool(count_include_pad)
    ),
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Constant": lambda **values: torch.as_tensor(*values.values()),  # one attribute: a tensor, a number or a list
    "ConstantOfShape": lambda shape, value=None: torch.zeros(shape) if value is None else value.expand(shape),
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
    "Identity": lambda x: x,
    "MaxPool": lambda x, *, kernel_shape, pads=(0, 0), strides=1, ceil_mode=0: F.max_pool2d(
        x, kernel_shape, strides, pads[:2], ceil_mode=bool(ceil_mode)
    ),
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),  # keeps a mask for the backward pass, not x
    "ReduceMean": lambda x, axes=None, keepdims=1: x.mean(axes or list(range(x.ndim)), bool(keepdims)),
    "Reshape": lambda x, shape: x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)]),
    "Resize": _resize,
    "Shape": lambda x, start=0, end=None: torch.tensor(x.shape)[start:end],
    "Slice": _slice,
    "Transpose": lambda x, perm=None: x.permute(perm or list(range(x.ndim))[::-1]),
    "Unsqueeze": _unsqueeze,
}

# the first operand that is a setting: it is read on the CPU and passed as a number or a list
_FIRST_SETTING = {"ConstantOfShape": 0}
_FIRST_SETTING |= dict.fromkeys(("Dropout", "Expand", "ReduceMean", "Reshape", "Resize", "Slice", "Unsqueeze"), 1)

# Attributes that change nothing, and the value that changes nothing. BatchNormalization's spatial=0 (mxnet exports
# before opset 9) has statistics per pixel; onnxruntime refuses it. Torch exports cubic_coeff_a in every mode.
_UNUSED = ("cubic_coeff_a", "extrapolation_value", "momentum", "seed", "storage_order")
_NEUTRAL: Attributes = {"allowzero": 0, "auto_pad": "NOTSET", "dilations": [1, 1], "spatial": 1, "training_mode": 0}


def _attributes(node: onnx.NodeProto) -> Attributes:
    """Return the attributes of a node that have an effect."""
    attributes: Attributes = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, onnx.TensorProto):
            value = _tensor(value)
        elif isinstance(value, bytes):
            value = value.decode()
        if attribute.name not in _UNUSED and (attribute.name not in _NEUTRAL or value != _NEUTRAL[attribute.name]):
            attributes[attribute.name] = value
    return attributes


def _unsupported(node: onnx.NodeProto, attributes: Attributes) -> str | None:
    """Return the operator or attribute of a node that cannot be run, None when it can."""
    op = node.op_type
    if op not in OPS:
        return op
    pads = attributes.get("pads", [])
    if op in ("AveragePool", "MaxPool") and pads[:2] != pads[2:]:
        return f"{op}(pads={pads})"
    try:
        inspect.signature(OPS[op]).bind(*node.input, **attributes)
    except TypeError as error:
        return f"{op} ({error})"
    return None


def read_graph(path: str | Path) -> onnx.GraphProto:
    """Return the graph of an ONNX file; raise FileNotFoundError or, for a damaged or other file, ValueError."""
    path = Path(path)
    if path.is_file() and (words := wrong_kind(path)):
        raise ValueError(f"{path} {words}")
    try:
        model = onnx.load(path)
    except (DecodeError, onnx.checker.ValidationError) as error:  # the second: tensors in files outside the folder
        raise ValueError(f"{path} is not a complete ONNX file; fetch it again ({error})") from error
    return model.graph


def graph_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that a caller feeds; older files list the weights among them."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def value_shape(value: onnx.ValueInfoProto) -> list[int | None]:
    """Return the declared shape of a graph input or output, None for a dynamic axis."""
    return [axis.dim_value or None for axis in value.type.tensor_type.shape.dim]


@dataclass(frozen=True, kw_only=True)
class _Step:
    op: str
    attributes: Attributes
    operands: Sequence[str]  # names; "" for an operand left out
    output: str
    settings: int  # index of the first operand that stays on the CPU

    def run(self, operands: Sequence[Tensor | None]) -> Tensor:
        first = _FIRST_SETTING.get(self.op, len(operands))
        settings = [None if value is None else value.tolist() for value in operands[first:]]
        return OPS[self.op](*operands[:first], *settings, **self.attributes)


class OnnxModule(nn.Module):
    """Runs the ONNX graph stored at `path`, differentiably, for any batch size, within 1e-5 of onnxruntime.

    It takes the one graph input and returns its output, or a tuple in graph order if there are several. A graph that
    was exported for a batch of 1 runs image by image, under vmap: as one batch to the operators. Weights are buffers,
    which no optimizer gets. Shapes and values computed from them stay on the CPU, off the GPU's queue.

    input_shape: None for dynamic axes. first_nodes: names of the first eight nodes; insightface infers a recogniser's
    input range from them.

    Raises FileNotFoundError without a file. Raises ValueError for a damaged file, several inputs, unsupported operators
    and attributes.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        graph = read_graph(path)
        inputs = graph_inputs(graph)
        if len(inputs) != 1:
            raise ValueError(f"{path} has {len(inputs)} inputs ({[i.name for i in inputs]}); OnnxModule runs one")
        self.input_name = inputs[0].name
        self.input_shape = value_shape(inputs[0])
        self.output_names = [value.name for value in graph.output]
        self.first_nodes = [node.name for node in graph.node[:8]]
        self._path = path
        self._steps, constants = _compile(graph, path)
        # a value dies after the last step that names it as an operand or output
        self._last_use = {name: i for i, step in enumerate(self._steps) for name in (*step.operands, step.output)}
        self._last_use |= dict.fromkeys(self.output_names, len(self._steps))
        on_cpu = {name for step in self._steps for name in step.operands[step.settings :]}
        self._constants = {name: value for name, value in constants.items() if name in self._last_use}
        weights = sorted(name for name in self._constants.keys() - on_cpu if constants[name].is_floating_point())
        self._buffer_names = {name: f"weight_{i}" for i, name in enumerate(weights)}
        for name, buffer in self._buffer_names.items():
            self.register_buffer(buffer, self._constants.pop(name))

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
        values: dict[str, Any] = {"": None, **self._constants, self.input_name: x}
        values |= {name: self.get_buffer(buffer) for name, buffer in self._buffer_names.items()}

        def move(name: str) -> Tensor | None:
            value = values[name]
            return value if value is None else value.to(x.device, x.dtype if value.is_floating_point() else value.dtype)

        for i, step in enumerate(self._steps):
            settings = [values[name] for name in step.operands[step.settings :]]
            values[step.output] = step.run([*map(move, step.operands[: step.settings]), *settings])
            for name in (*step.operands, step.output):
                if self._last_use[name] == i:
                    values.pop(name, None)  # it may be an operand twice
        outputs = tuple(values[name] for name in self.output_names)
        return outputs[0] if len(outputs) == 1 else outputs


def _compile(graph: onnx.GraphProto, path: str | Path) -> tuple[list[_Step], dict[str, Tensor]]:
    """Return the steps that depend on the input, and all constants by name, arithmetic on constants folded.

    Raise ValueError with the unsupported operators and their number of nodes, and for a weight with too few bytes.
    """
    try:
        constants = {tensor.name: _tensor(tensor) for tensor in graph.initializer}
    except ValueError as error:
        raise ValueError(f"{path} holds a damaged tensor ({error}); fetch or export it again") from error
    refused: Counter[str] = Counter()
    on_cpu: set[str] = set()  # shapes, and results computed only from shapes and constants
    steps = []
    for node in graph.node:
        attributes = _attributes(node)
        if problem := _unsupported(node, attributes):
            refused[problem] += 1
            continue
        named = {name for name in node.input if name}
        stays_on_cpu = node.op_type == "Shape" or named <= on_cpu | constants.keys()
        operands, output = tuple(node.input), node.output[0]
        settings = 0 if stays_on_cpu else _FIRST_SETTING.get(node.op_type, len(operands))
        step = _Step(op=node.op_type, attributes=attributes, operands=operands, output=output, settings=settings)
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
