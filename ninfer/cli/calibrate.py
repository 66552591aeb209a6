"""ninfer-calibrate MODEL: time every route for the model's ops, and keep what won."""
# ruff: noqa: RUF009  (flag and group make attrs fields)

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from ninfer.cli.output import Console, configure_logging, run, version
from ninfer.config import EngineConfig, flag, group, parse, whole
from ninfer.formats.kv import KV_FORMATS

PROG = "ninfer-calibrate"
DESCRIPTION = """Measure every route for the ops of a model at every step width, and write this machine's profile.
What was measured before stays, unless it is measured again."""


@frozen(kw_only=True)
class CalibrateConfig:
    engine: EngineConfig = group(EngineConfig)
    out: Path | None = flag("the profile to write (the user's own)", Path, value="FILE")
    only: str | None = flag("measure ops whose key begins so, e.g. linear/", value="PREFIX")
    repeat: int = flag("timed rounds of each candidate", whole(3), default=11)
    print: bool = flag("write the profile to stdout as well", default=False)
    quiet: bool = flag("leave out the ranked table", default=False)
    log_level: str = flag(
        "what goes to stderr",
        choices=("debug", "info", "warning", "error", "critical", "off"),
        default="info",
    )


def body(argv: Sequence[str]) -> int:
    config = parse(
        CalibrateConfig,
        argv,
        prog=PROG,
        description=DESCRIPTION,
        version=version(),
        choices={"kv_dtype": [f.name for f in KV_FORMATS]},
        defaults={"model": "demo"},
    )
    configure_logging(config.log_level)
    console = Console()
    from ninfer.routes.measure import ranked_table  # late: a bad flag is told at once
    from ninfer.routes.profile import DeviceProfile, save_profile, user_path
    from ninfer.runtime.load import calibrate_model

    info, result = calibrate_model(
        config.engine,
        only=config.only or "",
        repeat=config.repeat,
        report=console.report,
        progress=lambda done, total, what: console.progress(what, done, total),
    )
    if not config.quiet:
        print(ranked_table(result.timings))
    path = config.out or user_path(info)
    before = DeviceProfile(info.hardware_class)
    if path.exists():
        before = DeviceProfile.from_json(path.read_text(), str(path))
    profile = before.layered(result.profile)
    save_profile(profile, path)
    console.report("profile", f"{path}  {len(profile.routes)} ops with a measured choice")
    if config.print:
        print(profile.to_json())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


if __name__ == "__main__":
    sys.exit(main())
