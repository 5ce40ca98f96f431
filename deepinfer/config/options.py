"""Every engine argument, declared once: name, type, default, unit, help and the configuration field that it fills.

The resolver reads this table, the command line and ``docs/configuration.md`` are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer.config.values import Kind

AUTO = "auto"
"""Default of an option whose value the engine works out; ``rule`` says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One engine argument. Its flag is the name with dashes, its range is checked by the field's dataclass."""

    name: str
    field: str
    """Dotted place in :class:`~deepinfer.config.engine.EngineConfig`."""
    kind: Kind
    help: str
    default: Any = None
    rule: str = ""
    """How ``auto`` is worked out."""
    unit: str = ""
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Names that users of other engines know for the same thing."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """An argument of other engines that is accepted only where it asks for what this engine does anyway."""

    name: str
    accepted: tuple[Any, ...]
    note: str


OPTIONS: tuple[Option, ...] = (
    Option(
        name="model",
        field="model.path",
        kind=Kind.PATH,
        help="Directory of the checkpoint: config.json, tokenizer and safetensors files. Nothing is downloaded.",
    ),
    Option(
        name="tokenizer",
        field="model.tokenizer_path",
        kind=Kind.PATH,
        default=AUTO,
        rule="the model directory",
        help="Directory that holds tokenizer.json.",
    ),
    Option(
        name="load_format",
        field="model.load_format",
        kind=Kind.STR,
        default="auto",
        choices=("auto", "dummy"),
        help="auto reads the checkpoint's weights; dummy makes random weights of the same shapes from the seed.",
    ),
    Option(
        name="num_layers",
        field="model.num_layers",
        kind=Kind.INT,
        unit="layers",
        help="Keep only the first layers of the model (with load_format dummy, for measurements). Unset: all.",
    ),
    Option(
        name="accelerator",
        field="device.platform",
        kind=Kind.STR,
        default=AUTO,
        rule="the best platform that is available and need not be asked for by name",
        choices=("cpu", "nvidia", "ascend"),
        aliases=("device",),
        help="What to run on: a CPU, or, when asked for by name, one NVIDIA GPU (Hopper for the fast kernels).",
    ),
    Option(
        name="cuda_graphs",
        field="device.graphs",
        kind=Kind.STR,
        default="startup",
        choices=("startup", "lazy", "off"),
        help="When the fused path captures the CUDA graphs of decoding, short prompts, sampling and drafting: all "
        "sizes before the first request, each when it is first met, or never. `startup` also compiles what prompts "
        "launch, so that no request waits for that. Other paths have none.",
    ),
    Option(
        name="num_threads",
        field="device.num_threads",
        kind=Kind.INT,
        default=AUTO,
        rule="1 for models up to 512 channels wide, else torch's choice within the processors that we may use",
        unit="threads",
        help="Host threads of one forward.",
    ),
    Option(
        name="numerics",
        field="numerics",
        kind=Kind.STR,
        default="faithful",
        choices=("faithful", "fast", "float32"),
        help="faithful rounds and quantises exactly where the model does; fast gives the weights of attention 8 bits "
        "instead of 16 (NVIDIA only); float32 rounds no activation.",
    ),
    Option(
        name="seed",
        field="seed",
        kind=Kind.INT,
        default=0,
        help="Seeds dummy weights, and requests that bring no seq_seed, in the order in which they are submitted.",
    ),
    Option(
        name="max_num_seqs",
        field="scheduler.max_num_seqs",
        kind=Kind.INT,
        default=256,
        unit="sequences",
        help="Most sequences that run at the same time.",
    ),
    Option(
        name="max_num_batched_tokens",
        field="scheduler.max_num_batched_tokens",
        kind=Kind.INT,
        default=AUTO,
        rule="max(2048, max_num_seqs * (1 + drafts)), and at least max_model_len when chunked_prefill is off",
        unit="tokens",
        help="Most rows of one step: decode rows of all running sequences and prompt chunks together.",
    ),
    Option(
        name="max_model_len",
        field="scheduler.max_model_len",
        kind=Kind.INT,
        default=AUTO,
        rule="min(4096, max_position_embeddings of the model)",
        unit="tokens",
        help="Most tokens of one sequence that are computed; the last token of an output is not, and comes on top.",
    ),
    Option(
        name="chunked_prefill",
        field="scheduler.chunked_prefill",
        kind=Kind.BOOL,
        default=True,
        help="Let a prompt be computed in several steps, so that long prompts do not hold up running sequences.",
    ),
    Option(
        name="async_scheduling",
        field="scheduler.async_scheduling",
        kind=Kind.BOOL,
        default=True,
        help="Plan and launch a step before the results of the one before it are looked at.",
    ),
    Option(
        name="num_speculative_tokens",
        field="speculation.num_tokens",
        kind=Kind.INT,
        default=AUTO,
        rule="the draft's block size if the checkpoint has a draft, while it pays (sampler gumbel); else 0",
        unit="tokens",
        help="Most draft tokens per sequence and step; 0 turns speculation off.",
    ),
    Option(
        name="adaptive_verification",
        field="speculation.adaptive",
        kind=Kind.BOOL,
        default=False,
        help="Verify as many drafts as the draft's confidence and the measured cost of a step make worthwhile.",
    ),
    Option(
        name="sampler",
        field="speculation.sampler",
        kind=Kind.STR,
        default="gumbel",
        choices=("gumbel", "rejection"),
        help="How drafts are verified. gumbel: the output does not depend on speculation at all; rejection: classic.",
    ),
    Option(
        name="confidence_temperatures",
        field="speculation.temperatures",
        kind=Kind.FLOATS,
        default=(),
        help="Calibration of the draft's confidence: one number, or one per draft. Empty: the checkpoint's, or 1.",
    ),
    Option(
        name="confidence_log",
        field="speculation.log_path",
        kind=Kind.PATH,
        help="File to which the draft's confidences and what became of them are appended, for deepinfer calibrate.",
    ),
    Option(
        name="cost_cache_dir",
        field="speculation.cost_dir",
        kind=Kind.PATH,
        help="Directory in which measured step times are kept from one start to the next. Unset: measured every time.",
    ),
    Option(
        name="cost_cache_ttl_s",
        field="speculation.cost_ttl_s",
        kind=Kind.FLOAT,
        default=3600.0,
        unit="seconds",
        help="Age from which step times in cost_cache_dir are measured again.",
    ),
    Option(
        name="batch_invariant",
        field="batch_invariant",
        kind=Kind.BOOL,
        default=False,
        help="Only operators whose results do not depend on the batch. On a CPU it changes nothing (determinism.md).",
    ),
    Option(
        name="grammar_timeout_s",
        field="structured.timeout_s",
        kind=Kind.FLOAT,
        default=20.0,
        unit="seconds",
        help="Longest that a grammar of structured output may compile; its request ends with an error then.",
    ),
    Option(
        name="grammar_workers",
        field="structured.num_workers",
        kind=Kind.INT,
        default=2,
        unit="processes",
        help="Most processes that compile grammars at the same time; they start with the first grammar.",
    ),
    Option(
        name="grammar_cache_bytes",
        field="structured.cache_bytes",
        kind=Kind.INT,
        default=2**30,
        unit="bytes",
        help="Memory for compiled grammars that are kept; 0 or less: no limit.",
    ),
    Option(
        name="grammar_cache",
        field="structured.uses_cache",
        kind=Kind.BOOL,
        default=True,
        help="Keep compiled grammars for later requests with the same one.",
    ),
    Option(
        name="num_blocks",
        field="cache.num_blocks",
        kind=Kind.INT,
        default=AUTO,
        rule="enough for max_num_seqs sequences of max_model_len, if memory_fraction of the free memory holds that",
        unit="blocks",
        help="Blocks of KV memory, one of them the null block that pads and is never handed out.",
    ),
    Option(
        name="memory_fraction",
        field="cache.memory_fraction",
        kind=Kind.FLOAT,
        default=AUTO,
        rule="0.5 on a CPU, whose memory also holds the files of the checkpoint; 0.9 on an accelerator",
        unit="share",
        aliases=("gpu_memory_utilization",),
        help="Share of the device memory that is free before the caches are made, in (0, 1], that they may take.",
    ),
    Option(
        name="block_tokens",
        field="cache.block_tokens",
        kind=Kind.INT,
        default=128,
        unit="tokens",
        aliases=("tokens_per_block",),
        help="Tokens of one block of KV memory. Only 128; -1 also means 128.",
    ),
    Option(
        name="prefix_cache",
        field="cache.prefix_cache",
        kind=Kind.STR,
        default="exact",
        choices=("off", "bounded", "exact"),
        help="Reuse cached prefixes of 128-token blocks. exact restores windows from checkpoints, so results are those "
        "of an empty cache; bounded replays one window, which needs no checkpoints but is not bit-identical.",
    ),
    Option(
        name="prefix_checkpoints",
        field="cache.num_checkpoints",
        kind=Kind.INT,
        default=AUTO,
        rule="4 * max_num_seqs, or 0 when prefix_cache is off",
        unit="states",
        help="Most states (all windows of one sequence) kept in host memory for exact hits; the least used go first.",
    ),
    Option(
        name="prefill_truncation",
        field="prefill.truncation",
        kind=Kind.STR,
        default="off",
        choices=("off", "mask", "compact"),
        help="Decoder bounded replay: compact runs the decoder half on the last prefill_keep_tokens of a prompt only, "
        "mask computes the same the slow way, off runs it on all. Changes results slightly, by design of the model.",
    ),
    Option(
        name="prefill_keep_tokens",
        field="prefill.keep_tokens",
        kind=Kind.INT,
        default=0,
        unit="tokens",
        help="Prompt tokens that keep the decoder half with prefill_truncation; at least sliding_window + 6, "
        "recommended 140.",
    ),
    Option(
        name="default_temperature",
        field="sampling.temperature",
        kind=Kind.FLOAT,
        default=1.0,
        help="Temperature of a request that comes without sampling parameters; 0 is greedy.",
    ),
    Option(
        name="default_top_p",
        field="sampling.top_p",
        kind=Kind.FLOAT,
        default=1.0,
        unit="share",
        help="Nucleus mass, in (0, 1], of a request that comes without sampling parameters.",
    ),
    Option(
        name="default_top_k",
        field="sampling.top_k",
        kind=Kind.INT,
        default=-1,
        unit="tokens",
        help="Number of candidates of a request that comes without sampling parameters; -1 is all.",
    ),
    Option(
        name="default_max_tokens",
        field="sampling.max_tokens",
        kind=Kind.INT,
        default=16,
        unit="tokens",
        help="Output length of a request that comes without sampling parameters.",
    ),
    Option(
        name="token_blacklist",
        field="sampling.token_blacklist",
        kind=Kind.ID_RANGES,
        default=(),
        help="Token ids that are never generated, by any request.",
    ),
    Option(
        name="logging_interval_steps",
        field="observe.logging_interval_steps",
        kind=Kind.INT,
        default=100,
        unit="steps",
        help="A line of statistics is logged every so many steps; 0 or less: never.",
    ),
    Option(
        name="disable_log_stats",
        field="observe.disable_log_stats",
        kind=Kind.BOOL,
        default=False,
        help="Log no lines of statistics.",
    ),
)

FOREIGN: tuple[Foreign, ...] = (
    Foreign(name="revision", accepted=(None,), note="models are local directories"),
    Foreign(name="tokenizer_revision", accepted=(None,), note="tokenizers are local directories"),
    Foreign(name="trust_remote_code", accepted=(False, True), note="no code of a checkpoint is ever run"),
    Foreign(name="served_model_name", accepted=(None, "deepinfer-model"), note="there is no server yet"),
    Foreign(name="data_parallel_size", accepted=(0, 1), note="one process runs the whole model"),
    Foreign(name="context_parallel_size", accepted=(1,), note="one process runs the whole model"),
    Foreign(name="expert_parallel_size", accepted=(1,), note="one process runs the whole model"),
    Foreign(name="engram_parallel_size", accepted=(0, 1), note="one process runs the whole model"),
    Foreign(name="tensor_parallel_size", accepted=(1,), note="one process runs the whole model"),
    Foreign(name="engine_rank", accepted=(0,), note="one process runs the whole model"),
    Foreign(name="engine_group_rank", accepted=(0,), note="one process runs the whole model"),
    Foreign(name="engine_type", accepted=("NORMAL", 0), note="prefill and decode run in one engine"),
    Foreign(name="stop_preempted_request", accepted=(False,), note="preempted requests are recomputed, never ended"),
    Foreign(name="lookahead_tokens", accepted=(0,), note="chunks have no minimum length"),
    Foreign(name="offline_inference", accepted=(False, True), note="it changes nothing here"),
    Foreign(
        name="enable_prefix_caching",
        accepted=(True,),
        note="the prefix cache is on by default, and prefix_cache='off' switches it off",
    ),
    Foreign(name="ignore_len", accepted=(128 * 2**20,), note="max_model_len is the only limit"),
)
