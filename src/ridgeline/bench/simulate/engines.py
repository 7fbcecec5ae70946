"""The engine that a simulation runs: this machine's, or that of a device that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import POLICIES
from ridgeline.engine.calibration import calibrations
from ridgeline.engine.setup.home import default_home, locate, stores
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import resolve
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.planner import PlanFlags
from ridgeline.planner.capacity.latency_model import LatencyModel
from ridgeline.planner.capacity.option import engine_record, with_blocks_for
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.single_device import DeviceReplica, on_device

_RESERVES = {"auto": None, "paged": False, "full": True}
# Options that the engine of any device has.
_OF_ENGINES = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory",
    "policy", "kv_reservation", "enable_prefix_caching", "trace",
)  # fmt: skip
_ANY_LENGTH = 1 << 30  # where a config does not say how long sequences may become


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine:
    """What serves a load.

    Attributes:
        settings: of the engine.
        latency_model: how long its steps take.
        calibration: where the model of time comes from, on this machine.
        others: calibrations that are kept and not used.
        replica: the device, if it is not this machine.
    """

    settings: EngineRecord
    latency_model: LatencyModel
    calibration: Calibration | None = None
    others: tuple[Calibration, ...] = ()
    replica: DeviceReplica | None = None


class EngineHere:
    """The engine of this machine.

    Attributes:
        checkpoint: the opened file.
        card: sampling that its publisher recommends.
    """

    def __init__(self, model: str) -> None:
        """Read what the model's file says. Raises ValueError if there is no such model."""
        located = locate(model)
        self.checkpoint: Checkpoint = load_checkpoint(located.path)
        self.card = located.sampling

    def set_up(self, options: Options, source: str) -> SimulatedEngine:
        """Return the engine with these options; ``source`` names its calibration.

        Raises ValueError if they contradict the model, or there is no such calibration.
        """
        config = resolve(options, self.checkpoint)
        choices = calibrations(default_home(), self.checkpoint.path, self.checkpoint.arch, config)
        calibration = _chosen(choices, source)
        low, middle, high = calibration.interval()
        times = calibration.times.scaled(middle)
        return SimulatedEngine(
            settings=config.settings(self.checkpoint.eos_ids),
            latency_model=LatencyModel(times, low / middle, high / middle, calibration.source, ""),
            calibration=calibration,
            others=tuple(one for one in choices if one is not calibration),
        )


class EngineOnDevice:
    """An engine on a device that ``ridgeline plan`` knows, or that the user describes.

    Attributes:
        checkpoint: of a model whose texts are known; None where only its config is.
    """

    def __init__(self, model: str) -> None:
        """Read what plans read of a model. Raises ValueError if there is no such model."""
        self._spec = read_model_spec(model, stores())
        self.checkpoint = self._spec.checkpoint
        self.card: dict[str, float] = {}

    def set_up(
        self, options: Options, plan_flags: PlanFlags, sessions: Sequence[int]
    ) -> SimulatedEngine:
        """Return the engine with these options, for a load.

        Args:
            options: only those of engines; formats are among the plan_flags.
            plan_flags: the device, and how the model is stored and divided there.
            sessions: the most tokens that each session of the load may hold.

        Raises ValueError if the model does not fit on the device, or flags contradict it.
        """
        check_options(options)
        longest = self._spec.shape.max_position or _ANY_LENGTH
        if options.max_model_len and options.max_model_len > longest:
            raise ValueError(
                f"--max-model-len {options.max_model_len} is more than the {longest} tokens that "
                "the model was trained for"
            )
        most = min(longest, options.max_model_len or max(sessions))
        size, block_size = options.kv_cache_memory, options.block_size
        plan_flags = replace(
            plan_flags,
            context=most,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            block_size=None if block_size == Options().block_size else block_size,
            kv_cache_memory=None if size is None else str(size),
        )
        replica = on_device(self._spec, plan_flags)
        settings = with_blocks_for(
            engine_record(replica.placement, replica.latency_model.times), sessions
        )
        step_tokens = settings.max_num_batched_tokens
        if options.max_num_batched_tokens is None and POLICIES[options.policy].whole_prompts:
            step_tokens = max(step_tokens, most)
        settings = replace(
            settings,
            policy=options.policy,
            max_model_len=options.max_model_len or longest,
            max_num_batched_tokens=step_tokens,
            enable_prefix_caching=options.enable_prefix_caching,
            reserve_full=_RESERVES[options.kv_reservation],
        )
        return SimulatedEngine(
            settings=settings, latency_model=replica.latency_model, replica=replica
        )


def check_options(options: Options) -> None:
    """Raise ValueError for an option that would change nothing on a device."""
    usual = Options()
    for name in (field.name for field in fields(Options) if field.name not in _OF_ENGINES):
        if getattr(options, name) != getattr(usual, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is about this machine: give no --on")


def _chosen(choices: Sequence[Calibration], source: str) -> Calibration:
    """Return the calibration that was asked for, of those that are kept, the newest first.

    Raises ValueError if it is not there.
    """
    if source == "newest":
        return choices[0]
    calibration = next((one for one in choices if one.source == source), None)
    if calibration is None:
        raise ValueError(
            f"--calibration {source}: none is kept of this model: `ridgeline calibrate` measures "
            "one, and a server learns one while it serves"
        )
    return calibration
