"""A real Chromium for tests, driven over its own debugging pipe: no further library, no port.

`Page` evaluates JavaScript, clicks and types as a user does, and keeps what went wrong and what was requested.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
WHY_NOT = "no chromium here (scripts/apt.sh installs it)"
_LIMIT = 30.0


class Page:
    """One page in one browser that lives as long as this object's `with` block."""

    def __init__(self, *, dark: bool = False, size: tuple[int, int] = (1200, 800)) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._pending = b""
        self._profile = tempfile.mkdtemp(prefix="lockstep-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def wire() -> None:  # the browser reads from 3 and writes to 4
            reading, writing = os.dup(to_read), os.dup(to_write)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [
                *(BROWSER, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
                *("--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"),
                *("--disable-extensions", "--mute-audio", f"--user-data-dir={self._profile}"),
                *(f"--window-size={size[0]},{size[1]}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=wire,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            target = self.send("Target.createTarget", session=False, url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", session=False, targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.send(f"{domain}.enable")
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            self.send("Emulation.setEmulatedMedia", features=scheme)
            self.send(
                "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)  # a browser whose pipe is gone ends by itself
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        for _ in range(20):  # its helpers may still be writing
            shutil.rmtree(self._profile, ignore_errors=True)
            if not os.path.exists(self._profile):
                break
            time.sleep(0.1)

    # ---------------------------------------------------------------- what a test does

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def evaluate(self, expression: str):
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise AssertionError(told["exceptionDetails"]["exception"].get("description", told))
        return told["result"].get("value")

    def wait(self, expression: str):
        """Until a JavaScript expression holds; its value."""
        end = time.monotonic() + _LIMIT
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):
                value = self.evaluate(expression)
                if value or value == {}:  # an element has no value of its own
                    return value
            time.sleep(0.02)
        raise AssertionError(f"{expression} has not come to hold within {_LIMIT:.0f} s; errors: {self.errors}")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element that fits."""
        place = self.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def press(self, key: str, ctrl: bool = False) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38}
        code.update({"ArrowRight": 39, "ArrowDown": 40, "PageUp": 33, "PageDown": 34})
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code[key],
                modifiers=2 if ctrl else 0,
            )

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    # ---------------------------------------------------------------- the pipe

    def send(self, method: str, session: bool = True, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._receive()
            if told.get("id") == self._number:
                if "error" in told:
                    raise AssertionError(f"{method}: {told['error']}")
                return told["result"]
            self._note(told)

    def _note(self, told) -> None:
        method, parameters = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def _receive(self):
        end = time.monotonic() + _LIMIT
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise AssertionError("the browser has ended" if ready else f"the browser is silent for {_LIMIT:.0f} s")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\0")
        return json.loads(line)
