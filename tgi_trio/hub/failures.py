"""Why something could not be downloaded, in one paragraph that says what to do."""

from __future__ import annotations

from typing import Any, Final

from tgi_trio.errors import tell_reason
from tgi_trio.hub.repository import Repository

# What helps where the hub has answered a request for what it has listed itself, or a list.
_CURES: Final = {
    401: "Set HF_TOKEN to a token that may read it",
    403: "Set HF_TOKEN to a token that may read it",
    404: "It may have changed meanwhile: try again, and look at HF_ENDPOINT",
    429: "It has been asked too often: try again later, or set HF_TOKEN, which allows for more",
}


def explain_failure(error: Exception, repository: Repository) -> str:
    """Return what went wrong with a download, an error of huggingface_hub's, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        return _explain_lack(error, repository)
    of_http: type[Exception] = vars(errors)["HTTPError"]  # of whichever library this version uses
    if isinstance(error, (of_http, errors.HFValidationError)):
        return _explain_refusal(error, repository)
    if isinstance(error, OSError) and error.errno is not None:
        cache = repository.cache_dir or constants.HF_HUB_CACHE
        return (
            f"{repository.name} cannot be kept in {cache}: {tell_reason(error, cache)}. "
            "--huggingface-hub-cache, or HF_HUB_CACHE, names another place"
        )
    if isinstance(error, (ValueError, LookupError)):
        return (
            f"what {constants.ENDPOINT} says of {repository.name} is no answer of a hub "
            f"({tell_reason(error)}): look at HF_ENDPOINT, and at proxies on the way"
        )
    return f"downloading {repository.name} failed: {type(error).__name__}: {error}"


def _explain_refusal(error: Exception, repository: Repository) -> str:
    """Return what an error says that is the hub's, or of the way to it."""
    from huggingface_hub import constants, errors

    name, flag = repository.name, repository.flag
    with_token = "with the token that is set"
    if not repository.token:
        with_token = "without a token (HF_TOKEN is not set)"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub repository {name} is gated and cannot be read {with_token}. Accept its "
            f"terms at {constants.ENDPOINT}/{name}, then set HF_TOKEN to its token"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no hub repository {name} that can be read {with_token}, and no such "
            f"local folder. Check the spelling of {flag}; a private repository needs HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub repository {name} has no revision {repository.revision}: check --revision"
    if isinstance(error, errors.HFValidationError):
        return (
            f"{name!r} is neither a local folder nor the name of a hub repository "
            f"(owner/name): check {flag}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"downloading {name} failed: {type(error).__name__}: {error}"
    return (
        f"downloading {name} from {constants.ENDPOINT} broke off: {tell_reason(error)}. Try again: "
        "files that have come whole are kept"
    )


def _explain_lack(error: Any, repository: Repository) -> str:
    """Return why what the cache lacks did not come, from an error that says it lacks something."""
    from huggingface_hub import constants, errors

    name, flag, cause = repository.name, repository.flag, error.__cause__
    cure = "Connect this machine"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif isinstance(cause, errors.HfHubHTTPError):
        why = f"{constants.ENDPOINT} answered with status {cause.response.status_code}"
        cure = _CURES.get(cause.response.status_code, "Try again later")
    elif "Timeout" in type(cause).__name__:  # of whichever HTTP library it uses
        why = f"{constants.ENDPOINT} does not answer"
        cure = "Try again later, with a higher HF_HUB_ETAG_TIMEOUT (seconds) if it is slow"
    else:
        why = f"{constants.ENDPOINT} cannot be reached"
    otherwise = ""
    if flag == "--model-id":
        otherwise = ", or leave it out to serve the embedded model"
    return (
        f"the cache does not hold all of {name} and it cannot be downloaded: {why}. {cure}, or "
        f"download it on another machine with `python -m tgi_trio download-weights {name}` and "
        f"copy the folder here for {flag}{otherwise}"
    )
