"""Interrupt a thread, as a session does with a handler."""

import ctypes
import threading


def interrupt(thread: threading.Thread) -> None:
    """Raise `InterruptedError` in it as soon as it executes Python."""
    assert thread.ident is not None
    number, error = ctypes.c_ulong(thread.ident), ctypes.py_object(InterruptedError)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error) == 1
