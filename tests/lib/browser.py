"""A headless Chromium that a test drives through the pipe of its DevTools protocol, without other packages."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A browser with one page."""

    def __init__(self, reader: int, writer: int):
        self._reader, self._writer, self._number, self._buffer = reader, writer, 0, b""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.problems: list[str] = []  # errors of the page
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    _session = None

    def send(self, method: str, **values):
        """Send a command and return its result."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": values, **session}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(answer["params"]["exceptionDetails"]["text"])
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"]["text"])

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._reader, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def run(self, script: str):
        """Return the value of an expression in the page."""
        return self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"].get(
            "value"
        )  # fmt: skip

    def wait(self, script: str, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.05)

    def screenshot(self, path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(folder, size: str = "900,700"):
    """Run a browser with its files in a folder."""
    pipes = [os.pipe(), os.pipe()]
    (to_read, writer), (reader, to_write) = pipes
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
    flags = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
        f"--user-data-dir={folder}", f"--window-size={size}", "--disable-background-networking", "--no-first-run",
    )  # fmt: skip
    command = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "browser", CHROMIUM, *flags]
    process = subprocess.Popen(command, pass_fds=ends, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    for end in (to_read, to_write, *ends):
        os.close(end)
    try:
        yield Browser(reader, writer)
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)
