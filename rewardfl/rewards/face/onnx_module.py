"""An ONNX graph as a torch module, so that a published face recogniser can be differentiated to its pixels.

Every node runs as one torch function, in graph order. Weights are buffers: they follow `.to(device, dtype)`, and no
optimizer gets them. Shapes and values computed from them stay on the CPU, off the GPU's queue.
Semantics: https://onnx.ai/onnx/operators/, checked against onnxruntime in tests/test_onnx_module.py.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewardfl.rewards.face.onnx_file import graph_inputs, read_graph, value_shape

Attributes = dict[str, Any]


def _types(*names: str) -> set[int]:
    return {onnx.TensorProto.DataType.Value(name) for name in names}


_FLOAT_TYPES = _types("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")
_INTEGER_TYPES = _types("INT64", "INT32", "INT16", "INT8", "UINT8", "UINT16", "UINT32", "UINT64")


def _pad_argument(begin: list[int], end: list[int]) -> list[int]:
    """Return torch's padding: (begin, end) pairs from the last axis to the first."""
    return [pad for pair in reversed(list(zip(begin, end, strict=True))) for pad in pair]


def _symmetric_padding(a: Attributes, x: Tensor, fill: float) -> tuple[Tensor, list[int]]:
    """Return x, padded where begin and end differ, and the padding left to the operator, one number per axis."""
    spatial = x.ndim - 2
    pads = a.get("pads", [0] * 2 * spatial)
    begin, end = pads[:spatial], pads[spatial:]
    if begin == end:
        return x, begin
    return F.pad(x, _pad_argument(begin, end), value=fill), [0] * spatial


def _conv(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, padding = _symmetric_padding(a, x, 0.0)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    return convolve(x, weight, bias, a.get("strides", 1), padding, a.get("dilations", 1), a.get("group", 1))


def _max_pool(a: Attributes, x: Tensor) -> Tensor:
    x, padding = _symmetric_padding(a, x, -torch.inf)
    strides, dilations = a.get("strides", 1), a.get("dilations", 1)  # torch's default stride is the kernel
    return F.max_pool2d(x, a["kernel_shape"], strides, padding, dilations, bool(a.get("ceil_mode", 0)))


def _average_pool(a: Attributes, x: Tensor) -> Tensor:
    padded, padding = _symmetric_padding(a, x, 0.0)
    ceil_mode, count_padding = bool(a.get("ceil_mode", 0)), bool(a.get("count_include_pad", 0))
    window = (a["kernel_shape"], a.get("strides", 1), padding, ceil_mode, count_padding)
    pooled = F.avg_pool2d(padded, *window)
    if padded is x or count_padding:
        return pooled
    inside, _ = _symmetric_padding(a, torch.ones_like(x), 0.0)
    return pooled / F.avg_pool2d(inside, *window)  # both divide by the whole window


def _batch_normalization(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    scale = weight / torch.sqrt(var + a.get("epsilon", 1e-5))
    shape = (-1, *[1] * (x.ndim - 2))
    # a multiply-add with constants: unlike F.batch_norm it keeps no activation for the backward pass
    return torch.addcmul((bias - mean * scale).view(shape), x, scale.view(shape))


def _instance_normalization(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=a.get("epsilon", 1e-5))


def _gemm(a: Attributes, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    x, y = (x.mT if a.get("transA", 0) else x), (y.mT if a.get("transB", 0) else y)
    product = a.get("alpha", 1.0) * (x @ y)
    return product if bias is None else product + a.get("beta", 1.0) * bias


def _div(a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    is_float = x.is_floating_point() or y.is_floating_point()
    return torch.div(x, y, rounding_mode=None if is_float else "trunc")


def _clip(a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    low = a.get("min") if low is None else low.item()  # attributes before opset 11, operands since
    high = a.get("max") if high is None else high.item()
    return x if low is None and high is None else x.clamp(low, high)


def _setting(a: Attributes, name: str, operand: Tensor | None) -> list[int] | None:
    """Return a list that older opsets pass as attribute `name`, newer ones as an operand; None without either."""
    return a.get(name) if operand is None else operand.tolist()


def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())])


def _split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return `part` of the node's `parts` outputs, see `_outputs`. Without sizes only the last may be smaller."""
    sizes = _setting(a, "split", sizes)
    axis = a.get("axis", 0)
    return x.split(-(-x.shape[axis] // a["parts"]) if sizes is None else sizes, axis)[a["part"]]


def _squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    axes = _setting(a, "axes", axes)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    axes = _setting(a, "axes", axes)
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _slice(a: Attributes, x: Tensor, *operands: Tensor | None) -> Tensor:
    operands = [*operands, None, None, None, None][:4]
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (_setting(a, name, value) for name, value in zip(names, operands, strict=True))
    axes = axes or range(len(starts))
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        # Python clamps the bounds as ONNX does, and torch has no negative steps
        picked = range(x.shape[axis])[start:end:step]
        bounds = (picked.start, picked.stop, picked.step) if picked else (0, 0, 1)
        x = x.index_select(axis, torch.arange(*bounds, device=x.device))
    return x


def _gather(a: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.ndim
    picked = x[(slice(None),) * axis + (indices.flatten(),)]
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _cast(a: Attributes, x: Tensor) -> Tensor:
    if a["to"] in _FLOAT_TYPES:
        return x if x.is_floating_point() else x.float()  # floats keep the module's precision
    return x.bool() if a["to"] == onnx.TensorProto.BOOL else x.long()


def _constant_of_shape(a: Attributes, shape: Tensor) -> Tensor:
    value = _tensor(a["value"]) if "value" in a else torch.zeros(1)
    return value.expand(shape.tolist())


def _pad(a: Attributes, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None) -> Tensor:
    pads = _setting(a, "pads", pads)
    argument = _pad_argument(pads[: x.ndim], pads[x.ndim :])
    while argument and argument[-2:] == [0, 0]:  # reflect and edge refuse padding of the batch axis, even 0
        argument = argument[:-2]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}[a.get("mode", "constant")]
    fill = (a.get("value", 0.0) if value is None else value.item()) if mode == "constant" else None
    return F.pad(x, argument, mode, fill)


# The position of output sample i on the input axis of `size` samples, resized to `out` by `scale`.
_POSITIONS = {
    "asymmetric": lambda i, size, out, scale: i / scale,
    "align_corners": lambda i, size, out, scale: i * (size - 1) / max(out - 1, 1),
    "half_pixel": lambda i, size, out, scale: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, size, out, scale: (i + 0.5) / scale - 0.5 if out > 1 else i,
    "tf_half_pixel_for_nn": lambda i, size, out, scale: (i + 0.5) / scale,
}

HALFWAY = 1e-6  # onnxruntime 1.31 rounds a position closer than this to the middle of two pixels to the middle

_NEAREST = {
    "round_prefer_floor": lambda position: torch.ceil(position - 0.5 - HALFWAY),
    "round_prefer_ceil": lambda position: torch.floor(position + 0.5 + HALFWAY),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def _resize(
    a: Attributes,
    x: Tensor,
    roi: Tensor | None,
    scales: Tensor | list[float] | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    """Resize the spatial axes one by one, so that sizes frozen at export do not fix the batch.

    Sizes and positions are rounded to float32 as by onnxruntime: 0.7 of 10 is 7, in float64 it would be 6.
    """
    positions = _POSITIONS[a.get("coordinate_transformation_mode", "half_pixel")]
    rounding = _NEAREST[a.get("nearest_mode", "round_prefer_floor")]
    axes = range(2, x.ndim)
    if sizes is None:
        scaling = {axis: float(scales[axis]) for axis in axes}
        outs = {axis: int(np.float32(scaling[axis]) * np.float32(x.shape[axis])) for axis in axes}
    else:
        outs = {axis: int(sizes[axis]) for axis in axes}
        scaling = {axis: float(np.float32(outs[axis]) / np.float32(x.shape[axis])) for axis in axes}
    if all(outs[axis] == x.shape[axis] for axis in axes):
        return x  # also for a scale of 1.01, which moves pixels where another axis changes its size
    for axis in axes:
        size, out, scale = x.shape[axis], outs[axis], scaling[axis]
        if scale == 1:
            continue
        steps = torch.arange(out, dtype=torch.float32, device=x.device if x.is_meta else "cpu")
        # float64 from here on: `rounding` must not round a second time
        position = positions(steps, size, out, scale).clamp(0, size - 1).double()
        if a.get("mode", "nearest") == "nearest":
            x = x.index_select(axis, rounding(position).long().to(x.device))
        else:
            low = position.floor()
            weight = (position - low).to(x).view(-1, *[1] * (x.ndim - 1 - axis))
            low, high = low.long().to(x.device), (low + 1).clamp(max=size - 1).long().to(x.device)
            x = torch.lerp(x.index_select(axis, low), x.index_select(axis, high), weight)
    return x


def _upsample(a: Attributes, x: Tensor, scales: Tensor | None = None) -> Tensor:
    """Resize as before opset 10: scales are an operand in opset 9, an attribute before."""
    rules = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "mode": a.get("mode", "nearest")}
    return _resize(rules, x, None, a["scales"] if scales is None else scales)


@dataclass(frozen=True)
class Op:
    """The function of an operator and the attributes that it supports. Loading refuses all other attributes."""

    run: Callable[..., Tensor]  # takes the node's attributes and its operands, None for an operand left out
    # attributes with an effect in `run`, or without one on the result, and their supported values; None for all
    honoured: Mapping[str, Collection | None] = field(default_factory=dict)
    first_setting: float = math.inf  # index of the first operand that is a shape, axes or a bound, read on the CPU


def _any(*names: str) -> dict[str, Collection | None]:
    return dict.fromkeys(names)


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Op:
    def reduced(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
        axes = _setting(a, "axes", axes)
        if not axes and a.get("noop_with_empty_axes", 0):
            return x
        return function(x, axes or list(range(x.ndim)), bool(a.get("keepdims", 1)))

    return Op(reduced, _any("axes", "keepdims", "noop_with_empty_axes"), 1)


_WINDOW = _any("kernel_shape", "pads", "strides") | {"auto_pad": ("NOTSET",)}
_RESIZE: dict[str, Collection | None] = {
    "antialias": (0,),
    "coordinate_transformation_mode": tuple(_POSITIONS),
    "exclude_outside": (0,),
    "keep_aspect_ratio_policy": ("stretch",),
    "mode": ("nearest", "linear"),
    "nearest_mode": tuple(_NEAREST),
}

OPS: dict[str, Op] = {
    "Abs": Op(lambda a, x: x.abs()),
    "Add": Op(lambda a, x, y: x + y),
    "AveragePool": Op(_average_pool, _WINDOW | _any("ceil_mode", "count_include_pad") | {"dilations": ([1, 1],)}),
    # spatial=0 (mxnet exports before opset 9) has statistics per pixel; onnxruntime refuses it
    "BatchNormalization": Op(
        _batch_normalization, _any("epsilon", "momentum") | {"spatial": (1,), "training_mode": (0,)}
    ),
    "Cast": Op(_cast, {"to": _FLOAT_TYPES | _INTEGER_TYPES | _types("BOOL")}),
    "Ceil": Op(lambda a, x: x.ceil()),
    "Clip": Op(_clip, _any("min", "max"), 1),
    "Concat": Op(lambda a, *parts: torch.cat(parts, a["axis"]), _any("axis")),
    "Constant": Op(
        lambda a: _tensor(a["value"]) if "value" in a else torch.tensor(*a.values()),
        _any("value", "value_float", "value_floats", "value_int", "value_ints"),
    ),
    "ConstantOfShape": Op(_constant_of_shape, _any("value"), 0),
    "Conv": Op(_conv, _WINDOW | _any("dilations", "group")),
    "Div": Op(_div),
    "Dropout": Op(lambda a, x, *settings: x, _any("ratio", "seed"), 1),
    "Equal": Op(lambda a, x, y: x == y),
    "Erf": Op(lambda a, x: x.erf()),
    "Exp": Op(lambda a, x: x.exp()),
    "Expand": Op(lambda a, x, shape: x.expand(torch.broadcast_shapes(x.shape, shape.tolist())), first_setting=1),
    "Flatten": Op(lambda a, x: x.reshape(math.prod(x.shape[: a.get("axis", 1)]), -1), _any("axis")),
    "Floor": Op(lambda a, x: x.floor()),
    "Gather": Op(_gather, _any("axis")),
    "Gemm": Op(_gemm, _any("alpha", "beta", "transA", "transB")),
    "GlobalAveragePool": Op(lambda a, x: x.mean(tuple(range(2, x.ndim)), keepdim=True)),
    "Greater": Op(lambda a, x, y: x > y),
    "GreaterOrEqual": Op(lambda a, x, y: x >= y),
    "HardSigmoid": Op(lambda a, x: (a.get("alpha", 0.2) * x + a.get("beta", 0.5)).clamp(0, 1), _any("alpha", "beta")),
    "HardSwish": Op(lambda a, x: F.hardswish(x)),
    "Identity": Op(lambda a, x: x),
    "InstanceNormalization": Op(_instance_normalization, _any("epsilon")),
    "LeakyRelu": Op(lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)), _any("alpha")),
    "Less": Op(lambda a, x, y: x < y),
    "LessOrEqual": Op(lambda a, x, y: x <= y),
    "Log": Op(lambda a, x: x.log()),
    "MatMul": Op(lambda a, x, y: x @ y),
    "Max": Op(lambda a, *parts: reduce(torch.maximum, parts)),
    "MaxPool": Op(_max_pool, _WINDOW | _any("ceil_mode", "dilations", "storage_order")),
    "Min": Op(lambda a, *parts: reduce(torch.minimum, parts)),
    "Mul": Op(lambda a, x, y: x * y),
    "Neg": Op(lambda a, x: -x),
    "PRelu": Op(lambda a, x, slope: torch.where(x < 0, x * slope, x)),  # keeps a mask for the backward pass, not x
    "Pad": Op(_pad, _any("pads", "value") | {"mode": ("constant", "reflect", "edge")}, 1),
    "Pow": Op(lambda a, x, y: x**y),
    "Reciprocal": Op(lambda a, x: x.reciprocal()),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: x.mean(axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keep)),
    "Relu": Op(lambda a, x: x.relu()),
    "Reshape": Op(_reshape, {"allowzero": (0,)}, 1),
    # torch exports cubic_coeff_a in every mode
    "Resize": Op(_resize, _RESIZE | _any("cubic_coeff_a", "extrapolation_value"), 1),
    "Shape": Op(lambda a, x: torch.tensor(x.shape)[a.get("start", 0) : a.get("end")], _any("start", "end")),
    "Sigmoid": Op(lambda a, x: x.sigmoid()),
    "Slice": Op(_slice, _any("starts", "ends", "axes"), 1),
    "Softmax": Op(lambda a, x: x.softmax(a.get("axis", -1)), _any("axis")),
    "Softmax before opset 13": Op(lambda a, x: x.flatten(a.get("axis", 1)).softmax(-1).view_as(x), _any("axis")),
    "Split": Op(_split, _any("axis", "num_outputs", "split"), 1),
    "Sqrt": Op(lambda a, x: x.sqrt()),
    "Squeeze": Op(_squeeze, _any("axes"), 1),
    "Sub": Op(lambda a, x, y: x - y),
    "Tanh": Op(lambda a, x: x.tanh()),
    "Transpose": Op(lambda a, x: x.permute(a.get("perm", list(range(x.ndim))[::-1])), _any("perm")),
    "Unsqueeze": Op(_unsqueeze, _any("axes"), 1),
    "Upsample": Op(_upsample, _any("scales") | {"mode": _RESIZE["mode"]}, 1),
    "Where": Op(lambda a, condition, x, y: torch.where(condition, x, y)),
}

# Bytes per image of the batch for one tensor of a graph; all tensors that are alive may take four times as many.
# A detector at 4096 pixels takes 0.9e9, a recogniser 3e6. A small malicious file (Expand, Pad, a Concat that doubles
# forty times) could allocate any number.
LARGEST = 2**31
# The same for tensors computed from shapes and constants alone; a recogniser's largest weight takes 5e7.
LARGEST_CONSTANT = 2**28


def _tensor(proto: onnx.TensorProto) -> Tensor:
    """Return a stored tensor: float types as float32, integers as int64, so half-precision files run everywhere."""
    array = onnx.numpy_helper.to_array(proto)
    if proto.data_type in _FLOAT_TYPES:
        return torch.tensor(array.astype(np.float32))
    return torch.tensor(array if array.dtype == bool else array.astype(np.int64))


def _attributes(node: onnx.NodeProto) -> Attributes:
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _op_name(node: onnx.NodeProto, opset: int) -> str:
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type}"
    return "Softmax before opset 13" if node.op_type == "Softmax" and opset < 13 else node.op_type


def _refusals(node: onnx.NodeProto, opset: int, used: set[str], true: set[str]) -> list[str]:
    """Return the operator or attributes of this node that cannot be run; [] when it can.

    used: names of values that any node or output reads. true: names of constants that are all True.
    """
    op, a = _op_name(node, opset), _attributes(node)
    if op not in OPS:
        return [op]
    honoured = OPS[op].honoured
    refused = [
        f"{op}({name}={str(value)[:40]})"
        for name, value in a.items()
        if name not in honoured or (honoured[name] is not None and value not in honoured[name])
    ]
    if op in ("AveragePool", "MaxPool") and len(a["kernel_shape"]) != 2:
        refused.append(f"{op}(kernel_shape={a['kernel_shape']})")
    if op == "Dropout" and true.intersection(node.input[2:]):
        refused.append("Dropout(training_mode=1)")
    if op == "Resize" and opset < 11:
        refused.append(f"Resize(opset {opset})")
    if op == "Pad" and len(node.input) > 3:
        refused.append("Pad(axes)")
    extra_outputs = [] if op == "Split" else node.output[1:]
    return refused + [f"{op}(output {i})" for i, name in enumerate(extra_outputs, 1) if name in used]


def _check_supported(graph: onnx.GraphProto, opset: int, path: str | Path) -> None:
    """Raise ValueError listing every unsupported operator and attribute of the graph, and how many nodes need it."""
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    true = {name for name, t in tensors.items() if t.data_type == onnx.TensorProto.BOOL and _tensor(t).all()}
    refused: dict[str, list[str]] = {}
    for node in graph.node:
        for refusal in _refusals(node, opset, used, true):
            refused.setdefault(refusal, []).append(node.name or node.output[0])  # names are optional in ONNX
    if refused:
        listing = ", ".join(f"{refusal} x {len(nodes)} (from {nodes[0]})" for refusal, nodes in sorted(refused.items()))
        raise ValueError(f"{path} needs what {__name__} does not run: {listing}; add it to OPS there")


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One node, ready to run."""

    op: str
    attributes: Attributes
    operands: tuple[str, ...]  # names; "" for an operand left out
    first_on_cpu: float  # index of the first operand that stays on the CPU
    output: str
    dead: tuple[str, ...] = ()  # values that no later step reads


def _bytes(value: Tensor) -> int:
    """Return the bytes of a tensor once it is contiguous: the next operator writes an expanded tensor in full."""
    return value.numel() * value.element_size()


def _meta_result(op: str, attributes: Attributes, operands: Sequence[Tensor | None], max_bytes: int) -> Tensor:
    """Return the operator's result on the meta device, without allocating its data.

    Raise ValueError when it would take more than `max_bytes`, or when the operator cannot be run on such operands.
    """
    shadows = [x if x is None or i >= OPS[op].first_setting else x.to("meta") for i, x in enumerate(operands)]
    try:
        result = OPS[op].run(attributes, *shadows)
        size = _bytes(result)
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise ValueError(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from error
    if size > max_bytes:
        raise ValueError(f"it would make a tensor of {size / 1e9:.3g} GB, of which {max_bytes / 1e9:.3g} are allowed")
    return result


class OnnxModule(nn.Module):
    """Runs the ONNX graph stored at `path`, differentiably, for any batch size.

    A graph that was exported for a batch of 1 runs image by image, under vmap: as one batch to the operators.

    Takes the one graph input; returns its output, or a tuple in graph order when there are several. Float weights are
    float32 buffers; `.to(device, dtype)` moves them. It has no parameters, and train() and eval() are the same.
    Results are within 1e-5 of onnxruntime's.

    Attributes: input_shape (None for dynamic axes), output_names, and first_nodes, the names of the first eight nodes,
    from which insightface infers a recogniser's input range.

    Raises FileNotFoundError without a file. Raises ValueError for a damaged file, several inputs, unsupported operators
    and attributes, and for a graph that takes more memory than LARGEST allows. Memory is checked when loading where the
    file fixes the input's size, else at the first input.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        graph, opset = read_graph(path)
        inputs = graph_inputs(graph)
        if len(inputs) != 1:
            raise ValueError(f"{path} has {len(inputs)} inputs ({[i.name for i in inputs]}); OnnxModule runs one")
        _check_supported(graph, opset, path)
        self.input_name = inputs[0].name
        self.input_shape = value_shape(inputs[0])
        self.output_names = [value.name for value in graph.output]
        self.first_nodes = [node.name for node in graph.node[:8]]
        self._path = path
        self._steps, constants = _compile(graph, opset, path)
        read = {(name, i >= step.first_on_cpu) for step in self._steps for i, name in enumerate(step.operands)}
        weights = {n for n, on_cpu in read if not on_cpu and n in constants and constants[n].is_floating_point()}
        self._cpu = {n: constants[n] for n, on_cpu in read if n in constants and (on_cpu or n not in weights)}
        self._buffer_names = {name: f"weight_{i}" for i, name in enumerate(sorted(weights))}
        for name, buffer in self._buffer_names.items():
            self.register_buffer(buffer, constants[name])
        self._checked: set[tuple[torch.Size, torch.dtype]] = set()
        if None not in self.input_shape:
            self.check_size(torch.Size(self.input_shape))

    @torch.no_grad()
    def check_size(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> None:
        """Raise ValueError when the graph cannot run on an input of this shape, or takes too much memory for it."""
        if (shape, dtype) in self._checked:
            return
        x = torch.empty(shape, dtype=dtype, device="meta")
        values = {**self._cpu, self.input_name: x}
        held, images = sum(map(_bytes, values.values())), max(1, *shape[:1])
        for step in self._steps:
            try:
                operands = self._operands(step, values, x)
                # the shapes of later steps depend on the values of shapes
                on_cpu = all(value is None or not value.is_meta for value in operands)
                max_bytes = LARGEST_CONSTANT if on_cpu else LARGEST * images
                result = _meta_result(step.op, step.attributes, operands, max_bytes)
                values[step.output] = OPS[step.op].run(step.attributes, *operands) if on_cpu else result
            except (KeyError, ValueError) as error:
                why = f"nothing makes its operand {error}" if isinstance(error, KeyError) else error
                raise ValueError(
                    f"{self._path}: {step.op} of {step.output!r} cannot be run on an input of {tuple(shape)}: {why}"
                ) from error
            held += _bytes(result)
            if held > 4 * LARGEST * images:
                raise ValueError(
                    f"{self._path}: would hold {held / 1e9:.3g} GB at {step.op} of {step.output!r} for an input of "
                    f"{tuple(shape)}, at most {4 * LARGEST / 1e9:.3g} are allowed an image"
                )
            held -= sum(_bytes(values.pop(name)) for name in step.dead)
        self._checked.add((shape, dtype))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.input_shape[:1] == [1] and len(x) > 1:
            outputs = torch.vmap(self)(x[:, None])
            return outputs.flatten(0, 1) if isinstance(outputs, Tensor) else tuple(y.flatten(0, 1) for y in outputs)
        self.check_size(x.shape, x.dtype)
        values = {**self._cpu, self.input_name: x}
        for step in self._steps:
            values[step.output] = OPS[step.op].run(step.attributes, *self._operands(step, values, x))
            for name in step.dead:
                del values[name]
        outputs = tuple(values[name] for name in self.output_names)
        return outputs[0] if len(outputs) == 1 else outputs

    def _operands(self, step: _Step, values: dict[str, Tensor], x: Tensor) -> list[Tensor | None]:
        return [self._operand(name, values, x, i >= step.first_on_cpu) for i, name in enumerate(step.operands)]

    def _operand(self, name: str, values: dict[str, Tensor], x: Tensor, on_cpu: bool) -> Tensor | None:
        if not name:
            return None
        if on_cpu:
            return values[name]
        if name in self._buffer_names:
            return self.get_buffer(self._buffer_names[name])
        value = values[name]
        return value.to(x.device, x.dtype if value.is_floating_point() else value.dtype)


def _outputs(node: onnx.NodeProto) -> list[tuple[str, Attributes]]:
    """Return the outputs to compute, each with its attributes: all of a Split, of other nodes the first."""
    attributes = _attributes(node)
    if node.op_type != "Split":
        return [(node.output[0], attributes)]
    parts = len(node.output)
    return [(name, attributes | {"part": i, "parts": parts}) for i, name in enumerate(node.output)]


def _compile(graph: onnx.GraphProto, opset: int, path: str | Path) -> tuple[list[_Step], dict[str, Tensor]]:
    """Return the steps that depend on the input, and all constants by name. Fold arithmetic on constants.

    Raise ValueError for a weight whose bytes do not fill its shape, and for arithmetic that fails or grows too large.
    """
    try:
        constants = {tensor.name: _tensor(tensor) for tensor in graph.initializer}
    except ValueError as error:
        raise ValueError(f"{path} holds a damaged tensor ({error}); fetch or export it again") from error
    on_cpu: set[str] = set()  # shapes, and results computed from shapes and constants alone
    steps, folded = [], 0
    outputs = [(node, output, attributes) for node in graph.node for output, attributes in _outputs(node)]
    for node, output, attributes in outputs:
        op, named = _op_name(node, opset), [name for name in node.input if name]
        if all(name in constants for name in named):
            try:
                operands = [constants[name] if name else None for name in node.input]
                _meta_result(op, attributes, operands, LARGEST_CONSTANT)
                constants[output] = OPS[op].run(attributes, *operands)
            except ValueError as error:
                raise ValueError(f"{path}: {op} of {output!r} cannot be computed: {error}") from error
            folded += _bytes(constants[output])
            if folded > 4 * LARGEST:
                raise ValueError(f"{path}: its arithmetic on constants takes more than {4 * LARGEST / 1e9:.3g} GB")
            continue
        stays_on_cpu = op == "Shape" or all(name in on_cpu or name in constants for name in named)
        if stays_on_cpu:
            on_cpu.add(output)
        first_on_cpu = 0 if stays_on_cpu else OPS[op].first_setting
        steps.append(
            _Step(op=op, attributes=attributes, operands=tuple(node.input), first_on_cpu=first_on_cpu, output=output)
        )

    # a value dies after the last step that names it as an operand or output
    last_use = {name: i for i, step in enumerate(steps) for name in (*step.operands, step.output)}
    never_dead = {value.name for value in graph.output} | set(constants) | {""}
    dead: list[list[str]] = [[] for _ in steps]
    for name, i in last_use.items():
        if name not in never_dead:
            dead[i].append(name)
    return [replace(step, dead=tuple(names)) for step, names in zip(steps, dead, strict=True)], constants
