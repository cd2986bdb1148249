"""Embeddings of aligned faces, with gradient."""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rewardfl.rewards.face.align import CROP_SIZE
from rewardfl.rewards.face.onnx_module import OnnxModule
from rewardfl.rewards.face.pack import is_sface


class FaceRecogniser(nn.Module):
    """ArcFace or SFace: crops (N, 3, 112, 112), RGB in [-1, 1] -> unit embeddings (N, D), with gradient to the crops.

    `chunk` crops are embedded at a time. The backward pass runs each chunk again, so that a clip holds one chunk's
    graph.
    """

    def __init__(self, path: str | Path, chunk: int = 8):
        super().__init__()
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 face, got {chunk}")
        self.net = OnnxModule(path)
        if self.net.input_shape[2:] != [CROP_SIZE, CROP_SIZE]:
            raise ValueError(f"{path} takes {self.net.input_shape[2:]} pixels; a recogniser here takes 112 x 112")
        self.net.check_size(1, 3, CROP_SIZE, CROP_SIZE)
        self.chunk = chunk
        # insightface's rule (model_zoo/arcface_onnx.py): mxnet exports normalise inside, and have these node names
        subtracts = any(name.startswith(("Sub", "_minus")) for name in self.net.first_nodes)
        multiplies = any(name.startswith(("Mul", "_mul")) for name in self.net.first_nodes)
        # OpenCV gives SFace levels of 0..255 (modules/objdetect/src/face_recognize.cpp: feature)
        self.wants_bytes = (subtracts and multiplies) or is_sface(path)

    def forward(self, crops: Tensor) -> Tensor:
        x = (crops + 1) * 127.5 if self.wants_bytes else crops  # 0..255, or (0..255 - 127.5) / 127.5
        run = functools.partial(checkpoint, self.net, use_reentrant=False, preserve_rng_state=False)
        embeddings = [run(chunk) for chunk in x.split(self.chunk)]
        return F.normalize(torch.cat(embeddings).flatten(1))
