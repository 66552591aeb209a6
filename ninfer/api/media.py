"""Images, video and sound in requests: what is malformed is told as such, and what is whole needs a model that sees."""

from __future__ import annotations

import re

from ninfer.api.fields import Value, choice, text
from ninfer.errors import BadRequest

_DATA = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}\s*")
PEEK = 64  # characters of data that are looked at; the rest would be decoded in vain
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def chat_image(part: Value) -> BadRequest:
    """{"type": "image_url", "image_url": {"url", "detail"} or a string}; the same with video_url."""
    kind = text(part["type"])
    given = part[kind]
    if isinstance(given.raw, str):
        _source(given)
    else:
        given.object()
        _source(given["url"])
        given["detail"].maybe(choice("auto", "low", "high"))
    return blind(part, kind.removesuffix("_url"))


def responses_image(part: Value) -> BadRequest:
    """{"type": "input_image", "image_url": a string, or "file_id"}; input_video with video_url."""
    what = text(part["type"]).removeprefix("input_")
    if part["file_id"].given:
        raise part["file_id"].refused(
            "this server keeps no files; send the data as a URL", code="file_id_not_supported"
        )
    _source(part[f"{what}_url"])
    part["detail"].maybe(choice("auto", "low", "high", "original"))
    return blind(part, what)


def anthropic_image(block: Value) -> BadRequest:
    """{"type": "image", "source": {"type": "base64", "media_type", "data"} or {"type": "url", "url"}}."""
    source = block["source"]
    if choice("base64", "url")(source["type"]) == "url":
        _source(source["url"])
    else:
        choice(*IMAGES)(source["media_type"])
        _base64(source["data"], text(source["data"]))
    return blind(block, "image")


def blind(part: Value, what: str) -> BadRequest:
    """The error of a part that this model cannot take."""
    return part.refused(f"this model reads text, not {what}; leave the part out", code="vision_disabled")


def _source(value: Value) -> None:
    url = text(value)
    if url.startswith(("http://", "https://")):
        return
    found = _DATA.match(url)
    if found is None:
        raise value.wrong("an http(s) URL, or data:TYPE;base64,DATA", code="invalid_media")
    _base64(value, url[found.end() :])


def _base64(value: Value, data: str) -> None:
    if not _BASE64.fullmatch(data[:PEEK]):
        raise value.refused("its data is not base64", code="invalid_media")
