"""The output of a merging tool: a file or a folder of weights. No torch here."""

import argparse
import glob
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from rewardfl import command_line
from rewardfl.merging import writing
from rewardfl.merging.writing import OutputFiles, TensorFile
from rewardfl.outputs import Target, nearest_existing
from rewardfl.weights.shards import InputError


class Output:
    """The --out of a merging tool, a .safetensors file or a folder."""

    def __init__(self, args: argparse.Namespace, inputs: Sequence[Path]):
        """Raise InputError if the output would harm an input or an existing file."""
        self.args, self.path = args, args.out
        self.is_file = self.path.suffix == ".safetensors"
        self.target = Target(
            option="--out", path=args.out, overwrite=args.overwrite, inputs=inputs, is_folder=not self.is_file
        )
        self.target.check()
        index = self.path.with_name(f"{self.path.name}.index.json")
        if self.is_file and index.exists():
            raise InputError(f"{index} is in the way: loaders would take its shards, not {self.path.name}; delete it")
        for stray in sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.tmp-*")):
            print(command_line.one_line(f"note: {stray} is of a killed run, or of one that still writes"))

    def model_files(self, weights: TensorFile, config: Path) -> OutputFiles:
        """Return the files of a model: one, or a folder's. A folder with the names of before takes `config`."""
        if self.is_file:
            return {self.path.name: weights}
        copied: OutputFiles = {"config.json": config} if self.args.rename == "keep" and config.is_file() else {}
        return writing.shard(weights, self.args.max_shard_size) | copied

    def finish(self, files: OutputFiles) -> None:
        """Write the files, but for --dry-run.

        files: by their names below the output folder, or the one of an output that is a file. Raise InputError if the
        disk has no room, or the path was taken meanwhile.
        """
        weights = {name: content for name, content in files.items() if isinstance(content, TensorFile)}
        nbytes = sum(content.nbytes for content in weights.values())
        free = shutil.disk_usage(nearest_existing(self.path.parent)).free
        if nbytes > free:  # all else is small, or a link
            sizes = f"{command_line.format_bytes(nbytes)}, the disk has {command_line.format_bytes(free)} free"
            raise InputError(f"--out {self.path} needs {sizes}")
        if self.args.dry_run:
            print(f"dry run: nothing written; {command_line.format_bytes(nbytes)} would be")
            return
        make_bar = partial(tqdm, total=nbytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        with make_bar(desc=str(self.path)) as bar, self.target.fill() as new:
            if self.is_file:
                (content,) = weights.values()
                writing.write_file(new, content, bar.update)
            else:
                writing.write_folder(new, files, bar.update)
        print(command_line.one_line(f"written: {self.path}"))
        if self.args.verify:
            with make_bar(desc="verifying") as bar:
                for name, content in weights.items():
                    writing.verify(self.path if self.is_file else self.path / name, content, bar.update)
            print("verified: every tensor was read back and is what was to be written")
