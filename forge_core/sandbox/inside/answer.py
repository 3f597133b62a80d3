"""Runs in the sandbox: executes the code as a module, then does what it is asked, one line of JSON at a time.

    {"name": N}                     the global N of the code
    {"object": K, "attribute": A}   an attribute of an object that was answered before
    {"object": K, "arguments": [...], "keywords": {...}}      a call of one

The answer is ``{"value": V}`` (after a call with the arguments as they are then) or ``{"error": [type, text]}``. The
code can read and write this channel too. That gains it nothing: whatever it writes counts as its own answer, and what
the answer should be never comes here. Standard library only.
"""

import os
import sys
import types

import boot
import plain


class Answerer:
    def __init__(self, namespace):
        self._namespace, self._objects = namespace, []

    def answer(self, request):
        try:
            return self._do(request)
        except BaseException as error:  # SystemExit too: a call that exits has failed, and says so
            return {"error": [type(error).__name__, str(error)[:1000]]}

    def _do(self, request):
        if "name" in request:
            return {"value": self._encode(self._named(request["name"]))}
        found = self._objects[request["object"]]
        if "attribute" in request:
            return {"value": self._encode(getattr(found, request["attribute"]))}
        arguments = plain.decode(request["arguments"], self._objects.__getitem__)
        keywords = plain.decode(request["keywords"], self._objects.__getitem__)
        value = self._encode(found(*arguments, **keywords))
        return {"value": value, "arguments": self._encode(arguments)}

    def _named(self, name):
        if name not in self._namespace:
            raise NameError(f"name {name!r} is not defined")
        return self._namespace[name]

    def _encode(self, value):
        return plain.encode(value, self._keep)

    def _keep(self, value):
        self._objects.append(value)
        return len(self._objects) - 1


def main():
    requests, answers = channel()
    module = types.ModuleType("solution")
    module.__file__ = boot.CODE
    sys.modules["solution"] = module
    try:
        exec(boot.compiled(), vars(module))
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(boot.without_ours(error)), error.__traceback__)
        sys.exit(1)
    answerer = Answerer(vars(module))
    for line in requests:
        answers.write(plain.dumps(answerer.answer(plain.loads(line))))
        answers.flush()


def channel():
    """Standard input and output; the code finds an empty one and standard error in their places."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers
