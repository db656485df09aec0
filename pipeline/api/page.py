"""Page: the operators' page as one file, with a policy that lets the browser run nothing but what is in it.

The hashes of its style and script are taken from the file itself: whatever else got into the page would not run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import NamedTuple


class StaticPage(NamedTuple):
    html: bytes
    headers: dict[str, str]


def load() -> StaticPage:
    """The page of `/dashboard` and the headers it is served with."""
    html = (files("pipeline.api") / "dashboard.html").read_bytes()
    policy = [
        "default-src 'none'",
        f"style-src '{_digest(html, b'style')}'",
        f"script-src '{_digest(html, b'script')}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return StaticPage(html, headers)


def _digest(html: bytes, tag: bytes) -> str:
    """CSP's name of the one inline element `tag`."""
    (body,) = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}"
