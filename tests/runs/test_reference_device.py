"""Where the reference model works: on the device that ``services.ref_model`` gives it."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.reference.model import ReferenceModel
from forge_core.runs.initialise import initialise
from tests.runs.harness import memory, new_run

pytestmark = pytest.mark.engine


class Loaded(Exception):
    """Ends the test where a model would be loaded."""


@pytest.mark.parametrize(("with_gpus", "device"), [("false", "cpu"), ("null", "cuda:2"), ("true", "cuda:2")])
def test_it_is_loaded_where_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, with_gpus: str, device: str
) -> None:
    def load(self: ReferenceModel, *_: Any, **options: Any) -> None:
        raise Loaded(options["device"])

    ctx = new_run(memory(), "grpo.beta=0.1", f"services.ref_model.with_gpus={with_gpus}")
    initialise(ctx)
    for module in ("forge_core.runs.context", "forge_core.devices"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: ("0", "1", "2"))
    monkeypatch.setattr(ReferenceModel, "__init__", load)
    with pytest.raises(Loaded, match=f"^{device}$"):
        ctx.reference.logprobs([([1, 2], [3])])
    assert (ctx.device("generator"), ctx.device("trainer")) == ("cuda:0", "cuda:1")
    ctx.close()
