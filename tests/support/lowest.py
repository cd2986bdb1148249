"""Print pip constraints that pin every dependency of pyproject.toml to its lowest version: `make lowest`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
for line in [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]:
    if bound := re.match(r"([\w-]+)>=([\w.]+)", line):
        name, version = bound.groups()
        print(f"{name}=={version}")
        if name == "onnxruntime-gpu":  # insightface asks for the other one, which lies in the same folder
            print(f"onnxruntime=={version}")
