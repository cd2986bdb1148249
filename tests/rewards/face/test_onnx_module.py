"""OnnxModule against onnxruntime, op by op and on whole nets; gradients; devices; what it refuses and how."""

import weakref

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from face_nets import MiniArcFace, MiniSCRFD, export
from onnx import TensorProto, helper, numpy_helper

from rewardfl.rewards.face.onnx_module import OPS, OnnxModule

# Different summation orders in float32, on outputs of order 1.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def by_onnxruntime(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def by_module(module, x):
    outputs = module(x)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, **TOLERANCE)


def write(path, nodes, constants=None, opset=13, shape=("n", 3, 6, 5), outputs=("y",)):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return path


def node(op, inputs="x", output="y", **attributes):
    return helper.make_node(op, inputs.split(), output.split(), **attributes)


def f(*values):
    return np.array(values, dtype=np.float32)


def ints(*values):
    return np.array(values, dtype=np.int64)


RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)
VECTOR = RNG.uniform(0.5, 1.5, size=(4, 3)).astype(np.float32)
FLAT = RNG.normal(size=(90, 4)).astype(np.float32)
FLATTEN = node("Flatten", output="flat")

# name: (nodes, constants, opset); x is (2, 3, 6, 5)
CASES = {
    **{op: ([node(op)], {}, 13) for op in ("Abs", "Floor", "Identity", "Neg", "Relu", "Sigmoid")},
    **{
        f"{op} by channel": ([node(op, "x c")], {"c": VECTOR[0].reshape(3, 1, 1)}, 13)
        for op in ("Add", "Sub", "Mul", "Div", "PRelu")
    },
    "PRelu one slope": ([node("PRelu", "x c")], {"c": f(0.2)}, 13),
    "LeakyRelu": ([node("LeakyRelu", alpha=0.3)], {}, 13),
    "LeakyRelu default": ([node("LeakyRelu")], {}, 13),
    "Pow": ([node("Pow", "x c")], {"c": f(2.0)}, 13),
    "Sqrt": ([node("Abs", "x", "a"), node("Sqrt", "a")], {}, 13),
    "Clip operands": ([node("Clip", "x lo hi")], {"lo": np.float32(-0.5), "hi": np.float32(0.7)}, 13),
    "Clip upper only": ([helper.make_node("Clip", ["x", "", "hi"], ["y"])], {"hi": np.float32(0.7)}, 13),
    "Clip attributes": ([node("Clip", min=-0.5, max=0.7)], {}, 9),
    "Dropout": ([node("Dropout")], {}, 13),
    "Conv": (
        [node("Conv", "x w b", pads=[1, 1, 1, 1], strides=[2, 1])], {"w": WEIGHT, "b": VECTOR[:, 0]}, 13),
    "Conv unequal pads": ([node("Conv", "x w", pads=[0, 1, 2, 0])], {"w": WEIGHT}, 13),
    "Conv dilated": ([node("Conv", "x w", pads=[2, 2, 2, 2], dilations=[2, 2])], {"w": WEIGHT}, 13),
    "Conv grouped": ([node("Conv", "x w", group=3)], {"w": WEIGHT[:3, :1]}, 13),
    "MaxPool": ([node("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], {}, 13),
    "MaxPool default stride": ([node("MaxPool", kernel_shape=[2, 2])], {}, 13),
    "MaxPool ceil": ([node("MaxPool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)], {}, 13),
    **{
        f"AveragePool pads {pads} counted {counted} ceil {ceil}": (
            [node("AveragePool", kernel_shape=[3, 2], pads=pads, strides=[2, 2], count_include_pad=counted,
                  ceil_mode=ceil)], {}, 19)
        for pads in ([0, 0, 0, 0], [1, 0, 1, 0]) for counted in (0, 1) for ceil in (0, 1)
    },
    "GlobalAveragePool": ([node("GlobalAveragePool")], {}, 13),
    "BatchNormalization": (
        [node("BatchNormalization", "x s b m v", epsilon=0.01)], dict(zip("sbmv", VECTOR, strict=True)), 13),
    "BatchNormalization default": (
        [node("BatchNormalization", "x s b m v")], dict(zip("sbmv", VECTOR * 1e-4, strict=True)), 13),
    "Gemm": ([FLATTEN, node("Gemm", "flat w b", alpha=0.5, beta=2.0)], {"w": FLAT, "b": VECTOR[:, 0]}, 13),
    "Gemm transposed": ([FLATTEN, node("Gemm", "flat w", transB=1)], {"w": FLAT.T.copy()}, 13),
    "Gemm left transposed": ([FLATTEN, node("Gemm", "flat w", transA=1)], {"w": FLAT[:2]}, 13),
    "MatMul": ([node("MatMul", "x w")], {"w": FLAT[:5]}, 13),
    "Flatten axis": ([node("Flatten", axis=2)], {}, 13),
    "Flatten last": ([node("Flatten", axis=-1)], {}, 13),
    "Reshape": ([node("Reshape", "x s")], {"s": ints(0, -1, 5)}, 13),
    "Transpose": ([node("Transpose", perm=[2, 3, 0, 1])], {}, 13),
    "Transpose default": ([node("Transpose")], {}, 13),
    "Unsqueeze Squeeze": (
        [node("Unsqueeze", "x a", "u"), node("Squeeze", "u b")], {"a": ints(0, -1), "b": ints(5)}, 13),
    "Unsqueeze Squeeze attributes": (
        [node("Unsqueeze", "x", "u", axes=[1, 3]), node("Squeeze", "u", axes=[3])], {}, 11),
    "Concat": ([node("Neg", "x", "n"), node("Concat", "x n x", axis=1)], {}, 13),
    "Slice": (
        [node("Slice", "x s e a t")],
        {"s": ints(1, -1), "e": ints(9, -9), "a": ints(2, 3), "t": ints(2, -1)}, 13),
    "Slice no axes": ([node("Slice", "x s e")], {"s": ints(0, 1), "e": ints(2, 3)}, 13),
    "Slice attributes": ([node("Slice", starts=[1], ends=[-1], axes=[2])], {}, 9),
    "Gather": ([node("Gather", "x i", axis=1)], {"i": ints(2, 0, -1)}, 13),
    "Gather scalar": ([node("Gather", "x i", axis=2)], {"i": np.int64(1)}, 13),
    "Expand": ([node("ReduceMean", "x", "m", axes=[1]), node("Expand", "m s")], {"s": ints(1, 3, 1, 5)}, 13),
    "Pad": ([node("Pad", "x p v")], {"p": ints(0, 0, 1, 2, 0, 1, 0, 3), "v": np.float32(0.5)}, 13),
    "Pad attributes": ([node("Pad", pads=[0, 0, 1, 2, 0, 0, 0, 3], value=-1.0)], {}, 9),
    "ReduceMean": ([node("ReduceMean", axes=[2, 3], keepdims=0)], {}, 13),
    "ReduceSum attribute": ([node("ReduceSum", axes=[-1])], {}, 11),
    "ReduceL2": ([node("ReduceL2", axes=[1])], {}, 13),
    **{
        f"{op} {words} opset {opset}": ([node(op, "x a" if axes else "x")], axes, opset)
        for op, opset in (("ReduceSum", 13), ("ReduceMean", 18), ("ReduceL2", 18))
        for words, axes in (("without axes", {}), ("empty", {"a": ints()}), ("operand", {"a": ints(1, -1)}))
    },
    "Equal": ([node("Shape", "x", "s"), node("Equal", "s c", "b"), node("Where", "b s d")],
              {"c": ints(2, -1, 6, -1), "d": ints(7, 8, 9, 10)}, 13),
    **{op: ([node(op, "x c z")], {"c": VECTOR[0].reshape(3, 1, 1) - 1, "z": f(0.1)}, 13) for op in ("Max",)},
    **{op: ([node(op)], {}, 14) for op in ("HardSigmoid", "HardSwish", "Reciprocal")},
    "HardSigmoid of paddle": ([node("HardSigmoid", alpha=1 / 6, beta=0.5)], {}, 13),
    "Cast": ([node("Cast", "x", "i", to=TensorProto.INT64), node("Cast", "i", to=TensorProto.FLOAT)], {}, 13),
    "Cast bool": ([node("Relu", "x", "r"), node("Cast", "r", to=TensorProto.BOOL)], {}, 13),
    "Constant ints": ([node("Constant", "", "s", value_ints=[0, -1]), node("Reshape", "x s")], {}, 13),
    "Constant float": ([node("Constant", "", "c", value_float=2.5), node("Mul", "x c")], {}, 13),
    "ConstantOfShape": (
        [node("Shape", "x", "s"),
         node("ConstantOfShape", "s", "c", value=helper.make_tensor("v", TensorProto.FLOAT, [1], [3.0])),
         node("Add", "x c")], {}, 13),
    "ConstantOfShape zeros": ([node("Shape", "x", "s"), node("ConstantOfShape", "s")], {}, 13),
    "Shape part": ([node("Shape", "x", start=1, end=-1)], {}, 15),
    "integer Div": ([node("Shape", "x", "s"), node("Neg", "s", "n"), node("Div", "n c")], {"c": ints(4)}, 13),
    # how older exporters write a reshape by computed sizes: float arithmetic on shapes
    "shape arithmetic": (
        [node("Shape", "x", "s"), node("Cast", "s", "f", to=TensorProto.FLOAT), node("Mul", "f two", "g"),
         node("Floor", "g", "h"), node("Cast", "h", "i", to=TensorProto.INT64),
         node("Slice", "i st en", "hw"), node("Slice", "s ze st", "nc"), node("Concat", "nc hw", "t", axis=0),
         helper.make_node("Resize", ["x", "", "", "t"], ["y"], coordinate_transformation_mode="asymmetric",
                          nearest_mode="floor")],
        {"two": f(1.5), "st": ints(2), "en": ints(4), "ze": ints(0)}, 13),
    **{
        f"Resize {scale}": (
            [node("Resize", "x r s", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
            {"r": f(), "s": f(1, 1, *scale)}, 13)
        for scale in ((2.0, 2.0), (1.5, 0.6), (0.25, 0.2))
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_op_equals_onnxruntime(case, tmp_path):
    """As a batch, and image by image if the graph was exported for a batch of one."""
    nodes, constants, opset = CASES[case]
    path = write(tmp_path / "op.onnx", nodes, constants, opset)
    x = torch.randn(3, 3, 6, 5, generator=torch.Generator().manual_seed(1))
    assert_same(by_module(OnnxModule(path), x[:2]), by_onnxruntime(path, x[:2]))
    if case == "Gemm left transposed":  # its weight is for two images
        return
    path = write(tmp_path / "op.onnx", nodes, constants, opset, shape=(1, 3, 6, 5))
    singles = [by_onnxruntime(path, image) for image in x.split(1)]
    assert_same(by_module(OnnxModule(path), x), [torch.cat(parts) for parts in zip(*singles, strict=True)])


def test_fractional_scales_round_as_in_onnxruntime(tmp_path):
    rng = np.random.default_rng(7)
    for i in range(120):
        scales = [round(float(scale), 1 + i % 3) for scale in rng.uniform(0.2, 3.2, 2)]
        shape = (1, 2, int(rng.integers(3, 24)), int(rng.integers(3, 24)))
        constants, names = {"r": f(), "s": f(1, 1, *scales)}, "x r s"
        if i % 2:
            sizes = [max(1, int(scale * size)) for scale, size in zip(scales, shape[2:], strict=True)]
            constants, names = {"r": f(), "e": f(), "t": ints(*shape[:2], *sizes)}, "x r e t"
        resize = node("Resize", names, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
        path = write(tmp_path / "r.onnx", [resize], constants, 13, shape)
        x = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
        assert_same(by_module(OnnxModule(path), x), by_onnxruntime(path, x))


def test_every_op_has_a_case():
    tested = {n.op_type for nodes, _, _ in CASES.values() for n in nodes}
    assert set(OPS) == tested


NETS = {
    **{f"arcface opset {i}": (MiniArcFace(), (112, 112), i, {"x": {0: "n"}}, 3) for i in (11, 12, 13, 14, 17)},
    **{f"scrfd opset {i}": (MiniSCRFD(), (64, 96), i, {"x": {2: "h", 3: "w"}}, 1) for i in (11, 12, 13, 14, 17)},
    "scrfd batched": (MiniSCRFD(batched=True), (64, 96), 13, {"x": {0: "n", 2: "h", 3: "w"}}, 3),
}


@pytest.mark.parametrize("name", NETS)
def test_net_equals_onnxruntime(name, tmp_path):
    net, size, opset, dynamic, batch = NETS[name]
    example = torch.randn(1, 3, 64, 64) if "scrfd" in name else torch.randn(1, 3, *size)
    path = export(net, example, tmp_path / "n.onnx", opset, dynamic)
    x = torch.randn(batch, 3, *size)
    module = OnnxModule(path)
    assert_same(by_module(module, x), by_onnxruntime(path, x))
    with torch.no_grad():
        assert_same(by_module(module, x), by_module(net, x))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("AveragePool", "Reduce", "Hard", "Max"))])
def test_an_ops_gradient_is_that_of_finite_differences(case, tmp_path):
    nodes, constants, opset = CASES[case]
    module = OnnxModule(write(tmp_path / "op.onnx", nodes, constants, opset)).double()
    x = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x)


def test_the_gradient_is_that_of_finite_differences(tmp_path):
    torch.manual_seed(0)
    path = export(MiniArcFace(size=16), torch.randn(1, 3, 16, 16), tmp_path / "n.onnx")
    module = OnnxModule(path).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x, fast_mode=True)


def test_weights_are_frozen_buffers_that_follow_to(tmp_path):
    net = MiniArcFace(size=16)
    module = OnnxModule(export(net, torch.randn(1, 3, 16, 16), tmp_path / "n.onnx"))
    x = torch.randn(2, 3, 16, 16)
    single = module(x)
    assert not list(module.parameters()) and not any(b.requires_grad for b in module.buffers())
    torch.testing.assert_close(module.train()(x), single, rtol=0, atol=0)  # batch norm keeps its statistics
    double = module.double()(x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single, **TOLERANCE)
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_half_precision_files_run_in_float32(tmp_path):
    path = write(tmp_path / "h.onnx", [node("MatMul", "x w")], {"w": FLAT[:5].astype(np.float16)})
    x = torch.randn(1, 3, 6, 5)
    torch.testing.assert_close(OnnxModule(path)(x), x @ torch.tensor(FLAT[:5]).half().float())


@pytest.mark.parametrize("case", ["shape arithmetic", "ConstantOfShape", "Gather", "Slice", "Resize (1.5, 0.6)"])
def test_shapes_stay_on_the_cpu_when_the_weights_move(case, tmp_path):
    nodes, constants, opset = CASES[case]
    module = OnnxModule(write(tmp_path / "op.onnx", nodes, constants, opset))
    x = torch.randn(2, 3, 6, 5)
    shape = module(x).shape
    # meta tensors have no values: reading a setting from the moved weights, or mixing devices, raises
    y = module.to("meta")(x.to("meta"))
    assert y.device.type == "meta" and y.shape == shape


def test_dead_intermediates_are_freed(tmp_path, monkeypatch):
    names = ["x", *(f"v{i}" for i in range(20)), "y"]
    nodes = [node("Neg", a, b) for a, b in zip(names, names[1:], strict=False)]
    module = OnnxModule(write(tmp_path / "chain.onnx", nodes))
    made, alive = [], []

    def spy(x):
        y = -x
        made.append(weakref.ref(y))
        alive.append(sum(ref() is not None for ref in made))
        return y

    x = torch.randn(1, 3, 6, 5)
    monkeypatch.setitem(OPS, "Neg", spy)
    with torch.no_grad():
        module(x)
    assert len(alive) == 21 and max(alive) == 2  # a node's operand and its result


def test_unsupported_ops_are_named_together_with_the_file(tmp_path):
    nodes = [
        node("Sin", "x", "a"),
        node("LSTM", "a w w", "b"),
        helper.make_node("FusedConv", ["b", "w"], ["c"], domain="com.microsoft"),
        node("Resize", "c r s", "d", mode="cubic"),
        node("Sin", "d", "y"),
    ]
    path = write(tmp_path / "odd.onnx", nodes, {"w": f(1.0), "r": f(), "s": f(1, 1, 2, 2)})
    with pytest.raises(
        ValueError, match=r"odd\.onnx needs .*: LSTM x 1, .*Resize\(mode=cubic\) x 1, .*Sin x 2, com\.micro"
    ):
        OnnxModule(path)


@pytest.mark.parametrize(
    "nodes,message",
    [
        ([node("Conv", "x w", auto_pad="SAME_UPPER")], r"Conv\(auto_pad=SAME_UPPER\)"),
        ([node("AveragePool", kernel_shape=[2, 2], dilations=[2, 2])], "'dilation'"),
        ([helper.make_node("MaxPool", ["x"], ["z", "y"], kernel_shape=[2, 2])], r"MaxPool\(output 1\)"),
        ([node("MaxPool", kernel_shape=[2, 2], pads=[0, 0, 1, 1])], r"MaxPool\(pads=\[0, 0, 1, 1\]\)"),
        ([node("Resize", "x w w")], r"Resize\(coordinate_transformation_mode=half_pixel\) x 1"),
        ([node("Resize", "x w w")], r"Resize\(nearest_mode=round_prefer_floor\) x 1"),
        ([node("Resize", "x w")], "Resize before opset 11"),
        ([node("Softmax")], r"needs what .* does not run: Softmax x 1"),
        ([node("Reshape", "x w", allowzero=1)], r"Reshape \(got an unexpected keyword argument 'allowzero'\)"),
        ([node("Pad", "x w w w")], r"Pad \(too many positional arguments\)"),
        ([node("Add", "x w", axis=1, broadcast=1)], r"Add \(got an unexpected keyword argument 'axis'\)"),
    ],
)
def test_unsupported_attributes_are_refused(nodes, message, tmp_path):
    opset = 10 if "opset" in message else 13
    with pytest.raises(ValueError, match=message):
        OnnxModule(write(tmp_path / "odd.onnx", nodes, {"w": WEIGHT}, opset)).check_size(1, 3, 6, 5)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="glintr100.onnx"):
        OnnxModule(tmp_path / "glintr100.onnx")
    whole = export(MiniArcFace(), torch.randn(1, 3, 112, 112), tmp_path / "whole.onnx").read_bytes()
    model = onnx.load_from_string(whole)
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    for content, message in (
        (whole[: len(whole) // 2], "is not a whole ONNX file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a Git LFS pointer"),
        (b"", "is empty"),
        (model.SerializeToString(), "holds a damaged tensor"),
    ):
        (tmp_path / "damaged.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=f"damaged.onnx.*{message}"):
            OnnxModule(tmp_path / "damaged.onnx")


def test_two_inputs_are_refused(tmp_path):
    model = onnx.load(write(tmp_path / "one.onnx", [node("Add", "x z")]))
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1]))
    onnx.save(model, tmp_path / "two.onnx")
    with pytest.raises(ValueError, match=r"two.onnx has 2 inputs \(\['x', 'z'\]\)"):
        OnnxModule(tmp_path / "two.onnx")


def test_a_graph_that_reads_what_nothing_makes_is_refused(tmp_path):
    for nodes in ([node("Add", "x z")], [node("Add", "x z", "y"), node("Neg", "y", "z")]):
        with pytest.raises(ValueError, match=r"loop\.onnx cannot be run on an input of \(1, 3, 6, 5\): 'z'"):
            OnnxModule(write(tmp_path / "loop.onnx", nodes)).check_size(1, 3, 6, 5)


def test_weights_outside_the_folder_are_refused(tmp_path):
    model = onnx.load(write(tmp_path / "odd.onnx", [node("MatMul", "x w")], {"w": FLAT[:5]}))
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../outside.bin")
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"odd\.onnx"):
        OnnxModule(tmp_path / "odd.onnx")
