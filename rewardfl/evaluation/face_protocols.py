"""Likeness as published benchmarks of identity measure it, so that a number can be put beside theirs.

Both compare with the input image (not with other frames of a real clip), take the largest face of each frame by itself
(nobody is followed), detect at 320 pixels, look again on the frame with a grey border of a quarter of its size where
no face was found, cut a cosine off at 0, and leave a frame without a face out.

    consisid   FaceSim-Arc of ConsisID (arXiv 2411.17440): 16 frames. eval/get_facesim_fid.py in PKU-YuanGroup/ConsisID.
    opens2v    FaceSim-Arc of OpenS2V-Eval (arXiv 2505.20292): 32 frames. eval/get_facesim.py in OpenS2V-Nexus.

What is known to be wrong with them, and is done here all the same: frame 0 is among the frames although it is the
input image, and counts about 1; a face that hides is left out and not counted against the clip, so that one frame with
a face can stand for all; where several people are seen, the largest is compared, whoever it is. OpenS2V-Eval means to
leave cosines of 0 out of the mean and does so for its other recogniser alone (its line for this one compares the list
with 0); here, as there, they stay in. Both papers' recogniser is buffalo_l's, so only by that pack do numbers compare.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, Faces, align, frames_of, similarity_transform
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.embed import FaceRecogniser

VERSION = 1  # to be raised when a number is computed in another way

DET_SIZE = 320

GREY = 128 / 127.5 - 1  # of the border

BORDER = 4  # the frame's height and width over the border's

PROTOCOLS = {"consisid": 16, "opens2v": 32}  # how many frames of a clip are compared, from the first to the last


def compared_frames(count: int, wanted: int) -> list[int]:
    """Indices of `wanted` frames of `count`, evenly from the first to the last, rounded down; they may repeat."""
    return np.linspace(0, count - 1, wanted).astype(int).tolist()


def face_sim(reference: Tensor, embeddings: Sequence[Tensor | None]) -> float:
    """Mean over the frames with a face of max(0, cosine with the reference), unit vectors (D,); 0 where none has one.

    embeddings: of the chosen frames, None where no face was found.
    """
    cosines = [max(0.0, float(reference @ one)) for one in embeddings if one is not None]
    return sum(cosines) / len(cosines) if cosines else 0.0


@torch.no_grad()
def largest_faces(frames: Tensor, detector: FaceDetector, recogniser: FaceRecogniser) -> list[Tensor | None]:
    """The unit embedding (D,), on the CPU, of the largest face in each of (N, 3, H, W) frames; None without a face."""
    found = _embedded(frames, detector.detect(frames), recogniser)
    if again := [i for i, one in enumerate(found) if one is None]:
        down, across = (int(size * (1 / BORDER)) for size in frames.shape[-2:])
        padded = F.pad(frames[again], (across, across, down, down), value=GREY)
        for i, one in zip(again, _embedded(padded, detector.detect(padded), recogniser), strict=True):
            found[i] = one
    return found


def protocol_score(
    wanted: int, video: Tensor, reference: Tensor, detector: FaceDetector, recogniser: FaceRecogniser
) -> float:
    """The protocol's FaceSim of a clip (3, F, H, W) in [-1, 1]; reference: largest_faces of the input image.

    wanted: of PROTOCOLS.
    """
    indices = compared_frames(video.shape[1], wanted)
    once = sorted(set(indices))
    faces = dict(zip(once, largest_faces(frames_of(video)[once], detector, recogniser), strict=True))
    return face_sim(reference, [faces[i] for i in indices])


def _embedded(frames: Tensor, faces: Sequence[Faces], recogniser: FaceRecogniser) -> list[Tensor | None]:
    """The embedding of each frame's first face, which is its largest."""
    seen = [i for i, one in enumerate(faces) if len(one.scores)]
    found: list[Tensor | None] = [None] * len(faces)
    if seen:
        landmarks = torch.stack([faces[i].landmarks[0] for i in seen])
        crops = align(frames[seen], similarity_transform(landmarks, ARCFACE_TEMPLATE))
        for i, embedding in zip(seen, recogniser(crops).cpu(), strict=True):
            found[i] = embedding
    return found
