"""A headless Chromium, spoken to over a pair of pipes in its DevTools protocol. Nothing else is needed for it."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 20.0
HIGH = 40  # descriptors above 3 and 4, which the browser reads and writes
START = "import os, sys; [os.dup2(int(sys.argv[i]), i + 2) for i in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


def find() -> str | None:
    """The browser's program, if one is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page.   errors: exceptions and failed loads of the page, and what it wrote to the console as errors."""

    def __init__(self, folder: Path, *, size: tuple[int, int] = (1280, 800), dark: bool = False) -> None:
        program = find()
        assert program is not None
        self.errors: list[str] = []
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer = b""
        self._session: str | None = None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        ours = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in (to_read, to_write)]
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += [f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}", "--disable-dev-shm-usage"]
        if dark:
            flags.append("--force-dark-mode")
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, ours), program, *flags, "about:blank"],
            pass_fds=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_read, to_write, *ours):
            os.close(fd)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        width, height = size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        message = {"id": id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while id not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(id)
        assert "error" not in answer, f"{method}: {answer['error']}"
        found: dict[str, Any] = answer["result"]
        return found

    def _receive(self, deadline: float) -> None:
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "the browser does not answer"
        data = os.read(self._read, 1 << 16)
        assert data, "the browser has gone"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                entry = message["params"]["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = WAIT_S) -> None:
        """Wait for an expression to be true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < deadline, f"never came true: {script}; errors: {self.errors}"
            time.sleep(0.03)

    def text(self, selector: str) -> list[str]:
        """What is to be seen of each match."""
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")
        return found

    def click(self, selector: str, nth: int = 0) -> None:
        """With the mouse, at the middle of a match."""
        at = f"document.querySelectorAll({json.dumps(selector)})[{nth}]"
        box = self.run(
            f"(() => {{ {at}.scrollIntoView({{block: 'nearest'}}); const b = {at}.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, "")
        codes = {"Enter": 13}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=codes.get(key, 0))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._session = None
        os.write(self._write, json.dumps({"id": next(self._ids), "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
