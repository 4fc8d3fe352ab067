"""What a file system's exception means, in words, and what the operator can do about it.

File systems raise what the libraries below them raise, and those are not always installed: kinds are told by the names
of exception classes. Nothing here decides whether something is a fault, and nothing masks secrets.
"""

import errno

from kvtier_fsspec.settings import OBJECT_STORES

_PACKAGES = {
    "s3": "'kvtier-fsspec[s3]'",
    "s3a": "'kvtier-fsspec[s3]'",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "webdav": "webdav4",
    "hdfs": "pyarrow",
}
_LOCAL = frozenset({"file", "local"})
_DENIED = frozenset(
    {
        "AuthenticationException",
        "ClientAuthenticationError",
        "CredentialRetrievalError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "PermissionError",
        "TokenRetrievalError",
    }
)
_NOT_ALLOWED = frozenset({"PermissionError", "EROFS"})
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
_NONSENSE = frozenset({"BotoCoreError", "KeyError", "TypeError", "ValueError"})
_ADVICE = (
    (
        _DENIED,
        "check the credentials (in storage_options or the environment) and that they may read, write, list and delete",
    ),
    (
        _UNREACHABLE,
        "check that the server runs and that url and storage_options (endpoint_url, host, port) lead to it",
    ),
    (_NONSENSE, "correct url or storage_options"),
)
_CHECK_ALL = "check url, storage_options and the server"


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


def words(error: Exception) -> str:
    """The type and message of *error* in one line; may hold secrets."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def kinds_of(error: BaseException | None) -> frozenset[str]:
    """The names of all classes of *error* and of what caused it, and of their error numbers."""
    kinds: set[str] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kinds.update(cls.__name__ for cls in type(error).__mro__)
        if isinstance(error, OSError) and error.errno is not None:
            kinds.add(errno.errorcode.get(error.errno, ""))
        error = error.__cause__ or error.__context__
    return frozenset(kinds)


def advice(error: StorageError, protocol: str) -> str:
    """What to do so that a tier on *protocol* opens, after *error*."""
    if "ImportError" in error.kinds:
        package = _PACKAGES.get(protocol)
        return f"pip install {package}" if package else f"install the package that speaks {protocol}://"
    if protocol in _LOCAL:
        return "set url to a directory on a writable file system"
    if "FileNotFoundError" in error.kinds and protocol in OBJECT_STORES:
        return "create the bucket, or correct its name in url"
    return next((what for kinds, what in _ADVICE if error.kinds & kinds), _CHECK_ALL)
