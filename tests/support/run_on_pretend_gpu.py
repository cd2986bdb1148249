"""Run a script of the package on the pretend GPU: python run_on_pretend_gpu.py REPORT.json SCRIPT ARGUMENT ...

The report has what the pretend device saw; the exit code is the script's. PAGE_BYTES in the environment is for
rewardfl.memory.host_pool: a page of its own is larger than all that a tiny model offloads.
"""

import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

import rewardfl  # noqa: F401, E402, I001  before torch, as in the scripts
import accelerate  # noqa: F401, E402  third parties before torch is patched: they keep its own functions
import diffusers  # noqa: E402
import peft  # noqa: F401, E402
import pretend_gpu  # noqa: E402
import transformers  # noqa: F401, E402

_ = diffusers.AutoencoderKLWan, diffusers.WanTransformer3DModel, diffusers.UniPCMultistepScheduler


def rows(counter: dict) -> list:
    return [[*map(str, key), count] for key, count in sorted(counter.items(), key=lambda item: -item[1])]


def main(report: str, script: str, arguments: list[str]) -> int:
    pretend_gpu.install()
    from rewardfl.memory import host_pool
    from rewardfl.training.timer import Timer

    host_pool.PAGE_BYTES = int(os.environ.get("PAGE_BYTES", host_pool.PAGE_BYTES))
    pretend_gpu.watch_phases(Timer)
    sys.argv = [script, *arguments]
    os.chdir(ROOT)
    code = 1
    try:
        with pretend_gpu.PretendDevice():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        ledger = pretend_gpu.ledger
        counters = ("mixed", "hazards", "notes")
        content = {name: rows(getattr(ledger, name)) for name in counters}
        content["peaks"] = ledger.peaks
        content["host_bytes"] = sum(ledger.registered.values())
        Path(report).write_text(json.dumps(content, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
