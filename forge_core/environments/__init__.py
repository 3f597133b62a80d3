"""Episodes of several turns: environments, tools, and how a policy plays them."""

from forge_core.environments.protocol import Action, Environment, Step, Task, ToolCall

__all__ = ["Action", "Environment", "Step", "Task", "ToolCall"]
