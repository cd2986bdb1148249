"""Identity similarity of faces: detect, track, align, embed, and compare with the pool of a real clip."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, Faces, align, similarity_transform
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.identity import FaceIdentity, FacePool, FaceRecogniser, FaceScore
from rewardfl.rewards.face.onnx_module import OnnxModule
from rewardfl.rewards.face.track import track_largest
