"""Chromium driven over its DevTools pipe by the standard library: pages opened, keys pressed, pictures taken."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--mute-audio", "--remote-debugging-pipe")  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
        "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip
SHIFT = 8


def program() -> str | None:
    """Where Chromium is: ``TRIMTAB_CHROMIUM``, else on the path."""
    return os.environ.get("TRIMTAB_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """``with Browser() as browser: tab = browser.open(path)``."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def as_3_and_4() -> None:
            low, high = os.dup2(to_read, 103), os.dup2(to_write, 104)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [str(program()), *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=as_3_and_4, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A DevTools command and its result; events that come meanwhile are kept in ``events``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])
            self.events.append(found)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, width: int = 1440, height: int = 900, dark: bool = False, script: bool = True) -> Tab:
        """The page in a new tab, loaded and drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        if not script:
            tab.call("Emulation.setScriptExecutionDisabled", value=True)
        tab.began = time.monotonic()
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.until(lambda: tab.value("document.readyState") == "complete")
        if script:
            tab.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        tab.opened = time.monotonic() - tab.began
        return tab


class Tab:
    """One page. ``opened``: seconds from the command to open it to its first frame after the load event."""

    began = opened = 0.0

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def until(self, holds: Callable[[], object], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "the page did not come to rest"
            time.sleep(0.01)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str, shift: bool = False) -> None:
        for key in keys:
            text = {"Enter": "\r", " ": " "}.get(key)
            common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key],
                      "modifiers": SHIFT if shift else 0}  # fmt: skip
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self.call("Input.dispatchKeyEvent", **down, **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path, whole: bool = True) -> Path:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
        return path

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings on the console, exceptions, and whatever was asked of a network."""
        self.value("1")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, told = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(str(told["args"]))
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"]["text"])
            elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(("file:", "data:")):
                found.append("request: " + told["request"]["url"])
        return found
