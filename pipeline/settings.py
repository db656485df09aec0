"""Settings: every number and switch an operator may set, with its default, in one place.

Values come from `crossfill.toml`, then the environment (`CROSSFILL_<SECTION>__<FIELD>`), then the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIB = 1 << 20
_TTL_MARGIN_S = 30.0  # a handoff past its deadline is ended and read before its record is gone
Role: TypeAlias = Literal["prefill", "decode", "both"]
Codec: TypeAlias = Literal["auto", "raw", "lz4", "zstd", "int8"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BrokerSettings(_Section):
    """The control broker and the byte budget of its page server."""

    url: str = "redis://127.0.0.1:6380/0"
    budget_bytes: int = Field(256 * MIB, gt=0)  # cap on page bytes in flight, all handoffs together
    codec: Codec = (
        "raw"  # how pages are packed; "int8" is lossy and must be set on both sides; "auto" measures the link
    )
    pages_user: str | None = None  # for page servers that decode replicas advertise; None: the server's default user
    pages_password: str | None = None  # the same for all of them; never leaves this process
    payload_ttl_s: float = Field(30.0, gt=0)  # a payload nobody fetched disappears by itself
    handoff_ttl_s: float = Field(900.0, gt=0)  # every key of a handoff, however long it lives
    result_ttl_s: int = Field(60, ge=0)  # RQ: finished jobs stay visible this long
    failure_ttl_s: int = Field(600, ge=0)


class EngineSettings(_Section):
    """How one engine is run. `chunk_tokens` is the prefill chunk: pages leave after each."""

    role: Role = "both"  # the worker's own, which overrides this one; SGLang is started for one of the two
    chunk_tokens: int = Field(256, ge=64, multiple_of=64)
    max_running: int = Field(16, ge=1)  # requests stepped at once
    context_length: int | None = None  # None: the checkpoint's own
    kv_cache_bytes: int = Field(512 * MIB, gt=0)  # KV pool (vLLM) or live caches (MLX, reference)
    prefix_cache_bytes: int = Field(256 * MIB, ge=0)  # MLX and reference: pages kept for prefix hits
    held_pages: int = Field(256, ge=1)  # pages that may wait for export before new prompts are held back
    compute_dtype: Literal["auto", "float16", "float32"] = "auto"  # float32 on a CPU: MLX always, vLLM without AVX-512
    arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict
    )  # more fields of SGLang's ServerArgs, of vLLM's EngineArgs


class WorkerSettings(_Section):
    """One replica: an engine in one or two roles."""

    name: str
    engine: str
    model: Path
    role: Role = "both"
    slots: int = Field(16, ge=1)  # jobs at once, per role
    pages_url: str | None = None  # decode: a Redis/Valkey of its own for pages, advertised; None: the control broker
    pages_budget_bytes: int | None = Field(None, gt=0)  # cap on page bytes in flight there; None: broker.budget_bytes
    lease_s: float = Field(5.0, gt=0)
    metrics_host: str = "127.0.0.1"  # address that answers Prometheus
    metrics_port: int = Field(0, ge=0, le=65535)  # its port; 0: none
    grace_s: float = Field(30.0, ge=0)  # what running jobs get after SIGTERM; then other replicas go on with them
    python: Path | None = None  # interpreter of the engine's own environment, for `crossfill up`
    env: dict[str, str] = Field(default_factory=dict)
    engine_settings: EngineSettings = EngineSettings()


class ModelSettings(_Section):
    """One model for clients. Its replicas are those that registered with the contract of this checkpoint."""

    model: Path  # tokenizer, chat template and contract; no weights are loaded
    served_name: str | None = None  # None: the model directory's name
    aliases: tuple[str, ...] = ()  # further names for clients

    @property
    def name(self) -> str:
        return self.served_name or self.model.name


class ApiSettings(ModelSettings):
    """The HTTP edge and its model; `models` are further ones. Requests may name none where there is one."""

    host: str = "127.0.0.1"
    port: int = 8000
    share_port: bool = False  # several API processes listen on it, and the kernel deals out connections (Linux)
    models: tuple[ModelSettings, ...] = ()  # more models behind the same port
    keys_file: Path | None = (
        None  # hashed API keys (`crossfill key new`), read again when it changes; None: open to all
    )
    cors_origins: tuple[str, ...] = ("*",)  # pages of which origins may ask; empty: none
    max_body_bytes: int = Field(8 * MIB, gt=0)
    max_live: int = Field(512, ge=1)  # requests being served, waiting ones included; one more is refused with a 429
    max_messages: int = Field(4096, gt=0)
    default_max_tokens: int = Field(1024, gt=0)  # chat only; completions default to 16 as OpenAI does
    hold_s: float = Field(1.0, ge=0)  # how long a stream's status waits for the first token
    keep_alive_s: float = Field(10.0, gt=0)  # silence in a stream after which a comment is sent


class ObserveSettings(_Section):
    """What processes tell of themselves beside metrics. Traces need the extra `otel`."""

    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = None  # such as http://collector:4318/v1/traces; None: no export
    trace_file: Path | None = None  # one JSON object a span; several processes may append to one file
    trace_share: float = Field(1.0, ge=0, le=1)  # of requests that bring no trace of their own


class HandoffSettings(_Section):
    """Deadlines of a handoff, seconds, and what happens when a transfer fails."""

    failure_policy: Literal["recompute", "fail"] = "recompute"  # once the retries are used up
    retries: int = Field(2, ge=0)  # how often another P sends a prompt again, and how often another D takes over
    quarantine_after: int = Field(2, ge=1)  # workers lost while they worked on one handoff; then it fails for good
    queue_s: float = Field(60.0, gt=0)
    accept_s: float = Field(60.0, gt=0)
    progress_s: float = Field(60.0, gt=0)
    total_s: float = Field(600.0, gt=0)  # at least 30 s less than broker.handoff_ttl_s


class RoutingSettings(_Section):
    """Who decides where a prompt goes when its request does not say."""

    # cost: the way that was fastest so far, local ones included; handoff: another engine's prefill wherever one lives
    policy: Literal["cost", "handoff"] = "cost"


class CaptureSettings(_Section):
    """Which handoffs a decode worker stores as `.handoff` files, and where. Prompts are private: nothing by default.

    `errors`: those that failed or lost their transfer. Whoever reaches the broker may ask for single live ones besides.
    """

    mode: str = Field("off", pattern=r"^(off|errors|all|sample:(0(\.\d+)?|1(\.0*)?))$")  # sample:<rate>, 0..1
    folder: Path = Path("captures")  # on the decode worker's machine; made with mode 0700, files with 0600
    max_file_bytes: int = Field(1024 * MIB, gt=0)  # a handoff that would be larger is not stored
    max_files: int = Field(64, ge=1)  # of the folder; the oldest go
    buffer_bytes: int = Field(512 * MIB, gt=0)  # pages in memory on their way to disk; a capture beyond is dropped
    redact: bool = False  # store neither token ids nor pages: counts, digests and times only, nothing to decode from


class Settings(_Section):
    broker: BrokerSettings = BrokerSettings()
    api: ApiSettings | None = None
    handoff: HandoffSettings = HandoffSettings()
    routing: RoutingSettings = RoutingSettings()
    observe: ObserveSettings = ObserveSettings()
    capture: CaptureSettings = CaptureSettings()
    workers: tuple[WorkerSettings, ...] = ()

    @model_validator(mode="after")
    def _a_deadline_comes_before_the_record_is_gone(self) -> Settings:
        """Nothing renews a record: a handoff that may take longer would be lost while it is at work."""
        longest = self.broker.handoff_ttl_s - _TTL_MARGIN_S
        if self.handoff.total_s > longest:
            raise ValueError(
                f"handoff.total_s is {self.handoff.total_s:g} and broker.handoff_ttl_s {self.broker.handoff_ttl_s:g}: "
                f"raise handoff_ttl_s to {self.handoff.total_s + _TTL_MARGIN_S:g} or more, or lower total_s"
            )
        return self
