"""Sandboxes: Python code that a model wrote, run with nothing to break and nothing to read."""

from forge_core.sandbox.coder import ExecutionResult, SandboxedPythonCoder
from forge_core.sandbox.errors import SandboxError
from forge_core.sandbox.limits import Limits

__all__ = ["ExecutionResult", "Limits", "SandboxError", "SandboxedPythonCoder"]
