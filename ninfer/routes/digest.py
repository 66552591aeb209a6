"""Whether a profile's measurements are of the kernels as they are now.

A route's digest is one of the text of its templates and of all that they use, without comments and blanks, so that it
does not depend on shapes or on a card. Numbers of blocks, warps and the like are in a candidate's name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from attrs import evolve

from ninfer.routes.profile import Bands, DeviceProfile
from ninfer.routes.render import TEMPLATES
from ninfer.routes.route import Route

_COMMENTS = re.compile(r"{#.*?#}|//[^\n]*", re.DOTALL)
_USES = re.compile(r"""(?:use\(|include |from |import )["']([\w/.]+\.j2)["']""")


@cache
def _text(template: str) -> str:
    return _COMMENTS.sub("", (TEMPLATES / template).read_text())


def texts(template: str, *, seen: frozenset[str] = frozenset()) -> list[str]:
    """The names of a template and of what it uses, in the order of use."""
    names = [template]
    for name in _USES.findall(_text(template)):
        if name not in seen:
            names += texts(name, seen=seen | {template})
    return list(dict.fromkeys(names))


@cache
def route_digest(route: Route[Any]) -> str:
    """Sixteen hexadecimal digits."""
    stages = [route.template, *(s.template or str(s.library) for s in route.then)]
    names = [n for s in stages for n in (texts(s) if s.endswith(".j2") else [s])]
    prelude = f"{route.template.split('/')[0]}/prelude.h.j2"
    parts = ["".join(_text(n).split()) if n.endswith(".j2") else n for n in dict.fromkeys([prelude, *names])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def band_digests(profile: DeviceProfile, key: str, routes: Sequence[Route[Any]]) -> tuple[str, ...]:
    """For each band of an op, a digest of its winner and of the default that it beat; "" where the default won.

    None of the routes any more: "gone".
    """
    by_name = {r.name: r for r in routes}
    digests = []
    for last, winner in profile.routes[key]:
        default = next(iter(profile.measured.get(key, {}).get(str(last), ())), winner)
        named = [by_name.get(c.split("/")[0]) for c in (winner, default)]
        known = [route_digest(r) for r in named if r is not None]
        joined = hashlib.sha256("".join(known).encode()).hexdigest()[:12] if len(known) == len(named) else "gone"
        digests.append(joined if winner else "")
    return tuple(digests)


def stamped(profile: DeviceProfile, routes: Sequence[Route[Any]]) -> DeviceProfile:
    """A profile that was measured just now, with what tells later whether it still holds."""
    return evolve(profile, digests={key: band_digests(profile, key, routes) for key in profile.routes})


def fresh(profile: DeviceProfile, routes: Sequence[Route[Any]]) -> tuple[DeviceProfile, int]:
    """The profile without what was measured of other kernels, and the number of bands that went."""
    kept: dict[str, Bands] = {}
    stale = 0
    for key, bands in profile.routes.items():
        now = band_digests(profile, key, routes)
        then: Sequence[str] = profile.digests.get(key, ())
        then = then if len(then) == len(now) else ("",) * len(now)
        good = [a == b and b != "gone" for a, b in zip(then, now, strict=True)]
        stale += len(good) - sum(good)
        kept[key] = tuple((last, winner if ok else "") for ok, (last, winner) in zip(good, bands, strict=True))
    return evolve(profile, routes=kept), stale
