"""What two other pipelines score a face by, as rewards: what a pool of references and the right colours are worth.

benchmarks/ablation/points.yaml names them; docs/results/reward_ablation.md has what they learn.
"""

from torch import Tensor

from rewardfl.rewards.face.identity import FaceIdentity
from rewardfl.rewards.face.reward import FaceIdentityReward


class OneReference(FaceIdentityReward):
    """Likeness to the face in the clip's first frame, the given image, in place of the pool of all later frames.

    The cap stays the real clip's own self-similarity, so that one thing alone differs.
    """

    name = "face_one_reference"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """FaceIdentityReward's reference with one embedding, that of frame 0; None where that shows no face."""
        whole = super().reference(video, prompt)
        given = super().reference(video[:, :1].expand(-1, 2, -1, -1), prompt)  # its later frame is the first again
        if whole is None or given is None:
            return None
        return whole | {name: given[name] for name in ("embeddings", "owner")}


class SwappedColours(FaceIdentityReward):
    """Faces reach the recogniser as BGR, although it was trained on RGB; those of the real clip, too.

    The swap is behind the comparison with insightface at a run's start, which otherwise refuses to train.
    """

    name = "face_swapped_colours"

    def __init__(self, pack_dir: str, det_size: int = 640):
        super().__init__(pack_dir, det_size=det_size)
        self.identity = _Swapped(pack_dir, det_size)


class _Swapped(FaceIdentity):
    def _recognise(self, crops: Tensor) -> Tensor:
        return super()._recognise(crops.flip(1))
