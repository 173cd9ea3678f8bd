"""Runs the user's program in this process so that it sees what `python script.py` would see."""

from __future__ import annotations

import atexit
import importlib.machinery
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from typing import NoReturn


def run_as_main(command: list[str]) -> NoReturn:
    """`command` is [script.py, args...] or ["-m", module, args...]. Ends the process with the program's exit code,
    as the interpreter would: uncaught exceptions through `sys.excepthook`, then threads, exit handlers, flushing."""
    code = 0
    try:
        _execute(command)
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:  # all that the interpreter would print
        error.__traceback__ = _without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end_process(code)


def end_process(code: int) -> NoReturn:
    """What the interpreter does at its end, less the tear-down of modules, which takes a second with torch loaded. A
    negative code is a signal to die of, as the interpreter does after Ctrl-C."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # an exit handler's error is printed and changes nothing, as in the interpreter
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback that begins where the program does."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _execute(command: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        sys.path[0:0] = [os.getcwd()]
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    path = command[0]
    sys.argv = list(command)
    sys.path[0:0] = [os.path.dirname(os.path.realpath(path))]
    with open(path, "rb") as file:
        source = file.read()
    path = os.path.abspath(path)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(compile(source, path, "exec"), main.__dict__)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
