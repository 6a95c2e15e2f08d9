"""An interrupt that arrives in a destructor is raised again, where it can be caught.

Python raises `KeyboardInterrupt` in whatever its main thread runs next. While ops run, that is
often the destructor of a saved value or the callback of a weak reference: Python prints
"Exception ignored in" and goes on, and the program that was to end trains on.
"""

from __future__ import annotations

import signal
import sys
import threading
from _thread import start_new_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class KeptInterrupts:
    """Hears, until it is closed, of every exception that Python ignores.

    All but interrupts of the main thread go to the hook that was there before.
    """

    def __init__(self) -> None:
        self._before = sys.unraisablehook
        self._open = True
        sys.unraisablehook = self

    def __call__(self, ignored: UnraisableHookArgs) -> None:
        """Have the signal sent again, or pass on what is none."""
        main = threading.main_thread().ident
        if (
            self._open
            and main is not None
            and issubclass(ignored.exc_type, KeyboardInterrupt)
            and threading.get_ident() == main
            and callable(signal.getsignal(signal.SIGINT))
            and _start(main)
        ):
            return
        self._before(ignored)

    def close(self) -> None:
        """Leave the hook that was there before. Idempotent."""
        self._open = False
        # One that was closed while another lay above it is still there.
        while isinstance(sys.unraisablehook, KeptInterrupts) and not sys.unraisablehook._open:
            sys.unraisablehook = sys.unraisablehook._before


def _start(main: int) -> bool:
    """Send the signal from another thread, which runs when this one has left the destructor."""
    try:
        start_new_thread(signal.pthread_kill, (main, signal.SIGINT))
    except RuntimeError:  # no thread can be started: Python is about to end
        return False
    return True
