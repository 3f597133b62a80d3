"""Runs in the sandbox before the code: lowers the limits for good, then starts what runs the code, and ends with it.

    python -c "... boot.main()" MODE LIMIT=VALUE...

MODE is ``script``, ``answer`` or ``judge``; limits have the names of the module ``resource``. The code is
``/tmp/main.py``. Standard library only, like everything in this folder: it is copied into the image. Every import
counts here: json would take as long as the rest.
"""

import _sitebuiltins
import builtins
import posix
import resource
import sys

CODE = "/tmp/main.py"


def main():
    mode, *limits = sys.argv[1:]
    for name, value in (limit.split("=") for limit in limits):
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    if program := posix.fork():
        end_with(program)
    for name in ("exit", "quit"):  # python -S leaves them out
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    if mode == "script":
        script()
    else:
        __import__(mode).main()


def end_with(program):
    """Be process 1: its end is the end of all others. bubblewrap has a process for this too, but leaves it to the
    host's init to bury, which in a container is often nobody."""
    pid = 0
    while pid != program:
        pid, status = posix.wait()
    code = posix.waitstatus_to_exitcode(status)
    posix._exit(code if code >= 0 else 128 - code)


def script():
    """Run the code as ``python main.py`` would, with no frame of ours in its tracebacks."""
    module = sys.modules["__main__"]
    vars(module).pop("sys")
    vars(module).pop("boot")
    module.__file__ = CODE
    sys.path.pop(0)
    sys.argv[:] = [CODE]
    try:
        exec(compiled(), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(without_ours(error)), error.__traceback__)
        sys.exit(1)


def compiled():
    with open(CODE, "rb") as file:
        return compile(file.read(), CODE, "exec", dont_inherit=True)


def without_ours(error):
    """The traceback of ``error`` from the first frame of the code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != CODE:
        trace = trace.tb_next
    return trace
