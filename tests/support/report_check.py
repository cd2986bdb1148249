"""Opens the page of an evaluation in Debian's chromium and takes its picture at two widths: `make report-check`.

python tests/support/report_check.py PAGE.html --out docs/results

The first clip's videos are played. Exit code 0: the page is no wider than the window, logs nothing, and its videos play
in step; 1: it does not; 2: there is no chromium.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)  # of the window
NARROWEST = 500  # that a window of chromium can be: a narrower page is shown in a frame
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=12000",
    "--autoplay-policy=no-user-gesture-required",
)  # fmt: skip
# In the page, when all is loaded: that the videos in it can be read, play, and keep in step, and how wide the page is.
PROBE = """
const wait = ms => new Promise(done => setTimeout(done, ms));
onload = async () => {
  const clip = document.querySelector('details.clip'), videos = clip ? [...clip.querySelectorAll('video')] : [];
  await wait(1500);
  for (const video of videos)
    if (video.error || !(video.duration > 0)) console.error('cannot be read: ' + video.src.slice(0, 60));
  if (videos.length) {
    clip.querySelector('button').click();
    await wait(1200);
    const shares = videos.map(video => video.currentTime / video.duration);
    const texts = [...clip.querySelectorAll('output')].map(output => output.textContent);
    const apart = shares.map(share => Math.abs(share - shares[0])).map(far => Math.min(far, 1 - far));
    if (videos.some(video => video.paused) || Math.max(...apart) > 0.25)
      console.error('out of step: ' + shares);
    if (texts.some(text => !text.startsWith('frame'))) console.error('without a score: ' + texts);
    clip.querySelector('button').click();
    clip.querySelector('input').value = 0.5;
    clip.querySelector('input').dispatchEvent(new Event('input'));
    await wait(300);
    if (videos.some(video => Math.abs(video.currentTime / video.duration - 0.5) > 0.05))
      console.error('the slider moves nothing');
  }
  console.log('measured ' + innerWidth + ' ' + document.documentElement.scrollWidth + ' ' +
    document.documentElement.scrollHeight);
};
"""


def look(chromium: str, page: Path, width: int, picture: Path) -> list[str]:
    """Take a picture of the whole page at this width: what is wrong with it."""
    height, problems = shown(chromium, page, width, 1000, picture)
    if height:
        _, problems = shown(chromium, page, width, height, picture)
        with Image.open(picture) as image:  # a palette is a third of the bytes
            cropped = image.convert("RGB").crop((0, 0, width, height)).quantize(72)
        cropped.save(picture, optimize=True)
    return problems


def shown(chromium: str, page: Path, width: int, height: int, picture: Path) -> tuple[int, list[str]]:
    """The page's own height in a window of this size, and what is wrong with it; its picture is taken."""
    with tempfile.TemporaryDirectory() as folder:
        probed, opened, window = Path(folder, "page.html"), Path(folder, "page.html"), max(width, NARROWEST)
        probed.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
        if width < NARROWEST:
            opened = Path(folder, "frame.html")
            frame = f'<iframe src="page.html" width="{width}" height="{height}" style="border: 0"></iframe>'
            opened.write_text(f'<!DOCTYPE html><body style="margin: 0">{frame}</body>')
        command = [chromium, *OPTIONS, f"--user-data-dir={folder}/profile", f"--window-size={window},{height}"]
        command += [f"--screenshot={picture}", opened.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = re.findall(r"CONSOLE:\d+\] \"(.*)\", source:", done.stderr)
    measured = [list(map(int, line.split()[1:])) for line in said if line.startswith("measured ")]
    problems = [line for line in said if not line.startswith("measured ")]
    if not measured:
        return 0, [*problems, f"the page never said how wide it is: {done.stderr[-500:]}"]
    ((inner, wide, high),) = measured
    if inner != width or wide > width:
        problems.append(f"the page is {wide} pixels wide, the window {inner}")
    return high, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="report.html of an evaluation")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "report_check", help="folder of the pictures")
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("error: no chromium is here; install Debian's: apt-get install chromium", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    found = {width: look(chromium, args.page, width, args.out / f"report_{width}.png") for width in WIDTHS}
    for width, problems in found.items():
        print(f"{args.out / f'report_{width}.png'}: {'; '.join(problems) or 'ok'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
