"""Model folders in the Hugging Face format: finding, checking, making, converting and loading them."""

from forge_core.models.errors import ModelError, WeightsError
from forge_core.models.resolve import SUPPORTED_ARCHITECTURES, check_model_folder, resolve_model

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelError", "WeightsError", "check_model_folder", "resolve_model"]
