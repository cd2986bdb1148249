"""OnnxModule against onnxruntime, by operator and on networks; gradients; devices; refusals."""

import itertools
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


def run_onnxruntime(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def assert_same(outputs, expected):
    outputs = outputs if isinstance(outputs, tuple) else [outputs]
    for actual, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual.to(y.dtype), y, **TOLERANCE)


def write(path, nodes, constants=None, opset=13, shape=("n", 3, 6, 5)):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
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
RESIZE = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}

# name: (nodes, constants, opset); x is (2, 3, 6, 5)
CASES = {
    **{op: ([node(op)], {}, 13) for op in ("Abs", "Floor", "Identity", "Relu", "Sigmoid", "Dropout")},
    **{op: ([node(op, "x c")], {"c": VECTOR[0].reshape(3, 1, 1)}, 13) for op in ("Add", "Sub", "Mul", "Div", "PRelu")},
    "Sqrt": ([node("Abs", "x", "a"), node("Sqrt", "a")], {}, 13),
    "Conv": (
        [node("Conv", "x w b", pads=[1, 1, 1, 1], strides=[2, 1])], {"w": WEIGHT, "b": VECTOR[:, 0]}, 13),
    "Conv unequal pads": ([node("Conv", "x w", pads=[0, 1, 2, 0])], {"w": WEIGHT}, 13),
    "Conv grouped": ([node("Conv", "x w", group=3)], {"w": WEIGHT[:3, :1]}, 13),
    "MaxPool": ([node("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], {}, 13),
    "MaxPool ceil": ([node("MaxPool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)], {}, 13),
    **{
        f"AveragePool counted {counted} ceil {ceil}": (
            [node("AveragePool", kernel_shape=[3, 2], pads=[1, 0, 1, 0], strides=[2, 2], count_include_pad=counted,
                  ceil_mode=ceil)], {}, 19)
        for counted in (0, 1) for ceil in (0, 1)
    },
    "BatchNormalization": (
        [node("BatchNormalization", "x s b m v", epsilon=0.01)], dict(zip("sbmv", VECTOR, strict=True)), 13),
    "Gemm": ([FLATTEN, node("Gemm", "flat w b", alpha=0.5, beta=2.0)], {"w": FLAT, "b": VECTOR[:, 0]}, 13),
    "Gemm transposed": ([FLATTEN, node("Gemm", "flat w", transB=1)], {"w": FLAT.T.copy()}, 13),
    "MatMul": ([node("MatMul", "x w")], {"w": FLAT[:5]}, 13),
    "Flatten axis": ([node("Flatten", axis=-1)], {}, 13),
    "Reshape": ([node("Reshape", "x s")], {"s": ints(0, -1, 5)}, 13),
    "Transpose": ([node("Transpose", perm=[2, 3, 0, 1])], {}, 13),
    "Unsqueeze": ([node("Unsqueeze", "x a")], {"a": ints(0, -1)}, 13),
    "Unsqueeze attributes": ([node("Unsqueeze", axes=[1, 3])], {}, 11),
    "Concat": ([node("Abs", "x", "n"), node("Concat", "x n x", axis=1)], {}, 13),
    "Slice": (
        [node("Slice", "x s e a t")], {"s": ints(1, -4), "e": ints(9, -1), "a": ints(2, 3), "t": ints(2, 1)}, 13),
    "Slice no axes": ([node("Slice", "x s e")], {"s": ints(0, 1), "e": ints(2, 3)}, 13),
    "Gather": ([node("Gather", "x i", axis=1)], {"i": ints(2, 0, -1)}, 13),
    "Expand": ([node("ReduceMean", "x", "m", axes=[1]), node("Expand", "m s")], {"s": ints(1, 3, 1, 5)}, 13),
    "ReduceMean": ([node("ReduceMean", axes=[2, 3], keepdims=0)], {}, 13),
    "Equal": ([node("Shape", "x", "s"), node("Equal", "s c", "b"), node("Where", "b s d")],
              {"c": ints(2, -1, 6, -1), "d": ints(7, 8, 9, 10)}, 13),
    "Cast": ([node("Cast", "x", "i", to=TensorProto.INT64), node("Cast", "i", to=TensorProto.FLOAT)], {}, 13),
    "Constant float": ([node("Constant", "", "c", value_float=2.5), node("Mul", "x c")], {}, 13),
    "ConstantOfShape": (
        [node("Shape", "x", "s"),
         node("ConstantOfShape", "s", "c", value=helper.make_tensor("v", TensorProto.FLOAT, [1], [3.0])),
         node("Add", "x c")], {}, 13),
    "ConstantOfShape zeros": ([node("Shape", "x", "s"), node("ConstantOfShape", "s")], {}, 13),
    "Shape part": ([node("Shape", "x", start=1, end=-1)], {}, 15),
    "integer Div": ([node("Shape", "x", "s"), node("Sub", "z s", "n"), node("Div", "n c")],
                    {"z": ints(0), "c": ints(4)}, 13),
    # older exporters write sizes so: float arithmetic on shapes
    "shape arithmetic": (
        [node("Shape", "x", "s"), node("Cast", "s", "f", to=TensorProto.FLOAT), node("Mul", "f two", "g"),
         node("Floor", "g", "h"), node("Cast", "h", "i", to=TensorProto.INT64),
         node("Slice", "i st en", "hw"), node("Slice", "s ze st", "nc"), node("Concat", "nc hw", "t", axis=0),
         helper.make_node("Resize", ["x", "", "", "t"], ["y"], **RESIZE)],
        {"two": f(2.0), "st": ints(2), "en": ints(4), "ze": ints(0)}, 13),
    "Resize": ([node("Resize", "x r s", **RESIZE)], {"r": f(), "s": f(1, 1, 2, 3)}, 13),
}  # fmt: skip
# one case of each family that reads shapes or axes, where an image by itself may differ from a batch
UNDER_VMAP = ("PRelu", "Conv", "MaxPool", "BatchNormalization", "Gemm", "Reshape", "Transpose", "Unsqueeze", "Slice",
              "Gather", "ReduceMean", "ConstantOfShape", "shape arithmetic")  # fmt: skip


def write_case(tmp_path, case, shape=("n", 3, 6, 5)):
    return write(tmp_path / "op.onnx", *CASES[case], shape)


def picture(batch=2, dtype=torch.float32):
    return torch.randn(batch, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_an_operator_equals_onnxruntime(case, tmp_path):
    path = write_case(tmp_path, case)
    assert_same(OnnxModule(path)(picture()), run_onnxruntime(path, picture()))


@pytest.mark.parametrize("case", UNDER_VMAP)
def test_a_graph_for_one_image_runs_a_batch(case, tmp_path):
    path = write_case(tmp_path, case, (1, 3, 6, 5))
    singles = [run_onnxruntime(path, image)[0] for image in picture(3).split(1)]
    assert_same(OnnxModule(path)(picture(3)), [torch.cat(singles)])


def test_every_operator_has_a_case():
    assert set(OPS) == {step.op_type for nodes, _, _ in CASES.values() for step in nodes}


@pytest.mark.parametrize("network,size,dynamic", [(MiniArcFace, 112, {0: "n"}), (MiniSCRFD, 64, {2: "h", 3: "w"})])
def test_a_network_of_opset_13_equals_onnxruntime(network, size, dynamic, tmp_path):
    x = torch.randn(1, 3, size, size)
    path = export(network(), x, tmp_path / "n.onnx", 13, {"x": dynamic})
    assert_same(OnnxModule(path)(x), run_onnxruntime(path, x))


@pytest.mark.parametrize("case", ["AveragePool counted 0 ceil 1", "MaxPool", "PRelu", "Resize"])
def test_the_gradient_equals_finite_differences(case, tmp_path):
    module = OnnxModule(write_case(tmp_path, case)).double()
    assert torch.autograd.gradcheck(module, picture(dtype=torch.float64).requires_grad_())


def test_weights_are_frozen_buffers_that_follow_to(tmp_path):
    torch.manual_seed(0)
    arcface = OnnxModule(export(MiniArcFace(size=16), torch.randn(1, 3, 16, 16), tmp_path / "n.onnx"))
    x = torch.randn(2, 3, 16, 16)
    single = arcface(x)
    assert not list(arcface.parameters()) and not any(b.requires_grad for b in arcface.buffers())
    torch.testing.assert_close(arcface.train()(x), single, rtol=0, atol=0)  # batch norm keeps its statistics
    torch.testing.assert_close(arcface.double()(x.double()).float(), single, **TOLERANCE)
    assert arcface.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_half_precision_files_run_in_float32(tmp_path):
    path = write(tmp_path / "h.onnx", [node("MatMul", "x w")], {"w": FLAT[:5].astype(np.float16)})
    torch.testing.assert_close(OnnxModule(path)(picture()), picture() @ torch.tensor(FLAT[:5]).half().float())


@pytest.mark.parametrize("case", ["shape arithmetic", "Slice"])
def test_shapes_stay_on_the_cpu_when_the_weights_move(case, tmp_path):
    module = OnnxModule(write_case(tmp_path, case))
    shape = module(picture()).shape
    # meta tensors have no values: reading a setting from the moved weights, or mixing devices, raises
    y = module.to("meta")(picture().to("meta"))
    assert y.device.type == "meta" and y.shape == shape


def test_dead_intermediates_are_freed(tmp_path, monkeypatch):
    names = ["x", *(f"v{i}" for i in range(9)), "y"]
    nodes = [node("Abs", a, b) for a, b in itertools.pairwise(names)]
    module = OnnxModule(write(tmp_path / "chain.onnx", nodes))
    results, alive = [], []

    def spy(x):
        results.append(weakref.ref(y := -x))
        alive.append(sum(ref() is not None for ref in results))
        return y

    monkeypatch.setitem(OPS, "Abs", spy)
    with torch.no_grad():
        module(picture())
    assert len(alive) == 10 and max(alive) == 2  # a node's operand and its result


@pytest.mark.parametrize(
    "nodes,message",
    [
        ([node("Sin", "x", "a"), node("FusedConv", "a w", "c"), node("Sin", "c", "y")],
         "needs .*: FusedConv x 1, Sin x 2; add it to OPS"),
        ([node("Conv", "x w", auto_pad="SAME_UPPER")], r"Conv \(got an unexpected keyword argument 'auto_pad'\)"),
        ([node("MaxPool", "x", "z y", kernel_shape=[2, 2])], "cannot be run on .*: 'y'"),
        ([node("MaxPool", kernel_shape=[2, 2], pads=[0, 0, 1, 1])], r"MaxPool\(pads=\[0, 0, 1, 1\]\)"),
        ([node("Resize", "x r s")], "cannot be run on .*Resize by nearest, half_pixel, round_prefer_floor"),
        ([node("Resize", "x r s", **RESIZE)], "cannot be run on .*Resize by a factor of 1.5, which is not an integer"),
        ([node("Slice", "x i i i t")], "cannot be run on .*step"),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_run_is_refused(nodes, message, tmp_path):
    constants = {"w": WEIGHT, "r": f(), "s": f(1, 1, 1.5, 2), "i": ints(1), "t": ints(-1)}
    with pytest.raises(ValueError, match=rf"odd\.onnx .*{message}"):
        OnnxModule(write(tmp_path / "odd.onnx", nodes, constants)).check_size(1, 3, 6, 5)


def changed(content, change):
    model = onnx.load_from_string(content)
    change(model.graph)
    return model.SerializeToString()


def test_a_file_that_is_not_one_complete_graph_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="glintr100.onnx"):
        OnnxModule(tmp_path / "glintr100.onnx")
    complete = write(tmp_path / "complete.onnx", [node("MatMul", "x w")], {"w": FLAT[:5]}).read_bytes()
    for content, message in (
        (complete[: len(complete) // 2], "is not a complete ONNX file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a Git LFS pointer"),
        (b"", "is empty"),
        (changed(complete, lambda graph: graph.initializer[0].dims.append(2)), "holds a damaged tensor"),
        (changed(complete, lambda graph: graph.input.add(name="z")), r"has 2 inputs \(\['x', 'z'\]\)"),
    ):
        (tmp_path / "damaged.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=f"damaged.onnx.*{message}"):
            OnnxModule(tmp_path / "damaged.onnx")
