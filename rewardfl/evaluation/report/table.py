"""The figures of an evaluation for a terminal."""

from collections.abc import Iterator, Sequence

from rewardfl.evaluation.figures import AMOUNTS, FROZEN
from rewardfl.evaluation.intervals import NOTHING, format_interval

STILL = "these reward stillness: may only fall"
CANARIES = "canaries: by what hacking is recognised; after - base, and after / base where that is given"
WORDS = {
    "motion/dynamic_degree": "dynamic degree (Farneback)",
    "still/motion_smoothness": "motion smoothness (Farneback)",
    "canary/grid": "grid energy",
}


def format_report(report: dict) -> str:
    """Format the main figures: two arms next to each other in full, then a list of all arms."""
    lines = [f"{report['people']} people, {report['clips']} clips; mean [95 % interval over people]", ""]
    if "compared" in report:
        names = report["compared"]
        lines += [f"before: {names['before']}   after: {names['after']}"]
        lines += [line for judge in report["recognisers"] for line in _recogniser(report, judge)]
        lines += ["measured without a network", *_motion(report["motion"])]
    lines += ["", *_identity_scale(report), *_arms(report), *_face_sizes(report)]
    return "\n".join(lines)


def _line(name: str, *texts: str) -> str:
    return f"  {name:26s} {'   '.join(texts)}"


def _recogniser(report: dict, judge: str) -> Iterator[str]:
    figures = report["recognisers"][judge]
    names = {"held_out": "held-out judge", "reward": "reward's recogniser (trained against)"}
    yield names.get(judge, f"judge {judge}")
    for label, key in (("FaceSim", "face_sim"), ("coverage", "coverage")):
        yield _line(label, *(f"{which} {format_interval(figures[which][key])}" for which in ("before", "after")))
    yield _line("FaceSim gain", f"{format_interval(figures['gain']['relative'], percent=True)} relative")
    yield _line("real clips vs themselves", f"{figures['cap']:.3f}")
    for to in ("before", "real"):
        speed, nonrigid = (format_interval(figures[f"motion_after_to_{to}"][key]) for key in ("speed", "nonrigid"))
        yield _line(f"motion after / {to}", f"speed {speed}", f"non-rigid {nonrigid}")


def _motion(motion: dict) -> Iterator[str]:
    for key in (*AMOUNTS, "reversals"):
        signed = key == "reversals"
        means = {which: motion[key][which] if signed else motion[which][key] for which in ("before", "after", "real")}
        change = motion[key]["after_minus_before"] if signed else motion["after_to_before"][key]
        if change is None:
            yield _line(key.replace("_", " "), NOTHING)
            continue
        texts = [f"{which} {means[which]:.4g}" for which in ("real", "before", "after")]
        texts.append(f"{'after - before' if signed else 'after / before'} {format_interval(change)}")
        yield _line(key.replace("_", " "), *texts)


def _identity_scale(report: dict) -> Iterator[str]:
    """Yield the ends of identity kept as FaceSim, or why it is missing."""
    scale = report["identity_scale"]
    if scale["missing"]:
        yield f"identity kept: missing, {scale['missing']}"
    for judge, ends in scale["recognisers"].items():
        another, through_vae = (ends[end]["mean"] for end in ("another_person", "real_through_vae"))
        real = report["real"]["figures"][f"{judge}/identity_kept"]["mean"]
        ends_of_scale = f"0 is FaceSim {another:.3f}, 1 is {through_vae:.3f}"
        yield f"identity kept ({judge}): {ends_of_scale}; real clips are at {real:.3f}"


def _arms(report: dict) -> Iterator[str]:
    """Yield every arm's identity, motion, canaries, other rewards and published protocols."""
    judges = list(report["real"]["per_frame"])
    threshold = report["reading"]["threshold"]
    for arm in report["arms"]:
        decoded = ", decoded from mp4" if arm["decoded"] else ""
        against = f", against {arm['against']}" if arm["against"] else ""
        yield f"{arm['name']}: {arm['clips']} clips{decoded}{against}"
        figures = arm["figures"]
        for judge in report["identity_scale"]["recognisers"]:
            yield _line(f"identity kept ({judge})", format_interval(figures[f"{judge}/identity_kept"]))
        for judge in judges:
            yield _line(
                f"FaceSim ({judge})", format_interval(figures[f"{judge}/face_sim"]),
                f"drift per frame {format_interval(figures.get(f'{judge}/drift'))}",
                f"worst tenth {format_interval(figures[f'{judge}/worst_tenth'])}",
                f"above {threshold:g} {format_interval(figures[f'{judge}/above_threshold'])}",
            )  # fmt: skip
        yield from _other_rewards(arm, judges)
        if arm["against"]:
            yield from _against(arm, judges[-1])
        yield f"  {STILL}"
        yield from ("  " + _line(_words(name), format_interval(value)) for name, value in _block(figures, "still"))


def _other_rewards(arm: dict, judges: Sequence[str]) -> Iterator[str]:
    """Yield the dynamic degree, and the figures of published protocols and other rewards."""
    blocks = {*judges, "motion", "still", "canary"}
    for name in ("motion/dynamic_degree", *(name for name in arm["figures"] if name.partition("/")[0] not in blocks)):
        change = (arm.get("compared") or {}).get(name)
        difference = [f"difference {format_interval(change['difference'])}"] if change else []
        yield _line(_words(name), format_interval(arm["figures"][name]), *difference)


def _against(arm: dict, judge: str) -> Iterator[str]:
    compared = arm["compared"]
    gain, moved = compared[f"{judge}/face_sim"], compared[f"{judge}/nonrigid"]
    yield _line(
        "gain in FaceSim", format_interval(gain["difference"]), f"better for {gain['people_with_more']:.0%} of people"
    )
    yield _line("non-rigid motion", f"over the base's {format_interval(moved['ratio'])}")
    yield _line("frozen clips", format_interval(arm["frozen_share"]), f"moving less than {FROZEN:g} of the base's")
    yield f"  {CANARIES}"
    for name, change in [("motion/sharpness", compared.get("motion/sharpness")), *_block(compared, "canary")]:
        if change is not None:
            ratio = [f"/ base {format_interval(change['ratio'])}"] if "ratio" in change else []
            yield "  " + _line(_words(name), format_interval(change["difference"]), *ratio)
    yield "  " + _line("colour shift", format_interval(arm["colour_shift"]))


def _face_sizes(report: dict) -> Iterator[str]:
    """Yield FaceSim by the width of the face in the real clip; only count the faces that are too small."""
    small, *larger = report["face_sizes"].items()
    yield "faces by their width in the real clip"
    if small[1]:
        yield _line(small[0], f"{small[1]} of {report['people']} people: too small to score (--face-sizes)")
    judge = list(report["real"]["per_frame"])[-1]
    for name, count in larger:
        if count:
            values = [(arm["name"], arm["strata"][name]["figures"][f"{judge}/face_sim"]) for arm in report["arms"]]
            yield _line(name, f"{count} people", *(f"{arm} {format_interval(value)}" for arm, value in values))


def _block(figures: dict, block: str) -> list[tuple[str, dict]]:
    return [(name, value) for name, value in figures.items() if name.partition("/")[0] == block]


def _words(name: str) -> str:
    block, _, key = name.partition("/")
    plain = key.replace("_", " ") if block in ("motion", "still", "canary") else name
    return WORDS.get(name, plain)
