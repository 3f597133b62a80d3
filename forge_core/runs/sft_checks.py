"""Everything that can be wrong with a supervised run's input, found before an engine is loaded."""

from __future__ import annotations

from forge_core.config.data_sections import ScratchModel
from forge_core.config.sft_config import SftConfig
from forge_core.config.sft_loader import validate_for_sft
from forge_core.data.loader import check_sft_data
from forge_core.models.stored import configured_model
from forge_core.observability.backends.custom import check_backend
from forge_core.store import Ledger, Store
from forge_core.weights.host_cache import keep_published


def check_sft(config: SftConfig) -> list[str]:
    """Warnings about a run that may start. Raises the error of the first part that may not."""
    warnings = validate_for_sft(config)
    check_backend(config)
    assert config.dataset is not None
    check_sft_data(config.dataset)
    if config.validation.dataset is not None:
        check_sft_data(config.validation.dataset, key="validation.dataset")
    if not isinstance(config.model, ScratchModel):
        configured_model(config)
    return warnings


def with_stored_sft_model(store: Store, run_id: str, config: SftConfig) -> SftConfig:
    """``config`` as a resumed run needs it: once version 0 exists, the model is the stored one."""
    ledger = Ledger(store, run_id)
    if ledger.init() is None:
        return config
    return config.model_copy(update={"model": str(keep_published(store, ledger.weights_prefix(0)))})
