"""Where metrics and sample videos or images are watched: TensorBoard, Weights & Biases or nowhere. For one process.

A tracker never stops a training: what fails is said once, and the tracker is dropped. metrics.jsonl has it all.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from rewardfl import data
from rewardfl.config import ConfigError
from rewardfl.files import atomic_write

SHOWN = 4  # frames of a video, where a tracker cannot play it


def check_installed(name: str) -> None:
    """ConfigError for a run.log_with whose package is missing."""
    if name == "none":
        return
    try:
        metadata.version(name)  # not find_spec, which takes a folder wandb/ for the package
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"run.log_with is {name}, which is not installed: pip install {name}, or set run.log_with: none "
            "(metrics.jsonl is always written)"
        ) from None


class Tracker:
    """What the script calls. Of this class itself: no tracker."""

    name = "none"
    errors: tuple[type[Exception], ...] = (OSError,)
    dropped = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._log(step, metrics))

    def videos(self, step: int, folder: Path) -> None:
        """The folder's, as samples/<n>."""
        for path in sorted([*folder.glob("*.mp4"), *folder.glob("*.png")]):
            self._try(partial(self._video, step, f"samples/{path.stem}", path))

    def close(self) -> None:
        self._try(self._close)

    def _try(self, call: Callable[[], None]) -> None:
        if self.dropped:
            return
        try:
            call()
        except self.errors as error:
            self.dropped = True
            warnings.warn(
                f"run.log_with: {self.name} failed and is dropped, training goes on ({type(error).__name__}: {error}); "
                "metrics.jsonl and samples/ have everything, a restart tries it again",
                stacklevel=4,
            )

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def _video(self, step: int, name: str, path: Path) -> None:
        pass

    def _close(self) -> None:
        pass


class TensorBoard(Tracker):
    """Event files in <output_dir>/logs; what an earlier run logged after `first_step` is not shown any more."""

    name = "tensorboard"

    def __init__(self, output_dir: Path, config: Mapping[str, str], first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        def start() -> None:
            self.writer = SummaryWriter(output_dir / "logs", purge_step=first_step + 1)
            self.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))
            self.writer.flush()

        self._try(start)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()  # it writes in a thread of its own, and says so only here

    def _video(self, step: int, name: str, path: Path) -> None:
        # add_video would need moviepy
        frames = data.read_picture(path)[None] if path.suffix == ".png" else data.read_video(path)
        chosen = torch.linspace(0, len(frames) - 1, min(SHOWN, len(frames))).round().long()
        self.writer.add_images(name, frames[chosen], step, dataformats="NHWC")
        self.writer.flush()

    def _close(self) -> None:
        self.writer.close()


class Wandb(Tracker):
    """A run of the project rewardfl, whose id is kept in <output_dir>/wandb_run_id: a resumed run goes on with it."""

    name = "wandb"

    def __init__(self, output_dir: Path, config: Mapping[str, str], first_step: int):
        import wandb

        self.wandb, self.errors = wandb, (OSError, wandb.Error)
        known = output_dir / "wandb_run_id"

        def start() -> None:
            resumed = known.read_text(encoding="utf-8").strip() if first_step and known.is_file() else None
            self.run = wandb.init(
                project="rewardfl", name=output_dir.name, dir=output_dir, config=dict(config), id=resumed,
                resume="allow" if resumed else None,
            )  # fmt: skip
            atomic_write(known, self.run.id + "\n")
            # steps that are done again after a kill come twice: wandb's own counter would refuse them
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")

        self._try(start)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def _video(self, step: int, name: str, path: Path) -> None:
        shown = self.wandb.Image if path.suffix == ".png" else partial(self.wandb.Video, format="mp4")
        self.run.log({"step": step, name: shown(str(path))})

    def _close(self) -> None:
        self.run.finish()


def open_tracker(name: str, output_dir: str | Path, config: Mapping[str, str], first_step: int) -> Tracker:
    """The tracker of run.log_with. config: what is shown of it, plain texts; first_step: 0, or where a run goes on."""
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return kinds[name](Path(output_dir), config, first_step) if name in kinds else Tracker()
