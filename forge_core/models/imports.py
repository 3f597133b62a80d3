"""Importing the code of a model before there are threads.

The packages of ``transformers`` replace themselves in ``sys.modules`` while they are imported, so a thread that waits
for another thread's import may be handed the unfinished module: "cannot import name 'AutoTokenizer'". Whoever starts
threads that load engines therefore calls ``import_model_code`` first.
"""

from __future__ import annotations

from pathlib import Path

from forge_core.models.resolve import model_architecture


def import_model_code(folder: Path) -> None:
    """Import, in this thread, all that tokenizer and engines use of ``transformers`` for the model in ``folder``."""
    import transformers
    from transformers import AutoConfig, AutoTokenizer, DynamicCache  # noqa: F401

    AutoConfig.from_pretrained(folder, trust_remote_code=False)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    getattr(transformers, model_architecture(folder))
