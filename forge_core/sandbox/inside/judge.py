"""Runs in the sandbox: executes a test whose unknown names are those of code that runs in another sandbox.

A name that the test does not define and Python does not either is asked for; functions, classes and their objects come
as stand-ins whose calls and attributes are asked for too. The questions are those of ``answer.py``; the last line is
``{"passed": true}`` or ``{"failed": text}``. Stand-ins compare by identity and have no operators, so that the other
side decides no comparison. Standard library only.
"""

import builtins
import sys

import answer
import boot
import plain


class Asking:
    """Sends questions and takes the answers."""

    def __init__(self):
        self._answers, self._questions = answer.channel()

    def tell(self, message):
        self._questions.write(plain.dumps(message))
        self._questions.flush()

    def ask(self, question):
        self.tell(question)
        reply = plain.loads(self._answers.readline())
        if "error" in reply:
            raise raised(*reply["error"])
        return reply

    def encode(self, value):
        return plain.encode(value, number_of)

    def decode(self, data):
        return plain.decode(data, lambda number: StandIn(self, number))


class StandIn:
    """A function, class or object of the other side."""

    def __init__(self, asking, number):
        self.__dict__.update(_asking=asking, _number=number)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        asking = self._asking
        return asking.decode(asking.ask({"object": self._number, "attribute": name})["value"])

    def __call__(self, *arguments, **keywords):
        asking = self._asking
        question = {"object": self._number, "arguments": asking.encode(list(arguments))}
        reply = asking.ask({**question, "keywords": asking.encode(keywords)})
        for ours, theirs in zip(arguments, asking.decode(reply["arguments"]), strict=True):
            change(ours, theirs)
        return asking.decode(reply["value"])


class Names(dict):
    """The globals of the test."""

    def __init__(self, asking):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._asking = asking

    def __missing__(self, name):
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        return self._asking.decode(self._asking.ask({"name": name})["value"])


def number_of(value):
    if type(value) is not StandIn:
        raise TypeError(f"a test can hand over plain values only, not a {type(value).__name__}")
    return value._number


def change(ours, theirs):
    """What a call did to an argument of the test."""
    if type(ours) is not type(theirs) or ours == theirs:
        return
    if type(ours) is list:
        ours[:] = theirs
    elif type(ours) in (dict, set):
        ours.clear()
        ours.update(theirs)


def raised(name, text):
    """The exception of the other side, if Python has it; an assertion that fails is the test's alone."""
    found = getattr(builtins, name, None)
    if not isinstance(found, type) or not issubclass(found, Exception) or found is AssertionError:
        return RuntimeError(f"{name}: {text}")
    try:
        return found(text)
    except TypeError:  # such as UnicodeDecodeError, which takes more
        return RuntimeError(f"{name}: {text}")


def main():
    asking = Asking()
    try:
        exec(boot.compiled(), Names(asking))
    except BaseException as error:
        asking.tell({"failed": f"{type(error).__name__}: {error}"[:1000]})
        sys.exit(0)
    asking.tell({"passed": True})
