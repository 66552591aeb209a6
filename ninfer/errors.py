"""The exceptions of ninfer. Core code raises them; the API and the commands map them at their edge."""

from __future__ import annotations


class NinferError(Exception):
    """Every error that ninfer raises on purpose. Its text is one line that a user can act on."""


class BadRequest(NinferError):
    """A malformed or unsupported field of a request.   path: `messages[2].content[0].type`; code: machine-readable."""

    def __init__(self, message: str, *, path: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.code = code


class ContextTooLong(BadRequest):
    """The prompt does not fit the context window. Both numbers are in tokens."""

    def __init__(self, num_prompt_tokens: int, context_len: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, but the context window is {context_len}; "
            "shorten it or serve with a larger --max-context",
            path="messages",
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_len = context_len


class BodyTooLarge(NinferError):
    """The request body is over the limit."""


class UnknownModel(NinferError):
    """No served model has this name."""


class Overloaded(NinferError):
    """The queue is full. retry_after_s: a guess at when a place will be free."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeout(NinferError):
    """The request waited too long for a slot."""


class RequestTimeout(NinferError):
    """The request took longer than the server lets one take."""


class EngineUnavailable(NinferError):
    """The engine is loading, draining, or has failed."""


class Cancelled(NinferError):
    """The client has gone. Never rendered."""


class StartupError(NinferError):
    """What stops a command at start: exit code 2 with the message."""


class ArtifactError(StartupError):
    """A model file that cannot be used; names the file, and the tensor or field."""


class UsageError(StartupError):
    """A command-line value that cannot be used; names the flag."""


class ShapeError(StartupError):
    """Operand types that an op refuses; names the op and the argument."""


class NoRoute(StartupError):
    """No route of the device accepts an op; carries the table of refusals."""


class CompileError(StartupError):
    """The compiler refused a rendered kernel; carries numbered lines."""


class DeviceError(NinferError):
    """The device failed or is missing."""
