"""``forge config CONFIG --estimate``: memory of each role, what a training step stores, and whether it all fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from flows.commands.common import show
from forge_core.config import ConfigError, RunConfig
from forge_core.config.any_config import AnyConfig
from forge_core.config.sft_config import SftConfig
from forge_core.devices import Placement, gpu_memory, gpus_wanted, place, place_trainer
from forge_core.observability.memory import machine_memory
from forge_core.runs.estimate import step_estimate
from forge_core.runs.memory_estimate import GIB, PARTS, PROCESS, USABLE, DeviceFit, RoleMemory, fits, roles_memory
from forge_core.runs.model_shape import model_shape
from forge_core.runs.sft_estimate import sft_memory, stored_weights, trained_parameters


def show_estimate(config: RunConfig, gib: float | None, gpus: int | None) -> bool:
    """Print it; whether it fits. ``gib``: memory of each GPU of an imagined machine with ``gpus`` of them (None: as
    many as the roles want); None: this machine. Raises ConfigError when the machine has too few GPUs."""
    shape = model_shape(config)
    sizes = _sizes(gib, gpus or sum(gpus_wanted(config).values()))
    placement = _placed(place, config, sizes, imagined=gib is not None)
    roles = roles_memory(config, shape, placement, sizes)
    print(f"{shape.parameters / 1e6:.1f} M parameters; memory in GiB")
    show(_roles_table(roles))
    found = fits(config, roles, sizes, machine_memory()[0])
    found = found if gib is None else found[:-1]  # the imagined machine's own memory is not known
    if placement.shared:
        print(_shared(config, placement))
    _show_fits(found)
    step = step_estimate(config, shape.parameters)
    print(
        f"each training step: about {step.tokens:,} tokens in {config.episodes_per_batch:,} episodes; stored are "
        f"{_gib(step.episodes)} GiB of episodes, {_gib(step.weights)} GiB of weights and, when one is due, a "
        f"checkpoint of {_gib(step.checkpoint)} GiB"
    )
    return all(fit.fits for fit in found)


def show_sft_estimate(config: SftConfig, gib: float | None, gpus: int | None) -> bool:
    """The same for a supervised run, whose only role is the trainer."""
    shape, ranks = model_shape(config), config.parallelism.ranks
    sizes = _sizes(gib, gpus or ranks)
    role = sft_memory(config, shape, _placed(place_trainer, config, sizes, imagined=gib is not None), sizes)
    print(f"{shape.parameters / 1e6:.1f} M parameters, {trained_parameters(config, shape) / 1e6:.1f} M of them trained")
    show(_roles_table([role]))
    own = DeviceFit("memory", PROCESS + role.total * role.processes, machine_memory()[0], role.settings)
    found = [DeviceFit(gpu, role.total, sizes[gpu], role.settings) for gpu in role.gpus] or [own]
    _show_fits(found)
    print(
        f"each optimizer step: {config.rows_per_optimizer_step * config.training.seq_len:,} tokens in "
        f"{config.rows_per_optimizer_step} rows on {ranks} ranks; each training step of {config.training.sync_interval}"
        f" of them publishes {_gib(stored_weights(config, shape))} GiB of weights"
    )
    return all(fit.fits for fit in found)


def _sizes(gib: float | None, gpus: int) -> dict[str, int]:
    """Bytes of each GPU, by id: of this machine, or of ``gpus`` imagined ones of ``gib`` GiB."""
    return gpu_memory() if gib is None else {str(index): round(gib * GIB) for index in range(gpus)}


def _placed(how: Callable[..., Placement], config: AnyConfig, sizes: Mapping[str, int], *, imagined: bool) -> Placement:
    """Where the roles work. Raises ConfigError, with the way to ask about other GPUs, when there are too few."""
    try:
        return how(config, tuple(sizes))
    except ConfigError as error:
        other = "more GPUs: --gpus N" if imagined else "GPUs that this machine lacks: --gpu-memory GIB"
        raise ConfigError(f"{error}; or estimate for {other}") from error


def _shared(config: RunConfig, placement: Placement) -> str:
    """How generator and trainer use the GPU that they share."""
    if config.generator.backend == "vllm" and config.generator.sharing == "sleep":
        how = "take turns on it (generator.sharing=sleep): counted is the larger, and what the other keeps meanwhile"
    else:
        how = "hold their memory on it at the same time"
    return f"GPU {placement.trainer[0]}: generator and trainer {how}"


def _show_fits(found: Sequence[DeviceFit]) -> None:
    """One line for each device, and the settings that change it where it does not fit, once for all that share them."""
    told: set[tuple[str, ...]] = set()
    for fit in found:
        print(_fit_line(fit, told=fit.settings in told))
        told |= set() if fit.fits else {fit.settings}


def _roles_table(roles: list[RoleMemory]) -> Table:
    parts = [part for part in PARTS if any(role.parts.get(part) for role in roles)]
    table = Table("role", "where", *parts, "total")
    for role in roles:
        where = f"GPU {', '.join(dict.fromkeys(role.gpus))}" if role.gpus else "CPU"
        table.add_row(role.role, where, *(_gib(role.parts.get(part, 0)) for part in parts), _gib(role.total))
    return table


def _fit_line(fit: DeviceFit, *, told: bool) -> str:
    name = "memory of this machine" if fit.device == "memory" else f"GPU {fit.device}"
    line = f"{name}: {_gib(fit.needed)} of {_gib(fit.present)} GiB"
    if fit.fits:
        return f"{line}: fits"
    limit = f" ({USABLE:.0%} can be used)" if fit.device != "memory" else ""
    if told:
        return f"{line}{limit}: does not fit; the same settings change it"
    return f"{line}{limit}: does not fit; settings that change it:" + "".join(f"\n  {s}" for s in fit.settings)


def _gib(size: int) -> str:
    return "" if size == 0 else f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.4f}"
