"""The graph, inputs and shapes of an ONNX file. Needs onnx, not torch: the configuration reads files too."""

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError


def read_graph(path: str | Path) -> tuple[onnx.GraphProto, int]:
    """Return the graph of an ONNX file and its opset version.

    Raise FileNotFoundError without such a file, ValueError unless it is a whole ONNX model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no ONNX file at {path}")
    try:
        model = onnx.load(path)
    except DecodeError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole ONNX file: a download cut short, or a "
            f"git-lfs pointer? Fetch it again ({error})"
        ) from error
    except onnx.checker.ValidationError as error:  # it refuses tensors in files outside the folder, or in links
        raise ValueError(f"{path} keeps tensors in other files that cannot be read: {error}") from error
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
