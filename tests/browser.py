"""A page in headless Chromium, driven over its DevTools pipe (one JSON object and a zero byte a message): sizes, colour
schemes, scripts, keys, the pointer, what the console says, pictures."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


def chromium() -> str | None:
    """Return the path of an installed Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one Chromium. `errors` are what its console and its scripts complained of since `open`."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()

        def as_three_and_four() -> None:
            # copies first: one of the two may have the number of the other
            copies = os.dup(commands), os.dup(answers)
            for copy, number in zip(copies, (3, 4), strict=True):
                os.dup2(copy, number)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=as_three_and_four, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._rest, self._number, self.errors, self._session = b"", 0, list[str](), ""
        (page,) = (one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, width: int, scheme: str, height: int = 900) -> None:
        """Loads a file at `width` px, for a phone where that is narrow, in the colour scheme `light` or `dark`."""
        self.errors.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._wait(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the pointer to a place in the window, in px."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=name)

    def picture(self, file: Path) -> None:
        """Writes the whole page as a PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        found = self._wait(lambda message: message.get("id") == number)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    def _wait(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the next message that `is_it`; what the console says on the way is kept."""
        while True:
            while b"\0" not in self._rest:
                piece = os.read(self._read, 1 << 16)
                assert piece, "Chromium ended"
                self._rest += piece
            line, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(line)
            params = message.get("params", {})
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                self.errors.append(json.dumps(params["args"]))
            elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            if is_it(message):
                return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()
