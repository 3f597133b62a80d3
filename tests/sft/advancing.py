"""Go on with the run tiny-sft of a store until it is finished: python -m tests.sft.advancing STORE DATA"""

from __future__ import annotations

import sys
from pathlib import Path

from forge_core.runs.record import load_run
from forge_core.runs.sft_context import SftContext
from forge_core.store import layout, open_store
from tests.sft.harness import advance, new_run

if __name__ == "__main__":
    store = open_store(sys.argv[1])
    begun = store.exists(layout.run_json("tiny-sft"))
    ctx = SftContext(store, load_run(store, "tiny-sft")) if begun else new_run(store, Path(sys.argv[2]))
    advance(ctx, ctx.sft.steps)
    ctx.close()
