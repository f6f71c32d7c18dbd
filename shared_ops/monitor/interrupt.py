"""A clean stop at Ctrl-C or SIGTERM: finish the step, save, leave.

Python runs a signal's handler only when the main thread is back in the interpreter, and a rank may sit in
a collective or a compiled graph for long. The C part of the signal handling writes to a wake-up descriptor
at once, so a thread reads that: it tells the user that the signal was taken, and a second one ends the
process immediately whatever the main thread does.
"""

import os
import signal
import socket
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager; `.requested` turns True at the first SIGINT or SIGTERM, the second one exits.

    The exit code is then 128 + the signal's number. Former handlers are restored at the end. Outside the
    main thread, where Python allows no handlers, it does nothing. `announce`: say that the signal was taken.
    """

    def __init__(self, announce: bool = True):
        self.requested = False
        self.announce = announce
        self._former: dict[int, object] = {}

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
        seen = 0
        with self._read:
            while data := self._read.recv(16):
                for number in data:
                    if number not in SIGNALS:
                        continue
                    seen += 1
                    self.requested = True
                    if seen > 1:
                        os._exit(128 + number)
                    if self.announce:
                        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")
