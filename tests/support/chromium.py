"""A headless Chromium, driven through its DevTools protocol over two pipes: no driver, no port, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0


def browser() -> str | None:
    """The path of a Chromium; None without one (Debian and Ubuntu: ``apt-get install chromium``)."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A page in a headless Chromium; a context manager.

    Args:
        profile: an empty directory for its files.

    Attributes:
        requests: URLs that were requested.
        problems: messages of the console, exceptions and violations of the content security policy.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._number = 0
        self._rest = b""

    def __enter__(self) -> Chromium:
        program = browser()
        assert program is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        options += " --remote-debugging-pipe"
        line = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, program, str(self._profile)],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next((target["targetId"] for target in targets if target["type"] == "page"), None)
        page = page or self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            deadline = time.monotonic() + SECONDS
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
                assert ready, "Chromium does not answer"
                data = os.read(self._read, 1 << 20)
                assert data, "Chromium has ended"
                self._rest += data
            text, self._rest = self._rest.split(b"\0", 1)
            answer: dict[str, Any] = json.loads(text)
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(params))

    def open(self, path: Path, width: int, height: int, dark: bool) -> None:
        """Open a file in a window of this size and color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while self.evaluate("document.readyState + document.location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
