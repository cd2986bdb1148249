"""Does our face pipeline see what insightface or OpenCV see in the same files? Asked once, at start-up."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, Faces, align, similarity_transform
from rewardfl.rewards.face.detect import YuNet
from rewardfl.rewards.face.embed import FaceRecogniser
from rewardfl.rewards.face.identity import FaceIdentity
from rewardfl.rewards.face.pack import is_sface

MAX_COSINE_DISTANCE = 1e-3  # insightface rounds its crop to bytes: about 1e-5 on trained networks, 3e-4 on random ones

# A GPU convolves in TF32 and versions of OpenCV resize by a level more or less: where ours finds a face just above the
# threshold, insightface's own may lie just below.
SCORE_MARGIN = 0.05
# Of two anchors of one score, or of scores that differ by rounding, either may be suppressed: insightface before 2.0
# keeps the last, later the first. So theirs suppress nothing, and ours is sought among all that they find.
KEEP_ALL = 1.0


class FaceParityError(ValueError):
    """Our faces are not those of a pack's own code: rewards would not mean what their numbers say."""


@dataclass(frozen=True)
class FaceParity:
    """How far ours is from a pack's own code on one frame, for the largest face; NaN where nothing was compared."""

    code: str  # that ours was compared with; a published SFace is OpenCV's whatever the detector

    box_error: float = math.nan  # largest difference of a side, in frame pixels
    landmark_error: float = math.nan  # largest difference of a coordinate, in frame pixels
    crop_error: float = math.nan  # mean absolute difference, in levels of 0..255
    cosine_distance: float = math.nan  # 1 - cosine of the two embeddings; of two recognisers the larger one
    skipped: str = ""  # why nothing was compared

    def __str__(self) -> str:
        if self.skipped:
            return f"face parity with {self.code}: skipped, {self.skipped}"
        return (
            f"face parity with {self.code}: box {self.box_error:.3f} px, landmarks {self.landmark_error:.3f} px, crop "
            f"{self.crop_error:.2f} of 255, cosine distance {self.cosine_distance:.1e}"
        )


def check_packs(packs: Mapping[str, FaceIdentity], video: Tensor) -> list[str]:
    """A line about each pack, {the setting that names it: its networks}, on one clip of the user's data.

    Raises FaceParityError naming the setting.
    """
    lines = []
    for setting, identity in packs.items():
        try:
            lines.append(f"{setting}: {check(identity, video)}")
        except FaceParityError as error:
            raise FaceParityError(
                f"{setting}: {error}; training on it is refused, since its scores would mean nothing: please report "
                "the pack with this line, and use another one meanwhile"
            ) from error
    return lines


@torch.no_grad()
def check(identity: FaceIdentity, video: Tensor) -> FaceParity:
    """Compare detection, crop and embedding with insightface's, and of YuNet and SFace OpenCV's, of the same files.

    The frame is the first of the (3, F, H, W) video in [-1, 1] with a face, the face its largest. Ours runs on the
    video's device, where the identity must be, theirs on the CPU. Raises FaceParityError when they find no face
    there, or another embedding by more than MAX_COSINE_DISTANCE. Skipped when no frame has a face, or where
    insightface cannot be imported (OpenCV needs libGL).
    """
    code = "OpenCV" if isinstance(identity.detector.family, YuNet) else "insightface"
    try:
        from insightface.model_zoo import get_model
        from insightface.utils.face_align import norm_crop
    except ImportError as error:
        return FaceParity(code, skipped=f"insightface cannot be imported ({error})")
    found = _first_face(identity, video)
    if found is None:
        return FaceParity(code, skipped="no face was found in the clip")
    frame, faces = found
    their_frame = _picture((frame + 1) * 127.5)
    if code == "OpenCV":
        boxes, landmarks = _found_by_opencv(identity, frame)
    else:
        boxes, landmarks = _found_by_insightface(identity, their_frame, get_model)
    box = faces.boxes[0]
    if len(boxes) == 0:
        raise FaceParityError(
            f"{code} finds no face where rewardfl finds one (score {faces.scores[0]:.3f}, box "
            f"{[round(side) for side in box.tolist()]}) with {identity.files[0]}"
        )
    apart = torch.cat([boxes - box, (landmarks - faces.landmarks[0]).flatten(1)], 1)
    same = apart.abs().amax(1).argmin()
    crop = align(frame, similarity_transform(faces.landmarks[:1], ARCFACE_TEMPLATE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # insightface calls a deprecated method of skimage
        their_crop = norm_crop(their_frame, landmarks[same].numpy())
    crop_levels = (crop[0].flip(0).permute(1, 2, 0).cpu() + 1) * 127.5
    recognisers = [(identity.recogniser, identity.files[1])]
    if identity.second is not None and identity.second_file is not None:
        recognisers.append((identity.second, identity.second_file))
    distances = [_distance(*one, crop, their_crop, get_model) for one in recognisers]
    result = FaceParity(
        code,
        box_error=(boxes[same] - box).abs().max().item(),
        landmark_error=(landmarks[same] - faces.landmarks[0]).abs().max().item(),
        crop_error=(crop_levels - torch.from_numpy(their_crop)).abs().mean().item(),
        cosine_distance=torch.stack(distances).max().item(),  # torch's max, for Python's would pass a NaN over
    )
    if not result.cosine_distance <= MAX_COSINE_DISTANCE:  # NaN is refused too
        files = [str(file) for file in (*identity.files, identity.second_file) if file is not None]
        raise FaceParityError(f"{result}, where at most {MAX_COSINE_DISTANCE:g} is allowed, with {files}")
    return result


def _picture(levels: Tensor) -> np.ndarray:
    """RGB levels (1, 3, H, W) of 0..255 as OpenCV has a picture: (H, W, 3) bytes, blue first."""
    return np.ascontiguousarray(levels[0].round().byte().flip(0).permute(1, 2, 0).cpu().numpy())


def _found_by_insightface(identity: FaceIdentity, picture: np.ndarray, get_model: Callable) -> tuple[Tensor, Tensor]:
    """Boxes (n, 4) and landmarks (n, 5, 2) that insightface finds with the identity's detector, none suppressed."""
    ours = identity.detector
    theirs = get_model(str(identity.files[0]), providers=["CPUExecutionProvider"])
    threshold = ours.threshold - SCORE_MARGIN
    theirs.prepare(-1, input_size=(ours.det_size, ours.det_size), det_thresh=threshold, nms_thresh=KEEP_ALL)
    boxes, landmarks = theirs.detect(picture)  # boxes with scores
    return torch.from_numpy(boxes)[:, :4], torch.from_numpy(landmarks)


def _found_by_opencv(identity: FaceIdentity, frame: Tensor) -> tuple[Tensor, Tensor]:
    """What OpenCV finds with a YuNet in the frame as ours has fitted it, since OpenCV does not resize."""
    import cv2

    ours = identity.detector
    fitted, scale = ours.fit(frame)
    size, threshold = (ours.det_size, ours.det_size), ours.threshold - SCORE_MARGIN
    theirs = cv2.FaceDetectorYN.create(str(identity.files[0]), "", size, threshold, KEEP_ALL)
    _, rows = theirs.detect(_picture(fitted.flip(1)))  # n times x, y, width, height, five points, score
    found = torch.zeros(0, 15) if rows is None else torch.from_numpy(rows)
    boxes = torch.cat([found[:, :2], found[:, :2] + found[:, 2:4]], 1)
    return boxes / scale, found[:, 4:14].view(-1, 5, 2) / scale


def _distance(
    recogniser: FaceRecogniser, file: Path, crop: Tensor, their_crop: np.ndarray, get_model: Callable
) -> Tensor:
    """() 1 - cosine of our embedding of our crop (1, 3, 112, 112) and their own code's of its own."""
    if is_sface(file):
        import cv2

        theirs = cv2.FaceRecognizerSF.create(str(file), "").feature(their_crop)[0]
    else:
        theirs = get_model(str(file), providers=["CPUExecutionProvider"]).get_feat(their_crop)[0]
    ours = recogniser(crop)[0].cpu().double()
    return 1 - torch.nn.functional.cosine_similarity(ours, torch.from_numpy(theirs).double(), dim=0)


def _first_face(identity: FaceIdentity, video: Tensor) -> tuple[Tensor, Faces] | None:
    """The first frame (1, 3, H, W) with a face, rounded to 8 bits, as both will see it, and its faces."""
    for frame in video.transpose(0, 1).split(1):
        rounded = ((frame.float().clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
        (faces,) = identity.detector.detect(rounded)
        if len(faces.scores):
            return rounded, faces
    return None
