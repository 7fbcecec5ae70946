"""What people ask of a plan, as they type it; the command line is made from this."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ridgeline.engine.setup.options import Options, flag_field, parse_bytes
from ridgeline.model.cost.format_bytes import format_named, kv_bytes_of
from ridgeline.planner.memory.ledger import ENGINES

AUTO = "auto"
_LEAST_RAM = 1 << 20  # bytes; less is a number without its unit
MINE = "mine"  # the device that --memory, --bandwidth and --tflops describe
# The flags that say what a simulation runs on.
OF_DEVICE = (
    "on", "devices", "memory", "bandwidth", "tflops", "tensor_parallel_size",
    "pipeline_parallel_size", "engine", "gpu_memory_utilization",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The flags of ``plan`` that say what memory is needed for; None and "auto" leave it open."""

    context: int | None = flag_field(
        None, "Tokens of each sequence. Default: 4096, or the model's if that is less."
    )
    concurrency: int | None = flag_field(
        None,
        "Sequences at once. Default: 1. With lengths of a load, the same as --max-concurrency.",
    )
    on: str | None = flag_field(
        None, "Devices, separated by commas: 4090, h100, m4-max, or a MIG slice such as "
            "h100-sxm/2g.20gb. Or here: this machine; all: every device that can be rented; shop: "
            "every device that can be bought; or mine: the device that --memory, --bandwidth and "
            "--tflops describe. 4090+3090, 2x3090 or 4090+cpu-9950x: one machine with all of "
            "them, as llama.cpp divides a model. Default: here for a model that runs here, else "
            "all; with --devices, its file.",
    )  # fmt: skip
    devices: str | None = flag_field(
        None, "A CSV file of your own devices, beside the catalogue's: id,label_gb,read_gb_per_s,"
            "bf16_tflops, and what columns of its devices.csv you know.",
    )  # fmt: skip
    memory: str | None = flag_field(
        None, "With --on mine: memory that programs can have on your device, such as 24GiB."
    )
    bandwidth: float | None = flag_field(
        None, "With --on mine: GB/s that your device reads from its memory."
    )
    tflops: float | None = flag_field(
        None, "With --on mine: dense TFLOPS of your device in 16 bits."
    )
    ram: str | None = flag_field(
        None, "RAM of the machine that a card is in, such as 64GB: what has no room on the card "
            "stays there, and on the disk what has none there either.",
    )  # fmt: skip
    ram_bandwidth: float | None = flag_field(
        None, "GB/s of that RAM. Default: of the processor that --on names; else 89.6, two "
            "channels of DDR5-5600, and above 256 GB 307.2, eight of DDR5-4800.",
    )  # fmt: skip
    disk_bandwidth: float | None = flag_field(
        None, "GB/s that weights are read with from the disk. Default: 5."
    )
    tensor_parallel_size: str | None = flag_field(
        None, "Number of devices that share each layer, or auto. Default: 1; with several devices "
            "to choose from, auto.",
    )  # fmt: skip
    pipeline_parallel_size: str | None = flag_field(
        None, "Number of pipeline stages that share the layers, or auto. Default: 1."
    )
    dtype: str = flag_field(AUTO, "Store the weights as bf16, fp8, int8, int4, mxfp4, q4_k_m, ...")
    kv_cache_dtype: str = flag_field(
        AUTO, "Keep keys and values as f32, bf16, f16, fp8, int8, or int8-int4 (ridgeline alone)."
    )
    block_size: int | None = flag_field(None, "Tokens per block of the KV cache.")
    max_num_batched_tokens: int | None = flag_field(None, "Tokens of the largest step.")
    max_num_seqs: int | None = flag_field(
        None, "Sequences that the engine runs at once. Default: 256; trtllm 2048, llamacpp 4."
    )
    engine: str | None = flag_field(
        None, "Engine whose memory rules and times apply: ridgeline, vllm, sglang, trtllm or "
            "llamacpp. Default: ridgeline on CPUs, and on a GPU here that has passed bench gpu; "
            "llamacpp on Macs and the like; else vllm.",
    )  # fmt: skip
    gpu_memory_utilization: float | None = flag_field(
        None,
        "Fraction of the memory that the engine may use; for trtllm, of what the weights leave.",
    )
    weights_memory: str | None = flag_field(
        None, "Bytes of weights on each device, instead of the computed ones."
    )
    activation_memory: str | None = flag_field(
        None, "Bytes of activations, instead of the computed ones."
    )
    overhead_memory: str | None = flag_field(
        None, "Memory of driver and framework, instead of the assumptions."
    )
    kv_cache_memory: str | None = flag_field(
        None, "Size of the KV cache on each device, instead of the memory that is left."
    )
    lora: list[str] | None = flag_field(
        None, "Adapter that will be loaded, as NAME=PATH; repeatable."
    )
    enable_lora: bool = flag_field(False, "Reserve memory for adapters that are loaded later.")
    max_lora_rank: int | None = flag_field(
        None,
        "Largest rank of an adapter. Default: the largest of those given; 64 with --enable-lora.",
    )
    lora_memory: str | None = flag_field(
        None, "Memory for adapters. Default: the size of those given, and 256 MiB for later ones."
    )

    def __post_init__(self) -> None:
        """Raise ValueError, which names the flag, for values that make no sense."""
        for name in (
            "context", "concurrency", "block_size", "max_num_batched_tokens", "max_num_seqs"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 1 << 40):
                raise ValueError(
                    f"{_flag(name)} is {value!r}: it must be a whole number of at least 1"
                )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if value is not None and value != AUTO and not 1 <= _whole(value) <= 4096:
                raise ValueError(f"{_flag(name)} is {value!r}: it must be a whole number or auto")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(
                f"--gpu-memory-utilization is {share!r}: it must be above 0 and at most 1"
            )
        if self.engine is not None and self.engine not in ENGINES:
            raise ValueError(f"--engine is {self.engine!r}, not one of {', '.join(ENGINES)}")
        for name, check in (("dtype", format_named), ("kv_cache_dtype", kv_bytes_of)):
            if (value := getattr(self, name)) != AUTO:
                try:
                    check(value)
                except ValueError as error:
                    raise ValueError(f"{_flag(name)}: {error}") from None
        self._check_mine()
        self._check_machine()
        for name in ("weights_memory", "activation_memory", "overhead_memory", "kv_cache_memory"):
            self.size(name)
        if self.dtype != AUTO and self.weights_memory is not None:
            raise ValueError("--dtype and --weights-memory both say how large the weights are")
        if self.kv_cache_memory is not None and self.gpu_memory_utilization is not None:
            raise ValueError(
                "--kv-cache-memory and --gpu-memory-utilization both say how large the cache is"
            )
        _ = self.of_adapters

    def _check_mine(self) -> None:
        """Raise ValueError for figures of a device that is not asked for, or that make no sense."""
        given = [name for name in ("memory", "bandwidth", "tflops") if getattr(self, name)]
        names = [] if self.on is None else [part.strip().lower() for part in self.on.split(",")]
        if given and MINE not in names:
            raise ValueError(f"{_flag(given[0])} describes your own device: give --on {MINE}")
        if MINE in names and self.memory is None:
            raise ValueError(f"--on {MINE}: say what it has with --memory, such as 24GiB")
        self.size("memory")
        for name in ("bandwidth", "tflops"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{_flag(name)} is {value!r}: it must be above 0")

    def _check_machine(self) -> None:
        """Raise ValueError for figures of a machine that make no sense, or that nothing asks for.

        What llama.cpp does with several cards and RAM other engines do not.
        """
        size = self.size("ram")
        if size is not None and size < _LEAST_RAM:
            raise ValueError(f"--ram {self.ram} is {size:,} bytes: write the unit, such as 64GB")
        for name in ("ram_bandwidth", "disk_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e6:
                raise ValueError(f"{_flag(name)} is {value!r}: it must be above 0")
        if not self.asks_machine:
            return
        about = "--ram" if self.ram is not None else f"--on {self.on}"
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization",
                     "kv_cache_memory"):  # fmt: skip
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{about}: llama.cpp gives whole layers to cards and RAM: leave out "
                    f"{_flag(name)}"
                )
        if self.engine not in (None, "llamacpp"):
            raise ValueError(
                f"{about}: a model over cards and RAM is planned as llama.cpp divides it: leave "
                f"out --engine {self.engine}"
            )

    @property
    def asks_machine(self) -> bool:
        """Whether a model over the cards and the RAM of one machine is asked for."""
        return self.ram is not None or is_machine(self.on or "")

    @property
    def names_device(self) -> bool:
        """Whether they say on which device; a file of own devices does, too."""
        return self.on is not None or self.devices is not None

    @property
    def of_adapters(self) -> Options:
        """The flags of adapters as the engine reads them. Raises ValueError as that does."""
        return Options(
            lora=self.lora,
            enable_lora=self.enable_lora,
            max_lora_rank=self.max_lora_rank,
            lora_memory=self.lora_memory,
        )

    def size(self, name: str) -> int | None:
        """Return a size in bytes, None where it is open. Raises ValueError, with the flag."""
        value = getattr(self, name)
        if value is None:
            return None
        in_bytes = parse_bytes(value, _flag(name))
        if name == "ram":  # 64 GB on a module are 64 GiB
            text = re.sub(r"(?i)(?<=[\d ][kmgt])b?$", "ib", str(value).strip())
            in_bytes = parse_bytes(text, "--ram")
        return in_bytes

    def ranks(self, name: str, default: str) -> int | None:
        """Return the value of one of the two sizes of a division; None for auto."""
        value = getattr(self, name) or default
        return None if value == AUTO else _whole(value)


def is_machine(name: str) -> bool:
    """Whether a name is of several devices in one machine: 4090+3090, 2x3090."""
    return "+" in name or re.match(r"\s*\d+\s*x\s*[a-z0-9]", name.lower()) is not None


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
