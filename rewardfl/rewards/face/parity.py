"""Comparison of our face networks with insightface's and OpenCV's code on the same files, once at start-up."""

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, align, similarity_transform
from rewardfl.rewards.face.detect import YuNet
from rewardfl.rewards.face.identity import FaceIdentity, FaceRecogniser
from rewardfl.rewards.face.pack import is_sface

MAX_COSINE_DISTANCE = 1e-3  # insightface rounds its crop to bytes: about 1e-5 on trained networks, 3e-4 on random ones

# TF32 and versions of OpenCV move a score a little: a face just above our threshold may be below the library's.
SCORE_MARGIN = 0.05
# Of two anchors with nearly equal scores versions of insightface keep the first or the last. So the library suppresses
# nothing, and our face is compared with the nearest of its detections.
KEEP_ALL = 1.0


class FaceParityError(ValueError):
    """Our faces differ from the faces of a pack's published code, so that rewards would be wrong."""


def check_packs(packs: Mapping[str, FaceIdentity], video: Tensor) -> list[str]:
    """Return a line about each pack, compared on one clip. packs: {setting of a pack: its networks}.

    Raise FaceParityError naming the setting.
    """
    lines = []
    for setting, identity in packs.items():
        try:
            lines.append(f"{setting}: {check(identity, video)}")
        except FaceParityError as error:
            raise FaceParityError(f"{setting}: {error}: its scores would mean nothing; use another pack") from error
    return lines


@torch.no_grad()
def check(identity: FaceIdentity, video: Tensor) -> str:
    """Compare detection, crop and embedding with insightface's, or OpenCV's for YuNet and SFace, on the same files.

    The largest face in the first frame with a face is compared, of a (3, F, H, W) video in [-1, 1]. Return a line with
    the largest differences, in frame pixels and as 1 - cosine of two embeddings, or why nothing was compared.

    Raise FaceParityError when the library finds no face there, or when embeddings differ by more than
    MAX_COSINE_DISTANCE.
    """
    code = "OpenCV" if isinstance(identity.detector.family, YuNet) else "insightface"
    try:
        from insightface.model_zoo import get_model
        from insightface.utils.face_align import norm_crop
    except ImportError as error:
        return f"face parity with {code}: skipped, insightface cannot be imported ({error})"
    for frame in video.transpose(0, 1).unsqueeze(1):
        frame = ((frame.float().clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1  # 8 bits for both codes
        (faces,) = identity.detector.detect(frame)
        if len(faces.scores):
            break
    else:
        return f"face parity with {code}: skipped, no face was found in the clip"
    picture, box = _picture((frame + 1) * 127.5), faces.boxes[0]
    if code == "OpenCV":
        boxes, landmarks = _detect_by_opencv(identity, frame)
    else:
        boxes, landmarks = _detect_by_insightface(identity, picture, get_model)
    if len(boxes) == 0:
        raise FaceParityError(
            f"{code} finds no face where rewardfl finds one (score {faces.scores[0]:.3f}, box "
            f"{[round(side) for side in box.tolist()]}) with {identity.files[0]}"
        )
    differences = torch.cat([boxes - box, (landmarks - faces.landmarks[0]).flatten(1)], 1).abs().amax(1)
    difference, nearest = differences.min(0)
    crop = align(frame, similarity_transform(faces.landmarks[:1], ARCFACE_TEMPLATE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # insightface calls a deprecated method of skimage
        library_crop = norm_crop(picture, landmarks[nearest].numpy())
    recognisers = [recogniser for recogniser in (identity.recogniser, identity.second) if recogniser is not None]
    distances = [_distance(recogniser, crop, library_crop, get_model) for recogniser in recognisers]
    distance = torch.stack(distances).max().item()  # torch's max: Python's ignores a NaN
    line = f"face parity with {code}: box and landmarks {difference:.3f} px, cosine distance {distance:.1e}"
    if not distance <= MAX_COSINE_DISTANCE:  # also refuses NaN
        files = [str(identity.files[0]), *(str(recogniser.file) for recogniser in recognisers)]
        raise FaceParityError(f"{line}, where at most {MAX_COSINE_DISTANCE:g} is allowed, with {files}")
    return line


def _picture(levels: Tensor) -> np.ndarray:
    """Return RGB levels (1, 3, H, W) in 0..255 as an OpenCV picture: (H, W, 3) bytes, blue first."""
    return np.ascontiguousarray(levels[0].round().byte().flip(0).permute(1, 2, 0).cpu().numpy())


def _detect_by_insightface(identity: FaceIdentity, picture: np.ndarray, get_model: Callable) -> tuple[Tensor, Tensor]:
    """Return boxes (n, 4) and landmarks (n, 5, 2) by insightface with the identity's detector, none suppressed."""
    ours = identity.detector
    model = get_model(str(identity.files[0]), providers=["CPUExecutionProvider"])
    threshold = ours.threshold - SCORE_MARGIN
    model.prepare(-1, input_size=(ours.det_size, ours.det_size), det_thresh=threshold, nms_thresh=KEEP_ALL)
    boxes, landmarks = model.detect(picture)  # boxes with scores
    return torch.from_numpy(boxes)[:, :4], torch.from_numpy(landmarks)


def _detect_by_opencv(identity: FaceIdentity, frame: Tensor) -> tuple[Tensor, Tensor]:
    """Return OpenCV's boxes and landmarks by YuNet, on the frame as our detector fits it: OpenCV does not resize."""
    import cv2

    ours = identity.detector
    fitted, scale = ours.fit(frame)
    size, threshold = (ours.det_size, ours.det_size), ours.threshold - SCORE_MARGIN
    model = cv2.FaceDetectorYN.create(str(identity.files[0]), "", size, threshold, KEEP_ALL)
    _, array = model.detect(_picture(fitted.flip(1)))  # rows of x, y, width, height, five points, score
    rows = torch.zeros(0, 15) if array is None else torch.from_numpy(array)
    boxes = torch.cat([rows[:, :2], rows[:, :2] + rows[:, 2:4]], 1)
    return boxes / scale, rows[:, 4:14].view(-1, 5, 2) / scale


def _distance(recogniser: FaceRecogniser, crop: Tensor, library_crop: np.ndarray, get_model: Callable) -> Tensor:
    """Return () 1 - cosine of our embedding of our crop (1, 3, 112, 112) and the library's of its crop."""
    file = recogniser.file
    if is_sface(file):
        import cv2

        expected = cv2.FaceRecognizerSF.create(str(file), "").feature(library_crop)[0]
    else:
        expected = get_model(str(file), providers=["CPUExecutionProvider"]).get_feat(library_crop)[0]
    ours = recogniser(crop)[0].cpu().double()
    return 1 - torch.nn.functional.cosine_similarity(ours, torch.from_numpy(expected).double(), dim=0)
