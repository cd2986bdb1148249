"""Identity similarity as published benchmarks measure it, so that numbers can be compared with theirs.

Both protocols compare with the input image, not with other frames of a real clip. They take the largest face of each
frame separately, without tracking, and detect at 320 pixels. Where no face is detected, they detect again on the frame
with a grey border of a quarter of its size. They clamp cosines at 0 and leave out frames without a face.

    consisid   FaceSim-Arc of ConsisID (arXiv 2411.17440): 16 frames. eval/get_facesim_fid.py in PKU-YuanGroup/ConsisID.
    opens2v    FaceSim-Arc of OpenS2V-Eval (arXiv 2505.20292): 32 frames. eval/get_facesim.py in OpenS2V-Nexus.

Known faults, reproduced here: frame 0 counts although it is the input image, and scores about 1. A hidden face is left
out, so one frame with a face can stand for the clip. With several people the largest face is compared. OpenS2V-Eval
means to leave cosines of 0 out of the mean, but its line for this recogniser compares the list with 0: they stay in.
Both papers use the recogniser of buffalo_l, so numbers compare only with that pack.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, Faces, align, similarity_transform, to_frames
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.identity import FaceRecogniser

VERSION = 1  # raise it when a number is computed in another way
DET_SIZE = 320
_GREY = 128 / 127.5 - 1  # colour of the border
BORDER = 4  # the frame's height and width over the border's
PROTOCOLS = {"consisid": 16, "opens2v": 32}  # frames of a clip that are compared, from the first to the last


@torch.no_grad()
def largest_faces(frames: Tensor, detector: FaceDetector, recogniser: FaceRecogniser) -> list[Tensor | None]:
    """Return the unit embedding (D,), on the CPU, of the largest face in each of (N, 3, H, W) frames, or None."""
    embeddings = _embed_first(frames, detector.detect(frames), recogniser)
    if missing := [i for i, embedding in enumerate(embeddings) if embedding is None]:
        down, across = (int(size * (1 / BORDER)) for size in frames.shape[-2:])
        padded = F.pad(frames[missing], (across, across, down, down), value=_GREY)
        retried = _embed_first(padded, detector.detect(padded), recogniser)
        for i, embedding in zip(missing, retried, strict=True):
            embeddings[i] = embedding
    return embeddings


def protocol_score(
    samples: int, video: Tensor, reference: Tensor, detector: FaceDetector, recogniser: FaceRecogniser
) -> float:
    """Return the mean max(0, cosine) of a clip (3, F, H, W) in [-1, 1], over frames with a face; 0 without any.

    samples: of PROTOCOLS. reference: of the input image (D,). The frames are rounded down, and may repeat.
    """
    indices = np.linspace(0, video.shape[1] - 1, samples).astype(int).tolist()
    once = sorted(set(indices))
    faces = dict(zip(once, largest_faces(to_frames(video)[once], detector, recogniser), strict=True))
    cosines = [max(0.0, float(reference @ face)) for i in indices if (face := faces[i]) is not None]
    return sum(cosines) / len(cosines) if cosines else 0.0


def _embed_first(frames: Tensor, faces: Sequence[Faces], recogniser: FaceRecogniser) -> list[Tensor | None]:
    """Return the embedding of each frame's first face: the detector sorts by size."""
    detected = [i for i, boxes in enumerate(faces) if len(boxes.scores)]
    embeddings: list[Tensor | None] = [None] * len(faces)
    if detected:
        landmarks = torch.stack([faces[i].landmarks[0] for i in detected])
        crops = align(frames[detected], similarity_transform(landmarks, ARCFACE_TEMPLATE))
        for i, embedding in zip(detected, recogniser(crops).cpu(), strict=True):
            embeddings[i] = embedding
    return embeddings
