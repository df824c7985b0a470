"""Uploads exports to the Hugging Face hub."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jrlhf.data.hub import LOST, causes_of, hub_reason, is_busy
from jrlhf.errors import UserError, one_line
from jrlhf.models.hf.directories import CARD, is_foreign_card, is_of_export
from jrlhf.storage.outward import hub_requests

T = TypeVar("T")
_WAITS = (1.0, 4.0)  # seconds before each retry of a failed request
_PATIENCE = 30.0  # seconds after which a failed request is not retried
_NOTHING = "nothing was committed"


def push(directory: Path, name: str, *, private: bool = False, revision: str | None = None) -> str:
    """Uploads the files of an export in one commit, creates the repository if it is missing, and returns its address.

    Files of an earlier export that this one does not have are deleted in the same commit; other files stay. It refuses
    a repository that has files but no card of ours, and a commit if the branch has changed in the meantime. Files that
    were uploaded before an error are not uploaded again, and are not visible until the commit. A branch that holds the
    export already gets no commit; the hub may have made one although its answer was an error.

    name: as `account_name` returns it. private: for a new repository; an existing one must be private already.
    revision: a branch, which is created if it is missing; None: the main branch.
    """
    import huggingface_hub

    hub = huggingface_hub.HfApi(library_name="jrlhf")
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    adds = [huggingface_hub.CommitOperationAdd(path.relative_to(directory).as_posix(), path) for path in paths]
    files, state = {add.path_in_repo for add in adds}, _NOTHING

    def outdated(there: dict[str, Any]) -> list[str]:
        return [file for file in there if is_of_export(file) and file not in files]

    def is_done(there: dict[str, Any]) -> bool:
        return not outdated(there) and _holds(there, adds)

    def upload() -> str:
        nonlocal state
        address = str(hub.create_repo(name, private=private or None, exist_ok=True))
        address = address if revision is None else f"{address}/tree/{revision}"
        head, there = _branch(hub, name, revision)
        if private and not head.private:
            raise UserError(f"--push {name} --private: it is there already and public: make it private on its page")
        ours = CARD in there and not is_foreign_card(Path(hub.hf_hub_download(name, CARD, revision=head.sha)))
        if not ours and (foreign := [file for file in there if file != ".gitattributes"]):
            raise UserError(
                f"--push {name}: it holds {foreign[0]} and no {CARD} of jrlhf, so they are of no export: choose "
                "another name, or delete them there"
            )
        if revision is not None:
            hub.create_branch(name, branch=revision, revision=head.sha, exist_ok=True)
        if is_done(there):
            return address
        operations = [*map(huggingface_hub.CommitOperationDelete, outdated(there)), *adds]
        message = "Upload a model of jrlhf"
        state = "the hub does not say whether it was committed (see its page)"
        try:
            hub.create_commit(name, operations, commit_message=message, revision=revision, parent_commit=head.sha)
        except Exception:
            if not is_done(_branch(hub, name, revision)[1]):
                state = _NOTHING
                raise
        return address

    return _pushing(name, upload, lambda: state)


def _branch(hub: Any, name: str, revision: str | None) -> tuple[Any, dict[str, Any]]:
    """Returns the newest commit of a branch, and its files by name; of the main branch if it is missing."""
    from huggingface_hub import RepoFile
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        head = hub.model_info(name, revision=revision)
    except RevisionNotFoundError:  # a new branch starts from the main one
        head = hub.model_info(name)
    tree = hub.list_repo_tree(name, revision=head.sha, recursive=True)
    return head, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _holds(there: dict[str, Any], adds: list[Any]) -> bool:
    """True if a branch has all files to be added with their content, by its hashes of them."""

    def same(add: Any) -> bool:
        entry = there.get(add.path_in_repo)
        if entry is None or entry.size != add.upload_info.size:
            return False
        if entry.lfs is not None:
            return entry.lfs.sha256 == add.upload_info.sha256.hex()
        content = Path(add.path_or_fileobj).read_bytes()
        return entry.blob_id == hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()  # as git does

    return all(map(same, adds))


def account_name(name: str) -> str:
    """Returns USER/NAME of the repository to write to. Checks the name, and the token with the hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    def check() -> str:
        validate_repo_id(name)
        user = HfApi(library_name="jrlhf").whoami()["name"]
        return name if "/" in name else f"{user}/{name}"

    return _pushing(name, check, lambda: "nothing was exported")


def _pushing(name: str, work: Callable[[], T], state: Callable[[], str]) -> T:
    """Does a part of the work of --push, also at a busy hub. state: says after an error what has been done."""
    with hub_requests():
        try:
            return _patiently(work)
        except UserError:
            raise
        except Exception as error:  # the library's own, of its transports, of the file system
            reason = hub_reason(error, name) or one_line(error, kind=True)
            raise UserError(f"--push {name}: {state()}, because {reason}") from error


def _patiently(work: Callable[[], T]) -> T:
    """Retries if the hub could not be reached or was too busy. The library itself retries only some requests."""
    until = time.monotonic() + _PATIENCE
    for wait in _WAITS:
        try:
            return work()
        except Exception as error:
            causes = list(causes_of(error))
            offline = any("OfflineModeIsEnabled" in kinds for _, kinds, _ in causes)
            passing = any(is_busy(status) or (kinds & LOST and not offline) for _, kinds, status in causes)
            if not passing or time.monotonic() > until:
                raise
            time.sleep(wait)
    return work()
