"""From the ``environment`` section to environments: by built-in name, or by the path of a class of the user's own.

Invariants: a path is looked up, never evaluated; every failure is a ConfigError that names the key; the user's code is
called by ``check_environment``, which makes one environment to see that it can be made, and by episodes. What the
model's chat template cannot show is refused by ``check_environment``, before an engine is loaded.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from forge_core.config import ConfigError
from forge_core.config.data_sections import ScratchModel
from forge_core.config.references import revealed
from forge_core.config.rollout_sections import EnvironmentSection
from forge_core.config.run_config import RunConfig
from forge_core.data.importing import ObjectPathError, load_object, source_file
from forge_core.environments.protocol import Environment
from forge_core.redaction import redact

if TYPE_CHECKING:
    from forge_core.environments.rollout import Play
    from forge_core.environments.tool_calls import Parse

BUILTINS = {
    "calculator": "forge_core.environments.calculator:Calculator",
    "python": "forge_core.environments.python_tool:PythonTool",
    "guess_number": "forge_core.environments.guess:GuessNumber",
    "reasoning_gym": "forge_core.environments.reasoning_gym:ReasoningGymAttempts",
    "verifiers": "forge_core.environments.verifiers:VerifiersEnvironment",
    "openenv": "forge_core.environments.openenv:OpenEnv",
}


def full_path(path: str) -> str:
    """``path`` with a built-in name replaced by where it is defined."""
    if ":" in path:
        return path
    if path not in BUILTINS:
        close = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"environment.path: there is no environment {path!r}; {hint}built-in are {', '.join(BUILTINS)}; your own "
            "is <module>:<name> or <file.py>:<name>"
        )
    return BUILTINS[path]


def environment_class(path: str) -> Callable[..., Environment]:
    try:
        found = load_object(full_path(path))
    except ObjectPathError as error:
        raise ConfigError(f"environment.path: {error}") from error
    missing = [name for name in ("tools", "reset", "step", "close") if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"environment.path: {path} is no environment: it lacks {', '.join(missing)}")
    return found


def environment_source(path: str) -> str:
    """SHA-256 (hex) of the source file that ``path`` names; of a built-in adapter also of the version of its
    ``package``. Code of the user's own is not imported."""
    try:
        source = source_file(full_path(path)).read_bytes()
    except ObjectPathError as error:
        raise ConfigError(f"environment.path: {error}") from error
    package = getattr(environment_class(path), "package", None) if path in BUILTINS else None
    return hashlib.sha256(source + (metadata.version(package).encode() if package else b"")).hexdigest()


def tools_of(section: EnvironmentSection | None) -> Sequence[Mapping[str, Any]]:
    """The definitions of what the policy may call. Raises ConfigError."""
    if section is None:
        return ()
    tools: Any = environment_class(section.path).tools  # type: ignore[attr-defined]
    if not callable(tools):
        return tools  # type: ignore[no-any-return]
    with _problems_of(section.path):
        return tools(**revealed(section.options, "environment.options"))  # type: ignore[no-any-return]


def maker(section: EnvironmentSection) -> Callable[[], Environment]:
    """Makes environments with the section's options. Raises ConfigError when that fails."""
    found, options = environment_class(section.path), revealed(section.options, "environment.options")

    def make() -> Environment:
        return found(**options)

    return make


def check_environment(config: RunConfig) -> None:
    """Raise ConfigError for an environment that cannot be made on this machine, or that the model cannot play: its chat
    template must show the tools and place what the environment says."""
    section = config.environment
    if section is None:
        if "environment" in config.rewards.paths:
            raise ConfigError(
                "rewards.functions: the reward environment is what an environment gave, and there is none: set "
                "environment.path, or use another reward"
            )
        return
    _check_made(section)
    if isinstance(config.model, ScratchModel):  # it has no chat template
        _parser(section, None, tools_of(section))
    elif config.model is not None:
        from transformers import AutoTokenizer

        from forge_core.models.stored import configured_model

        build_play(config, AutoTokenizer.from_pretrained(configured_model(config), trust_remote_code=False))


def _check_made(section: EnvironmentSection) -> None:
    make = maker(section)
    with _problems_of(section.path):
        make().close()


@contextmanager
def _problems_of(path: str) -> Iterator[None]:
    """What an environment raises while it is made, as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the constructor is the user's code
        raise ConfigError(redact(f"environment.path: making {path} failed: {type(error).__name__}: {error}")) from error


def build_play(config: RunConfig, tokenizer: Any) -> Play | None:
    """How the episodes of a run are played; None without an environment. Raises ConfigError when the chat template
    shows no tools, or cannot place what the environment says."""
    from forge_core.environments.rollout import Play
    from forge_core.environments.tools import answer
    from forge_core.environments.turns import TurnRenderer

    section = config.environment
    if section is None:
        return None
    tools = tools_of(section)
    renderer = TurnRenderer(tokenizer, config.dataset.chat_template if config.dataset else None, tools)
    parse = _parser(section, renderer.template, tools)
    if renderer.template is not None:
        if section.tool_format != "text":
            renderer.check_tools()
        renderer.check_observation(answer("probe", "forty-two", 0) if tools else {"role": "user", "content": "forty"})
    return Play(
        maker(section),
        renderer,
        parse,
        section.max_turns,
        section.max_turn_tokens or config.rollout.max_new_tokens,
        section.turn_timeout_s,
        section.workers,
        concurrent=config.generator.backend == "vllm",
        max_open=section.max_open,
    )


def _parser(section: EnvironmentSection, template: str | None, tools: Sequence[Mapping[str, Any]]) -> Parse:
    """How tool calls are read, of a model whose prompts have ``template``."""
    from forge_core.environments.tool_calls import parser

    if not tools:
        return lambda text: ()
    return parser(section.tool_format, template, section.tool_pattern, tools)
