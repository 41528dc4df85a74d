"""What a process does first, before any slow import: make sure that Ctrl-C and the end of its launcher end it."""

import os
import signal
from types import FrameType

LAUNCHER = "SEQPAR_LAUNCHER"
"""The environment variable that tells processes the process id of their launcher."""


def end_at_interrupt() -> None:
    """Make Ctrl-C end the process, with an exception where a command can handle it, and at once elsewhere."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # some shells ignore it for background jobs
        signal.signal(signal.SIGINT, _raise_interrupt)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt in a command, but end at once in imports: torch and numpy would lose the exception."""
    in_command = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            break
        in_command = in_command or code.co_name == "run_command"  # of `commands`, inside the `try` of its `main`
        frame = frame.f_back
    if in_command and frame is None:
        raise KeyboardInterrupt
    os._exit(128 + number)


def end_with_launcher() -> None:
    """Have the system send SIGTERM to this process when the launcher that started it ends, by whatever signal."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(launcher):  # it has ended already
        os._exit(128 + signal.SIGTERM)
