"""The one error tree. Blame is in the type; each error says what to change.

CrossfillError
├── ConfigError              the operator's: fix it before starting again
│   ├── UnsupportedModelError    a checkpoint outside what is supported: names the field and its value
│   └── BudgetTooSmallError      the byte budget cannot hold one value
├── RequestError             the client's: never retried unchanged
│   ├── InvalidParameterError    names the parameter
│   │   └── UnsupportedFeatureError  no replica alive has an engine that can do this: names the feature
│   ├── ContextLengthError       the prompt does not fit the context window
│   ├── KvRoomError              the prompt fits the context window, but no replica's KV pool
│   ├── ModelNotFoundError
│   └── HandoffUnknownError      nothing is known of this handoff (any more)
├── PeerError                another process sent something wrong
│   ├── ContractMismatchError    two replicas do not serve the same model: names the fields
│   ├── CodecRefusedError        it does not read the codec we are set to write
│   ├── FrameError               bytes that are not a valid frame of this handoff
│   └── PageMissingError         a frame header whose payload is gone
├── CaptureError             a stored handoff that is damaged, forged or of a newer version: says where
├── CapacityError            come back later
│   ├── OverloadedError
│   ├── NoReplicaError           nobody alive serves this model or route
│   └── WorkerLostError          a worker died and nobody can go on in its place
├── BrokerError              Redis/Valkey is unreachable or refuses
│   └── PageServerError          only the page server of one decode replica is: names it
├── EngineError              the engine failed this request
├── QuarantinedError         workers died of it, or beside it, too often: nobody gets it again
├── StaleAttemptError        a newer attempt owns this handoff: stop at once, undo nothing of theirs
├── DeadlineError            a stage took longer than its deadline
└── HandoffCancelledError    the client is gone or has cancelled: not a failure
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class CrossfillError(Exception):
    """Base of all our errors. `code` is stable and machine-readable, `http_status` what the API answers."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500


class ConfigError(CrossfillError):
    code = "config_invalid"


class UnsupportedModelError(ConfigError):
    """`field` of the checkpoint's config has `value`, which no engine pair could share safely."""

    code = "model_unsupported"

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"unsupported model: {field} = {value!r}: {why}")
        self.field = field
        self.value = value


class BudgetTooSmallError(ConfigError):
    code = "budget_too_small"

    def __init__(self, budget_bytes: int, value_bytes: int) -> None:
        super().__init__(
            f"the byte budget of {budget_bytes} cannot hold one page of {value_bytes} bytes: "
            f"set budget_bytes to {value_bytes} or more"
        )
        self.budget_bytes = budget_bytes
        self.value_bytes = value_bytes


class RequestError(CrossfillError):
    code = "invalid_request"
    http_status = 400


class InvalidParameterError(RequestError):
    """`param` is the dotted path of the offending request field."""

    code = "invalid_value"

    def __init__(self, param: str | None, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.reason = code or self.code


class UnsupportedFeatureError(InvalidParameterError):
    """`feature` is one of `request.FEATURES`; `engines` are those that were looked at."""

    def __init__(self, feature: str, engines: Iterable[str]) -> None:
        names = ", ".join(sorted(set(engines)))
        message = f"`{feature}` cannot be done by the engines that serve this model or route ({names}): leave it out."
        super().__init__(feature, message, code="unsupported_parameter")
        self.feature = feature


class ContextLengthError(RequestError):
    code = "context_length_exceeded"

    def __init__(self, limit: int, prompt_tokens: int, param: str) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your request has "
            f"{prompt_tokens} prompt tokens, which exceeds the context window. "
            f"Please reduce the length of the {param}."
        )
        self.param = param


class KvRoomError(RequestError):
    """`limit`: tokens, answer included, that the largest KV pool of a living replica holds."""

    code = "kv_room_exceeded"

    def __init__(self, limit: int, prompt_tokens: int, param: str) -> None:
        super().__init__(
            f"No replica of this model has KV memory for more than {limit} tokens, the answer included. However, your "
            f"request has {prompt_tokens} prompt tokens. Please reduce the length of the {param}."
        )
        self.param = param
        self.limit = limit


class ModelNotFoundError(RequestError):
    code = "model_not_found"
    http_status = 404


class HandoffUnknownError(RequestError):
    code = "handoff_unknown"
    http_status = 404

    def __init__(self, handoff_id: str) -> None:
        super().__init__(
            f"nothing is known of handoff {handoff_id}: it ended a while ago, or never was here; "
            f"`crossfill handoffs` lists live and recent ones"
        )
        self.handoff_id = handoff_id


class PeerError(CrossfillError):
    code = "peer_error"
    retryable = True
    http_status = 502


class ContractMismatchError(PeerError):
    """`differences` maps a contract field to (ours, theirs)."""

    code = "contract_mismatch"
    retryable = False

    def __init__(self, differences: dict[str, tuple[object, object]]) -> None:
        named = ", ".join(f"{k} ({a} here, {b} there)" for k, (a, b) in differences.items())
        super().__init__(f"the two replicas do not share a contract: {named}")
        self.differences = differences


class CodecRefusedError(PeerError):
    """We are set to write pages in `ours`, the peer reads only `theirs`."""

    code = "codec_refused"
    retryable = False

    def __init__(self, ours: str, theirs: tuple[str, ...]) -> None:
        super().__init__(
            f"this prefill worker sends pages as {ours}, the decode worker takes only {', '.join(theirs)}: "
            "give both the same broker.codec, or upgrade the decode worker"
        )
        self.ours = ours
        self.theirs = theirs


class FrameError(PeerError):
    code = "frame_invalid"


class PageMissingError(PeerError):
    code = "page_missing"


class CaptureError(CrossfillError):
    code = "capture_invalid"


class CapacityError(CrossfillError):
    code = "capacity"
    retryable = True
    http_status = 503


class OverloadedError(CapacityError):
    code = "overloaded"
    http_status = 429


class NoReplicaError(CapacityError):
    code = "no_replica"


class WorkerLostError(CapacityError):
    """The lease of a worker ended while it took part in a handoff."""

    code = "worker_lost"


class BrokerError(CrossfillError):
    code = "broker_unavailable"
    retryable = True
    http_status = 503


class PageServerError(BrokerError):
    code = "page_server_unavailable"


class EngineError(CrossfillError):
    code = "engine_failed"
    retryable = True
    http_status = 502


class QuarantinedError(CrossfillError):
    """`lost` workers ended while they worked on this handoff: it is not given to another one."""

    code = "quarantined"

    def __init__(self, lost: int) -> None:
        super().__init__(f"{lost} workers died while they worked on this request: it is not tried again")
        self.lost = lost


class StaleAttemptError(CrossfillError):
    code = "stale_attempt"


class DeadlineError(CrossfillError):
    code = "deadline_exceeded"
    retryable = True
    http_status = 504


class HandoffCancelledError(CrossfillError):
    code = "cancelled"
    http_status = 499
