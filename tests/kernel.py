"""A Python process that runs cells one by one, as a notebook's kernel does: `Kernel().run("1 + 1")`.

A cell's exception is shown and the process lives on; its traceback, with all that it refers to, is kept.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time

LOOP = """
import code, contextlib, io, json, signal, sys
answers = sys.stdout
interpreter = code.InteractiveInterpreter({"__name__": "__main__"})
signal.signal(signal.SIGINT, signal.default_int_handler)
for line in sys.stdin:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            interpreter.runsource(json.loads(line), "<cell>", "exec")
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
    print(json.dumps(shown.getvalue()), file=answers, flush=True)
"""


class Kernel:
    """Ends with `close`, or with the input that it reads."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def start(self, cell: str) -> None:
        """Begin a cell without waiting for its end."""
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()

    def result(self, deadline_s: float = 60) -> str:
        """What the cell printed, its error included; TimeoutError if it does not end in time."""
        if not select.select([self.process.stdout], [], [], deadline_s)[0]:
            raise TimeoutError(f"the cell runs for more than {deadline_s} s")
        return json.loads(self.process.stdout.readline())

    def run(self, cell: str, deadline_s: float = 60) -> str:
        self.start(cell)
        return self.result(deadline_s)

    def interrupt(self) -> tuple[str, float]:
        """The notebook's stop button: the interrupted cell's output, and seconds until it ended."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        return self.result(), time.monotonic() - start

    def close(self) -> int:
        """The exit status."""
        self.process.stdin.close()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.stdout.close()
