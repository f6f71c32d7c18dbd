"""A clean stop at Ctrl-C or SIGTERM: finish the step, save, leave.

Python runs a signal's handler only when the main thread is back in the interpreter, and a rank may sit in
a collective or a compiled graph for long. The C part of the signal handling writes to a wake-up descriptor
at once, so a thread reads that: it tells the user that the signal was taken, ends the process when a second one
asks for it, and when the step does not end, as where another rank has died and a collective never completes.
"""

import os
import signal
import socket
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 2.0  # a launcher passes on the signal that the terminal has sent already: both are one request


class Interrupt:
    """Context manager; `.requested` turns True at the first SIGINT or SIGTERM, a later one exits.

    The exit code is then 128 + the signal's number. Former handlers are restored at the end. Outside the
    main thread, where Python allows no handlers, it does nothing. `announce`: say that the signal was taken.
    `patience`: seconds from the signal to `settle()`, which says that the step has ended; then it exits too.
    """

    def __init__(self, announce: bool = True, patience: float = 120.0):
        self.requested = False
        self.announce = announce
        self.patience = patience
        self._settled = threading.Event()
        self._former: dict[int, object] = {}

    def settle(self) -> None:
        """The step has ended and what follows ends by itself."""
        self._settled.set()

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        threading.Thread(target=self._watch, name="interrupt", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.settle()
        if not self._former:
            return
        for number, former in self._former.items():
            signal.signal(number, former if former is not None else signal.SIG_DFL)
        self._former = {}
        signal.set_wakeup_fd(self._former_wakeup)
        self._write.close()  # ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _watch(self) -> None:
        first = None
        with self._read:
            while data := self._read.recv(16):
                for number in data:
                    if number not in SIGNALS:
                        continue
                    self.requested = True
                    if first is None:
                        first = time.monotonic()
                        threading.Thread(target=self._lose_patience, args=(number,), daemon=True).start()
                        if self.announce:
                            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")
                    elif time.monotonic() - first > SAME_SECONDS:
                        os._exit(128 + number)

    def _lose_patience(self, number: int) -> None:
        if not self._settled.wait(self.patience):
            os.write(2, f"the step has not ended within {self.patience:g} s: leaving without saving\n".encode())
            os._exit(128 + number)
