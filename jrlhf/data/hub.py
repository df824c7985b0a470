"""Explains the errors of the Hugging Face hub in one sentence."""

from collections.abc import Iterator

from jrlhf.errors import one_line

LOST = {"TransportError", "ConnectionError", "Timeout"}  # names of connection errors
LOG_IN = "`hf auth login`, or set HF_TOKEN"


def hub_reason(error: BaseException, name: str) -> str | None:
    """Returns why the hub refuses to send or accept `name`, and the remedy; None if the error is not the hub's."""
    for cause, kinds, status in causes_of(error):
        missing = "DatasetNotFoundError" in kinds  # raised by the library `datasets`, without its cause
        if "GatedRepoError" in kinds or (missing and "gated" in str(cause)):
            return f"{name} is gated: accept its licence on its page, then {LOG_IN}"
        if "HFValidationError" in kinds:
            return f"{name} is no name of the hub: write USER/NAME, with letters, digits, '-', '_' and '.'"
        if "RepositoryNotFoundError" in kinds or missing:
            return f"the hub has no {name} for you: check the name; if it is private, {LOG_IN}"
        if "LocalTokenNotFoundError" in kinds:
            return f"there is no token for the hub: {LOG_IN}, with a token that may write"
        words = " ".join((getattr(cause, "server_message", None) or one_line(cause)).split())
        if status == 401:
            return f"the hub does not know the token ({words}): {LOG_IN}, with a new one"
        if status == 403:
            return f"the token may not do this with {name} ({words}): check the name, or {LOG_IN} with a token that may"
        if "OfflineModeIsEnabled" in kinds:  # also after a silence, see `hub_requests`
            from huggingface_hub import constants

            if constants.HF_HUB_OFFLINE:
                return f"HF_HUB_OFFLINE is set and {name} is not whole in the cache: unset it, or bring the cache"
            return f"the hub cannot be reached ({words}): try again when it can"
        if kinds & LOST:
            return f"the hub cannot be reached ({one_line(cause, kind=True)}): try again when it can"
        if status == 412:
            return f"{name} was changed meanwhile: look at it and push again"
        if status >= 400:
            remedy = "try again later" if is_busy(status) else "mend what it names"
            return f"the hub answers with {status} ({words}): {remedy}"
        if str(getattr(cause, "doc", "")).lstrip().startswith("<"):  # a JSONDecodeError's text
            return "something else answers with a page in place of the hub: see HF_ENDPOINT, the proxy and the network"
    return None


def is_busy(status: int) -> bool:
    return status == 429 or status >= 500


def causes_of(error: BaseException | None) -> Iterator[tuple[BaseException, set[str], int]]:
    """Yields an error and its causes, the outermost first, each with its classes' names and the hub's status."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        status = getattr(getattr(error, "response", None), "status_code", 0)
        yield error, {kind.__name__ for kind in type(error).__mro__}, status
        error = error.__cause__ or error.__context__
