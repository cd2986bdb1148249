"""An HTML page in one file: its style, its script, tables. Whatever comes from files goes through html.escape."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

# A browser asks nothing of any network for this page: what it may load is in it, or lies beside it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; media-src data: file: 'self'"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5d656d; --paper: #fff; --card: #f4f5f7; --rule: #d5d9de;
  --bad: #b3261e; --good: #1b6e3c; --c0: #0068b5; --c1: #c75300; --c2: #00805b; --c3: #a83f83; --c4: #8a6d00;
  --c5: #1f8fbf; --c6: #7b4fb5; --c7: #8b4a2b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #a0a8b0; --paper: #15181b; --card: #1e2226;
  --rule: #383f46; --bad: #ff8a80; --good: #7fd6a0; --c0: #5eb1f2; --c1: #f59a55; --c2: #3ecba0; --c3: #e58cc4;
  --c4: #e0c04a; --c5: #86d3f5; --c6: #bb9af0; --c7: #d39b7b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .75rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; } p { margin: .4rem 0; } small, .soft { color: var(--soft); }
small { font-size: .8rem; line-height: 1.35; display: block; font-weight: 400; }
.verdict { background: var(--card); border-left: .4rem solid var(--soft); padding: .75rem 1rem; margin: .5rem 0; }
.verdict p { font-size: 1.1rem; }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.verdict li, .out { color: var(--bad); } .verdict ul { margin: .5rem 0 0; padding-left: 1.2rem; }
.box { overflow-x: auto; border: 1px solid var(--rule); border-radius: .3rem; margin: .5rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: left; vertical-align: top; border-top: 1px solid var(--rule); }
thead th { border-top: 0; background: var(--card); white-space: nowrap; } td { white-space: nowrap; }
tbody th { font-weight: 600; min-width: 9.5rem; max-width: 20rem; } td.text { white-space: normal; min-width: 12rem; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.pictures > div { max-width: 36rem; min-width: 0; }
svg.picture { width: 100%; height: auto; display: block; font-size: 12.5px; } svg text { fill: var(--soft); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.real { --c: var(--soft); } .base { --c: var(--ink); }
svg .grid { stroke: var(--rule); fill: none; } svg polyline { fill: none; stroke: var(--c); stroke-width: 2; }
svg polyline.real { stroke-dasharray: 5 4; } svg circle { fill: var(--c); }
svg path.thin { stroke: var(--c); fill: none; }
svg path.base { stroke: var(--c); stroke-width: 2; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; margin: .2rem 0; }
.legend i { display: inline-block; width: .9rem; height: .25rem; background: var(--c); margin-right: .4rem;
  vertical-align: middle; }
details { border-top: 1px solid var(--rule); padding: .4rem 0; } summary { cursor: pointer; }
.shots { display: grid; gap: .75rem; margin: .5rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(46%, 15rem), 1fr)); }
figure { margin: 0; min-width: 0; } video { width: 100%; display: block; background: #000; border-radius: .2rem; }
figcaption { font-size: .85rem; } .controls { display: flex; gap: .75rem; align-items: center; }
.controls input { flex: 1; min-width: 0; } button { font: inherit; padding: .15rem .9rem; }
svg.strip { width: 100%; height: 2rem; display: block; background: var(--card); } .strip .score { fill: var(--c0); }
.strip .hidden { fill: var(--bad); } .strip .cursor { fill: var(--ink); opacity: .55; }
thead small { white-space: normal; min-width: 8rem; } .ends { white-space: nowrap; }
.tight .ends { display: block; font-size: .8rem; }
@media (max-width: 40rem) { .ends { display: block; font-size: .75rem; } tbody th { min-width: 7rem; }
  th, td { padding: .3rem .4rem; } .verdict p { font-size: 1rem; } svg.picture { font-size: 15px; } }
pre { white-space: pre-wrap; background: var(--card); padding: .6rem; margin: .5rem 0; font-size: .85rem; }
"""
# The videos of a clip play in step: the first that can leads, the others follow its share of the time.
SCRIPT = """
'use strict';
for (const clip of document.querySelectorAll('details.clip')) {
  const shots = [...clip.querySelectorAll('figure')], button = clip.querySelector('button');
  const range = clip.querySelector('input'), videos = shots.map(shot => shot.querySelector('video'));
  const ready = () => videos.filter(video => video && video.duration > 0);
  let playing = false;
  function show(share) {
    for (const shot of shots) {
      const scores = shot.dataset.scores.split(' '), frames = scores.length + 1;
      const frame = Math.min(frames - 1, Math.floor(share * frames + 1e-6));
      shot.querySelector('.cursor').setAttribute('x', frame);
      shot.querySelector('output').textContent = frame ? `frame ${frame}: ${scores[frame - 1]}` : 'frame 0: given';
    }
    range.value = share;
  }
  function seek(share) {
    for (const video of ready()) video.currentTime = share * video.duration;
    show(share);
  }
  function follow() {
    const [lead, ...others] = ready();
    if (!playing || !lead) return;
    if (lead.ended) {
      seek(0);
      for (const video of ready()) video.play();
    }
    const share = lead.currentTime / lead.duration;
    for (const video of others) {
      video.playbackRate = video.duration / lead.duration;
      if (Math.abs(video.currentTime - share * video.duration) > 0.06) video.currentTime = share * video.duration;
    }
    show(share);
    requestAnimationFrame(follow);
  }
  function set(on) {
    playing = on && ready().length > 0;
    button.textContent = playing ? 'Pause' : 'Play';
    for (const video of ready()) playing ? video.play() : video.pause();
    if (playing) follow();
    else if (ready().length) seek(ready()[0].currentTime / ready()[0].duration);
  }
  const load = () => videos.forEach(video => {
    if (video && video.preload == 'none') { video.preload = 'auto'; video.load(); }
  });
  for (const video of videos) if (video) video.controls = false;
  clip.querySelector('.controls').hidden = false;
  button.addEventListener('click', () => set(!playing));
  range.addEventListener('input', () => {
    const share = Number(range.value);
    set(false);
    seek(share);
  });
  clip.addEventListener('toggle', () => clip.open ? load() : set(false));
  if (clip.open) load();
}
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole document; the body's parts are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def figure(value: Mapping[str, float] | None, signed: bool = False) -> str:
    """The mean and its interval, which may go below it; a dash for nothing. As many digits as the largest asks for."""
    if value is None:
        return "-"
    largest = max(map(abs, value.values()))
    digits = 1 if largest >= 100 else 4 if 0 < largest < 0.1 else 3
    mean, low, high = (f"{value[key]:{'+' if signed else ''}.{digits}f}" for key in ("mean", "low", "high"))
    return f'{mean} <span class="ends">[{low}, {high}]</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], tight: bool = False) -> str:
    """Rows of cells, each with the row's name first, in a box that scrolls by itself. All of it is HTML already.

    tight: intervals stand below their means.
    """
    top = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows)
    box = "box tight" if tight else "box"
    return f'<div class="{box}"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def words_table(values: Mapping[str, str], head: Sequence[str]) -> str:
    """Names and texts that may be long."""
    lines = "".join(
        f'<tr><th>{escape(name)}</th><td class="text">{escape(str(text))}</td></tr>' for name, text in values.items()
    )
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="box"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def explained(label: str, says: str) -> str:
    """A figure's name with its one line below."""
    return f"{escape(label)}<small>{escape(says)}</small>"
