"""Does our face pipeline see what insightface and onnxruntime see in the same files? Asked once, at start-up."""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .face import ARCFACE_TEMPLATE, FaceIdentity, align, similarity_transform

MAX_COSINE_DISTANCE = 1e-3  # cv2's 8-bit resize and crop alone cost about 1e-5


class FaceParityError(ValueError):
    """Our faces are not insightface's: rewards would not mean what their numbers say."""


@dataclass(frozen=True)
class FaceParity:
    """How far ours is from insightface's on one frame, for the largest face; NaN where nothing was compared."""

    box_error: float = math.nan  # largest difference of a side, in frame pixels
    landmark_error: float = math.nan  # largest difference of a coordinate, in frame pixels
    crop_error: float = math.nan  # mean absolute difference, in levels of 0..255
    cosine_distance: float = math.nan  # 1 - cosine of the two embeddings
    skipped: str = ""  # why nothing was compared

    def __str__(self) -> str:
        if self.skipped:
            return f"face parity with insightface: skipped, {self.skipped}"
        return (
            f"face parity with insightface: box {self.box_error:.3f} px, landmarks {self.landmark_error:.3f} px, crop "
            f"{self.crop_error:.2f} of 255, cosine distance {self.cosine_distance:.1e}"
        )


@torch.no_grad()
def parity(identity: FaceIdentity, frame: Tensor) -> FaceParity:
    """Compare detection, crop and embedding of one (3, H, W) frame in [-1, 1], on the identity's device, with those
    of insightface + onnxruntime on the CPU, which read the same two files.

    Raises FaceParityError when the embeddings differ by more than MAX_COSINE_DISTANCE or only one of the two
    finds a face. Skipped when neither does, or where insightface cannot be imported (OpenCV needs libGL).
    """
    try:
        from insightface.model_zoo import get_model
        from insightface.utils.face_align import norm_crop
    except ImportError as error:
        return FaceParity(skipped=f"insightface cannot be imported ({error})")
    pixels = ((frame.float().clamp(-1, 1) + 1) * 127.5).round()  # both see the same 8-bit frame
    frames = (pixels / 127.5 - 1)[None]
    bgr = np.ascontiguousarray(pixels.byte().flip(0).permute(1, 2, 0).cpu().numpy())
    detector, recogniser = (get_model(str(file), providers=["CPUExecutionProvider"]) for file in identity.files)
    ours = identity.detector
    size = (ours.det_size, ours.det_size)
    detector.prepare(-1, input_size=size, det_thresh=ours.threshold, nms_thresh=ours.nms_iou)

    (faces,) = ours.detect(frames)
    boxes, landmarks = (torch.from_numpy(array) for array in detector.detect(bgr))  # (n, 5) with scores, (n, 5, 2)
    if len(faces.boxes) == len(boxes) == 0:
        return FaceParity(skipped="no face in the frame")
    if len(faces.boxes) == 0 or len(boxes) == 0:
        raise FaceParityError(
            f"insightface finds {len(boxes)} faces (scores {_rounded(boxes[:, 4])}) where rewardfl finds "
            f"{len(faces.boxes)} (scores {_rounded(faces.scores)}) with {identity.files[0]}"
        )
    box = faces.boxes[0]
    same = (boxes[:, :4] - box).abs().amax(1).argmin()
    crop = align(frames, similarity_transform(faces.landmarks[:1], ARCFACE_TEMPLATE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # insightface calls a deprecated method of skimage
        their_crop = norm_crop(bgr, landmarks[same].numpy())
    levels = (crop[0].flip(0).permute(1, 2, 0).cpu() + 1) * 127.5
    embedding = identity.recogniser(crop)[0].cpu().double()
    theirs = torch.from_numpy(recogniser.get_feat(their_crop)[0]).double()
    result = FaceParity(
        box_error=(boxes[same, :4] - box).abs().max().item(),
        landmark_error=(landmarks[same] - faces.landmarks[0]).abs().max().item(),
        crop_error=(levels - torch.from_numpy(their_crop)).abs().mean().item(),
        cosine_distance=1 - torch.nn.functional.cosine_similarity(embedding, theirs, dim=0).item(),
    )
    if not result.cosine_distance <= MAX_COSINE_DISTANCE:  # NaN is refused too
        raise FaceParityError(
            f"{result}; at most {MAX_COSINE_DISTANCE:g} is allowed with {[str(file) for file in identity.files]}"
        )
    return result


def _rounded(scores: Tensor) -> list[float]:
    return [round(score, 3) for score in scores.tolist()]
