"""Commands do not spend their start and their end on collecting garbage that is none."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import gc
from flows.cli import main

class Cycle:
    def __del__(self):
        print("looked at in the end")

def cycle():
    one = Cycle()
    one.itself = one

main([])
main([])
print(gc.get_threshold()[0])
cycle()
"""


def test_a_command_collects_seldom_and_not_in_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout == "10000\n"
