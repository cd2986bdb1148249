"""Who is in a video: detect (no gradient) -> track -> align (gradient) -> embed (gradient) -> score.

Frames are (N, 3, H, W), RGB in [-1, 1]. Pixel coordinates are OpenCV's: (x, y) from the top left, pixel
centres at integers. Template, normalisation, decoding and suppression are insightface's, so that scores
compare with those published for its packs; tests/test_face.py holds every stage against insightface itself.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rewardfl.rewards.face.onnx_module import OnnxModule
from rewardfl.rewards.face.pack import pack_files

# Left eye, right eye, nose, left and right mouth corner in a 112 x 112 crop: insightface/utils/face_align.py.
ARCFACE_TEMPLATE = torch.tensor(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
CROP_SIZE = 112


# ---- detect ----


@dataclass
class Faces:
    """The faces of one frame on the CPU, largest first; n may be 0."""

    boxes: Tensor  # (n, 4) left, top, right, bottom in frame pixels
    scores: Tensor  # (n,) in [0, 1]
    landmarks: Tensor  # (n, 5, 2) in frame pixels, in the template's order


class FaceDetector(nn.Module):
    """SCRFD with landmarks: scores, boxes and landmarks at strides 8, 16, 32, two anchors a cell.

    A frame is scaled to fit `det_size` x `det_size`, top left, and padded with black. Detections below
    `threshold` and those overlapping a better one by more than `nms_iou` are dropped.
    """

    STRIDES = (8, 16, 32)
    ANCHORS = 2
    CHUNK = 8  # frames at a time

    def __init__(self, path: str | Path, det_size: int = 640, threshold: float = 0.5, nms_iou: float = 0.4):
        super().__init__()
        if det_size <= 0 or det_size % 32:
            raise ValueError(f"det_size must be a multiple of 32, the coarsest stride, got {det_size}; try 640")
        self.net = OnnxModule(path)
        if len(self.net.output_names) != 9:
            raise ValueError(f"{path} has {len(self.net.output_names)} outputs; SCRFD with landmarks (bnkps) has 9")
        fixed = [size for size in self.net.input_shape[2:] if size is not None]
        if any(size != det_size for size in fixed):
            raise ValueError(f"{path} only takes {fixed} pixels, det_size is {det_size}; set det_size={fixed[0]}")
        self.net.check_size(torch.Size([1, 3, det_size, det_size]))
        self.det_size, self.threshold, self.nms_iou = det_size, threshold, nms_iou

    @torch.no_grad()
    def detect(self, frames: Tensor) -> list[Faces]:
        """The faces of each of the (N, 3, H, W) frames: N `Faces`, in frame pixels."""
        return [faces for chunk in frames.split(self.CHUNK) for faces in self._detect_chunk(chunk)]

    def _detect_chunk(self, frames: Tensor) -> list[Faces]:
        x, scale = self._fit(frames)
        # The published graphs were exported for one frame and end in rows that do not say which frame they are of:
        # under vmap each frame is a batch of one to the graph, and yet all frames are one batch to the operators.
        outputs = [output.flatten(1, -2) for output in torch.vmap(self.net)(x[:, None])]
        rows = torch.cat([self._decode(outputs[i::3], stride) for i, stride in enumerate(self.STRIDES)], 1)
        return [self._select(frame[frame[:, 0] >= self.threshold].cpu(), scale) for frame in rows]

    def _fit(self, frames: Tensor) -> tuple[Tensor, float]:
        """The detector's input (N, 3, det_size, det_size), and its pixels per frame pixel."""
        height, width = frames.shape[-2:]
        ratio = height / width
        # insightface rounds the fitted size down and takes the scale from the height
        limit = self.det_size
        fitted = (limit, int(limit / ratio)) if ratio > 1 else (int(limit * ratio), limit)
        scale = fitted[0] / height
        levels = ((frames.float().clamp(-1, 1) + 1) * 127.5).round().int()
        levels = F.pad(_resize_levels(levels, *fitted), (0, limit - fitted[1], 0, limit - fitted[0]))
        return (levels - 127.5) / 128, scale

    def _decode(self, outputs: list[Tensor], stride: int) -> Tensor:
        """Scores (B, n, 1), box distances (B, n, 4) and landmark offsets (B, n, 10) in strides from the
        anchors' cell -> (B, n, 15) rows of score, box, landmarks in detector pixels.
        """
        scores, distances, offsets = outputs
        cells = torch.arange(self.det_size // stride, device=scores.device) * stride
        y, x = torch.meshgrid(cells, cells, indexing="ij")
        centre = torch.stack([x, y], -1).reshape(-1, 2).repeat_interleave(self.ANCHORS, 0)  # (n, 2)
        boxes = torch.cat([centre - distances[..., :2] * stride, centre + distances[..., 2:] * stride], -1)
        return torch.cat([scores, boxes, centre.repeat(1, 5) + offsets * stride], -1)

    def _select(self, rows: Tensor, scale: float) -> Faces:
        """One frame's (n, 15) rows -> what non-maximum suppression leaves, in frame pixels."""
        rows = rows[rows[:, 0].argsort(descending=True, stable=True)]
        scores, boxes, landmarks = rows[:, 0], rows[:, 1:5] / scale, rows[:, 5:].view(-1, 5, 2) / scale
        kept = torch.tensor(_suppress(boxes, self.nms_iou), dtype=torch.long)
        area = (boxes[kept, 2:] - boxes[kept, :2]).prod(-1)
        order = kept[area.argsort(descending=True, stable=True)]
        return Faces(boxes[order], scores[order], landmarks[order])


def _resize_levels(levels: Tensor, height: int, width: int) -> Tensor:
    """(..., H, W) int32 levels of 0..255 -> (..., height, width), to the bit as cv2.resize does it for bytes.

    Bilinear in fixed point, not quite rounded to nearest: a detector's score and landmarks hang on such noise more
    than one likes, and this way they are insightface's. No gradient passes, nor need it.
    """
    low, high, near, far = _resize_taps(levels.shape[-1], width, levels.device)
    rows = levels[..., low] * near + levels[..., high] * far
    low, high, near, far = _resize_taps(levels.shape[-2], height, levels.device)
    upper, lower = rows[..., low, :] >> 4, rows[..., high, :] >> 4
    return ((near[:, None] * upper >> 16) + (far[:, None] * lower >> 16) + 2) >> 2


def _resize_taps(size: int, out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The two neighbours of each of `out` samples on an axis of `size`, and their weights, of 2048 together."""
    position = ((torch.arange(out, dtype=torch.float64) + 0.5) * (size / out) - 0.5).float()
    low = position.floor()
    weight = position - low
    near, far = ((share * 2048).round().int().to(device) for share in (1 - weight, weight))
    low, high = (index.long().clamp(0, size - 1).to(device) for index in (low, low + 1))
    return low, high, near, far


def _suppress(boxes: Tensor, iou: float) -> list[int]:
    """Rows of (n, 4) boxes, best first, that overlap no kept better one by more than `iou`.

    Sizes count both end pixels (+1), as insightface's do.
    """
    kept: list[int] = []
    for i in range(len(boxes)):
        others = boxes[kept]
        size = torch.minimum(others[:, 2:], boxes[i, 2:]) - torch.maximum(others[:, :2], boxes[i, :2]) + 1
        overlap = size.clamp(min=0).prod(-1)
        areas = (others[:, 2:] - others[:, :2] + 1).prod(-1)
        own = (boxes[i, 2:] - boxes[i, :2] + 1).prod()
        if (overlap / (areas + own - overlap) <= iou).all():
            kept.append(i)
    return kept


# ---- track ----


@dataclass
class Track:
    """One face through F frames; landmarks and box are carried over where it was not detected."""

    landmarks: Tensor  # (F, 5, 2) in frame pixels
    detected: Tensor  # (F,) bool
    boxes: Tensor  # (F, 4) left, top, right, bottom in frame pixels

    @property
    def width(self) -> Tensor:
        """(F,) of the boxes, in pixels."""
        return self.boxes[:, 2] - self.boxes[:, 0]


def track_largest(faces: list[Faces]) -> Track | None:
    """Follow the largest face of the first frame that has one; None when no frame has.

    In each later frame the detection that overlaps the last box most is the same face (nearest centre
    decides when none overlaps), provided its centre lies within one face width and its width within a
    factor of two; a larger stranger is never followed. Frames without such a detection keep the last
    landmarks, those before the first take the first's.
    """
    start = next((j for j, frame in enumerate(faces) if len(frame.scores)), None)
    if start is None:
        return None
    box = faces[start].boxes[0]
    rows: list[tuple[Tensor, bool, Tensor]] = [(faces[start].landmarks[0], False, box)] * start
    for j, frame in enumerate(faces[start:], start):
        match = 0 if j == start else _same_face(box, frame.boxes)
        if match is None:
            rows.append((rows[-1][0], False, rows[-1][2]))
        else:
            box = frame.boxes[match]
            rows.append((frame.landmarks[match], True, box))
    landmarks, detected, boxes = zip(*rows, strict=True)
    return Track(torch.stack(landmarks), torch.tensor(detected), torch.stack(boxes))


def _same_face(box: Tensor, boxes: Tensor) -> int | None:
    """Row of (n, 4) `boxes` that continues `box`, or None."""
    width, widths = box[2] - box[0], boxes[:, 2] - boxes[:, 0]
    distance = ((boxes[:, :2] + boxes[:, 2:]) / 2 - (box[:2] + box[2:]) / 2).norm(dim=-1)
    near = (distance <= width) & (widths <= 2 * width) & (width <= 2 * widths)
    size = torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])
    overlap = size.clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    iou = overlap / (areas + (box[2:] - box[:2]).prod() - overlap)
    candidates = near.nonzero().flatten().tolist()
    return max(candidates, key=lambda i: (iou[i].item(), -distance[i].item()), default=None)


def landmark_motion(track: Track) -> tuple[float, float]:
    """(speed, nonrigid) per frame step, in face widths; (0.0, 0.0) without two consecutive detections.

    speed: mean distance that a landmark moves. nonrigid: mean distance left after the best similarity fit of
    one frame's landmarks onto the next one's: blinks, speech and turning, which a frozen face that merely
    drifts does not have.
    """
    pairs = track.detected[:-1] & track.detected[1:]
    if not pairs.any():
        return 0.0, 0.0
    before, after, width = track.landmarks[:-1][pairs], track.landmarks[1:][pairs], track.width[:-1][pairs]
    fit = similarity_transform(before, after)
    fitted = before @ fit[:, :, :2].mT + fit[:, None, :, 2]
    speed = (after - before).norm(dim=-1).mean(1) / width
    nonrigid = (after - fitted).norm(dim=-1).mean(1) / width
    return speed.mean().item(), nonrigid.mean().item()


# ---- align ----


def similarity_transform(landmarks: Tensor, template: Tensor) -> Tensor:
    """(N, 2, 3) matrices [sR | t] that best map (N, 5, 2) landmarks onto a template (5, 2) or (N, 5, 2).

    Least squares over rotation, uniform scale and translation, never a reflection. With centred points as
    complex numbers p, q the scaled rotation is sum(q conj(p)) / sum(|p|^2): Umeyama's solution in the plane.
    """
    template = template.to(landmarks).expand_as(landmarks)
    centre, target = landmarks.mean(1), template.mean(1)  # (N, 2)
    p, q = landmarks - centre[:, None], template - target[:, None]
    spread = p.square().sum((1, 2)).clamp(min=1e-6)  # five landmarks on one spot: finite rather than NaN
    a = (p * q).sum((1, 2)) / spread
    b = (p[..., 0] * q[..., 1] - p[..., 1] * q[..., 0]).sum(1) / spread
    rotation = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], 1)  # (N, 2, 2)
    return torch.cat([rotation, (target - (rotation @ centre[..., None])[..., 0])[..., None]], -1)


def align(frames: Tensor, matrices: Tensor, size: int = CROP_SIZE) -> Tensor:
    """(N, 3, size, size) crops of the (N, 3, H, W) frames under (N, 2, 3) frame-to-crop similarities.

    Bilinear, black (-1) outside the frame, differentiable to the frames: cv2.warpAffine of the same matrices.
    """
    height, width = frames.shape[-2:]
    matrices = matrices.to(frames)
    # the inverse of a scaled rotation is its transpose over the squared scale
    scale = matrices[:, 0, :2].square().sum(1).clamp(min=1e-12)
    inverse = matrices[:, :, :2].mT / scale[:, None, None]  # (N, 2, 2)
    pixel = torch.arange(size, device=frames.device, dtype=frames.dtype)
    y, x = torch.meshgrid(pixel, pixel, indexing="ij")
    crop = torch.stack([x, y], -1).view(1, -1, 2) - matrices[:, None, :, 2]  # (N, size * size, 2)
    source = (crop @ inverse.mT).view(-1, size, size, 2)  # frame pixels
    # align_corners=True puts -1 and 1 on the centres of the outer pixels, which are W - 1 apart (not W)
    grid = 2 * source / torch.tensor([width - 1, height - 1], device=frames.device, dtype=frames.dtype) - 1
    # grid_sample pads with 0, which is grey in [-1, 1]
    return F.grid_sample(frames + 1, grid, mode="bilinear", padding_mode="zeros", align_corners=True) - 1


# ---- embed ----


class FaceRecogniser(nn.Module):
    """ArcFace: crops (N, 3, 112, 112), RGB in [-1, 1] -> unit embeddings (N, D), with gradient to the crops.

    `chunk` crops are embedded at a time; when a gradient is asked for, only their inputs are kept and each
    chunk is run again in the backward, so that a clip holds one chunk's graph and not one per frame.
    """

    def __init__(self, path: str | Path, chunk: int = 8):
        super().__init__()
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 face, got {chunk}")
        self.net = OnnxModule(path)
        if self.net.input_shape[2:] != [CROP_SIZE, CROP_SIZE]:
            raise ValueError(f"{path} takes {self.net.input_shape[2:]} pixels; a recogniser here takes 112 x 112")
        self.net.check_size(torch.Size([1, 3, CROP_SIZE, CROP_SIZE]))
        self.chunk = chunk
        # insightface's rule (model_zoo/arcface_onnx.py): mxnet exports normalise inside, known by these names
        first = self.net.first_nodes
        subtracts = any(name.startswith(("Sub", "_minus")) for name in first)
        multiplies = any(name.startswith(("Mul", "_mul")) for name in first)
        self.wants_bytes = subtracts and multiplies

    def forward(self, crops: Tensor) -> Tensor:
        x = (crops + 1) * 127.5 if self.wants_bytes else crops  # 0..255, or (0..255 - 127.5) / 127.5
        run = functools.partial(checkpoint, self.net, use_reentrant=False, preserve_rng_state=False)
        embeddings = [run(chunk) for chunk in x.split(self.chunk)]
        return F.normalize(torch.cat(embeddings).flatten(1))


# ---- score ----


@dataclass
class FacePool:
    """What is kept of a real clip: who it shows, how alike she is to herself, how much she moves."""

    embeddings: Tensor  # (P, D) unit float32, of the tracked face in every frame but the first
    cap: float  # mean cosine between two different embeddings of the pool; 1.0 for a pool of one
    speed: float  # landmark_motion
    nonrigid: float
    coverage: float  # share of the frames after the first in which the face was detected
    boxes: Tensor  # (F, 4) where the face was tracked, in frame pixels


@dataclass
class FaceScore:
    """How much a generated clip shows the person of a pool."""

    per_frame: Tensor  # (F - 1,) mean cosine with the pool of frames 1 .. F - 1, in [-1, 1], with gradient
    mean: Tensor  # () of per_frame, with gradient
    detected: Tensor  # (F,) bool
    speed: float  # landmark_motion
    nonrigid: float
    coverage: float  # share of frames 1 .. F - 1 in which the face was detected


class FaceIdentity(nn.Module):
    """Detector and recogniser of one insightface-style pack, frozen; scores videos (3, F, H, W) in [-1, 1].

    `pack_dir` is what face_pack.pack_files takes; `files` are the detector's and the recogniser's that it found.
    Everything is computed in float32, also under autocast; the detector sees no gradient. Frame 0 of a clip is
    the given image: it starts the track and is neither pooled nor scored.
    """

    def __init__(self, pack_dir: str | Path, det_size: int = 640, chunk: int = 8):
        super().__init__()
        self.files = pack_files(pack_dir)
        self.detector = FaceDetector(self.files[0], det_size)
        self.recogniser = FaceRecogniser(self.files[1], chunk)

    @torch.no_grad()
    def pool(self, video: Tensor) -> FacePool | None:
        """The pool of a real clip; None when no frame after the first shows the face."""
        with torch.autocast(video.device.type, enabled=False):
            frames = _frames(video)
            track = track_largest(self.detector.detect(frames))
            if track is None or not track.detected[1:].any():
                return None
            shown = track.detected.nonzero().flatten()
            shown = shown[shown > 0]
            embeddings = self._embed(frames[shown.to(frames.device)], track.landmarks[shown])
            speed, nonrigid = landmark_motion(track)
            return FacePool(embeddings, self_similarity(embeddings), speed, nonrigid, _coverage(track), track.boxes)

    def score(self, video: Tensor, pool: FacePool) -> FaceScore | None:
        """The score of a generated clip, differentiable to the video; None when no frame shows a face.

        Where the detector finds nothing, the face is looked for at its last landmarks: hiding it costs score.
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = _frames(video)
            track = track_largest(self.detector.detect(frames))
            if track is None:
                return None
            embeddings = self._embed(frames[1:], track.landmarks[1:])
            # all are unit vectors, so the mean of the cosines is the product with the mean embedding
            per_frame = embeddings @ pool.embeddings.to(embeddings).mean(0)
            speed, nonrigid = landmark_motion(track)
            return FaceScore(per_frame, per_frame.mean(), track.detected, speed, nonrigid, _coverage(track))

    def _embed(self, frames: Tensor, landmarks: Tensor) -> Tensor:
        return self.recogniser(align(frames, similarity_transform(landmarks, ARCFACE_TEMPLATE)))


def _frames(video: Tensor) -> Tensor:
    """(3, F, H, W) of any float type -> (F, 3, H, W) float32; ValueError unless F >= 2."""
    if video.ndim != 4 or video.shape[0] != 3 or video.shape[1] < 2:
        raise ValueError(f"a video is (3, F, H, W) with at least 2 frames, got {tuple(video.shape)}")
    return video.transpose(0, 1).float()


def _coverage(track: Track) -> float:
    return track.detected[1:].float().mean().item()


def self_similarity(embeddings: Tensor) -> float:
    """Mean cosine between two different rows of (P, D) unit embeddings; 1.0 when P is 1."""
    count = len(embeddings)
    if count == 1:
        return 1.0
    cosines = embeddings @ embeddings.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item()
