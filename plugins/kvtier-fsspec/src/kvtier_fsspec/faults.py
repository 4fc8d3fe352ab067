"""What a client's exception means, in words, and what the operator can do about it.

Clients raise what the libraries below them raise, and those are not always installed: kinds are told by the names of
exception classes, and by the codes that services give. Nothing here decides whether something is a fault, and nothing
masks secrets. Of what a service says no more than its code and its message are told: the rest may repeat a token.
"""

import errno
import re

from kvtier_core import TierOpenError

_PACKAGES = {
    "s3": "'kvtier-fsspec[s3]'",
    "s3a": "'kvtier-fsspec[s3]'",
    "gs": "'kvtier-fsspec[gcs]'",
    "gcs": "'kvtier-fsspec[gcs]'",
    "abfs": "'kvtier-fsspec[azure]'",
    "abfss": "'kvtier-fsspec[azure]'",
    "az": "'kvtier-fsspec[azure]'",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "webdav": "webdav4",
    "hdfs": "pyarrow",
}
_LOCAL = frozenset({"file", "local"})
_DENIED = frozenset(
    {
        "AccessDenied",
        "AuthenticationException",
        "ClientAuthenticationError",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "PermissionDeniedError",
        "SignatureDoesNotMatch",
        "UnauthenticatedError",
        "CredentialRetrievalError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "PermissionError",
        "TokenRetrievalError",
    }
)
_NOT_ALLOWED = frozenset({"AccessDenied", "EROFS", "PermissionError"})
_UNREACHABLE = frozenset(
    {
        "ClientConnectionError",
        "ConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "TimeoutError",
        "gaierror",
    }
)
_ELSEWHERE = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
)
_NO_BUCKET = frozenset({"ContainerNotFound", "NoSuchBucket"})
_NONSENSE = frozenset({"KeyError", "TypeError", "UnknownConfigurationKeyError", "ValueError"})
_NAMELESS = frozenset({"InvalidPathError"})
"""An object whose name begins with a slash: no listing gets past it."""
_ADVICE = (
    (_NO_BUCKET, "create the bucket, or correct its name in url"),
    (_ELSEWHERE, "set region in storage_options to where the bucket is"),
    (
        _DENIED,
        "check the credentials (in storage_options or the environment) and that they may read, write, list and delete",
    ),
    (
        _UNREACHABLE,
        "check that the server runs and that url and storage_options (endpoint_url, host, port) lead to it",
    ),
    (_NAMELESS, "remove that object, or set url to a prefix that is kvtier's alone"),
    (_NONSENSE, "correct url or storage_options"),
)
_CHECK_ALL = "check url, storage_options and the server"

_SAID = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>")
_SAID_OF_ONE = re.compile(r"\(code: (\w+)\)")
"""Of one of many objects that were to be removed."""
_STATUS = re.compile(r"Server returned (?:non-2xx status|error response).{0,40}?(\d{3} [A-Za-z ]+)")
_REQUEST = re.compile(r"Error performing (\w+ https?://[^/\s]+)")
_DETAILS = "\n\nDebug source:"  # behind it obstore shows how its error is made
_CAUSE = re.compile(r'(?:message|error): "([^"]*)"')
_UNREACHED = ("kind: Connect", "kind: Timeout", "kind: Interrupted", "kind: Request")


class StorageError(OSError):
    """A file system could not do what it was asked.

    Its text holds no secret. ``kinds`` are the names of the classes of what the file system raised, and of its errno.
    """

    def __init__(self, text: str, kinds: frozenset[str]) -> None:
        super().__init__(text)
        self.kinds = kinds

    @property
    def may_not_write(self) -> bool:
        """Whether it came because what was asked for is not allowed, or the storage is read-only."""
        return bool(self.kinds & _NOT_ALLOWED)


def words(error: BaseException) -> str:
    """The type and message of *error* in one line; may hold secrets."""
    text, _, details = str(error).partition(_DETAILS)
    request, status = _REQUEST.search(text), _STATUS.search(text)
    what = [status[1].strip()] if status else _CAUSE.findall(details)[-1:]
    if said := _SAID.search(text):
        text = ", ".join([*what, f"{said[1]}: {said[2]}"])
    elif what:
        text = f"{request[1]}: {what[0]}" if request else f"{text}: {what[0]}"
    text = " ".join(text.split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def says_no_bucket(error: Exception) -> bool:
    """Whether an object is not there because its bucket is not."""
    said = _SAID.search(str(error))
    return said is not None and said[1] in _NO_BUCKET


def kinds_of(error: BaseException | None) -> frozenset[str]:
    """The names of all classes of *error* and of what caused it, of their error numbers, and a service's code."""
    kinds: set[str] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kinds.update(cls.__name__ for cls in type(error).__mro__)
        if isinstance(error, OSError) and error.errno is not None:
            kinds.add(errno.errorcode.get(error.errno, ""))
        text = str(error)
        if said := _SAID.search(text) or _SAID_OF_ONE.search(text):
            kinds.add(said[1])
        if any(kind in text.partition(_DETAILS)[2] for kind in _UNREACHED):
            kinds.add("ConnectionError")
        error = error.__cause__ or error.__context__
    return frozenset(kinds)


def open_error(user: str, shown_url: str, error: StorageError, protocol: str) -> TierOpenError:
    """What to raise after *error* where *user*, such as ``tier 'far'``, opens what is there."""
    return TierOpenError(
        f"{user} (kvtier-fsspec): can't use {shown_url}: {error}; {_advice(error, protocol)}"
    )


def _advice(error: StorageError, protocol: str) -> str:
    """What to do so that a tier on *protocol* opens, after *error*."""
    if "ImportError" in error.kinds:
        package = _PACKAGES.get(protocol)
        return f"pip install {package}" if package else f"install the package that speaks {protocol}://"
    if protocol in _LOCAL:
        return "set url to a directory on a writable file system"
    return next((what for kinds, what in _ADVICE if error.kinds & kinds), _CHECK_ALL)
