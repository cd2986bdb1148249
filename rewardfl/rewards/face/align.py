"""The faces of a frame, and their crops at the recogniser's template, with gradient to the frames."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Left eye, right eye, nose, left and right mouth corner in a 112 x 112 crop: insightface/utils/face_align.py.
ARCFACE_TEMPLATE = torch.tensor(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)

CROP_SIZE = 112


@dataclass
class Faces:
    """The n >= 0 faces of one frame on the CPU, largest first."""

    boxes: Tensor  # (n, 4) left, top, right, bottom in frame pixels
    scores: Tensor  # (n,) in [0, 1]
    landmarks: Tensor  # (n, 5, 2) in frame pixels, in the template's order


def similarity_transform(landmarks: Tensor, template: Tensor) -> Tensor:
    """Return the (N, 2, 3) matrices [sR | t] that best map (N, 5, 2) landmarks onto a template (5, 2) or (N, 5, 2).

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
    """Return the (N, 3, size, size) crops of (N, 3, H, W) frames under (N, 2, 3) frame-to-crop similarities.

    Under the (P, N, 2, 3) similarities of P faces in each frame, return their crops (P * N, 3, size, size).
    Bilinear, black (-1) outside the frame, with gradient to the frames: cv2.warpAffine of the same matrices.
    """
    matrices = matrices.view(-1, len(frames), 2, 3)
    people, count = matrices.shape[:2]
    height, width = frames.shape[-2:]
    matrices = matrices.flatten(0, 1).to(frames)
    # the inverse of a scaled rotation is its transpose over the squared scale
    scale = matrices[:, 0, :2].square().sum(1).clamp(min=1e-12)
    inverse = matrices[:, :, :2].mT / scale[:, None, None]  # (P * N, 2, 2)
    pixel = torch.arange(size, device=frames.device, dtype=frames.dtype)
    y, x = torch.meshgrid(pixel, pixel, indexing="ij")
    crop = torch.stack([x, y], -1).view(1, -1, 2) - matrices[:, None, :, 2]  # (P * N, size * size, 2)
    source = (crop @ inverse.mT).view(people, count, size, size, 2)  # frame pixels
    # align_corners=True puts -1 and 1 on the centres of the outer pixels, W - 1 apart
    last = torch.cat([frames.new_full((1,), side - 1) for side in (width, height)])
    grid = 2 * source / last - 1
    grid = grid.transpose(0, 1).flatten(1, 2)  # (N, P * size, size, 2): the graph keeps a frame once for its P crops
    # grid_sample pads with 0, which is grey in [-1, 1]
    crops = F.grid_sample(frames + 1, grid, mode="bilinear", padding_mode="zeros", align_corners=True) - 1
    return crops.unflatten(2, (people, size)).permute(2, 0, 1, 3, 4).flatten(0, 1)
