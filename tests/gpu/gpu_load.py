"""Work that keeps a GPU busy beside what is tested: GEMMs and an elementwise loop, on streams of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

AHEAD = 2  # bursts that may be queued on a stream
BURST = 8
PAUSE_S = 1e-3


class Load:
    """`with Load(device):` a thread queues bursts as the last ones come to their end, so that the device always has
    some, whatever the host is doing, and is never far behind."""

    def __init__(self, device: torch.device, width: int = 4096, mebibytes: int = 256) -> None:
        self.device, self.bursts, self.error = device, 0, None
        left = torch.randn(width, width, dtype=torch.bfloat16, device=device)
        right, product = torch.randn_like(left), torch.empty_like(left)
        field = torch.ones(mebibytes << 18, device=device)

        def gemm() -> None:
            torch.mm(left, right, out=product)

        def elementwise() -> None:
            field.mul_(1.0)

        self.queues: list[tuple[torch.cuda.Stream, Callable[[], Any], deque[torch.cuda.Event]]] = []
        for work in (gemm, elementwise):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self.queues.append((stream, work, deque()))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while not self.over.wait(PAUSE_S):
                self._more()
        except Exception as error:
            self.error = error

    def _more(self) -> None:
        for stream, work, ends in self.queues:
            while ends and ends[0].query():
                ends.popleft()
            while len(ends) < AHEAD:
                with torch.cuda.stream(stream):
                    for _ in range(BURST):
                        work()
                    ends.append(stream.record_event())
                self.bursts += 1

    def __enter__(self) -> Load:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        for stream, _, _ in self.queues:
            stream.synchronize()
        if self.error is not None:
            raise self.error
