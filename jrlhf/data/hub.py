"""The Hugging Face hub: uploads exports, and explains its errors in one sentence."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from jrlhf.errors import UserError, first_line

T = TypeVar("T")
_WAITS = (1.0, 4.0)  # seconds before each retry of a failed request
_LOST = {"TransportError", "ConnectionError", "Timeout"}  # names of connection errors
LOG_IN = "`hf auth login`, or set HF_TOKEN"


def push(directory: Path, name: str, *, private: bool = False, revision: str | None = None) -> str:
    """Uploads the files of an export in one commit, creates the repository if it is missing, and returns its address.

    Files of an earlier export that this one does not have are deleted in the same commit; other files stay. It refuses
    a repository that has files but no card of ours, and a commit if the branch has changed in the meantime. Files that
    were uploaded before an error are not uploaded again, and are not visible until the commit.

    name: as `account_name` returns it. private: for a new repository; an existing one must be private already.
    revision: a branch, which is created if it is missing; None: the main branch.
    """
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    from jrlhf.models.hf.export import is_of_export
    from jrlhf.models.hf.files import CARD, is_foreign_card

    hub = huggingface_hub.HfApi(library_name="jrlhf")

    def upload() -> str:
        address = str(hub.create_repo(name, private=private or None, exist_ok=True))
        head = hub.model_info(name)
        if private and not head.private:
            raise UserError(f"--push {name} --private: it is there already and public: make it private on its page")
        with contextlib.suppress(RevisionNotFoundError):  # a new branch starts from the main one
            head = hub.model_info(name, revision=revision)
        there = hub.list_repo_files(name, revision=head.sha)
        ours = CARD in there and not is_foreign_card(Path(hub.hf_hub_download(name, CARD, revision=head.sha)))
        if not ours and (foreign := [file for file in there if file != ".gitattributes"]):
            raise UserError(
                f"--push {name}: it holds {foreign[0]} and no {CARD} of jrlhf, so they are of no export: choose "
                "another name, or delete them there"
            )
        if revision is not None:
            hub.create_branch(name, branch=revision, revision=head.sha, exist_ok=True)
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = {path.relative_to(directory).as_posix(): path for path in paths}
        old = [file for file in there if is_of_export(file) and file not in files]
        operations = [huggingface_hub.CommitOperationDelete(file) for file in old]
        operations += [huggingface_hub.CommitOperationAdd(file, path) for file, path in files.items()]
        message = "Upload a model of jrlhf"
        hub.create_commit(name, operations, commit_message=message, revision=revision, parent_commit=head.sha)
        return address if revision is None else f"{address}/tree/{revision}"

    return _pushing(name, upload, "nothing was committed")


def account_name(name: str) -> str:
    """Returns USER/NAME of the repository to write to. Checks the name, and the token with the hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    def check() -> str:
        validate_repo_id(name)
        user = HfApi(library_name="jrlhf").whoami()["name"]
        return name if "/" in name else f"{user}/{name}"

    return _pushing(name, check, "nothing was exported")


def hub_reason(error: BaseException, name: str) -> str | None:
    """Returns why the hub refuses to send or accept `name`, and the remedy; None if the error is not the hub's."""
    for cause, kinds, status in _causes(error):
        missing = "DatasetNotFoundError" in kinds  # raised by the library `datasets`, without its cause
        if "GatedRepoError" in kinds or (missing and "gated" in str(cause)):
            return f"{name} is gated: accept its licence on its page, then {LOG_IN}"
        if "HFValidationError" in kinds:
            return f"{name} is no name of the hub: write USER/NAME, with letters, digits, '-', '_' and '.'"
        if "RepositoryNotFoundError" in kinds or missing:
            return f"the hub has no {name} for you: check the name; if it is private, {LOG_IN}"
        if "LocalTokenNotFoundError" in kinds:
            return f"there is no token for the hub: {LOG_IN}, with a token that may write"
        if status == 401:
            return f"the hub does not know the token: {LOG_IN}, with a new one"
        if status == 403:
            return f"the token may not do this with {name}: check the name, or {LOG_IN} with a token that may"
        if "OfflineModeIsEnabled" in kinds:
            return f"HF_HUB_OFFLINE is set and {name} is not whole in the cache: unset it, or bring the cache"
        if kinds & _LOST:
            return f"the hub cannot be reached ({type(cause).__name__}: {first_line(cause)}): try again when it can"
        if status == 412:
            return f"{name} was changed meanwhile: look at it and push again"
        if _is_busy(status):
            return f"the hub answers with {status} ({first_line(cause)}): try again later"
    return None


def _pushing(name: str, work: Callable[[], T], state: str) -> T:
    """Does a part of the work of --push, also at a busy hub. state: what an error has prevented."""
    try:
        return _patiently(work)
    except UserError:
        raise
    except Exception as error:  # the library's own, of its transports, of the file system
        reason = hub_reason(error, name) or f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"--push {name}: {state}, because {reason}") from error


def _patiently(work: Callable[[], T]) -> T:
    """Retries if the hub could not be reached or was too busy. The library itself retries only some requests."""
    for wait in _WAITS:
        try:
            return work()
        except Exception as error:
            causes = list(_causes(error))
            offline = any("OfflineModeIsEnabled" in kinds for _, kinds, _ in causes)
            if not any(_is_busy(status) or (kinds & _LOST and not offline) for _, kinds, status in causes):
                raise
            time.sleep(wait)
    return work()


def _is_busy(status: int) -> bool:
    return status == 429 or status >= 500


def _causes(error: BaseException | None) -> Iterator[tuple[BaseException, set[str], int]]:
    """Yields an error and its causes, the outermost first, each with its classes' names and the hub's status."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        status = getattr(getattr(error, "response", None), "status_code", 0)
        yield error, {kind.__name__ for kind in type(error).__mro__}, status
        error = error.__cause__ or error.__context__
