"""The output of a merging tool: a file or a folder of weights, and perhaps a report. No torch here."""

import argparse
import glob
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewardfl import command_line
from rewardfl.merging import writing
from rewardfl.merging.writing import OutputFiles, TensorFile
from rewardfl.outputs import Target, nearest_existing
from rewardfl.weights.shards import InputError


@dataclass(frozen=True, kw_only=True)
class Output:
    """A .safetensors file or a folder, perhaps with a report. overwrite: replace what has their names."""

    path: Path
    report: Path | None
    overwrite: bool
    tool: str

    @property
    def is_file(self) -> bool:
        """Return whether the output is a .safetensors file, not a folder."""
        return self.path.suffix == ".safetensors"

    def _target(self, inputs: Sequence[Path] = ()) -> Target:
        is_folder = not self.is_file
        return Target(option="--out", path=self.path, overwrite=self.overwrite, inputs=inputs, is_folder=is_folder)

    def _report_target(self, report: Path, inputs: Sequence[Path] = ()) -> Target:
        return Target(option="--json", path=report, overwrite=self.overwrite, inputs=(*inputs, self.path))

    def check(self, inputs: Sequence[Path]) -> None:
        """Raise InputError when the output or the report would harm an input, each other, or an existing file."""
        self._target(inputs).check()
        index = self.path.with_name(f"{self.path.name}.index.json")
        if self.is_file and index.exists():
            loads = f"loaders would take its shards and ignore {self.path.name}"
            raise InputError(f"{index} is in the way: {loads}; delete it")
        if self.report:
            self._report_target(self.report, inputs).check()

    def model_files(self, weights: TensorFile, max_bytes: int, config: Path | None) -> OutputFiles:
        """Return the files of a model: the one that the output is, or a folder's, with a copy of `config`."""
        if self.is_file:
            return {self.path.name: weights}
        return writing.shard(weights, max_bytes) | ({"config.json": config} if config else {})

    def finish(self, args: argparse.Namespace, files: OutputFiles, report: dict) -> None:
        """Write the files and the report. args: --dry-run (write only the report) and --verify.

        files: by their names below the output folder, or the one of an output that is a file. Raise InputError if the
        disk has no room, or the path was taken meanwhile.
        """
        nbytes = writing.count_bytes(files)
        self._make_room(nbytes)
        if args.dry_run:
            print(f"dry run: nothing written; {command_line.format_bytes(nbytes)} would be")
        else:
            self._write(files)
            if args.verify:
                self._verify(files)
            print(command_line.one_line(f"written: {self.path}"))
        if self.report:
            content = json.dumps({"tool": self.tool} | report, indent=2) + "\n"
            self._report_target(self.report).write(content.encode())

    def _make_room(self, nbytes: int) -> None:
        """Print which unfinished outputs are left. Raise InputError if the disk has no room."""
        for stray in sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.tmp-*")):
            print(command_line.one_line(f"note: {stray} is of a killed run, or of one that still writes"))
        free = shutil.disk_usage(nearest_existing(self.path.parent)).free
        if nbytes > free:
            sizes = f"{command_line.format_bytes(nbytes)}, the disk has {command_line.format_bytes(free)} free"
            raise InputError(f"--out {self.path} needs {sizes}")

    def _write(self, files: OutputFiles) -> None:
        with writing.progress_bar(files, str(self.path)) as bar:
            if not self.is_file:
                with self._target().fill() as folder:
                    writing.write_folder(folder, files, bar.update)
                return
            (weights,) = (content for content in files.values() if isinstance(content, TensorFile))
            with self._target().open() as file:
                writing.write_file(file, weights, bar.update)

    def _verify(self, files: OutputFiles) -> None:
        with writing.progress_bar(files, "verifying") as bar:
            for name, content in files.items():
                if isinstance(content, TensorFile):
                    writing.verify(self.path if self.is_file else self.path / name, content, bar.update)
        print("verified: every tensor was read back and is what was to be written")
